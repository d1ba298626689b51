# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Sets up the machine for tests: one CPU device, or a GPU under `-m gpu`; strict core dtypes.

Several devices: `tests.harness.run_python(source, devices=4)`.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

STRICT_ROOMS = ("core", "pallas")
"""Folders of tests in which mixed dtypes are errors; models of other people are not that strict."""


def _asks_for_gpu(config: pytest.Config) -> bool:
    words = str(config.option.markexpr).split()
    return any(w == "gpu" and words[i - 1 : i] != ["not"] for i, w in enumerate(words))


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the platform before JAX starts, and enough CPU threads to interpret kernels."""
    os.environ.setdefault("NPROC", "8")
    if _asks_for_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def _gpu_is_there(request: pytest.FixtureRequest) -> None:
    """Makes a `gpu` test an error where no GPU answers: a skip would hide a broken machine."""
    if request.node.get_closest_marker("gpu") is not None:
        import jax

        jax.devices("cuda")


def promotion_of(room: str) -> AbstractContextManager:
    """Returns the context in which the tests of a room run: strict where it states its dtypes."""
    import jax

    return jax.numpy_dtype_promotion("strict") if room in STRICT_ROOMS else nullcontext()


@pytest.fixture(autouse=True)
def _strict_dtypes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forbids implicit dtype promotion in the tests of the strict rooms."""
    with promotion_of(request.path.relative_to(Path(__file__).parent).parts[0]):
        yield
