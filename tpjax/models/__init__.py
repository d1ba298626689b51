# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Flax NNX models in plain jax.numpy, written as anyone would: `tpjax.compile` finds the kernels.

`MODELS` is the table: name -> (config, module). Importing this package imports Flax.
"""

from typing import NamedTuple

from flax import nnx

from tpjax.models.decoder import (
    PRESETS,
    Decoder,
    DecoderConfig,
    flops_per_token,
    next_token_loss,
    num_params,
)
from tpjax.models.sampling import sample


class Model(NamedTuple):
    """One row of `MODELS`: a frozen config class and the module built from it and `rngs`."""

    config: type
    module: type[nnx.Module]


MODELS: dict[str, Model] = {
    "decoder": Model(DecoderConfig, Decoder),
}

__all__ = [
    "MODELS",
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "Model",
    "flops_per_token",
    "next_token_loss",
    "num_params",
    "sample",
]
