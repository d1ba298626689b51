# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The options of `tpjax.compile`: one table, `OPTIONS`, from which checks and help derive."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

from tpjax.core.errors import did_you_mean, message
from tpjax.stax_passes.plugins import PASS_GROUP, RULE_GROUP, check_names
from tpjax.stax_passes.rules import Row, demand_exact

DEFAULT, EXACT = "default", "exact"
MODES = (DEFAULT, EXACT)


class CompileOptions(TypedDict, total=False):
    """Keywords of `tpjax.compile`, for type checkers; `OPTIONS` says what each means."""

    mode: str
    passes: Sequence[Any] | None
    rules: Sequence[Any]
    strict: bool
    verify: bool
    static_argnums: int | Iterable[int]
    static_argnames: str | Iterable[str]
    recompile_limit: int
    name: str | None


@dataclass(frozen=True)
class Option:
    """One option: its name, its default, what it may be, and what it does."""

    name: str
    default: Any
    must: str
    """What a value must be, in words that follow "must be"."""
    valid: Callable[[Any], bool]
    help: str
    words: tuple[str, ...] = ()
    """The valid values where they are words, for the nearest spelling."""


def _is_sequence_of(kind: type) -> Callable[[Any], bool]:
    def valid(value: Any) -> bool:
        if isinstance(value, kind):
            return not isinstance(value, bool)
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        return is_list and all(isinstance(v, kind) for v in value)

    return valid


def _are_passes(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, tuple | list):
        return False
    flat = [q for p in value for q in (p if isinstance(p, tuple | list) else (p,))]
    return all(isinstance(p, str) or callable(p) for p in flat)


def _are_rules(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(r, Row | str) for r in value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


OPTIONS: tuple[Option, ...] = (
    Option(
        "mode",
        DEFAULT,
        "one of its words",
        lambda value: value in MODES,
        '"default" runs all passes; "exact" only those that keep every bit.',
        MODES,
    ),
    Option(
        "passes",
        None,
        "a tuple of passes or their names, or None",
        _are_passes,
        "The passes to run, in order; None means those of `mode`. Not together with a mode.",
    ),
    Option(
        "rules",
        (),
        "a tuple of rules (tpjax.rule) or their names",
        _are_rules,
        "Rules of your own (`tpjax.rule`), which run before the built-in fusions.",
    ),
    Option(
        "strict",
        False,
        "True or False",
        _is_bool,
        "Raise where a rewrite fails or a recognised operator does not get its kernel, instead of "
        "going on without it.",
    ),
    Option(
        "verify",
        False,
        "True or False",
        _is_bool,
        "Run the original program beside the rewritten one at each call outside of other "
        "transformations. Where they differ by more than the rule allows, name the first equation "
        "that differs, write a file that reproduces it, and run the original; `strict` raises. "
        "The types are checked after each pass too, and a pass that breaks them raises.",
    ),
    Option(
        "static_argnums",
        (),
        "a position or several",
        _is_sequence_of(int),
        "Positions of arguments that are Python values known when tracing; as of `jax.jit`.",
    ),
    Option(
        "static_argnames",
        (),
        "a name or several",
        _is_sequence_of(str),
        "Names of such arguments.",
    ),
    Option(
        "recompile_limit",
        8,
        "a whole number above zero",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        "Entries past which one warning says what keeps changing. Never an error.",
    ),
    Option(
        "name",
        None,
        "a string, or None",
        lambda value: value is None or isinstance(value, str),
        "What profiles and reports call the function; None means its own name.",
    ),
)
"""All options of `tpjax.compile`, in the order of its help."""


def resolve(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns every option's value, the defaults filled in.

    Raises:
      TypeError: an unknown option; the message has the nearest valid name.
      ValueError: a value that its option cannot take, or two options that exclude each other.
    """
    table = {option.name: option for option in OPTIONS}
    for name, value in given.items():
        if name not in table:
            raise TypeError(f"compile: unknown option {name!r}. {did_you_mean(name, table)}")
        option = table[name]
        if option.words and isinstance(value, str) and value not in option.words:
            near = did_you_mean(value, option.words)
            raise ValueError(f"compile: unknown {name} {value!r}. {near}")
        if not option.valid(value):
            raise ValueError(message("compile", name, option.must, repr(value)))
    if given.get("passes") is not None and given.get("mode", DEFAULT) != DEFAULT:
        raise ValueError(
            f"compile: passes and mode={given['mode']!r} exclude each other, as a mode is a "
            "choice of passes. Leave one of them out."
        )
    check_names(PASS_GROUP, given.get("passes"))
    check_names(RULE_GROUP, given.get("rules"))
    if given.get("mode", DEFAULT) == EXACT:
        demand_exact(given.get("rules", ()))
    return MappingProxyType({option.name: option.default for option in OPTIONS} | dict(given))


def describe() -> str:
    """Returns the table as lines of a docstring."""
    return "\n".join(f"  {o.name}: {o.help} Default: {o.default!r}." for o in OPTIONS)
