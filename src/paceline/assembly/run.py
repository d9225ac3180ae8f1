"""The pieces of one run, built from its config: task, server, seats. Every process and replay builds them here."""

from __future__ import annotations

import functools
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.assembly.core import make_inside, make_model, make_optimizer, make_policy, make_rule, make_schedule
from paceline.assembly.work import Work, divide_work
from paceline.config import RunConfig, places_of
from paceline.core.buffers import MakeMemory, Sizes
from paceline.core.compression import DENSE, Codecs, WorkerEnd
from paceline.core.messages import Deal, Join
from paceline.core.schedules import Budget
from paceline.core.server import Mean, Server
from paceline.core.worker import Seat
from paceline.data.datasets import DATASETS, Dataset
from paceline.errors import UserError
from paceline.interfaces import Codec, Layout, Loader, Task
from paceline.models.dropout import mix64
from paceline.settings.codecs import build_codec
from paceline.settings.imports import make_own
from paceline.settings.preprocessing import augment_of, transform_of
from paceline.settings.quantities import count
from paceline.settings.rules import rows_nbytes
from paceline.settings.stopping import require_measured
from paceline.settings.strategies import parse_strategy
from paceline.system.shared_segment import require_memory
from paceline.tasks.flat import FlatModule
from paceline.tasks.host_staging import Staged
from paceline.tasks.local_sgd import LocalSteps
from paceline.tasks.nested import device_of, num_samples, tensors_of
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import SupervisedTask
from paceline.tasks.synthetic import one_vector

_INITIAL = 0x1417


def prepare_device(config: RunConfig) -> torch.device:
    """Threads, and on a GPU kernels that sum in a fixed order, so that a run can be replayed there too."""
    torch.set_num_threads(config.threads or 1)
    if config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a kernel a tensor
    return torch.device(config.device)


def initial_seed(config: RunConfig) -> int:
    """What a model's first weights are drawn from."""
    return mix64(config.seed, _INITIAL)


def seed_generators(seed: int) -> None:
    """The global generators of torch, Python and numpy, which a user's code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def make_task(config: RunConfig, dataset: Dataset | None) -> SupervisedTask:
    """The task of a run, which steps as the config says. The seed fixes the initial weights."""
    task = _plain_task(config, dataset)
    require_measured(config, task.measured, task.test is not None)
    task.step_by(
        StepSettings(config.precision, config.compile, config.capture, bool(config.channels_last), config.accumulate)
    )
    return task


def _plain_task(config: RunConfig, dataset: Dataset | None) -> SupervisedTask:
    """A built-in model on `dataset`, or the user's own."""
    seed_generators(initial_seed(config))
    if config.task is not None:
        return load_task(config.task)
    assert dataset is not None
    return SupervisedTask(
        make_model(config.model, dataset.info.image_shape, len(dataset.info.classes)),
        F.nll_loss,
        train=(torch.from_numpy(dataset.train_images), torch.from_numpy(dataset.train_labels)),
        test=(torch.from_numpy(dataset.test_images), torch.from_numpy(dataset.test_labels)),
        transform=transform_of(dataset),
        augment=augment_of(config, dataset),
        classes=dataset.info.classes,
    )


def load_task(text: str) -> SupervisedTask:
    """Call MODULE:FUNCTION or FILE.py:FUNCTION, which must return a `paceline.Task`."""
    task = make_own("task", text)
    if not isinstance(task, SupervisedTask):
        name = text.rpartition(":")[2]
        raise UserError(f"task '{text}': {name}() returned {type(task).__name__}, not a paceline.Task")
    return task


def work_of(task: SupervisedTask, config: RunConfig) -> Work:
    """How the train set of `task` is divided."""
    return divide_work(class_labels(task.train[1], num_samples(task.train[0]), config), config)


def identity_of(task: SupervisedTask) -> dict[str, Any]:
    """What every process of a run must agree on, checked when a worker joins."""
    inputs, targets = task.train
    check = 0
    for tensor in tensors_of(targets) or tensors_of(inputs):
        check = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), check)
    return {
        "layout": zlib.crc32(repr(task.layout.to_rows()).encode()),
        "num_samples": num_samples(inputs),
        "targets": check,
    }


def class_labels(targets: Any, num_samples: int, config: RunConfig) -> np.ndarray[Any, Any]:
    """Class numbers for splitting; targets that are none can still be split as `full` or `iid`."""
    if isinstance(targets, torch.Tensor) and targets.dim() == 1 and not targets.is_floating_point():
        return targets.cpu().numpy().astype(np.int64)
    if config.split in ("full", "iid"):
        return np.zeros(num_samples, np.int64)
    raise UserError(f"--split {config.split} needs class numbers as targets: this data has none, use iid or full")


