# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of `train.py`: absl flags made from the fields of `Config`."""

import difflib
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from absl import flags

from tpjax.core.errors import did_you_mean, message
from tpjax.models import DecoderConfig
from tpjax.training.config import MODEL_FIELDS, RUN_FIELDS, Config, field_docs, override, preset

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
NEWEST = "newest"
"""What `--resume` without a folder means."""

DEFAULT_PRESET = "tiny"

OPTIONS = {
    "config": "Preset to start from: tiny, small, 125m or 1b; any field below overrides it.",
    "out": "Folder of the run; left out, a new one is made: runs/tiny-001.",
    "resume": "Goes on from the newest checkpoint of a run: --resume=runs/tiny-001; without a "
    "folder, of --out or of the newest run. Fields given beside it change the run.",
    "platform": "Where to run: cpu, cuda, rocm or tpu; left out, JAX chooses.",
}


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    preset: str | None = None
    """None where `--config` was not given."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that were given, by name."""
    out: str | None = None
    resume: str | None = None
    """None: a new run; "newest"; or the folder of a run."""
    platform: str | None = None
    help: str | None = None
    """The text to print instead, for `--help`."""

    def config(self) -> Config:
        """Returns the config of a new run."""
        return override(preset(self.preset or DEFAULT_PRESET), self.fields)


class _Parser(flags.ArgumentParser):
    """Converts the text of a flag, with an error in the house style."""

    def __init__(self, name: str, convert: Callable[[str], Any], kind: str):
        self.name, self.convert, self.kind = name, convert, kind
        super().__init__()

    def parse(self, argument: str) -> Any:
        """Returns the value that the text stands for."""
        try:
            return self.convert(argument)
        except ValueError:
            raise ValueError(
                message("train", f"--{self.name}", self.kind, repr(argument))
            ) from None


def _to_folder(text: str) -> str | None:
    """absl gives a flag that stands alone the text "true", and --noresume the text "false"."""
    if text == "false":
        return None
    return NEWEST if text == "true" else text


class _ResumeFlag(flags.Flag):
    """A flag that may stand alone, as `--resume`, or have a value."""

    def __init__(self) -> None:
        parser = _Parser("resume", _to_folder, "a folder")
        super().__init__(parser, None, "resume", None, OPTIONS["resume"])
        self.boolean = True


def _to_int(text: str) -> int:
    return int(text.replace(",", "_"))


_KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (_to_int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
}


def _words(name: str) -> str:
    """What is said of a field that needs no words of its own."""
    return f"{name.replace('_', ' ').capitalize()}."


def _define(values: flags.FlagValues) -> None:
    types = typing.get_type_hints(Config) | typing.get_type_hints(DecoderConfig)
    docs = field_docs(DecoderConfig) | field_docs(Config)
    for name in (*RUN_FIELDS, *MODEL_FIELDS):
        kind = str if name == "dtype" else types[name]
        text = docs.get(name, _words(name))
        if kind is bool:
            flags.DEFINE_boolean(name, None, text, flag_values=values)
        else:
            convert, what = _KINDS[kind]
            flags.DEFINE(_Parser(name, convert, what), name, None, text, flag_values=values)
    for name in ("config", "out", "platform"):
        flags.DEFINE_string(name, None, OPTIONS[name], flag_values=values)
    flags.DEFINE_flag(_ResumeFlag(), flag_values=values)
    flags.DEFINE_boolean("help", False, "Prints this.", short_name="h", flag_values=values)


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"Did you mean --{near[0]}? " if near else ""


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Parses the command line, or raises a `ValueError` that says how to mend it."""
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname.removeprefix("no")
        hint = _nearest(name, [*RUN_FIELDS, *MODEL_FIELDS, *OPTIONS])
        raise ValueError(
            f"train: unknown flag --{error.flagname}. {hint}python train.py --help lists all."
        ) from None
    except flags.Error as error:
        text = str(error)
        raise ValueError(text[text.index("train: ") :] if "train: " in text else text) from None
    if len(rest) > 1:
        raise ValueError(
            f"train: unexpected argument {rest[1]!r}. Write a flag's value after an equals sign: "
            f"--data={rest[1]} or --resume={rest[1]}."
        )


def read_command_line(argv: Sequence[str]) -> Request:
    """Returns what the command line asks for; `argv[0]` is the program.

    Raises:
      ValueError: an unknown flag, preset or value, with the nearest valid one.
    """
    values = flags.FlagValues()
    _define(values)
    _parse(values, argv)
    if values["help"].value:
        return Request(help=_help())
    if values["platform"].value not in (None, *PLATFORMS):
        asked = values["platform"].value
        remedy = did_you_mean("cuda" if asked == "gpu" else asked, PLATFORMS)
        raise ValueError(message("train", "--platform", "a platform", repr(asked), remedy))
    given = {
        name: values[name].value
        for name in (*RUN_FIELDS, *MODEL_FIELDS)
        if values[name].value is not None
    }
    request = Request(
        values["config"].value,
        given,
        values["out"].value,
        values["resume"].value,
        values["platform"].value,
    )
    if request.preset is not None or request.resume is None:
        request.config()  # a wrong name or value is an error now, whatever follows
    return request


def _help() -> str:
    start = preset(DEFAULT_PRESET)
    docs = field_docs(DecoderConfig) | field_docs(Config)
    lines = ["Flags of train.py; in brackets, the value of --config=tiny.", ""]
    lines += [f"  --{name}: {text}" for name, text in OPTIONS.items()]
    for title, names, owner in (
        ("The run:", RUN_FIELDS, start),
        ("The model:", MODEL_FIELDS, start.model),
    ):
        lines += ["", title]
        lines += [
            f"  --{name}: {docs.get(name, _words(name))} [{getattr(owner, name)}]" for name in names
        ]
    return "\n".join(lines)
