"""Every setting of a run, defined once: the field gives the flag, the TOML key, the check and the help."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UserError, unknown_name
from paceline.interfaces import MOST_WORKERS

Check = Callable[[str, Any], None]


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"--{name} must be a positive number, got {value}")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"--{name} must be zero or more, got {value}")


def _sensible(name: str, value: float) -> None:
    if not 1e-6 <= value <= 1e9:
        raise UserError(f"--{name} must be a number from 0.000001 to 1000000000, got {value}")


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise UserError(f"--{name} must be at least 0 and below 1, got {value}")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"--{name} must be at least 1, got {value}")


def _workers(name: str, value: int) -> None:
    _at_least_one(name, value)
    if value > MOST_WORKERS:
        raise UserError(f"--{name} must be at most {MOST_WORKERS}, got {value}")


def _seed(name: str, value: int) -> None:
    if not 0 <= value < 2**63:
        raise UserError(f"--{name} must be between 0 and 2^63 - 1, got {value}")


def _percent(name: str, value: float) -> None:
    if not 0.0 < value <= 100.0:
        raise UserError(f"--{name} is in percent, above 0 and at most 100, got {value}")


def _betas(name: str, value: list[float]) -> None:
    if len(value) != 2 or not all(0.0 <= beta < 1.0 for beta in value):
        raise UserError(f"--{name} takes two numbers from 0 to below 1, as in .9,.999; got {value}")


def setting(
    default: Any,
    group: str,
    text: str,
    check: Check | None = None,
    metavar: str | None = None,
    alias: str | None = None,
) -> Any:
    """A config field with everything the command line needs to know of it; `alias` is another name for the flag."""
    metadata = {"group": group, "help": text, "check": check, "metavar": metavar, "alias": alias}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    """One run. A field left at None is resolved from the others when the run is set up."""

    dataset: str = setting(
        "fashion-mnist", "data", "fashion-mnist, mnist, cifar10, sst5, imagenet or fashion-mnist-sample"
    )
    split: str = setting("iid", "data", "full, iid, labels or dirichlet:ALPHA", alias="shard")
    shard_weights: list[float] | None = setting(
        None, "data", "relative shard sizes, one a worker, as in 1,1,2 (unequal machines)", metavar="W,W,..."
    )
    validation: float = setting(0.0, "data", "share of the train set held out and scored", _fraction)
    fold: str | None = setting(
        None, "data", "hold out and score part I of K of the train set, as in 2/5; no test set", metavar="I/K"
    )
    data_dir: str | None = setting(None, "data", "folder that holds the data sets", metavar="DIR")
    augment: str = setting(
        "auto",
        "data",
        "what is done to training images: crop, mirror, crop,mirror or none (auto: both for cifar10 and imagenet)",
        metavar="WAYS",
    )
    max_length: int = setting(64, "data", "words of a sentence that are read; the rest is cut", _at_least_one)
    image_size: int = setting(224, "data", "pixels a side that imagenet's images are cut to", _at_least_one)
    model: str = setting(
        "lenet5",
        "model",
        "lenet5, cnn, resnet18, resnet34, resnet50 or resnet101 (with -gn behind: group norm instead of batch norm), "
        "inception-28-small, inception-bn, or for text transformer",
    )
    task: str | None = setting(
        None, "model", "own task instead of model and dataset: MODULE:FUNCTION or FILE.py:FUNCTION", metavar="TASK"
    )
    strategy: str = setting(
        "async", "pace", "classic, sync, async, backup:B, bounded:S, local:H, diloco:H or async-local:H"
    )
    workers: int | None = setting(None, "pace", "number of workers (default 2; classic has 1)", _workers)
    max_workers: int | None = setting(
        None,
        "pace",
        "let workers come and go, up to so many, and deal the data anew when they do (default: those of --workers)",
        _workers,
    )
    rule: str = setting(
        "auto",
        "pace",
        "how a push changes the weights: auto, plain, plain-early, damped, gap, compensated, dana, dana-slim, cached, "
        "ringleader, ringmaster:R, buffered:K, foresight, farsight or farsight-fair; for async-local delayed",
    )
    average: str | None = setting(
        None,
        "pace",
        "evaluate and save a running mean of the weights: none, on, a horizon in updates, or auto (default: on for "
        "async, bounded and async-local with any rule but plain)",
    )
    local_steps: str | None = setting(
        None,
        "pace",
        "of local:H and its kin: even (H each) or speed (H for the fastest, fewer for slower workers, so that all push "
        "together; default for async-local)",
        metavar="even|speed",
    )
    outer_lr: float | None = setting(
        None,
        "pace",
        "of diloco and async-local: what a mean drift is multiplied by (default .7; async-local .4)",
        _positive,
    )
    outer_momentum: float | None = setting(
        None, "pace", "of diloco and async-local: Nesterov momentum over drifts (default .9; async-local .8)", _fraction
    )
    path: str | None = setting(
        None,
        "pace",
        "star (through a server) or ring (default where there need be none: allreduce, local and diloco)",
        metavar="star|ring",
    )
    codec: str | None = setting(
        None,
        "pace",
        "how a push becomes fewer bytes: none, fp16, bf16, int8, sign, topk:F or lowrank:R (default none)",
    )
    pull_codec: str | None = setting(
        None, "pace", "the same for replies, as changes of what a worker has (default none)"
    )
    optimizer: str = setting(
        "sgd",
        "optimizer",
        "sgd, adam, adamw or lars: one on the server, shared by all, or with local steps one a worker",
    )
    lr: float | None = setting(
        None, "optimizer", "learning rate (default .005 for sgd, .001 for adam and adamw, 1 for lars)", _positive
    )
    momentum: float = setting(0.9, "optimizer", "momentum of sgd and lars", _fraction)
    nesterov: bool = setting(False, "optimizer", "Nesterov momentum for sgd")
    betas: list[float] = setting([0.9, 0.999], "optimizer", "betas of adam and adamw", _betas, metavar="B1,B2")
    weight_decay: float = setting(
        0.0, "optimizer", "weight decay added to the gradient (adamw: to the step)", _not_negative
    )
    clip: float | None = setting(
        None, "optimizer", "largest gradient norm; longer gradients are scaled down", _positive
    )
    schedule: str = setting("constant", "optimizer", "constant, exponential[:FACTOR an epoch] or cosine")
    warmup: float = setting(0.0, "optimizer", "share of the budget over which lr grows from 0", _fraction)
    scale_lr: str = setting("none", "optimizer", "none, auto (lr x workers that make one update) or a factor")
    batch_size: int = setting(32, "length", "samples in a worker's batch", _at_least_one)
    epochs: float = setting(6.0, "length", "data-set passes, shared by all workers", _sensible)
    epoch_mode: str = setting("shared", "length", "shared (one budget) or own (each worker passes over its own data)")
    steps: int | None = setting(None, "length", "stop after this many updates instead of epochs", _at_least_one)
    max_seconds: float | None = setting(
        None,
        "length",
        "stop after so many seconds of training, if epochs or steps have not ended it before; loading and evaluation "
        "do not count (simulate: virtual seconds)",
        _sensible,
    )
    target_accuracy: float | None = setting(
        None, "length", "stop once test accuracy reaches this percentage (needs --eval-every)", _percent
    )
    target: str | None = setting(
        None,
        "length",
        "stop once a metric of the test data is there: 'METRIC<=VALUE' or 'METRIC>=VALUE', of loss, accuracy or one of "
        "your task's (needs --eval-every); of your own loop, one that it reports",
        metavar="GOAL",
    )
    best: str | None = setting(
        None,
        "length",
        "what the best weights are chosen by at evaluations: min:METRIC or max:METRIC (default: as --target says, else "
        "accuracy, else loss)",
        metavar="BEST",
    )
    eval_every: float | None = setting(None, "length", "evaluate every so many epochs, pausing the clock", _sensible)
    eval_train: bool = setting(False, "length", "score the train data too at each of these evaluations")
    score: str = setting("all", "length", "what is scored at the end: all, test or none")
    seed: int = setting(0, "machine", "seed of everything random", _seed)
    device: str = setting("cpu", "machine", "cpu or cuda")
    threads: int | None = setting(None, "machine", "threads a worker (default cores / workers)", _at_least_one)
    precision: str = setting("fp32", "machine", "fp32, or bf16: autocast, over weights that stay fp32")
    compile: bool = setting(False, "machine", "compile the step with torch.compile: slow to start, then faster")
    capture: bool = setting(False, "machine", "capture the step as a CUDA graph; needs --device cuda")
    channels_last: bool | None = setting(
        None, "machine", "images with their channels last in memory (default: with bf16 on cuda)"
    )
    accumulate: int = setting(
        1, "machine", "compute a batch in so many parts, one after the other; needs less memory", _at_least_one
    )
    delay: list[str] | None = setting(
        None,
        "machine",
        "slow workers on purpose: 30ms, normal:60ms,5ms, with @1,3 for those only; may be repeated",
        metavar="TIME[@WORKERS]",
    )
    faults: str | None = setting(
        None, "cluster", "a table of what goes wrong and when; the local runtime kills, stops and slows", metavar="FILE"
    )
    speeds: str | None = setting(
        None, "cluster", "a worker's step: 30ms, 1,1,1,4, lognormal:30ms,.3, exponential:30ms [1s]", metavar="SPEEDS"
    )
    link: str | None = setting(
        None, "cluster", "the server's link, each way: bandwidth and latency, as in 1gbit,0.2ms", metavar="LINK"
    )
    server_time: str | None = setting(
        None, "cluster", "what the server takes for a push, as in 2ms [nothing]", metavar="TIME"
    )
    cores: int | None = setting(
        None, "cluster", "cores that all workers and the server share (default: each has its own)", _at_least_one
    )
    like: str | None = setting(
        None,
        "cluster",
        "take settings, step and exchange times and cores from this run; --speeds are factors",
        metavar="RUN",
    )
    timing_only: bool = setting(False, "cluster", "compute no gradients: times, staleness and traffic alone")
    parameters: str | None = setting(
        None, "cluster", "size of the model for --timing-only, as in 25.6M (default: the model's)", metavar="COUNT"
    )
    checkpoint_every: float = setting(60.0, "run folder", "seconds between checkpoints", _positive)
    keep: int = setting(2, "run folder", "how many checkpoints are kept, the newest", _at_least_one)
    restart: int = setting(
        0, "run folder", "start a server that was killed again from checkpoint and log, so many times", _not_negative
    )
    recovery: str = setting(
        "log",
        "run folder",
        "after a crash: log (what was acknowledged since the checkpoint is computed again) or checkpoint (it is lost, "
        "and counted)",
        metavar="log|checkpoint",
    )
    durable: bool = setting(
        False, "run folder", "sync the log to the disk before each reply, so that a power cut loses nothing either"
    )
    snapshots: float | None = setting(
        None,
        "run folder",
        "keep the weights so many times an epoch, and at start and end, for 'paceline landscape'; "
        "4 bytes a parameter each (default none)",
        _sensible,
    )
    track: list[str] | None = setting(
        None,
        "run folder",
        "tell others of the run while it goes on: csv, tensorboard, mlflow, wandb or MODULE:CLASS; may be repeated",
        metavar="NAME",
    )
    name: str | None = setting(None, "run folder", "name of the run (default: strategy, model, workers and time)")
    runs: str = setting("runs", "run folder", "folder that holds the runs", metavar="DIR")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, check = getattr(self, spec.name), spec.metadata["check"]
            if value is None:
                continue
            value = coerce(spec, value)
            object.__setattr__(self, spec.name, value)
            if check is not None:
                check(spec.name.replace("_", "-"), value)


def places_of(config: RunConfig) -> int:
    """How many workers a run has room for: numbers are below it, tables of rules have a row for each."""
    return config.max_workers or config.workers or 1


def is_simulated(config: RunConfig) -> bool:
    """Whether the run was one of `paceline simulate`, which always notes its speeds."""
    return config.speeds is not None or config.like is not None


SIMULATED_ONLY = ("speeds", "link", "server_time", "cores", "like", "timing_only", "parameters")
"""Settings of a cluster that does not exist."""

UPKEEP = ("keep", "restart", "recovery", "durable", "track")
"""Settings that are about the run's files and say nothing about what is trained: a resumed run may have others."""

