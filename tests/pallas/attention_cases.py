# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention one score at a time, in Python and float64, and calls drawn from all its features."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

Arrays = dict[str, Any]
DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
BATCH = 2


@dataclass(frozen=True)
class Case:
    """One call: sizes, static options, and shapes of the optional arrays that it is given."""

    sizes: tuple[int, int, int, int, int, int]
    """T, S, H, K, D, V."""
    options: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    seed: int

    def arrays(self, dtype: Any = np.float64) -> Arrays:
        """Returns random arrays by argument; lengths also beyond the end, and of nothing."""
        T, S, H, K, D, V = self.sizes
        rng = np.random.default_rng(self.seed)
        fixed = {"query": (BATCH, T, H, D), "key": (BATCH, S, K, D), "value": (BATCH, S, K, V)}
        found: Arrays = {}
        for name, shape in {**fixed, **dict(self.shapes)}.items():
            if name == "mask":
                found[name] = rng.random(shape) < 0.8
            elif name.endswith("lengths"):
                size = T if name.startswith("query") else S
                found[name] = rng.integers(0, size + 2, shape).astype(np.int32)
            elif name.endswith("ids"):
                found[name] = rng.integers(0, 2, shape).astype(np.int32)
            else:
                found[name] = rng.standard_normal(shape).astype(dtype)
        return found

    def cotangents(self, dtype: Any = np.float64) -> list[Any]:
        """Returns random cotangents of out, lse and max."""
        T, _, H, _, _, V = self.sizes
        rng = np.random.default_rng(self.seed + 1)
        shapes = [(BATCH, T, H, V), (BATCH, T, H), (BATCH, T, H)]
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


SIZES = (4, 6, 4, 2, 4, 3)
"""Of calls that are drawn: one, because each costs seconds of compiling. Lengths vary it."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a call: every feature is there or not, whatever the others are."""
    T, S, H, *_ = SIZES
    either = st.booleans()
    options: dict[str, Any] = {"is_causal": draw(either)}
    if draw(either):
        options["alignment"] = "bottom_right"
    if draw(either):
        options["local_window_size"] = draw(
            st.sampled_from([0, 2, (3, 0), (0, 1), (2, 1), (99, 1)])
        )
    if draw(either):
        options["softcap"] = draw(st.sampled_from([0.5, 2.0]))
    if draw(either):
        options["scale"] = draw(st.sampled_from([1.0, -0.3, 0.0]))
    shapes: dict[str, tuple[int, ...]] = {}
    scores_like = [(H, 1, S), (BATCH, 1, T, S)]
    for name in ("bias", "mask"):
        if draw(either):
            shapes[name] = draw(st.sampled_from(scores_like))
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if draw(either):
            shapes[name] = (BATCH,)
    if options["is_causal"] and draw(either):
        shapes["prefix_lengths"] = (BATCH,)
    if draw(either):
        shapes["query_segment_ids"] = (BATCH, T)
        shapes["key_value_segment_ids"] = (BATCH, S)
    if draw(either):
        shapes["alibi_slopes"] = draw(st.sampled_from([(H,), (BATCH, H)]))
    if draw(either):
        shapes["sinks"] = (H,)
    return Case(SIZES, tuple(options.items()), tuple(shapes.items()), draw(st.integers(0, 999)))


def everything(sizes: tuple[int, int, int, int, int, int] = SIZES) -> Case:
    """Returns a call with all features at once."""
    T, S, H, *_ = sizes
    options = {"is_causal": True, "alignment": "bottom_right", "local_window_size": (3, 2)}
    options |= {"softcap": 2.0, "scale": 0.7}
    shapes: dict[str, tuple[int, ...]] = {
        "bias": (BATCH, H, T, S), "mask": (BATCH, 1, T, S), "query_seq_lengths": (BATCH,),
        "key_value_seq_lengths": (BATCH,), "prefix_lengths": (BATCH,), "sinks": (H,),
        "query_segment_ids": (BATCH, T), "alibi_slopes": (BATCH, H),
    }  # fmt: skip
    if T != S:
        shapes["key_value_segment_ids"] = (BATCH, S)
    return Case(sizes, tuple(options.items()), tuple(shapes.items()), 3)


def position(arrays: Arrays, options: dict[str, Any], b: int, t: int) -> int:
    """Returns where query t stands among the keys."""
    if options.get("alignment") != "bottom_right":
        return t
    T, S = arrays["query"].shape[1], arrays["key"].shape[1]
    T_b = min(T, arrays["query_seq_lengths"][b]) if "query_seq_lengths" in arrays else T
    S_b = min(S, arrays["key_value_seq_lengths"][b]) if "key_value_seq_lengths" in arrays else S
    return t + int(S_b) - int(T_b)


