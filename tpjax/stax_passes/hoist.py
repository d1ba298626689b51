# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Takes out of a scan what is the same at every step.

A carried value that the body hands on unchanged becomes a constant of the scan, scanned rows that
the body returns as they came are the operand itself, and equations that read only constants are
computed once, before the scan. XLA moves some of them too, but after differentiation: by then a
value computed at each step may have been kept for each step.

What costs nothing to repeat stays (broadcasts, iota), and so does what would take more memory than
it saves work: a value larger than what it is computed from, unless much work is in it. A value of
fewer bits than what it is computed from stays too, as its gradient, a sum over all steps, would be
summed in those bits; so does a float16, whose sum may overflow.

The same is done for a jit that is called several times, such as the layers of a Transformer: what
no argument changes is computed before the first call.
"""

import math
from typing import Any

import jax.numpy as jnp

from tpjax.core import _jax, parts
from tpjax.stax_passes.share import APART, FREE
from tpjax.stax_passes.sweep import Atom, Edited, ExactRule, Level, sweeping_pass

MOVES = frozenset({"transpose", "slice", "rev", "copy", "stop_gradient"})
"""Primitives that XLA fuses into what reads them: taken out, the moved copy would be kept too."""

HEAVY = frozenset({
    "dot_general", "conv_general_dilated", "ragged_dot_general", "sort", "top_k", "fft", "cumsum",
    "cumprod", "cummax", "cumlogsumexp", "scan", "while", "custom_vjp_call", "pallas_call",
    "random_bits", "random_seed", "random_fold_in", "random_split", "random_wrap", "threefry2x32",
    "cholesky", "lu", "qr", "eigh", "svd", "triangular_solve",
})  # fmt: skip
"""Primitives whose value is worth keeping whatever its size."""

SLOW = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "logistic", "pow", "erf",
    "erfc", "erf_inv", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh",
    "lgamma", "digamma",
})  # fmt: skip
"""Functions of each element that are worth keeping up to `MAX_HELD` bytes."""

MAX_HELD = 64 * 2**20
"""Bytes up to which a slow elementwise value larger than its operands is kept over the loop."""

MOVED = (
    "the same bits; cotangents of a value taken out are summed before they are multiplied with the "
    "derivative, and not after"
)


class _Hoister:
    """The edit of one level: it knows which calls of one body the level has."""

    def __init__(self, level: Level) -> None:
        called: dict[int, list[_jax.Equation]] = {}
        for eqn in level.jaxpr.eqns:
            if _jax.is_plain_jit(eqn) and not eqn.effects and eqn.outvars:
                called.setdefault(id(eqn.params["jaxpr"]), []).append(eqn)
        self.calls = {eqn.outvars[0]: each for each in called.values() if each[1:] for eqn in each}
        """By the first result of a call, all calls of its body."""
        self.done: dict[int, tuple[_jax.Jaxpr, list[Atom]]] = {}
        """By body as it was, the smaller one and the operands that it has more."""

    def __call__(self, level: Level, eqn: _jax.Equation) -> Edited:
        if eqn.outvars and eqn.outvars[0] in self.calls:
            return self._call(level, eqn, self.calls[eqn.outvars[0]])
        if eqn.primitive.name == "scan" and eqn.params["length"] and _is_pure(eqn):
            return _scan(level, eqn)
        return eqn

    def _call(self, level: Level, eqn: _jax.Equation, calls: list[_jax.Equation]) -> Edited:
        """Takes out of the body of several calls what is the same in all of them."""
        key, before = id(calls[0].params["jaxpr"]), list[_jax.Equation]()
        if key not in self.done:
            body = eqn.params["jaxpr"]
            operands = zip(*(one.invars for one in calls), strict=True)
            fixed = [all(isinstance(v, _jax.Var) and v is a[0] for v in a) for a in operands]
            pairs = zip(body.invars, eqn.invars, fixed, strict=True)
            outside: dict[_jax.Var, Atom] = {inner: v for inner, v, same in pairs if same}
            same = _Invariants(body, set(outside))
            exported = same.worth_keeping()
            before = parts.copied([body.eqns[i] for i in same.makers(exported)], outside)
            if exported:
                level.log.hit("call_invariant", eqn)
                every = [True] * len(body.invars), [True] * len(body.outvars)
                body = parts.narrowed(body, same.remaining(set(exported)), *every)
                body = parts.with_inputs(body, 0, exported)
            self.done[key] = body, [outside[var] for var in exported]
        body, more = self.done[key]
        return [*before, parts.with_operands(eqn, body, more)] if more else eqn


def _scan(level: Level, eqn: _jax.Equation) -> Edited:
    _hand_on_rows(level, eqn)
    loop = _Loop(eqn)
    before = loop.take_out()
    if before:
        level.log.hit("loop_invariant", eqn)
    for var, atom in loop.handed_on():
        level.log.hit("carry_handed_on", eqn)
        level.replace(var, atom)
    return [*before, loop.equation()] if loop.more else eqn


def _is_pure(eqn: _jax.Equation) -> bool:
    """Whether no step reads what an earlier one may have written."""
    return not _jax.must_stay(eqn) and not eqn.effects


def _hand_on_rows(level: Level, eqn: _jax.Equation) -> None:
    """Lets readers of stacked results that are the scanned operand read that."""
    body = _jax.subjaxprs(eqn)[0]
    consts, carry = _jax.loop_parts(eqn)
    rows = dict(zip(body.invars[consts + carry :], eqn.invars[consts + carry :], strict=True))
    for row, var in zip(body.outvars[carry:], eqn.outvars[carry:], strict=True):
        atom = None if isinstance(row, _jax.Literal) else rows.get(row)
        if atom is not None and atom.aval is var.aval and level.uses(var):
            level.log.hit("rows_handed_on", eqn)
            level.replace(var, atom)


class _Loop:
    """A scan whose constants grow by what its body need not compute or carry."""

    def __init__(self, eqn: _jax.Equation) -> None:
        self.eqn, self.body = eqn, _jax.subjaxprs(eqn)[0]
        self.consts, self.carry = _jax.loop_parts(eqn)
        carried = slice(self.consts, self.consts + self.carry)
        self.fixed = [
            inside is result and outside.aval is before.aval
            for inside, result, before, outside in zip(
                self.body.invars[carried],
                self.body.outvars,
                eqn.invars[carried],
                eqn.outvars,
                strict=False,
            )
        ]
        self.outside: dict[_jax.Var, Atom] = dict(
            zip(self.body.invars[: self.consts], eqn.invars, strict=False)
        )
        """What stands before the scan for a value of the body that is the same at every step."""
        self.more: list[_jax.Var] = []
        """Values of the body that become constants."""
        for i in self._marked():
            self.outside[self.body.invars[self.consts + i]] = eqn.invars[self.consts + i]
            self.more.append(self.body.invars[self.consts + i])
        self.eqns = list(self.body.eqns)

    def _marked(self) -> list[int]:
        return [i for i, fixed in enumerate(self.fixed) if fixed]

    def handed_on(self) -> list[tuple[_jax.Var, Atom]]:
        """Returns the results that are their first value, and that value."""
        return [(self.eqn.outvars[i], self.eqn.invars[self.consts + i]) for i in self._marked()]

    def take_out(self) -> list[_jax.Equation]:
        """Moves equations out of the body; returns them for the values before the scan."""
        same = _Invariants(self.body, set(self.outside))
        exported = same.worth_keeping()
        if not exported:
            return []
        moved = same.makers(exported)
        copies = parts.copied([self.eqns[i] for i in moved], self.outside)
        self.more.extend(exported)
        self.eqns = same.remaining(set(exported))
        return copies

    def equation(self) -> _jax.Equation:
        """Returns the scan with its new constants, and without the carried values among them."""
        first = self.consts + self.carry
        keep = [not fixed for fixed in self.fixed]
        ins = [True] * self.consts + keep + [True] * (len(self.eqn.invars) - first)
        outs = keep + [True] * (len(self.eqn.outvars) - self.carry)
        body = parts.narrowed(self.body, self.eqns, ins, outs)
        body = parts.with_inputs(body, self.consts, self.more)
        eqn = parts.narrowed_call(self.eqn, [body], ins, outs)
        operands = [self.outside[var] for var in self.more]
        return eqn.replace(
            invars=[*eqn.invars[: self.consts], *operands, *eqn.invars[self.consts :]],
            params=_jax.with_more_constants(eqn, len(operands)),
        )


class _Invariants:
    """What of a body is the same at every step, and what of that to compute before the loop."""

    def __init__(self, body: _jax.Jaxpr, fixed: set[_jax.Var]) -> None:
        self.body = body
        self.leaves: dict[_jax.Var, frozenset[_jax.Var]] = {var: frozenset([var]) for var in fixed}
        """The constants of the loop that an invariant value is computed from."""
        self.effort: dict[_jax.Var, str] = {}
        """By invariant value: "heavy" or "slow" where such work is in it."""
        self.made: dict[_jax.Var, int] = {}
        self.same: set[int] = set()
        """Equations that are the same at every step."""
        self.read: set[_jax.Var] = {v for v in body.outvars if isinstance(v, _jax.Var)}
        """Values that what stays in the body reads."""
        for i, eqn in enumerate(body.eqns):
            if self._moves(eqn):
                self._note(i, eqn)
            else:
                self.read.update(v for v in eqn.invars if isinstance(v, _jax.Var))

    def _moves(self, eqn: _jax.Equation) -> bool:
        if eqn.effects or _jax.must_stay(eqn) or eqn.primitive.name in APART:
            return False
        return all(isinstance(v, _jax.Literal) or v in self.leaves for v in eqn.invars)

    def _note(self, i: int, eqn: _jax.Equation) -> None:
        self.same.add(i)
        operands = [v for v in eqn.invars if isinstance(v, _jax.Var)]
        leaves = frozenset[_jax.Var]().union(*(self.leaves[v] for v in operands))
        names = names_in(eqn)
        efforts = {self.effort.get(v, "") for v in operands}
        efforts |= {"heavy"} if names & HEAVY else {"slow"} if names & SLOW else set()
        for var in eqn.outvars:
            self.leaves[var], self.made[var] = leaves, i
            self.effort[var] = next((e for e in ("heavy", "slow") if e in efforts), "")

    def worth_keeping(self) -> list[_jax.Var]:
        """Returns the values to hand to the loop; what else it needs of them it computes itself."""
        exported: dict[_jax.Var, None] = {}
        for i in sorted(self.same, reverse=True):
            eqn = self.body.eqns[i]
            wanted = [var for var in eqn.outvars if var in self.read]
            if not wanted:
                continue
            if eqn.primitive.name not in FREE | MOVES and all(map(self._is_worth, wanted)):
                exported.update(dict.fromkeys(wanted))
            else:
                self.read.update(v for v in eqn.invars if isinstance(v, _jax.Var))
        return list(exported)[::-1]

    def _is_worth(self, var: _jax.Var) -> bool:
        if any(_digits(leaf.aval) > _digits(var.aval) for leaf in self.leaves[var]):
            return False
        if is_short_range(var.aval):
            return False
        if not all(_jax.has_size(v.aval) for v in (var, *self.leaves[var])):
            return False
        size = nbytes(var.aval)
        if size <= sum(nbytes(leaf.aval) for leaf in self.leaves[var]):
            return True
        effort = self.effort[var]
        return effort == "heavy" or (effort == "slow" and size <= MAX_HELD)

    def remaining(self, exported: set[_jax.Var]) -> list[_jax.Equation]:
        """Returns the body's equations without those that the loop is handed, or nothing reads."""

        def stays(i: int, eqn: _jax.Equation) -> bool:
            if i not in self.same:
                return True
            return any(v in self.read and v not in exported for v in eqn.outvars)

        return [eqn for i, eqn in enumerate(self.body.eqns) if stays(i, eqn)]

    def makers(self, values: list[_jax.Var]) -> list[int]:
        """Returns the equations, in order, that the values need."""
        needed, stack = set[int](), [v for v in values if v in self.made]
        while stack:
            i = self.made[stack.pop()]
            if i not in needed:
                needed.add(i)
                operands = self.body.eqns[i].invars
                stack.extend(v for v in operands if isinstance(v, _jax.Var) and v in self.made)
        return sorted(needed)


