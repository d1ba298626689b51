# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs a call, what is said of the others, and that no choice goes stale."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import inputs, run_python
from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Implementation, Target, key_of
from tpjax.pallas import layer_norm, rms_norm
from tpjax.pallas.dispatch import Preference, choose, current_target, preference, record_choices

HOPPER = Target("cuda", "9.0")


def chosen(fn, *args, **options):
    """Returns the choices made while tracing the call."""
    with record_choices() as choices:
        jax.eval_shape(lambda *a: fn(*a, **options), *args)
    return choices


@pytest.fixture
def x():
    """An array that the kernels take."""
    return inputs("bf16[4,128]", 0)


def test_falls_back_and_keeps_the_reason(x):
    """On a CPU the plain form runs, silently, and the kernel's reason is kept."""
    (choice,) = chosen(rms_norm, x)
    assert (choice.op, choice.implementation) == ("rms_norm", "xla")
    assert dict(choice.refused) == {"pallas": "the kernel needs cuda; this is cpu"}
    assert "test_dispatch.py:" in choice.source


def test_kernel_is_chosen_where_it_fits(x):
    """As if on Hopper the kernel is chosen, and nothing is refused."""
    with tpjax.use(platform="cuda"):
        (choice,) = chosen(rms_norm, x)
    assert (choice.implementation, choice.refused) == ("pallas", ())


def test_other_gpus_are_refused():
    """A GPU of another generation gets a reason that names both."""
    key = key_of(Target("cuda", "8.0"), {"x": jnp.zeros((4, 128))}, {"eps": 1e-6})
    ways = tpjax.pallas.OPS[0].implementations
    way, refused = choose("rms_norm", ways, key)
    assert way.name == "xla"
    assert refused[0].reason == "the kernel needs compute capability 9.0; this GPU has 8.0"


@pytest.mark.parametrize("by", ["argument", "use", "use for the operator"])
def test_explicit_choice_that_cannot_run_raises(x, by):
    """What is asked for by name is not replaced; the error has the reason."""
    named = {"argument": None, "use": "pallas", "use for the operator": {"rms_norm": "pallas"}}[by]
    implementation = "pallas" if by == "argument" else None
    with (
        tpjax.use(implementation=named),
        pytest.raises(UnsupportedError, match=r"rms_norm: .*'pallas'.* needs cuda; this is cpu"),
    ):
        rms_norm(x, implementation=implementation)


def test_explicit_choice_of_an_unsupported_call_raises():
    """The reason is about the call where the machine is right."""
    with (
        tpjax.use(platform="cuda"),
        pytest.raises(UnsupportedError, match="multiple of 8 features; it has 100"),
    ):
        rms_norm(jnp.zeros((2, 100)), implementation="pallas")


def test_unknown_names(x):
    """An unknown name gets the nearest valid one, wherever it stands."""
    with pytest.raises(UnsupportedError, match=r"unknown .*'palas'. Did you mean 'pallas'\?"):
        rms_norm(x, implementation="palas")
    with pytest.raises(ValueError, match=r"use: .*'xl'.*'xla'"), tpjax.use(implementation="xl"):
        pass
    with pytest.raises(ValueError, match="'pallas'"), tpjax.use(implementation={"f": "palas"}):
        pass
    with (
        pytest.raises(ValueError, match=r"'cude'. Did you mean 'cuda'"),
        tpjax.use(platform="cude"),
    ):
        pass
    with pytest.raises(ValueError, match="'races'"), tpjax.use(interpret="race"):  # pyright: ignore
        pass


NOTHING = {
    "rms_norm": ("f32[0,8]",),
    "layer_norm": ("f32[0,8]",),
    "add_rms_norm": ("f32[0,8]", "f32[0,8]"),
    "add_layer_norm": ("f32[0,8]", "f32[0,8]"),
    "rms_norm_fp8": ("f32[0,8]",),
    "layer_norm_fp8": ("f32[0,8]",),
    "matmul": ("f32[0,8]", "f32[8,4]"),
    "gated_linear_unit": ("f32[0,8]", "f32[8,2,4]"),
    "gated_mlp": ("f32[0,8]", "f32[8,2,4]", "f32[4,8]"),
    "linear_cross_entropy": ("f32[0,8]", "f32[5,8]", "i32[0]"),
    "softmax": ("f32[0,8]",),
    "log_softmax": ("f32[0,8]",),
    "rotary_embedding": ("f32[1,0,2,8]",),
    "embedding": ("f32[5,8]", "i32[0]"),
    "flash_attention": ("f32[1,0,2,8]", "f32[1,0,2,8]", "f32[1,0,2,8]"),
}


