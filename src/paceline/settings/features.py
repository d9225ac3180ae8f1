"""What a setting may or may not be combined with, and why not; and which settings a user's own loop decides itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from paceline.config import FIELDS, SIMULATED_ONLY, RunConfig, is_script
from paceline.errors import UserError


class Feature(Enum):
    """What a strategy may or may not be combined with."""

    SEVERAL_WORKERS = auto()
    CODEC = auto()
    PULL_CODEC = auto()
    ELASTIC = auto()  # `--max-workers`: workers join and leave
    DRAIN = auto()
    SERVER = auto()  # `paceline server`, and workers over ssh or on Ray
    SEVERAL_SERVERS = auto()  # `paceline server --servers`
    TLS = auto()  # of ranks that a launcher started
    LAUNCHER = auto()  # processes that torchrun or srun started
    FAULTS = auto()
    RESTART = auto()
    RESTART_WORKERS = auto()
    CAPTURE = auto()
    SKIP_BATCH = auto()  # `--recovery skip-batch`
    AGGREGATE = auto()  # `--aggregate` other than `mean`
    ROBUST = auto()  # `--robust`
    RING_PATH = auto()
    STAR_PATH = auto()
    LOCAL_STEPS = auto()  # `--local-steps`
    STEPS_BY_SPEED = auto()
    SCHEDULE = auto()  # `--schedule`, `--warmup` and `--scale-lr`
    OWN_EPOCHS = auto()  # `--epoch-mode own`
    OUTER_OPTIMIZER = auto()  # `--outer-lr` and `--outer-momentum`
    GRADIENT_RULE = auto()  # A rule that is made for gradients, other than `plain`
    DRIFT_RULE = auto()  # A rule that is made for drifts
    WORKER_RULE = auto()  # A rule that has to know which worker sent a push
    DROPPING_RULE = auto()  # A rule that drops stale pushes


Refusals = Mapping[Feature, str]
"""For each feature that is refused the reason, which goes on from "strategy NAME" and ends with what to do."""

ONE_AT_A_TIME = "use sync, backup, async or bounded, or leave it out"
_PLAIN = "use --rule plain, or --strategy async"
NO_DRIFTS: Refusals = {
    Feature.LOCAL_STEPS: "has no local steps; use local:H, diloco:H or async-local:H",
    Feature.OUTER_OPTIMIZER: "has no drifts; use diloco:H",
    Feature.DRIFT_RULE: "pushes gradients, and the rule is for drifts: use --rule auto",
}
ALONE: Refusals = {Feature.AGGREGATE: "applies one push at a time; use sync or backup:B, or leave it out"}
NEEDS_SERVER: Refusals = {Feature.RING_PATH: "needs a server; use allreduce, local:H or diloco:H"}
ON_SERVER: Refusals = {**NO_DRIFTS, **NEEDS_SERVER}
IN_ROUNDS: Refusals = {
    Feature.WORKER_RULE: f"averages the pushes of a round, and the rule has to know which worker sent each: {_PLAIN}",
    Feature.DROPPING_RULE: f"averages the pushes of a round, and the rule drops single ones: {_PLAIN}",
}
STEPS_INSIDE: Refusals = {
    Feature.SKIP_BATCH: "pushes several batches at once, and after the checkpoint perhaps others; "
    "use --recovery checkpoint",
}
ON_RING: Refusals = {
    Feature.ROBUST: "is a ring, where no server takes single pushes; leave it out, or use sync",
    Feature.AGGREGATE: "is a ring, which adds pushes up on their way; use sync or backup:B",
    Feature.SKIP_BATCH: "is a ring, where every worker has its own copy of the server; use --recovery checkpoint",
    Feature.CODEC: f"compresses only between ranks that torchrun or srun started; {ONE_AT_A_TIME}",
    Feature.PULL_CODEC: f"has no server that replies; {ONE_AT_A_TIME}",
    Feature.ELASTIC: "is a ring, which no worker can join; use sync, async or bounded, or leave it out",
    Feature.DRAIN: "is a ring, which no worker can leave: stop the run, or let it finish",
    Feature.RESTART_WORKERS: "is a ring, which no worker can join again; use sync, async or bounded, or leave it out",
    Feature.SERVER: "has no server: choose sync, async, bounded:S or backup:B",
    Feature.TLS: "has no server; torch.distributed connects its ring, without encryption: leave it out",
    Feature.CAPTURE: "exchanges inside its step; leave out one of the two",
    Feature.STEPS_BY_SPEED: "is a ring, where no server compares the speeds of workers; add --path star",
}
RING_OR_STAR: Refusals = {
    **ON_RING,
    **{
        feature: f"{ON_RING[feature]}, or add --path star"
        for feature in (Feature.AGGREGATE, Feature.ROBUST, Feature.CODEC, Feature.PULL_CODEC, Feature.ELASTIC)
    },
}
IN_OWN_LOOP: Refusals = {
    Feature.RING_PATH: "exchanges with a server: leave it out",
    Feature.SKIP_BATCH: "chooses its batches itself: use --recovery checkpoint",
    Feature.SEVERAL_SERVERS: "has one server, which holds all weights: leave it out, or train a task",
    Feature.OWN_EPOCHS: "makes its passes itself: leave it out",
    Feature.CAPTURE: "computes its gradients itself: capture them there",
}
"""What a user's own loop refuses under every strategy; these reasons go on from "your own loop"."""
OWN_LOOP_STEPS: Refusals = {
    Feature.SCHEDULE: "steps with the optimizers of your own loop: use a torch scheduler there",
}
OWN_LOOP_OF_ALL: Refusals = {
    Feature.ELASTIC: "is a fixed group, which no worker can join; use sync, async or bounded, or leave it out",
    Feature.DRAIN: "is a fixed group, which no worker can leave: stop the run, or let it finish",
    Feature.RESTART_WORKERS: "is a fixed group, which no worker can join again; use sync, async or bounded, "
    "or leave it out",
}
SCRIPT_DECIDES = (
    *SIMULATED_ONLY,
    *("workers", "dataset", "model", "task", "data_dir", "batch_size", "device", "precision", "compile", "capture"),
    *("channels_last", "accumulate", "validation", "fold", "eval_every", "eval_train", "score", "target_accuracy"),
    *("train_score", "best", "recovery", "augment", "max_length", "image_size", "weights_partial", "weights_sha256"),
)
"""Settings that a user's own loop has no use for, or decides itself; `paceline run` has flags of its own for two."""
_KNOWN_OF_LOOPS = (*SIMULATED_ONLY, "workers", "dataset", "model", "batch_size", "recovery")
_SET = [name for name in SCRIPT_DECIDES if FIELDS[name].default is not None or name == "channels_last"]
NOT_OF_LOOPS = tuple(name for name in _SET if name not in _KNOWN_OF_LOOPS)
"""Those of them that have a value in the settings of every run, which says nothing about an own loop."""
OF_OPTIMIZER = ("optimizer", "lr", "momentum", "nesterov", "betas", "weight_decay", "clip")
SCRIPT_MAY_DECIDE = (*OF_OPTIMIZER, "epochs", "epoch_mode")
"""Settings that a script may decide itself, by handing over its optimizer or its number of epochs."""


