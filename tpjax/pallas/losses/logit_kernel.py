# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels over all logits of a linear head that write none: what is made of a tile is decided here.

    sums       of each token, over each tile of columns: top, the largest logit, and the sum of
               exp(x - top)
    weights    exp(x - shift) itself, in the operands' dtype, and its sum; `shift` is a guess of
               the token's lse, good to 60 or so
    gradient   a exp(x - lse) - b [v == label] - e, in the operands' dtype, for given a, b, e, lse

All three are one product (`tpjax.pallas.products.mainloop`) with another end. The first two also
give the label's logit and, where labels are smoothed, the sum of logits, as sums over each tile.
Weights and gradients are multiplied by the derivative of the cap, if there is one.

Logits are in units of log2 within a tile: exp is exp2. Sums over tiles are the caller's.

Letters: R tokens, D features, V vocabulary, N tiles of columns.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import pl, plgpu, row_tile
from tpjax.pallas.products.mainloop import (
    DEPTH,
    ROWS,
    WORKERS,
    Config,
    Copy,
    Tile,
    Tiles,
    accumulate,
    feed,
    launch,
    ring_types,
)

LOG2E = 1.4426950408889634
PIECE = 64
"""Columns that are finished together: 128 bytes of a 16-bit dtype, the width of the swizzle."""
SLOTS = 2
"""Pieces of each worker on their way out."""
WGMMA = plgpu.Layout.WGMMA
CONFIGS = (
    Config(),
    Config(cluster=1),
    Config(group=16),
    Config(share_columns=False),
)
"""Worth trying."""


@dataclass(frozen=True)
class Job:
    """One kind of launch."""

    kind: str
    """"sums", "weights" or "gradient"."""
    vocab_axis: int
    softcap: float | None
    smoothed: bool
    config: Config
    interpret: Interpret
    columns: int | None = None
    """Of the head, from `Operands.first` on, a multiple of 64; None: all."""


class Operands(NamedTuple):
    """The operands, or references to them; vectors hold a number for each token."""

    hidden: Any
    """[R, D]"""
    head: Any
    """[V, D], or [D, V] with `vocab_axis` 1."""
    labels: Any
    """[R] int32, counted from the first column that takes part; out of range, there is none."""
    vectors: tuple[Any, ...]
    """[R] float32, logarithms in units of log2: of "weights" shift, of "gradient" lse, a, b, e."""
    first: Any = None
    """The first column of the head that takes part, int32 [1]; None where all do."""


class Sums(NamedTuple):
    """Over each tile of columns, [N, R] float32; None where not made."""

    total: Any
    """Of exp(x - top), or of exp(x - shift)."""
    label: Any
    """The label's logit, zero where it is in another tile."""
    every: Any
    """Of all logits."""
    top: Any
    """The largest logit, in units of log2."""


class _Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    ring: Any
    out: Any


class _Kernel(NamedTuple):
    """Static facts of a launch, and what its warpgroups do."""

    job: Job
    tiles: Tiles

    def load(self, operands: Operands, results: Any, smem: _Shared) -> None:
        """Brings the operands of every tile."""
        del results
        job, tiles = self.job, self.tiles
        shares_columns = tiles.config.share_columns
        first = 0 if operands.first is None else pl.multiple_of(operands.first[0], PIECE)

        def copies(tile: Tile, term: Array, slot: Array) -> list[Copy]:
            terms = pl.ds(term, DEPTH)
            rows = pl.ds(tile.row, tiles.config.block_rows)
            columns = pl.ds(tile.column + first, tiles.width)
            left, right = smem.ring.buffers
            place = (terms, columns) if job.vocab_axis else (columns, terms)
            return [
                Copy(operands.hidden.at[rows, terms], left.at[slot], not shares_columns),
                Copy(operands.head.at[place], right.at[slot], shares_columns),
            ]

        feed(tiles, smem.ring, copies)

    def work(self, operands: Operands, results: Any, smem: _Shared) -> None:
        """Multiplies and finishes one worker's rows of every tile."""
        tiles, worker = self.tiles, lax.axis_index("worker")
        own = pl.ds(worker * tiles.config.rows, tiles.config.rows)

        def factors(slot: Array) -> list[tuple[Any, Any]]:
            left, right = smem.ring.buffers
            b = right.at[slot]
            return [(left.at[slot, own], b if self.job.vocab_axis else b.transpose((1, 0)))]

        def one(tile: Tile, passed: Array) -> None:
            (products,) = accumulate(tiles, smem.ring, passed, factors)
            for first in range(0, tiles.config.rows, ROWS):
                row = tile.row + worker * tiles.config.rows + first
                rows = products[first : first + ROWS]
                _Finish(self, operands, results, smem.out.at[worker], row, tile.column)(rows)

        tiles.each(one)
        plgpu.wait_smem_to_gmem(0)


