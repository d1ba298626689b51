# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every use of Mosaic GPU (JAX's kernel language for NVIDIA GPUs), behind names that do not move.

The one module among the kernels that may touch JAX internals; tested on JAX 0.11.2 and 0.12.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, TiledLayout, Tiling
from jax.extend.core import jaxpr_as_fun

from tpjax.core.errors import message
from tpjax.core.operator import Interpret


def interpret_params(interpret: Interpret, warpgroups: int = 1) -> Any:
    """Returns the `interpret=` argument of `plgpu.kernel` for a `Target.interpret` value.

    Args:
      interpret: whether and how to interpret.
      warpgroups: how many wait for one another. In the interpreter a waiting one holds a thread of
        JAX's CPU pool, and where there are too few of those it hangs.

    Raises:
      RuntimeError: it would hang.
    """
    if not interpret:
        return None
    threads = int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))
    if 1 < warpgroups >= threads:
        must = f"run with at least {warpgroups + 1} CPU threads for this kernel"
        remedy = "Set the environment variable NPROC=8 before JAX starts."
        raise RuntimeError(message("use", "interpret", must, threads, remedy))
    return plgpu.InterpretGPUParams(detect_races=interpret == "races")


class _InRegisters:
    """A sum of matrix products held as a value: what the interpreter can do."""

    def __init__(self, value: Any):
        self._value = value

    def add(self, a: Any, b: Any) -> None:
        """Adds `a @ b`; either may be a reference."""
        a, b = a[...], b[...]
        plgpu.commit_smem()  # These reads end before a copy may overwrite what they read.
        self._value = self._value + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def value(self, pending: int = 0) -> Any:
        """Returns the sum."""
        del pending
        return self._value


class _OnTensorCore:
    """A sum of matrix products that the tensor cores accumulate in place."""

    def __init__(self, ref: Any):
        self._ref = ref

    def add(self, a: Any, b: Any) -> None:
        """Starts adding `a @ b`: `a` in registers or shared memory, `b` in shared memory."""
        plgpu.wgmma(self._ref, a, b)

    def value(self, pending: int = 0) -> Any:
        """Waits until at most `pending` started products are unfinished; returns the sum."""
        value = plgpu.wgmma_accumulator_load(self._ref, wait_n=pending)
        # Without this nothing tells the compiler that arithmetic may not move above the wait.
        return lax.optimization_barrier(value) if pending else value


Accumulator = _InRegisters | _OnTensorCore


def accumulate(
    body: Callable[..., Any],
    sums: Sequence[jax.Array],
    state: Any,
    *,
    fresh: Sequence[tuple[int, int]],
    interpret: Interpret,
) -> tuple[list[jax.Array], Any]:
    """Runs `body` with matrix products in flight, and returns the sums and what `body` returned.

    `body(sums, fresh, state)` gets accumulators that start at `sums`, others of the shapes `fresh`
    that start at zero, and `state`, and returns a new state of the same types. On a GPU products
    are asynchronous: they run until someone asks for a value, at the latest until this returns. The
    interpreter knows no products with operands in registers, so there they are done at once.
    """
    if interpret:
        old = [_InRegisters(x) for x in sums]
        zeros = [_InRegisters(jnp.zeros(shape, jnp.float32)) for shape in fresh]
        state = body(old, zeros, state)
        return [x.value() for x in old], state

    def run(refs: Any) -> None:
        sum_refs, state_refs = refs

        def inner(*fresh_refs: Any) -> None:
            values = jax.tree.map(lambda r: r[...], state_refs)
            new = body(
                [_OnTensorCore(r) for r in sum_refs], [_OnTensorCore(r) for r in fresh_refs], values
            )
            for ref, x in zip(jax.tree.leaves(state_refs), jax.tree.leaves(new), strict=True):
                ref[...] = x

        pl.run_scoped(inner, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in fresh))

    started: list[Any] = [plgpu.WGMMAAccumulatorRef.init(x) for x in sums]
    finished, state = pl.run_state(run)((started, state))
    return list(finished), state


def accumulate_also(
    body: Callable[[Accumulator], Any], shape: tuple[int, int], *, interpret: Interpret
) -> Any:
    """Returns what `body` returns, given one more accumulator, which starts at zero.

    For use inside `accumulate`'s body: the accumulator takes no registers before.
    """
    if interpret:
        return body(_InRegisters(jnp.zeros(shape, jnp.float32)))
    scope = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    return pl.run_scoped(lambda ref: body(_OnTensorCore(ref)), scope)


