# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's kernels: in the interpreter, lowered for a GPU, and on one under `-m gpu`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs, run_python
from tests.pallas.test_loss import check, plain
from tpjax.core.errors import UnsupportedError
from tpjax.pallas import linear_cross_entropy
from tpjax.pallas.losses import again, at_once, hopper, logit_kernel, of_sum
from tpjax.pallas.losses.logit_kernel import CONFIGS, Config, Job, Operands
from tpjax.pallas.tuning import Request, trying

SPLIT = jax.ShapeDtypeStruct((136,), jnp.float32)


def operands(tokens=136, features=64, vocab=192, dtype="bf16"):
    """Returns hidden, head [V, D], labels of which a few are ignored (-100), and weights."""
    labels = inputs(f"i32[{tokens}]", 2, vocab)
    labels = jnp.where(jnp.arange(tokens) % 5 == 3, -100, labels)
    head = (inputs(f"f32[{vocab},{features}]", 1) * 0.3).astype(dtype.replace("bf", "bfloat"))
    return inputs(f"{dtype}[{tokens},{features}]", 0), head, labels, inputs(f"f32[{tokens}]", 3)


@pytest.fixture
def small_blocks(monkeypatch):
    """Cuts tokens and vocabulary into several blocks, of which one is odd."""
    monkeypatch.setattr(hopper, "CONFIGS", (Config(cluster=1),))  # fewer threads
    monkeypatch.setattr(at_once, "block_size", lambda *sizes: 68)
    monkeypatch.setattr(again, "num_parts", lambda features, columns: 2)
    monkeypatch.setattr(again, "block_columns", lambda *sizes: 128)
    monkeypatch.setattr(of_sum, "block_tokens", lambda *sizes: 64)
    monkeypatch.setattr(of_sum, "block_columns", lambda *sizes: 128)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("form", "reduction"), [("one_pass", "mean"), ("two_pass", "sum"), ("two_pass", "none")]
)
def test_blocks(form, reduction, small_blocks):
    """Several blocks of tokens, or parts of them and blocks of columns; a head [D, V]."""
    hidden, head, labels, weights = operands()
    options = {"vocab_axis": 1, "z_loss": 1e-2, "reduction": reduction, "implementation": "pallas"}
    if (form, reduction) != ("two_pass", "sum"):  # which keeps no weights then
        options["label_smoothing"] = 0.1
    with tpjax.use(interpret=True):
        check((hidden, head.T, labels, weights), 6e-3, form=form, **options)


@pytest.mark.parametrize("form", ["one_pass", "two_pass"])
def test_far_guess(form, monkeypatch):
    """A logit far above those that the guess has seen: the block is done again."""
    hidden, head, labels, weights = operands(64)
    monkeypatch.setattr(hopper, "CONFIGS", (Config(cluster=1),))
    monkeypatch.setattr(at_once, "SAMPLE", 96)  # every other column
    head = head.at[187].multiply(60)
    logits = hidden.astype(jnp.float32) @ head.T.astype(jnp.float32)
    guess = logits[:, ::2].max(1)
    assert (logits.max(1) - guess).max() * logit_kernel.LOG2E > at_once.MOST_LOG2
    with tpjax.use(interpret=True):
        check((hidden, head, labels, weights), 6e-3, form=form, implementation="pallas")


MESHES = """
import jax, jax.numpy as jnp, tpjax
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tpjax.pallas import linear_cross_entropy
from tpjax.pallas.losses import terms
from tpjax.pallas.losses.logit_kernel import LOG2E, Sums
from tpjax.pallas.losses.setup import Setup


def run(self, kind, hidden, head, labels, *vectors):
    x = terms.logits(hidden, head, self.options)
    label = jnp.where(terms.is_label(labels, x.shape[1], 0), x, 0).sum(1)[None]
    top = x.max(1) * LOG2E if kind == "sums" else vectors[0]
    weights = jnp.exp2(x * LOG2E - top[:, None])
    sums = Sums(weights.sum(1)[None], label, x.sum(1)[None], top[None])
    return sums if kind == "sums" else (sums, weights.astype(hidden.dtype))


def gradient(self, hidden, head, labels, vectors, first, columns):
    part = jax.lax.dynamic_slice_in_dim(head, first, columns, self.options.vocab_axis)
    x, (lse, *by) = terms.logits(hidden, part, self.options), vectors
    by = terms.Factors(*by)
    return terms.dlogits(x, labels - first, 0, lse / LOG2E, by, self.options).astype(hidden.dtype)


Setup.run, Setup.gradient = run, gradient  # the interpreter knows one device only
hidden, head = inputs("bf16[8,6,64]", 0), (inputs("f32[128,64]", 1) * 0.3).astype(jnp.bfloat16)
labels = jnp.where(jnp.arange(48).reshape(8, 6) % 7 == 2, -100, inputs("i32[8,6]", 2, 128))
weights = inputs("f32[8,6]", 3)
OPTIONS = {"z_loss": 1e-2, "label_smoothing": 0.1}


def value_and_gradients(*operands, **options):
    def loss(hidden, head, weights):
        return linear_cross_entropy(hidden, head, labels, weights, **OPTIONS, **options)

    return jax.value_and_grad(loss, (0, 1, 2))(*operands)


want = value_and_gradients(hidden, head, weights, implementation="xla")
for form, kind in (("one_pass", AxisType.Explicit), ("two_pass", AxisType.Auto)):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    named = {"form": form, "mesh_axis": "model" if kind == AxisType.Auto else None}
    with jax.set_mesh(mesh), tpjax.use(platform="cuda", implementation="pallas"):
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        operands = place(hidden, "data"), place(head, "model"), place(weights, "data")
        got = jax.jit(partial(value_and_gradients, **named))(*operands)
    assert_close(form, jax.device_get(got), want, 6e-3)
print("right")
"""


