# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The shapes written in public signatures are true: a run-time checker reads them on every sample.

The checker wraps functions as their modules are loaded, so each test runs in a Python of its own;
users never pay for it.
"""

from tests.harness import run_python

CHECKED = """
import jax
from jaxtyping import TypeCheckError, install_import_hook

hook = install_import_hook("tpjax", "beartype.beartype")
"""

OPERATORS = """
from tests.harness import parse_spec
from tpjax.pallas import OPS, rms_norm

def struct(spec):
    dtype, shape = parse_spec(spec)
    return jax.ShapeDtypeStruct(shape, dtype)

for op in OPS:
    for sample in op.samples:
        given = [i for i, spec in enumerate(sample.specs) if spec is not None]
        for fn in (op.fn, op.reference):
            def call(*arrays):
                operands = [None] * len(sample.specs)
                for i, x in zip(given, arrays):
                    operands[i] = x
                return sample.call_of(fn)(*operands)
            out = jax.eval_shape(call, *(struct(sample.specs[i]) for i in given))
            print(op.name, fn.__name__, sample, jax.tree.map(lambda x: x.shape, out))

try:
    jax.eval_shape(rms_norm, struct("f32[4,8]"), struct("f32[7]"))
except TypeCheckError:
    print("caught")
"""

MODELS = """
from flax import nnx
from tpjax.models import PRESETS, Decoder, next_token_loss

def loss(length):
    model = Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0))
    return next_token_loss(model, jax.numpy.zeros((2, length), "int32"))

print(jax.eval_shape(lambda: loss(9)).shape)
try:
    jax.eval_shape(lambda: Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0))(jax.numpy.zeros(9, "int32")))
except TypeCheckError:
    print("caught")
"""


def test_operators_do_what_their_signatures_say():
    from tpjax.pallas import OPS

    *calls, last = run_python(CHECKED + OPERATORS).splitlines()
    assert last == "caught"
    assert len(calls) == 2 * sum(len(op.samples) for op in OPS)


def test_the_model_does_what_its_signatures_say():
    assert run_python(CHECKED + MODELS).splitlines() == ["()", "caught"]
