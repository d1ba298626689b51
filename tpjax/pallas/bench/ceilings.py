# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What this device reaches at best, measured once a process: copies, products, launches."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpjax.pallas.bench import clock
from tpjax.pallas.bench.hlo import count_program

COPY_BYTES = {"gpu": 2**30, "cpu": 2**26}
"""Size of the array that is copied: far beyond the last cache."""
PRODUCT = {"gpu": 8192, "cpu": 1024}
"""Side of the square matrices that are multiplied; half of it in 32 bits and more on a GPU."""
LAUNCHES = 128


class Ceilings(NamedTuple):
    """The best rates of this device; those of products in one dtype."""

    dtype: str
    flops: float
    """FLOP/s of a product of large square matrices, at JAX's default precision."""
    bytes: float
    """Bytes/s read and written by the faster of a copy and an addition of a constant."""
    launch_ms: float
    """What one more small kernel in a program costs."""

    def least_ms(self, flops: float, moved: float) -> float:
        """Returns the milliseconds that work takes at the least: the longer of its two parts."""
        return 1e3 * max(flops / self.flops, moved / self.bytes)


def measure_ceilings(dtype: str) -> Ceilings:
    """Returns the ceilings of the default device for products in `dtype`; measured once."""
    return Ceilings(dtype, _product_rate(dtype), _copy_rate(), _launch_ms())


def product_dtype(arrays: Iterable[Any]) -> str:
    """Returns the dtype in which a call multiplies: the narrowest floating one of its arrays."""
    widths = [x.dtype for x in arrays if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
    return str(min(widths, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32)))


def _platform() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _compiled(fn: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], str]:
    program = jax.jit(fn).lower(*args).compile()
    return lambda: program(*args), program.as_text() or ""


def _fastest(*programs: Callable[[], Any]) -> float:
    """Returns the seconds of the fastest group of any of the programs."""
    timings = [t for t in clock.time_together(programs) if isinstance(t, clock.Timing)]
    return min(t.low_ms for t in timings) / 1e3


@cache
def _copy_rate() -> float:
    x = jnp.ones(COPY_BYTES[_platform()] // 4, jnp.float32)
    seconds = _fastest(_compiled(jnp.copy, x)[0], _compiled(lambda x: x + 1, x)[0])
    return 2.0 * x.nbytes / seconds


@cache
def _product_rate(dtype: str) -> float:
    side = PRODUCT[_platform()]
    if jnp.dtype(dtype).itemsize >= 4 and _platform() == "gpu":
        side //= 2
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (side, side)).astype(dtype) for key in keys)
    return 2.0 * side**3 / _fastest(_compiled(jnp.matmul, x, y)[0])


@cache
def _launch_ms() -> float:
    """Returns what a launch costs: many small kernels in one program against few."""

    def chain(length: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for _ in range(length):
                x = jax.lax.optimization_barrier(x * 1.5 + 1.0)  # or all become one kernel
            return x

        return run

    x = jnp.ones(256, jnp.float32)
    few, many = (_compiled(chain(n), x) for n in (8, 8 + LAUNCHES))
    extra = count_program(many[1]).launches - count_program(few[1]).launches
    timings = clock.time_together((few[0], many[0]))
    ms = [t.ms for t in timings if isinstance(t, clock.Timing)]
    return max(0.0, ms[1] - ms[0]) / max(extra, 1.0)
