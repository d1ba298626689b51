# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Times operators beside XLA's form and the reference, against what the device can do.

The command is `python -m tpjax bench`; `docs/bench.md` says what its numbers mean. As a library:

    from tpjax.pallas import OPS, bench

    found = bench.Findings(tuple(bench.measure(OPS[:1], others={"mine": my_rms_norm})))
    found.gains()

  clock     groups of calls in turn; median and interval
  ceilings  what the device reaches
  programs  the forms of an operator, compiled
  hlo       what a compiled program moves, launches and computes
  results   rows, gains, plain data; tables and picture show them
  configs   times the configs of kernels, for tuning
"""

from tpjax.pallas.bench.clock import Timing, median_of, time_together
from tpjax.pallas.bench.configs import tune_op
from tpjax.pallas.bench.hlo import count_collectives, count_program
from tpjax.pallas.bench.results import Findings, Gain, Measured, gain_of
from tpjax.pallas.bench.run import by_words, measure

__all__ = [
    "Findings",
    "Gain",
    "Measured",
    "Timing",
    "by_words",
    "count_collectives",
    "count_program",
    "gain_of",
    "measure",
    "median_of",
    "time_together",
    "tune_op",
]
