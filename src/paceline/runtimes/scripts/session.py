"""A user's own training loop: `with paceline.join() as session`, on many workers (`paceline run`) or alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.assembly.task import seed_generators
from paceline.config import SCRIPT, SCRIPT_MAY_DECIDE, RunConfig, given
from paceline.core.messages import Join, Push, Reply, SetLrFactor, loss_of_push
from paceline.errors import RunFailed, UserError
from paceline.models.dropout import address_dropout
from paceline.randomness import mix64
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts import adopt
from paceline.runtimes.scripts.bound_model import BoundModel
from paceline.runtimes.scripts.optimizer import AdoptedOptimizer, decay_of, settings_of
from paceline.runtimes.scripts.sampler import AddressedBatches, LoopShare, share_data
from paceline.runtimes.scripts.standalone import InProcessClient
from paceline.runtimes.worker_loop import StepTimer
from paceline.settings.resolve import require_own_loop, resolve
from paceline.settings.strategies import CLASSIC
from paceline.system.subnormals import flush_subnormals
from paceline.tasks.flat import FlatModule
from paceline.tasks.script_model import save_frozen
from paceline.transports.protocol import ScriptTransport


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


class Session:
    """One worker's share of a run, driven by the user's own loop."""

    def __init__(self, env: WorkerEnv) -> None:
        self.config, self.worker, self.num_workers = env.config, env.worker, env.config.workers or 1
        self.finished, self.stepped = False, True
        self._evaluates = self._is_final = False  # whether the model holds the weights that are evaluated, or saved
        self._incarnation, self._transport = env.incarnation, env.transport
        self._typed, self._folder = env.typed, env.folder
        self._bound: BoundModel | None = None
        self._handed: adopt.UserObjects | None = None
        self._optimizer: AdoptedOptimizer | None = None
        self._reply: Reply | None = None
        self._samples = self._parts_left = self._pass_samples = 0
        self._weight = 1.0  # of the current batch among those of its step
        self._loss: float | None = None  # of the batch; None: the script did not tell it
        self._factor = 1.0 if not env.incarnation else math.nan  # an earlier incarnation may have set another factor
        self._timer = StepTimer(env.config, env.worker)
        self._began = 0.0, 0.0  # when the step began: by the clock, and by the CPU time of this process

    def __enter__(self) -> Session:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and self._bound is not None:
                self.finish()
        finally:
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
        config = dataclasses.replace(self.config, **settings)
        work = share_data(handed, config, self.worker, accumulate)
        self.config = dataclasses.replace(config, batch_size=work.batch_size)
        self._join(handed, work, settings)
        loader = AddressedBatches(self, handed, work.batches, epochs is not None, accumulate)
        if handed.optimizer is not None:
            self._optimizer = AdoptedOptimizer(handed.optimizer, model, begun=self.step_number > 0)
            self._optimizer.take_over(self._step_of_optimizer)
        return model, *(thing if isinstance(thing, (Optimizer, *adopt.SCHEDULES)) else loader for thing in things)

    def _settings(self, handed: adopt.UserObjects, epochs: float | None, accumulate: int) -> dict[str, Any]:
        """Return the settings that the script decides. Raise UserError if they do not fit."""
        if handed.order is not None and epochs is None:
            passes = "say how many passes your loop makes over it, as in epochs=10; workers share them"
            raise UserError(f"session.prepare(..., loader): {passes}")
        if accumulate < 1 or (epochs is not None and not epochs > 0):
            raise UserError(f"session.prepare(..., epochs={epochs}, accumulate={accumulate}): give positive numbers")
        settings: dict[str, Any] = settings_of(handed.optimizer) if handed.optimizer is not None else {}
        if epochs is not None:
            settings |= {"epochs": float(epochs), "epoch_mode": "own"}
        adopt.require_agreement(settings, self.config, self._typed)
        return settings

    def _join(self, handed: adopt.UserObjects, work: LoopShare, settings: dict[str, Any]) -> None:
        """Bind the model and join the run."""
        if handed.optimizer is not None:
            decays, trained = decay_of(handed.optimizer), handed.parameters
            flat = FlatModule(handed.model, decays, lambda parameter: id(parameter) in trained)
        else:
            flat = FlatModule(handed.model)
        bound = self._bound = BoundModel(flat, next(handed.model.parameters()).device)
        if isinstance(self._transport, InProcessClient):
            self._transport.start(self.config, flat.layout, bound.slot, work.budget(self.config), work.skew)
        elif self._folder is not None:
            self._keep_frozen(flat, RunFolder(self._folder))
        self._pass_samples = work.batches.per_epoch * work.batch_size
        sources = flat.sources()
        own_names = {part.name: part.name for part in (*flat.layout.parameters, *flat.state_layout.parameters)}
        facts = {
            "layout": flat.layout.to_rows(),
            "state_layout": flat.state_layout.to_rows(),
            "num_samples": work.epoch_samples,
            "quota_samples": work.quota_samples,
            "order": work.order,
            "skew": work.skew,
            "batch_size": self.config.batch_size,
            "max_samples": work.max_samples,
            "settings": settings,
            "sources": None if sources == own_names else sources,
        }
        join = Join(self.worker, self._incarnation, work.quota, torch.get_num_threads(), own_loop=True)
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
        value = float(loss.detach()) * self._weight
        self._loss = value if self._loss is None else self._loss + value
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, loss: float | Tensor | None = None, weight: float | Tensor | None = None) -> None:
        """Push the gradients of the last backward and load the next weights. `loss` is shown; a NaN ends the run.

        `weight` is how many items your mean loss counts (tokens, say), if these are not the samples of the batch: the
        mean over the workers of a round is weighted by it.

        Works with `zero_grad()`, which replaces gradients. Gradients are cleared afterwards.
        """
        bound, reply = self._require_bound("step"), self._reply
        assert reply is not None, "a bound model has joined"
        self._require_batch()
        if loss is not None:
            self._loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        weight = None if weight is None else float(weight)
        if weight is not None and not 0.0 < weight < math.inf:
            raise UserError(f"session.step(loss, weight={weight:g}): give how many items the mean loss counts, above 0")
        bound.require_unchanged()
        if self._optimizer is not None:
            self._optimizer.require_same()
        bound.collect()
        self._send_rate()
        seq, slot, loss = reply.serial, bound.slot, loss_of_push(self._loss)
        named = (self.worker, self._incarnation, seq, reply.serial)
        push = Push(*named, self._samples, loss, slot.update, slot.state, weight)
        self.stepped, self._loss, bound.inputs.records = True, None, False
        self._take(self._transport.exchange(push, self._timer.end(*self._began, seq, reply.steps)))
        self._began = time.perf_counter(), time.process_time()
        bound.renew()

    def _require_bound(self, call: str) -> BoundModel:
        if self._bound is None:
            raise UserError(f"session.{call}() before session.prepare(model, dataset): there is no model yet")
        return self._bound

    @contextmanager
    def eval_weights(self) -> Iterator[nn.Module]:
        """Inside, the model holds the weights that would be scored and saved now, with their running statistics.

        They are averaged if the run averages. The statistics are estimated from this worker's newest batches.
        Afterwards the model has its training weights, buffers and modes back.
        """
        bound = self._require_bound("eval_weights")
        if self._evaluates or self._is_final:
            yield bound.flat.module
            return
        paused, recorded = (time.perf_counter(), time.process_time()), bound.inputs.records
        with bound.restored():
            self._evaluates, bound.inputs.records = True, False
            try:
                self._read(bound, final=False)
                yield bound.flat.module
            finally:
                self._evaluates, bound.inputs.records = False, recorded
        wall, cpu = time.perf_counter() - paused[0], time.process_time() - paused[1]
        self._began = self._began[0] + wall, self._began[1] + cpu  # an evaluation is no part of the step

    def finish(self) -> None:
        """End this worker's training. Afterwards the model holds the final weights and statistics, as they are saved.

        It waits for the other workers. Leaving the session's `with` block calls it, unless there was an error.
        """
        bound = self._require_bound("finish")
        if self._is_final:
            return
        if self._evaluates:
            raise UserError("session.finish() inside session.eval_weights(): call it after that block")
        bound.inputs.records = False
        is_estimate = self._read(bound, final=True)
        if bound.flat.state_size:
            bound.send_state()
            if not self._transport.merge_statistics(self._pass_samples if is_estimate else 0):
                raise RunFailed("the server of this run is gone")
            bound.load_state()
        self.finished = self._is_final = True

    def _read(self, bound: BoundModel, final: bool) -> bool:
        """Load the weights that are evaluated; return whether the statistics in the model belong to them.

        One worker's live weights have those of the training, as in plain torch; for others they are estimated.
        """
        averaged = self._transport.read_weights(final)
        if averaged is None:
            raise RunFailed("the server of this run is gone")
        bound.load_weights()
        is_own = not averaged and self.num_workers == 1 and not self._incarnation
        return is_own or bound.inputs.estimate()

    def _require_batch(self) -> None:
        """Raise UserError unless this is the only step for the current batch, and all its parts were taken."""
        if self._evaluates:
            raise UserError("a step inside session.eval_weights(): these weights are not trained; step after the block")
        if self.finished:
            raise UserError("a step after training was over: leave the loop when the batches end")
        if self.stepped:
            what = "session.step() was called twice for one batch, or before the first"
            raise UserError(f"{what}: call it once for each batch of the loader that session.prepare(...) returned")
        if self._parts_left:
            raise UserError(f"a step {self._parts_left} batches too early: session.prepare(..., accumulate=N) said N")

    def _step_of_optimizer(self, loss: Any) -> None:
        self.step(loss if isinstance(loss, Tensor | float) else None)

    def _send_rate(self) -> None:
        """Send the learning rate if this worker's schedule changed it."""
        if self._optimizer is None:
            return
        factor = self._optimizer.lr / (self.config.lr or 1.0)
        if factor != self._factor:
            self._factor = factor
            self._transport.set_rate(SetLrFactor(self.worker, factor))

    def report(self, **figures: float) -> None:
        """Record metrics you measured (an accuracy, say) in the run's result. `--target` can refer to them."""
        for name, value in figures.items():
            if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise UserError(f"session.report({name}={value!r}): give a number, or a tensor of one element")
        self._transport.report({name: float(value) for name, value in figures.items()})

    def _take(self, reply: Reply | None) -> None:
        if reply is None:
            raise RunFailed("the server of this run is gone")
        self._reply = reply
        self.finished = reply.finished

    def next_batch(self, number: int, samples: int, parts: int) -> None:
        """Begin a batch of `samples` samples in `parts` parts: seed all randomness by its number."""
        self._samples, self._parts_left, self.stepped = samples, parts, False
        self._require_bound("next_batch").inputs.records = True
        key = mix64(self.config.seed, self.worker, number)
        seed_generators(key)
        assert self._handed is not None
        address_dropout(self._handed.model, key)

    def next_part(self, weight: float) -> None:
        """Count a part of the batch as taken. Its gradient counts `weight` times."""
        self._parts_left -= 1
        self._weight = weight

    @property
    def batch_number(self) -> int:
        """The number of the batch that this worker computes next."""
        assert self._reply is not None
        return self._reply.batch

    @property
    def step_number(self) -> int:
        """The steps of this worker's loop so far. A push that was dropped is one too; its batch comes again."""
        assert self._reply is not None
        return self._reply.batch + self._reply.dropped


def join(config: RunConfig | None = None) -> Session:
    """Join the run that `paceline run` started. Without one, start a run of one worker with `config`'s settings."""
    if inherited is not None:
        return Session(inherited)
    flush_subnormals()
    config = config if config is not None else RunConfig(strategy=CLASSIC)
    typed = frozenset(given(config, SCRIPT_MAY_DECIDE))
    alone = resolve(dataclasses.replace(config, task=config.task or SCRIPT))
    require_own_loop(alone)
    if alone.workers != 1:
        raise UserError(f"this script was started alone, for {alone.workers} workers: 'paceline run -n N script.py'")
    return Session(WorkerEnv(alone, 0, 0, InProcessClient(), typed))
