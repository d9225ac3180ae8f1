"""Find the names of the model, optimizer, scheduler and training loader, and the scope that creates them and trains."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from paceline.runtimes.scripts.lines_to_add.variables import (
    ITERATORS,
    CodeScope,
    Creation,
    Usage,
    Variable,
    draws_at_random,
    last_name,
    names_in,
    own_nodes,
)

OPTIMIZERS = {"SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adadelta", "Adagrad"}
OPTIMIZERS |= {"RMSprop", "Rprop", "LBFGS", "Adafactor", "Muon", "Lion", "configure_optimizers"}
CHANGES_IN_PLACE = {"add_", "sub_", "addcmul_", "addcdiv_", "copy_"}
MAX_SPLITS = 2  # with the import, join, prepare and finish: six lines


@dataclass
class Roles:
    """The variables of one scope by what they are to the training; `wrapped` draws batches in a class of the script."""

    scope: CodeScope
    models: list[Variable] = field(default_factory=list)
    optimizers: list[Variable] = field(default_factory=list)
    schedulers: list[Variable] = field(default_factory=list)
    loaders: list[Variable] = field(default_factory=list)
    in_order: list[Variable] = field(default_factory=list)
    wrapped: list[Variable] = field(default_factory=list)

    @property
    def prepared(self) -> list[Variable]:
        """The arguments of `session.prepare`, in its order."""
        return [*self.models, *self.optimizers, *self.schedulers, *self.loaders]


def find_roles(usage: Usage) -> Roles | None:
    """The roles in the scope that makes the most of them and reaches the training; none without one.

    If no function of the script makes an optimizer, a method or a function of a helper module may, or the `__init__` of
    a class that trains in another method.
    """
    every = [_roles_in(usage, scope) for scope in usage.scopes if scope in usage.training]
    own = [one for one in every if one.scope.file is usage.main.file and one.scope.owner is None and one.prepared]
    complete = [one for one in every if one.models and one.optimizers]
    trainers = {scope.owner for scope in usage.training if scope.owner is not None}
    begun = [_roles_in(usage, one) for one in usage.scopes if one.owner in trainers and one not in usage.training]
    begun = [one for one in begun if one.optimizers]
    found = own if any(one.optimizers for one in own) else complete or begun or own
    return max(found, key=lambda one: (bool(one.optimizers), len(one.prepared)), default=None)


def shown(variable: Variable) -> str:
    """The variable as it is written in its scope."""
    return variable[1] if isinstance(variable[0], CodeScope) else f"self.{variable[1]}"


def weights_changed_by_hand(usage: Usage) -> int | None:
    """The line of the script that changes weights with their gradients, without an optimizer."""
    for scope in usage.scopes:
        if scope not in usage.training or scope.file is not usage.main.file:
            continue
        for node in own_nodes(scope.node):
            changes = isinstance(node, ast.AugAssign) and _mentions_gradient(node.value)
            if isinstance(node, ast.Call) and last_name(node.func) in CHANGES_IN_PLACE:
                on = node.func.value if isinstance(node.func, ast.Attribute) else node.func
                changes = any(map(_mentions_gradient, node.args)) and not _mentions_gradient(on)
            if changes and isinstance(node, (ast.AugAssign, ast.Call)):
                return node.lineno
    return None


def weights_clamped(usage: Usage) -> int | None:
    """The line of the script that clamps weights in place: `p.data.clamp_(...)`."""
    for scope in usage.scopes:
        if scope in usage.training and scope.file is usage.main.file:
            for node in own_nodes(scope.node):
                if isinstance(node, ast.Call) and last_name(node.func) in ("clamp_", "clip_", "clamp_min_"):
                    on = node.func.value if isinstance(node.func, ast.Attribute) else node.func
                    if isinstance(on, ast.Attribute) and on.attr == "data":
                        return node.lineno
    return None


def _mentions_gradient(node: ast.expr) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))


def _roles_in(usage: Usage, scope: CodeScope) -> Roles:
    here = {
        variable: made
        for variable, every in usage.creations.items()
        if (made := [one for one in every if one.scope is scope])
    }
    roles = Roles(scope)
    roles.optimizers = [one for one, made in here.items() if _is_optimizer(usage, one, made)]
    others = {one: made for one, made in here.items() if one not in roles.optimizers}
    roles.schedulers = [one for one, made in others.items() if _is_scheduler(usage, one, made, roles.optimizers)]
    roles.models = _models(usage, scope, here, roles)
    for variable, made in others.items():
        if variable in (*roles.models, *roles.schedulers):
            continue
        wrapped = usage.class_of(variable)
        if any(last_name(call.func) in ITERATORS for one in made if isinstance(call := one.value, ast.Call)):
            continue  # what it iterates over is found by itself
        if "indexed" in usage.facts[variable]:
            roles.in_order.append(variable)
        elif wrapped is not None and not any("DataLoader" in ast.unparse(base) for base in wrapped.bases):
            if {"iterated", "next"} & usage.facts[variable]:
                roles.wrapped.append(variable)
        elif "iterated" in usage.facts[variable]:
            if _is_loader(variable[1], made):
                roles.loaders.append(variable)
            elif not any(draws_at_random(one.value) for one in made):
                roles.in_order.append(variable)
    return roles


def _calls(made: list[Creation]) -> list[ast.Call]:
    return [call for one in made for call in ast.walk(one.value) if isinstance(call, ast.Call)]


def _is_optimizer(usage: Usage, variable: Variable, made: list[Creation]) -> bool:
    facts, own_class = usage.facts[variable], usage.class_of(variable)
    if "step by scaler" in facts or {"step", "zero_grad"} <= facts:
        return True
    if own_class is not None and any(last_name(base) == "Optimizer" for base in own_class.bases):
        return True
    return any(isinstance(one.value, ast.Call) and last_name(one.value.func) in OPTIMIZERS for one in made)


def _is_scheduler(usage: Usage, variable: Variable, made: list[Creation], optimizers: list[Variable]) -> bool:
    if "step" not in usage.facts[variable]:
        return False
    given = {usage.lookup(one.scope, name) for one in made for name in names_in(one.value)}
    return "sched" in variable[1].lower() or bool(given & set(optimizers))


def _is_loader(name: str, made: list[Creation]) -> bool:
    words = [name.lower(), *(last_name(call.func).lower() for call in _calls(made))]
    return any("loader" in word or word.endswith(("_ld", "_dl")) for word in words)


def _is_plain_object(usage: Usage, variable: Variable) -> bool:
    """Whether it is of a class of the program without a base, such as a trainer: `trainer.train()` is no model's."""
    own_class = usage.class_of(variable)
    return own_class is not None and not own_class.bases


def _models(usage: Usage, scope: CodeScope, here: dict[Variable, list[Creation]], roles: Roles) -> list[Variable]:
    """What the optimizers are made from, or else what is trained and has parameters."""
    taken = {*roles.optimizers, *roles.schedulers}
    others = [one for one in here if one not in taken and not _is_plain_object(usage, one)]
    candidates = [one for one in others if usage.facts[one] & {"parameters", "train", "zero_grad"}]
    candidates += [one for one in others if "configure_optimizers" in usage.facts[one] and one not in candidates]
    together = {one.statement for optimizer in roles.optimizers for one in here[optimizer]}
    if not candidates:  # made with its optimizer, as in `model, optimizer = build()`, and called
        called = [one for one in others if "called" in usage.facts[one]]
        candidates = [one for one in called if any(made.statement in together for made in here[one])]
    reached, waiting = set(roles.optimizers), list(roles.optimizers)
    while waiting:
        for creation in here.get(waiting.pop(), ()):
            new = {usage.lookup(scope, name) for name in names_in(creation.value)} - reached
            waiting += [one for one in new if one not in candidates]  # not on to what the model is made from
            reached |= new
    return [one for one in candidates if one in reached] or candidates
