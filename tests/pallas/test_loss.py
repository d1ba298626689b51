# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head: meaning, forms, bad input, derivatives, meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close, inputs, run_python
from tpjax.core.losses import linear_cross_entropy_reference as reference
from tpjax.pallas import linear_cross_entropy
from tpjax.pallas.losses import chunked, forms
from tpjax.pallas.losses.row import linear_cross_entropy_cost

FORMS = ("one_pass", "two_pass")
SIZES = (37, 24, 131)
"""R, D, V."""


def arrays(tokens=SIZES[0], features=SIZES[1], vocab=SIZES[2], dtype="f32"):
    """Returns hidden, head [V, D], labels of which a few are ignored (-100), and weights.

    A few of the weights are zero: the loss has a derivative by them all the same.
    """
    labels = inputs(f"i32[{tokens}]", 2, vocab)
    labels = jnp.where(jnp.arange(tokens) % 5 == 3, -100, labels)
    hidden = inputs(f"{dtype}[{tokens},{features}]", 0)
    weights = jnp.where(jnp.arange(tokens) % 7 == 2, 0, inputs(f"f32[{tokens}]", 3))
    return hidden, inputs(f"{dtype}[{vocab},{features}]", 1), labels, weights


def with_gradients(fn, labels, cotangent=0.7):
    """Returns (hidden, head, weights) -> results and gradients of a call."""

    def run(hidden, head, weights):
        results, vjp = jax.vjp(lambda h, w, t: fn(h, w, labels, t), hidden, head, weights)
        rng = np.random.default_rng(0)

        def like(x):
            if not x.ndim:
                return jnp.asarray(cotangent, x.dtype)
            return jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))

        return results, vjp(jax.tree.map(like, results))

    return run


def exact(fn, hidden, head, labels, weights):
    """Returns results and gradients in float64."""
    wide = [np.asarray(x, np.float64) for x in (hidden, head, weights)]
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(with_gradients(fn, np.asarray(labels)))(*wide))


def check(operands, tol, **options):
    """Asserts that a call gives the reference's results and gradients."""
    hidden, head, labels, weights = operands
    meaning = {k: v for k, v in options.items() if k not in ("form", "implementation")}
    want = exact(partial(reference, **meaning), *operands)
    run = with_gradients(partial(linear_cross_entropy, **options), labels)
    got = jax.jit(run)(hidden, head, weights)
    want = jax.tree.map(lambda w, g: w.astype(g.dtype), want, got)
    assert_close(f"{options}", got, want, tol)


@pytest.fixture
def small_blocks(monkeypatch):
    """Cuts logits into several blocks, of which one is odd."""
    monkeypatch.setattr(chunked, "MIN_BLOCK_BYTES", 4 * 16 * SIZES[2])
    monkeypatch.setattr(chunked, "ROUND_TO", 8)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_reference_says_what_the_equation_does():
    """Against sums written out over a smoothed target distribution, in float64."""
    hidden, head, labels, weights = (np.asarray(x) for x in arrays())
    x = 3 * np.tanh(hidden.astype(np.float64) @ head.T.astype(np.float64) / 3)
    lse = np.log(np.exp(x).sum(1))
    target = np.full(x.shape, 0.1 / x.shape[1])
    seen = labels >= 0
    target[np.arange(len(x))[seen], labels[seen]] += 0.9
    losses = np.where(seen, -(target * (x - lse[:, None])).sum(1) + 0.01 * lse**2, 0)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (hidden, head, weights)]
        call = partial(reference, wide[0], wide[1], labels, **options)
        for_all = call(wide[2], reduction="none", return_lse=True)
        mean, total = call(wide[2]), call(reduction="sum")
    weighted = losses * weights
    assert_close("losses", for_all, (weighted, lse), 1e-12)
    assert_close("mean", mean, weighted.sum() / np.asarray(weights, np.float64)[seen].sum(), 1e-12)
    assert_close("sum", total, losses.sum(), 1e-12)


OPTIONS = (
    {"label_smoothing": 0.1, "return_lse": True},
    {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0},
    {"ignore_index": 7, "z_loss": 1e-2, "return_token_losses": True, "softcap": 5.0},
    {"ignore_index": 7, "reduction": "none", "return_lse": True},
)
CASES = list(zip(FORMS * 2, OPTIONS, strict=True))


@pytest.mark.parametrize(("form", "options"), CASES, ids=str)
def test_forms(form, options, small_blocks):
    """Both forms, in several blocks, mean what the reference does, gradients too."""
    hidden, head, labels, weights = arrays()
    if "ignore_index" in options:
        labels = jnp.where(labels < 0, 7, labels)
    check((hidden, head, labels, weights), 2e-6, form=form, **options)


