# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The step and the loop: right updates, rejected ones, resumed ones, split ones."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close, inputs, run_python
from tests.training import small
from tpjax.training.config import Config
from tpjax.training.data import Batches, load_text
from tpjax.training.loop import NonFiniteError, Progress, evaluation, fit
from tpjax.training.mesh import count_devices, devices_of, dtype_of, place
from tpjax.training.optimizer import optimizer_of
from tpjax.training.step import State, loss_of, new_model, step_of


def _adamw(c: Config, params: dict, grads: list[dict]) -> dict:
    """Clipped AdamW in float64 by its definition; the learning rate is constant."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(2))
    for t, grad in enumerate(grads, start=1):
        g = {k: np.asarray(x, np.float64) for k, x in grad.items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        for k in p:
            clipped = g[k] * min(1.0, c.clip_norm / norm)
            m[k] = 0.9 * m[k] + 0.1 * clipped
            v[k] = 0.95 * v[k] + 0.05 * clipped**2
            update = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
            decay = c.weight_decay if p[k].ndim > 1 else 0.0
            p[k] = p[k] - c.learning_rate * (update + decay * p[k])
    return p


def test_steps_are_clipped_adamw():
    c = small.config(
        optimizer="adamw", schedule="constant", warmup_steps=0, learning_rate=0.05, weight_decay=0.3
    )
    params = {"kernel": inputs("f32[5,3]", 0), "scale": inputs("f32[3]", 1)}
    grads = [{k: inputs("f32[5,3]" if k == "kernel" else "f32[3]", i) for k in params}
             for i in (2, 3, 4)]  # fmt: skip
    by_token = {k: jnp.stack([g[k] for g in grads]) for k in params}

    def loss(params, tokens):  # its gradient is grads[token]
        return jnp.sum(jnp.stack([jnp.vdot(params[k], by_token[k][tokens[0, 0]]) for k in params]))

    step = jax.jit(step_of(c, loss))
    state = State(params, optimizer_of(c).init(params), jnp.int32(0), jax.random.key(0))
    for i in range(3):
        state, metrics = step(state, jnp.full((1, 2), i, jnp.int32))
        norm = np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in grads[i].values()))
        assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    expected = {k: x.astype(np.float32) for k, x in _adamw(c, params, grads).items()}
    assert_close("params", state.params, expected, 1e-5)  # Adam divides by small roots


def test_muon_orthogonalises_each_matrix_in_both_layer_forms():
    c = small.config(optimizer="muon", weight_decay=0.0, clip_norm=1e9)
    optimizer = optimizer_of(c)
    kernels = inputs("f32[2,12,8]", 0)
    looped = {"layers": {0: {"kernel": kernels[0]}, 1: {"kernel": kernels[1]}}}
    scanned = {"layers": {"kernel": kernels}}
    rest = {"embedding": inputs("f32[16,8]", 1), "norm": {"scale": inputs("f32[8]", 2)}}

    def update(params: dict) -> Any:  # with the parameters themselves for a gradient
        return optimizer.update(params, optimizer.init(params), params)[0]

    one, all_at_once = update(looped | rest), update(scanned | rest)
    stacked = jnp.stack([one["layers"][i]["kernel"] for i in range(2)])
    assert_close("kernels", all_at_once["layers"]["kernel"], stacked, 1e-5)
    for i in range(2):
        singular = np.linalg.svd(np.asarray(stacked[i], np.float64), compute_uv=False)
        assert (singular > 0.6).all()
        assert (singular < 1.3).all()
    # The first step of Adam with Nesterov momentum is the gradient's sign times this.
    ratio = c.adam_learning_rate / c.learning_rate
    first = -ratio * (1 + 0.9 * 0.1 / (1 - 0.9**2))
    for name, update_ in (("embedding", one["embedding"]), ("scale", one["norm"]["scale"])):
        sign = jnp.sign(rest["embedding"] if name == "embedding" else rest["norm"]["scale"])
        assert_close(name, update_, first * sign, 1e-4)


def test_a_step_that_is_not_finite_changes_nothing_but_its_number():
    c = small.config()
    with jax.set_mesh(place(c, devices_of(None)).mesh):
        init, step, _ = small.compiled(c)
        good = inputs("i32[4,25]", 0)
        state, _ = step(init(), good)
        before = jax.tree.map(jnp.copy, state)  # the step takes the buffers of what it is given
        after, metrics = step(state, good.at[2, 5].set(small.POISON))
        state, after_bits = before, jax.tree.map(jnp.copy, after)
        later, _ = step(after, good)
        after = after_bits
    assert not bool(metrics.finite)
    assert np.isnan(float(metrics.loss))
    assert int(after.step) == int(state.step) + 1
    assert_close("params", after.params, state.params, 0)
    assert_close("optimizer", after.optimizer, state.optimizer, 0)
    assert float(jnp.abs(later.params["head"] - after.params["head"]).max()) > 0


def test_a_gradient_that_is_not_finite_is_rejected_though_the_loss_is():
    c = small.config()
    params = {"x": jnp.zeros(3)}
    state = State(params, optimizer_of(c).init(params), jnp.int32(0), jax.random.key(0))
    step = jax.jit(step_of(c, lambda params, tokens: jnp.sqrt(params["x"]).sum()))
    after, metrics = step(state, jnp.zeros((1, 2), jnp.int32))
    assert float(metrics.loss) == 0.0
    assert not bool(metrics.finite)
    assert_close("params", after.params, params, 0)


class _Spoiled:
    """Batches of which those at some steps have a poisoned token."""

    def __init__(self, inner, steps: set[int]):
        self.inner, self.steps = inner, steps

    def batch(self, sample_index: int) -> np.ndarray:
        tokens = self.inner.batch(sample_index)
        if sample_index // self.inner.batch_size + 1 in self.steps:
            tokens[1, 3] = small.POISON
        return tokens


def _fit(folder: Path, c: Config, bad: set[int]) -> tuple[State, Progress]:
    with small.parts(folder, c) as (parts, state):
        object.__setattr__(parts, "batches", _Spoiled(parts.batches, bad))
        progress = Progress()
        return fit(parts, state, progress), progress


def test_bad_steps_are_counted_and_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    c = small.config(max_bad_steps=3, stop_at=8, eval_interval=0)
    state, progress = _fit(tmp_path, c, {3, 4, 7})
    assert (progress.step, progress.bad_steps, progress.bad_in_a_row) == (8, 3, 0)
    assert int(state.step) == 8
    out = capsys.readouterr().out
    assert "step 4 rejected: loss nan" in out
    assert "(2 in a row, 2 in all)" in out


def test_bad_steps_in_a_row_stop_the_run_and_are_named(tmp_path: Path):
    c = small.config(max_bad_steps=3, eval_interval=0, checkpoint_interval=4)
    with pytest.raises(NonFiniteError, match="none in steps 6 to 8") as error:
        _fit(tmp_path, c, {6, 7, 8, 9})
    assert "--learning_rate" in str(error.value)
    # What is saved is what the last step that was taken left.
    clean, _ = _fit(tmp_path / "clean", small.config(stop_at=5, eval_interval=0), set())
    with small.parts(tmp_path, c) as (parts, state):
        assert parts.checkpoints.steps() == [4, 8]
        meta = parts.checkpoints.read_meta()
        assert meta["progress"]["bad_steps"] == 3
        assert_close("params", parts.checkpoints.restore(state, meta).params, clean.params, 0)


def test_a_signal_ends_the_loop_after_the_step_and_saves(tmp_path: Path):
    c = small.config(eval_interval=0)
    with small.parts(tmp_path, c) as (parts, state):
        inner = parts.batches

        class Ring:
            def batch(self, index: int) -> np.ndarray:
                if index == 6 * c.batch_size:
                    os.kill(os.getpid(), signal.SIGTERM)
                return inner.batch(index)

        object.__setattr__(parts, "batches", Ring())
        progress = Progress()
        state = fit(parts, state, progress)
        assert (parts.stop.name, parts.stop.exit_code) == ("SIGTERM", 143)
        assert progress.step == 7
        assert parts.checkpoints.steps() == [7]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_validation_is_the_mean_over_whole_batches():
    c = small.config(batch_size=3, length=10)
    graph, init = new_model(c)
    params, loss = init().params, jax.jit(loss_of(graph))
    data = load_text("kjv").data[:100]  # 9 windows: 3 batches
    held_out = Batches(data, c.batch_size, c.length)
    evaluate = evaluation(loss, place(c, devices_of(None)), held_out)
    each = [float(loss(params, jnp.asarray(held_out.samples(np.array([i]))))) for i in range(9)]
    assert evaluate(params, 0) == pytest.approx(np.mean(each), rel=1e-5)
    assert evaluate(params, 2) == pytest.approx(np.mean(each[:6]), rel=1e-5)
    assert evaluate(params, 99) == pytest.approx(np.mean(each), rel=1e-5)


ON_FOUR = """
import json, tempfile
from pathlib import Path
from tests.training import small
from tpjax.training.data import Batches, load_text
from tpjax.training.loop import Progress, fit
for devices in (1, 0):
    c = small.config(steps=6, compile=True, num_devices=devices)
    with tempfile.TemporaryDirectory() as folder, small.parts(Path(folder), c) as (parts, state):
        progress = Progress()
        state = fit(parts, state, progress)
        kernel = state.params["layers"][0]["mlp"]["up"]["kernel"]
        print(json.dumps([parts.place.mesh.size, len(kernel.sharding.device_set),
                          progress.last_loss, progress.validation_loss]))