def sees(arrays: Arrays, options: dict[str, Any], b: int, h: int, t: int, s: int) -> bool:
    """Returns whether query t sees key s."""
    at = position(arrays, options, b, t)
    if "query_seq_lengths" in arrays and t >= arrays["query_seq_lengths"][b]:
        return False
    if "key_value_seq_lengths" in arrays and s >= arrays["key_value_seq_lengths"][b]:
        return False
    prefix = arrays["prefix_lengths"][b] if "prefix_lengths" in arrays else 0
    if options.get("is_causal") and s > at and s >= prefix:
        return False
    window = options.get("local_window_size")
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        if s < at - left or s > at + right:
            return False
    if "query_segment_ids" in arrays:
        keys = arrays.get("key_value_segment_ids", arrays["query_segment_ids"])
        if arrays["query_segment_ids"][b, t] != keys[b, s]:
            return False
    return bool(_at(arrays["mask"], b, h, t, s)) if "mask" in arrays else True


def _at(x: Any, *where: int) -> Any:
    """Returns an element of an array that is broadcast to [B, H, T, S]."""
    return x[_place(x, where)]


def _place(x: Any, where: tuple[int, ...]) -> tuple[int, ...]:
    places = zip(where[len(where) - x.ndim :], x.shape, strict=True)
    return tuple(0 if size == 1 else i for i, size in places)


def by_loops(
    arrays: Arrays, options: dict[str, Any], cotangents: list[Any]
) -> tuple[list[Any], Arrays]:
    """Returns out, lse and max, and gradients by argument, from the formulas alone."""
    dout, dlse, _ = cotangents
    q, k, v = (arrays[n].astype(np.float64) for n in ("query", "key", "value"))
    (B, T, H, D), group = q.shape, q.shape[2] // k.shape[2]
    S, scale, cap = k.shape[1], options.get("scale", D**-0.5), options.get("softcap")
    out = np.zeros((B, T, H, v.shape[-1]))
    lse, top = np.full((B, T, H), -np.inf), np.full((B, T, H), -np.inf)
    d = {n: np.zeros(arrays[n].shape) for n in DIFFERENTIABLE if n in arrays}
    for b, t, h in np.ndindex(B, T, H):
        seen = [s for s in range(S) if sees(arrays, options, b, h, t, s)]
        at, kv = position(arrays, options, b, t), h // group
        slope = 0.0
        if "alibi_slopes" in arrays:
            slope_at = (b, h) if arrays["alibi_slopes"].ndim == 2 else (h,)
            slope = arrays["alibi_slopes"][slope_at]
        score, slant = {}, {}
        for s in seen:
            product = scale * float(q[b, t, h] @ k[b, s, kv])
            capped = product if cap is None else cap * math.tanh(product / cap)
            slant[s] = 1.0 if cap is None else 1 - (capped / cap) ** 2
            extra = _at(arrays["bias"], b, h, t, s) if "bias" in arrays else 0.0
            score[s] = capped - slope * abs(at - s) + extra
        sink = arrays["sinks"][h] if "sinks" in arrays else -np.inf
        total = sum(math.exp(x) for x in score.values()) + math.exp(sink)
        if total == 0:
            continue
        lse[b, t, h], top[b, t, h] = math.log(total), max(score.values(), default=-np.inf)
        p = {s: math.exp(score[s]) / total for s in seen}
        for s in seen:
            out[b, t, h] += p[s] * v[b, s, kv]
        through = float(dout[b, t, h] @ out[b, t, h])
        for s in seen:
            ds = p[s] * (float(dout[b, t, h] @ v[b, s, kv]) - through + dlse[b, t, h])
            d["value"][b, s, kv] += p[s] * dout[b, t, h]
            d["query"][b, t, h] += ds * slant[s] * scale * k[b, s, kv]
            d["key"][b, s, kv] += ds * slant[s] * scale * q[b, t, h]
            if "bias" in arrays:
                d["bias"][_place(arrays["bias"], (b, h, t, s))] += ds
            if "alibi_slopes" in arrays:
                d["alibi_slopes"][slope_at] -= ds * abs(at - s)
        if "sinks" in arrays:
            d["sinks"][h] += math.exp(sink) / total * (dlse[b, t, h] - through)
    return [out, lse, top], d
