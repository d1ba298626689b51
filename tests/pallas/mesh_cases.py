# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every row of the table on a mesh of four devices: what the compiled program moves between them.

`test_mesh.py` runs it in a Python of its own. The interpreter does not run on several devices, so
the plain form takes the kernel's place: how operands are split, gathered and summed is the same.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.harness import assert_close
from tests.pallas import op_checks as checks
from tpjax.core.operator import Implementation, Op, Sample, parse_spec
from tpjax.pallas import OPS, dispatch
from tpjax.pallas.bench import count_collectives
from tpjax.pallas.partition import dimensions

Assigned = dict[str, tuple[str, ...]]
"""Mesh axes by the dimension that they split."""
AXES = ("a", "b")


class Case(NamedTuple):
    """A row on a mesh whose axes are all of one kind."""

    op: Op
    sample: Sample
    kind: AxisType
    splits: Assigned

    def __str__(self) -> str:
        where = " ".join(f"{name}:{'+'.join(axes)}" for name, axes in self.splits.items())
        return f"{self.op.name} {self.kind.name} {where}"


def letters_of(op: Op, sample: Sample) -> list[str]:
    """Returns the letters that name the dimensions of each of the sample's arrays."""
    known = dict(zip(checks.operand_names(op), op.partitioning.inputs, strict=True))
    return [known[name] for name in op.arguments(sample)]


def named_dimensions(op: Op, sample: Sample) -> list[tuple[str, ...]]:
    """Returns the names of the dimensions of each array; () where there is none."""
    pairs = zip(letters_of(op, sample), checks.shapes_of(sample), strict=True)
    return [
        () if x is None or x.ndim < len(letters) - 1 else dimensions(letters, x.ndim)
        for letters, x in pairs
    ]


def enlarged(op: Op, sample: Sample, often: int = 4) -> Sample:
    """Returns the sample with each dimension that may be split so often as long."""
    letters = set("".join((op.partitioning.sharded, *op.partitioning.alike)))
    specs: list[str | None] = []
    for spec, names in zip(sample.specs, named_dimensions(op, sample), strict=True):
        if spec is None or not names:
            specs.append(spec)
            continue
        shape = parse_spec(spec)[1]
        longer = (
            size * often if name[0] in letters and size > 1 else size
            for name, size in zip(names, shape, strict=True)
        )
        specs.append(f"{spec.split('[')[0]}[{','.join(map(str, longer))}]")
    first = len(sample.arrays)
    named = dict(zip(sample.named, map(str, specs[first:]), strict=True))
    return replace(sample, arrays=tuple(specs[:first]), named=named)


def cases_of(op: Op, samples: Iterable[Sample]) -> Iterator[Case]:
    """Yields the row on a mesh that XLA splits, and on one that the arrays' types split.

    The second has an axis for each of two letters where two may be split. Of the samples, the first
    is taken that has a dimension to split.
    """
    for sample in samples:
        first: dict[str, str] = {}
        dims, shapes = named_dimensions(op, sample), checks.shapes_of(sample)
        operands, arguments = checks.operand_names(op), op.arguments(sample)
        in_order = sorted(range(len(dims)), key=lambda i: operands.index(arguments[i]))
        for i in in_order:
            for name, size in zip(dims[i], getattr(shapes[i], "shape", ()), strict=True):
                if name[0] in op.partitioning.sharded and size > 1:
                    first.setdefault(name[0], name)
        found = list(first.values())
        if found and found[0] in dims[in_order[0]]:
            one: Assigned = {found[0]: AXES}
            several: Assigned = dict(zip(found, ((axis,) for axis in AXES), strict=False))
            for kind, splits in (
                (AxisType.Auto, one),
                (AxisType.Explicit, several if found[1:] else one),
            ):
                for group in op.partitioning.alike:
                    splits = splits | {n: splits[m] for m in group for n in group if m in splits}
                yield Case(op, enlarged(op, sample), kind, splits)
            return


def plain_samples(op: Op) -> Iterator[Sample]:
    """Yields the samples whose plain form runs, with gradients, inside a shard_map."""
    # JAX 0.12 has no derivative of erf there; the kernels bring their own.
    return (s for s in checks.quick_samples(op) if "exact" not in str(s))


def kernel_samples(op: Op) -> Iterator[Sample]:
    """Yields the samples that the row's kernel takes, if it has one."""
    samples = checks.quick_samples(op) if checks.has_kernel(op) else []
    return (s for s in samples if checks.refusal(op, s) is None)


