"""Calls of a script to change for several workers: those of a process group, saved files, evaluations on the way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.runtimes.scripts.lines_to_add.modules import SourceFile
from paceline.runtimes.scripts.lines_to_add.variables import LOOPS, CodeScope, Usage, Variable, last_name, own_nodes

INSTEAD = {
    "init_process_group": "leave it out",
    "DistributedDataParallel": "use the model itself",
    "DistributedSampler": "give the DataLoader shuffle=True",
    "set_epoch": "leave it out",
    "destroy_process_group": "leave it out",
}
"""Calls that only a process group needs, and what to do instead."""
SAVES = ("torch.save", "save_file", "save_pretrained", "save_model")
WITHOUT_GRADIENTS = ("no_grad", "inference_mode", "eval")
Found = tuple[SourceFile, int, str]
"""A call: its file, its line, and what to do about it."""


def notes_about_calls(usage: Usage, files: list[SourceFile], models: list[Variable], session: str) -> list[str]:
    """One line for each call to change. `models` are those that the script trains."""
    saves = [
        (file, line, f"{name}(...): only if {session}.is_main, because every worker runs this line")
        for file in files
        for name, line in _calls(file.tree)
        if name in SAVES
    ]
    found = [*_of_groups(files), *saves, *_evaluations(usage, models, session)]
    found.sort(key=lambda one: (files.index(one[0]), one[1]))
    return [
        f"{file.path.name if file is not files[0] else ''} line {line}: {what}".strip() for file, line, what in found
    ]


def _of_groups(files: list[SourceFile]) -> list[Found]:
    """The calls of a process group; none if no file has one but `set_epoch`."""
    found = [(file, name, line) for file in files for name, line in _calls(file.tree) if name in INSTEAD]
    if all(name == "set_epoch" for _, name, _ in found):
        return []
    return [(file, line, f"{name}(...): {INSTEAD[name]}") for file, name, line in found]


def _calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """All calls of a file, by their own names, not those of an import, and their lines; `torch.save` by both words."""
    imported = [(node, one) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names]
    names = {one.asname or one.name: (node.module, one.name) for node, one in imported}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            module, name = names.get(last_name(call.func), (None, last_name(call.func)))
            if name == "save":
                name = f"torch.{name}" if module == "torch" else ast.unparse(call.func)
            yield name, call.lineno


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
