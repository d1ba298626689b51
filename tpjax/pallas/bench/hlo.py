# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Counts what a compiled program does: kernels launched, bytes between them, operations.

Read off XLA's optimised HLO, as `jax.stages.Compiled.as_text` prints it. An instruction that runs
is one launch; it reads its operands and writes its results once. Of an operand that is only sliced
or gathered from, what is taken counts; what is updated in place is written where it is updated.
Loops count as often as XLA knows that they run, once where it does not; of branches the one that
moves most. Operations are 2 for each multiply-add of a product and 1 for each element of the
arithmetic between; those inside a custom call that is no product are not seen.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

MOVES_NOTHING = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id", "domain",
))  # fmt: skip
MOVES = frozenset((
    "copy", "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "gather", "scatter", "pad", "iota", "reverse", "sort", "convert",
    "bitcast-convert", "custom-call", "fusion", "call", "while", "conditional", "copy-start",
    "rng-bit-generator", "infeed", "outfeed",
))  # fmt: skip
"""Opcodes that are no arithmetic; a conversion rides on the move that it is part of."""
TAKES = frozenset(("slice", "dynamic-slice", "gather"))
COLLECTIVES = (
    "all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter",
)  # fmt: skip
"""Instructions that move data between devices; the first three move operands."""

_ARRAY = re.compile(r"\b(pred|bf16|token|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(calls|to_apply|body|condition|branch_computations|\w+_computation)=")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(
    r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]'
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Count(NamedTuple):
    """What running a program, or a part of it, takes."""

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    kernels: float = 0.0
    """How many of the launches are Pallas kernels, whose operations are not in `flops`."""

    def __add__(self, other: tuple) -> "Count":
        return Count(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, often: float) -> "Count":
        """Returns the count of running it so often."""
        return Count(*(often * x for x in self))


class Array(NamedTuple):
    """Shape and bytes of an array in HLO."""

    shape: tuple[int, ...]
    bytes: float

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    """What follows the operands: attributes."""
    is_root: bool

    @property
    def written(self) -> float:
        """Bytes of the results."""
        return sum(x.bytes for x in self.results)

    def called(self) -> tuple[str, ...]:
        """Returns the names of the computations that the instruction runs."""
        found = []
        for match in _CALLED.finditer(self.rest):
            tail = self.rest[match.end() :]
            inside = tail[1 : tail.index("}")] if tail[0] == "{" else re.split(r"[, ]", tail)[0]
            found += [name.strip().lstrip("%") for name in inside.split(",")]
        return tuple(found)


Computation = dict[str, Instruction]


def count_program(text: str | None) -> Count:
    """Returns what one run of a compiled program takes.

    Args:
      text: as `jax.jit(f).lower(...).compile().as_text()` gives it; None holds nothing.
    """
    computations, entry = parse(text)
    return _count(entry, computations)


def count_collectives(text: str | None) -> dict[str, int]:
    """Returns how many instructions of each kind move data between devices, those that do."""
    found = dict.fromkeys(COLLECTIVES, 0)
    for computation in parse(text)[0].values():
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in found:
                found[kind] += 1
    return {kind: n for kind, n in found.items() if n}


def parse(text: str | None) -> tuple[dict[str, Computation], str]:
    """Returns the program's computations by name, and the name of the first one to run."""
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in (text or "").splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif (start := _INSTRUCTION.match(line)) and " = " in line:
            instruction = _instruction(line, start)
            current[instruction.name] = instruction
    return computations, entry


def _instruction(line: str, start: re.Match[str]) -> Instruction:
    body = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    opcode = _OPCODE.search(" " + body)
    assert opcode is not None, f"no instruction of HLO: {line}"
    begin = opcode.end() - 1
    end = _closing(body, begin)
    names = re.findall(r"%([\w.\-]+)", body[begin:end])
    results = tuple(_array(m) for m in _ARRAY.finditer(body[: opcode.start()]))
    is_root = start[1] is not None
    return Instruction(start[2], opcode[1], results, tuple(names), body[end:], is_root)


def _closing(body: str, begin: int) -> int:
    """Returns the place after the parenthesis that closes the one before `begin`."""
    depth = 1
    for i in range(begin, len(body)):
        depth += {"(": 1, ")": -1}.get(body[i], 0)
        if depth == 0:
            return i + 1
    return len(body)


def _array(match: re.Match[str]) -> Array:
    dtype, dims = match.groups()
    shape = tuple(int(d) for d in dims.split(",") if d)
    bits = re.search(r"\d+", dtype)
    width = 1.0 if dtype == "pred" else 0.0 if bits is None else int(bits[0]) / 8
    return Array(shape, width * math.prod(shape))


