"""Command-line flags made from the fields of RunConfig: one definition of each setting."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from pathlib import Path
from typing import Any, NoReturn

from paceline.config import FIELDS, RunConfig, read_toml
from paceline.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are UserErrors, with the nearest flag offered."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see '{self.prog} --help'")

    def parse_strictly(self, arguments: list[str]) -> argparse.Namespace:
        """Like parse_args, but an unknown flag is answered with the ones it may have meant."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            raise UserError(self._did_you_mean(unknown[0]))
        return parsed

    def _did_you_mean(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return f"unexpected argument '{unknown}'; see '{self.prog} --help'"
        flag = unknown.partition("=")[0]
        near = difflib.get_close_matches(flag, list(self._option_string_actions), n=2, cutoff=0.5)
        offer = f"did you mean {' or '.join(near)}?" if near else ""
        return f"unknown flag '{flag}': {offer} see '{self.prog} --help'".replace(":  see", ": see")


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
