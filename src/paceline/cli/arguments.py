"""Command-line flags made from the fields of RunConfig: one definition of each setting."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from pathlib import Path
from typing import Any, NoReturn

from paceline.config import FIELDS, RunConfig, read_toml
from paceline.errors import UserError, unknown_name
from paceline.system.terminal import fold, fold_help, terminal_width

NARROW = 60
"""Columns below which a flag's help stands under it."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Names and flags are not broken at their hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24 if terminal_width() >= NARROW else 6)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fold(" ".join(text.split()), width).split("\n")


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are UserErrors, with the nearest flag offered."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog, usage, description, formatter_class=Formatter, allow_abbrev=False)

    def format_help(self) -> str:
        return fold_help(super().format_help(), terminal_width())

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self._in_our_words(message)}; see '{self.prog} --help'")

    def _in_our_words(self, message: str) -> str:
        """What argparse found, said as we say it."""
        _, required, names = message.partition("arguments are required: ")
        if required:
            missing = [action for action in self._actions if _name(action) in names.split(", ")]
            return ", ".join(f"{_name(action)} is missing" + _explained(action) for action in missing) or message
        return message.replace(": expected one argument", " needs a value: there is none behind it")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise unknown_name(_name(action), str(value), action.choices)

    def parse_strictly(self, arguments: list[str]) -> argparse.Namespace:
        """Like parse_args, but an unknown flag is answered with the ones it may have meant."""
        try:
            parsed, unknown = self.parse_known_args(arguments)
        except UserError:
            typos = [word for word in arguments if self._is_unknown(word)]
            if not typos or argparse.REMAINDER in [action.nargs for action in self._actions]:
                raise
            raise UserError(self._did_you_mean(typos[0])) from None  # what is missing may be what was mistyped
        if unknown:
            raise UserError(self._did_you_mean(unknown[0]))
        return parsed

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("--") and word.partition("=")[0] not in self._option_string_actions and word != "--"

    def _did_you_mean(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return f"unexpected argument '{unknown}'; see '{self.prog} --help'"
        flag = unknown.partition("=")[0]
        near = difflib.get_close_matches(flag, list(self._option_string_actions), n=2, cutoff=0.5)
        offer = f"did you mean {' or '.join(near)}?" if near else ""
        return f"unknown flag '{flag}': {offer} see '{self.prog} --help'".replace(":  see", ": see")


def _name(action: argparse.Action) -> str:
    """As argparse calls it in its messages."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return "/".join(action.option_strings) or metavar or action.dest


def _explained(action: argparse.Action) -> str:
    if action.choices is not None:
        return f" ({', '.join(map(str, action.choices))})"
    return f" ({action.help})" if action.help else ""


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 1,1,2") from None


def number(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}") from None

    return parse


def add_settings(parser: argparse.ArgumentParser, left_out: tuple[str, ...] = ()) -> None:
    """One flag for every field of RunConfig, in groups."""
    groups: dict[str, Any] = {}
    for name, spec in FIELDS.items():
        if name in left_out:
            continue
        title = spec.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        flag, kind = "--" + name.replace("_", "-"), str(spec.type)
        text = spec.metadata["help"] + _default_text(spec)
        options: dict[str, Any] = {"dest": name, "default": None, "help": text.replace("%", "%%")}
        if kind.startswith("bool"):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        options["metavar"] = spec.metadata["metavar"] or kind.partition(" ")[0].upper().replace("STR", "NAME")
        if "list[str]" in kind:
            group.add_argument(flag, action="append", **options)
        elif "list[float]" in kind:
            group.add_argument(flag, type=_numbers, **options)
        elif kind.startswith(("int", "float")):
            group.add_argument(flag, type=number(int if kind.startswith("int") else float), **options)
        else:
            also = [f"--{spec.metadata['alias']}"] if spec.metadata["alias"] else []
            group.add_argument(flag, *also, **options)


def _default_text(spec: dataclasses.Field[Any]) -> str:
    value = spec.default if spec.default is not dataclasses.MISSING else None
    if callable(spec.default_factory):
        value = ",".join(f"{part:g}" for part in spec.default_factory())
    if value is None or value is False or "default" in spec.metadata["help"]:
        return ""
    return f" [{value:g}]" if isinstance(value, float) else f" [{value}]"


def config_from(parsed: argparse.Namespace, file: str | None, base: dict[str, Any] | None = None) -> RunConfig:
    """The settings of `base`, then a file's, then the flags that were given."""
    values = {**(base or {}), **(read_toml(Path(file)) if file is not None else {})}
    values |= {name: getattr(parsed, name) for name in FIELDS if getattr(parsed, name, None) is not None}
    return RunConfig(**values)
