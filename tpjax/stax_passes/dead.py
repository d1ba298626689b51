# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Drops what nothing reads: equations, results and operands of calls and loops, constants.

Equations that print, call back, check, write to a reference or are ordered stay, in their order; so
does what they read. A loop keeps the carried values that its results, its condition or its effects
need.
"""

from operator import or_
from typing import Any

from tpjax.core import _jax, parts
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.sweep import ExactRule, Log

Flags = tuple[bool, ...]
_RULES = (ExactRule("dead_code", None), ExactRule("unused_operand_or_result", None))


def drop_dead_code(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
    """Drops equations whose results nothing reads, and the unused results and operands of calls."""
    log = Log(_RULES)
    every_in, every_out = (True,) * len(jaxpr.invars), (True,) * len(jaxpr.outvars)
    result = _Dropper(log).keep(jaxpr, every_in, every_out)
    return result, log.report("drop_dead_code", jaxpr, result)


drop_dead_code.exact_rules = _RULES  # pyright: ignore[reportFunctionMemberAccess]


def _either(a: Flags, b: Flags) -> Flags:
    return tuple(map(or_, a, b))


class _Dropper:
    """Finds what each body needs for which of its results; answers are kept by identity."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.needed: dict[Any, tuple[_jax.Jaxpr, Flags]] = {}
        self.kept: dict[Any, tuple[_jax.Jaxpr, _jax.Jaxpr]] = {}

    # -- what is needed ---------------------------------------------------------------------------

    def needs(self, jaxpr: _jax.Jaxpr, outs: Flags) -> Flags:
        """Returns which inputs the marked results, and the effects, need."""
        key = (id(jaxpr), outs)
        if key not in self.needed:
            read = self._read(jaxpr, outs)
            self.needed[key] = (jaxpr, tuple(v in read for v in jaxpr.invars))
        return self.needed[key][1]

    def _read(self, jaxpr: _jax.Jaxpr, outs: Flags) -> set[_jax.Var]:
        """Returns the variables of the level that the marked results, and the effects, need."""
        read = _variables(jaxpr.outvars, outs)
        for eqn in reversed(jaxpr.eqns):
            wanted = tuple(v in read for v in eqn.outvars)
            if any(wanted) or _jax.must_stay(eqn):
                _, ins = self.call_needs(eqn, wanted)
                read |= _variables(eqn.invars, ins)
        return read

    def call_needs(self, eqn: _jax.Equation, outs: Flags) -> tuple[Flags, Flags]:
        """Returns which results an equation must keep for the marked ones, and which operands."""
        bodies = _jax.subjaxprs(eqn)
        if not bodies:
            return (True,) * len(eqn.outvars), (True,) * len(eqn.invars)
        name = eqn.primitive.name
        if name == "scan":
            outs, ins = self._scan_needs(eqn, bodies[0], outs)
        elif name == "while":
            outs, ins = self._while_needs(eqn, bodies[0], bodies[1], outs)
        elif name == "cond":
            ins = (False,) * len(bodies[0].invars)
            for body in bodies:
                ins = _either(ins, self.needs(body, outs))
            ins = (True, *ins)
        else:
            ins = self.needs(bodies[0], outs)
        return outs, _either(ins, _fixed(eqn))

    def _scan_needs(self, eqn: _jax.Equation, body: _jax.Jaxpr, outs: Flags) -> tuple[Flags, Flags]:
        consts, carry = _jax.loop_parts(eqn)
        fixed = _fixed(eqn)[consts : consts + carry]
        outs = _either(outs, fixed + (False,) * (len(outs) - carry))
        while True:
            ins = self.needs(body, outs)
            wider = _either(outs[:carry], ins[consts : consts + carry]) + outs[carry:]
            if wider == outs:
                return outs, ins[:consts] + outs[:carry] + ins[consts + carry :]
            outs = wider

    def _while_needs(
        self, eqn: _jax.Equation, cond: _jax.Jaxpr, body: _jax.Jaxpr, outs: Flags
    ) -> tuple[Flags, Flags]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_ins = self.needs(cond, (True,))
        outs = _either(outs, cond_ins[num_cond:])
        outs = _either(outs, _fixed(eqn)[num_cond + num_body :])
        while True:
            body_ins = self.needs(body, outs)
            wider = _either(outs, body_ins[num_body:])
            if wider == outs:
                return outs, cond_ins[:num_cond] + body_ins[:num_body] + outs
            outs = wider

    # -- what is left -----------------------------------------------------------------------------

    def keep(self, jaxpr: _jax.Jaxpr, ins: Flags, outs: Flags) -> _jax.Jaxpr:
        """Returns the jaxpr with the marked inputs and results, and only what they need."""
        key = (id(jaxpr), ins, outs)
        if key not in self.kept:
            self.kept[key] = (jaxpr, self._keep(jaxpr, ins, outs))
        return self.kept[key][1]

    def _keep(self, jaxpr: _jax.Jaxpr, ins: Flags, outs: Flags) -> _jax.Jaxpr:
        read = _variables(jaxpr.outvars, outs)
        eqns: list[_jax.Equation] = []
        for eqn in reversed(jaxpr.eqns):
            wanted = tuple(v in read for v in eqn.outvars)
            if not any(wanted) and not _jax.must_stay(eqn):
                self.log.hit("dead_code", eqn)
                continue
            kept_outs, kept_ins = self.call_needs(eqn, wanted)
            eqns.append(self._keep_call(eqn, kept_ins, kept_outs))
            read |= _variables(eqn.invars, kept_ins)
        eqns.reverse()
        same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=False))
        same = same and len(eqns) == len(jaxpr.eqns) and all(ins) and all(outs)
        if same and read.union(_jax.named_by_effects(jaxpr)).issuperset(jaxpr.constvars):
            return jaxpr
        return parts.narrowed(jaxpr, eqns, list(ins), list(outs))

    def _keep_call(self, eqn: _jax.Equation, ins: Flags, outs: Flags) -> _jax.Equation:
        bodies = _jax.subjaxprs(eqn)
        if not bodies:
            return eqn
        name = eqn.primitive.name
        if name == "while":
            num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = ins[num_cond + num_body :]
            sides = [(ins[:num_cond] + carry, (True,)), (ins[num_cond:], outs)]
        elif name == "cond":
            sides = [(ins[1:], outs)] * len(bodies)
        else:
            sides = [(ins, outs)]
        new = [self.keep(body, *side) for body, side in zip(bodies, sides, strict=True)]
        if all(a is b for a, b in zip(new, bodies, strict=True)) and all(ins) and all(outs):
            return eqn
        if not (all(ins) and all(outs)):
            self.log.hit("unused_operand_or_result", eqn)
        return parts.narrowed_call(eqn, new, list(ins), list(outs))


def _variables(atoms: list[Any], marks: Flags) -> set[_jax.Var]:
    return {a for a, mark in zip(atoms, marks, strict=True) if mark and isinstance(a, _jax.Var)}


def _fixed(eqn: _jax.Equation) -> Flags:
    """Returns which operands must stay: references, tokens, and buffers given away."""
    fixed = [not _jax.is_array(atom.aval) for atom in eqn.invars]
    if eqn.primitive.name in ("jit", "pjit"):
        keep_all = eqn.params.get("keep_unused", False)
        donated = eqn.params["donated_invars"]
        fixed = [f or d or keep_all for f, d in zip(fixed, donated, strict=True)]
    return tuple(fixed)