"""


def test_four_devices_learn_what_one_does():
    out = run_python(ON_FOUR, devices=4)
    one, four = (json.loads(line) for line in out.splitlines() if line.startswith("["))
    assert (one[:2], four[:2]) == ([1, 1], [4, 4])
    # The gradient is summed over the batch in another order, and Adam divides by small roots.
    assert four[2:] == pytest.approx(one[2:], rel=1e-4)


@pytest.mark.parametrize(
    ("batch", "found", "used"), [(16, 1, 1), (16, 4, 4), (16, 6, 4), (5, 4, 1), (12, 8, 6)]
)
def test_a_run_takes_the_most_devices_that_divide_the_batch(batch: int, found: int, used: int):
    assert count_devices(small.config(batch_size=batch), found) == used


@pytest.mark.parametrize(
    ("batch", "asked", "told"),
    [
        (16, 9, "num_devices must be at most the 8 found; got 9"),
        (
            16,
            6,
            "batch_size must be a multiple of num_devices, 6; got 16. Take",
        ),
        (3, 4, "Take batch_size=4."),
    ],
)
def test_devices_asked_for_must_be_there_and_divide_the_batch(batch: int, asked: int, told: str):
    with pytest.raises(ValueError, match=told):
        count_devices(small.config(batch_size=batch, num_devices=asked), 8)


def test_the_dtype_comes_with_its_reason():
    assert dtype_of(small.config(), "cpu")[0] == "float32"
    assert dtype_of(small.config(), "gpu")[0] == "bfloat16"
    assert dtype_of(small.config(dtype="float16"), "cpu") == ("float16", "asked for")
