# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of the user's own: `tpjax.rule` makes one, `with_rules` puts them among the passes."""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from tpjax.core.errors import did_you_mean, message
from tpjax.stax_passes.engine import Recogniser, rewriting_pass
from tpjax.stax_passes.pipeline import CLEAN_UP
from tpjax.stax_passes.report import Tier
from tpjax.stax_passes.sweep import Pass
from tpjax.stax_passes.unify import Rule

Row = Rule | Recogniser
"""What a rewriting pass is made of."""


def rule(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    name: str | None = None,
    tier: Tier = "close",
    contract: str = "as the author of the rule states",
) -> Rule:
    """Returns the rule that computes `replacement` where a program computes `pattern`.

    Both are ordinary JAX functions of the same arrays with one array as the result. The pattern is
    traced at the shapes and dtypes of each place that it may fit, so it is written once for all of
    them; it matches up to the order of commutative operands, and numbers in it must be met exactly.
    Parameters with defaults keep them. An array that the pattern closes over is a constant, which
    no array that the program closes over equals, as those are inputs: make it an argument. Give the
    rule to `tpjax.compile(fn, rules=(rule,))`.

    Args:
      pattern: what to look for; every argument must matter to its result.
      replacement: what to compute instead, pure; the result has the shape and dtype of the
        pattern's.
      name: what reports call the rule; None means the name of one of the functions, or the line of
        the pattern.
      tier: "exact" if the bits stay the same, which `mode="exact"` asks for; else "close".
      contract: what may differ from the original numbers, in words.

    Raises:
      TypeError: one of them cannot be called, takes `*args`, or both take different arguments.
      ValueError: an unknown tier.

    Example:
      >>> import tpjax
      >>> minus = tpjax.rule(lambda x: x + 1, lambda x: x - 1)
      >>> int(tpjax.compile(lambda x: x + 1, rules=(minus,))(3))
      2
    """
    for argument, value in (("pattern", pattern), ("replacement", replacement)):
        if not callable(value) or isinstance(value, type):
            raise TypeError(message("rule", argument, "a function", repr(value)))
    tiers = get_args(Tier)
    if tier not in tiers:
        raise ValueError(f"rule: unknown tier {tier!r}. {did_you_mean(str(tier), tiers)}")
    if name is not None and not (isinstance(name, str) and name):
        raise TypeError(message("rule", "name", "a string that is not empty", repr(name)))
    wanted, given = _parameters(pattern, "pattern"), _parameters(replacement, "replacement")
    if wanted is None:
        raise TypeError(
            "rule: the pattern takes *args, so how many arrays it is a pattern of is not known. "
            "Name them: lambda x, y: pattern(x, y)."
        )
    if not wanted:
        raise TypeError("rule: the pattern takes no argument, so it is a constant. Name an array.")
    if given is not None and len(given) != len(wanted):
        must = f"a function of {len(wanted)} arguments, as the pattern is: {', '.join(wanted)}"
        raise TypeError(message("rule", "replacement", must, f"{', '.join(given) or 'none'}"))
    if given is not None and given != wanted and sorted(given) == sorted(wanted):
        must = f"a function of ({', '.join(wanted)}) in the pattern's order"
        raise TypeError(message("rule", "replacement", must, f"({', '.join(given)})"))
    chosen = name or _name_of(pattern, replacement)
    return Rule(chosen, pattern, replacement, tier, contract, num_args=len(wanted))


def _parameters(fn: Callable[..., Any], argument: str) -> list[str] | None:
    """Returns the names of the arguments that must be given, by position; None if not knowable."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None  # a builtin
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    keyword = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    if keyword:
        must = "a function whose arguments can be given by position"
        raise TypeError(message("rule", argument, must, f"one that needs {keyword[0]}= by name"))
    return [p.name for p in needed]


def _name_of(pattern: Callable[..., Any], replacement: Callable[..., Any]) -> str:
    for fn in (pattern, replacement):
        name = getattr(fn, "__name__", "")
        if name.isidentifier():
            return name
    code = getattr(pattern, "__code__", None)
    if code is None:
        return type(pattern).__name__
    return f"rule at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def demand_exact(rules: Iterable[Any]) -> None:
    """Raises `ValueError` for a rule that `mode="exact"` cannot run."""
    for row in rules:
        if isinstance(row, Row) and row.tier != "exact":
            raise ValueError(
                f"compile: mode='exact' keeps every bit, and the rule {row.name} is of tier "
                f"{row.tier!r}. Leave the mode out, or make the rule with tier='exact' if the bits "
                "stay the same."
            )


def with_rules(
    passes: Sequence[Pass | tuple[Pass, ...]], rules: Sequence[Row]
) -> tuple[Pass | tuple[Pass, ...], ...]:
    """Returns the passes with the user's rules among them.

    They are one pass, `apply_rules`, after the first `CLEAN_UP`, so that a pattern meets one
    spelling of an equation, and before every built-in fusion, so that the user's rules win. Without
    a `CLEAN_UP` it runs first. Each place is rewritten once, by the first rule that matches it;
    what a replacement computes is not looked at again, so no rule can loop.

    Raises:
      ValueError: the pattern of a rule can match nothing, or would match everything.
    """
    if not rules:
        return tuple(passes)
    at = next((i + 1 for i, entry in enumerate(passes) if entry == CLEAN_UP), 0)
    for row in rules:
        if isinstance(row, Rule):
            row.check()
    rest = tuple(passes[at:]) or (CLEAN_UP,)[: at > 0]
    return (*passes[:at], rewriting_pass("apply_rules", tuple(rules)), *rest)
