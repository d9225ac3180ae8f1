"""What to do with the lines of a script that need a process group of `torch.distributed`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from paceline.runtimes.scripts.lines_to_add.modules import SourceFile
from paceline.runtimes.scripts.lines_to_add.variables import CodeScope, Usage, Variable, last_name, own_nodes

GROUP = "torch.distributed"
NEEDED = ("init_process_group", "DistributedDataParallel", "DistributedSampler")
"""Calls that show by their names that a script needs a process group."""
SPAWN = "torch.multiprocessing.spawn"
OMITTED = ("init_process_group", "destroy_process_group", "set_epoch", "no_sync")
COLLECTED = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object")
SENT = ("broadcast", "broadcast_object_list")
AMBIGUOUS = ("barrier", "spawn", *SENT)  # other modules have functions of these names
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
WORKER, NUM_WORKERS = "worker", "num_workers"
NUMBERS = {"get_rank": WORKER, "get_world_size": NUM_WORKERS}
VARIABLES = {"RANK": WORKER, "LOCAL_RANK": WORKER, "WORLD_SIZE": NUM_WORKERS}
"""What the session calls a rank and the number of ranks; also those that a launcher puts into the environment."""
INSTEAD = {
    **dict.fromkeys((*OMITTED, "barrier"), "leave it out"),
    **dict.fromkeys(SENT, "leave it out: {session}.prepare(...) starts all workers from the weights of worker 0"),
    **dict.fromkeys(
        CLIPS, "clips the gradient of each worker, before the mean; DDP clips the mean, so the weights differ"
    ),
    "DistributedDataParallel": "use the model itself",
    "convert_sync_batchnorm": "leave it out: each worker normalises by its own batch",
    "spawn": "call its function itself: 'paceline run' starts the workers",
}
OWN_VALUE = "leave it out; the value is of this worker's share, and {session}.report(name=value) shows those of all"


@dataclass(frozen=True)
class GroupUse:
    """Code that needs a process group, and what to do about it; `asks` if it becomes an attribute of the session."""

    scope: CodeScope
    node: ast.expr
    what: str
    asks: bool = False


def uses_of_groups(usage: Usage, models: list[Variable], session: str) -> list[GroupUse]:
    """Everything in a script and its helpers that needs a process group; nothing if they make none."""
    found = [use for scope in usage.scopes for use in _in_scope(usage, scope, models, session)]
    calls = [(one.scope.file, one.node.func) for one in found if isinstance(one.node, ast.Call)]
    if any(full_name(*one).startswith(GROUP) or full_name(*one).endswith(NEEDED) for one in calls):
        return found
    return []


def full_name(file: SourceFile, function: ast.expr) -> str:
    """A function with its module, by the imports of the file: `dist.barrier` is `torch.distributed.barrier`."""
    first, dot, rest = ast.unparse(function).partition(".")
    return _imported(file).get(first, first) + dot + rest


@cache
def _imported(file: SourceFile) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            found |= {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _in_scope(usage: Usage, scope: CodeScope, models: list[Variable], session: str) -> Iterator[GroupUse]:
    for node in own_nodes(scope.node):
        if isinstance(node, ast.Call):
            yield from _of_call(scope, node, session)
        elif isinstance(node, ast.Attribute) and node.attr == "module" and usage.means(scope, node.value, models):
            yield GroupUse(scope, node, f"{ast.unparse(node)}: {ast.unparse(node.value)} itself")
        elif isinstance(node, ast.Subscript) and last_name(node.value) == "environ":
            yield from _of_environment(scope, node, node.slice, session)


def _of_call(scope: CodeScope, call: ast.Call, session: str) -> Iterator[GroupUse]:
    whole = full_name(scope.file, call.func)
    module, _, name = whole.rpartition(".")
    is_of_group = module.startswith(GROUP)
    if name in NUMBERS and is_of_group:
        yield GroupUse(scope, call, f"{name}(): {session}.{NUMBERS[name]} instead", asks=True)
    elif name in COLLECTED and is_of_group:
        of_gradients = any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(call))
        what = "leave it out: --strategy sync averages the gradients" if of_gradients else OWN_VALUE
        yield GroupUse(scope, call, f"{name}(...): {what.format(session=session)}")
    elif name == "DistributedSampler":
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        what = f"leave it out, and give the DataLoader shuffle={given.get('shuffle', 'True')} in place of its sampler"
        yield GroupUse(scope, call, f"{name}(...): {what}")
    elif name in INSTEAD and (is_of_group or whole == SPAWN or name not in AMBIGUOUS):
        yield GroupUse(scope, call, f"{name}(...): {INSTEAD[name].format(session=session)}")
    elif name in ("getenv", "get") and call.args and whole.startswith("os."):
        yield from _of_environment(scope, call, call.args[0], session)


def _of_environment(scope: CodeScope, node: ast.expr, key: ast.expr, session: str) -> Iterator[GroupUse]:
    number = VARIABLES.get(str(key.value)) if isinstance(key, ast.Constant) else None
    if number is not None:
        yield GroupUse(scope, node, f"{ast.unparse(node)}: {session}.{number} instead", asks=True)