def make_server(
    config: RunConfig, task: SupervisedTask, work: Work, mean: Mean | None = None, nbytes: int | None = None
) -> Server:
    """The server of a run, at its start.

    Where the pushes of a round arrive as their mean already there is a `mean`, and `nbytes` is what a push costs.
    """
    if config.device == "cpu":
        require_memory(rows_nbytes(config, task.layout.size), f"table of rule {config.rule}", "memory")
        if config.pull_codec is not None:
            held = 4 * task.layout.size * places_of(config)
            require_memory(held, "table of what each worker has, for --pull-codec,", "memory")
    return Server(
        task.initial(),
        make_rule(config, task.layout, skew=work.skew),
        make_policy(config),
        work.budget,
        make_schedule(config),
        config.workers or 1,
        mean,
        codecs_of(config, task.layout) if mean is None else DENSE,
        nbytes,
        inside=make_inside(config),
        places=config.max_workers,
    )


def key_of(config: RunConfig) -> Callable[[int], int]:
    """What a worker's codecs round by."""
    return lambda worker: mix64(config.seed, worker)


def codecs_of(config: RunConfig, layout: Layout) -> Codecs:
    """How pushes and replies are encoded; seats and server of one process share the codecs' scratch."""
    return Codecs(_codec(config.codec, layout), _codec(config.pull_codec, layout), key_of(config))


@functools.lru_cache(maxsize=4)
def _codec(name: str | None, layout: Layout) -> Codec | None:
    return build_codec(name, layout) if name is not None else None


def timing_layout(config: RunConfig) -> Layout:
    """The layout of what a simulation of times alone exchanges: the model's, or a vector of the size stated."""
    if config.parameters is not None:
        return one_vector(count(config.parameters))
    info = DATASETS[config.dataset]
    return FlatModule(make_model(config.model, info.image_shape, len(info.classes))).layout


def timing_server(config: RunConfig, layout: Layout, budget: Budget) -> Server:
    """A server of times alone, which knows what pushes and replies would weigh."""
    rule, policy, schedule = make_rule(config, Layout((), 0)), make_policy(config), make_schedule(config)
    codecs, workers, nbytes = codecs_of(config, layout), config.workers or 1, 4 * layout.size
    inside, places = make_inside(config), config.max_workers
    known = (torch.empty(0), rule, policy, budget, schedule, workers)
    return Server(*known, codecs=codecs, nbytes=nbytes, inside=inside, places=places)


def make_join(config: RunConfig, work: Work, worker: int, incarnation: int) -> Join:
    """How a worker announces itself."""
    return Join(worker, incarnation, work.quotas[worker], config.threads or 1)


def make_seat(
    config: RunConfig,
    task: SupervisedTask,
    work: Work,
    join: Join,
    make_memory: MakeMemory | None = None,
    staged: bool = False,
) -> Seat:
    """A worker in this process, on the device of the task's data; `make_memory` makes what its server shares.

    Where it is `staged` that memory is the host's, whatever the device.
    """
    steps, loader = make_steps(config, task, work, join.worker)
    device = device_of(task.train)

    def redeal(deal: Deal) -> Loader:
        return task.loader(work.batches(join.worker, config, deal), config.seed, join.worker)

    codecs = codecs_of(config, task.layout)
    if staged:
        seat = Seat(Staged(steps, device), loader, join, None, codecs, make_memory, redeal)
    else:
        seat = Seat(steps, loader, join, device, codecs, make_memory, redeal)
    task.warm_up(task.loader(work.batches(join.worker, config), config.seed, join.worker))
    return seat


def sizes_of(config: RunConfig, task: SupervisedTask, work: Work) -> Sizes:
    """How large a worker's memory is."""
    steps, _ = make_steps(config, task, work, 0)
    return WorkerEnd(codecs_of(config, task.layout), 0, steps).sizes


def make_steps(config: RunConfig, task: SupervisedTask, work: Work, worker: int) -> tuple[Task, Loader]:
    """What a worker does for one push, and its data: one step, or several by itself."""
    loader = task.loader(work.batches(worker, config), config.seed, worker)
    if not parse_strategy(config.strategy).is_local:
        return task, loader
    return LocalSteps(task, make_optimizer(config, task.layout), device_of(task.train)), loader
