# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's door: wrong arguments are named, and who refuses a call says why."""

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import inputs
from tpjax.core.errors import UnsupportedError
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.dispatch import record_choices

Q, KEY = inputs("bf16[2,8,4,16]", 0), inputs("bf16[2,8,2,16]", 1)
WIDE, THREE, ONE = inputs("f32[2,8,2,16]", 1), inputs("bf16[2,8,3,16]", 2), jnp.array([3])


TWO, IDS = jnp.array([3, 4]), jnp.zeros((2, 8), jnp.int32)


def causal(**option):
    """Returns the arguments and options of a causal call."""
    return (Q, KEY, KEY), {"is_causal": True, **option}


def with_option(**option):
    """Returns the arguments and options of a call that is sound but for one option."""
    return (Q, KEY, KEY), option


DOOR = [
    (ValueError, "query must be of rank 3", (Q[0, 0], KEY, KEY), {}),
    (TypeError, "query must be an array; got list", ([1.0], KEY, KEY), {}),
    (TypeError, "query must be of dtype", (jnp.ones((2, 8, 4, 16), jnp.int32), KEY, KEY), {}),
    (TypeError, "key must be of query's dtype bfloat16; got float32", (Q, WIDE, KEY), {}),
    (ValueError, "value must be of query's rank 4", (Q, KEY, KEY[0]), {}),
    (ValueError, "key must be of query's leading axes", (Q, KEY[:1], KEY[:1]), {}),
    (ValueError, "key must be of query's 16 features", (Q, KEY[..., :8], KEY), {}),
    (ValueError, "value must be of key's shape .* but for the last", (Q, KEY, KEY[:, :4]), {}),
    (ValueError, "number of heads that divides query's; got 3 heads", (Q, THREE, THREE), {}),
    (ValueError, "bias must be broadcastable", (Q, KEY, KEY, jnp.ones((8, 7))), {}),
    (TypeError, "bias must be of dtype", (Q, KEY, KEY, jnp.ones((8, 8), bool)), {}),
    (ValueError, "mask must be broadcastable", (Q, KEY, KEY, None, jnp.ones((3, 4, 8, 8)) > 0), {}),
    (TypeError, "mask must be boolean", (Q, KEY, KEY, None, jnp.ones((8, 8))), {}),
    (TypeError, "scale must be a number", (Q, KEY, KEY), {"scale": "big"}),
    (ValueError, "scale must be finite", (Q, KEY, KEY), {"scale": float("nan")}),
    (TypeError, "is_causal must be True or False", (Q, KEY, KEY), {"is_causal": 1}),
    (ValueError, "query_seq_lengths must be of shape", *with_option(query_seq_lengths=ONE)),
    (TypeError, "lengths must be an integer", *with_option(key_value_seq_lengths=ONE * 1.0)),
    (TypeError, "local_window_size must be a number", *with_option(local_window_size=1.5)),
    (ValueError, "local_window_size must be zero", *with_option(local_window_size=(-1, 0))),
    (TypeError, "local_window_size must be a number", *with_option(local_window_size=True)),
    (TypeError, "local_window_size must be a number", *with_option(local_window_size=(1, 2, 3))),
    (ValueError, "alignment must be 'top_left' or 'bottom_right'; got 'bottom'. Did you mean "
     "'bottom_right'", *with_option(alignment="bottom")),
    (ValueError, "prefix_lengths must be None where is_causal is False.* is_causal=True",
     *with_option(prefix_lengths=TWO)),
    (ValueError, "prefix_lengths must be of shape", *causal(prefix_lengths=ONE)),
    (TypeError, "prefix_lengths must be an integer array", *causal(prefix_lengths=[1, 2])),
    (ValueError, "key_value_segment_ids must be None without query_segment_ids.* Pass query_seg",
     *with_option(key_value_segment_ids=IDS)),
    (ValueError, "query_segment_ids must be of shape .*2, 8.*, one id for each token",
     *with_option(query_segment_ids=IDS[:, :7])),
    (ValueError, "key_value_segment_ids must be of shape .*2, 8",
     *with_option(query_segment_ids=IDS, key_value_segment_ids=IDS[0])),
    (TypeError, "query_segment_ids must be an integer array or None; got float32",
     *with_option(query_segment_ids=IDS * 1.0)),
    (ValueError, "key_value_segment_ids must be given where 5 keys are not as many as 8 queries",
     (Q, KEY[:, :5], KEY[:, :5]), {"query_segment_ids": IDS}),
    (ValueError, "softcap must be above zero; got 0.0. None leaves", *with_option(softcap=0.0)),
    (ValueError, "softcap must be finite", *with_option(softcap=float("inf"))),
    (TypeError, "softcap must be a number", *with_option(softcap=jnp.ones(2))),
    (TypeError, "softcap must be a number", *with_option(softcap=True)),
    (TypeError, "alibi_slopes must be an array or None; got list",
     *with_option(alibi_slopes=[1.0])),
    (TypeError, "alibi_slopes must be of dtype", *with_option(alibi_slopes=jnp.arange(4))),
    (ValueError, r"alibi_slopes must be of shape .4,. or .2, 4.",
     *with_option(alibi_slopes=TWO * 0.5)),
    (TypeError, "sinks must be of dtype", *with_option(sinks=jnp.arange(4))),
    (ValueError, r"sinks must be of shape .4,., one score for each query head; got shape .2, 4.",
     *with_option(sinks=jnp.ones((2, 4)))),
    (TypeError, "return_lse must be True or False", *with_option(return_lse=1)),
    (TypeError, "return_max must be True or False", *with_option(return_max="yes")),
    (TypeError, "deterministic must be True or False; got None", *with_option(deterministic=None)),
    (UnsupportedError, "unknown implementation 'cudnn'", *with_option(implementation="cudnn")),
    (UnsupportedError, "unknown implementation 'xlaa'.* Did you mean 'xla'",
     (Q[:0], KEY[:0], KEY[:0]), {"implementation": "xlaa"}),
    (ValueError, r"value must be of query's rank 4, ..B, S, K, V.", (Q, KEY, KEY[0]), {}),
    (TypeError, "query_seq_lengths must be an integer array or None; got list. Convert it",
     *with_option(query_seq_lengths=[3, 4])),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "args", "options"), DOOR, ids=[d[1] for d in DOOR])
