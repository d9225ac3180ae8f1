"""Command-line flags made from the fields of RunConfig: one definition of each setting."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from paceline.config import FIELDS, SIMULATED_ONLY, RunConfig, is_url, read_toml
from paceline.errors import UserError, nearest_names, unknown_name
from paceline.reports.console import Console
from paceline.settings.features import require_effect
from paceline.system.terminal import UNLIMITED_WIDTH, fold_help, terminal_width

NARROW = 60  # columns below which the help of a flag stands under it
MAX_SHOWN = 16  # settings up to which --help shows all of them
BASIC = (
    *(
        "strategy",
        "workers",
        "model",
        "dataset",
        "task",
        "epochs",
        "steps",
        "batch_size",
        "optimizer",
        "lr",
        "momentum",
    ),
    *("seed", "device", "delay", "name", "runs", "speeds", "link", "like", "timing_only"),
)
"""Settings that --help shows of a verb with many; --help-all shows the rest."""

_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)")
"""How a word begins that is a value below zero, and no flag."""


class Parser(argparse.ArgumentParser):
    """The arguments of one verb. A mistake is a UserError that offers the nearest flag."""

    def __init__(self, verb: str, description: str, usage: str | None = None) -> None:
        self._known: list[argparse.Action] = []
        self._words: list[str] = []  # as they are parsed
        self._choices: dict[str, tuple[str, ...]] = {}
        self._advanced: list[argparse.Action] = []
        super().__init__(f"paceline {verb}", usage, description, add_help=False, allow_abbrev=False)
        self._groups: dict[str | None, Any] = {None: self}
        self._negative_number_matcher = _NEGATIVE  # of argparse, which takes -1 for a value but -5ms for a flag
        self.add("-h/--help", "show this help message and exit", action="help")
        self.add("--help-all", argparse.SUPPRESS, action=_HelpAll, nargs=0, default=argparse.SUPPRESS)

    def add(self, names: str, text: str, group: str | None = None, basic: bool = True, **options: Any) -> None:
        """Add an argument with its help text, as in `add("-o/--output", "file to write", metavar="FILE")`.

        One that is not `basic` is in the help of `--help-all` only.
        """
        if options.get("type") in (int, float):
            options["type"] = _number(options["type"])
        if group not in self._groups:
            self._groups[group] = self.add_argument_group(group)
        self._known.append(self._groups[group].add_argument(*names.split("/"), help=text, **options))
        if not basic:
            self._advanced.append(self._known[-1])

    def add_choice(self, name: str, choices: tuple[str, ...], text: str | None = None, **options: Any) -> None:
        """Add an argument that takes one of a few names."""

        def choose(found: str) -> str:
            if found not in choices:
                raise unknown_name(name, found, choices)
            return found

        self._choices[name] = choices
        options["metavar"] = f"{{{','.join(choices)}}}" if name[0] == "-" else None
        self.add(name, text or " or ".join(choices), type=choose, **options)

    def add_either(self, **flags: str) -> None:
        """Add flags of which only one may be given, each with its help."""
        group = self.add_mutually_exclusive_group()
        for name, text in flags.items():
            self._known.append(group.add_argument(f"--{name}", action="store_true", help=text))

    def format_help(self) -> str:
        """Fold the help to the terminal: argparse itself breaks names and flags at their hyphens."""
        width = terminal_width()
        indent, formatter = 24 if width >= NARROW else 6, argparse.RawDescriptionHelpFormatter
        self.formatter_class = functools.partial(formatter, width=UNLIMITED_WIDTH, max_help_position=indent)
        return fold_help(super().format_help(), width)

    def print_help(self, file: Any = None) -> None:
        """Print the basic flags, and how to see the others if there are any."""
        texts = [action.help for action in self._advanced]
        for action in self._advanced:
            action.help = argparse.SUPPRESS
        self.epilog = f"'{self.prog} --help-all' shows {len(texts)} more flags." if texts else None
        super().print_help(file)
        for action, text in zip(self._advanced, texts, strict=True):
            action.help = text

    def print_all_help(self) -> None:
        """Print every flag."""
        self.epilog = None
        super().print_help()

    def error(self, message: str) -> NoReturn:
        _, required, names = message.partition("arguments are required: ")
        if required:
            helps = {_name(action): action.help for action in self._known}
            helps |= {name: ", ".join(choices) for name, choices in self._choices.items()}
            message = ", ".join(f"{name} is missing ({helps[name]})" for name in names.split(", "))
        flag, is_alone, _ = message.removeprefix("argument ").partition(": expected one argument")
        flags = flag.split("/")
        for word, value in itertools.pairwise(self._words if is_alone else []):
            if word in flags and value.startswith("-") and value not in self.flags():
                raise UserError(f"{word} {value}: a value that begins with a dash is taken for a flag: {word}={value}")
        message = message.replace(": expected one argument", " needs a value: there is none behind it")
        raise UserError(f"{message}; see '{self.prog} --help'")

    def parse_strictly(self, arguments: list[str]) -> argparse.Namespace:
        """Parse like parse_args, but for an unknown flag suggest similar flags."""
        self._words = arguments
        try:
            parsed, unknown = self.parse_known_args(arguments)
        except UserError:
            typos = [word for word in arguments if self._is_unknown(word)]
            if not typos or argparse.REMAINDER in [action.nargs for action in self._known]:
                raise
            raise UserError(self._did_you_mean(typos[0])) from None  # the missing argument may be the mistyped one
        if unknown:
            raise UserError(self._did_you_mean(unknown[0]))
        self._require_words(parsed)
        return parsed

    def _require_words(self, parsed: argparse.Namespace) -> None:
        """Refuse an empty text, as of a variable that a shell does not know: as a path it would be this folder."""
        for action in self._known:
            found = getattr(parsed, action.dest, None)
            words = found if isinstance(found, list) else [found]
            if "" in words[: 1 if action.nargs == argparse.REMAINDER else None]:
                what = action.option_strings[-1] if action.option_strings else _name(action)
                raise UserError(f"{what} is empty: {action.help}; see '{self.prog} --help'")

    def flags(self) -> list[str]:
        """All names of flags."""
        return [flag for action in self._known for flag in action.option_strings]

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("--") and word.partition("=")[0] not in self.flags() and word != "--"

    def _did_you_mean(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return f"unexpected argument '{unknown}'; see '{self.prog} --help'"
        flag = unknown.partition("=")[0]
        if (name := flag.removeprefix("--").replace("-", "_")) in FIELDS:
            verb = "simulate" if name in SIMULATED_ONLY else "train"
            return f"unknown flag '{flag}': it is one of 'paceline {verb}'; see '{self.prog} --help'"
        near = nearest_names(flag, self.flags(), most=2)
        offer = f"did you mean {' or '.join(near)}? " if near else ""
        return f"unknown flag '{flag}': {offer}see '{self.prog} --help'"


class _HelpAll(argparse.Action):
    """The flag --help-all."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.print_all_help()
        parser.exit()


