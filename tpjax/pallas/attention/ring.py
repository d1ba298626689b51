# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A ring of buffers in shared memory: one warpgroup fills it by TMA, the others empty it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import pl, plgpu


class Ring(NamedTuple):
    """Slots that are filled and freed together: references to buffers, and a barrier pair each."""

    buffers: tuple[Any, ...]
    ready: Any
    """Completes when a slot's copies have arrived."""
    free: Any
    """Completes when every computing warpgroup is done with a slot."""

    @property
    def stages(self) -> int:
        """Number of slots."""
        return self.buffers[0].shape[0]


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

    @pl.loop(0, steps)
    def _step(step):
        for ring, refs in zip(rings, sources(step), strict=True):
            slot = slot_of(step, ring.stages)
            pl.when(step >= ring.stages)(partial(plgpu.barrier_wait, ring.free.at[slot]))
            for ref, buffer in zip(refs, ring.buffers, strict=True):
                plgpu.copy_gmem_to_smem(ref, buffer.at[slot], ring.ready.at[slot])

    for ring in rings:
        drain(ring, steps)


def drain(ring: Ring, steps: Any) -> None:
    """Waits until the last of `steps` slots has been freed."""

    @pl.loop(jnp.maximum(steps - ring.stages, 0), steps)
    def _drain(step):
        plgpu.barrier_wait(ring.free.at[slot_of(step, ring.stages)])
