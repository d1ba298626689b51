# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's Hopper kernels with every feature, alone and together, against the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.attention import attention_reference
from tpjax.core.operator import Target, key_of
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.hopper import unsupported

TOL = {"lse": 1e-5, "max": 1e-5, "sees": 0, "finds": 0, "dalibi_slopes": 1.5e-2, "dsinks": 1.5e-2}
"""By result, where it is not 6e-3. Few numbers, each a sum of the rounding of many outputs."""
GRADIENTS = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
PACKED = np.repeat([7, 3, 5], [30, 45, 15])[None]


def call(T, S, H, K, D, V=None, *, batch=1, dtype="bf16", seed=0, **extras):
    """Returns the arguments of a call: arrays and options; a shape stands for random numbers."""
    given: dict[str, Any] = {
        "query": inputs(f"{dtype}[{batch},{T},{H},{D}]", seed),
        "key": inputs(f"{dtype}[{batch},{S},{K},{D}]", seed + 1),
        "value": inputs(f"{dtype}[{batch},{S},{K},{V or D}]", seed + 2),
    }
    rng = np.random.default_rng(seed)
    for name, x in extras.items():
        if name == "mask":
            given[name] = jnp.asarray(rng.random(x) < 0.7)
        elif name in ("bias", "sinks", "alibi_slopes"):
            given[name] = jnp.asarray(rng.normal(size=x), jnp.float32)
        elif isinstance(x, np.ndarray | list):
            given[name] = jnp.asarray(x)
        else:
            given[name] = x
    return given


def outputs_and_gradients(fn, given, seed=9):
    """Returns out, lse and max and the gradients of all that has one, by name."""
    differentiable = {n: x for n, x in given.items() if n in GRADIENTS}
    rest = {n: x for n, x in given.items() if n not in GRADIENTS}

    def forward(arrays):
        out, lse, top = fn(**arrays, **rest, return_lse=True, return_max=True)
        return (out, lse), top

    (out, lse), vjp, top = jax.vjp(forward, differentiable, has_aux=True)
    rng = np.random.default_rng(seed)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in (out, lse)]
    # A query that sees nothing has an infinite lse, whatever the cotangent.
    cotangents[1] = jnp.where(jnp.isfinite(lse), cotangents[1], 0)
    (gradients,) = vjp(tuple(cotangents))
    finite = {n: jnp.where(jnp.isfinite(x), x, 0) for n, x in (("lse", lse), ("max", top))}
    seen = {n: jnp.isfinite(x) for n, x in (("sees", lse), ("finds", top))}
    return {"out": out, **finite, **seen, **{f"d{n}": x for n, x in gradients.items()}}


def jitted(fn, given):
    """Returns `outputs_and_gradients` of the call as a compiled function without arguments."""
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.Array)}
    options = {n: x for n, x in given.items() if n not in arrays}
    run = jax.jit(lambda arrays: outputs_and_gradients(fn, {**arrays, **options}))
    return partial(run, arrays)


def check(given):
    """Compares the kernels with the reference, each result on its own; returns what was run."""
    run = jitted(partial(flash_attention, implementation="pallas"), given)
    got, want = run(), jitted(attention_reference, given)()
    for name, expected in want.items():
        assert_close(name, got[name], expected, TOL.get(name, 6e-3))
    return run


