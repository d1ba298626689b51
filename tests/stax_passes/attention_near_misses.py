# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Code that is nearly attention, and must stay as written.

All axes have the same length, so that a wrong axis passes every check of shapes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.stax_passes.attention_spellings import einsum, out, softmax

N = 8
SQUARE = f"f32[{N},{N},{N},{N}]"
ROW, COL = np.arange(N)[:, None], np.arange(N)[None, :]
TRI = COL <= ROW
stop, log = jax.lax.stop_gradient, jnp.log


def scores(q, k):
    return einsum("bthd,bshd->bhts", q, k) * 0.35


def on_scores(change):
    """Returns attention with the scores changed before the softmax."""
    return lambda q, k, v: out(softmax(change(scores(q, k)), -1), v)


def on_weights(change):
    """Returns attention with the weights changed after the softmax."""
    return lambda q, k, v: out(change(softmax(scores(q, k), -1)), v)


def divided(change, axis=-1):
    """Returns attention with the sum of exponentials changed."""

    def fn(q, k, v):
        e = jnp.exp(scores(q, k))
        return out(e / change(e.sum(axis, keepdims=True)), v)

    return fn


def contracted(s, o):
    """Returns attention with other axes contracted."""
    return lambda q, k, v: einsum(o, softmax(einsum(s, q, k) * 0.35, -1), v)


def shifted(change):
    """Returns attention with something else than the maximum of the scores subtracted."""

    def fn(q, k, v):
        s = scores(q, k)
        e = jnp.exp(s - change(s))
        return out(e / jnp.exp(s).sum(-1, keepdims=True), v)

    return fn


def also(more):
    """Returns attention and something else made of scores and weights."""

    def fn(q, k, v):
        s = scores(q, k)
        w = softmax(s, -1)
        return out(w, v), more(s, w)

    return fn


def filled(mask, fill):
    """Returns attention with a fill where the mask is False."""
    return on_scores(lambda s: jnp.where(mask, s, fill))


def other_keys_for_values(q, k, v):
    return einsum("bhts,bhsd->bthd", softmax(scores(q, k), -1), v)


def values_of_another_batch_axis(q, k, v):
    return einsum("bhts,hsbd->bthd", softmax(scores(q, k), -1), v)


def scores_of_two_softmaxes(q, k, v):
    return out(softmax(softmax(scores(q, k), -1), -1), v)


def differential(q, k, v):
    return out(softmax(scores(q, k), -1) - 0.5 * softmax(scores(k, q), -1), v)


def softmax_of_queries_and_keys(q, k, v):
    return einsum("bthd,bhde->bthe", softmax(q, -1), einsum("bshd,bshe->bhde", softmax(k, 1), v))


def axial_product(q, k, v):
    return out(softmax(einsum("bthd,bthe->bhde", q, k), -1), v)


def max_of_another_axis(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1)[:, :, None, :])
    return out(e / e.sum(-1, keepdims=True), v)


def denominator_of_other_scores(q, k, v):
    e = jnp.exp(scores(q, k))
    return out(e / jnp.exp(scores(k, q)).sum(-1, keepdims=True), v)


def exponential_of_other_base(q, k, v):
    e = jnp.exp2(scores(q, k))
    return out(e / e.sum(-1, keepdims=True), v)


def gradient_of_values(q, k, v):
    # the transposed product: what differentiation makes of the values, dV
    w = softmax(scores(q, k), -1)
    return einsum("bhts,bthd->bshd", w, v)


def gradient_of_scores(q, k, v):
    w = softmax(scores(q, k), -1)
    dw = einsum("bthd,bshd->bhts", v, k)
    return out(w * (dw - (w * dw).sum(-1, keepdims=True)), k)


def masked_by_scores_of_others(q, k, v):
    s = scores(q, k)
    return out(softmax(jnp.where((scores(k, q) > 0) | (ROW == COL), s, -1e30), -1), v)


