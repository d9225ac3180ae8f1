"""What a script for DistributedDataParallel has too much: Paceline starts the workers, and its server averages."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.runtimes.scripts.lines_to_add.modules import SourceFile
from paceline.runtimes.scripts.lines_to_add.variables import last_name

INSTEAD = {
    "init_process_group": "leave it out",
    "DistributedDataParallel": "use the model itself",
    "DistributedSampler": "give the DataLoader shuffle=True",
    "set_epoch": "leave it out",
    "destroy_process_group": "leave it out",
}
"""Calls that only a process group needs, and what to do instead."""


def notes_about_groups(files: list[SourceFile]) -> list[str]:
    """One line for each such call; none if no file has one of a process group."""
    found = [(file, *call) for file in files for call in _calls(file.tree)]
    if all(name == "set_epoch" for _, name, _ in found):
        return []
    return [
        f"{file.path.name if file is not files[0] else ''} line {line}: {name}(...): {INSTEAD[name]}".strip()
        for file, name, line in found
    ]


def _calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The calls of the table in a file, by their own names and lines, in the order of the file."""
    imported = [one for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names]
    names = {one.asname or one.name: one.name for one in imported}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda one: one.lineno):
        name = last_name(call.func)
        name = names.get(name, name)
        if name in INSTEAD:
            yield name, call.lineno
