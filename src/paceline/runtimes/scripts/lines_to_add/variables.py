"""What a program does with its variables: which are stepped, iterated or trained, also inside the functions called.

A variable is a name in the function or module that binds it, or an attribute of `self` in its class. What a function
does with a parameter counts for the variable that is passed to it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.runtimes.scripts.lines_to_add.modules import SourceFile

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Variable = tuple[Hashable, str]
LOOPS = (ast.For, ast.AsyncFor, ast.While)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
METHODS = {"step", "zero_grad", "train", "eval", "scale", "unscale_", "configure_optimizers", "next"}
MOVES = {"to", "cuda", "cpu", "float", "double", "half", "bfloat16"}
PARAMETERS = {"parameters", "named_parameters"}
NOT_ITERATED = {"range", "len"}
ITERATORS = {"iter", "enumerate", "zip", "cycle", "islice", "tqdm", "track"}
DRAWS = {"randint", "randperm", "permutation", "shuffle", "RandomSampler", "WeightedRandomSampler", "multinomial"}
DRAWS |= {"choice", "choices", "sample", "rand", "randn", "SubsetRandomSampler"}


@dataclass(eq=False)
class CodeScope:
    """A module or a function, with the names that it binds."""

    node: ast.Module | FunctionNode
    file: SourceFile
    parent: CodeScope | None = None
    owner: ast.ClassDef | None = None
    bound: set[str] = field(default_factory=set)
    passed_on: set[str] = field(default_factory=set)  # declared global or nonlocal

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that a caller fills, `self` left out."""
        if isinstance(self.node, ast.Module):
            return []
        names = [one.arg for one in (*self.node.args.posonlyargs, *self.node.args.args)]
        return names[1:] if self.owner is not None else names


@dataclass(frozen=True)
class Creation:
    """An assignment to a variable: the statement, where it stands, and the value."""

    scope: CodeScope
    statement: ast.stmt
    value: ast.expr


