"""Calls of a script to change for several workers: those of a process group, saved files, evaluations on the way."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from paceline.runtimes.scripts.lines_to_add.modules import SourceFile
from paceline.runtimes.scripts.lines_to_add.process_groups import GroupUse, full_name
from paceline.runtimes.scripts.lines_to_add.variables import LOOPS, CodeScope, Usage, Variable, last_name, own_nodes

SAVES = ("torch.save", "save_file", "save_pretrained", "save_model")
ONE_WORKER = ("rank", "main", "master")
"""Words in the name of what tells a worker whether it is the first."""
WITHOUT_GRADIENTS = ("no_grad", "inference_mode", "eval")
Found = tuple[SourceFile, int, str]
"""A call: its file, its line, and what to do about it."""


def notes_about_calls(
    usage: Usage, files: list[SourceFile], models: list[Variable], session: str, uses: list[GroupUse]
) -> list[str]:
    """One line for each call to change. `models` are those that the script trains, `uses` what needs a group."""
    found = [*_of_groups(uses), *_saves(usage, session), *_evaluations(usage, models, session)]
    found.sort(key=lambda one: (files.index(one[0]), one[1]))
    return [
        f"{file.path.name if file is not files[0] else ''} line {line}: {what}".strip() for file, line, what in found
    ]


def _of_groups(uses: list[GroupUse]) -> list[Found]:
    return [(use.scope.file, use.node.lineno, use.what) for use in uses]


def _saves(usage: Usage, session: str) -> list[Found]:
    """The calls that save a file in every worker: neither they nor all that run their function ask for one worker."""
    once = {call for scope in usage.scopes for call in _of_one_worker(scope)}
    saves, runs = [], defaultdict(list)
    for scope in usage.scopes:
        for call in own_nodes(scope.node):
            if isinstance(call, ast.Call):
                runs[usage.callee(scope, call.func)].append(call)
                if (name := _saving(scope.file, call)) is not None and call not in once:
                    saves.append((scope, call.lineno, name))
    return [
        (scope.file, line, f"{name}(...): only if {session}.is_main, because every worker runs this line")
        for scope, line, name in saves
        if not runs[scope] or not once.issuperset(runs[scope])
    ]


def _of_one_worker(scope: CodeScope) -> Iterator[ast.AST]:
    """The code below an `if` that asks for a rank or a main process."""
    for node in own_nodes(scope.node):
        if isinstance(node, ast.If):
            asked = [last_name(one) for one in ast.walk(node.test) if isinstance(one, (ast.Name, ast.Attribute))]
            if any(word in name.lower() for name in asked for word in ONE_WORKER):
                yield from (one for statement in node.body for one in own_nodes(statement))


def _saving(file: SourceFile, call: ast.Call) -> str | None:
    """The name of a function that saves a file; `torch.save` by both words."""
    name = full_name(file, call.func)
    return next((one for one in SAVES if name == one or name.endswith(f".{one}")), None)


def _evaluations(usage: Usage, models: list[Variable], session: str) -> list[Found]:
    """Where a trained model is evaluated between steps: a function that does it, or a block without gradients."""
    how = f"inside 'with {session}.eval_weights():', to evaluate the weights that would be saved"
    found = {}
    for scope, node in _while_training(usage):
        if isinstance(node, ast.With) and _evaluates(usage, scope, node, models):
            found[scope.file, node.lineno] = f"evaluate {how}"
        if not isinstance(node, ast.Call):
            continue
        called = usage.callee(scope, node.func)
        if called is not None and called not in usage.training and _evaluates(usage, called, called.node, models):
            found[scope.file, node.lineno] = f"{last_name(node.func)}(...): {how}"
    return [(file, line, what) for (file, line), what in found.items()]


def _while_training(usage: Usage) -> Iterator[tuple[CodeScope, ast.AST]]:
    """The code in training loops, and in functions that train and are called there."""
    waiting: list[tuple[CodeScope, ast.AST]] = [
        (scope, loop)
        for scope in usage.scopes
        if scope in usage.training
        for loop in own_nodes(scope.node)
        if isinstance(loop, LOOPS) and usage.trains(scope, loop)
    ]
    seen = set()
    for scope, root in waiting:
        if root in seen:
            continue
        seen.add(root)
        for node in own_nodes(root):
            yield scope, node
            called = usage.callee(scope, node.func) if isinstance(node, ast.Call) else None
            if called in usage.training and called is not None:
                waiting.append((called, called.node))


def _evaluates(usage: Usage, scope: CodeScope, root: ast.AST, models: list[Variable]) -> bool:
    """Whether code calls one of the models without gradients."""
    nodes = list(own_nodes(root))
    quiet = any(isinstance(one, (ast.Attribute, ast.Name)) and last_name(one) in WITHOUT_GRADIENTS for one in nodes)
    return quiet and any(isinstance(one, ast.Call) and usage.means(scope, one.func, models) for one in nodes)
