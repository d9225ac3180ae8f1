"""Where the added lines go: after the last creation that training needs, and after the outermost training loop."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.runtimes.scripts.lines_to_add.roles import Roles
from paceline.runtimes.scripts.lines_to_add.variables import (
    DEFINITIONS,
    LOOPS,
    CodeScope,
    Usage,
    Variable,
    last_name,
    names_in,
    own_nodes,
)

Blocks = tuple[ast.stmt, ...]


@dataclass(frozen=True)
class Place:
    """After which line, with which indentation."""

    line: int
    indent: int


@dataclass(frozen=True)
class Places:
    """Where each call goes; no `finish` if nothing runs after the loop."""

    join: Place
    prepare: Place
    finish: Place | None


def import_line(tree: ast.Module) -> int:
    """The line after which `import paceline` goes: the last import above the first definition, or the docstring."""
    line = 0
    for statement in tree.body:
        docstring = line == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or docstring:
            line = statement.end_lineno or line
        elif isinstance(statement, (*DEFINITIONS, *LOOPS)):
            break
    return line


def find_places(usage: Usage, roles: Roles) -> Places | None:
    """The places in the scope of the roles; none if its training loop was not found."""
    around = dict(_statements(_body(roles.scope), ()))
    created = _creations_before(usage, roles, around)
    loops = list(_training_statements(usage, roles.scope, _body(roles.scope), set(created)))
    if not loops:
        return None
    first, last = loops[0], loops[-1]
    before = [one for one in created if one.lineno < first.lineno and not _exclusive(one, first, around)]
    if not before:
        return None
    at = max(before, key=lambda one: one.lineno)
    path = (*around[at], at)
    outer = next(one for one in path if one not in around[first])  # in the innermost block that also holds the loop
    inside = _climb(path[path.index(outer) :], before, roles, usage)
    prepare = Place(inside.end_lineno or inside.lineno, inside.col_offset)
    join = prepare if inside is outer else Place(_first_line(outer) - 1, outer.col_offset)
    return Places(join, prepare, _finish(last))


def place_before(scope: CodeScope, line: int) -> Place:
    """The place before the statement of a scope that holds a line."""
    statement = next(one for one in _body(scope) if (one.end_lineno or one.lineno) >= line)
    return Place(_first_line(statement) - 1, statement.col_offset)


def _body(scope: CodeScope) -> list[ast.stmt]:
    return scope.node.body


def _statements(block: list[ast.stmt], around: Blocks) -> Iterator[tuple[ast.stmt, Blocks]]:
    for statement in block:
        yield statement, around
        for inner in _blocks(statement):
            yield from _statements(inner, (*around, statement))


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, DEFINITIONS):
        return []
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    parts = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [*blocks, *(part.body for part in parts)]


def _creations_before(usage: Usage, roles: Roles, around: dict[ast.stmt, Blocks]) -> list[ast.stmt]:
    """Statements that create or wrap what is prepared; `model = None` is none."""
    made = [one for variable in roles.prepared for one in usage.creations[variable] if one.statement in around]
    return [one.statement for one in made if not isinstance(one.value, ast.Constant)]


def _training_statements(
    usage: Usage, scope: CodeScope, block: list[ast.stmt], created: set[ast.stmt]
) -> Iterator[ast.stmt]:
    """The outermost loops that train and create nothing that is prepared, or calls that train."""
    for statement in block:
        if isinstance(statement, DEFINITIONS) or not usage.trains(scope, statement):
            continue
        holds = any(one in created for one in own_nodes(statement))
        if _blocks(statement) and any(_blocks(statement)) and (holds or not isinstance(statement, LOOPS)):
            for inner in _blocks(statement):
                yield from _training_statements(usage, scope, inner, created)
        elif statement not in created:
            yield statement


def _conditions(statement: ast.stmt, around: dict[ast.stmt, Blocks]) -> dict[str, bool]:
    path, known = (*around[statement], statement), {}
    for outer, inner in itertools.pairwise(path):
        if isinstance(outer, ast.If):
            test, holds = outer.test, inner in outer.body
            while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, holds = test.operand, not holds
            known[ast.unparse(test)] = holds
    return known


def _exclusive(one: ast.stmt, other: ast.stmt, around: dict[ast.stmt, Blocks]) -> bool:
    """Whether an `if` lets only one of two statements run."""
    known = _conditions(other, around)
    return any(known.get(test, holds) is not holds for test, holds in _conditions(one, around).items())


def _climb(path: Blocks, before: list[ast.stmt], roles: Roles, usage: Usage) -> ast.stmt:
    """Leave the blocks around a creation as long as all names are defined outside of them too."""
    inside = path[-1]
    for outer in reversed(path[:-1]):
        names = [one for one in roles.prepared if not _defined_without(one, outer, before, usage)]
        if names:
            return inside
        inside = outer
    return inside


def _defined_without(variable: Variable, outer: ast.stmt, before: list[ast.stmt], usage: Usage) -> bool:
    made = [one.statement for one in usage.creations[variable] if one.statement in before]
    if any(one.lineno < outer.lineno for one in made) or not isinstance(outer, ast.If):
        return True
    return _every_branch(outer, set(made)) or not any(one in made for one in own_nodes(outer))


def _every_branch(statement: ast.If, made: set[ast.stmt]) -> bool:
    for block in (statement.body, statement.orelse):
        ends = any(isinstance(one, (ast.Raise, ast.Return)) or _exits(one) for one in block)
        nested = any(isinstance(one, ast.If) and _every_branch(one, made) for one in block)
        if not (ends or nested or made & set(block)):
            return False
    return True


def _exits(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) in ("exit", "quit")


def _finish(loop: ast.stmt) -> Place | None:
    """After the loop; in an endless loop without a break, before the statement that leaves it."""
    if isinstance(loop, ast.Return):
        return None
    if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and not _breaks(loop):
        leaving = [one for one in own_nodes(loop) if isinstance(one, ast.stmt)]
        leaving = [one for one in leaving if isinstance(one, ast.Return) or _exits(one)]
        return Place(leaving[0].lineno - 1, leaving[0].col_offset) if leaving else None
    return Place(loop.end_lineno or loop.lineno, loop.col_offset)


def _breaks(loop: ast.While) -> bool:
    blocks = list(loop.body)
    while blocks:
        statement = blocks.pop()
        if isinstance(statement, ast.Break):
            return True
        if not isinstance(statement, LOOPS):
            blocks += [one for block in _blocks(statement) for one in block]
    return False


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def measured_before(usage: Usage, variable: Variable, line: int) -> bool:
    """Whether the length of some data is taken above a line, as in `n = len(data)`."""
    for made in usage.creations.values():
        for one in made:
            calls = [call for call in ast.walk(one.value) if isinstance(call, (ast.Call, ast.Attribute))]
            lengths = [call for call in calls if _is_length(call, variable[1])]
            if lengths and one.statement.lineno <= line and usage.lookup(one.scope, variable[1]) == variable:
                return True
    return False


def _is_length(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and last_name(node.func) in ("len", "size"):
        return name in names_in(node)
    return isinstance(node, ast.Attribute) and node.attr == "shape" and name in names_in(node)