def test_door(error, says, args, options):
    """Wrong arguments are named at the door, with what was got."""
    with pytest.raises(error, match=f"flash_attention: .*{says}"):
        flash_attention(*args, **options)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_must_be_static(name):
    """A traced number is refused with a remedy."""
    with pytest.raises(TypeError, match=f"{name} must be a number known when tracing.* It|Mult"):
        jax.jit(lambda s: flash_attention(Q, KEY, KEY, **{name: s}))(0.5)


def test_flags_must_be_static():
    """A traced flag is refused with a remedy."""
    with pytest.raises(TypeError, match=r"is_causal must be True or False.* static argument"):
        jax.jit(lambda x: flash_attention(Q, KEY, KEY, is_causal=x))(True)


K64 = inputs("bf16[1,8,2,64]", 0)
REFUSALS = [
    ("its dtype is float32", (K64.astype(jnp.float32),) * 3, {}),
    ("its softcap is above 4096", (K64,) * 3, {"softcap": 1e5}),
    ("have 16 features; the kernel takes", (K64[..., :16],) * 3, {}),
    (
        "a bias or mask for a single key",
        (K64, *(K64[:, :1],) * 2),
        {"mask": jnp.ones((1, 1), bool)},
    ),
]


@pytest.mark.parametrize(("reason", "args", "options"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_refusals(reason, args, options):
    """The kernel says why it cannot run a call; the XLA form does it, with a warning."""
    with tpjax.use(platform="cuda"):
        with record_choices() as choices, pytest.warns(UserWarning, match=reason):
            jax.make_jaxpr(lambda *a: flash_attention(*a, **options))(*args)
        assert choices[0].implementation == "xla"
        assert reason in choices[0].refused[0].reason
        with pytest.raises(UnsupportedError, match=reason):
            flash_attention(*args, implementation="pallas", **options)


def test_cpu_runs_xla_and_says_why():
    """On a CPU the kernel's machine is missing: no warning, the reason is kept."""
    with record_choices() as choices:
        flash_attention(K64, K64, K64)
    assert choices[0].implementation == "xla"
    assert "needs cuda; this is cpu" in choices[0].refused[0].reason