TOGETHER = {
    "causal from the bottom, window, lengths, sinks, groups": call(
        100, 130, 2, 1, 64, batch=2, is_causal=True, alignment="bottom_right",
        local_window_size=(40, 3), query_seq_lengths=[60, 100], key_value_seq_lengths=[130, 70],
        sinks=(2,),
    ),
    "prefix, segments, slopes, softcap": call(
        90, 90, 1, 1, 64, is_causal=True, prefix_lengths=[50], query_segment_ids=PACKED,
        alibi_slopes=(1,), softcap=2.0,
    ),
    "bias for all, mask of keys, two widths, float16, negative scale": call(
        70, 130, 2, 2, 96, 80, dtype="f16", bias=(2, 70, 130), mask=(1, 1, 130), scale=-0.2,
    ),
    "sinks of queries beyond the end, whole blocks of them": call(
        100, 128, 1, 1, 64, query_seq_lengths=[40], sinks=(1,), scale=0.3,
    ),
    "bias of queries and keys for two sequences, window, nobody sees": call(
        140, 70, 1, 1, 64, batch=2, bias=(1, 140, 70), local_window_size=(20, 9),
        key_value_seq_lengths=[0, 70], mask=(2, 1, 140, 70),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_interpreted(name):
    """Features at once in the interpreter: results and every gradient."""
    with tpjax.use(interpret=True):
        check(TOGETHER[name])


def test_no_races():
    """The kernels with a bias, segments and slopes have no data races."""
    with tpjax.use(interpret="races"):
        check(call(70, 90, 2, 1, 64, bias=(1, 70, 90), alibi_slopes=(2,), softcap=3.0,
                   query_segment_ids=PACKED[:, :70], key_value_segment_ids=PACKED))  # fmt: skip


HARD = {
    "a bias for all, of which a prefix shows more than the arrays' ends": call(
        70, 200, 1, 1, 64, batch=2, bias=(70, 200), is_causal=True, prefix_lengths=[190, 3],
    ),
    "a sink that is none, and nobody sees": call(
        70, 70, 2, 1, 64, key_value_seq_lengths=[0]
    ) | {"sinks": jnp.array([-jnp.inf, 0.5])},
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_hard_cases(name):
    """Found by trying to break it."""
    with tpjax.use(interpret=True):
        check(HARD[name])


@pytest.mark.parametrize(
    ("form", "garbage"), [("pallas", jnp.nan), ("xla", jnp.nan), ("xla", 3e38)]
)
def test_garbage_beyond_the_lengths(form, garbage):
    """What lengths cut off of queries, keys and values reaches nothing, nor does a NaN of lse's."""
    given = call(100, 130, 1, 1, 64, query_seq_lengths=[60], key_value_seq_lengths=[90],
                 alibi_slopes=(1,))  # fmt: skip

    def run(arrays, hidden):
        def forward(arrays):
            out, lse = flash_attention(**given | arrays, return_lse=True, implementation=form)
            return out, lse

        (out, lse), vjp = jax.vjp(forward, arrays)
        seen = jnp.isfinite(lse)
        dlse = jnp.where(seen, 1.0, hidden).astype(lse.dtype)
        return out, vjp((jnp.ones_like(out), dlse))

    names = {"query": 60, "key": 90, "value": 90}
    clean = {name: given[name] for name in names}
    dirty = {name: x.at[:, names[name] :].set(garbage) for name, x in clean.items()}
    clean["alibi_slopes"] = dirty["alibi_slopes"] = given["alibi_slopes"]
    with tpjax.use(interpret=True):
        want, got = jax.jit(run)(clean, 0.0), jax.jit(run)(dirty, jnp.nan)
    assert_close("with garbage", got, want, 0)


def test_traces_with_wide_integers():
    """With 64-bit types switched on, lengths and prefixes trace through the backward kernels."""
    run = jitted(flash_attention, call(70, 70, 1, 1, 64, is_causal=True, prefix_lengths=[9],
                                       query_seq_lengths=[50]))  # fmt: skip
    with jax.enable_x64(True), tpjax.use(platform="cuda"):
        text = run.func.trace(*run.args).lower(lowering_platforms=("cuda",)).as_text()
    assert "flash_attention_backward_key_value" in text


@pytest.mark.parametrize("name", TOGETHER)
def test_lowers_for_cuda(name):
    """The same calls pass the checks of layouts, shared memory and copies."""
    given = TOGETHER[name]
    with tpjax.use(platform="cuda"):
        run = jax.jit(partial(outputs_and_gradients, flash_attention, given))
        text = run.trace().lower(lowering_platforms=("cuda",)).as_text()
    assert "flash_attention_forward" in text
    assert ("flash_attention_backward_bias" in text) == ("bias" in given)


def drawn(seed):
    """Returns a call of real size with each feature or without it, as the seed says."""
    rng = np.random.default_rng(seed)
    either = lambda: bool(rng.integers(2))  # noqa: E731
    pick = lambda *xs: xs[rng.integers(len(xs))]  # noqa: E731
    T, S = pick((1024, 1024), (777, 1500), (2000, 130), (512, 512))
    (H, K), (D, V) = pick((4, 4), (4, 1), (6, 2)), pick((64, 64), (128, 128), (192, 128), (80, 80))
    options: dict[str, Any] = {"is_causal": either(), "alignment": pick("top_left", "bottom_right")}
    extras: dict[str, Any] = {
        "local_window_size": pick((200, 0), (64, 64), 100),
        "query_seq_lengths": rng.integers(0, T + 1, 2),
        "key_value_seq_lengths": rng.integers(0, S + 1, 2),
        "query_segment_ids": np.sort(rng.integers(0, 5, (2, T)), 1),
        "softcap": pick(1.0, 30.0),
        "bias": pick((T, S), (H, T, S), (2, 1, 1, S), (2, H, T, S)),
        "mask": pick((T, S), (2, 1, 1, S)),
        "alibi_slopes": pick((H,), (2, H)),
        "sinks": (H,),
        "scale": pick(0.3, -0.2),
    }
    options |= {name: x for name, x in extras.items() if rng.random() < 0.35}
    if options["is_causal"] and either():
        options["prefix_lengths"] = rng.integers(0, S + 1, 2)
    if "query_segment_ids" in options:
        options["key_value_segment_ids"] = np.sort(rng.integers(0, 5, (2, S)), 1)
    return call(T, S, H, K, D, V, batch=2, dtype=pick("bf16", "f16"), seed=seed, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_on_gpu(seed):
    """Features at random together, at real sizes, on the device; and the same bits again."""
    run = check(drawn(seed))
    assert_close("again", run(), run(), 0)


@pytest.mark.parametrize("name", ["query", "bias"])
def test_sizes_beyond_32_bits_are_refused(name):
    """An operand that the kernel's 32-bit indices cannot reach goes to XLA, with the reason."""
    shapes = {"query": (1, 2**17, 2**7, 128), "key": (1, 8, 1, 128), "value": (1, 8, 1, 128)}
    shapes |= {"bias": (1, 1, 2**16, 2**15)}
    small = {**shapes, "query": (1, 8, 1, 128), "bias": (1, 1, 8, 8)}
    target = Target("cuda", "9.0", False)
    for large, reason in ((False, None), (True, f"its {name} has more than 2147483647 elements")):
        given = {**small, name: shapes[name]} if large else small
        avals = {n: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for n, shape in given.items()}
        said = unsupported(key_of(target, avals, {"is_causal": False, "softcap": None}))
        assert said == reason if reason is None else reason in (said or "")
