"""`paceline.train`: train from Python, with your own task."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.analysis.statistics import FAILED
from paceline.config import FIELDS, SIMULATED_ONLY, RunConfig
from paceline.errors import Interrupted, PacelineError, UserError, unknown_name
from paceline.launch import train as launch
from paceline.reports.console import Console
from paceline.settings.features import require_effect
from paceline.settings.imports import require_no_arguments
from paceline.settings.ranks import rank_here
from paceline.settings.resolve import OPTIMIZERS
from paceline.settings.stopping import why_missed
from paceline.settings.strategies import in_this_process
from paceline.tasks.supervised import SupervisedTask


class TrainingInterrupted(SystemExit, KeyboardInterrupt):
    """Ends a script whose training Ctrl-C has ended unsaved, without a traceback; it can be caught as that."""


def train(
    build: Callable[[], SupervisedTask] | str | None = None, *, quiet: bool = False, **settings: Any
) -> dict[str, Any]:
    """Train and return the result (the content of result.json, with `folder` added).

    `build` returns a `paceline.Task`; workers import it by name, so it is a function at the top of a module or script.
    In a notebook, too, it is in a module, unless the workers are in this process (strategy classic, device cuda).
    Without `build`, `model` and `dataset` name built-in ones. `settings` are the flags of `paceline train`.

    Flags are written with underscores, as in `strategy="async"`, `batch_size=64`; None is the default of each. `quiet`
    shows no progress. A mistake is a `UserError`; a run that diverges or learns nothing returns, with `status`
    "diverged" or "collapsed", and its `reason` is printed as by the command line.
    """
    try:
        return _train(build, quiet, settings)
    except (KeyboardInterrupt, Interrupted) as error:
        print(f"paceline: {str(error) or 'interrupted'}", file=sys.stderr)
        raise TrainingInterrupted(130) from None
    except PacelineError as error:
        # The message says it all; our own frames would bury it.
        raise error.with_traceback(None) from error.__cause__


def _train(build: Callable[[], SupervisedTask] | str | None, quiet: bool, settings: dict[str, Any]) -> dict[str, Any]:
    require_no_run()
    for name in settings:
        if name not in FIELDS:
            raise unknown_name("setting", name, FIELDS)
    given = {name: _plain(name, value) for name, value in settings.items() if value is not None}
    config = RunConfig(**given)
    if build is not None:
        if isinstance(build, nn.Module) or (isinstance(build, type) and issubclass(build, nn.Module)):
            name = build.__name__ if isinstance(build, type) else type(build).__name__
            raise UserError(f"build is the model {name}: give the function that returns a paceline.Task with it")
        if "task" in given:
            raise UserError(f"build and task = {config.task} both name the task: leave one out")
        if not callable(build) and not isinstance(build, str):
            what = f"build is {type(build).__name__}"
            raise UserError(f"{what}: give the function that returns the task, without calling it, as in train(build)")
        name = build if isinstance(build, str) else importable_name(build, here=in_this_process(config))
        config = dataclasses.replace(config, task=name)
    require_effect(config, given)
    if not in_this_process(config):
        require_main_guard()
    with Console(quiet=quiet) as console:
        folder, result = launch(config, console, rank := rank_here())
        if result["status"] in FAILED and (rank is None or rank.leads):
            console.note(f"paceline: {result['reason']}")
        elif (missed := why_missed(config, result)) is not None:
            console.note(f"paceline: {missed}")
    return {**result, "folder": str(folder.path)}


def require_no_run() -> None:
    """Raise UserError in a script of `paceline run` that has not joined: each worker would train a run of its own."""
    own = sys.modules.get("paceline.runtimes.scripts.session")
    if own is not None and own.inherited is not None and own.joined is None:
        script = Path(sys.argv[0]).name
        raise UserError(
            f"{script} calls paceline.train, which starts its workers itself: start it with 'python {script}'"
        )


def _plain(name: str, value: Any) -> Any:
    """A setting as its flag has it: torch's own objects by their names."""
    if name == "device" and isinstance(value, torch.device):
        return str(value)
    kind = value if isinstance(value, type) else type(value)
    if name == "optimizer" and issubclass(kind, torch.optim.Optimizer):
        like = f", as in optimizer={kind.__name__.lower()!r}".replace("'", '"')
        known = like if kind.__name__.lower() in OPTIMIZERS else f"; known are: {', '.join(OPTIMIZERS)}"
        raise UserError(f"optimizer is torch's {kind.__name__}: give the name of one of ours{known}")
    return value


def settings_of_train() -> list[inspect.Parameter]:
    """The settings of `train` as keyword parameters, with the types that it takes."""
    untouched = RunConfig()
    kind, wider = inspect.Parameter.KEYWORD_ONLY, {"scale_lr": "str | float", "average": "str | float | None"}
    found = []
    for name, spec in FIELDS.items():
        if name not in SIMULATED_ONLY:
            wanted = wider.get(name, str(spec.type)).replace("list[str]", "str | list[str]")
            if spec.metadata["metavar"] in ("DIR", "FILE"):
                wanted = wanted.replace("str", "str | PathLike[str]")
            wanted = wanted.replace("list[float]", "list[float] | tuple[float, ...]")
            wanted = wanted if wanted.endswith("None") else f"{wanted} | None"
            found.append(inspect.Parameter(name, kind, default=getattr(untouched, name), annotation=wanted))
    return found


def _shown_signature() -> inspect.Signature:
    """What a notebook completes: `train` with every setting; unknown names are refused by `train` itself."""
    written = inspect.signature(train)
    fixed = [one for one in written.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return written.replace(parameters=[*fixed, *settings_of_train()])


train.__signature__ = _shown_signature()  # type: ignore[attr-defined]


def importable_name(build: Callable[[], Any], here: bool = False) -> str:
    """The `MODULE:NAME` or `FILE.py:NAME` by which another process (or this one, if `here`) imports a function."""
    name = getattr(build, "__qualname__", f"{type(build).__name__}(...)")  # of a partial, or of a callable object
    if not name.isidentifier():
        raise UserError(f"build '{name}' cannot be imported by workers: make it a function at the top of a module")
    require_no_arguments("build", name, build)
    if build.__module__ != "__main__":
        return f"{build.__module__}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        if here and getattr(sys.modules["__main__"], name, None) is build:
            return f"__main__:{name}"
        raise UserError(
            f"build '{name}' lives in an interactive session, which workers cannot import: write its cell to a file, "
            f"with '%%writefile my_task.py' as its first line, and 'from my_task import {name}' in the next; or train "
            "in this process with strategy='classic'"
        )
    return f"{Path(file).resolve()}:{name}"


def require_main_guard() -> None:
    """Exit with code 2 and one line if the script has no main guard: workers that import it would train again."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and module in ("__main__", "__paceline_main__"):
            if module == "__paceline_main__" or not _guarded(frame.f_code.co_filename, frame.f_lineno):
                print(
                    f"paceline: {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: paceline.train(...) runs "
                    "whenever this file is imported, and workers import it: put it under if __name__ == '__main__':",
                    file=sys.stderr,
                )
                raise SystemExit(2)
            return
        frame = frame.f_back


def _guarded(filename: str, line: int) -> bool:
    """Whether `line` of a script lies under `if __name__ == ...`."""
    try:
        tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return True  # no file to import: an interactive session
    for statement in tree.body:
        if isinstance(statement, ast.If) and statement.lineno <= line <= (statement.end_lineno or line):
            return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
    return False
