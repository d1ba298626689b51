# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A kernel that costs nothing and counts its launches, and a table of ways to differentiate it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas.dispatch import call

LAUNCHES: Counter[str] = Counter()
"""How often each pass of the fake kernel ran."""
NAMES = ("fake_out", "fake_slope")
SHIFT = jnp.arange(4, dtype=jnp.int32)


def plain(x: Any, scale: Any, shift: Any, bias: None) -> Any:
    """The operator in plain JAX: a wave for each of four features, shifted by an integer."""
    assert bias is None
    return jnp.sin(x * scale) + shift.astype(x.dtype)


def _launch(kind: str, fn: Callable[..., Any], like: Any, *operands: Any) -> Any:
    """Runs NumPy code as JAX sees a kernel: opaque, and not differentiable at all."""

    def on_host(*arrays: Any) -> Any:
        LAUNCHES[kind] += 1
        results = fn(*(np.asarray(a) for a in arrays))
        return jax.tree.map(lambda y, z: y.astype(z.dtype), results, like)

    varying = jax.typeof(operands[0]).manual_axis_type.varying
    like = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), like)
    results = jax.pure_callback(on_host, like, *operands, vmap_method="sequential")
    return lax.pcast(results, tuple(varying), to="varying") if varying else results


@jax.custom_vjp
def _kernel(x: Any, scale: Any, shift: Any) -> Any:
    return _launch("value", lambda x, s, i: np.sin(x * s) + i, x, x, scale, shift)


def _forward(x: Any, scale: Any, shift: Any) -> Any:
    def host(x: Any, s: Any, i: Any) -> Any:
        return np.sin(x * s) + i, np.cos(x * s)

    out, slope = _launch("forward", host, (x, x), x, scale, shift)
    out, slope = checkpoint_name(out, NAMES[0]), checkpoint_name(slope, NAMES[1])
    return out, (x, scale, shift, slope, out)


def _backward(kept: Any, dout: Any) -> Any:
    x, scale, shift, slope, _ = kept

    def host(x: Any, s: Any, slope: Any, dout: Any) -> Any:
        return dout * slope * s, (dout * slope * x).reshape(-1, 4).sum(0)

    dx, dscale = _launch("backward", host, (x, scale), x, scale, slope, dout)
    return dx, dscale, np.zeros(shift.shape, jax.dtypes.float0)


_kernel.defvjp(_forward, _backward)

WAYS = (
    Implementation("pallas", lambda x, scale, shift, bias: _kernel(x, scale, shift)),
    Implementation("xla", plain),
)
SPLIT = Partitioning(inputs=("RD", "D", "D", "D"), outputs=("RD",), sharded="R")


def fake() -> Callable[..., Any]:
    """Returns the operator (x [*B, 4], scale [4]) -> [*B, 4], through the fake kernel.

    A new function each time: JAX keeps what it has traced by function.
    """

    return lambda x, scale: call("fake", WAYS, operands(x, scale), {}, partitioning=SPLIT)


def operands(x: Any, scale: Any) -> dict[str, Any]:
    """Returns what the kernel takes, an integer array and an absent one too."""
    return {"x": x, "scale": scale, "shift": SHIFT, "bias": None}


def reference(x: Any, scale: Any) -> Any:
    """What `fake` means."""
    return plain(x, scale, SHIFT, None)


Function = Callable[..., Any]


def loss(fn: Function) -> Function:
    """Returns a scalar of the function, not linear in it."""
    return lambda x, scale: (fn(x, scale) ** 2).sum()


def twice(fn: Function) -> Function:
    """Returns the function applied twice, in a scan."""
    return lambda x, scale: lax.scan(lambda c, _: (fn(c, scale), None), x, None, length=2)[0]


def either(fn: Function) -> Function:
    """Returns the function in both branches of a cond."""

    def double(x: Any, scale: Any) -> Any:
        return 2 * fn(x, scale)

    return lambda x, scale: lax.cond(x[0, 0] > 0, fn, double, x, scale)


def loop(fn: Function) -> Function:
    """Returns the function in a while loop, which has forward mode alone."""

    def run(x: Any, scale: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, fn(state[1], scale)

        return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]

    return run


def rows(fn: Function) -> Function:
    """Returns the function over the rows of x by vmap."""
    return jax.vmap(fn, (0, None))


def grad(fn: Function) -> Function:
    """Returns both gradients of a loss of the function."""
    return jax.grad(loss(fn), (0, 1))


def push(fn: Function) -> Function:
    """Returns value and tangent of the function along its own arguments."""
    return lambda x, scale: jax.jvp(fn, (x, scale), (scale * x, scale))


