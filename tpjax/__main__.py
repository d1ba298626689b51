# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m tpjax explain module:function ...`, `ops`, `bench` and `rules`."""

import argparse
import difflib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

_EXAMPLE = """\
examples:
  python -m tpjax explain mymodel:norm --shapes "bf16[8,512] scale=f32[512]"
      what tpjax.compile does with norm(x, scale) of mymodel.py in this folder
  python -m tpjax explain mymodel:loss --example mymodel:example_args --platform cuda
      arguments that are no plain arrays, as example_args() returns them; chosen as on a GPU
  python -m tpjax ops
      the operators that have kernels, and where each kernel runs
  python -m tpjax bench rms_norm --json found.json --picture roofline.png
      times its kernels beside XLA's and the reference, on this device
  python -m tpjax rules
      the rewrites, and what each promises of the numbers
"""

_RULES = """\
Lists every rule of every pass, those of installed distributions too, with its contract: what may
differ from evaluating the original equations one by one, and where the rule is written. --measure
instead runs the rules that are not exact, on this machine and on random data, beside the programs
that they replace, and prints the errors of both against float64 (a minute on a CPU).
"""
_BENCH = """\
Times operators on this device: our kernels, XLA's form and the float32 reference, compiled first,
then run in turn, group by group. Prints the median of each and an interval that holds it with 95 %,
its rates beside what this device was measured to reach, its distance from the reference, and where
the time that a kernel saves came from: traffic, launches, arithmetic. docs/bench.md says more.
"""
_COMMANDS = ("explain", "ops", "bench", "rules")

_EXPLAIN = """\
Traces a function, without running it, and shows what tpjax.compile does with it: which lines became
which operators, which kernel runs each, why others do not, and what nearly matched.

The arguments are, in this order of preference:
  --shapes    arrays separated by spaces: dtype[size,size,...], and name=dtype[...] by keyword.
              dtypes: f32 bf16 f16 f64 i32 i8 u8 ... bool; f32[] is a scalar.
  --example   module:callable that returns the arguments: a tuple of them, or the only one
  neither     what the function's own attribute `example` returns or is
"""


class UsageError(Exception):
    """A wrong command line: told in a line, exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Try {self.prog} --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tpjax",
        description="Explains what tpjax does with a function; lists and times what it has.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    explain = commands.add_parser(
        "explain",
        help="show which kernels a function gets, and why",
        description=_EXPLAIN,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("target", metavar="module:function", help="importable from this folder")
    explain.add_argument("--shapes", metavar="TEXT", help='such as "f32[4,128] scale=f32[128]"')
    explain.add_argument("--example", metavar="module:callable", help="returns the arguments")
    explain.add_argument("--mode", default="default", help="as of tpjax.compile")
    explain.add_argument("--platform", help="choose as on cpu, cuda, rocm or tpu")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.set_defaults(run=_explain)
    ops = commands.add_parser("ops", help="list the operators and where their kernels run")
    ops.add_argument("--json", action="store_true", help="print the table as JSON")
    ops.set_defaults(run=_ops)
    _add_bench(commands)
    rules = commands.add_parser(
        "rules", help="list the rewrites and their numeric contracts", description=_RULES
    )
    rules.add_argument("--json", action="store_true", help="print them as JSON")
    rules.add_argument("--measure", action="store_true", help="measure errors against float64")
    rules.set_defaults(run=_rules)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="time operators beside XLA's form, on this device", description=_BENCH
    )
    bench.add_argument("op", nargs="*", help="operators to time; all where none is named")
    bench.add_argument(
        "--samples",
        metavar="WORDS",
        action="append",
        help="production, small, all, or text that a sample holds, such as bf16[16384; may be "
        "given several times; if absent, production shapes on a GPU and small ones elsewhere",
    )
    bench.add_argument("--groups", metavar="N", type=int, help="groups of calls a program is timed")
    bench.add_argument("--json", metavar="FILE", help="write all that was found as JSON")
    bench.add_argument("--picture", metavar="FILE", help="draw the roofline: .png, .svg or .pdf")
    tuning = bench.add_mutually_exclusive_group()
    tuning.add_argument(
        "--tune",
        metavar="FOLDER",
        help="instead time the kernels' configs, for tpjax.cache(FOLDER)",
    )
    tuning.add_argument(
        "--record", action="store_true", help="the same, into the library's own tuned.json"
    )
    bench.set_defaults(run=_bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 0 done, 1 an error, 2 a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        for word in arguments[:1]:
            if not word.startswith("-") and word not in _COMMANDS:
                raise UsageError(f"unknown command {word!r}. {_nearest(word, _COMMANDS)}")
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 0
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UsageError as error:
        print(f"tpjax: {error}", file=sys.stderr)
        return 2
    except (_TraceError, _FaultsError) as error:
        print(f"tpjax: {error}", file=sys.stderr)
        return 1
    return 0


class _TraceError(Exception):
    """The user's function cannot be traced with these arguments."""


class _FaultsError(Exception):
    """A form of an operator failed, or computed something else."""