class Signals(NamedTuple):
    """Barriers, counted from 0, at each of which one warpgroup waits for `arrivals` others.

    On a GPU they are the hardware's named ones, which cost one instruction where an mbarrier is
    asked again and again, and past which ptxas keeps accumulators it would clear anew. They
    remember one phase: who arrives must know that the last arrival was noticed.
    """

    barriers: Any
    """mbarriers for the interpreter, as `signal_barriers` gives them; else None."""
    first: int
    """The name of the first."""
    arrivals: int

    def wait(self, index: Any) -> None:
        """Waits until the others have arrived."""
        if self.barriers is None:
            self._bar("sync", index)
        else:
            plgpu.barrier_wait(self.barriers.at[index])

    def arrive(self, index: Any) -> None:
        """Arrives, with all that this warpgroup did before."""
        if self.barriers is None:
            self._bar("arrive", index)
        else:
            plgpu.barrier_arrive(self.barriers.at[index])

    def _bar(self, what: str, index: Any) -> None:
        threads = WARPGROUP * (self.arrivals + 1)

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
        def bar(_: Any, name: Any) -> None:
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import llvm

            code, void = f"bar.{what} $0, {threads};", ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [name.registers[()]], code, "r", has_side_effects=True)

        bar(jnp.asarray(self.first + index, jnp.int32))  # pyright: ignore[reportCallIssue]


WARPGROUP = 128
"""Threads of a warpgroup."""
OWN_NAMES = range(5, 16)
"""Names of hardware barriers that Mosaic GPU does not use itself."""


def signal_barriers(arrivals: int, names: range, interpret: Interpret) -> Any:
    """Returns what `Signals` of these names need for `barriers`, among a kernel's scratch types."""
    if not set(names) <= set(OWN_NAMES):
        raise ValueError(f"barriers {names} are not all in {OWN_NAMES}")
    if not interpret:
        return None
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=len(names))


def scale_rows(x: Any, factors: Any, *, mostly_ones: bool, interpret: Interpret) -> Any:
    """Returns a tile whose rows are multiplied by factors.

    With `mostly_ones` a warp all of whose factors are 1 jumps over the multiplications.
    """
    if interpret or not mostly_ones:
        return x * lax.broadcast_in_dim(factors, x.shape, [0])
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)(
        _scale_rows_unless_ones
    )(x, factors)


def _scale_rows_unless_ones(_: Any, x: Any, factors: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, scf, vector

    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
    differs = None
    for register in factors.registers.flat:
        if isinstance(register.type, ir.VectorType):
            place = ir.DenseI64ArrayAttr.get([0])
            register = vector.extract(register, dynamic_position=[], static_position=place)
        here = arith.cmpf(arith.CmpFPredicate.UNE, register, one)
        differs = here if differs is None else arith.ori(differs, here)
    vote = (
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.u32 $0, 1, 0, p; }"
    )
    some = llvm.inline_asm(i32, [arith.extui(i32, differs)], vote, "=r,r", has_side_effects=True)
    zero = arith.constant(i32, ir.IntegerAttr.get(i32, 0))
    any_differs = arith.cmpi(arith.CmpIPredicate.ne, some, zero)
    wide = factors.broadcast_in_dim(x.shape, (0,), x.layout)
    branch = scf.IfOp(any_differs, [r.type for r in x.registers.flat], has_else=True)
    for block, result in ((branch.then_block, lambda: x * wide), (branch.else_block, lambda: x)):
        with ir.InsertionPoint(block):  # pyright: ignore[reportCallIssue, reportArgumentType]
            scf.yield_(list(result().registers.flat))
    registers = np.empty(x.registers.shape, dtype=object)
    for i, register in enumerate(branch.results):
        registers.flat[i] = register
    return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def add_to_gmem(smem: Any, gmem: Any, *, interpret: Interpret) -> None:
    """Starts adding shared memory to global memory; what lies beyond its end is cut off.

    Ends as copies do (`plgpu.wait_smem_to_gmem`). The interpreter knows no sums by TMA: it adds at
    once, and takes two blocks that add to one place for a race.
    """
    if interpret:
        gmem[...] = gmem[...] + smem[...]
        plgpu.commit_smem()  # The read ends before a store may overwrite what it reads.
    else:
        plgpu.copy_smem_to_gmem(smem, gmem, reduction_op="add")