@pytest.mark.parametrize("name", list(NOTHING))
def test_unknown_names_for_empty_calls(name):
    """A call that nothing has to run is told as much, and gives arrays of JAX."""
    fn, arrays = getattr(tpjax.pallas, name), [np.asarray(inputs(x, 0)) for x in NOTHING[name]]
    with pytest.raises(UnsupportedError, match="unknown implementation 'triton'"):
        fn(*arrays, implementation="triton")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(fn(*arrays)))


def test_use_nests(x):
    """An inner block overrides what it states, keeps the rest, and ends where it ends."""
    with tpjax.use(platform="cuda", implementation="xla"):
        with tpjax.use(implementation={"rms_norm": "pallas"}):
            assert current_target() == HOPPER
            assert chosen(rms_norm, x)[0].implementation == "pallas"
            assert chosen(layer_norm, x)[0].implementation == "pallas"  # nothing asked: automatic
        assert chosen(rms_norm, x)[0].implementation == "xla"
    assert preference() == Preference()
    with pytest.raises(KeyError), tpjax.use(implementation="xla"):
        raise KeyError
    assert preference() == Preference()


def test_argument_before_use(x):
    """The call's own argument outranks the block around it."""
    with tpjax.use(platform="cuda", implementation="pallas"):
        assert chosen(rms_norm, x, implementation="xla")[0].implementation == "xla"


def test_jit_serves_no_stale_choice(x):
    """A jitted function is traced again when the preference changes, and once for each."""
    traces = []

    @jax.jit
    def norm(x):
        traces.append(preference())
        return rms_norm(x)

    for asked in (None, "xla", None, "xla"):
        with tpjax.use(implementation=asked):
            norm(x)
    assert len(traces) == 2
    with tpjax.use(implementation="pallas"), pytest.raises(UnsupportedError):
        norm(x)
    norm(x)
    assert len(traces) == 3


def test_nested_recorders(x):
    """Every open block sees the choice; a closed one does not."""
    with record_choices() as outer, record_choices() as inner:
        rms_norm(x)
    with record_choices() as other:
        rms_norm(x)
    assert len(outer) == len(inner) == len(other) == 1


def test_warns_once_with_the_line():
    """On a machine with the kernel a refused call warns, once for each line, and says which."""
    odd = jnp.zeros((2, 100))
    with tpjax.use(platform="cuda"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            chosen(rms_norm, odd)
            jax.eval_shape(lambda x: rms_norm(x), odd)
        jax.eval_shape(lambda x: rms_norm(x, implementation="xla"), odd)  # asked for: no warning
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2
    assert all("rms_norm: no kernel for this call: the last axis" in t for t in texts)
    assert all("(tests/pallas/test_dispatch.py:" in t for t in texts)
    assert len(set(texts)) == 2


def test_choice_is_not_made_by_exceptions(x):
    """An implementation that raises is not passed over."""

    def broken(x, **options):
        raise RuntimeError("broken kernel")

    from tpjax.pallas.dispatch import call

    ways = (Implementation("pallas", broken), Implementation("xla", lambda x, **options: x))
    with pytest.raises(RuntimeError, match="broken kernel"):
        call("op", ways, {"x": x}, {})


def test_import_brings_no_kernel():
    """`import tpjax` loads neither the operators nor the kernel language."""
    source = """
import sys, tpjax
loaded = [m for m in sys.modules if m.startswith(("tpjax.pallas.norms", "tpjax.pallas.attention",
          "tpjax.pallas.ops", "jax.experimental.mosaic", "flax", "optax", "rich", "orbax"))]
assert not loaded, loaded
import tpjax.pallas
assert {"OPS", "rms_norm", "layer_norm", "flash_attention"} <= set(dir(tpjax.pallas))
try:
    tpjax.pallas.rms_nrom
except AttributeError as error:
    print(error)
"""
    assert "rms_nrom" in run_python(source)
