"""Warnings about settings before a run starts: one line each, with what will happen and what to use."""

from __future__ import annotations

from pathlib import Path

from paceline.config import RunConfig, is_simulated
from paceline.data.datasets import DATASETS
from paceline.settings.features import Feature
from paceline.settings.preprocessing import split_of
from paceline.settings.rules import AUTOMATIC, rule_of
from paceline.settings.strategies import strategy_of, why_not

SKEWED_BELOW = 1.0  # A Dirichlet split with a smaller ALPHA leaves most workers without some of the labels
GROUP_NORM = "-gn"  # ends the names of models with group norm instead of batch norm
STARVING = ("damped", "gap", "ringmaster")  # rules that damp or drop the pushes of slow workers
REMEMBERING = (*AUTOMATIC, "cached", "foresight", "foresight-fair")  # rules whose steps hold the pushes of all workers
MIN_EXCHANGES = 30
"""With fewer exchanges in a run, local steps are averaged too rarely and an outer momentum cannot build up."""

MIN_LOCAL_STEPS = 3
"""Fewer are not advised: `sync` or `async` do better."""

FAST_BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # flags in /proc/cpuinfo of CPUs with bf16 instructions


def advice(config: RunConfig) -> list[str]:
    """Warnings about a resolved config, the most serious first."""
    if config.timing_only:
        return []
    found = [_batch_norm_on_skew(config), _slow_precision(config), _few_exchanges(config), _codec_at_home(config)]
    if strategy_of(config).is_stale and not strategy_of(config).is_local:
        found += [_starved(config), _adam_on_skew(config), _momentum(config)]
    return [line for line in found if line is not None]


def is_skewed(config: RunConfig) -> bool:
    """Whether workers see labels in very different shares.

    >>> [is_skewed(RunConfig(split=split)) for split in ("labels", "dirichlet:0.1", "dirichlet:5", "iid")]
    [True, True, False, False]
    """
    split = split_of(config)
    return split.kind == "labels" or (split.alpha is not None and split.alpha < SKEWED_BELOW)


def has_batch_norm(model: str) -> bool:
    """Whether a built-in model has batch norm, and so normalises by the labels of one worker.

    >>> has_batch_norm("resnet18"), has_batch_norm("resnet18-gn"), has_batch_norm("cnn")
    (True, False, False)
    """
    return model.startswith(("resnet", "inception")) and not model.endswith(GROUP_NORM)


def most_momentum(workers: int) -> float:
    """The largest momentum beside that of asynchrony, which is about 1 - 1/n (arXiv 1605.09774).

    Momentum m makes steps 1/(1 - m) times as long, asynchrony n times: together at most as .9 with 4 workers, since
    with 5 the published runs begin to end in NaN.

    >>> [round(most_momentum(workers), 3) for workers in (2, 4, 5, 10, 40)]
    [0.95, 0.9, 0.875, 0.75, 0.0]
    """
    return max(0.0, 1.0 - workers / 40.0)


def crowding(config: RunConfig, num_cores: int) -> list[str]:
    """Warn about threads that wait for each other's cores, if all workers are on one machine with so many.

    >>> print(*crowding(RunConfig(workers=2, threads=8), num_cores=2))
    --threads 8 for each of 2 workers is 16 threads on 2 cores, which wait for each other: use --threads 1
    >>> crowding(RunConfig(workers=10, threads=1), num_cores=2)
    []
    """
    workers, threads = config.workers or 1, config.threads or 1
    each = max(1, num_cores // workers)
    if threads <= each or config.device != "cpu":
        return []
    whose = f"for each of {workers} workers is {workers * threads} threads" if workers > 1 else "is more than fit"
    return [f"--threads {threads} {whose} on {num_cores} cores, which wait for each other: use --threads {each}"]


def _batch_norm_on_skew(config: RunConfig) -> str | None:
    alone = (config.workers or 1) == 1
    if config.task is not None or not has_batch_norm(config.model) or not is_skewed(config) or alone:
        return None
    other = config.model if config.model.startswith("resnet") else "resnet18"
    return (
        f"batch norm in {config.model} with --split {config.split} normalises by each worker's own labels, which the "
        f"evaluated model never sees alone: use group norm, as in --model {other}{GROUP_NORM}"
    )


def _slow_precision(config: RunConfig, cpu_facts: Path = Path("/proc/cpuinfo")) -> str | None:
    if config.precision != "bf16" or config.device != "cpu":
        return None
    try:
        known = any(flag in cpu_facts.read_text(encoding="utf-8") for flag in FAST_BF16)
    except OSError:
        return None
    return None if known else "--precision bf16 is slow here: this CPU computes in fp32 and only rounds; fp32 is faster"


def _codec_at_home(config: RunConfig) -> str | None:
    codec = config.codec or config.pull_codec
    if codec is None or is_simulated(config) or why_not(config, Feature.CODEC) is not None:
        return None  # a ring has a codec only between ranks, which are most likely on several machines
    return (
        f"codec {codec} between processes of one machine takes longer than their shared memory does: it pays on a "
        "network, as 'paceline simulate --link 1gbit,0.2ms' shows; leave it out here unless you try it out"
    )


def _starved(config: RunConfig) -> str | None:
    if rule_of(config).name not in STARVING or not is_skewed(config):
        return None
    what = "drops" if rule_of(config).traits.drops else "damps"
    return (
        f"rule {config.rule} {what} stale pushes, and with --split {config.split} the slowest workers' labels are "
        "starved with them: --rule auto lets the data of every worker count"
    )


def _adam_on_skew(config: RunConfig) -> str | None:
    if not config.optimizer.startswith("adam") or not is_skewed(config) or rule_of(config).name in REMEMBERING:
        return None
    return (
        f"{config.optimizer} with --split {config.split} and pushes applied one by one follows the labels of the "
        "worker that pushed last: --rule auto looks ahead, with moments over the pushes of several rounds"
    )


def _momentum(config: RunConfig) -> str | None:
    workers, most = config.workers or 1, most_momentum(config.workers or 1)
    if config.rule != "plain" or config.optimizer.startswith("adam") or config.momentum <= most:
        return None
    return (
        f"momentum {config.momentum:g} with {workers} workers on rule plain can diverge, as stale pushes act as "
        f"momentum too: --rule auto looks ahead, or --momentum {most:.3g} and less"
    )


def _few_exchanges(config: RunConfig) -> str | None:
    strategy = strategy_of(config)
    if not strategy.is_local or config.task is not None or config.steps is not None:
        return None
    batches = config.epochs * DATASETS[config.dataset].train_size / (config.batch_size * (config.workers or 1))
    exchanges, most = batches / strategy.local_steps, int(batches / MIN_EXCHANGES)
    if exchanges >= MIN_EXCHANGES or strategy.local_steps == 1:
        return None
    often = f"{exchanges:.0f} times" if exchanges >= 1.5 else "once"
    epochs = f"{config.epochs:g} epochs" if config.epochs != 1 else "1 epoch"
    instead = f"{strategy.name}:{most} would exchange {MIN_EXCHANGES} times or more"
    if most < MIN_LOCAL_STEPS:  # an outer momentum over so few steps is a second one (docs/local-steps.md)
        instead = "async, which exchanges" if strategy.is_stale else "sync or allreduce, which exchange"
        instead = f"use {instead} every step"
    return f"strategy {config.strategy} with {config.workers} workers exchanges only {often} in {epochs}: {instead}"
