# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a fault to a Python file that runs by itself: JAX and NumPy, the values, both programs.

The programs are those of the place alone, lowered (`jax.export`), so the file needs neither the
user's code nor tpjax. It is made smaller where the fault allows: to one element of the leading
axis. It exits 1 while the programs differ by more than the contract allows, else 0.
"""

import base64
import itertools
import re
import tempfile
import textwrap
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from tpjax.core import _jax
from tpjax.stax.verification.compare import Gap, gap, host
from tpjax.stax.verification.evaluation import environment, read, run_equation
from tpjax.stax.verification.faults import Fault, differs, printed
from tpjax.stax_passes.graph import MARKS_VARYING

MAX_BYTES = 2**28
"""Bytes of the operands of the largest reproducer."""
WIDTH = 96


def write(name: str, fault: Fault, folder: str | Path | None) -> tuple[str | None, str]:
    """Writes the reproducer; returns its path and a note, or None and why there is none.

    Args:
      name: the function's, for the file's name.
      fault: what to show.
      folder: where; None: a new temporary folder.
    """
    try:
        if any(eqn.primitive.name == "shard_map" for eqn in fault.before.eqns):
            return None, "the place is a whole shard_map, which needs its devices"
        less = smaller(fault)
        size = sum(host(x).nbytes for x in less.values)
        if size > MAX_BYTES:
            return None, f"the operands take {size / 2**20:.0f} MiB"
        text, note = _text(name, less)
        where = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="tpjax-"))
        where.mkdir(parents=True, exist_ok=True)
        path = _unused(where, re.sub(r"\W+", "_", f"{name}_{fault.rule}").strip("_"))
        path.write_text(text)
    except Exception as error:  # a full disk, a program that cannot be lowered: the call goes on
        return None, f"none could be written: {type(error).__name__}: {error}"
    return str(path), note


def _unused(folder: Path, words: str) -> Path:
    """Returns the path of a file that is not there yet."""
    names = (f"differs_{words}{f'_{i}' if i > 1 else ''}.py" for i in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


# -- smaller --------------------------------------------------------------------------------------

_SIZES = ("shape", "new_sizes", "limit_indices", "slice_sizes")
"""Parameters of primitives in which the length of the leading axis stands first."""


def smaller(fault: Fault) -> Fault:
    """Returns the fault on one element of the leading axis, if it shows there; else as it is."""
    shape = getattr(fault.before.outvars[0].aval, "shape", ())
    if len(fault.before.outvars) != 1 or not shape or shape[0] < 2:
        return fault
    at = fault.gap.index[0] if fault.gap.index else 0

    def cut(x: Any) -> Any:
        lead = getattr(jax.typeof(x), "shape", ())[:1]
        return x[at : at + 1] if lead == shape[:1] else x

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(fault.before.constvars, fault.before.consts, strict=True))
        env.update(zip(fault.before.invars, args, strict=True))
        for eqn in fault.before.eqns:
            ins = [a.val if isinstance(a, _jax.Literal) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, run_equation(_narrow(eqn, shape[0]), ins), strict=True))
        return [env[v] for v in fault.before.outvars]

    try:
        values = [cut(x) for x in fault.values]
        before = jax.make_jaxpr(run)(*values)
        after = fault.run(before)[0]
        found = None if after is before else differs(after, before, values, fault.tol)
    except Exception:  # an axis that cannot be cut: the fault stays as large as it is
        return fault
    if found is None:
        return fault
    made = Fault(**(vars(fault) | {"gap": found, "before": before, "after": after}))
    made.values = values
    return made


def _narrow(eqn: _jax.Equation, length: int) -> _jax.Equation:
    if _jax.subjaxprs(eqn):
        raise ValueError("a body has a shape of its own")
    params = dict(eqn.params)
    for key in _SIZES:
        sizes = params.get(key)
        if isinstance(sizes, tuple) and sizes[:1] == (length,):
            params[key] = (1, *sizes[1:])
    return eqn.replace(params=params)


# -- the file -------------------------------------------------------------------------------------


def _text(name: str, fault: Fault) -> tuple[str, str]:
    """Returns the file's text, and a note where it shows less than was seen."""
    raw = [_raw(x) for x in fault.values]
    programs = [_lowered(p, fault.values) for p in (fault.before, fault.after)]
    note = ""
    if _compiled_gap(programs, raw, fault.tol) is None:
        note = "It shows only equation by equation: compiled as a whole, the two sides agree."
    eqn = fault.eqn
    words = {
        "NAME": name,
        "RULE": fault.rule,
        "EQUATION": "a result" if eqn is None else printed(eqn),
        "SOURCE": "unknown" if eqn is None else _jax.source_of(eqn),
        "WHERE": fault.where or "the function itself",
        "DETAIL": fault.gap.text,
        "NOTE": note,
        "PLATFORM": _platform(),
        "X64": str(any("64" in dtype for dtype, _, _ in raw)),
        "TOL": repr(fault.tol),
        "OPERANDS": "".join(
            f"    ({dtype!r}, {shape!r}, {_packed(data, 8)}),\n" for dtype, shape, data in raw
        ),
        "BEFORE": _source_of(programs[0]),
        "AFTER": _source_of(programs[1]),
        "CONVENTION": str(programs[0].calling_convention_version),
        "JAX": jax.__version__,
        "BEFORE_JAXPR": _comment(str(fault.before)),
        "AFTER_JAXPR": _comment(str(fault.after)),
    }
    text = _TEMPLATE
    for key, value in words.items():
        text = text.replace(f"<{key}>", value)
    compile(text, "reproducer", "exec")
    return text, note


