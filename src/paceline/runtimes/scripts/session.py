"""A user's own training loop: `with paceline.join() as session`, on many workers (`paceline run`) or alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.assembly.task import class_labels, seed_generators
from paceline.assembly.work import WorkAssignment, divide_work
from paceline.config import SCRIPT_MAY_DECIDE, RunConfig, given
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Join, Push, Reply, SetLrFactor, loss_of_push
from paceline.errors import RunFailed, UserError
from paceline.models.dropout import address_dropout
from paceline.randomness import mix64
from paceline.runs.folder import SCRIPT, RunFolder, write_atomically
from paceline.runtimes.scripts import adopt
from paceline.runtimes.scripts.sampler import AddressedBatches, targets_of
from paceline.runtimes.scripts.standalone import InProcessClient
from paceline.runtimes.worker_loop import StepTimer
from paceline.settings.resolve import require_own_loop, resolve
from paceline.settings.strategies import CLASSIC
from paceline.tasks.flat import FlatModule
from paceline.tasks.nested import num_samples
from paceline.tasks.script_model import save_frozen
from paceline.transports.protocol import ScriptTransport
from paceline.transports.shared_memory import SharedBuffers


@dataclass(frozen=True)
class WorkerEnv:
    """What `paceline run` gave this process: its config, its number, its transport, and the run folder."""

    config: RunConfig
    worker: int
    incarnation: int
    transport: ScriptTransport
    typed: frozenset[str] = frozenset()
    folder: Path | None = None


inherited: WorkerEnv | None = None


class BoundModel:
    """A model bound to shared buffers, or to a copy of them on the GPU if the model is there."""

    def __init__(self, flat: FlatModule, device: torch.device) -> None:
        self.flat = flat
        self.slot = SharedBuffers.create(BufferSizes(flat.layout.size, flat.state_size))
        self.slot.weights.copy_(flat.initial())
        shared = self.slot.weights, self.slot.update, self.slot.state
        self._own = shared if device.type == "cpu" else tuple(tensor.to(device, copy=True) for tensor in shared)
        flat.bind(*self._own)

    def collect(self) -> None:
        """After backward: copy gradient and running statistics to where the server reads them."""
        self.flat.collect()
        if self._own[0] is not self.slot.weights:
            self.slot.update.copy_(self._own[1])
            self.slot.state.copy_(self._own[2])

    def renew(self) -> None:
        """After a reply: compute on the weights that the server wrote."""
        if self._own[0] is not self.slot.weights:
            self._own[0].copy_(self.slot.weights)
        self.flat.clear()


class Session:
    """One worker's share of a run, driven by the user's own loop."""

    def __init__(self, env: WorkerEnv) -> None:
        self.config, self.worker, self.num_workers = env.config, env.worker, env.config.workers or 1
        self.finished, self.stepped = False, True
        self._incarnation, self._transport = env.incarnation, env.transport
        self._typed, self._folder = env.typed, env.folder
        self._bound: BoundModel | None = None
        self._handed: adopt.UserObjects | None = None
        self._reply: Reply | None = None
        self._samples = self._parts_left = 0
        self._loss: float | None = None  # of the batch; None: the script did not tell it
        self._factor = 1.0 if not env.incarnation else math.nan  # an earlier incarnation may have set another factor
        self._timer = StepTimer(env.config, env.worker)
        self._began = 0.0, 0.0  # when the step began: by the clock, and by the CPU time of this process

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._transport.close()

    def prepare(
        self,
        model: nn.Module,
        *things: Any,
        batch_size: int | None = None,
        epochs: float | None = None,
        accumulate: int = 1,
    ) -> tuple[Any, ...]:
        """Bind the model to memory shared with the server, and give this worker its batches.

        `things` are the data (a data set, tensors, or your loader) and, optionally, your optimizer and its schedule.
        The optimizer's settings become the run's, and its `step()` pushes. They come back in the same order, the data
        as an iterable of batches that ends when training is over. With `epochs`, which a loader needs, each pass over
        it is one epoch. `accumulate` batches make one step. All workers start from worker 0's weights.
        """
        if self._bound is not None:
            raise UserError("session.prepare(...) was called twice: a session trains one model")
        handed = self._handed = adopt.sort_out(model, things, batch_size)
        settings = self._settings(handed, epochs, accumulate)
        self.config = dataclasses.replace(self.config, batch_size=handed.batch_size * accumulate, **settings)
        length = num_samples(handed.data) if isinstance(handed.data, Mapping) else len(handed.data)
        work = divide_work(class_labels(targets_of(handed.data), length, self.config), self.config)
        self._join(handed, work, settings)
        batches = work.batches(self.worker, self.config)
        loader = AddressedBatches(self, handed.data, batches, handed.collate, epochs is not None, accumulate)
        if handed.optimizer is not None:
            adopt.take_over(handed.optimizer, self._step_of_optimizer, begun=self.batch_number > 0)
        return model, *(thing if isinstance(thing, (Optimizer, *adopt.SCHEDULES)) else loader for thing in things)

    def _settings(self, handed: adopt.UserObjects, epochs: float | None, accumulate: int) -> dict[str, Any]:
        """Return the settings that the script decides. Raise UserError if they do not fit."""
        if handed.loops and epochs is None:
            passes = "say how many passes your loop makes over it, as in epochs=10; workers share them"
            raise UserError(f"session.prepare(..., loader): {passes}")
        if accumulate < 1 or (epochs is not None and not epochs > 0):
            raise UserError(f"session.prepare(..., epochs={epochs}, accumulate={accumulate}): give positive numbers")
        settings: dict[str, Any] = adopt.settings_of(handed.optimizer) if handed.optimizer is not None else {}
        if epochs is not None:
            settings |= {"epochs": float(epochs), "epoch_mode": "own"}
        adopt.require_agreement(settings, self.config, self._typed)
        return settings

    def _join(self, handed: adopt.UserObjects, work: WorkAssignment, settings: dict[str, Any]) -> None:
        """Bind the model and join the run."""
        if handed.optimizer is not None:
            decays = adopt.decay_of(handed.optimizer)
            flat = FlatModule(handed.model, decays, lambda parameter: id(parameter) in handed.parameters)
        else:
            flat = FlatModule(handed.model)
        bound = self._bound = BoundModel(flat, next(handed.model.parameters()).device)
        if isinstance(self._transport, InProcessClient):
            self._transport.start(self.config, flat.layout, bound.slot, work.budget)
        elif self._folder is not None:
            self._keep_frozen(flat, RunFolder(self._folder))
        sources = flat.sources()
        own_names = {part.name: part.name for part in (*flat.layout.parameters, *flat.state_layout.parameters)}
        facts = {
            "layout": flat.layout.to_rows(),
            "state_layout": flat.state_layout.to_rows(),
            "num_samples": len(work.train),
            "shard_samples": len(work.shards[self.worker]),
            "batch_size": self.config.batch_size,
            "settings": settings,
            "sources": None if sources == own_names else sources,
        }
        join = Join(self.worker, self._incarnation, work.quotas[self.worker], torch.get_num_threads())
        self._take(self._transport.hello(join, bound.slot, facts))
        self._timer.restart()
        self._began = time.perf_counter(), time.process_time()
        bound.renew()

    @staticmethod
    def _keep_frozen(flat: FlatModule, folder: RunFolder) -> None:
        """Save the tensors that no push brings: they belong to the saved weights too."""
        kept = save_frozen(flat) if not folder.frozen_file.exists() else None
        if kept is not None:
            write_atomically(folder.frozen_file, kept)

    def backward(self, loss: Tensor) -> None:
        """Call `loss.backward()`, and show the loss in the run's progress."""
        value = float(loss.detach())
        self._loss = value if self._loss is None else self._loss + value
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, loss: float | Tensor | None = None) -> None:
        """Push the gradients of the last backward and load the next weights. `loss` is shown; a NaN ends the run.

        Works with `zero_grad()`, which replaces gradients. Gradients are cleared afterwards.
        """
        bound, reply = self._bound, self._reply
        if bound is None or reply is None:
            raise UserError("session.step() before session.prepare(model, dataset): there is nothing to push")
        self._require_batch()
        if loss is not None:
            self._loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        bound.collect()
        self._send_rate()
        seq, slot, loss = reply.serial, bound.slot, loss_of_push(self._loss)
        push = Push(self.worker, self._incarnation, seq, reply.serial, self._samples, loss, slot.update, slot.state)
        self.stepped, self._loss = True, None
        self._take(self._transport.exchange(push, self._timer.end(*self._began, seq, reply.steps)))
        self._began = time.perf_counter(), time.process_time()
        bound.renew()

    def _require_batch(self) -> None:
        """Raise UserError unless this is the only step for the current batch, and all its parts were taken."""
        if self.stepped:
            what = "session.step() was called twice for one batch, or before the first"
            raise UserError(f"{what}: call it once for each batch of the loader that session.prepare(...) returned")
        if self.finished:
            raise UserError("session.step() after training was over: leave the loop when the batches end")
        if self._parts_left:
            raise UserError(f"a step {self._parts_left} batches too early: session.prepare(..., accumulate=N) said N")

    def _step_of_optimizer(self, loss: Any) -> None:
        self.step(loss if isinstance(loss, Tensor | float) else None)

    def _send_rate(self) -> None:
        """Send the learning rate if the script's schedule changed it. Worker 0's schedule counts for all."""
        optimizer = self._handed.optimizer if self._handed is not None else None
        if optimizer is None or self.worker != 0:
            return
        factor = adopt.lr_of(optimizer) / (self.config.lr or 1.0)
        if factor != self._factor:
            self._factor = factor
            self._transport.set_rate(SetLrFactor(self.worker, factor))

    def report(self, **figures: float) -> None:
        """Record metrics you measured (an accuracy, say) in the run's result. `--target` can refer to them."""
        self._transport.report({name: float(value) for name, value in figures.items()})

    def _take(self, reply: Reply | None) -> None:
        if reply is None:
            raise RunFailed("the server of this run is gone")
        self._reply = reply
        self.finished = reply.finished

    def next_batch(self, number: int, samples: int, parts: int) -> None:
        """Begin a batch of `samples` samples in `parts` parts: seed all randomness by its number."""
        self._samples, self._parts_left, self.stepped = samples, parts, False
        key = mix64(self.config.seed, self.worker, number)
        seed_generators(key)
        assert self._handed is not None
        address_dropout(self._handed.model, key)

    def next_part(self) -> None:
        """Count a part of the batch as taken."""
        self._parts_left -= 1

    @property
    def batch_number(self) -> int:
        """The number of the batch that this worker computes next."""
        assert self._reply is not None
        return self._reply.batch


def join(config: RunConfig | None = None) -> Session:
    """Join the run that `paceline run` started. Without one, start a run of one worker with `config`'s settings."""
    if inherited is not None:
        return Session(inherited)
    config = config if config is not None else RunConfig(strategy=CLASSIC)
    typed = frozenset(given(config, SCRIPT_MAY_DECIDE))
    alone = resolve(dataclasses.replace(config, task=config.task or SCRIPT))
    require_own_loop(alone)
    if alone.workers != 1:
        raise UserError(f"this script was started alone, for {alone.workers} workers: 'paceline run -n N script.py'")
    return Session(WorkerEnv(alone, 0, 0, InProcessClient(), typed))
