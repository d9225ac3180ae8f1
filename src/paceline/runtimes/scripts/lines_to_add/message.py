"""`paceline run` of a script without Paceline: refuse it with the lines to add, written for this script."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runtimes.scripts.lines_to_add.calls import notes_about_calls
from paceline.runtimes.scripts.lines_to_add.modules import SourceFile, imports_paceline, read_script, with_helpers
from paceline.runtimes.scripts.lines_to_add.places import (
    Place,
    Places,
    find_places,
    import_line,
    measured_before,
    place_before,
)
from paceline.runtimes.scripts.lines_to_add.process_groups import GroupUse, uses_of_groups
from paceline.runtimes.scripts.lines_to_add.roles import (
    MAX_SPLITS,
    Roles,
    find_roles,
    shown,
    weights_changed_by_hand,
    weights_clamped,
)
from paceline.runtimes.scripts.lines_to_add.variables import Usage, draws_at_random, last_name, names_in

ONLY_ALONE = ("LBFGS", "SparseAdam")
SEE = "see docs/own-code.md"


@dataclass(frozen=True)
class AddedLine:
    """A line to add after line `after` of the script; in words if the place was not found."""

    after: int | str
    code: str

    @property
    def place(self) -> str:
        """Where the line goes, as shown to the user."""
        if isinstance(self.after, str):
            return self.after
        return f"line {self.after + 1}" if self.code == "import paceline" else f"after {self.after}"


def require_paceline(script: Path) -> None:
    """Refuse a script that does not import Paceline, neither itself nor in a module of its folder."""
    main = read_script(script)
    files = with_helpers(main)
    if not any(map(imports_paceline, files)):
        raise UserError(advice(main, files))


def advice(script: SourceFile, files: list[SourceFile]) -> str:
    """The lines to add to a script, and what to know about them."""
    usage = Usage(files)
    roles, by_hand = find_roles(usage), weights_changed_by_hand(usage)
    name = script.path.name
    if by_hand is not None and (roles is None or not roles.optimizers):
        return (
            f"{name} does not use Paceline, which needs an optimizer: line {by_hand} changes the weights by hand\n"
            "  create optimizer = torch.optim.SGD(model.parameters(), lr=...) before the loop and call\n"
            f"  optimizer.step() instead of line {by_hand}; then run it again, to see which lines to add\n{SEE}"
        )
    session = _session_name(_file(usage, roles))
    models = roles.models if roles is not None else []
    uses = uses_of_groups(usage, models, session)
    lines, notes = lines_for(usage, roles, uses)
    if by_hand is not None:
        notes.append(f"line {by_hand} changes weights by hand, which Paceline does not see: train with the optimizer")
    if (clamped := weights_clamped(usage)) is not None:
        what = f"line {clamped} clamps weights by hand, which the server does not see"
        notes.append(f"{what}: clamp them in the step() of an optimizer class of your own")
    if uses:
        notes.append(f"to average gradients as DDP does: paceline run --strategy sync {name}")
    notes += notes_about_calls(usage, files, models, session, uses)
    width = max(len(line.place) for line in lines)
    table = [f"  {line.place:<{width}} + {line.code}" for line in lines]
    where = "" if (file := _file(usage, roles)) is script else f" to {os.path.relpath(file.path, script.path.parent)}"
    first = f"{name} does not use Paceline: add these lines{where}, then run it again"
    return "\n".join([first, *table, *notes, SEE])


def lines_for(usage: Usage, roles: Roles | None, uses: Sequence[GroupUse] = ()) -> tuple[list[AddedLine], list[str]]:
    """The lines to add, in the order of the script, and notes about what was not found. `uses` need a process group."""
    file = _file(usage, roles)
    first = AddedLine(import_line(file.tree), "import paceline")
    places = find_places(usage, roles) if roles is not None else None
    if roles is not None and places is not None:
        lines = sorted([first, *_placed(usage, roles, places, uses)], key=_line_number)
        if _compiles(file.text, lines):
            return lines, _notes(usage, roles, places)
    names = _names(roles)
    session = _session_name(file)
    generic = [
        first,
        AddedLine("before the training loop", f"{session} = paceline.join()"),
        AddedLine("before the training loop", f"{names} = {session}.prepare({names})"),
        AddedLine("after the training loop", f"{session}.finish()"),
    ]
    missing = [word for word in ("MODEL", "OPTIMIZER", "LOADER") if word in names.split(", ")]
    notes = [f"not found in {file.path.name}: the {' and the '.join(missing).lower()}"] if missing else []
    if roles is not None and roles.optimizers and roles.scope not in usage.training:
        made = usage.creations[roles.optimizers[0]][0].statement.lineno
        notes.append(f"line {made} makes the optimizer: prepare it there, before anything iterates over the loader")
    if usage.main not in usage.training:
        notes.append("if a module outside its folder calls paceline.join(), 'import paceline' is enough")
    return generic, notes


def apply_lines(text: str, lines: list[AddedLine]) -> str:
    """The script with the lines added."""
    source = text.splitlines(keepends=True)
    for line in reversed(lines):
        at = _line_number(line)
        if at and not source[at - 1].endswith(("\n", "\r")):
            source[at - 1] += "\n"
        source.insert(at, line.code + "\n")
    return "".join(source)


def _line_of(place: Place) -> int:
    return place.line


def _line_number(line: AddedLine) -> int:
    assert isinstance(line.after, int)
    return line.after


def _compiles(text: str, lines: list[AddedLine]) -> bool:
    try:
        ast.parse(apply_lines(text, lines))
    except (SyntaxError, ValueError):
        return False
    return True


def _placed(usage: Usage, roles: Roles, places: Places, uses: Sequence[GroupUse]) -> list[AddedLine]:
    session, names = _session_name(roles.scope.file), _names(roles)
    lines, joined = [], _join_place(roles, places, uses)
    for variable in roles.in_order[:MAX_SPLITS]:
        place = places.join
        made = [one.statement for one in usage.creations[variable] if one.scope is roles.scope]
        last = max(made, key=lambda one: one.lineno)
        if measured_before(usage, variable, place.line) and last.col_offset <= place.indent:
            place = Place(last.end_lineno or last.lineno, last.col_offset)
            joined = min(joined, place, key=_line_of)
        lines.append((place, f"{shown(variable)} = {session}.split({shown(variable)})"))
    lines = [(joined, f"{session} = paceline.join()"), *lines]
    lines.append((places.prepare, f"{names} = {session}.prepare({names})"))
    if places.finish is not None:
        lines.append((places.finish, f"{session}.finish()"))
    return [AddedLine(place.line, " " * place.indent + code) for place, code in lines]


def _join_place(roles: Roles, places: Places, uses: Sequence[GroupUse]) -> Place:
    """Where the session begins: before whatever asks for a rank; below the imports if another function does."""
    asking = [one for one in uses if one.asks and one.scope.file is roles.scope.file]
    if any(one.scope is not roles.scope for one in asking):
        return Place(import_line(roles.scope.file.tree), 0)
    return min([places.join, *(place_before(roles.scope, one.node.lineno) for one in asking)], key=_line_of)


def _names(roles: Roles | None) -> str:
    if roles is None:
        return "MODEL, OPTIMIZER, LOADER"
    parts = [list(map(shown, roles.models)) or ["MODEL"], list(map(shown, roles.optimizers)) or ["OPTIMIZER"]]
    return ", ".join([*parts[0], *parts[1], *map(shown, (*roles.schedulers, *roles.loaders))])


def _file(usage: Usage, roles: Roles | None) -> SourceFile:
    """The file that the lines go into."""
    return usage.main.file if roles is None else roles.scope.file


def _session_name(file: SourceFile) -> str:
    return "paceline_session" if "session" in names_in(file.tree) else "session"


def _notes(usage: Usage, roles: Roles, places: Places) -> list[str]:
    notes = []
    if not roles.models:
        notes.append("the model was not found: put its name in place of MODEL")
    if not roles.optimizers:
        notes.append("the optimizer was not found: put its name in place of OPTIMIZER")
    if len(roles.in_order) > MAX_SPLITS:
        names = ", ".join(map(shown, roles.in_order[MAX_SPLITS:]))
        notes.append(f"split {names} in the same way")
    if places.finish is None:
        notes.append(f"call {_session_name(roles.scope.file)}.finish() where the training ends")
    made = [one.value for variable in roles.optimizers for one in usage.creations[variable]]
    for name in sorted({last_name(one.func) for one in made if isinstance(one, ast.Call)} & set(ONLY_ALONE)):
        notes.append(f"{name} steps only alone, with 'python script.py': use another optimizer on workers")
    if not roles.loaders and not roles.in_order:
        notes.append(_note_about_data(usage, roles))
    return notes


def _note_about_data(usage: Usage, roles: Roles) -> str:
    """Say how the workers' data differs, if there is no loader to prepare."""
    wrapped = [(one[1], found) for one in roles.wrapped if (found := usage.class_of(one)) is not None]
    for name, found in wrapped:
        if not draws_at_random(found):
            return f"{name} gives every worker the same batches: prepare the DataLoader in it instead"
    drawn = wrapped or any(draws_at_random(scope.node) for scope in usage.scopes if scope.parent is None)
    if drawn:
        return "no loader to prepare: every worker draws batches with random numbers of its own"
    what = "no training loader was found: prepare it too, or give each worker a part with session.split(data)"
    return f"{what}, else all train on the same batches"