def _raw(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.ascontiguousarray(host(x))
    return str(array.dtype), tuple(np.shape(host(x))), array.tobytes()


def _platform() -> str:
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _lowered(jaxpr: _jax.Jaxpr, values: list[Any]) -> Any:
    """Returns the program exported for one device, with keys as the integers they hold."""

    def run(*raw: Any) -> list[Any]:
        args = [
            jax.random.wrap_key_data(r, impl=jax.random.key_impl(x)) if _holds_keys(x) else r
            for r, x in zip(raw, values, strict=True)
        ]
        outs = _without_mesh(jaxpr, args)
        return [jax.random.key_data(x) if _holds_keys(x) else x for x in outs]

    jitted, avals = jax.jit(run), [_aval(x) for x in values]
    with _one_device():
        targets = set(re.findall(r"custom_call @([\w.$]+)", jitted.lower(*avals).as_text()))
        allowed = [export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
        exported = export.export(jitted, disabled_checks=allowed)(*avals)
    if exported.nr_devices != 1:
        raise ValueError(f"the place spans {exported.nr_devices} devices")
    return exported


def _one_device() -> Any:
    """Returns a context of one device where a mesh of several is in context."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(jax.make_mesh((1,), ("alone",), devices=jax.devices()[:1]))


def _without_mesh(jaxpr: _jax.Jaxpr, args: list[Any]) -> list[Any]:
    """Returns the results, the equations' own contexts, which hold a mesh, left out."""
    env = environment(jaxpr, args)
    for eqn in jaxpr.eqns:
        ins = [read(env, atom) for atom in eqn.invars]
        if eqn.primitive.name in MARKS_VARYING:
            env.update(zip(eqn.outvars, ins, strict=True))
            continue
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def _holds_keys(x: Any) -> bool:
    return _jax.is_key(jax.typeof(x))


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    array = host(x)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _compiled_gap(
    programs: list[Any], raw: list[tuple[str, tuple[int, ...], bytes]], tol: float | None
) -> Gap | None:
    args = [jnp.asarray(np.frombuffer(d, jnp.dtype(t)).reshape(s)) for t, s, d in raw]
    before, after = (program.call(*args) for program in programs)
    gaps = (gap(a, e, tol) for a, e in zip(after, before, strict=True))
    return next((found for found in gaps if found is not None), None)


def _source_of(program: Any) -> str:
    """Returns an exported program as Python: which operands it reads, its results, its code."""
    results = [(str(aval.dtype), tuple(aval.shape)) for aval in program.out_avals]
    code = _packed(program.mlir_module_serialized, 8)
    return f"(\n    {program.module_kept_var_idx!r},\n    {results!r},\n    {code},\n)"


def _packed(data: bytes, indent: int) -> str:
    """Returns the bytes, compressed, as a Python string over several lines."""
    lines = textwrap.wrap(base64.b64encode(zlib.compress(data, 9)).decode(), WIDTH - indent)
    pad = " " * indent
    return "(\n" + "".join(f'{pad}"{line}"\n' for line in lines) + " " * (indent - 4) + ")"


def _comment(text: str) -> str:
    return "\n".join(f"#   {line}".rstrip() for line in text.splitlines())


_TEMPLATE = '''"""<RULE> changes a value in <NAME>.

Equation: <EQUATION>
Source:   <SOURCE>
Where:    <WHERE>
Seen:     <DETAIL>
<NOTE>
Written by JAX <JAX>. Run it: exit code 1 while the programs below differ by more than TOL, else 0.
"""

import base64
import os
import sys
import zlib

os.environ.setdefault("JAX_PLATFORMS", "<PLATFORM>")

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

jax.config.update("jax_enable_x64", <X64>)

# Relative root mean square error that is allowed; None: every bit.
TOL = <TOL>

OPERANDS = [
<OPERANDS>]

# The original:
#
<BEFORE_JAXPR>
ORIGINAL = <BEFORE>

# What stands there now:
#
<AFTER_JAXPR>
REPLACEMENT = <AFTER>


def array(dtype, shape, data):
    data = zlib.decompress(base64.b64decode(data))
    return jnp.asarray(np.frombuffer(data, jnp.dtype(dtype)).reshape(shape))


def run(program, operands):
    kept, results, code = program
    outs = [jnp.zeros(shape, dtype) for dtype, shape in results]
    exported = export.Exported(
        fun_name="program",
        in_tree=jax.tree.structure((tuple(operands), {})),
        in_avals=tuple(map(jax.typeof, operands)),
        out_tree=jax.tree.structure(outs),
        out_avals=tuple(map(jax.typeof, outs)),
        _in_named_shardings=(None,) * len(operands),
        _out_named_shardings=(None,) * len(outs),
        in_shardings_hlo=(None,) * len(operands),
        out_shardings_hlo=(None,) * len(outs),
        nr_devices=1,
        platforms=("<PLATFORM>",),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=zlib.decompress(base64.b64decode(code)),
        calling_convention_version=<CONVENTION>,
        module_kept_var_idx=kept,
        uses_global_constants=False,
        _get_vjp=None,
    )
    return [np.asarray(x) for x in exported.call(*operands)]


def differ(a, e):
    if not jnp.issubdtype(e.dtype, jnp.inexact):
        return a != e
    wide = np.complex128 if jnp.issubdtype(e.dtype, jnp.complexfloating) else np.float64
    if TOL is None:
        same = (a == e) & (np.signbit(a.real) == np.signbit(e.real))
        same &= np.signbit(a.imag) == np.signbit(e.imag)
        return ~(same | (np.isnan(a.astype(wide)) & np.isnan(e.astype(wide))))
    a, e = a.astype(wide), e.astype(wide)
    finite = np.isfinite(e)
    with np.errstate(invalid="ignore"):
        misplaced = (np.isnan(a) != np.isnan(e)) | (~finite & ~np.isnan(e) & (a != e))
        error = np.where(finite, np.abs(a - e), 0.0)
    size = np.where(finite, np.abs(e), 0.0)
    scale = np.sqrt(np.mean(size**2))
    if np.sqrt(np.mean(error**2)) > TOL * scale:
        return misplaced | (error == error.max())
    return misplaced | (error > 32 * TOL * np.maximum(size, scale))


def main():
    operands = [array(*operand) for operand in OPERANDS]
    pairs = zip(run(REPLACEMENT, operands), run(ORIGINAL, operands), strict=True)
    for number, (a, e) in enumerate(pairs):
        wrong = np.asarray(differ(a, e)) if e.size else np.zeros(e.shape, bool)
        if wrong.any():
            at = np.unravel_index(np.argmax(wrong), wrong.shape)
            at = tuple(int(i) for i in at)
            print(f"result {number} at {list(at)}: {a[at]} instead of {e[at]}")
            return 1
    print("no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''
