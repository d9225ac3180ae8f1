"""Your own training loop on many workers: `with paceline.join() as session`, started by `paceline run -n 4 script.py`.

Started by plain `python script.py`, the same loop trains alone, with the server in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from ctypes import c_float
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.assemble import (
    make_policy,
    make_rule,
    make_schedule,
    refuse_codecs,
    refuse_newcomers,
    require_gradients,
    resolve,
)
from paceline.config import RunConfig
from paceline.core.memory import Sizes
from paceline.core.messages import Join, Push, Reply
from paceline.core.server import Server
from paceline.crew import class_labels, seed_generators
from paceline.data.batches import Batches
from paceline.delays import parse_delays
from paceline.division import divide_work
from paceline.errors import Diverged, RunFailed, UserError
from paceline.models.dropout import address_dropout, mix64
from paceline.runtimes.timekeeping import Stopwatch
from paceline.tasks.flat import FlatModule
from paceline.transports.shared_memory import Slot, Timing, WorkerDoor


class Door(Protocol):
    """A worker's way to the server."""

    def hello(self, join: Join, slot: Slot, facts: dict[str, Any]) -> Reply | None: ...

    def exchange(self, push: Push, timing: Timing) -> Reply | None: ...

    def report(self, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Inherited:
    """What `paceline run` gave this process: its config, its number, its door."""

    config: RunConfig
    worker: int
    incarnation: int
    door: WorkerDoor


inherited: Inherited | None = None


class OwnServer:
    """The server in the same process, for a script that was started alone."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._server: Server | None = None
        self._slot: Slot | None = None
        self.figures: dict[str, float] = {}

    def start(self, flat: FlatModule, slot: Slot, budget: Any) -> None:
        """Take the model's weights as they are."""
        rule = make_rule(self._config, flat.layout)
        policy, schedule = make_policy(self._config), make_schedule(self._config)
        self._server = Server(slot.weights.clone(), rule, policy, budget, schedule, 1)
        self._slot = slot

    def hello(self, join: Join, slot: Slot, facts: dict[str, Any]) -> Reply | None:
        return self._handle(join)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        return self._handle(push)

    def _handle(self, message: Join | Push) -> Reply | None:
        assert self._server is not None and self._slot is not None, "start() comes first"
        outcome = self._server.handle(message)
        if self._server.divergence is not None:
            raise Diverged(f"training diverged at update {self._server.version}: a gradient holds a NaN or infinity")
        self._server.weights_for(message.worker, self._slot.weights)
        return outcome.replies[0]

    def report(self, figures: dict[str, float]) -> None:
        self.figures |= figures

    def close(self) -> None:
        pass


class Session:
    """One worker's share of a run, driven by the user's own loop."""

    def __init__(self, config: RunConfig, worker: int, incarnation: int, door: Door) -> None:
        self.config, self.worker = config, worker
        self.num_workers = config.workers or 1
        self.over = False
        self.stepped = True
        self._incarnation, self._door = incarnation, door
        self._flat: FlatModule | None = None
        self._slot: Slot | None = None
        self._reply: Reply | None = None
        self._samples = 0
        self._delays = parse_delays(config.delay or [], self.num_workers)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.close()

    def prepare(
        self, model: nn.Module, dataset: Dataset[Any] | tuple[Tensor, Tensor], batch_size: int = 32
    ) -> tuple[nn.Module, AddressedBatches]:
        """Bind the model to memory the server shares, and deal this worker its batches of `dataset`.

        All workers start from worker 0's weights. Returns the model and an iterable that ends when training is over.
        """
        if self._flat is not None:
            raise UserError("session.prepare(...) was called twice: a session trains one model")
        data = TensorDataset(*dataset) if isinstance(dataset, tuple) else dataset
        labels = class_labels(_targets(data), len(data), self.config)  # type: ignore[arg-type]
        config = RunConfig(**{**self.config.__dict__, "batch_size": batch_size})
        work = divide_work(labels, config)
        flat = FlatModule(model)
        slot = Slot.create(Sizes(flat.layout.size, flat.state_size))
        slot.weights.copy_(flat.initial())
        flat.bind(slot.weights, slot.update, slot.state)
        if isinstance(self._door, OwnServer):
            self._door.start(flat, slot, work.budget)
        join = Join(self.worker, self._incarnation, work.quotas[self.worker], torch.get_num_threads())
        facts = {
            "layout": flat.layout.to_rows(),
            "state_layout": flat.state_layout.to_rows(),
            "num_samples": len(work.train),
            "shard_samples": len(work.shards[self.worker]),
            "batch_size": batch_size,
        }
        self._flat, self._slot = flat, slot
        self._take(self._door.hello(join, slot, facts))
        self._stopwatch = Stopwatch()
        flat.clear()
        return model, AddressedBatches(self, data, work.batches(self.worker, config))

    def step(self, loss: float | Tensor = float("nan")) -> None:
        """Push the gradients of the last backward and take the next weights; `loss` is only shown.

        Survives `zero_grad()`: gradients are copied from wherever they are. They are cleared afterwards.
        """
        if self._flat is None or self._slot is None or self._reply is None:
            raise UserError("session.step() before session.prepare(model, dataset): there is nothing to push")
        if self.stepped:
            raise UserError("session.step() was called twice for one batch, or before the first: call it once for each")
        if self.over:
            raise UserError("session.step() after training was over: leave the loop when the batches end")
        self._flat.collect()
        value = c_float(float(loss.detach() if isinstance(loss, Tensor) else loss)).value
        delay = self._delays.get(self.worker)
        serial = self._reply.serial
        if delay is not None:
            time.sleep(delay.seconds(self.config.seed, self.worker, serial))
        push = Push(
            self.worker,
            self._incarnation,
            serial,
            serial,
            self._samples,
            value,
            self._slot.update,
            self._slot.state,
        )
        self.stepped = True
        self._take(self._door.exchange(push, self._stopwatch.step()))
        self._stopwatch.replied()
        self._flat.clear()

    def report(self, **figures: float) -> None:
        """Figures you measured (an accuracy, say), for the run's result."""
        self._door.report({name: float(value) for name, value in figures.items()})

    def _take(self, reply: Reply | None) -> None:
        if reply is None:
            raise RunFailed("the server of this run is gone")
        self._reply = reply
        self.over = reply.over

    def next_batch(self, samples: int, model_key: int) -> None:
        """The batch about to be computed: how many samples it has, and the key all its randomness comes from."""
        self._samples, self.stepped = samples, False
        seed_generators(model_key)
        assert self._flat is not None
        address_dropout(self._flat.module, model_key)

    @property
    def batch_number(self) -> int:
        """The number of the batch this worker is to compute next."""
        assert self._reply is not None
        return self._reply.batch


class AddressedBatches:
    """This worker's batches, dealt by number until training is over; whole tensors are indexed, no per-item Python."""

    def __init__(self, session: Session, dataset: Any, batches: Batches) -> None:
        self._session, self._dataset, self._batches = session, dataset, batches

    def __len__(self) -> int:
        """Batches in one pass over this worker's data."""
        return self._batches.per_epoch

    def __iter__(self) -> Iterator[Any]:
        while not self._session.over:
            number = self._session.batch_number
            indices = self._batches.indices(number)
            key = mix64(self._session.config.seed, self._session.worker, number)
            self._session.next_batch(len(indices), key)
            yield self._fetch(indices)
            if not self._session.stepped:
                raise UserError("a batch was taken but session.step() was not called: call it once for every batch")

    def _fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        if isinstance(self._dataset, TensorDataset):
            rows = torch.from_numpy(indices)
            return [tensor.index_select(0, rows) for tensor in self._dataset.tensors]
        return default_collate([self._dataset[int(index)] for index in indices])


def _targets(dataset: Any) -> Any:
    """Class numbers of a data set, where it shows them."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return dataset.tensors[1]
    targets = getattr(dataset, "targets", None)
    return torch.as_tensor(targets) if isinstance(targets, list | np.ndarray) else targets


def join(config: RunConfig | None = None) -> Session:
    """This process as a worker of the run that `paceline run` started; alone, a run of one with `config`'s settings."""
    if inherited is not None:
        return Session(inherited.config, inherited.worker, inherited.incarnation, inherited.door)
    alone = resolve(config if config is not None else RunConfig(strategy="classic", task="script"))
    require_gradients(alone)
    refuse_codecs(alone)
    refuse_newcomers(alone)
    if alone.workers != 1:
        raise UserError(f"this script was started alone, for {alone.workers} workers: 'paceline run -n N script.py'")
    return Session(alone, 0, 0, OwnServer(alone))
