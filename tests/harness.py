# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Random inputs, the one comparison of arrays that tests use, and a runner for several devices."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core.operator import parse_spec

ROOT = Path(__file__).resolve().parent.parent
"""The top folder of the source tree."""

WORST_OVER_RMS = 32.0
"""How far one element may stand above `tol`: a wrong element must not hide in a large array.

Rounding errors stay within 6 of their RMS in a million elements; inside a large row more is normal.
"""


def inputs(spec: str, seed: int, below: int = 128) -> jax.Array:
    """Returns random values of the spec: standard normal, integers in [0, below), or fair coins.

    Equal (spec, seed) give equal values; any other pair gives independent ones.

    >>> inputs("bf16[2,3]", seed=0).shape
    (2, 3)
    """
    dtype, shape = parse_spec(spec)
    rng = np.random.default_rng([seed, *spec.replace(" ", "").encode()])
    if dtype == np.bool_:
        values = rng.integers(0, 2, shape)
    elif np.issubdtype(dtype, np.integer):
        values = rng.integers(0, below, shape)
    else:
        values = rng.standard_normal(shape)
    return jnp.asarray(np.asarray(values).astype(dtype))


def assert_close(what: str, actual: Any, expected: Any, tol: float) -> None:
    """Asserts that two pytrees of arrays agree within a relative RMS error of `tol` in every leaf.

    Structure, shapes and dtypes must be equal (cast `expected` where the reference is wider), and
    all values finite. Integers and booleans must be equal. No element may be wrong by more than
    `WORST_OVER_RMS * tol` of its own size, the RMS of its row (along the last axis) or that of all
    of `expected`, whichever is largest: what cancels in one element does so in its row's rounding.

    Args:
      what: names the compared thing in the message.
      actual: arrays under test, on any devices.
      expected: arrays of the reference.
      tol: largest relative RMS error; 0 asks for equal values.
    """
    got, treedef = jax.tree_util.tree_flatten_with_path(actual)
    want, wanted = jax.tree_util.tree_flatten_with_path(expected)
    assert treedef == wanted, f"{what}: tree structure {treedef} is not the expected {wanted}"
    for (path, x), (_, y) in zip(got, want, strict=True):
        _assert_leaf(what + jax.tree_util.keystr(path), x, y, tol)


def _host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _assert_leaf(what: str, actual: Any, expected: Any, tol: float) -> None:
    x, y = _host(actual), _host(expected)
    assert x.shape == y.shape, f"{what}: shape {x.shape} is not the expected {y.shape}"
    assert x.dtype == y.dtype, f"{what}: dtype {x.dtype} is not the expected {y.dtype}"
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        _assert_within(what, x, y, x != y, 0.0, "values differ")
        return
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    a, e = x.astype(wide), y.astype(wide)
    _assert_within(what, x, y, ~np.isfinite(e), 0.0, "the reference itself is not finite")
    _assert_within(what, x, y, ~np.isfinite(a), 0.0, "values are not finite")
    if not a.size:
        return
    error, size = np.abs(a - e), np.abs(e)
    scale = np.sqrt(np.mean(size**2))
    rms = np.sqrt(np.mean(error**2))
    relative = rms / scale if scale else (np.inf if rms else 0.0)
    note = f"relative RMS error {relative:.3g} is over the tolerance {tol:.3g}"
    _assert_within(what, x, y, error, np.inf if relative <= tol else -np.inf, note)
    row = np.sqrt(np.mean(size**2, axis=-1, keepdims=True)) if size.ndim > 1 else scale
    room = np.maximum(np.maximum(size, row), scale) * WORST_OVER_RMS
    share = np.divide(error, room, out=np.zeros_like(error), where=room > 0)
    note = f"one element is off by over {WORST_OVER_RMS:g} x the tolerance {tol:.3g}"
    _assert_within(what, x, y, share, tol, f"{note} (relative RMS error {relative:.3g})")


def _assert_within(
    what: str, x: np.ndarray, y: np.ndarray, badness: np.ndarray, limit: float, note: str
) -> None:
    """Asserts that no element of `badness` is over `limit`; names the worst one otherwise."""
    if not x.size or not np.any(badness > limit):
        return
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(badness), x.shape))
    count = int(np.count_nonzero(badness)) if badness.dtype == np.bool_ else None
    several = f" ({count} of {x.size} elements)" if count is not None else ""
    raise AssertionError(
        f"{what}: {note}{several}; worst at {list(worst)}: got {x[worst]}, expected {y[worst]}"
    )


def run_python(source: str, *, devices: int = 1, timeout: float = 300.0) -> str:
    """Runs `source` in a fresh Python on that many virtual CPU devices; returns what it printed.

    The tests themselves run on one CPU device, so that training code sees a plain machine; whatever
    needs a mesh goes through here, since JAX fixes the number of devices at its first use. The
    source may import from `tpjax` and `tests`.

    Raises:
      AssertionError: the source failed; the message holds its output.
    """
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices))
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode} on {devices} devices\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout
