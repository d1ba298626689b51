# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments as text: "f32[4,128] bf16[2,3] scale=f32[128]" becomes shapes and dtypes."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from tpjax.core.errors import did_you_mean

DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "c64": "complex64", "c128": "complex128", "bool": "bool",
}  # fmt: skip
"""How a dtype is written, and its full name, which is understood too."""

_ONE = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,]*)\]")


def parse_shapes(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments and keyword arguments that the text describes, as shapes and dtypes.

    Args:
      text: arrays separated by spaces, each `dtype[size,size,...]`, or `name=dtype[...]` for one
        passed by keyword; `[]` is a scalar. Arrays of 64 bits are 32 wide unless `jax_enable_x64`.

    Raises:
      ValueError: something else; the message has the nearest valid dtype.

    Example:
      >>> parse_shapes("f32[4,128] scale=bf16[128]")[0][0].shape
      (4, 128)
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = re.sub(r"\s*,\s*", ",", re.sub(r"\[\s+|\s+\]", lambda m: m[0].strip(), text))
    for word in rest.split():
        match = _ONE.fullmatch(word)
        if match is None:
            raise ValueError(f'shapes: an array must be like "f32[4,128]"; got {word!r}.')
        name, dtype, sizes = match.groups()
        array = jax.ShapeDtypeStruct(_sizes(word, sizes), _dtype(dtype))
        if name in kwargs:
            raise ValueError(f"shapes: {name} must be given once; got it twice.")
        if name:
            kwargs[name] = array
        elif kwargs:
            raise ValueError(f"shapes: {word} must stand before the arguments that have names.")
        else:
            args.append(array)
    return tuple(args), kwargs


def _sizes(word: str, text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(parts):
        raise ValueError(f"shapes: sizes must be numbers with single commas between; got {word!r}.")
    return tuple(map(int, parts))


def _dtype(name: str) -> Any:
    full = DTYPES.get(name, name)
    if full not in DTYPES.values():
        raise ValueError(f"shapes: unknown dtype {name!r}. {did_you_mean(name, DTYPES)}")
    return jax.dtypes.canonicalize_dtype(jnp.dtype(full))
