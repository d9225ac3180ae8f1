"""Make `result.json`: settings, scores, staleness, counts and the status of a run that has ended."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.config import SCHEMA, RunConfig, is_script, to_dict
from paceline.core.server import Server
from paceline.interfaces import Layout, Scores
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import LOOPS_ENDED, ONE_ENDED, TIME_IS_UP, RunFolder
from paceline.settings.features import without_value
from paceline.settings.resolve import OPTIMIZERS
from paceline.settings.rules import average_horizon, average_in_words
from paceline.settings.strategies import moves_bytes, strategy_of
from paceline.system.environment import environment
from paceline.system.sealed_weights import seal_weights
from paceline.system.terminal import counted

FAR_ABOVE = 100.0
"""So many times its optimizer's default, a learning rate is no longer lowered step by step."""


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """Hash all named tensors into one digest, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


class NamedTensors(Protocol):
    """A model that knows the names of its trained tensors."""

    layout: Layout

    def mixture(self, states: list[Tensor], samples: Sequence[int] | None = None) -> Tensor | None: ...

    def estimated(self, weights: Tensor, state: Tensor) -> Tensor: ...

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]: ...


def shared_state(server: Server, model: NamedTensors, weights: Tensor) -> Tensor | None:
    """The running statistics (batch norm and the like) that belong to `weights`.

    One worker that computes on `weights` itself has them already. Otherwise they are estimated again, if the model's
    code is here; buffers that are no statistics, and all buffers of a script, are the mean over the workers, weighted
    by samples. Workers that left before the end count only if no other has pushed.
    """
    members, states = server.members, server.worker_states
    there = [worker for worker in sorted(states) if not members[worker].departed] or sorted(states)
    state = model.mixture([states[worker] for worker in there], [members[worker].samples for worker in there])
    return state if state is None or _is_own(server, weights) else model.estimated(weights, state)


def _is_own(server: Server, weights: Tensor) -> bool:
    """Whether the only worker of a run, never restarted, has computed on `weights` step by step."""
    is_live, takes_local_steps = weights is server.weights, server.inside is not None
    alone = len(server.members) == 1 and not any(member.incarnation for member in server.members.values())
    return alone and is_live and not takes_local_steps


def is_averaged(server: Server) -> bool:
    """Whether the weights that are scored and saved are a running mean of the live ones."""
    return server.evaluated is not server.weights


def trained_tensors(server: Server, model: NamedTensors, live: bool = False) -> dict[str, Tensor]:
    """The evaluated weights (or the live ones) by name, as `load_state_dict` takes them."""
    weights = server.weights if live else server.evaluated
    return model.state_dict(weights, shared_state(server, model, weights))


def save_weights(folder: RunFolder, server: Server, model: NamedTensors) -> dict[str, Tensor]:
    """Write the evaluated weights, and the live ones if they are others; returns the evaluated ones by name."""
    tensors = trained_tensors(server, model)
    write_atomically(folder.weights_file, seal_weights(save(tensors)))
    if is_averaged(server):
        write_atomically(folder.live_weights_file, seal_weights(save(trained_tensors(server, model, live=True))))
    return tensors


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least `share` of all counted values do not exceed.

    >>> percentile(Counter({0: 90, 3: 10}), 0.95)
    3
    """
    needed, seen = share * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= needed:
            return value
    return 0


