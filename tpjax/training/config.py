# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a training run is: one frozen `Config`, its presets, and their arithmetic.

Every field has its documentation under it, from which the flag of the same name takes its help
(`tpjax.training.flags`). A wrong value is an error here, before anything is loaded or compiled.
"""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpjax.core.errors import did_you_mean, message
from tpjax.models import PRESETS as MODEL_PRESETS
from tpjax.models import DecoderConfig

BYTES = 256
"""Token values of a text read as bytes."""

CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("constant", "cosine", "linear"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
}
"""Fields that take one of a few names."""

LEAST: dict[str, int] = {
    "batch_size": 1,
    "length": 1,
    "steps": 1,
    "stop_at": 0,
    "warmup_steps": 0,
    "seed": 0,
    "eval_interval": 0,
    "eval_batches": 1,
    "checkpoint_interval": 0,
    "keep_checkpoints": 1,
    "log_interval": 1,
    "max_bad_steps": 1,
    "num_devices": 0,
    "sample_length": 0,
}
"""Integer fields and the least value of each."""


@dataclass(frozen=True)
class Config:
    """One training run: model, text, optimiser, and what is written when."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    """Shape of the model; each of its fields is a flag of its own."""
    data: str = "kjv"
    """Text to train on: a text file, a folder, or kjv, stdlib, shakespeare."""
    batch_size: int = 16
    """Sequences in a step, over all devices."""
    length: int = 128
    """Tokens in a sequence."""
    steps: int = 300
    """Steps in the run."""
    stop_at: int = 0
    """Stops after this step as an interrupt would, to be resumed; 0: only at the end."""
    optimizer: str = "muon"
    """muon (orthogonalised momentum for matrices, AdamW for the rest) or adamw."""
    learning_rate: float = 0.02
    """Highest learning rate; of matrices under muon."""
    adam_learning_rate: float = 0.02
    """Highest learning rate under muon of embedding, head and norms, which AdamW updates."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from 0."""
    schedule: str = "cosine"
    """How the learning rate falls after that: cosine, linear or constant."""
    final_rate: float = 0.0
    """Learning rate at the end as a share of the highest."""
    weight_decay: float = 0.1
    """Decay of matrices a step, times the learning rate."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down."""
    seed: int = 0
    """Chooses the initial parameters, the order of the text and the sample."""
    dtype: str = "auto"
    """What the layers compute with; auto: bfloat16 on an accelerator, float32 on a CPU."""
    compile: bool = True
    """Whether the loss goes through tpjax.compile; False: plain jax.jit, to compare with."""
    eval_interval: int = 100
    """Steps between validations on a part of the held-out text; 0: only at the end, on all."""
    eval_batches: int = 8
    """Batches in a validation on a part."""
    checkpoint_interval: int = 150
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept, newest first."""
    log_interval: int = 10
    """Steps between lines of the log where there is no terminal."""
    max_bad_steps: int = 5
    """Rejected steps (non-finite loss or gradient) in a row that stop the run."""
    num_devices: int = 0
    """Devices to use; 0: the most that divide the batch."""
    sample_length: int = 300
    """Bytes of text that the model writes at the end."""

    def __post_init__(self):
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(message("Config", name, "an int", repr(value)))
            if value < least:
                raise ValueError(message("Config", name, f"at least {least}", value))
        for name, valid in CHOICES.items():
            value = getattr(self, name)
            if value not in valid:
                got, remedy = repr(value), did_you_mean(str(value), valid)
                raise ValueError(message("Config", name, "a known name", got, remedy))
        if not isinstance(self.compile, bool):
            raise TypeError(message("Config", "compile", "True or False", repr(self.compile)))
        self._check_numbers()
        self._check_sizes()

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "adam_learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(message("Config", name, "a positive number", repr(value)))
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            got = repr(self.weight_decay)
            raise ValueError(message("Config", "weight_decay", "0 or a positive number", got))
        if not (_is_number(self.final_rate) and 0 <= self.final_rate <= 1):
            got = repr(self.final_rate)
            raise ValueError(message("Config", "final_rate", "a share from 0 to 1", got))

    def _check_sizes(self) -> None:
        if self.length > self.model.max_length:
            must = f"at most the model's max_length, {self.model.max_length}"
            remedy = f"Set max_length={self.length} too, or take a shorter length."
            raise ValueError(message("Config", "length", must, self.length, remedy))
        if self.model.vocab_size < BYTES:
            must, remedy = f"at least {BYTES}", "The text is read as bytes."
            got = self.model.vocab_size
            raise ValueError(message("Config", "vocab_size", must, got, remedy))
        if self.stop_at > self.steps:
            must = f"at most steps, {self.steps}"
            raise ValueError(message("Config", "stop_at", must, self.stop_at))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on."""
        return self.batch_size * self.length

    @property
    def last_step(self) -> int:
        """The step after which the loop ends, if nothing else ends it."""
        return self.stop_at or self.steps

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, the model's under "model"; for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Returns the config that `as_dict` wrote down.

        Raises:
          ValueError: a field is unknown here, or its value is wrong.
        """
        model = values.get("model")
        if not isinstance(model, Mapping):
            raise ValueError(message("Config", "model", "a table of fields", repr(model)))
        rest = {name: value for name, value in values.items() if name != "model"}
        for given, known in ((rest, cls), (model, DecoderConfig)):
            valid = [f.name for f in dataclasses.fields(known)]
            for name in given:
                if name not in valid:
                    remedy = did_you_mean(name, valid)
                    must = "a field of this version"
                    raise ValueError(message("Config", f"the field {name}", must, "none", remedy))
        return cls(model=DecoderConfig(**model), **rest)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(DecoderConfig) if f.name != "dtype")
"""Fields of the model that are fields of a run too; its dtype follows from the run's."""