@pytest.mark.parametrize("form", FORMS)
def test_layouts_are_alike(form, small_blocks):
    """A head [D, V] gives what a head [V, D] does."""
    hidden, head, labels, weights = arrays()
    run = with_gradients(partial(linear_cross_entropy, form=form), labels)
    turned = with_gradients(partial(linear_cross_entropy, form=form, vocab_axis=1), labels)

    @jax.jit
    def both(hidden, head, weights):
        return run(hidden, head, weights), turned(hidden, head.T, weights)

    (loss, (dhidden, dhead, dweights)), got = both(hidden, head, weights)
    assert_close(form, got, (loss, (dhidden, dhead.T, dweights)), 1e-6)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 7), (3, 1031), (7, 1), (63, 1000)])
def test_odd_sizes(tokens, vocab):
    """Sizes that nothing divides, a loss of each token."""
    check(arrays(tokens, 9, vocab), 2e-6, reduction="none", return_lse=True, z_loss=1e-3)


def test_mixed_dtypes(small_blocks):
    """The head takes part in hidden's dtype; its gradient comes in its own, summed in float32."""
    hidden, head, labels, weights = arrays()
    hidden, rounded = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    for form in FORMS:
        run = with_gradients(partial(linear_cross_entropy, form=form), labels)
        got = jax.jit(run)(hidden, head, weights)
        want = exact(reference, hidden, rounded, labels, weights)
        want = jax.tree.map(lambda w, g: w.astype(g.dtype), want, got)
        assert got[1][1].dtype == jnp.float32
        assert_close(form, got, want, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_equal_calls_give_equal_bits(implementation, small_blocks):
    """Nothing is summed in an order that varies, as it may on a GPU alone."""
    hidden, head, labels, weights = arrays(37, 64, 192, dtype="bf16")
    for form in FORMS:
        call = partial(linear_cross_entropy, form=form, implementation=implementation)
        run = jax.jit(with_gradients(call, labels))
        assert_close(form, run(hidden, head, weights), run(hidden, head, weights), 0)


def test_nothing_to_learn():
    """No tokens, and tokens none of which counts: zero, and gradients of zero."""
    hidden, head, labels, _ = arrays()
    none = linear_cross_entropy(hidden[:0], head, labels[:0])
    every = linear_cross_entropy(hidden[:0], head, labels[:0], reduction="none", return_lse=True)
    assert none == 0
    assert [x.shape for x in every] == [(0,), (0,)]
    ignored = jnp.full_like(labels, -100)
    for form in FORMS:
        run = partial(linear_cross_entropy, labels=ignored, form=form)
        loss, grads = jax.value_and_grad(run, (0, 1))(hidden, head)
        assert_close(form, (loss, *grads), jax.tree.map(jnp.zeros_like, (loss, *grads)), 0)


def test_garbage_in_ignored_tokens():
    """The loss does not see what an ignored token's hidden is."""
    hidden, head, labels, _ = arrays()
    broken = jnp.where((labels < 0)[:, None], jnp.inf, hidden)
    for form in FORMS:
        got = linear_cross_entropy(broken, head, labels, form=form)
        assert_close(form, got, linear_cross_entropy(hidden, head, labels, form=form), 1e-6)


@pytest.mark.parametrize("bad", [-1, 131, 2**31 - 1])
def test_bad_labels(bad):
    """Known values are refused; traced ones make their token NaN, and no other."""
    hidden, head, labels, _ = arrays()
    labels = labels.at[4].set(bad)
    with pytest.raises(ValueError, match=rf"labels must be in \[0, 131\).*got {bad} at \[4\]"):
        linear_cross_entropy(hidden, head, labels)
    call = jax.jit(partial(linear_cross_entropy, reduction="none"))
    losses = np.asarray(call(hidden, head, labels))
    assert np.flatnonzero(np.isnan(losses)).tolist() == [4]
    assert np.isnan(jax.jit(linear_cross_entropy)(hidden, head, labels))


def test_narrow_labels():
    """Labels may be any integers."""
    hidden, head, labels, _ = arrays(vocab=100)
    labels = jnp.abs(labels) % 100
    want = linear_cross_entropy(hidden, head, labels)
    for dtype in ("uint8", "int8", "int16", "uint32"):
        assert_close(dtype, linear_cross_entropy(hidden, head, labels.astype(dtype)), want, 0)
    wrapped = labels.astype(jnp.uint32).at[4].set(2**32 - 100)  # not ignore_index
    call = jax.jit(partial(linear_cross_entropy, reduction="none"))
    assert np.flatnonzero(np.isnan(np.asarray(call(hidden, head, wrapped)))).tolist() == [4]


H, W, Y = jnp.zeros((3, 8)), jnp.zeros((5, 8)), jnp.zeros(3, jnp.int32)
REFUSED = (
    ((H, W.T, Y), {}, ValueError, "head must be .V, D. with the 8 .*vocab_axis=1"),
    ((H, W, Y), {"vocab_axis": 1}, ValueError, "head must be .D, V. .*vocab_axis=0"),
    ((H, W, Y[:2]), {}, ValueError, "labels must be of shape .3,.*got shape .2,"),
    ((H, W, H), {}, TypeError, "labels must be integers; got float32"),
    ((H, W, Y, jnp.ones(4)), {}, ValueError, "weights must be of shape"),
    ((Y, W, Y), {}, TypeError, "hidden must be of dtype .*got int32"),
    (([1.0], W, Y), {}, TypeError, "hidden must be an array; got list"),
    ((H, W[:0], Y), {}, ValueError, "head must be of at least one word"),
    ((H, W, Y), {"vocab_axis": 2}, ValueError, "vocab_axis must be 0 or 1"),
    ((H, W, Y), {"label_smoothing": 1.0}, ValueError, "label_smoothing must be in"),
    ((H, W, Y), {"z_loss": -1}, ValueError, "z_loss must be zero or more"),
    ((H, W, Y), {"softcap": 0.0}, ValueError, "softcap must be above zero.*None"),
    ((H, W, Y), {"reduction": "avg"}, ValueError, "reduction must be .*Valid: mean"),
    ((H, W, Y), {"form": "three"}, ValueError, "form must be 'one_pass' or 'two_pass'"),
    ((H, W, Y), {"form": "one_pass", "reduction": "none"}, ValueError, "form must be 'two_pass'"),
    ((H, W, Y), {"ignore_index": 1.5}, TypeError, "ignore_index must be an integer"),
    ((H, W, Y), {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ((H, W, Y), {"mesh_axis": "model"}, ValueError, "mesh_axis must be an axis of the mesh"),
)


@pytest.mark.parametrize(
    ("operands", "options", "error", "text"), REFUSED, ids=lambda x: str(x)[:30]
)
def test_refused(operands, options, error, text):
    """What cannot be is refused at the door, by name and with a remedy."""
    with pytest.raises(error, match=f"linear_cross_entropy: {text}"):
        linear_cross_entropy(*operands, **options)


DERIVATIVES = {
    "jvp": lambda f, h, w: jax.jvp(f, (h, w), (w[:5] * 0.1, w * 0.2)),
    "hessian": lambda f, h, w: jax.hessian(f)(h, w),
    "gradient's gradient": lambda f, h, w: jax.grad(
        lambda h, w: sum((g**2).sum() for g in jax.grad(f, (0, 1))(h, w)), (0, 1)
    )(h, w),
    "checkpoint": lambda f, h, w: jax.grad(jax.checkpoint(f), (0, 1))(h, w),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives(form, kind):
    """Forward mode and second derivatives are the reference's."""
    hidden, head, labels, weights = arrays(5, 4, 9)
    options = {"z_loss": 1e-2, "label_smoothing": 0.1}

    def loss(fn):
        return lambda h, w: fn(h, w, labels, weights, **options)

    apply = partial(jax.jit, static_argnums=0)(DERIVATIVES[kind])
    got = apply(loss(partial(linear_cross_entropy, form=form)), hidden, head)
    assert_close(kind, got, apply(loss(reference), hidden, head), 1e-5)


def test_form_follows_memory():
    """One pass where what it holds is at most 4 GiB; a loss of each token takes two."""
    assert forms.form_of(8192, 4096, 128256, reduced=True) == "one_pass"
    assert forms.form_of(65536, 16384, 128256, reduced=True) == "two_pass"
    assert forms.form_of(64, 16384, 128256, reduced=True) == "one_pass"  # one block
    assert forms.form_of(8, 8, 8, reduced=False) == "two_pass"


@pytest.mark.parametrize(("vocab_axis", "reduction"), [(0, "mean"), (1, "none")])
def test_cost(vocab_axis, reduction):
    """The arithmetic is what XLA counts of the reference; the traffic, each array once."""
    head = (64, 512) if vocab_axis else (512, 64)
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 64), head)]
    given.append(jax.ShapeDtypeStruct((256,), jnp.int32))
    options = {"vocab_axis": vocab_axis, "reduction": reduction, "return_lse": True}
    cost = linear_cross_entropy_cost(*given, **options)
    counted = jax.jit(partial(reference, **options)).lower(*given).cost_analysis()
    assert counted is not None
    assert 0.9 * counted["flops"] <= cost.flops <= counted["flops"]
    losses = 256 if reduction == "none" else 1
    assert cost.bytes == 4 * (256 * 64 + 512 * 64 + 256 + losses + 256)


def plain(hidden, head, labels):
    """The mean loss as anyone writes it."""
    logits = (hidden @ head.T).astype(jnp.float32)
    return jnp.mean(
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    )


@pytest.mark.parametrize("form", FORMS)
def test_memory(form):
    """Temporaries are at most an eighth of those of logits formed in full."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 64), (32000, 64))]
    shapes.append(jax.ShapeDtypeStruct((4096,), jnp.int32))

    def taken(fn):
        compiled = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*shapes).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    head_bytes = 4 * 32000 * 64 if form == "one_pass" else 0
    ours = taken(partial(linear_cross_entropy, form=form)) - head_bytes
    assert ours <= taken(plain) / 8


MESHES = """
import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tpjax.pallas import linear_cross_entropy

hidden, head = inputs("f32[8,6,16]", 0), inputs("f32[64,16]", 1)
labels = jnp.where(jnp.arange(48).reshape(8, 6) % 7 == 2, -100, inputs("i32[8,6]", 2, 64))
weights = inputs("f32[8,6]", 3)
OPTIONS = {"z_loss": 1e-2, "label_smoothing": 0.1, "return_lse": True}


def run(hidden, head, labels, weights, **options):
    def scalar(hidden, head, weights):
        loss, lse = linear_cross_entropy(hidden, head, labels, weights, **OPTIONS, **options)
        return loss, lse

    gradient = jax.value_and_grad(scalar, (0, 1, 2), has_aux=True)
    return gradient(hidden, head, weights)


def check(name, fn, *operands, gathered=False):
    compiled = jax.jit(fn).lower(*operands).compile()
    assert_close(name, jax.tree.map(jax.device_get, compiled(*operands)), WANT[form], 2e-6)
    assert ("all-gather" in compiled.as_text()) == gathered, name


WANT = {form: run(hidden, head, labels, weights, form=form) for form in ("one_pass", "two_pass")}
for form in WANT:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
        explicit = kind == AxisType.Explicit
        with jax.set_mesh(mesh):
            rows = P("data")
            put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
            others = put(labels, rows), put(weights, rows)
            operands = (put(hidden, rows), put(head, P("model")), *others)
            named = partial(run, form=form, mesh_axis=None if explicit else "model")
            if explicit or form == "one_pass":
                check(f"{kind} {form}", named, *operands)
            over_all = (put(hidden, P(("data", "model"))), head, *operands[2:])
            if not explicit and form == "two_pass":
                check(f"tokens {form}", partial(run, form=form), *over_all)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def mapped(hidden, head, labels, weights, checked):
        def local(hidden, head, weights, labels):
            loss, lse = linear_cross_entropy(
                hidden, head, labels, weights,
                reduction="sum", mesh_axis="model", form=form, **OPTIONS,
            )
            return jax.lax.psum(loss, "data"), lse

        def scalar(hidden, head, weights):
            specs = (P("data"), P("model"), P("data"), P("data"))
            split = jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")), check_vma=checked
            )
            return split(hidden, head, weights, labels)

        divisor = jnp.where(labels < 0, 0, weights).sum()
        (total, lse), back = jax.vjp(scalar, hidden, head, weights)
        return total, back((jnp.ones_like(total), jnp.zeros_like(lse)))

    whole = partial(linear_cross_entropy, reduction="sum", form=form, **OPTIONS)
    (total, _), back = jax.vjp(lambda h, w, t: whole(h, w, labels, t), hidden, head, weights)
    want = total, back((jnp.ones_like(total), jnp.zeros((8, 6))))
    for checked in (True, False):
        got = jax.jit(partial(mapped, checked=checked))(hidden, head, labels, weights)
        assert_close(f"mapped {form} {checked}", jax.device_get(got), want, 2e-6)
print("right")
"""


def test_on_four_devices():
    """Tokens and vocabulary split, under Auto, Explicit and Manual axes; nothing is gathered."""
    assert "right" in run_python(MESHES, devices=4)