class _Finish(NamedTuple):
    """The end of 64 rows of a tile."""

    kernel: _Kernel
    operands: Operands
    results: Any
    out: Any
    row: Any
    column: Any

    def __call__(self, products: Array) -> None:
        """Makes of the products [64, columns] what the kind of launch says."""
        job = self.kernel.job
        labels = self._of_rows(self.operands.labels)
        vectors = [self._of_rows(v) for v in self.operands.vectors]
        starts = range(0, products.shape[1], PIECE)
        pieces = [lax.slice(products, (0, c), (ROWS, c + PIECE)) for c in starts]
        if job.kind == "gradient":
            for number, products in enumerate(pieces):
                self._send(number, self._gradient(number, products, labels, vectors))
            return
        sums, written = self.results if job.kind == "weights" else (self.results, None)
        if written is None:
            tops = [self._capped(x)[0] for x in pieces]
            tops = [self._if_seen(i, x, -jnp.inf) for i, x in enumerate(tops)]
            top = _most(tops) * LOG2E
            self._put(sums.top, top)
        else:
            (top,) = vectors
        total, label, every = (_zeros() for _ in range(3))
        for number, products in enumerate(pieces):
            x, gain = self._capped(products)
            weights = self._if_seen(number, jnp.exp2(x * LOG2E - _wide(top)), 0.0)
            total += weights.sum(1)
            label += jnp.where(self._is_label(number, labels), x, 0.0).sum(1)
            if job.smoothed:
                every += self._if_seen(number, x, 0.0).sum(1)
            if written is not None:
                self._send(number, weights if gain is None else weights * gain)
        self._put(sums.total, total)
        self._put(sums.label, label)
        if job.smoothed:
            self._put(sums.every, every)

    def _gradient(self, number: int, products: Array, labels: Array, vectors: Any) -> Array:
        x, gain = self._capped(products)
        lse, softmax, label, every = vectors
        dx = _wide(softmax) * jnp.exp2(x * LOG2E - _wide(lse))
        dx -= jnp.where(self._is_label(number, labels), _wide(label), 0.0)
        if self.kernel.job.smoothed:
            dx -= _wide(every)
        return dx if gain is None else dx * gain

    def _capped(self, products: Array) -> tuple[Array, Array | None]:
        """Returns logits, and the derivative of the cap."""
        cap = self.kernel.job.softcap
        if cap is None:
            return products, None
        # The hardware's tanh is good to 11 bits, this to 22.
        tanh = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2E / cap)))
        return tanh * cap, 1 - tanh * tanh

    def _if_seen(self, number: int, x: Array, otherwise: float) -> Array:
        """Returns a piece with another number in columns beyond the end of the vocabulary."""
        tiles = self.kernel.tiles
        if tiles.columns % tiles.width == 0:  # no tile goes beyond it
            return x
        return jnp.where(_columns() < tiles.columns - self._first(number), x, otherwise)

    def _is_label(self, number: int, labels: Array) -> Array:
        # Vectors are moved, not tiles: columns stay constants of the code.
        return _columns() == _wide(labels - self._first(number))

    def _first(self, number: int) -> Array:
        """Returns the first column of a piece."""
        return self.column + number * PIECE

    def _of_rows(self, ref: Any) -> Array:
        """Returns a number for each of the rows."""
        return plgpu.load(ref.at[pl.ds(self.row, ROWS)], layout=WGMMA.reduce(1), optimized=False)

    def _put(self, ref: Any, x: Array) -> None:
        """Writes a number for each of the rows, of this tile of columns."""
        ref[lax.div(self.column, jnp.int32(self.kernel.tiles.width)), pl.ds(self.row, ROWS)] = x

    def _send(self, number: int, piece: Array) -> None:
        """Rounds a piece and sends it off."""
        target = self.results if self.kernel.job.kind == "gradient" else self.results[1]
        slot = self.out.at[number % SLOTS]
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        slot[...] = piece.astype(slot.dtype)
        plgpu.commit_smem()
        columns = pl.ds(self._first(number), PIECE)
        plgpu.copy_smem_to_gmem(slot, target.at[pl.ds(self.row, ROWS), columns])


