# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which sizes the kernels of matrix products run with, and which calls they run."""

import math
from typing import Any

from tpjax.core.operator import Key
from tpjax.pallas.products.grouped import TMA_COLUMNS
from tpjax.pallas.products.mainloop import Config, Tiles
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16")
CONFIGS = (
    Config(late=True),
    Config(group=16, late=True),
    Config(rows=128, columns=128, share_columns=False, late=True),
    Config(columns=128, stages=6, cluster=1, late=True),
    Config(columns=128, stages=6, late=True),
    Config(columns=64, stages=8, cluster=1, late=True),
    Config(),
)
"""Worth trying; those of fewer columns are for products of few tiles.

XLA's time / that of the kernel on an H200, first not late, then late: 8192^3 1.00 and 1.02, its
gradient of the left operand 0.97 and 0.99, 64 products 2048 x 1024 x 2048 0.92 and 0.96 to 1.00.
"""


def worth_trying(sums: int) -> tuple[Config, ...]:
    """Returns the configs in which each of so many sums has whole tiles of shared memory."""
    return tuple(c for c in CONFIGS if c.columns // sums >= TMA_COLUMNS)


_RATES = {64 * 64: 0.55, 64 * 128: 0.85, 64 * 256: 1.0}
"""Share of the best rate, by the size of one worker's tile."""


def heuristic(groups: int, rows: int, columns: int, terms: int, sums: int) -> Config:
    """Returns the config that should be first to end, for tiles all take turns of one length."""

    def turns(config: Config) -> float:
        tiles = Tiles(config, groups, rows, columns // sums, terms, sums)
        size = config.rows * config.columns
        return math.ceil(tiles.count / tiles.clusters) * size / _RATES[size]

    return min(worth_trying(sums), key=turns)


def chosen(
    op: str, groups: int, rows: int, columns: int, terms: int, sums: int, dtype: str
) -> Config:
    """Returns the config of a launch: the measured one, or the heuristic's."""
    shapes = groups, rows, columns, terms, sums, dtype
    otherwise = heuristic(groups, rows, columns, terms, sums)
    return config_for(op, shapes, worth_trying(sums), otherwise)


FEW_ROWS = 128
"""With fewer rows XLA, which splits the sums, is faster: its time / that of the kernel was 0.66 for
64 rows times [4096, 4096] on an H200, 0.94 for 96, 1.19 for 128."""


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, in words that follow "no kernel for this call:".

    The first operand's dtype is that of all factors.
    """
    (name, first), *others = key.operands
    assert first is not None
    if first.dtype.name not in DTYPES:
        takes = " and ".join(DTYPES)
        return f"{name} is {first.dtype.name}; the kernel, which rounds no input, takes {takes}"
    for other, aval in others:
        if aval is not None and aval.dtype.itemsize > 4:
            return f"{other} is {aval.dtype.name}; the kernel computes in float32"
    options: dict[str, Any] = dict(key.options)
    out_dtype = options.get("out_dtype", first.dtype)
    if out_dtype.itemsize > 4:
        return f"out_dtype is {out_dtype.name}; the kernel computes in float32"
    if any(0 in aval.shape for _, aval in key.operands if aval is not None):
        return "there is nothing to multiply"
    batched = key.given("b") and len(key.aval("b").shape) > 2
    rows = first.shape[-2] if batched else math.prod(first.shape[:-1])
    if rows < FEW_ROWS:
        return f"{name} has fewer than {FEW_ROWS} rows, for which XLA is faster"
    return None