RUN_FIELDS = tuple(f.name for f in dataclasses.fields(Config) if f.name != "model")
"""The other fields of a run."""


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with fields of its own and of its model replaced.

    A `length` given without `max_length` raises the model's where it must.

    Raises:
      ValueError: an unknown name, with the nearest valid one, or a wrong value.
    """
    for name in values:
        if name not in RUN_FIELDS and name not in MODEL_FIELDS:
            hint = did_you_mean(name, RUN_FIELDS + MODEL_FIELDS)
            raise ValueError(message("Config", f"the field {name}", "known", "none", hint))
    model = {name: value for name, value in values.items() if name in MODEL_FIELDS}
    run = {name: value for name, value in values.items() if name in RUN_FIELDS}
    length = run.get("length")
    if isinstance(length, int) and length > config.model.max_length:
        model.setdefault("max_length", length)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model), **run)


PRESETS: dict[str, Config] = {
    "tiny": Config(model=MODEL_PRESETS["tiny"]),
    "small": Config(
        model=MODEL_PRESETS["small"], batch_size=16, length=512, steps=2000, warmup_steps=100,
        learning_rate=0.01, adam_learning_rate=0.004, eval_interval=250, checkpoint_interval=500,
    ),
    "125m": Config(
        model=MODEL_PRESETS["125m"], data="stdlib", batch_size=4, length=4096, steps=2000,
        optimizer="adamw", learning_rate=6e-4, final_rate=0.1, warmup_steps=200,
        eval_interval=250, checkpoint_interval=500,
    ),
    "1b": Config(
        model=MODEL_PRESETS["1b"], data="stdlib", batch_size=4, length=4096, steps=2000,
        optimizer="adamw", learning_rate=3e-4, final_rate=0.1, warmup_steps=200,
        eval_interval=500, checkpoint_interval=500,
    ),
}  # fmt: skip
"""Runs by name: `tiny` ends in minutes on two CPU cores; `125m` and `1b` want a large GPU."""


def preset(name: str) -> Config:
    """Returns the row `name` of `PRESETS`, or raises a `ValueError` with the nearest name."""
    if name not in PRESETS:
        remedy = did_you_mean(name, PRESETS)
        raise ValueError(message("train", "config", "a preset", repr(name), remedy))
    return PRESETS[name]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the text written under each field of a dataclass, by name, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for at, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                docs[at.target.id] = " ".join(text.value.split())
    return docs
