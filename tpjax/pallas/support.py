# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The support table: what each implementation takes, found by asking it, never written down.

`python -m tpjax ops` prints it; `python -m tpjax.pallas.support` writes it into docs/operators.md.
"""

import inspect
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Implementation, Op, Sample, parse_spec
from tpjax.pallas.dispatch import use
from tpjax.pallas.ops import OPS

DTYPES = ("float32", "bfloat16", "float16")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"


class SupportRow(NamedTuple):
    """One implementation of one operator."""

    operator: str
    implementation: str
    runs_on: str
    dtypes: tuple[str, ...]
    """Dtypes in which it runs at least one of the operator's samples."""
    gradients: tuple[str, ...]
    """Arguments that have gradients."""
    refuses: tuple[str, ...]
    """Reasons it gives for the samples that it does not run."""
    no_kernel: str
    """Why the operator has no kernel; empty where it has one."""


def support_rows() -> list[SupportRow]:
    """Returns a row for every implementation of every operator, in the order of `OPS`."""
    return [_row(op, implementation) for op in OPS for implementation in op.implementations]


def _row(op: Op, implementation: Implementation) -> SupportRow:
    names = list(inspect.signature(op.fn).parameters)
    dtypes, refuses = [], dict[str, None]()
    for dtype in DTYPES:
        for sample in op.samples:
            reason = _refusal(op, implementation, sample, dtype)
            if reason is None:
                dtypes.append(dtype)
                break
            refuses[reason] = None
    gradients = tuple(names[i] for i in op.diff)
    return SupportRow(
        op.name,
        implementation.name,
        _machines(implementation),
        tuple(dtypes),
        gradients,
        tuple(refuses),
        op.no_kernel,
    )


def _machines(implementation: Implementation) -> str:
    if implementation.platforms is None:
        return "everywhere"
    where = " or ".join(implementation.platforms)
    capabilities = implementation.capabilities
    return (
        where
        if capabilities is None
        else f"{where}, compute capability {' or '.join(capabilities)}"
    )


def _refusal(op: Op, implementation: Implementation, sample: Sample, dtype: str) -> str | None:
    """Returns why the implementation does not run the sample in that dtype, or None."""
    args = []
    for spec in sample.specs:
        if spec is None:
            args.append(None)
            continue
        own, shape = parse_spec(spec)
        floating = jnp.issubdtype(own, np.floating)
        args.append(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype) if floating else own))
    platform = implementation.platforms[0] if implementation.platforms else None
    try:
        with use(implementation=implementation.name, platform=platform):
            jax.eval_shape(sample.call_of(op.fn), *args)
    except UnsupportedError as error:
        return str(error).split("no kernel for this call: ")[-1].split(". Leave")[0]
    return None


def support_markdown() -> str:
    """Returns the table as Markdown."""
    lines = [
        "| operator | implementation | runs on | dtypes | gradients | refuses, of its samples |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in support_rows():
        cells = (row.operator, row.implementation, row.runs_on, ", ".join(row.dtypes))
        refused = "; ".join(row.refuses) or "nothing"
        said = f"{refused}; no kernel: {row.no_kernel}" if row.no_kernel else refused
        cells += (", ".join(row.gradients), said)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(text: str) -> str:
    """Returns the document with its table, between the two marks, made anew."""
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{support_markdown()}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