def own_nodes(root: ast.AST) -> Iterator[ast.AST]:
    """Walk without the bodies of functions and classes below the root."""
    stack: list[ast.AST] = [root]
    while stack:
        node = stack.pop()
        yield node
        if node is root or not isinstance(node, DEFINITIONS):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def last_name(function: ast.expr) -> str:
    """The name of a called function without what it is an attribute of: `torch.optim.SGD` gives `SGD`."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def names_in(node: ast.AST) -> set[str]:
    """All names in an expression."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def draws_at_random(node: ast.AST) -> bool:
    """Whether code draws random numbers, or makes a loader that does."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and last_name(one.func) in DRAWS:
            return True
        if isinstance(one, ast.keyword) and one.arg == "shuffle" and not _is_constant(one.value, False):
            return True
    return False


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


class Usage:
    """Facts about the variables of a script and its helpers."""

    def __init__(self, files: list[SourceFile]) -> None:
        self.scopes: list[CodeScope] = []
        self.functions: dict[Variable, CodeScope] = {}
        self.classes: dict[Variable, ast.ClassDef] = {}
        self.methods: dict[tuple[ast.ClassDef, str], CodeScope] = {}
        self.creations: dict[Variable, list[Creation]] = defaultdict(list)
        self.facts: dict[Variable, set[str]] = defaultdict(set)
        self.passed: dict[Variable, set[Variable]] = defaultdict(set)
        self.modules: dict[Path, CodeScope] = {}
        for file in files:
            module = CodeScope(file.tree, file)
            self.modules[file.path.resolve()] = module
            self._add(module)
        self.main = self.scopes[0]
        for scope in self.scopes:
            self._collect_creations(scope)
        self.training = self._training_scopes()
        for scope in self.scopes:
            self._collect_facts(scope)
        self._let_facts_flow()

    def lookup(self, scope: CodeScope, name: str) -> Variable:
        """The variable that a name means in a scope."""
        place = scope
        while place.parent is not None and (name not in place.bound or name in place.passed_on):
            place = place.parent
        return place, name

    def variable(self, scope: CodeScope, node: ast.AST) -> Variable | None:
        """The variable that an expression is: a name or an attribute of `self`."""
        if isinstance(node, ast.Name):
            return self.lookup(scope, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = next((one.owner for one in _outwards(scope) if one.owner is not None), None)
            return (owner, node.attr) if owner is not None else None
        return None

    def callee(self, scope: CodeScope, function: ast.expr) -> CodeScope | None:
        """The function of the program that a call runs, if it is one."""
        found = self._definition(scope, function)
        if isinstance(found, ast.ClassDef):
            return self.methods.get((found, "__init__"))
        if found is not None or not isinstance(function, ast.Attribute):
            return found
        variable = self.variable(scope, function.value)
        if isinstance(function.value, ast.Name) and function.value.id == "self" and scope.owner is not None:
            return self.methods.get((scope.owner, function.attr))
        owner = self.class_of(variable) if variable is not None else None
        return self.methods.get((owner, function.attr)) if owner is not None else None

    def class_of(self, variable: Variable) -> ast.ClassDef | None:
        """The program's own class of which the variable holds an instance."""
        for creation in self.creations.get(variable, ()):
            if isinstance(creation.value, ast.Call):
                found = self._definition(creation.scope, creation.value.func)
                if isinstance(found, ast.ClassDef):
                    return found
        return None

    def means(self, scope: CodeScope, node: ast.expr, wanted: list[Variable]) -> bool:
        """Whether an expression is one of the wanted variables, also as a parameter that one is passed to."""
        variable = self.variable(scope, node)
        seen, waiting = {variable}, [variable]
        for one in waiting:
            new = self.passed[one] - seen if one is not None and one in self.passed else set()
            seen |= new
            waiting += new
        return not seen.isdisjoint(wanted)

    def trains(self, scope: CodeScope, node: ast.AST) -> bool:
        """Whether a statement calls `.backward()`, or a function that does."""
        return any(_is_backward(one) or self._runs(scope, one) in self.training for one in own_nodes(node))

    def _definition(self, scope: CodeScope, node: ast.AST) -> CodeScope | ast.ClassDef | None:
        if isinstance(node, ast.Name):
            variable = self.lookup(scope, node.id)
            if variable in self.functions or variable in self.classes:
                return self.functions.get(variable) or self.classes[variable]
        elif not isinstance(node, ast.Attribute):
            return None
        path, name = scope.file.imports.get(ast.unparse(node), (None, None))
        if path is None and isinstance(node, ast.Attribute):
            path, _ = scope.file.imports.get(ast.unparse(node.value), (None, None))
            name = node.attr
        module = self.modules.get(path) if path is not None else None
        if module is None or name is None:
            return None
        return self.functions.get((module, name)) or self.classes.get((module, name))

    def _add(self, scope: CodeScope) -> None:
        self.scopes.append(scope)
        if not isinstance(scope.node, ast.Module):
            arguments = scope.node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            scope.bound |= {one.arg for one in every if one is not None}
        for node in own_nodes(scope.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                scope.bound.add(node.id)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                scope.passed_on |= set(node.names)
            elif isinstance(node, FunctionNode) and node is not scope.node:
                scope.bound.add(node.name)
                inner = CodeScope(node, scope.file, scope)
                self.functions[scope, node.name] = inner
                self._add(inner)
            elif isinstance(node, ast.ClassDef):
                scope.bound.add(node.name)
                self.classes[scope, node.name] = node
                for one in node.body:
                    if isinstance(one, FunctionNode):
                        self.methods[node, one.name] = CodeScope(one, scope.file, scope, node)
                        self._add(self.methods[node, one.name])

    def _collect_creations(self, scope: CodeScope) -> None:
        for node in own_nodes(scope.node):
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            else:
                continue
            assert node.value is not None
            for target in targets:
                for place, value in _pairs(target, node.value):
                    variable = self.variable(scope, place)
                    if variable is not None:
                        self.creations[variable].append(Creation(scope, node, value))

    def _runs(self, scope: CodeScope, node: ast.AST) -> CodeScope | None:
        """The function that a node calls, or names as an argument (a closure)."""
        if isinstance(node, ast.Call):
            return self.callee(scope, node.func)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self.functions.get(self.lookup(scope, node.id))
        return None

    def _training_scopes(self) -> set[CodeScope]:
        calls = {scope: {self._runs(scope, node) for node in own_nodes(scope.node)} for scope in self.scopes}
        training = {scope for scope in self.scopes if any(map(_is_backward, own_nodes(scope.node)))}
        while True:
            more = {scope for scope in self.scopes if scope not in training and calls[scope] & training}
            if not more:
                return training
            training |= more

    def _collect_facts(self, scope: CodeScope) -> None:
        for node in own_nodes(scope.node):
            if isinstance(node, ast.Call):
                self._note_call(scope, node)
            elif isinstance(node, LOOPS) and self.trains(scope, node):
                self._note_loop(scope, node)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                for place, value in _pairs(node.targets[0], node.value):
                    self._note_alias(scope, place, value)

    def _note_alias(self, scope: CodeScope, place: ast.expr, value: ast.expr) -> None:
        """Note that a name stands for another one, or iterates over it; `model.to(device)` stands for `model`."""
        wraps = isinstance(value, ast.Call) and last_name(value.func) in ITERATORS
        target = self.variable(scope, place)
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
            value = value.func.value
        for one in _iterated(value) if wraps else [value]:
            source = self.variable(scope, one)
            if target is not None and source is not None:
                self.passed[target].add(source)

    def _note_call(self, scope: CodeScope, call: ast.Call) -> None:
        variable = self.variable(scope, call.func)
        if variable is not None:
            self.facts[variable].add("called")
        if isinstance(call.func, ast.Attribute):
            base = self.variable(scope, call.func.value)
            if base is not None and call.func.attr in METHODS:
                self.facts[base].add(call.func.attr)
            if base is not None and call.func.attr == "step" and call.args:
                stepped = self.variable(scope, call.args[0])
                if stepped is not None and "scale" in ast.unparse(call.func.value).lower():
                    self.facts[stepped].add("step by scaler")
            if call.func.attr in PARAMETERS:
                root = self._root(scope, call.func.value)
                if root is not None:
                    self.facts[root].add("parameters")
        callee = self.callee(scope, call.func)
        if callee is not None:
            for name, argument in _arguments(callee, call):
                given = self.variable(scope, argument)
                if given is not None:
                    self.passed[callee, name].add(given)

    def _root(self, scope: CodeScope, node: ast.expr) -> Variable | None:
        while self.variable(scope, node) is None and isinstance(node, ast.Attribute):
            node = node.value
        return self.variable(scope, node)

    def _note_loop(self, scope: CodeScope, loop: ast.stmt) -> None:
        """Note what a training loop iterates over; the innermost loop over numbers also shows what it indexes."""
        sources: list[ast.expr] = []
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            sources += _iterated(loop.iter)
        for node in own_nodes(loop):
            if isinstance(node, ast.Call) and last_name(node.func) == "next":
                sources += node.args[:1]
        for source in sources:
            variable = self.variable(scope, source)
            if variable is not None:
                self.facts[variable].add("iterated")
        inner = (one for one in own_nodes(loop) if isinstance(one, LOOPS) and one is not loop)
        if isinstance(loop, ast.For) and not any(self.trains(scope, one) for one in inner):
            self._note_indexed(scope, loop)

    def _note_indexed(self, scope: CodeScope, loop: ast.For) -> None:
        if not any(isinstance(one, ast.Call) and last_name(one.func) == "range" for one in ast.walk(loop.iter)):
            return
        numbers, measured = names_in(loop.target), names_in(loop.iter)
        found: set[Variable] = set()
        for node in own_nodes(loop):
            if isinstance(node, ast.Subscript) and _reads_at(node, numbers, measured):
                found |= {one for one in [self.variable(scope, node.value)] if one is not None}
            elif isinstance(node, ast.Call):
                callee = self.callee(scope, node.func)
                given = list(_arguments(callee, node)) if callee is not None else []
                at = {name for name, one in given if names_in(one) & numbers}
                inside = list(own_nodes(callee.node)) if callee is not None else []
                read = {
                    ast.unparse(one.value)
                    for one in inside
                    if isinstance(one, ast.Subscript) and _reads_at(one, at, set())
                }
                found |= {v for name, one in given if name in read and (v := self.variable(scope, one)) is not None}
        if not any(draws_at_random(one.value) for variable in found for one in self.creations[variable]):
            for variable in found:
                self.facts[variable].add("indexed")

    def _let_facts_flow(self) -> None:
        changed = True
        while changed:
            changed = False
            for variable, sources in self.passed.items():
                for source in sources:
                    new = self.facts[variable] - self.facts[source]
                    self.facts[source] |= new
                    changed = changed or bool(new)


def _outwards(scope: CodeScope | None) -> Iterator[CodeScope]:
    while scope is not None:
        yield scope
        scope = scope.parent


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def _reads_at(node: ast.Subscript, numbers: set[str], measured: set[str]) -> bool:
    """Whether `data[i : i + n]` is read at a loop's number, or `data[i]` in a loop over the length of the data."""
    if not isinstance(node.ctx, ast.Load) or not names_in(node.slice) & numbers:
        return False
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return any(isinstance(one, ast.Slice) for one in parts) or bool(names_in(node.value) & measured)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
    elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, part)
    else:
        for one in target.elts:
            yield from _pairs(one, value)


def _iterated(node: ast.expr) -> list[ast.expr]:
    """What a loop over an expression draws from: `enumerate(tqdm(loader))` gives `loader`."""
    if isinstance(node, ast.Call) and last_name(node.func) not in NOT_ITERATED:
        found = [one for argument in node.args for one in _iterated(argument)]
        return found if isinstance(node.func, (ast.Name, ast.Attribute)) else []
    return [node]


def _arguments(callee: CodeScope, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    for name, argument in zip(callee.parameters, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        yield name, argument
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
