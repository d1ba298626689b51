# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder against an independent float64 one, in both layer forms, and its refusals."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.harness import ROOT, assert_close, inputs
from tpjax.models import (
    MODELS,
    PRESETS,
    Decoder,
    DecoderConfig,
    flops_per_token,
    next_token_loss,
    num_params,
)
from tpjax.models.decoder import Layer, RMSNorm, rope

SMALL = DecoderConfig(
    vocab_size=50, num_layers=2, embed_dim=24, num_heads=6, num_kv_heads=2, head_dim=8,
    hidden_dim=40, max_length=32, init_std=0.3,
)  # fmt: skip


logits_of = jax.jit(Decoder.__call__)
gradients_of = jax.jit(jax.value_and_grad(next_token_loss))


def build(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder whose norm scales are not all 1, so that a forgotten scale shows."""
    model = Decoder(config, rngs=nnx.Rngs(seed))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, RMSNorm):
            noise = np.random.default_rng(len(str(path))).normal(size=module.scale.shape)
            module.scale[...] = (1.0 + 0.3 * noise).astype(module.scale.dtype)
    return model


def layers_of(model: Decoder) -> list[Layer]:
    assert isinstance(model.layers, nnx.List)
    return list(model.layers)


def joined(layers: list[Layer]) -> nnx.State:
    return jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, layers))


def stacked(model: Decoder) -> Decoder:
    """The same parameters in the scanned form."""
    scanned = Decoder(dataclasses.replace(model.config, scan_layers=True), rngs=nnx.Rngs(1))
    nnx.update(scanned.layers, joined(layers_of(model)))
    for name in ("embedding", "head", "norm"):
        if hasattr(model, name):
            setattr(scanned, name, getattr(model, name))
    return scanned


def tokens_of(config: DecoderConfig, batch: int, length: int, seed: int = 0):
    return inputs(f"i32[{batch},{length}]", seed) % config.vocab_size


def float64_logits(model: Decoder, tokens) -> np.ndarray:
    """The architecture again, from its papers: loops over heads, complex rotation, float64."""
    c = model.config

    def wide(x) -> np.ndarray:
        return np.asarray(x[...], np.float64)

    def norm(x, module):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * wide(module.scale)

    def turn(x):  # x [T, D]; pairs (i, i + D/2) as complex numbers
        half = c.head_dim // 2
        angle = np.outer(np.arange(len(x)), c.rope_base ** (-np.arange(half) / half))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def attention(x, module):  # x [T, D]
        query, key, value = (x @ wide(p.kernel) for p in (module.query, module.key, module.value))
        heads = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            q = turn(query[:, head * c.head_dim : (head + 1) * c.head_dim])
            k = turn(key[:, group * c.head_dim : (group + 1) * c.head_dim])
            v = value[:, group * c.head_dim : (group + 1) * c.head_dim]
            rows = []
            for t in range(len(x)):
                score = np.exp(q[t] @ k[: t + 1].T / np.sqrt(c.head_dim))
                rows.append(score / score.sum() @ v[: t + 1])
            heads.append(np.stack(rows))
        return np.concatenate(heads, -1) @ wide(module.out.kernel)

    def mlp(x, module):
        gate = x @ wide(module.gate.kernel)
        return (gate / (1 + np.exp(-gate)) * (x @ wide(module.up.kernel))) @ wide(
            module.down.kernel
        )

    out = []
    for row in np.asarray(tokens):
        x = wide(model.embedding)[row]
        for layer in layers_of(model):
            x = x + attention(norm(x, layer.attention_norm), layer.attention)
            x = x + mlp(norm(x, layer.mlp_norm), layer.mlp)
        out.append(norm(x, model.norm) @ wide(model.embedding if c.tied else model.head).T)
    return np.stack(out)


@pytest.mark.parametrize(("tied", "kv_heads"), [(False, 1), (True, 2), (False, 6)])
def test_logits_are_those_of_an_independent_decoder(tied, kv_heads):
    config = dataclasses.replace(SMALL, tied=tied, num_kv_heads=kv_heads)
    model, tokens = build(config), tokens_of(config, 2, 13)
    expected = float64_logits(model, tokens).astype(np.float32)
    # Two layers of matrices of standard deviation 0.3 add up float32 rounding errors.
    assert_close("logits", logits_of(model, tokens), expected, 3e-6)


def test_loop_and_scan_agree_in_logits_and_gradients():
    loop = build(SMALL)
    scan, tokens = stacked(loop), tokens_of(SMALL, 2, 11)
    assert_close("logits", logits_of(scan, tokens), logits_of(loop, tokens), 1e-6)

    loss, grad = gradients_of(loop, tokens)
    scan_loss, scan_grad = gradients_of(scan, tokens)
    assert_close("loss", scan_loss, loss, 1e-6)
    layers = joined(layers_of(grad))
    # Sums in another order, in float32.
    assert_close("layer gradients", nnx.state(scan_grad.layers), layers, 3e-6)
    assert_close("embedding gradient", scan_grad.embedding[...], grad.embedding[...], 3e-6)


def test_one_seed_gives_the_same_model_in_both_forms():
    loop = Decoder(SMALL, rngs=nnx.Rngs(3))
    scan = Decoder(dataclasses.replace(SMALL, scan_layers=True), rngs=nnx.Rngs(3))
    assert_close("head", scan.head[...], loop.head[...], 0)
    layers = joined(layers_of(loop))
    assert_close("layers", nnx.state(scan.layers), layers, 0)


def test_initial_matrices_have_the_stated_spread():
    config = dataclasses.replace(SMALL, embed_dim=128, hidden_dim=256, init_std=0.02)
    model = Decoder(config, rngs=nnx.Rngs(0))
    one, two = layers_of(model)
    residual = 0.02 / np.sqrt(2 * config.num_layers)
    for matrix, std in [
        (one.mlp.up.kernel, 0.02),
        (two.mlp.down.kernel, residual),
        (one.attention.out.kernel, residual),
        (model.embedding, 0.02),
    ]:
        assert abs(float(jnp.std(matrix[...])) / std - 1) < 0.05
    first, second = one.mlp.up.kernel[...], two.mlp.up.kernel[...]
    assert (first != second).mean() > 0.99


def test_a_token_changes_nothing_before_it():
    model, tokens = build(SMALL), tokens_of(SMALL, 1, 9)
    changed = tokens.at[0, 5].add(1)
    before, after = logits_of(model, tokens), logits_of(model, changed)
    assert_close("earlier logits", after[:, :5], before[:, :5], 0)
    assert (jnp.abs(after - before)[:, 5:].max(axis=-1) > 1e-3).all()


def test_rope_scores_depend_on_distance_only():
    q, k = inputs("f32[1,1,1,16]", 0), inputs("f32[1,1,1,16]", 1)
    query, key = (rope(jnp.repeat(x, 20, axis=1), 100.0)[0, :, 0] for x in (q, k))
    scores = query @ key.T
    for distance in (0, 1, 7):
        diagonal = jnp.diagonal(scores, -distance)
        # A float32 angle of 20 radians is off by 1e-6.
        assert_close(f"distance {distance}", diagonal, jnp.full_like(diagonal, diagonal[0]), 3e-6)


def test_loss_is_the_mean_negative_log_likelihood():
    model, tokens = build(SMALL), tokens_of(SMALL, 3, 8)
    logits = float64_logits(model, tokens[:, :-1])
    total = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    assert_close("loss", next_token_loss(model, tokens), np.float32((total - picked).mean()), 1e-6)


@pytest.mark.parametrize(
    ("dtype", "scan", "tol"), [("bfloat16", True, 3e-2), ("float16", False, 4e-3)]
)
def test_half_precision_stays_near_float32(dtype, scan, tol):
    # Two layers, each rounding its stream and products to 8 or 11 bits: some ten roundings.
    model, tokens = build(dataclasses.replace(SMALL, scan_layers=scan)), tokens_of(SMALL, 2, 16)
    config = dataclasses.replace(model.config, dtype=dtype)
    half = Decoder(config, rngs=nnx.Rngs(0))
    nnx.update(half, nnx.state(model))
    assert_close("logits", logits_of(half, tokens), logits_of(model, tokens), tol)
    stored = Decoder(dataclasses.replace(config, param_dtype=dtype), rngs=nnx.Rngs(0))
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(stored, nnx.Param))} == {dtype}
    assert jax.eval_shape(Decoder.__call__, stored, tokens).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (0, 5), (2, 32)])
def test_extreme_shapes(shape):
    logits = logits_of(Decoder(SMALL, rngs=nnx.Rngs(0)), tokens_of(SMALL, *shape))
    assert logits.shape == (*shape, SMALL.vocab_size)
    assert jnp.isfinite(logits).all()


def _dot_flops(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = np.prod([eqn.invars[0].aval.shape[i] for i in contracted])
            total += 2 * int(np.prod(eqn.outvars[0].aval.shape) * depth)
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                total += _dot_flops(value.jaxpr)
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_matrix_products(tied):
    config, batch, length = dataclasses.replace(SMALL, tied=tied), 2, 12
    model = Decoder(config, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(Decoder.__call__)(model, tokens_of(config, batch, length))
    # The plain program multiplies masked pairs as well: length - (length + 1) / 2 more a query.
    masked = 4 * config.num_layers * config.num_heads * config.head_dim * (length - 1) / 2
    forward = flops_per_token(config, length) / 3 + masked
    assert _dot_flops(jaxpr.jaxpr) == round(batch * length * forward)


def test_parameters_are_counted():
    model = Decoder(SMALL, rngs=nnx.Rngs(0))
    attention = 24 * 8 * (6 + 2 + 2 + 6)
    layer = attention + 3 * 24 * 40 + 2 * 24
    assert num_params(model) == 2 * layer + 2 * 50 * 24 + 24
    assert num_params(stacked(model)) == num_params(model)


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 0.85), ("small", 25.4), ("125m", 125.8), ("1b", 1074)]
)
def test_presets_build_with_the_size_of_their_name(name, millions):
    model = nnx.eval_shape(lambda: Decoder(PRESETS[name], rngs=nnx.Rngs(0)))
    assert abs(num_params(model) / 1e6 / millions - 1) < 0.01


def test_models_are_a_table_of_config_and_module():
    for config, module in MODELS.values():
        assert issubclass(module, nnx.Module)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().vocab_size = 1


def test_the_model_names_no_kernel():
    for path in (ROOT / "tpjax" / "models").glob("*.py"):
        assert not re.search(r"(import|from) .*pallas", path.read_text()), path


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("num_layers", 0, ValueError, "num_layers must be at least 1; got 0"),
        ("embed_dim", 2.0, TypeError, "embed_dim must be an int; got 2.0"),
        ("vocab_size", True, TypeError, "vocab_size must be an int; got True"),
        ("num_kv_heads", 4, ValueError, "a divisor of num_heads; got 4 for 6 heads"),
        ("head_dim", 7, ValueError, "head_dim must be even; got 7"),
        ("norm_eps", -1.0, ValueError, "norm_eps must be positive and finite"),
        ("rope_base", float("inf"), ValueError, "rope_base must be positive and finite"),
        ("init_std", "0.02", TypeError, "init_std must be a number; got '0.02'"),
        ("dtype", "bfloat61", ValueError, "Did you mean 'bfloat16'?"),
        ("param_dtype", "int8", ValueError, "param_dtype must be a dtype name"),
        ("tied", "no", TypeError, "tied must be True or False; got 'no'"),
    ],
)
def test_config_refuses(field, value, error, words):
    with pytest.raises(error, match=re.escape(words)):
        dataclasses.replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        (np.zeros(4, np.int32), ValueError, "tokens must be [B, T]; got shape (4,)"),
        (np.zeros((1, 4), np.float32), TypeError, "tokens must be integers; got float32"),
        (np.zeros((1, 0), np.int32), ValueError, "tokens must be 1 to 32 long; got 0 tokens"),
        (np.zeros((1, 33), np.int32), ValueError, "got 33 tokens. Cut the sequence"),
    ],
)
def test_decoder_refuses(tokens, error, words):
    model = Decoder(SMALL, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=re.escape(words)):
        model(tokens)


@pytest.mark.parametrize("shape", [(0, 5), (2, 1), (7,)])
def test_loss_refuses_batches_without_a_target(shape):
    with pytest.raises(ValueError, match="B and T at least 1"):
        next_token_loss(Decoder(SMALL, rngs=nnx.Rngs(0)), jnp.zeros(shape, jnp.int32))