def test_on_four_devices():
    """Tokens and vocabulary split around the kernels, for which plain code stands."""
    assert "right" in run_python(MESHES, devices=4)


def shapes(tokens, features, vocab, vocab_axis=0, dtype=jnp.bfloat16):
    """Returns hidden, head and labels without values."""
    head = (features, vocab) if vocab_axis else (vocab, features)
    hidden = jax.ShapeDtypeStruct((tokens, features), dtype)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return hidden, jax.ShapeDtypeStruct(head, dtype), labels


LOWERED = [("sums", CONFIGS[0]), ("weights", CONFIGS[0]), *(("gradient", c) for c in CONFIGS)]


@pytest.mark.parametrize(("kind", "config"), LOWERED, ids=str)
def test_kernels_lower(kind, config):
    """Every kernel, and every config, is legal on a GPU."""
    count = {"sums": 0, "weights": 1, "gradient": 4}[kind]
    job = Job(kind, 0, 30.0, True, config, False, 192 if kind == "gradient" else None)
    given = (*shapes(136, 64, 320), *[SPLIT] * count)

    def run(hidden, head, labels, *vectors):
        first = None if job.columns is None else labels[:1]
        return logit_kernel.run(job, Operands(hidden, head, labels, vectors, first))

    with tpjax.use(platform="cuda"):
        text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert f"cross_entropy_{kind}" in text


REFUSALS = (
    (shapes(8, 64, 320, dtype=jnp.float32), {}, "hidden must be of dtype bfloat16"),
    (shapes(8, 64, 320, dtype=jnp.float16), {}, "of dtype bfloat16 in one pass"),
    (shapes(8, 40, 320), {}, "a multiple of 64 features; it has 40"),
    (shapes(8, 64, 257), {}, "a multiple of 64; it has 257"),
    (shapes(8, 64, 320), {"softcap": 3.0, "label_smoothing": 0.1}, "smoothed labels"),
)


@pytest.mark.parametrize(("given", "options", "reason"), REFUSALS, ids=lambda x: str(x)[-20:])
def test_refusals(given, options, reason):
    """What the kernels do not run is refused with the reason."""
    call = partial(linear_cross_entropy, implementation="pallas", **options)
    with tpjax.use(platform="cuda"), pytest.raises(UnsupportedError, match=reason):
        jax.eval_shape(call, *given)


GPU_SHAPES = ((1000, 512, 4032), (1031, 1024, 8192), (4096, 2048, 32000))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["one_pass", "two_pass"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_gpu_shapes(form, shape, vocab_axis):
    """Real sizes, both layouts, beside the reference in float64; equal bits again."""
    hidden, head, labels, weights = operands(*shape)
    head = (head * 0.1).astype(head.dtype)
    given = (hidden, head.T if vocab_axis else head, labels, weights)
    options = {"vocab_axis": vocab_axis, "z_loss": 1e-3, "implementation": "pallas"}
    check(given, 6e-3, form=form, **options)
    run = jax.jit(jax.grad(partial(linear_cross_entropy, form=form, **options), (0, 1)))
    assert_close("again", run(*given), run(*given), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu_configs(config):
    """A config changes no more than the speed."""
    hidden, head, labels, weights = operands(1000, 512, 4032)
    for form in ("one_pass", "two_pass"):
        request = Request("linear_cross_entropy", (1000, 512, 4032, form), CONFIGS)
        with trying(request, config):
            check((hidden, head, labels, weights), 6e-3, form=form, implementation="pallas")
        jax.clear_caches()


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "share"), [("one_pass", 4), ("two_pass", 20)])
def test_gpu_memory(form, share):
    """Temporaries, one float32 gradient of the head aside in one pass, beside logits in full."""
    given = shapes(8192, 4096, 128256)

    def taken(fn):
        compiled = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*given).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    head_bytes = 4 * 128256 * 4096 if form == "one_pass" else 0
    ours = taken(partial(linear_cross_entropy, form=form, implementation="pallas"))
    assert ours - head_bytes <= taken(plain) / share