def _count(name: str, computations: dict[str, Computation]) -> Count:
    """Returns the count of a computation whose instructions run one by one."""
    total = Count()
    computation = computations.get(name, {})
    for one in computation.values():
        inner = [_count(n, computations) for n in one.called() if one.opcode in _RUNS_CALLED]
        if one.opcode == "while":
            trips = _TRIPS.search(one.rest)
            total += sum(inner, Count()).times(int(trips[1]) if trips else 1)
        elif one.opcode == "conditional":
            total += max(inner, key=lambda count: count.bytes, default=Count())
        elif one.opcode in _RUNS_CALLED:
            total += sum(inner, Count())
        elif one.opcode not in MOVES_NOTHING and not one.opcode.endswith("-done"):
            total += _launch(one, computation, computations)
    return total


_RUNS_CALLED = ("while", "conditional", "call", "async-start")


def _launch(
    one: Instruction, computation: Computation, computations: dict[str, Computation]
) -> Count:
    """Returns the count of one instruction that runs."""
    flops = _flops(one, computation, computations)
    if one.opcode == "fusion":
        return Count(1.0, _fusion_bytes(computations[one.called()[0]]), flops)
    is_kernel = "mosaic" in _target(one)
    return Count(1.0, _bytes_at(one, computation), flops, float(is_kernel))


def _target(one: Instruction) -> str:
    """Returns what a custom call calls, "" of any other instruction."""
    found = _TARGET.search(one.rest)
    return "" if found is None else found[1]


def _is_product(one: Instruction) -> bool:
    return one.opcode == "dot" or re.search("gemm|matmul", _target(one)) is not None


def _bytes_at(one: Instruction, computation: Computation) -> float:
    """Returns the bytes that an instruction outside of fusions moves."""
    operands = [computation[n].written for n in one.operands if n in computation]
    if one.opcode in TAKES:
        return 2 * one.written
    if one.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if one.opcode == "scatter":  # reads indices, updates and what they are added to
        return sum(operands[1:]) + 2 * operands[-1]
    if _is_product(one):  # what else it returns is room to work in
        return sum(operands) + one.results[0].bytes
    return sum(operands) + one.written


def _fusion_bytes(body: Computation) -> float:
    """Returns the bytes that a fusion reads of its operands and writes."""
    read = sum(_read(n, x, body) for n, x in body.items() if x.opcode == "parameter")
    root = next((x for x in body.values() if x.is_root), None)
    outs = [] if root is None else [root]
    if root is not None and root.opcode == "tuple":
        outs = [body[n] for n in root.operands]
    return read + sum(_written(x, body) for x in outs)


def _read(name: str, value: Instruction, body: Computation) -> float:
    """Returns how many bytes of a fusion's value are looked at."""
    taken = 0.0
    for user in body.values():
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.opcode == "bitcast":
            taken += _read(user.name, user, body)
        elif first and user.opcode in TAKES:
            taken += user.written
        elif not (first and user.opcode == "dynamic-update-slice"):
            return value.written
    return min(taken, value.written)


def _written(value: Instruction, body: Computation) -> float:
    """Returns how many bytes of a result of a fusion are written."""
    if value.opcode == "bitcast" and value.operands[0] in body:
        return _written(body[value.operands[0]], body)
    if value.opcode == "dynamic-update-slice":
        return body[value.operands[1]].written
    return value.written


def _flops(one: Instruction, body: Computation, computations: dict[str, Computation]) -> float:
    """Returns the operations of one instruction, and of those that it fuses."""
    size = one.results[0].size if one.results else 0
    if one.opcode == "fusion":
        bodies = [computations[n] for n in one.called()]
        return sum(_flops(x, inner, computations) for inner in bodies for x in inner.values())
    if _is_product(one):
        found = _CONTRACTED.search(one.rest)
        if found is None or one.operands[0] not in body:
            return 0.0
        dims = [int(d) for d in re.findall(r"\d+", found[1] or found[2] or "")]
        left = body[one.operands[0]].results[0].shape
        return 2.0 * size * math.prod(left[d] for d in dims)
    if one.opcode in ("reduce", "reduce-window"):
        return float(body[one.operands[0]].results[0].size) if one.operands[0] in body else 0.0
    if one.opcode in MOVES or one.opcode in MOVES_NOTHING or one.opcode.endswith("-done"):
        return 0.0
    return float(size)