def _zeros() -> Array:
    return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WGMMA.reduce(1))


def _columns() -> Array:
    """Returns the number of each column of a piece, spread over its rows."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 1, layout=WGMMA)


def _wide(x: Array) -> Array:
    """Returns a number for each row, spread over a piece."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (ROWS, PIECE), [0]), WGMMA)


def _most(pieces: list[Array]) -> Array:
    """Returns the largest number of each row."""
    most = pieces[0]
    for x in pieces[1:]:
        most = jnp.maximum(most, x)
    return most.max(1)


def run(job: Job, operands: Operands) -> Any:
    """Returns what the job makes.

    Args:
      job: which one.
      operands: of any number of tokens; V and D are multiples of 64, and of one 16-bit dtype.

    Returns:
      `Sums` of [N, R], for "weights" a pair with an array [R, V], or for "gradient" that alone.
    """
    tokens = operands.hidden.shape[0]
    results = _one_by_one(job)(operands)

    def cut(x: Array) -> Array:
        return x[:tokens]

    if job.kind == "gradient":
        return cut(results)
    sums, written = results if job.kind == "weights" else (results, None)
    sums = jax.tree.map(lambda x: x[:, :tokens], sums)
    return sums if written is None else (sums, cut(written))


def _one_by_one(job: Job) -> Any:
    """Returns the launch of the job, under vmap one after the other."""
    return jax.custom_batching.sequential_vmap(partial(_launch, job=job))


# One jit for equal calls: the blocks of a loss lower and assemble the kernel once.
@partial(jax.jit, static_argnames="job")
def _launch(operands: Operands, job: Job) -> Any:
    hidden, head, labels, vectors, first = operands
    (tokens, features), columns = hidden.shape, job.columns or head.shape[job.vocab_axis]
    config = replace(job.config, stages=min(job.config.stages, 4))
    tiles = Tiles(config, 1, _up(tokens, 8), columns, pl.cdiv(features, DEPTH))
    kernel = _Kernel(job, tiles)
    # Vectors are loaded and stored without TMA: not beyond their end.
    tall, across = (config.cluster, 1) if config.share_columns else (1, config.cluster)
    whole = _up(tokens, config.block_rows * tall)
    num_tiles = across * pl.cdiv(columns, tiles.width * across)
    operands = Operands(
        _ended(hidden, tiles.rows),
        head,
        _ended(labels, whole),
        tuple(_ended(v, whole) for v in vectors),
        first,
    )
    line = jax.ShapeDtypeStruct((num_tiles, whole), jnp.float32)
    written = jax.ShapeDtypeStruct((tiles.rows, columns), hidden.dtype)
    sums = Sums(line, line, line if job.smoothed else None, line if job.kind == "sums" else None)
    out_type: Any = {"sums": sums, "weights": (sums, written), "gradient": written}[job.kind]
    flat, tree = jax.tree.flatten(out_type)

    def split(refs: Any) -> tuple[Operands, Any, _Shared]:
        return refs[0], jax.tree.unflatten(tree, refs[1:-1]), refs[-1]

    right = (DEPTH, tiles.width) if job.vocab_axis else (tiles.width, DEPTH)
    buffers = [
        row_tile((config.stages, *shape), hidden.dtype)
        for shape in ((config.block_rows, DEPTH), right)
    ]
    scratch = _Shared(
        ring_types(config, buffers, 2), row_tile((WORKERS, SLOTS, ROWS, PIECE), hidden.dtype)
    )
    launched = launch(
        tiles,
        lambda *refs: kernel.work(*split(refs)),
        lambda *refs: kernel.load(*split(refs)),
        out_type=flat,
        scratch_types=[scratch],
        interpret=job.interpret,
        name=f"cross_entropy_{job.kind}",
    )
    return jax.tree.unflatten(tree, launched(operands))


def _ended(x: Array, size: int) -> Array:
    """Returns an array with zeros behind, up to `size` along its first axis."""
    missing = size - x.shape[0]
    return x if not missing else jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