SCRIPT_MAY_DECIDE = ("optimizer", "lr", "momentum", "nesterov", "betas", "weight_decay", "epochs", "epoch_mode")
"""Settings that a loop of one's own has too, when it hands over its optimizer, or says how many epochs it makes."""


def given(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Which of these settings are others than they are by themselves."""
    untouched = RunConfig()
    return [name for name in names if getattr(config, name) != getattr(untouched, name)]


FIELDS = {spec.name: spec for spec in dataclasses.fields(RunConfig)}
ALIASES = {spec.metadata["alias"]: name for name, spec in FIELDS.items() if spec.metadata["alias"]}
_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def coerce(spec: dataclasses.Field[Any], value: Any) -> Any:
    """A value as its field's type, so that equal settings are written alike; a clear error when it cannot be."""
    wanted = str(spec.type).partition(" ")[0]
    if wanted == "list[str]" and isinstance(value, str):
        return [value]
    if wanted.startswith("list") and isinstance(value, list | tuple):
        item = wanted[5:-1]
        if all(_is_a(item, part) for part in value):
            return [float(part) if item == "float" else part for part in value]
    elif wanted in _KINDS and _is_a(wanted, value):
        return float(value) if wanted == "float" else value
    elif spec.name in ("scale_lr", "average") and _is_a("float", value):
        return str(value)
    raise UserError(f"{spec.name} = {value!r} is not of type {wanted}")


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value fits; True and False are no numbers."""
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


def parse_toml(path: Path, wanted: str) -> dict[str, Any]:
    """What a TOML file holds; where there is no such file, `wanted` says what to give."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path}: {wanted}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; unknown keys and wrong types are errors that name the file."""
    raw = parse_toml(path, "give a TOML file of settings, or flags alone")
    values = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key.replace("-", "_"))
        if name == "schema":
            continue
        if name not in FIELDS:
            raise UserError(f"{path}: {unknown_name('setting', key, FIELDS)}")
        try:
            values[name] = coerce(FIELDS[name], value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return values


def _toml(value: Any) -> str:
    """JSON is TOML for what settings hold, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_toml(config: RunConfig, left_out: tuple[str, ...] = ()) -> str:
    """The config as TOML; settings that are None are left out."""
    lines = []
    for name in FIELDS:
        value = getattr(config, name)
        if value is not None and name not in left_out:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `to_dict`."""
    return RunConfig(**values)
