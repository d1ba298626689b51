# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Configs, presets and the command line: what is asked for is what runs, or an error that helps."""

import dataclasses
import json
import math

import jax.numpy as jnp
import pytest

from tests.training import small
from tpjax.models import DecoderConfig
from tpjax.training.config import (
    MODEL_FIELDS,
    PRESETS,
    RUN_FIELDS,
    Config,
    field_docs,
    override,
)
from tpjax.training.flags import NEWEST, read_command_line
from tpjax.training.metrics import peak_flops
from tpjax.training.optimizer import rate_of


def _read(*flags: str):
    return read_command_line(["train.py", *flags])


def test_no_flags_mean_the_tiny_preset():
    request = _read()
    assert request.config() == PRESETS["tiny"]
    assert (request.out, request.resume, request.platform) == (None, None, None)


def test_a_flag_overrides_any_field_of_the_preset():
    flags = ["--config=small", "--steps=1,000", "--nocompile", "--num_layers=3", "--tied"]
    c = _read(*flags, "--learning_rate=1e-3", "--data=stdlib", "--dtype=bfloat16").config()
    small = PRESETS["small"]
    model = dataclasses.replace(small.model, num_layers=3, tied=True)
    assert c == dataclasses.replace(
        small, steps=1000, compile=False, model=model, learning_rate=1e-3, data="stdlib",
        dtype="bfloat16",
    )  # fmt: skip


def test_help_names_every_field_and_its_value():
    text = _read("--help").help
    assert text is not None
    for name in RUN_FIELDS + MODEL_FIELDS:
        assert f"--{name}: " in text
    assert "--batch_size: Sequences in a step, over all devices. [16]" in text


def test_every_field_of_a_run_is_documented():
    assert {f.name for f in dataclasses.fields(Config)} <= set(field_docs(Config))


@pytest.mark.parametrize(
    ("flag", "resume"),
    [("--resume", NEWEST), ("--resume=runs/a", "runs/a"), ("--noresume", None)],
)
def test_resume_may_stand_alone(flag: str, resume: str | None):
    assert _read(flag).resume == resume


WRONG = (
    (["--config=tinny"], "config must be a preset; got 'tinny'. Did you mean 'tiny'?"),
    (["--stps=3"], "unknown flag --stps. Did you mean --steps?"),
    (["--nocompil"], "unknown flag --nocompil. Did you mean --compile?"),
    (["--steps=many"], "--steps must be a whole number; got 'many'"),
    (["--learning_rate=fast"], "--learning_rate must be a number; got 'fast'"),
    (["--optimizer=adamv"], "Did you mean 'adamw'?"),
    (["--schedule=cosin"], "Did you mean 'cosine'?"),
    (["--dtype=bfloat61"], "Did you mean 'bfloat16'?"),
    (["--param_dtype=flaot32"], "Did you mean 'float32'?"),
    (["--platform=gpu"], "Did you mean 'cuda'?"),
    (["--steps=0"], "steps must be at least 1; got 0"),
    (["--learning_rate=nan"], "learning_rate must be a positive number; got nan"),
    (["--clip_norm=-1"], "clip_norm must be a positive number"),
    (["--weight_decay=-1"], "weight_decay must be 0 or a positive number"),
    (["--final_rate=2"], "final_rate must be a share from 0 to 1"),
    (["--stop_at=900"], "stop_at must be at most steps"),
    (["--length=300", "--max_length=256"], "Set max_length=300 too"),
    (["--vocab_size=100"], "vocab_size must be at least 256"),
    (["--num_heads=4", "--num_kv_heads=3"], "num_kv_heads must be a divisor of num_heads"),
    (["--compile=perhaps"], "compile"),
    (["runs/a"], "Write a flag's value after an equals sign: --data=runs/a or --resume=runs/a"),
)


@pytest.mark.parametrize(("flags", "told"), WRONG, ids=[flags[0] for flags, _ in WRONG])
def test_a_wrong_command_line_is_told_how_to_mend_it(flags: list[str], told: str):
    with pytest.raises(ValueError, match=r"^(?s:.)*$") as error:
        _read(*flags)
    assert told in str(error.value)


def test_a_longer_sequence_raises_the_models_length():
    assert override(PRESETS["tiny"], {"length": 1000}).model.max_length == 1000


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name: str):
    c = PRESETS[name]
    assert Config.from_dict(json.loads(json.dumps(c.as_dict()))) == c


@pytest.mark.parametrize("spoil", [{"stepz": 3}, {"model": 4}, {"model": {"depth": 3}}])
def test_an_unknown_field_of_a_saved_config_is_named(spoil: dict):
    with pytest.raises(ValueError, match=r"stepz|model|depth"):
        Config.from_dict(PRESETS["tiny"].as_dict() | spoil)


def test_the_model_fields_are_the_decoders():
    assert set(MODEL_FIELDS) == {f.name for f in dataclasses.fields(DecoderConfig)} - {"dtype"}


@pytest.mark.parametrize(
    ("schedule", "half"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)]
)
def test_the_rate_rises_and_falls_as_documented(schedule: str, half: float):
    c = small.config(
        steps=110, warmup_steps=10, learning_rate=0.5, schedule=schedule, final_rate=0.1
    )
    rate = rate_of(c)
    got = [float(rate(jnp.int32(step))) for step in (0, 4, 9, 10, 60, 110)]
    end = 1.0 if schedule == "constant" else 0.1
    assert got == pytest.approx([0.05, 0.25, 0.5, 0.5, 0.5 * half, 0.5 * end], rel=1e-5)


def test_a_quarter_of_a_cosine_is_not_a_line():
    rate = rate_of(small.config(steps=100, warmup_steps=0, learning_rate=1.0))
    assert float(rate(jnp.int32(25))) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)), rel=1e-5)


def test_peaks_are_of_the_card_and_of_half_precision():
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float16") == 989e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