def _explain(options: argparse.Namespace) -> None:
    if "" not in sys.path:
        sys.path.insert(0, "")
    fn = _load(options.target)
    if not callable(fn):
        raise UsageError(f"{options.target} must be something to call; it is {type(fn).__name__}.")
    args, kwargs = _arguments(options, fn)

    import tpjax

    with ExitStack() as stack:
        try:
            if options.platform:
                stack.enter_context(tpjax.use(platform=options.platform))
            compiled = hasattr(fn, "explain") and hasattr(fn, "lower")  # its options are its own
            explained = fn.explain if compiled else tpjax.explain(fn, mode=options.mode)
        except ValueError as error:
            raise UsageError(str(error)) from error
        try:
            report = explained(*args, **kwargs)
        except Exception as error:
            first = str(error).strip().split("\n", 1)[0]
            raise _TraceError(
                f"{options.target} cannot be traced with these arguments: "
                f"{type(error).__name__}: {first}"
            ) from error
    if options.json:
        print(report.to_json())
    else:
        _show(report)


def _show(report: Any) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)


def _arguments(options: argparse.Namespace, fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments to trace with."""
    if options.shapes is not None:
        from tpjax.stax.shapes import parse_shapes

        try:
            return parse_shapes(options.shapes)
        except ValueError as error:
            raise UsageError(str(error)) from error
    example = _load(options.example) if options.example else getattr(fn, "example", None)
    if example is None:
        raise UsageError(
            f'{options.target} needs arguments: --shapes "f32[4,128]" or --example module:callable.'
        )
    if callable(example):
        try:
            example = example()
        except Exception as error:
            raise _TraceError(f"the example raised {type(error).__name__}: {error}") from error
    return (example if isinstance(example, tuple) else (example,)), {}


def _load(target: str) -> Any:
    """Returns the object at "module:name" or "module:Class.method"."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise UsageError(f"expected module:function; got {target!r}.")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"importing {module_name} needs {error.name}, absent here.") from error
        near = _nearest(module_name, _module_names(module_name))
        raise UsageError(f"no module {module_name!r} here. {near}".rstrip()) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"importing {module_name} raised {what}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            near = _nearest(name, _callables(value))
            raise UsageError(f"{module_name} has no {path!r}. {near}".rstrip())
        value = getattr(value, name)
    return value


def _callables(value: Any) -> Iterable[str]:
    return (n for n in dir(value) if not n.startswith("_") and callable(getattr(value, n, None)))


def _module_names(wanted: str) -> list[str]:
    """Returns names of modules near the wanted one: beside it in its package, or at the top."""
    package, dot, _ = wanted.rpartition(".")
    paths: Any = None
    if dot:
        try:
            paths = importlib.import_module(package).__path__
        except (ImportError, AttributeError):
            return _module_names(package)
    names = [info.name for info in pkgutil.iter_modules(paths)]
    return [f"{package}.{name}" for name in names] if dot else names


def _nearest(name: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else ""


def _ops(options: argparse.Namespace) -> None:
    from tpjax.pallas.support import support_rows

    _print([_row(row) for row in support_rows()], options.json)


def _bench(options: argparse.Namespace) -> None:
    from tpjax.pallas.bench.command import run_command

    try:
        faults = run_command(options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if faults:
        raise _FaultsError("bench: " + "; ".join(faults))


def _rules(options: argparse.Namespace) -> None:
    if options.measure:
        from tpjax.core._jax import provide_interpreter_threads

        provide_interpreter_threads()
        from tpjax.stax_passes.accuracy import measured

        lines = list(measured())
        _print([_plain(line) if options.json else line.in_words() for line in lines], options.json)
        return
    from tpjax.stax_passes.contracts import all_contracts

    rows = [row._asdict() for row in all_contracts()]
    only_ours = not options.json and {row["comes_from"] for row in rows} == {"tpjax"}
    for row in rows if only_ours else ():
        row["lives_at"] = row["lives_at"].removeprefix("tpjax.stax_passes.")
        del row["comes_from"]
    _print(rows, options.json)


def _print(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Prints rows of one table, as JSON or for reading."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in rows[0]:
        long = any(" " in _cell(row[column]) for row in rows)
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=not long)
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _plain(value: Any) -> Any:
    """Returns a named tuple, and those in it, as dicts."""
    if not hasattr(value, "_asdict"):
        return value
    return {name: _plain(one) for name, one in value._asdict().items()}


def _row(row: Any) -> dict[str, Any]:
    """Returns a row of the support table as plain data."""
    as_dict: Callable[[], dict[str, Any]] | None = getattr(row, "_asdict", None)
    if as_dict is not None:
        return dict(as_dict())
    return dict(row) if isinstance(row, dict) else dict(vars(row))


def _cell(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if not isinstance(value, tuple | list):
        return str(value)
    sentences = any(" " in str(each) for each in value)
    return ("\n" if sentences else ", ").join(map(str, value))


if __name__ == "__main__":
    sys.exit(main())
