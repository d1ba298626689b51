# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator is: one row `Op`, from which names, tests, benchmarks and documents derive.

A row holds a typed public function, the reference that defines its meaning, samples to test it on,
and the implementations in order of preference. Dispatch (`tpjax.pallas.dispatch`) walks them with a
`Key`.
"""

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Interpret = bool | Literal["races"]


@dataclass(frozen=True)
class Target:
    """Where a call will run: what an implementation may demand of the machine."""

    platform: str
    """"cpu", "cuda", "rocm" or "tpu"."""
    capability: str | None = None
    """CUDA compute capability, "9.0" on Hopper; None off CUDA."""
    interpret: Interpret = False
    """True: kernels run in the GPU interpreter on the CPU; "races": and data races are reported."""


class Aval(NamedTuple):
    """Shape and dtype of one operand; hashable."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Key:
    """Specialisation key: everything that may decide which implementation runs a call."""

    target: Target
    operands: tuple[tuple[str, Aval | None], ...]
    options: tuple[tuple[str, Hashable], ...] = ()

    def aval(self, name: str) -> Aval:
        """Returns shape and dtype of the operand `name`, which must be present."""
        aval = dict(self.operands)[name]
        assert aval is not None, name
        return aval

    def given(self, name: str) -> bool:
        """Returns whether the optional operand `name` was passed."""
        return dict(self.operands).get(name) is not None

    def option(self, name: str) -> Any:
        """Returns the static option `name`."""
        return dict(self.options)[name]


def key_of(target: Target, operands: Mapping[str, Any], options: Mapping[str, Any]) -> Key:
    """Returns the key of a call from its arrays (None where absent) and static options."""
    avals = tuple(
        (name, None if x is None else Aval(tuple(x.shape), np.dtype(x.dtype)))
        for name, x in operands.items()
    )
    return Key(target, avals, tuple(options.items()))


def _always(key: Key) -> str | None:
    del key
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    `run` takes the operands in order (None where absent), then the options by keyword. `platforms`
    and `capabilities` say which machines can run it (None: all); `unsupported` says of a call on
    such a machine why it cannot run, in words that follow "no kernel for this call:", or None.
    """

    name: str
    run: Callable[..., Any]
    unsupported: Callable[[Key], str | None] = _always
    platforms: tuple[str, ...] | None = None
    capabilities: tuple[str, ...] | None = None

    def unfit_machine(self, target: Target) -> str | None:
        """Returns why no call at all can run here, or None."""
        if target.interpret or self.platforms is None:
            return None
        if target.platform not in self.platforms:
            return f"the kernel needs {' or '.join(self.platforms)}; this is {target.platform}"
        if self.capabilities is not None and target.capability not in self.capabilities:
            needs = " or ".join(self.capabilities)
            return f"the kernel needs compute capability {needs}; this GPU has {target.capability}"
        return None


class Refusal(NamedTuple):
    """An implementation that was not chosen, and why."""

    implementation: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What dispatch decided for one call: the label `explain` shows and the refusals before it."""

    op: str
    implementation: str
    refused: tuple[Refusal, ...]
    source: str
    """file:line of the user's code that led to the call."""
    key: Key | None = None
    """The call itself, from which its cost follows."""


class Cost(NamedTuple):
    """Arithmetic of one call, and the least bytes that it must move through device memory."""

    flops: float
    """Of the forward call."""
    bytes: float
    """Of the forward call: operands that are read and results, once each."""
    backward_flops: float | None = None
    """Of the gradients, on top of the forward call's; None: twice those, as of a product."""
    backward_bytes: float | None = None
    """The same in bytes; None: operands and cotangents, read, and gradients, written, once each."""


@dataclass(frozen=True)
class Partitioning:
    """Named dimensions of operands and results, and which of them may be split over devices.

    `inputs` and `outputs` name dimensions by letter ("BTHD"); the first letter stands for all
    leading axes; an absent optional operand is skipped. A dimension in `sharded` needs no
    communication when split. Letters in one entry of `alike` ("HK") are split over the same devices
    or not at all.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sharded: str
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One call to test an operator on: array specs like "bf16[2,128,4,64]" and static keywords."""

    arrays: tuple[str | None, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
    """A production shape: run only on a GPU or when asked for."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Specs of arrays that are passed by keyword."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Random integers of an argument are in [0, below); by its name, 128 where not given."""

    @property
    def specs(self) -> tuple[str | None, ...]:
        """The specs of all arrays, those passed by keyword last."""
        return (*self.arrays, *self.named.values())

    def call_of(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` with the sample's options, as a function of the arrays of `specs`."""

        def call(*arrays: Any) -> Any:
            first = len(self.arrays)
            named = dict(zip(self.named, arrays[first:], strict=True))
            return fn(*arrays[:first], **named, **self.options)

        return call

    def __str__(self) -> str:
        keywords = {**self.named, **self.options}
        return " ".join(map(str, self.arrays)) + "".join(f" {k}={v}" for k, v in keywords.items())


_LETTERS = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}
_SPEC = re.compile(r"(bool|(?:bf|f|i|u)\d+)\[((?:\d+(?:,\d+)*)?)\]")


def parse_spec(spec: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns dtype and shape of an array spec, "f32[]" for a scalar.

    Raises:
      ValueError: it is no spec.

    Example:
      >>> parse_spec("bf16[2,128]")
      (dtype(bfloat16), (2, 128))
    """
    match = _SPEC.fullmatch(spec.replace(" ", ""))
    if match is None:
        raise ValueError(f'inputs: spec must be like "bf16[2,128]"; got {spec!r}.')
    name, dims = match.groups()
    if name != "bool":
        letters = name.rstrip("0123456789")
        name = _LETTERS[letters] + name[len(letters) :]
    return jax.numpy.dtype(name), tuple(int(d) for d in dims.split(",") if d)


@dataclass(frozen=True)
class Op:
    """One operator: its row in the table `OPS`."""

    fn: Callable[..., Any]
    reference: Callable[..., Any]
    implementations: tuple[Implementation, ...]
    samples: tuple[Sample, ...]
    diff: tuple[int, ...]
    """Argument positions that have gradients; those of keywords as they stand in the signature."""
    tol: Mapping[str, float]
    """Relative RMS error allowed against the float32 reference, by dtype name."""
    cost: Callable[..., Cost]
    """Takes the arguments of `fn` as shapes and dtypes, returns the cost of one call."""
    partitioning: Partitioning
    no_kernel: str = ""
    """Why a row without a kernel has none."""

    @property
    def name(self) -> str:
        """The operator's name, which is its function's."""
        return self.fn.__name__

    def arguments(self, sample: Sample) -> tuple[str, ...]:
        """Returns the names of the arguments that the sample's arrays are, in order."""
        names = tuple(inspect.signature(self.fn).parameters)
        return (*names[: len(sample.arrays)], *sample.named)

    def integers_below(self, sample: Sample) -> tuple[int, ...]:
        """Returns for each of the sample's arrays what its random integers are below."""
        return tuple(sample.below.get(name, 128) for name in self.arguments(sample))

    def differentiable(self, sample: Sample) -> list[int]:
        """Returns which of the sample's arrays have gradients."""
        names = list(inspect.signature(self.fn).parameters)
        moving = {names[i] for i in self.diff}
        pairs = zip(self.arguments(sample), sample.specs, strict=True)
        return [i for i, (n, spec) in enumerate(pairs) if n in moving and spec is not None]


def nbytes(arrays: Iterable[jax.ShapeDtypeStruct | jax.Array | None]) -> int:
    """Returns the bytes that the given arrays, None skipped, occupy in device memory."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays if x is not None)
