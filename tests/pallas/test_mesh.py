# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every row under Auto and Explicit meshes of four devices: no operand is gathered."""

import json

import pytest

from tests.harness import run_python
from tests.pallas import op_checks as checks
from tpjax.pallas import OPS

OPERANDS_MOVE = {"all-gather", "all-to-all", "collective-permute"}
RUN = "from tests.pallas.mesh_cases import main\nmain([{names}])"


@pytest.fixture(scope="module")
def found():
    """What each row does, found in one Python with four devices."""
    return json.loads(run_python(RUN.format(names=""), devices=4).splitlines()[-1])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_operand_moves(op, found):
    """The compiled program sums over devices at most; results and gradients are one device's."""
    moves = found[op.name]["moves"]
    assert {case.split()[1] for case in moves} == {"Auto", "Explicit"} or not checks.has_kernel(op)
    for case, kinds in moves.items():
        assert isinstance(kinds, dict), f"{case}: {kinds}"
        assert not set(kinds) & OPERANDS_MOVE, f"{case}: {kinds}"


@pytest.mark.parametrize("op", [*filter(checks.has_kernel, OPS)], ids=lambda op: op.name)
def test_the_kernel_runs_on_parts(op, found):
    """The kernels that a GPU would run stand inside a shard_map, those of gradients too."""
    cases = found[op.name]["kernel"]
    assert {case.split()[1] for case in cases} == {"Auto", "Explicit"}
    assert {*cases.values()} == {"in a shard_map"}, cases


def test_planted_fault_operands_gathered():
    """A row that may split nothing has its operands gathered, and that is counted."""
    fault = """
from dataclasses import replace
from tests.pallas import mesh_cases as cases
from tpjax.pallas import OPS, dispatch
row = next(op for op in OPS if op.name == "rms_norm")
case = next(cases.cases_of(row, cases.plain_samples(row)))
call = dispatch.split_over_devices
dispatch.split_over_devices = lambda run, split, operands: call(
    run, replace(split, sharded=""), operands
)
print(cases.collectives(case))
"""
    assert "all-gather" in run_python(fault, devices=4)
