"""Make a user's optimizer in the server: its class comes from a package or from the script, never from a pickle."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.core.own_loop.torch_optimizer import MakeOptimizer
from paceline.errors import UserError
from paceline.settings.imports import in_a_line

SCRIPT_MODULE = "__paceline_script__"
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)


def optimizer_maker(description: dict[str, Any], script: Path | None) -> MakeOptimizer:
    """Return what makes the optimizer that a worker has described. Raise UserError if its class is not found."""
    kind = _find_class(str(description["module"]), str(description["name"]), script)

    def make(groups: list[list[nn.Parameter]]) -> Optimizer:
        settings = [
            {"params": parameters, **_tuples(group)}
            for parameters, group in zip(groups, description["groups"], strict=True)
        ]
        made: Optimizer = kind.__new__(kind)
        try:
            Optimizer.__init__(made, settings, _tuples(description["defaults"]))
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer {kind.__name__} cannot be made in the server: {in_a_line(error)}") from None
        vars(made).update(description["attributes"])
        return made

    return make


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only, and torch's settings are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _find_class(module: str, name: str, script: Path | None) -> type[Optimizer]:
    try:
        found: Any = _script_module(script) if module == "__main__" else _import(module, script)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        what = f"optimizer {name}: the server cannot import it from {module if module != '__main__' else script}"
        raise UserError(f"{what} ({in_a_line(error)}): define it in a module of its own beside the script") from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UserError(f"optimizer {name}: {module}.{name} is not a torch optimizer")
    return found


def _import(module: str, script: Path | None) -> ModuleType:
    if script is not None and (folder := str(script.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def _script_module(script: Path | None) -> ModuleType:
    """Define the classes, functions and constants of a script, without running it."""
    if script is None:
        raise ImportError("no script")
    tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    kept = [node for node in tree.body if isinstance(node, _DEFINITIONS) or _is_constant(node)]
    if (folder := str(script.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    made = ModuleType(SCRIPT_MODULE)
    made.__file__ = str(script)
    exec(compile(ast.Module(kept, []), str(script), "exec"), vars(made))  # the user's own script
    return made


def _is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True