def spec_of(splits: Assigned, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns how an array is split; a dimension of size 1 stays whole."""
    return PartitionSpec(
        *(splits.get(n) if size > 1 else None for n, size in zip(names, shape, strict=True))
    )


def place(case: Case, names: tuple[str, ...], x: Any) -> Any:
    """Returns the array split as the case says, on the mesh in context."""
    if x is None:
        return None
    spec = spec_of(case.splits, names or ("",) * x.ndim, x.shape)
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))


def place_results(case: Case, cotangent: Any) -> tuple[Any]:
    """Returns the results' cotangents split as the case says."""
    leaves, tree = jax.tree.flatten(cotangent)
    pairs = zip(case.op.partitioning.outputs, leaves, strict=False)
    placed = [place(case, dimensions(out, x.ndim), x) for out, x in pairs]
    return (jax.tree.unflatten(tree, placed),)


def mesh_of(case: Case) -> jax.sharding.Mesh:
    """Returns the mesh of four devices."""
    return jax.make_mesh((2, 2), AXES, axis_types=(case.kind,) * 2)


_alone: dict[tuple[str, str], Any] = {}


def on_one_device(op: Op, sample: Sample) -> Any:
    """Returns results and gradients of the plain form."""
    key = (op.name, str(sample))
    if key not in _alone:
        with dispatch.use(implementation="xla"):
            run = jax.jit(checks.with_gradients(op, op.fn, sample))
            _alone[key] = jax.device_get(run(*checks.problem(op, sample)))
    return _alone[key]


def collectives(case: Case) -> dict[str, int]:
    """Returns what the case's program moves between devices, having checked what it computes."""
    op, sample = case.op, case.sample
    cotangent, *arrays = checks.problem(op, sample)
    run, names = checks.with_gradients(op, op.fn, sample), named_dimensions(op, sample)
    want = on_one_device(op, sample)
    with jax.set_mesh(mesh_of(case)), kernel_is_plain():
        given = *place_results(case, cotangent), *map(partial(place, case), names, arrays)
        compiled = jax.jit(run).lower(*given).compile()
        got = compiled(*given)
    tol = 4 * checks.tolerance(op, sample)  # sums over devices are taken in another order
    assert_close(str(case), jax.device_get(got), want, tol)
    return count_collectives(compiled.as_text())


@contextmanager
def kernel_is_plain() -> Iterator[None]:
    """Has the plain form taken for a kernel in the block."""
    choose = dispatch.choose

    def as_kernel(op: str, ways: tuple[Implementation, ...], *_: Any) -> Any:
        del op
        return replace(ways[-1], name="pallas"), ()

    dispatch.choose = as_kernel
    try:
        yield
    finally:
        dispatch.choose = choose


def traced(case: Case) -> str:
    """Returns where the kernels stand that a GPU would run, values and gradients: in a shard_map?

    They are traced and not lowered: `test_ops.py` lowers each, and this is what a mesh may break.
    """
    op, sample = case.op, case.sample
    cotangent, *arrays = checks.problem(op, sample)
    run, names = checks.with_gradients(op, op.fn, sample), named_dimensions(op, sample)
    with jax.set_mesh(mesh_of(case)), dispatch.use(platform="cuda", implementation="pallas"):
        given = *place_results(case, cotangent), *map(partial(place, case), names, arrays)
        jaxpr = str(jax.make_jaxpr(run)(*given))
    outside = jaxpr.partition("shard_map[")[0]
    return "outside" if "mosaic" in outside else "in a shard_map"


def _attempt(check: Callable[[Case], Any], case: Case) -> Any:
    try:
        return check(case)
    except Exception as error:  # the others are looked at all the same
        return f"{type(error).__name__}: {error}"[:2000]


def main(names: list[str]) -> None:
    """Prints for the named rows, all if none is, what each case was found to do, as JSON."""
    found: dict[str, dict[str, Any]] = {}
    for op in OPS:
        if names and op.name not in names:
            continue
        plain = cases_of(op, plain_samples(op))
        kernel = cases_of(op, kernel_samples(op))
        found[op.name] = {
            "moves": {str(case): _attempt(collectives, case) for case in plain},
            "kernel": {str(case): _attempt(traced, case) for case in kernel},
        }
        print(op.name, found[op.name], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
