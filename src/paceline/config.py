"""Define every setting of a run once: its field gives the flag, the TOML key, the check and the help."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import UserError, unknown_name, wrong_type
from paceline.interfaces import MAX_WORKERS

Check = Callable[[str, Any], None]


def _check(passes: Callable[[Any], bool], must: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not passes(value):
            raise UserError(f"--{name} {must}, got {value}")

    return check


_positive = _check(lambda value: math.isfinite(value) and value > 0, "must be a positive number")
_not_negative = _check(lambda value: math.isfinite(value) and value >= 0, "must be zero or more")
_sensible = _check(lambda value: 1e-6 <= value <= 1e9, "must be above 0 (from a millionth to a billion)")
_fraction = _check(lambda value: 0.0 <= value < 1.0, "must be at least 0 and below 1")
_at_least_one = _check(lambda value: value >= 1, "must be at least 1")
_seed = _check(lambda value: 0 <= value < 2**63, "must be between 0 and 2^63 - 1")
_percent = _check(lambda value: 0.0 < value <= 100.0, "is in percent, above 0 and at most 100")
_betas = _check(
    lambda value: len(value) == 2 and all(0.0 <= beta < 1.0 for beta in value),
    "takes two numbers from 0 to below 1, as in .9,.999",
)


def _workers(name: str, value: int) -> None:
    _at_least_one(name, value)
    if value > MAX_WORKERS:
        raise UserError(f"--{name} must be at most {MAX_WORKERS}, got {value}")


def _folder_name(name: str, value: str) -> None:
    if (is_long := len(os.fsencode(value)) > 255) or "/" in value or value.strip() in ("", ".", ".."):
        other = f"'{value}' is not a folder name: use letters, digits, dots and dashes"
        raise UserError(f"--{name} {'has more than 255 bytes: use a shorter --name' if is_long else other}")


_Text = str | None


def setting(
    group: str, default: Any, text: str, check: Check | None = None, metavar: _Text = None, alias: _Text = None
) -> Any:
    """Make a field of RunConfig with all that the command line needs; `alias` is a second name for its flag."""
    metadata = {"group": group, "help": text, "check": check, "metavar": metavar, "alias": alias}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_data, _model, _strategy, _optimizer = (partial(setting, name) for name in ("data", "model", "strategy", "optimizer"))
_length, _machine, _cluster, _run = (partial(setting, name) for name in ("length", "machine", "cluster", "run folder"))


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run. `resolve` fills in the fields that are left at None."""

    dataset: str = _data("fashion-mnist", "fashion-mnist, mnist, cifar10, sst5, imagenet or fashion-mnist-sample")
    split: str = _data("iid", "how workers share the data: full, iid, labels or dirichlet:ALPHA", alias="shard")
    shard_weights: list[float] | None = _data(None, "relative shard sizes of workers, as in 1,1,2", metavar="W,W,...")
    validation: float = _data(0.0, "fraction of the train set to hold out and score", _fraction)
    fold: str | None = _data(
        None, "hold out fold I of K of the train set and score it, not the test set, as in 2/5", metavar="I/K"
    )
    data_dir: str | None = _data(None, "folder that holds the data sets", metavar="DIR")
    augment: str = _data(
        "auto", "augment images: crop, mirror, crop,mirror or none (auto: both for cifar10, imagenet)", metavar="WAYS"
    )
    max_length: int = _data(64, "maximum number of words of a sentence", _at_least_one)
    image_size: int = _data(224, "width and height of the images of imagenet, in pixels", _at_least_one)
    model: str = _model(
        "lenet5",
        "lenet5, cnn, resnet20, resnet18, resnet34, resnet50 or resnet101 (with -gn: group norm, not batch norm), "
        "inception-28-small, inception-bn, or transformer (for text)",
    )
    task: str | None = _model(
        None, "your own task instead of model and dataset: MODULE:FUNCTION or FILE.py:FUNCTION", metavar="TASK"
    )
    weights: str | None = _model(
        None, "begin from the weights in this safetensors file, such as weights.safetensors of a run", metavar="FILE"
    )
    weights_partial: bool | None = _model(
        None, "load the tensors of --weights that fit by name and shape, and list the others (default: all must fit)"
    )
    weights_sha256: str | None = _model(
        None, "refuse --weights unless the file has this SHA-256 (default: any; the run records it)", metavar="HEX"
    )
    strategy: str = _strategy(
        "async", "classic, sync, async, backup:B, bounded:S, allreduce, local:H, diloco:H or async-local:H"
    )
    workers: int | None = _strategy(None, "number of workers (default 2; classic has 1)", _workers)
    max_workers: int | None = _strategy(
        None,
        "let workers join and leave during the run, at most this many at once; the data is divided again each "
        "time (default: --workers)",
        _workers,
    )
    rule: str = _strategy(
        "auto",
        "how the server applies a push: auto, plain, plain-early, damped, gap, compensated, dana, dana-slim, "
        "cached, ringleader, ringmaster:R, buffered:K, ahead, foresight, foresight-fair or foresight-cached; with "
        "async-local: delayed",
    )
    average: str | None = _strategy(
        None,
        "evaluate and save a running average of the weights: none, on, auto or a horizon in updates (default: on "
        "for async, bounded and async-local, unless the rule is plain or plain-early or the loop is your own)",
    )
    aggregate: str | None = _strategy(
        None,
        "how to combine the pushes of a round, coordinate by coordinate: mean (default, by samples), median or "
        "trimmed:K (the mean without the K lowest and highest)",
        metavar="mean|median|trimmed:K",
    )
    robust: bool = _strategy(
        False, "discard pushes whose norm is out of all proportion to the run's history, and expel who sends them"
    )
    local_steps: str | None = _strategy(
        None,
        "for strategies with :H: even (H steps each) or speed (H steps for the fastest worker, fewer for slower "
        "ones, so that all push at the same time; default for async-local)",
        metavar="even|speed",
    )
    outer_lr: float | None = _strategy(
        None, "outer learning rate (default: diloco .7; async-local .7 with 2 workers, .4 from 5 on)", _positive
    )
    outer_momentum: float | None = _strategy(
        None,
        "outer Nesterov momentum (default: .65 with 2 workers; from 5 on diloco .9, async-local .8)",
        _fraction,
    )
    outer_warmup: int | None = _strategy(
        None,
        "rounds in which outer lr and momentum grow from plain averaging, 1 and 0 (default 10; 0: none, as published)",
        _not_negative,
        metavar="ROUNDS",
    )
    path: str | None = _strategy(None, "topology (ring: default of allreduce, local and diloco)", metavar="star|ring")
    codec: str | None = _strategy(None, "compress pushes: none (default), fp16, bf16, int8, sign, topk:F or lowrank:R")
    pull_codec: str | None = _strategy(None, "compress replies, as weight changes, with the same codecs (default none)")
    optimizer: str = _optimizer("sgd", "sgd, adam, adamw, rmsprop, lars or muon: on the server, or in workers if local")
    lr: float | None = _optimizer(None, "learning rate (default .001, sgd .005, rmsprop .0001, lars 1)", _positive)
    momentum: float = _optimizer(0.9, "momentum of sgd, rmsprop, lars and muon", _fraction)
    nesterov: bool = _optimizer(False, "Nesterov momentum for sgd")
    betas: list[float] = _optimizer([0.9, 0.999], "betas of adam, adamw and muon's adamw", _betas, metavar="B1,B2")
    weight_decay: float = _optimizer(0.0, "weight decay added to the gradient (adamw, muon: to steps)", _not_negative)
    clip: float | None = _optimizer(None, "maximum gradient norm; scale larger gradients down", _positive)
    schedule: str = _optimizer("constant", "lr schedule: constant, cosine, exponential[:FACTOR] or steps:80,120 (/ 10)")
    warmup: float | None = _optimizer(None, "share of the run over which lr grows (rule auto: up to .2)", _fraction)
    scale_lr: str = _optimizer("none", "multiply lr: none, auto (by the pushes that one update averages) or a factor")
    batch_size: int = _length(32, "samples in one batch of one worker", _at_least_one)
    epochs: float = _length(6.0, "number of epochs", _sensible)
    epoch_mode: str = _length("shared", "count epochs over all workers (shared) or over each worker's own shard (own)")
    steps: int | None = _length(None, "stop after this many updates instead of --epochs", _at_least_one)
    max_seconds: float | None = _length(
        None, "stop after this many seconds of training, without loading and evaluation (simulate: virtual)", _sensible
    )
    target_accuracy: float | None = _length(
        None, "stop once the accuracy of an evaluation reaches this percentage (needs --eval-every)", _percent
    )
    target: str | None = _length(
        None,
        "stop once a metric of an evaluation reaches a value: 'METRIC<=VALUE' or 'METRIC>=VALUE'; METRIC is "
        "loss, accuracy or a metric of your task (needs --eval-every), or one that your own loop reports",
        metavar="GOAL",
    )
    best: str | None = _length(
        None,
        "how to choose the best weights at evaluations: min:METRIC or max:METRIC (default: the metric of "
        "--target, else accuracy, else loss)",
        metavar="BEST",
    )
    eval_every: float | None = _length(
        None,
        "epochs between evaluations, on what --validation or --fold holds out, else on the test data; they do not "
        "count as training time",
        _sensible,
    )
    eval_train: bool = _length(False, "score the train data too at each of these evaluations")
    score: str = _length("all", "what to score at the end: all, test or none")
    train_score: str = _length("10000", "train samples to score at the end, drawn by the seed: a number, all or none")
    seed: int = _machine(0, "seed of all random choices", _seed)
    device: str = _machine("cpu", "cpu or cuda")
    threads: int | None = _machine(None, "threads of each worker (default: cores / workers)", _at_least_one)
    precision: str = _machine("fp32", "fp32, or bf16 (autocast; the weights stay fp32)")
    compile: bool = _machine(False, "compile the step with torch.compile: a slower start, then faster steps")
    capture: bool = _machine(False, "capture the step as a CUDA graph; needs --device cuda")
    channels_last: bool | None = _machine(None, "store images channels last (default: with bf16 on cuda)")
    accumulate: int = _machine(1, "compute each batch in this many parts, one by one, to save memory", _at_least_one)
    delay: list[str] | None = _machine(
        None,
        "slow workers down: 30ms or normal:60ms,5ms for all, 30ms@1,3 for workers 1 and 3, which wins; may be repeated",
        metavar="TIME[@WORKERS]",
    )
    faults: str | None = _cluster(None, "TOML file of faults to inject: crash, pause, slow and others", metavar="FILE")
    speeds: str | None = _cluster(
        None,
        "time of a step: 30ms, 1,1,1,4 (seconds of each worker), lognormal:1s,.3, exponential:1s or gamma:1s,.1 [1s]",
        metavar="SPEEDS",
    )
    link: str | None = _cluster(None, "the server's bandwidth and latency each way, as in 1gbit,0.2ms", metavar="LINK")
    server_time: str | None = _cluster(None, "time that the server takes for a push, as in 2ms [none]", metavar="TIME")
    cores: int | None = _cluster(None, "cores that all workers and the server share (default: one each)", _at_least_one)
    like: str | None = _cluster(None, "take settings, times and cores from this run (--speeds: factors)", metavar="RUN")
    timing_only: bool = _cluster(False, "compute no gradients, only times, staleness and traffic")
    parameters: str | None = _cluster(None, "parameters of --timing-only, as in 25.6M [of --model]", metavar="COUNT")
    checkpoint_every: float = _run(60.0, "seconds between checkpoints", _positive)
    keep: int = _run(2, "number of checkpoints to keep", _at_least_one)
    restart: int = _run(0, "restart a killed server from checkpoint and log, at most this many times", _not_negative)
    restart_workers: int = _run(
        0, "start a killed worker process again, at most this many times in the whole run", _not_negative
    )
    keep_going: bool = _run(False, "go on without a worker whose code raises an exception (default: the run ends)")
    stall: float | None = _run(
        None,
        "drop a worker that makes no step for this many seconds and for 10 of its usual steps, like a lost one "
        "(default: only name it)",
        _positive,
        metavar="SECONDS",
    )
    recovery: str = _run(
        "log",
        "recompute (log) or drop (checkpoint) pushes after a crash; a diverged run goes on from its newest checkpoint "
        "by checkpoint, or by skip-batch also without the batch that ended it",
        metavar="log|checkpoint|skip-batch",
    )
    durable: bool = _run(
        False,
        "sync the log to disk before each reply, so that a power failure loses no push; 'paceline run' also keeps the "
        "values of pushes, which only the script could compute again",
    )
    snapshots: float | None = _run(
        None,
        "save the weights this many times per epoch, for 'paceline landscape'; each takes 4 bytes per parameter "
        "(default none)",
        _sensible,
    )
    track: list[str] | None = _run(
        None, "send metrics to csv, tensorboard, mlflow, wandb, otel or MODULE:CLASS; may be repeated", metavar="NAME"
    )
    name: str | None = _run(None, "name of the run (default: strategy, model, workers and time)", _folder_name)
    runs: str = _run("runs", "folder that holds the runs; a URL is short for --runs runs --mirror URL", metavar="DIR")
    mirror: str | None = _run(
        None, "copy the run folder behind the run to URL/NAME, as in s3://BUCKET/runs (default none)", metavar="URL"
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, check = getattr(self, spec.name), spec.metadata["check"]
            if value is not None:
                value = coerce(spec, value)
                object.__setattr__(self, spec.name, value)
                if check is not None:
                    check(spec.name.replace("_", "-"), value)
        if is_url(self.runs):
            if self.mirror is not None:
                raise UserError(f"--runs {self.runs} and --mirror {self.mirror}: give a local folder as --runs")
            object.__setattr__(self, "mirror", self.runs)
            object.__setattr__(self, "runs", FIELDS["runs"].default)


def is_url(text: str) -> bool:
    """Whether a place is in an object store: a URL, not a path of this machine."""
    return "://" in text


def max_workers_of(config: RunConfig) -> int:
    """How many workers a run has room for: worker numbers are below it, and rules keep a row for each."""
    return config.max_workers or config.workers or 1


def is_simulated(config: RunConfig) -> bool:
    """Whether the run was made by `paceline simulate`, which always records its speeds."""
    return config.speeds is not None or config.like is not None


SCRIPT = "script"
"""The task of a user's own training loop, before a colon and the script's name."""


def is_script(config: RunConfig) -> bool:
    """Whether the run is a user's training script, which alone can compute its pushes."""
    return config.task is not None and config.task.startswith(f"{SCRIPT}:")


SCHEMA = 4
"""Version of run folders and their config.toml. 2: `foresight` is the rule that was `farsight` before. 3: subnormal
floats are zero, and averages, statistics of norm layers and dropped pushes are handled otherwise, so bits differ.
4: `auto` measures its steps, and momentum of the foresight rules is a running mean."""
SIMULATED_ONLY = ("speeds", "link", "server_time", "cores", "like", "timing_only", "parameters")
"""Settings of a simulated cluster."""

_RESTARTS = "restart", "restart_workers", "keep_going", "stall"
UPKEEP = ("keep", *_RESTARTS, "recovery", "durable", "track", "robust", "mirror", "train_score")
"""Settings of a run's files, admission and final scores, not of its training: `paceline resume` may change them."""


def given(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Which of these settings differ from their defaults."""
    untouched = RunConfig()
    return [name for name in names if getattr(config, name) != getattr(untouched, name)]


FIELDS = {spec.name: spec for spec in dataclasses.fields(RunConfig)}
ALIASES = {spec.metadata["alias"]: name for name, spec in FIELDS.items() if spec.metadata["alias"]}
_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def coerce(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Convert a value to the type of its field, so that equal settings are written alike."""
    wanted = str(spec.type).partition(" ")[0]
    if wanted == "str" and isinstance(value, os.PathLike):
        return os.fspath(value)
    if wanted == "list[str]" and isinstance(value, str):
        return [value]
    if wanted.startswith("list") and isinstance(value, list | tuple):
        item = wanted[5:-1]
        if all(_is_a(item, part) for part in value):
            return [float(part) if item == "float" else part for part in value]
    elif wanted in _KINDS and _is_a(wanted, value):
        return float(value) if wanted == "float" else value
    elif spec.name in ("scale_lr", "average", "train_score") and _is_a("float", value):
        return str(value)
    raise wrong_type(spec.name, value, wanted)


def _is_a(kind: str, value: Any) -> bool:  # True and False are not numbers, nor are ints that no float can hold
    if kind == "float" and isinstance(value, int) and abs(value) > sys.float_info.max:
        return False
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


def parse_toml(path: Path, wanted: str) -> dict[str, Any]:
    """Read a TOML file; if there is none, the error ends with `wanted`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path}: {wanted}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = "it is a folder" if path.is_dir() else error
        raise UserError(f"{path} cannot be read as TOML: {why}; {wanted}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file; unknown keys and wrong types are errors that name the file."""
    values = {}
    for key, value in parse_toml(path, "give a TOML file of settings, or flags alone").items():
        name = ALIASES.get(key, key.replace("-", "_"))
        if name == "schema":
            if value != SCHEMA:
                why = f"has schema {value}, this version reads {SCHEMA}, whose runs have other bits"
                raise UserError(f"{path} {why}: train again, or use the version that wrote it")
            continue
        if name not in FIELDS:
            tables = f"settings stand at the top of the file, without tables: leave out the line [{key}]"
            raise UserError(f"{path}: {tables if isinstance(value, dict) else unknown_name('setting', key, FIELDS)}")
        try:
            values[name] = coerce(FIELDS[name], value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return values


def to_toml(config: RunConfig, left_out: tuple[str, ...] = ()) -> str:
    """Write the config as TOML, without settings that are None."""
    lines = []
    for name, value in to_dict(config).items():
        if value is not None and name not in left_out:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
            lines.append(f"{name} = {text}")  # but for that character, JSON of settings is TOML
    return "\n".join(lines) + "\n"


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `to_dict`."""
    return RunConfig(**values)
