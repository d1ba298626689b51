# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Times every config of the kernels, forward and backward, and keeps the fastest.

`python -m tpjax bench --tune FOLDER` keeps them in the folder, from where `tpjax.cache(FOLDER)` has
kernels take them; `--record` in `tuned.json`, which comes with the library.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Op, Sample
from tpjax.core.store import Store
from tpjax.pallas import tuning
from tpjax.pallas.bench import clock
from tpjax.pallas.bench.programs import random_arrays, random_cotangents, with_gradients
from tpjax.pallas.dispatch import use

GROUPS = 7


def median_ms(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the median time of a call in milliseconds."""
    compiled = jax.jit(fn).lower(*args).compile()
    (timing,) = clock.time_together([lambda: compiled(*args)], GROUPS, 4 * clock.GROUP_MS)
    if isinstance(timing, Exception):
        raise timing
    return timing.ms


def tune_op(
    op: Op,
    store: Store | None,
    timer: Callable[..., float] = median_ms,
    choose: Callable[[Sample], bool] = lambda sample: sample.slow,
) -> Iterator[str]:
    """Yields a line for each config of the operator's kernel on each sample; keeps the best.

    Args:
      op: the operator.
      store: where the fastest config of each sample goes; None: into `tuned.json`.
      timer: takes a function and its arguments, returns milliseconds a call.
      choose: says of a sample whether it is tuned.
    """
    for sample in filter(choose, op.samples):
        args = random_arrays(op, sample)
        cotangent = random_cotangents(op, sample)

        def measure(sample: Sample = sample, args: Any = (*args, cotangent)) -> float | None:
            try:  # another function each time, or jit serves the config before
                return timer(with_gradients(op, op.fn, sample), *args)
            except jax.errors.JaxRuntimeError:  # too large for the device
                return None

        with use(implementation="pallas"):
            try:
                with tuning.requests() as found:
                    jax.eval_shape(with_gradients(op, op.fn, sample), *args, cotangent)
            except UnsupportedError as error:
                yield f"{op.name:16s} {error}  {sample}"
                continue
            for request in dict.fromkeys(found):
                for best, (config, ms) in enumerate(tuning.tune(request, measure, store)):
                    shown = "  refused " if ms is None else f"{ms:9.3f} ms"
                    mark = " " if best else "*"
                    yield f"{op.name:16s} {mark} {shown}  {config}  {sample}"
