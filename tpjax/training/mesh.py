# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Where a run runs: platform, devices, and the mesh that splits a batch over them.

Data parallelism: one axis, "data"; the batch is split along it, parameters and optimiser are whole
on each device, and XLA adds up the gradients. A run takes the most devices that divide its batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int32

from tpjax.core.errors import message
from tpjax.training.config import Config

DATA = "data"
"""The mesh axis over which a batch is split."""


class Placement(NamedTuple):
    """The devices of a run, and what is to be said about the choice."""

    mesh: Mesh
    note: str

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def split(self) -> NamedSharding:
        """Split over the devices along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def put(self, tokens: Int32[np.ndarray, "B T"]) -> Int[Array, "B T"]:
        """Returns the batch, each device holding its rows."""
        return jax.device_put(tokens, self.split)


def devices_of(platform: str | None) -> Sequence[Any]:
    """Returns the devices of the platform, or of the one that JAX prefers; fixes the choice.

    Raises:
      RuntimeError: the machine has no such device, or the installed jax cannot use it.
    """
    if platform is not None:
        # With the CPU behind it, for callbacks to run on.
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # JAX 0.12 asserts for an absent JAX_PLATFORMS
        asked = platform or jax.config.jax_platforms or "the default"
        why = str(error).splitlines() or ["the installed jax has no such backend"]
        got = f"{asked}, which does not answer ({why[0]})"
        remedy = "Leave --platform out, or install it: pip install 'tpjax[cuda]' for CUDA."
        must = "one that this machine has"
        raise RuntimeError(message("train", "platform", must, got, remedy)) from None


def count_devices(config: Config, found: int) -> int:
    """Returns how many of the devices found a run uses: those asked for, or the most that divide.

    Raises:
      ValueError: `num_devices` are not there, or do not divide the batch.
    """
    batch, asked = config.batch_size, config.num_devices
    if asked > found:
        raise ValueError(message("train", "num_devices", f"at most the {found} found", asked))
    if asked and batch % asked:
        below, above = batch // asked * asked, (batch // asked + 1) * asked
        near = f"{below} or {above}" if below else f"{above}"
        must, remedy = f"a multiple of num_devices, {asked}", f"Take batch_size={near}."
        raise ValueError(message("train", "batch_size", must, batch, remedy))
    return asked or max(n for n in range(1, found + 1) if batch % n == 0)


def place(config: Config, devices: Sequence[Any]) -> Placement:
    """Returns the mesh of a run over the first `count_devices` devices."""
    found = len(devices)
    count = count_devices(config, found)
    note = ""
    if count < found and not config.num_devices:
        note = f"{found - count} more stand idle: {count} is the most that divides the batch"
    chosen = np.asarray(devices[:count], dtype=object)
    return Placement(Mesh(chosen, (DATA,), axis_types=(AxisType.Auto,)), note)


def dtype_of(config: Config, platform: str) -> tuple[str, str]:
    """Returns the dtype that the layers compute with, and why."""
    if config.dtype != "auto":
        return config.dtype, "asked for"
    if platform == "cpu":
        return "float32", "a CPU computes it fastest"
    return "bfloat16", f"the matrix units of a {platform} device are made for it"
