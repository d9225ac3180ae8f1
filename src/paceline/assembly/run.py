"""The parts of one run, built from its config: server, codecs, workers. Every process and replay builds them here."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from paceline.assembly.core import make_aggregate, make_model, make_optimizer, make_policy, make_rule, make_training
from paceline.assembly.task import class_labels
from paceline.assembly.work import WorkAssignment, divide_work
from paceline.config import RunConfig, max_workers_of
from paceline.core.buffers import BufferSizes, MakeMemory
from paceline.core.compression import Codecs, WorkerCompression
from paceline.core.messages import DataAssignment, Join
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, Mean, Roster, Server
from paceline.core.worker import LocalWorker, one_vector
from paceline.data.datasets import DATASETS
from paceline.interfaces import Codec, Layout, Loader, Task
from paceline.randomness import mix64
from paceline.settings.codecs import build_codec
from paceline.settings.notation import count
from paceline.settings.preprocessing import split_of
from paceline.settings.rules import rows_nbytes
from paceline.settings.strategies import strategy_of
from paceline.system.memory import require_memory
from paceline.tasks.flat import FlatModule
from paceline.tasks.host_staging import HostStagedTask
from paceline.tasks.local_sgd import LocalSteps
from paceline.tasks.nested import device_of, num_samples
from paceline.tasks.supervised import SupervisedTask


def work_of(task: SupervisedTask, config: RunConfig) -> WorkAssignment:
    """Divide the train set of `task`, which learns what is held out of it."""
    work = divide_work(class_labels(task.train[1], num_samples(task.train[0]), config), config)
    task.train_on(work.train, config.seed, (config.batch_size or 1) // config.accumulate)
    return work


def make_server(
    config: RunConfig, task: SupervisedTask, work: WorkAssignment, mean: Mean | None = None, nbytes: int | None = None
) -> Server:
    """Build the server of a run, at its start, after a trial step of a user's own task.

    On a ring, the pushes of a round arrive as their mean: `mean` returns it, and `nbytes` is what a push costs.
    """
    if config.task is not None:
        task.require_step(work.batches(0, config), config.seed)
    if config.device == "cpu":
        require_memory(rows_nbytes(config, task.layout.size), f"table of rule {config.rule}", "memory")
        if config.pull_codec is not None:
            held = 4 * task.layout.size * max_workers_of(config)
            require_memory(held, "table of what each worker has, for --pull-codec,", "memory")
    return Server(
        task.initial(),
        make_rule(config, task.layout, skew=work.skew),
        make_policy(config),
        make_training(config, work.budget),
        make_roster(config),
        Exchange(codecs_of(config, task.layout), aggregate=make_aggregate(config))
        if mean is None
        else Exchange(nbytes=nbytes, mean=mean),
    )


def make_roster(config: RunConfig) -> Roster:
    """The workers that a run expects, before any has joined."""
    return Roster(config.workers or 1, config.max_workers, shared_data=split_of(config).kind == "full")


def key_of(config: RunConfig) -> Callable[[int], int]:
    """The key of each worker's codec memory, which seeds its rounding."""
    return lambda worker: mix64(config.seed, worker)


def codecs_of(config: RunConfig, layout: Layout) -> Codecs:
    """The codecs of pushes and replies, shared by all workers and the server of this process."""
    return Codecs(_codec(config.codec, layout), _codec(config.pull_codec, layout), key_of(config))


@functools.lru_cache(maxsize=4)
def _codec(name: str | None, layout: Layout) -> Codec | None:
    return build_codec(name, layout) if name is not None else None


def timing_layout(config: RunConfig) -> Layout:
    """The layout that a timing-only simulation exchanges: the model's, or one vector of `--parameters` floats."""
    if config.parameters is not None:
        return one_vector(count(config.parameters))
    info = DATASETS[config.dataset]
    return FlatModule(make_model(config.model, info.image_shape, len(info.classes))).layout


def timing_server(config: RunConfig, layout: Layout, budget: Budget) -> Server:
    """Build a timing-only server: it has no weights and knows how many bytes pushes and replies would take."""
    rule, policy, training = make_rule(config, Layout((), 0)), make_policy(config), make_training(config, budget)
    exchange = Exchange(codecs_of(config, layout), nbytes=4 * layout.size)
    return Server(torch.empty(0), rule, policy, training, make_roster(config), exchange)


def make_join(config: RunConfig, work: WorkAssignment, worker: int, incarnation: int) -> Join:
    """How a worker announces itself."""
    return Join(worker, incarnation, work.quotas[worker], config.threads or 1)


def make_worker(
    config: RunConfig,
    task: SupervisedTask,
    work: WorkAssignment,
    join: Join,
    make_memory: MakeMemory | None = None,
    staged: bool = False,
) -> LocalWorker:
    """A worker in this process, on the device of the task's data; `make_memory` makes buffers that its server shares.

    If it is `staged`, these buffers are in host memory, whatever the device.
    """
    steps, loader = make_steps(config, task, work, join.worker)
    device = device_of(task.train)

    def reassign(assignment: DataAssignment) -> Loader:
        return task.loader(work.batches(join.worker, config, assignment), config.seed, join.worker)

    codecs = codecs_of(config, task.layout)
    placed, at = (HostStagedTask(steps, device), None) if staged else (steps, device)
    instance = LocalWorker(placed, loader, join, at, codecs, make_memory, reassign)
    task.warm_up(task.loader(work.batches(join.worker, config), config.seed, join.worker))
    return instance


def sizes_of(config: RunConfig, task: SupervisedTask, work: WorkAssignment) -> BufferSizes:
    """How large a worker's memory is."""
    steps, _ = make_steps(config, task, work, 0)
    return WorkerCompression(codecs_of(config, task.layout), 0, steps).sizes


def make_steps(config: RunConfig, task: SupervisedTask, work: WorkAssignment, worker: int) -> tuple[Task, Loader]:
    """The task of a worker (one step for each push, or several local steps) and its data."""
    loader = task.loader(work.batches(worker, config), config.seed, worker)
    if not strategy_of(config).is_local:
        return task, loader
    return LocalSteps(task, make_optimizer(config, task.layout), device_of(task.train)), loader