def staleness_summary(counts: Counter[int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum."""
    total = counts.total()
    mean = sum(value * count for value, count in counts.items()) / total if total else 0.0
    percentiles = {"p50": percentile(counts, 0.5), "p95": percentile(counts, 0.95)}
    return {"mean": round(mean, 4), **percentiles, "max": max(counts, default=0)}


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity by None, since JSON has neither."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def describe(scores: Scores | None, prefix: str) -> dict[str, Any]:
    """Accuracy in percent, loss and counts, under names that start with `prefix`; None if not measured."""
    counted = scores is not None and bool(scores.per_class)
    return {
        f"{prefix}_accuracy": round(scores.accuracy, 4) if scores is not None and counted else None,
        f"{prefix}_loss": scores.loss if scores is not None and math.isfinite(scores.loss) else None,
        f"{prefix}_correct": scores.correct if scores is not None and counted else None,
        f"{prefix}_total": scores.total if scores is not None else None,
        **({f"{prefix}_metrics": finite(scores.metrics)} if scores is not None and scores.metrics else {}),
    }


def summarise(config: RunConfig, server: Server, seconds: float, scores: dict[str, Scores | None]) -> dict[str, Any]:
    """The settings, scores and counts of a run."""
    test, settings = scores.get("test"), to_dict(config)
    named = ("strategy", "workers", "split", "rule", "optimizer", "lr", "momentum", "dataset", "model", "task", "seed")
    step = ("device", "precision", "compile", "capture", "accumulate")
    return {
        "schema": SCHEMA,
        **{name: settings[name] for name in (*named, *step)},
        "rule_applied": server.rule.name,
        "average": average_in_words(config),
        **({"dataset": None, "model": None} if config.task is not None else {}),
        **({"timing_only": True} if config.timing_only else {}),
        "codec": config.codec or "none",
        "pull_codec": config.pull_codec or "none",
        "epochs": config.epochs,
        "epoch_mode": config.epoch_mode,
        "batch_size": config.batch_size,
        "epoch_samples": server.budget.epoch_samples,
        "updates": server.version,
        "samples": server.samples,
        "train_seconds": round(seconds, 6),
        "samples_per_second": round(server.samples / seconds, 3) if seconds > 0 else 0.0,
        **describe(scores.get("train"), "train"),
        **describe(scores.get("validation"), "validation"),
        **describe(test, "test"),
        **_weights_rows(config, scores),
        "per_class_accuracy": list(test.per_class) if test is not None else None,
        "staleness": staleness_summary(server.staleness),
        "dropped_pushes": sum(one.dropped for one in server.by_optimizer),
        **({"skipped_steps": skipped} if (skipped := sum(one.skipped for one in server.by_optimizer)) else {}),
        "late_pushes": server.late,
        "lost_pushes": server.lost,
        **moved_bytes(config, server),
    }


def moved_bytes(config: RunConfig, server: Server) -> dict[str, int]:
    """Bytes of all pushes and replies; none move in one process."""
    moved = (server.bytes_pushed, server.bytes_pulled) if moves_bytes(config) else (0, 0)
    return {"bytes_pushed": moved[0], "bytes_pulled": moved[1]}


def _weights_rows(config: RunConfig, scores: dict[str, Scores | None]) -> dict[str, Any]:
    """Which weights the scores belong to; for averaged ones also the scores of the live weights."""
    if average_horizon(config) is None:
        return {"weights": "live"}
    return {
        "weights": "averaged",
        **describe(scores.get("live_validation"), "live_validation"),
        **describe(scores.get("live_test"), "live_test"),
    }


def status_of(server: Server, stop_reason: str | None) -> str:
    """How the run ended: finished, diverged or stopped. A run that reaches its target or time limit is finished."""
    if server.divergence is not None or not torch.isfinite(server.weights).all():
        return "diverged"
    is_planned = stop_reason is None or stop_reason.startswith(("target", TIME_IS_UP, LOOPS_ENDED, ONE_ENDED))
    return "finished" if is_planned else "stopped"


def make_result(
    config: RunConfig,
    server: Server,
    seconds: float,
    scores: dict[str, Scores | None],
    tensors: dict[str, Tensor],
    num_parameters: int,
    stop_reason: str | None,
    lost_workers: list[int],
    *more: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that `result.json` holds; `more` are the rows that depend on how the run was made."""
    status, found = status_of(server, stop_reason), server.divergence
    result = {
        **summarise(config, server, seconds, scores),
        "weights_sha256": weights_sha256(tensors),
        "num_parameters": num_parameters,
        "status": status,
        "reason": why_diverged(config, server) if status == "diverged" else stop_reason,
        "lost_workers": lost_workers,
        **({"divergence": {"worker": found.worker, "batch": found.batch}} if found is not None else {}),
    }
    for rows in more:
        result |= rows
    unknown = {name: None for name in without_value(config, result) if name in result}
    return {**result, **unknown, "environment": environment()}


def what_diverged(server: Server, weights: str | None = None) -> str:
    """Say when a run diverged, and what was not finite; `weights` says that of the final ones."""
    found = server.divergence
    what = weights or "the weights are no longer finite"
    head = f"training diverged at update {server.version} ({counted(server.samples, 'sample')})"
    if found is not None and found.is_update_finite:
        what = f"the loss of worker {found.worker} was a NaN or infinity, though its push was finite"
    elif found is not None:
        loss = "not finite" if math.isinf(found.loss) else f"{found.loss:g}"
        told = f" (its loss was {loss})" if not math.isnan(found.loss) else ""  # a script need not tell it
        what = f"worker {found.worker} sent a push with a NaN or infinity{told}"
    return f"{head}: {what}"


def why_diverged(config: RunConfig, server: Server, weights: str | None = None) -> str:
    """Say what happened, the likely cause, and what to change; `weights` says what is wrong with the final ones."""
    found, what = server.divergence, what_diverged(server, weights)
    if found is not None and not server.version and server.inside is None:
        source = "script's inputs" if is_script(config) else "inputs"
        where = f"the {source}, the model's first weights or the loss function"
        return f"{what}. No step was made yet, so look for a NaN or infinity in {where}"
    in_script = _steps_in_script(config, server)
    if found is not None and found.is_update_finite and config.task is not None:
        cause = "check the loss function (a logarithm of zero, a division)"
        lower = _lower_in_script(config) if in_script else f"try {lower_lr(config, 0.25)}"
        return f"{what}: {cause}, or {lower}"
    is_stale = strategy_of(config).is_stale and server.num_workers > 1
    was_stale = is_stale and max(server.staleness, default=0) > 0
    cause = " Stale pushes act as extra momentum, so" if was_stale else " The likely cause is too long a step:"
    lower = f" lower --momentum (now {config.momentum:g})," if config.optimizer == "sgd" and config.momentum else ""
    advice = f"{cause} try {lower_lr(config, 0.25)}"
    if not is_far_above_default(config):  # else nothing else helps
        advice += f",{lower} --clip 1 or --warmup 0.05"
    if in_script:
        clip = "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()"
        advice = f"{cause} {_lower_in_script(config)}, or {clip}"
    if config.rule == "plain" and is_stale:
        advice += "; or --rule auto, which allows for staleness"
    if config.outer_lr is not None:
        advice += f"; or --outer-lr {config.outer_lr / 2:g} (now {config.outer_lr:g})"
    return f"{what}.{advice}"


def lower_lr(config: RunConfig, factor: float) -> str:
    """The flag of a lower learning rate: `factor` times this one; the optimizer's default if that is still far above.

    >>> lower_lr(RunConfig(lr=0.1), 0.25), lower_lr(RunConfig(lr=1e6), 0.25)
    ('--lr 0.025 (now 0.1)', '--lr 0.005 (the default, now 1e+06)')
    """
    lr = config.lr or 0.0
    if is_far_above_default(config):
        return f"--lr {OPTIMIZERS[config.optimizer]:g} (the default, now {lr:g})"
    return f"--lr {factor * lr:g} (now {lr:g})"


def is_far_above_default(config: RunConfig, factor: float = 1.0) -> bool:
    """Whether `factor` times the learning rate is far above the default of its optimizer, if that has one.

    >>> is_far_above_default(RunConfig(lr=0.3)), is_far_above_default(RunConfig(lr=0.3), factor=10.0)
    (False, True)
    """
    return factor * (config.lr or 0.0) > FAR_ABOVE * OPTIMIZERS.get(config.optimizer, math.inf)


def _steps_in_script(config: RunConfig, server: Server) -> bool:
    """Whether the script brings its optimizer, whose flags are refused then."""
    return is_script(config) and (server.inside is not None or bool(server.own_loops.layout.numbers))


def _lower_in_script(config: RunConfig) -> str:
    momentum = f" or momentum (now {config.momentum:g})" if config.optimizer == "sgd" and config.momentum else ""
    return f"lower lr (now {config.lr:g}){momentum} in the script"
