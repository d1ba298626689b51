# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers about a run: peak arithmetic of known devices, memory, and how they are spelled."""

from typing import Any, NamedTuple

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v4", 275e12),
)
"""Dense bfloat16 FLOP/s, from data sheets, by a part of the device kind; the first that fits."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device for half-precision matrix products, None where unknown.

    >>> peak_flops("NVIDIA H200", "bfloat16")
    989000000000000.0
    >>> peak_flops("NVIDIA H200", "float32") is None
    True
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = device_kind.upper()
    return next((peak for part, peak in PEAK_FLOPS if part.upper() in words), None)


class Memory(NamedTuple):
    """Bytes of a compiled function on one device."""

    arguments_bytes: int
    outputs_bytes: int
    reused_bytes: int
    """Of the arguments, for outputs: donated."""
    temporaries_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the device holds while it runs."""
        return (
            self.arguments_bytes + self.outputs_bytes - self.reused_bytes + self.temporaries_bytes
        )


def memory_of(compiled: Any) -> Memory | None:
    """Returns what the compiler says of the memory of a `jax.stages.Compiled`, or None."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return Memory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )


def spell_bytes(count: float) -> str:
    """Returns a number of bytes as MiB or GiB.

    >>> spell_bytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def spell_seconds(seconds: float) -> str:
    """Returns a time as m:ss or h:mm:ss.

    >>> spell_seconds(3725.2)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spell_count(count: float) -> str:
    """Returns a count with three figures and a unit.

    >>> spell_count(903_424)
    '903k'
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"
    return f"{count:.0f}"
