# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A ring of buffers in shared memory: one warpgroup fills it by TMA, the others empty it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import Signals, pl, plgpu


class Ring(NamedTuple):
    """Slots that are filled and freed together: references to buffers, and a barrier pair each."""

    buffers: tuple[Any, ...]
    ready: Any
    """Completes when a slot's copies have arrived."""
    free: Any
    """Completes when every computing warpgroup is done with a slot: barriers or `Signals`."""

    @property
    def stages(self) -> int:
        """Number of slots."""
        return self.buffers[0].shape[0]

    def release(self, slot: Array) -> None:
        """Says that this warpgroup is done with a slot."""
        if isinstance(self.free, Signals):
            self.free.arrive(slot)
        else:
            plgpu.barrier_arrive(self.free.at[slot])

    def await_free(self, slot: Array) -> None:
        """Waits until all are done with a slot."""
        if isinstance(self.free, Signals):
            self.free.wait(slot)
        else:
            plgpu.barrier_wait(self.free.at[slot])


def ring_barriers(workers: int, stages: int, copies: int) -> list[Any]:
    """Returns the `ready` and the `free` barriers of a ring whose slots take `copies` copies."""
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
    ]


def slot_of(step: Array, stages: int) -> Array:
    """Returns the slot that a step's data lie in."""
    return lax.rem(step, jnp.int32(stages))


def fill(
    steps: Any, rings: Sequence[Ring], sources: Callable[[Array], Sequence[tuple[Any, ...]]]
) -> None:
    """Copies the sources of every step into the rings, each slot as soon as it is free.

    Returns when all has been read, so that nothing is left to arrive in a block that is gone.

    Args:
      steps: number of steps.
      rings: the rings, in the order in which they are needed.
      sources: for a step, what each buffer of each ring is filled with.
    """
    feed(steps, rings, sources)
    for ring in rings:
        drain(ring, steps)


def feed(
    steps: Any,
    rings: Sequence[Ring],
    sources: Callable[[Array], Sequence[tuple[Any, ...]]],
    passed: Any = 0,
    after_first: Callable[[], None] | None = None,
) -> None:
    """Does as `fill`, but returns when all copies have started.

    Args:
      steps, rings, sources: the same.
      passed: number of steps that the rings were filled for before.
      after_first: called when the first step's copy for the first ring has started.
    """

    @pl.loop(0, steps)
    def _step(step):
        at = passed + step
        for ring, refs in zip(rings, sources(step), strict=True):
            slot = slot_of(at, ring.stages)
            pl.when(at >= ring.stages)(partial(ring.await_free, slot))
            for ref, buffer in zip(refs, ring.buffers, strict=True):
                plgpu.copy_gmem_to_smem(ref, buffer.at[slot], ring.ready.at[slot])
            if ring is rings[0] and after_first is not None:
                pl.when(step == 0)(after_first)


def drain(ring: Ring, steps: Any) -> None:
    """Waits until the last of `steps` slots has been freed."""

    @pl.loop(jnp.maximum(steps - ring.stages, 0), steps)
    def _drain(step):
        ring.await_free(slot_of(step, ring.stages))