def along_scale(fn: Function) -> Function:
    """Returns the tangent along one argument alone."""
    return lambda x, scale: jax.jvp(lambda s: fn(x, s), (scale,), (scale,))


def norm(fn: Function) -> Function:
    """Returns a scalar of the function's gradients."""
    return lambda x, scale: sum((g**2).sum() for g in grad(fn)(x, scale))


def kept(fn: Function) -> Function:
    """Returns the function rematerialised but for the arrays that the kernel names."""
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(*NAMES))


def transposed(fn: Function) -> Function:
    """Returns the transpose of the function's derivative, by forward mode transposed."""

    def run(x: Any, scale: Any) -> Any:
        def derivative(*tangents: Any) -> Any:
            return jax.jvp(fn, (x, scale), tangents)[1]

        return jax.linear_transpose(derivative, x, scale)(x)

    return run


remat = jax.checkpoint
BOTH = (0, 1)

FIRST: dict[str, tuple[Callable[[Function], Function], tuple[int, int] | None]] = {
    "grad": (grad, (1, 1)),
    "value_and_grad": (lambda f: jax.value_and_grad(loss(f), BOTH), (1, 1)),
    "grad of one": (lambda f: jax.grad(loss(f), 1), (1, 1)),
    "grad jit": (lambda f: grad(jax.jit(f)), (1, 1)),
    "grad scan": (lambda f: grad(twice(f)), (2, 2)),
    "grad cond": (lambda f: grad(either(f)), (1, 1)),
    "grad checkpoint": (lambda f: grad(remat(f)), (2, 1)),
    "grad checkpoint names": (lambda f: grad(kept(f)), (1, 1)),
    "grad scan checkpoint": (lambda f: grad(twice(remat(f))), (4, 2)),
    "grad scan checkpoint names": (lambda f: grad(twice(kept(f))), (2, 2)),
    "grad checkpoint scan": (lambda f: grad(remat(twice(f))), (4, 2)),
    "jvp transposed": (transposed, (1, 1)),
    "vmap grad": (lambda f: jax.vmap(grad(f), (0, None)), None),
    "grad vmap": (lambda f: grad(rows(f)), None),
    "jacrev": (lambda f: jax.jacrev(f, BOTH), None),
    "vmap scan checkpoint": (lambda f: grad(rows(twice(remat(f)))), None),
}
"""First derivatives in reverse mode, and how often they launch each pass; None under vmap."""

OTHERS: dict[str, Callable[[Function], Function]] = {
    "jvp": push,
    "jvp of one": along_scale,
    "jacfwd": lambda f: jax.jacfwd(f, BOTH),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "vmap jvp": lambda f: jax.vmap(push(f), (0, None)),
    "jvp vmap": lambda f: push(rows(f)),
    "jvp while": lambda f: push(loop(f)),
    "jvp cond": lambda f: push(either(f)),
    "jvp scan checkpoint": lambda f: push(twice(remat(f))),
    "jvp scan checkpoint names": lambda f: push(twice(kept(f))),
    "hessian": lambda f: jax.hessian(loss(f), BOTH),
    "jacfwd jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f), BOTH),
    "jacrev jacfwd": lambda f: jax.jacrev(jax.jacfwd(f), BOTH),
    "jacfwd jacrev": lambda f: jax.jacfwd(jax.jacrev(f), BOTH),
    "jacrev jacrev": lambda f: jax.jacrev(jax.jacrev(f), BOTH),
    "grad grad": lambda f: jax.grad(norm(f), BOTH),
    "grad jit grad": lambda f: jax.grad(norm(jax.jit(f)), BOTH),
    "grad grad scan": lambda f: jax.grad(norm(twice(f)), BOTH),
    "grad grad cond": lambda f: jax.grad(norm(either(f)), BOTH),
    "grad grad scan checkpoint": lambda f: jax.grad(norm(twice(remat(f))), BOTH),
    "grad checkpoint grad": lambda f: jax.grad(remat(norm(kept(f))), BOTH),
    "grad scan of grad": lambda f: grad(twice(lambda *a: remat(grad(f))(*a)[0])),
    "jvp grad": lambda f: push(grad(f)),
    "jvp grad scan checkpoint": lambda f: push(grad(twice(remat(f)))),
    "vmap jvp grad": lambda f: jax.vmap(push(grad(f)), (0, None)),
    "jvp grad vmap": lambda f: push(grad(rows(f))),
    "vmap grad grad scan": lambda f: jax.vmap(jax.grad(norm(twice(f)), BOTH), (0, None)),
    "third": lambda f: jax.jacfwd(jax.grad(norm(remat(f)), BOTH)),
}
"""Forward mode, second derivatives and beyond: those of the plain form."""