def nbytes(aval: Any) -> int:
    """Returns the bytes of an array; of keys and the like, as if they were 32 bits."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


def is_short_range(aval: Any) -> bool:
    """Returns whether a sum of cotangents of this type may overflow where its terms do not."""
    return jnp.issubdtype(aval.dtype, jnp.floating) and jnp.finfo(aval.dtype).maxexp < 128


def _digits(aval: Any) -> int:
    """Returns the bits of a float's mantissa; 0 if the value has no gradient, or is complex."""
    return jnp.finfo(aval.dtype).nmant if jnp.issubdtype(aval.dtype, jnp.floating) else 0


def names_in(eqn: _jax.Equation) -> set[str]:
    """Returns the names of the equation's primitive and of all in its bodies."""
    names, stack = {eqn.primitive.name}, _jax.all_subjaxprs(eqn)
    while stack:
        for inner in stack.pop().eqns:
            names.add(inner.primitive.name)
            stack.extend(_jax.all_subjaxprs(inner))
    return names


hoist_invariants = sweeping_pass(
    "hoist_invariants",
    "Takes out of a scan what is the same at every step, out of calls what is in all of them.",
    _Hoister,
    (
        ExactRule("loop_invariant", None, MOVED),
        ExactRule("call_invariant", None, MOVED),
        ExactRule("carry_handed_on", None, MOVED),
        ExactRule("rows_handed_on", None, MOVED),
    ),
)