def _name(action: argparse.Action) -> str:
    """Return the name of an argument in the messages of argparse."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return "/".join(action.option_strings) or metavar or action.dest


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 1,1,2") from None


def _number(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return a parser of numbers whose error says what was found."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}") from None

    return parse


def add_settings(parser: Parser, left_out: tuple[str, ...] = ()) -> None:
    """Add a flag for every field of RunConfig, in groups."""
    shown = {name: spec for name, spec in FIELDS.items() if name not in left_out}
    for name, spec in shown.items():
        kind, text = str(spec.type), spec.metadata["help"] + _default_text(spec)
        alias = f"/--{spec.metadata['alias']}" if spec.metadata["alias"] else ""
        options: dict[str, Any] = {"dest": name}
        if kind.startswith("bool"):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = spec.metadata["metavar"] or kind.partition(" ")[0].upper().replace("STR", "NAME")
        if "list[str]" in kind:
            options["action"] = "append"
        elif "list[float]" in kind:
            options["type"] = _numbers
        elif kind.startswith(("int", "float")):
            options["type"] = int if kind.startswith("int") else float
        flags = f"--{name.replace('_', '-')}{alias}"
        basic = name in BASIC or len(shown) <= MAX_SHOWN
        parser.add(flags, text.replace("%", "%%"), spec.metadata["group"], basic, **options)


def _default_text(spec: dataclasses.Field[Any]) -> str:
    value = spec.default if spec.default is not dataclasses.MISSING else None
    if callable(spec.default_factory):
        value = ",".join(f"{part:g}" for part in spec.default_factory())
    if value is None or value is False or "default" in spec.metadata["help"]:
        return ""
    return f" [{value:g}]" if isinstance(value, float) else f" [{value}]"


def add_trust(parser: Parser) -> None:
    parser.add("--trust", "import the code that a run of another user or machine names", action="store_true")


def require_trust(parsed: argparse.Namespace, run: str, trackers: bool = False, mirror: bool = False) -> None:
    """Refuse a run of somebody else that names code or a store to write to, unless the user has given `--trust`."""
    from paceline.runs.folder import RunFolder

    if not parsed.trust:
        RunFolder.open(Path(run)).require_trust(trackers, mirror)


def add_take_over(parser: Parser) -> None:
    text = "with a URL: go on at once, without watching whether another machine still writes the run"
    parser.add("--take-over", text, "run folder", action="store_true")


@contextlib.contextmanager
def run_to_resume(parsed: argparse.Namespace, run: str, console: Console) -> Iterator[str]:
    """Yield the folder of the run to go on with. Download one in a store, which it is copied to again."""
    if not is_url(run):
        if parsed.take_over:
            raise UserError(
                f"--take-over is about a run in a store, and {run} is a folder of this machine: leave it out"
            )
        yield run
        return
    from paceline.object_store.mirroring import fetched

    if parsed.mirror is None:
        parsed.mirror = run.rstrip("/").rpartition("/")[0]
    mode = "take-over" if parsed.take_over else "resume"
    if is_url(runs := parsed.runs or RunConfig().runs):
        raise UserError(f"--runs {runs}: {run} is downloaded to a folder of this machine; give that one")
    with fetched(run, Path(runs), console.report, mode) as path:
        yield str(path)


@contextlib.contextmanager
def run_to_read(run: str, console: Console) -> Iterator[str]:
    """Yield the folder of a run to read; of one in a store a copy that is removed afterwards."""
    if not is_url(run):
        yield run
        return
    from paceline.object_store.mirroring import fetched

    with tempfile.TemporaryDirectory(prefix="paceline-") as place:
        with fetched(run, Path(place), console.report, "read") as path:
            yield str(path)


def script_of(words: list[str], parser: Parser) -> list[str]:
    """The script and its arguments of a command line; a flag of `parser` among the arguments is a UserError."""
    from paceline.runtimes.scripts.command import command_of

    return command_of(words, parser.flags())


def config_from(parsed: argparse.Namespace, file: str | None, base: dict[str, Any] | None = None) -> RunConfig:
    """Return the settings of `base`, of the file and of the flags given; a later one wins."""
    if file is not None and file.endswith(".py"):
        instead = f"'paceline run {file}' runs its own loop on several workers, 'python {file}' one with paceline.train"
        raise UserError(f"{file} is a script, and a file of settings is TOML: {instead}")
    values = {**(base or {}), **(read_toml(Path(file)) if file is not None else {})}
    flags = {name: getattr(parsed, name) for name in FIELDS if getattr(parsed, name, None) is not None}
    config = RunConfig(**{**values, **flags})
    require_effect(config, flags)
    return config