def top_k(q, k, v):
    s = scores(q, k)
    least = jax.lax.top_k(s, 3)[0][..., -1:]
    return out(softmax(jnp.where(s >= least, s, -1e30), -1), v)


def threshold_of_itself(q, k, v):
    s = scores(q, k)
    return out(softmax(jnp.where(s > 0, s, -1e30), -1), v)


def shifted_scores(q, k, v):
    s = jnp.pad(scores(q, k), ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
    return out(softmax(s, -1), v)


def gumbel(q, k, v):
    s = scores(q, k) + jax.random.gumbel(jax.random.key(0), (N, N, N, N))
    return out(stop(softmax(s, -1)), v)


def values_in_scores(q, k, v):
    return out(softmax(scores(q, k) * v[0, 0, 0, 0], -1), v)


def only_some_heads_normalised(q, k, v):
    s = scores(q, k)
    w = jnp.where(np.arange(N)[:, None, None] < 4, softmax(s, -1), jax.nn.sigmoid(s))
    return out(w, v)


def effects_between(q, k, v):
    s = scores(q, k)
    jax.debug.print("{}", s.max())
    return out(softmax(s, -1), v)


NEAR_MISSES = {
    "masked ones could be seen again": (
        (
            "unmasked again by a bias",
            on_scores(lambda s: jnp.where(TRI, s, -1e9) + jnp.where(TRI, 0.0, 1e9)),
        ),
        (
            "unmasked again by a sum",
            on_scores(lambda s: s + jnp.where(TRI, 0.0, -1e9) + jnp.where(TRI, 0.0, 1e9)),
        ),
    ),
    "is added to all scores, beside which they are lost": (
        ("a constant that swallows the scores", on_scores(lambda s: s + 1e9)),
    ),
    "which is not far below scores multiplied by": (
        ("scores as large as the fill", on_scores(lambda s: jnp.where(TRI, s * 1e9, -1e5))),
    ),
    "not taken over the axis that is contracted": (
        ("softmax over queries", lambda q, k, v: out(softmax(scores(q, k), -2), v)),
        ("softmax over heads", lambda q, k, v: out(softmax(scores(q, k), 1), v)),
        ("softmax over the batch", lambda q, k, v: out(softmax(scores(q, k), 0), v)),
        ("weights transposed", on_weights(lambda w: w.swapaxes(2, 3))),
        ("dV taken for PV", gradient_of_values),
        ("queries' axis contracted", contracted("bthd,bshd->bhts", "bhts,bthd->bshd")),
        ("heads contracted with values", contracted("bthd,bshd->bhts", "bhts,bshd->btsd")),
        ("diagonal of the scores", contracted("bthd,bthd->bht", "bht,bthd->bthd")),
        ("keys with heads of their own", contracted("bthd,bsgd->bhgts", "bhgts,bsgd->bthd")),
        ("sum over queries", divided(lambda z: z, -2)),
        ("sum over heads", divided(lambda z: z, 1)),
        ("talking heads after", on_weights(lambda w: einsum("bhts,hg->bgts", w, np.eye(N)))),
    ),
    "": (
        ("softmax over keys and heads", lambda q, k, v: out(softmax(scores(q, k), (1, 3)), v)),
        ("dS taken for P", gradient_of_scores),
        ("difference of two maps", differential),
        ("denominator of other scores", denominator_of_other_scores),
        ("base two", exponential_of_other_base),
        ("sum transposed", divided(lambda z: z.swapaxes(2, 3))),
        ("sum without gradient", divided(stop)),
        ("sum squared", divided(lambda z: z * z)),
        ("root of the sum", divided(jnp.sqrt)),
        ("sum plus one", divided(lambda z: z + 1.0)),
        ("sum at least one", divided(lambda z: jnp.maximum(z, 1.0))),
        ("mean for the sum", divided(lambda z: z / N)),
        ("sum of one head", divided(lambda z: z[:, :1])),
        ("mean subtracted above only", shifted(lambda s: s.mean(-1, keepdims=True))),
        ("maximum subtracted above only", shifted(lambda s: s.max(-1, keepdims=True))),
        ("weights without gradient", on_weights(stop)),
        ("weights in 8 bits", on_weights(lambda w: w.astype(jnp.float8_e4m3fn).astype(w.dtype))),
        ("Gumbel without gradient", gumbel),
        ("weights masked, not renormalised", on_weights(lambda w: jnp.where(TRI, w, 0.0))),
        ("weights times mask", on_weights(lambda w: w * TRI)),
        ("weights squared", on_weights(lambda w: w * w)),
        ("weights less a mean", on_weights(lambda w: w - 1.0 / N)),
        ("weights halved", on_weights(lambda w: w * 0.5)),
        ("weights rounded to one", on_weights(jnp.round)),
        ("weights reversed", on_weights(lambda w: w[..., ::-1])),
        ("weights of the first head", on_weights(lambda w: jnp.broadcast_to(w[:, :1], w.shape))),
        ("log of the weights", on_weights(lambda w: log(w + 1e-9))),
        (
            "weights through dropout",
            on_weights(
                lambda w: jnp.where(
                    jax.random.bernoulli(jax.random.key(0), 0.9, w.shape), w / 0.9, 0
                )
            ),
        ),
        ("some heads by sigmoid", only_some_heads_normalised),
        ("sigmoid attention", lambda q, k, v: out(jax.nn.sigmoid(scores(q, k)), v)),
        ("relu attention", lambda q, k, v: out(jax.nn.relu(scores(q, k)) / N, v)),
    ),
    "not shared by the same batch and head axes": (
        ("weights with heads and queries swapped", on_weights(lambda w: w.swapaxes(1, 2))),
    ),
    "not exactly one axis of features": (
        ("heads contracted in scores", contracted("bthd,bshd->bts", "bts,bshd->bthd")),
        ("batch contracted in scores", contracted("bthd,bshd->hts", "hts,bshd->bthd")),
        ("values summed over features", contracted("bthd,bshd->bhts", "bhts,bshd->bth")),
    ),
    "multiplied by an array, which is not masking": (
        ("two softmaxes", scores_of_two_softmaxes),
        ("scores times 0/1 mask", on_scores(lambda s: s * TRI)),
        ("scores times positions", on_scores(lambda s: s * (1.0 + COL))),
        ("scores divided by themselves", on_scores(lambda s: s / (1 + jnp.abs(s)))),
    ),
    "not made from a product of queries and keys": (
        ("linear attention", softmax_of_queries_and_keys),
        ("scores cubed", on_scores(lambda s: s**3)),
        ("scores through relu", on_scores(jax.nn.relu)),
        ("absolute scores", on_scores(jnp.abs)),
        ("scores cast to integers", on_scores(lambda s: s.astype(jnp.int32).astype(s.dtype))),
        ("scores in 8 bits", on_scores(lambda s: s.astype(jnp.float8_e4m3fn).astype(s.dtype))),
        ("scores reversed", on_scores(lambda s: s[..., ::-1])),
        ("scores rolled", on_scores(lambda s: jnp.roll(s, 1, -1))),
        ("scores summed along keys", on_scores(lambda s: jnp.cumsum(s, -1))),
        ("scores sorted", on_scores(lambda s: jnp.sort(s, -1))),
        ("scores shifted as in Transformer-XL", shifted_scores),
        ("scores of reduced precision", on_scores(lambda s: jax.lax.reduce_precision(s, 4, 3))),
    ),
    "is also used at": (
        ("maximum of another axis", max_of_another_axis),
        ("scores less their mean", on_scores(lambda s: s - s.mean(-1, keepdims=True) * COL)),
        ("mask made of the scores", threshold_of_itself),
        ("top three", top_k),
        ("entropy of the weights", also(lambda s, w: -(w * log(w)).sum(-1))),
        ("largest score returned", also(lambda s, w: s.max())),
        (
            "weights used twice",
            lambda q, k, v: out(softmax(scores(q, k), -1), v) + out(softmax(scores(q, k), -1), k),
        ),
        ("scores printed", effects_between),
    ),
    "both operands of mul come from matrix products": (
        ("scores through gelu", on_scores(jax.nn.gelu)),
    ),
    "go through exp": (("exponential of scores", on_scores(jnp.exp)),),
    "go through min": (("clipped scores", on_scores(lambda s: jnp.clip(s, -5, 5))),),
    "go through stop_gradient": (("scores without gradient", on_scores(stop)),),
    "both operands of add come from matrix products": (
        ("scores plus their transpose", on_scores(lambda s: s + s.swapaxes(2, 3))),
    ),
    "an axis of their own besides tokens": (
        ("talking heads before", on_scores(lambda s: einsum("bhts,hg->bgts", s, np.ones((N, N))))),
    ),
    "a constant is divided by the scores": (
        ("constant over the scores", on_scores(lambda s: 1.0 / s)),
    ),
    "not far below every score": (
        ("masked with zero", filled(TRI, 0.0)),
        ("masked with -3", filled(TRI, -3.0)),
        ("masked with -100", filled(TRI, -100.0)),
        ("masked with +1e9", filled(TRI, 1e9)),
        ("masked, then divided by 1e9", on_scores(lambda s: jnp.where(TRI, s, -1e9) / 1e9)),
        ("masked, then negated", on_scores(lambda s: -jnp.where(TRI, s, -1e9))),
    ),
    "something that is not one constant": (("masked with rows", filled(TRI, ROW * 1.0)),),
    "hides every key from some query": (
        ("strictly causal", filled(COL < ROW, -1e9)),
        ("static padding under causal", filled(TRI & (COL >= 1), -1e30)),
        (
            "two wheres that leave nothing",
            on_scores(lambda s: jnp.where(COL > ROW, jnp.where(TRI, s, -1e9), -1e9)),
        ),
    ),
    "multiplied by a traced value": (("scaled by a value", values_in_scores),),
    "is also returned": (
        ("weights returned", also(lambda s, w: w)),
        ("scores returned", also(lambda s, w: s)),
    ),
}
"""What is left as written, by words of the reason; silently under the empty one."""

WRONG_HITS = (
    ("first query blind", filled(ROW > 0, -1e30)),
    ("everything masked", filled(COL < 0, -1e30)),
    ("one head blind", filled(np.arange(N)[:, None, None] > 0, -1e30)),
    ("one sequence blind", filled(np.arange(N)[:, None, None, None] > 0, -1e30)),
    (
        "first key hidden by addition under causal",
        on_scores(lambda s: jnp.where(TRI, s, -1e9) + jnp.where(COL >= 1, 0.0, -1e9)),
    ),
    (
        "filled with -1e9 beside -1e30",
        on_scores(lambda s: jnp.where(TRI, jnp.where(COL >= 1, s, -1e9), -1e30)),
    ),
)
"""Masks that hide whole rows: softmax then gives the mean, or what the fills leave, the kernel 0.

The contract of the rule says so where a mask is an operand; these hide rows as written, which could
be told: a fault each, strict expected failures.
"""

UNUSUAL = (
    ("tokens contracted in scores", contracted("bthd,bthe->bhde", "bhts,bshd->bthd")),
    ("axes of values swapped", other_keys_for_values),
    ("values of another batch", values_of_another_batch_axis),
    ("product over tokens", axial_product),
    ("bool added", on_scores(lambda s: s + TRI)),
    ("mask made of other scores", masked_by_scores_of_others),
)
"""What is attention although it does not look it, and is rightly found."""
