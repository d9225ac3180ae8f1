"""From settings to a task: the model, the loss and the data that a worker computes on."""

from __future__ import annotations

import inspect
import os
import random
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.assembly.core import make_model
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError, mismatched_keys, unknown_name
from paceline.randomness import mix64
from paceline.settings.imports import make_own
from paceline.settings.preprocessing import PADDING, ways_of
from paceline.settings.stopping import require_measured
from paceline.system.subnormals import flush_subnormals
from paceline.tasks.given_weights import GivenWeights
from paceline.tasks.nested import device_of, num_samples, rows_of, tensors_of
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import SupervisedTask

_INITIAL = 0x1417
COMPARED_INPUTS = 32  # train samples, spread over the whole set


def prepare_device(config: RunConfig) -> torch.device:
    """Set the threads, flush subnormal floats, and on a GPU choose kernels that sum in a fixed order.

    So a run can be replayed with equal bits.
    """
    flush_subnormals()
    torch.set_num_threads(config.threads or 1)
    if config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a kernel a tensor
    return torch.device(config.device)


def initial_seed(config: RunConfig) -> int:
    """The seed of a model's initial weights."""
    return mix64(config.seed, _INITIAL)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, Python and numpy, which a user's code may draw from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch.manual_seed asks every kind of device, which takes 100 microseconds
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def make_task(config: RunConfig, dataset: Dataset | None, given: GivenWeights | None = None) -> SupervisedTask:
    """The task of a run, which steps as the config says. The seed fixes the initial weights that are not `given`."""
    assert (given is None) == (config.weights is None), "who builds the task of a run reads its --weights"
    task = _plain_task(config, dataset)
    if given is not None:
        task.initial_weights = given.load_into(task.flat)
    require_measured(config, task.metric_names, task.test is not None)
    how = (config.precision, config.compile, config.capture, bool(config.channels_last), config.accumulate)
    task.configure_step(StepSettings(*how))
    return task


def _plain_task(config: RunConfig, dataset: Dataset | None) -> SupervisedTask:
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
    try:
        task = make_own("task", text)
    except UserError as error:
        raise _of_task_call(error, text) from error.__cause__
    name = text.rpartition(":")[2]
    if inspect.iscoroutine(task):
        task.close()  # else Python warns of it later
        raise UserError(f"task '{text}': {name}() is async, and nobody awaits it: write def {name}(), without async")
    if not isinstance(task, SupervisedTask):
        raise UserError(f"task '{text}': {name}() returned {type(task).__name__}, not a paceline.Task")
    return task


def _of_task_call(error: UserError, text: str) -> UserError:
    """The error of a task that cannot be built; one of the call of `paceline.Task` names it as the user writes it."""
    call = "SupervisedTask.__init__()"
    if found := re.match(rf"{re.escape(call)} got an unexpected keyword argument '(\w+)'", str(error.__cause__)):
        wrong = unknown_name("argument of paceline.Task", found[1], inspect.signature(SupervisedTask).parameters)
        return UserError(f"task '{text}': {wrong}")
    return UserError(str(error).replace(call, "paceline.Task(...)"))


def identity_of(task: SupervisedTask) -> dict[str, Any]:
    """What every process of a run must agree on, checked when a worker joins."""
    inputs, targets = task.train
    layout = zlib.crc32(repr(task.layout.to_rows()).encode())
    check = _checksum(tensors_of(targets) or tensors_of(inputs))
    return {"layout": layout, "num_samples": num_samples(inputs), "targets": check}


def build_of(task: SupervisedTask) -> dict[str, Any]:
    """What all processes of one machine must agree on, of a task that is not bound yet.

    Beside `identity_of`, that is what another machine may round differently: the first weights and some of the inputs.
    """
    total = num_samples(task.train[0])
    rows = torch.arange(0, total, -(-total // COMPARED_INPUTS))
    inputs = tensors_of(rows_of(task.train[0], rows.to(device_of(task.train[0]))))
    return {**identity_of(task), "inputs": _checksum(inputs), "weights": weights_check(task)}


def weights_check(task: SupervisedTask) -> int:
    """A checksum of all that a model's state dict holds, the frozen weights too."""
    state = task.model.state_dict()
    return _checksum([state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)])


def _checksum(tensors: Iterable[Tensor]) -> int:
    check = 0
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        check = zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), check)
    return check


def why_builds_differ(config: RunConfig, ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Say that two processes of one machine have built different tasks, by the facts of `build_of`.

    None if these are equal, or the task is built-in.
    """
    parts = {"layout": "model", "num_samples": "number of samples", "targets": "targets", "inputs": "inputs"}
    parts |= {"weights": "first weights"}
    names = [name for name in mismatched_keys(ours, theirs) if name in parts]
    if config.task is None or not names:
        return None
    is_model = "layout" in names or names == ["weights"]
    names = names[:1] if names[0] in ("layout", "num_samples") else names  # the others follow from it
    what = f"{config.task.rpartition(':')[2]}() returns {'another model' if is_model else 'other data'}"
    differing = " and ".join(parts[name] for name in names)
    return f"{what} in each process (different {differing}): give its random generators a fixed seed"


def class_labels(targets: Any, num_samples: int, config: RunConfig) -> np.ndarray[Any, Any]:
    """Class numbers for splitting; targets that are none can still be split as `full` or `iid`."""
    if isinstance(targets, torch.Tensor) and targets.dim() == 1 and not targets.is_floating_point():
        return targets.cpu().numpy().astype(np.int64)
    if config.split in ("full", "iid"):
        return np.zeros(num_samples, np.int64)
    raise UserError(f"--split {config.split} needs class numbers as targets: this data has none, use iid or full")


def augment_of(config: RunConfig, dataset: Dataset) -> Callable[[Tensor, int], Tensor] | None:
    """The augmentation of a training batch of images, by its key; None if there is none."""
    from paceline.tasks.augmentation import Augment

    ways = ways_of(config)
    if not ways:
        return None
    size = dataset.info.image_shape[1:]
    larger = dataset.train_images.shape[2:] != size  # there are pixels around the window already
    return Augment((size[0], size[1]) if "crop" in ways else None, 0 if larger else PADDING, "mirror" in ways)


def transform_of(dataset: Dataset) -> Callable[[Tensor], Tensor] | None:
    """The transform of every batch, in training and evaluation; None for token ids."""
    from paceline.tasks.augmentation import CentreCrop
    from paceline.tasks.supervised import Normalise

    if len(dataset.info.image_shape) == 1:
        return None
    normalise = Normalise(dataset.info.mean, dataset.info.std)
    if dataset.train_images.shape[1:] == dataset.info.image_shape:
        return normalise
    return CentreCrop(dataset.info.image_shape[1:], normalise)