def sum_in_gmem(
    kernel: Callable[..., Any], operands: Any, shape: Sequence[int], dtype: Any = jnp.float32
) -> tuple[Any, jax.Array]:
    """Returns a kernel's results, and the sum of what it added to its last operand.

    That one is all zeros before. The sum varies over devices as the operands do.
    """
    leaves, tree = jax.tree.flatten(operands)

    def run(*leaves: Any) -> list[Any]:
        total = jax.new_ref(jnp.zeros(shape, dtype))
        results = kernel(*jax.tree.unflatten(tree, leaves), total)
        return [*results, jax.freeze(total)]

    # In a loop XLA lets kernels read and write slices of stacked arrays where they lie, and forgets
    # that what is written to there begins as zeros: hence the barriers.
    leaves = lax.optimization_barrier(leaves)
    *results, total = lax.optimization_barrier(tuple(_as_values(run)(*leaves)))
    axes = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    varying = tuple(sorted(frozenset().union(*axes)))
    return results, jax.lax.pcast(total, varying, to="varying") if varying else total


def _as_values(run: Callable[..., list[Any]]) -> Any:
    """Returns `run` without the references inside it, of which not every transformation knows."""
    from jax._src.state.discharge import discharge_state

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(run)(*operands)
        return jaxpr_as_fun(discharge_state(jaxpr))(*operands)

    @call.def_vmap
    def _batched(size: int, batched: Any, *operands: Any) -> tuple[list[Any], list[bool]]:
        axes = [0 if b else None for b in batched]
        results = _as_values(jax.vmap(run, in_axes=axes, axis_size=size))(*operands)
        return results, [True] * len(results)

    return call


def row_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a shared-memory buffer whose last two axes are laid out for the tensor cores."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def tiled_layout(
    tiles: Sequence[tuple[int, ...]], warp_dims: Sequence[int], lane_dims: Sequence[int]
) -> Any:
    """Returns a register layout: the dimensions of nested tiles dealt to warps, lanes and vectors.

    Args:
      tiles: sizes of the tiles, each of the tile before it; the last one is a vector in one lane.
      warp_dims: which dimensions of the tiled shape, counted from its end, are spread over 4 warps.
      lane_dims: which are spread over the 32 lanes of a warp.
    """
    dims = (tuple(warp_dims), tuple(lane_dims), -1)
    layout = TiledLayout(Tiling(tuple(tiles)), *dims, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 or H200, assumed where no GPU is present."""


def num_sms() -> int:
    """Returns the number of streaming multiprocessors of the GPU, or an H200's without one."""
    device = jax.devices()[0]
    return (
        int(getattr(device, "core_count", HOPPER_SMS)) if device.platform == "gpu" else HOPPER_SMS
    )


def out_like(like: jax.Array, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result, varying over the mesh axes that `like` does."""
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=varying)


def gpu_kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Returns `plgpu.kernel(body, **options)`, whose results vary over devices as the operands do.

    Inside a shard_map JAX takes a kernel's results for the same on all devices; gradients would not
    match their operands.
    """
    launch = plgpu.kernel(body, **options)

    def call(*operands: Any) -> Any:
        leaves = jax.tree.leaves(operands)
        axes = [jax.typeof(x).manual_axis_type.varying for x in leaves]
        varying = tuple(sorted(frozenset().union(*axes)))
        results = launch(*operands)
        if not varying:
            return results
        return jax.tree.map(lambda x: jax.lax.pcast(x, varying, to="varying"), results)

    return call


def causal_is_miscompiled() -> bool:
    """Returns whether this CUDA's assembler is one that gets masked matrix products wrong."""
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return False
    return 12080 <= cuda_versions.cuda_runtime_get_version() < 12091


def on_kernel_failure(
    lowering: Callable[[Exception], None], compiling: Callable[[Exception], Exception | None]
) -> None:
    """Has errors in lowering Pallas kernels shown to `lowering`, and XLA's to `compiling`.

    An error that `compiling` returns is raised in place of XLA's.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir

    for primitive, entry in list(mlir._lowerings.items()):
        if primitive.name in ("pallas_call", "mpmd_map"):
            rule = _watched(entry.rule, lowering)
            mlir.register_lowering(primitive, rule, inline=entry.inline)
    compiler.register_xla_runtime_error_handler(compiling)


def _watched(rule: Callable[..., Any], failed: Callable[[Exception], None]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def lower(*args: Any, **params: Any) -> Any:
        try:
            return rule(*args, **params)
        except Exception as error:
            failed(error)
            raise

    return lower