def without_value(config: RunConfig, recorded: Mapping[str, Any]) -> list[str]:
    """The settings whose values say nothing about a run, because its script decides them; the run records which."""
    return [*NOT_OF_LOOPS, *(recorded.get("decided_by_script") or ())] if is_script(config) else []


OPTIMIZERS_WITH = {
    "momentum": ("sgd", "rmsprop", "lars", "muon"),
    "nesterov": ("sgd",),
    "betas": ("adam", "adamw", "muon"),
}
"""Settings that only some optimizers read."""
OF_BUILT_IN = ("model", "dataset", "data_dir")
"""Settings that no task of a user's own reads."""


def require_effect(config: RunConfig, names: Iterable[str]) -> None:
    """Refuse what the user gives now, by these names, if nothing reads it beside the other settings.

    What stands in a file, in a run folder or in the settings of a sweep may have no effect.
    """
    known = {one for those in OPTIMIZERS_WITH.values() for one in those}
    for name in names:
        if (value := getattr(config, name)) is False:
            continue
        values = value if isinstance(value, list) else [value]
        shown = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
        asked, those = (
            f"--{name.replace('_', '-')}{f' {shown}' * (value is not True)}",
            OPTIMIZERS_WITH.get(name, known),
        )
        if config.optimizer not in those and config.optimizer in known:
            whose = f"{asked} is a setting of {', '.join(those)}"
            raise UserError(f"{whose}, and the optimizer is {config.optimizer}: leave it out")
        if name in OF_BUILT_IN and config.task is not None:
            raise UserError(f"{asked}: your own task brings its model and its data; leave it out")
        if name == "epochs" and config.steps is not None:
            raise UserError(f"{asked}: --steps {config.steps} ends the run, whatever the epochs; leave one out")
