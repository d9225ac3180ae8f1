"""A user's own training loop: `session = paceline.join()`, on many workers (`paceline run`) or alone."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.config import SCRIPT, RunConfig, given
from paceline.errors import UserError
from paceline.models.dropout import AddressedDropout
from paceline.runtimes.scripts import adopt
from paceline.runtimes.scripts.loading.divisions import Divisions, part_of, require_one_loader
from paceline.runtimes.scripts.loading.epochs import Epochs
from paceline.runtimes.scripts.loading.facts import told
from paceline.runtimes.scripts.loading.generators import StepSeeds
from paceline.runtimes.scripts.loading.loader import WorkerLoader, share
from paceline.runtimes.scripts.local_loop import LocalLoop
from paceline.runtimes.scripts.optimizer import settings_of
from paceline.runtimes.scripts.served_loop import ServedLoop, WorkerEnv
from paceline.runtimes.scripts.standalone import InProcessClient
from paceline.runtimes.scripts.step_samples import StepSamples
from paceline.runtimes.scripts.watching.notes import FirstGradients, note_end, note_first_step, note_unfinished
from paceline.settings.features import SCRIPT_MAY_DECIDE
from paceline.settings.ranks import require_alone
from paceline.settings.resolve import resolve_own_loop
from paceline.settings.strategies import CLASSIC, strategy_of
from paceline.system.subnormals import flush_subnormals

OVER = "training is over, so loops over the loader have no batch: `for epoch in session.epochs(N)` ends with it"
MOST_EMPTY_PASSES = 1000
"""Passes without a batch after the end of training, as of a loop over epochs, before a loop counts as endless."""


class TrainingOver(SystemExit):
    """Ends a script that makes steps after its run is over. It is no error: the exit code is 0."""


inherited: WorkerEnv | None = None
joined: Session | None = None
"""What `paceline run` gave this process, and the session that the script made of it."""


class Session:
    """One worker's share of a run, driven by the user's own loop.

    Alone, without a run and without settings of its own, it leaves model, optimizer and loaders as they are.
    """

    def __init__(self, env: WorkerEnv, is_plain: bool = False) -> None:
        self.config, self.worker = env.config, env.worker
        self._divisions = Divisions(env.config, env.worker)
        self.finished = False
        self._env, self._is_plain = env, is_plain
        self.is_of_library = False  # whether a library's loop drives it, which has no use for `epochs`
        self._loaders: list[Any] = []  # that `prepare` returned
        self._handed: adopt.UserObjects | None = None
        self._loop: ServedLoop | None = None
        self._has_length = False  # whether `prepare` was told when training ends
        self._steps_left: int | None = None  # of a plain loop with `steps=N`
        self._iteration = self._ignored = self._empty_passes = self._num_loaders = 0
        self._samples, self._first_gradients = StepSamples(), FirstGradients()
        self._is_asked_for_steps = False  # whether the script reads `iteration`
        self._evaluates = self._is_final = False  # whether the model holds the weights that are evaluated, or saved
        self._loss: float | None = None  # of the step; None: the script did not tell it
        self._seeds = StepSeeds(env.config.seed, env.worker)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if (error is None or error is TrainingOver) and self._handed is not None:
                self.finish()
        finally:
            self._env.transport.close()

    @property
    def num_workers(self) -> int:
        """The number of workers; with `--max-workers`, of those that share the data by what this worker has heard."""
        return self._divisions.newest.parts

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0: the one that prints, evaluates and saves if one is enough."""
        return self.worker == 0

    @property
    def is_final(self) -> bool:
        """Whether the model holds the final weights: under `no_grad`, loaders give whole passes again."""
        return self._is_final

    @property
    def iteration(self) -> int:
        """The steps of this worker's loop so far, with those of a predecessor that was killed."""
        self._is_asked_for_steps = True
        return self._made

    @property
    def skips_passes(self) -> bool:
        """Whether the loop runs through passes without a batch, which this worker finished before its restart."""
        return self._loop is not None and self._loop.places.skips_passes()

    @property
    def _made(self) -> int:
        return self._loop.step_number if self._loop is not None else self._iteration

    def prepare(
        self, *things: Any, batch_size: int | None = None, epochs: float | None = None, steps: int | None = None
    ) -> Any:
        """Share the training of a model between the workers. Everything comes back in the same order.

        `things` are the model (or several), its optimizer, its scheduler, and what it is trained on: a `DataLoader`, a
        data set, tensors; or none if your loop draws its own batches. `optimizer.step()` then pushes the gradients and
        loads the next weights. Each loop over a loader is one pass over this worker's share. Training ends with your
        loop, or after `epochs` over the data, or after `steps` optimizer steps of all workers together.
        """
        if self._handed is not None:
            raise UserError("session.prepare(...) was called twice: give all models, optimizers and loaders at once")
        adopt.require_numbers(epochs, steps=steps, batch_size=batch_size)
        handed = self._handed = adopt.sort_out(things)
        self._has_length = steps is not None or epochs is not None
        self._seeds.dropouts = [part for part in handed.container.modules() if isinstance(part, AddressedDropout)]
        back = self._prepare_plain(handed, batch_size, epochs, steps)
        if back is None:
            back = self._prepare_served(handed, batch_size, epochs, steps)
        self._loaders = back
        if any(map(adopt.is_of_accelerate, things)):
            adopt.number_process(self.worker)
        returned = adopt.returned(things, handed.data, iter(back))
        return returned if len(returned) > 1 else returned[0]

    def share(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return this worker's share of a loader before the model is known. Give that to `prepare`, with the model."""
        return loader if self._is_plain else self._share(loader, None, None)

    def _prepare_plain(
        self, handed: adopt.UserObjects, batch_size: int | None, epochs: float | None, steps: int | None
    ) -> list[Any] | None:
        """Leave everything as it is, and only count the steps; None if this loop needs a server."""
        per_pass = [epochs is not None or isinstance(one, DataLoader) for one in handed.data]
        is_endless = not all(per_pass) and steps is None  # only a server counts the run's epochs
        if not self._is_plain or not handed.optimizers or is_endless:
            return None
        shared = [
            one if isinstance(one, DataLoader) and steps is None else self._share(one, batch_size, in_passes)
            for one, in_passes in zip(handed.data, per_pass, strict=True)
        ]
        self._steps_left = steps
        handed.optimizers[0].register_step_post_hook(lambda *_: self._count_step())
        return shared

    def _count_step(self) -> None:
        self._iteration += 1
        self._seeds.seed_generators(self._made)
        if self._steps_left is not None:
            if self.finished:
                self._end_script()
            self.finished = self._iteration >= self._steps_left

    def _share(self, data: Any, batch_size: int | None, in_passes: bool | None) -> WorkerLoader:
        if isinstance(data, WorkerLoader):  # of `share`
            return data
        number, self._num_loaders = self._num_loaders, self._num_loaders + 1
        own = self.config, self._divisions
        return share(data, self, *own, number=number, batch_size=batch_size, in_passes=in_passes)

    def _prepare_served(
        self, handed: adopt.UserObjects, batch_size: int | None, epochs: float | None, steps: int | None
    ) -> list[WorkerLoader]:
        env, settings = self._env, settings_of(handed.optimizers[0]) if handed.optimizers else {}
        settings |= {"epochs": float(epochs)} if epochs is not None else {}
        adopt.require_agreement(settings, self.config, env.typed)
        self.config = dataclasses.replace(self.config, **settings)
        adopt.require_data(self.config, env.typed, steps, len(handed.data))
        is_local = strategy_of(self.config).is_local
        require_one_loader(self.config, len(handed.data), 1 if is_local else len(handed.optimizers))
        loaders = [self._share(one, batch_size, True if epochs is not None else None) for one in handed.data]
        known = loaders[0].facts if loaders else None
        is_bare = bool(loaders) and not isinstance(handed.data[0], DataLoader)
        self.config = dataclasses.replace(self.config, batch_size=known.batch_size if known is not None else 1)
        in_epochs = bool(epochs) or "epochs" in env.typed or (is_bare and not steps)
        length = {"steps": steps, "epochs": self.config.epochs if in_epochs else None}
        facts = {**told(known), "settings": settings, "names": handed.names(), **length}
        loop = self._loop = (LocalLoop if is_local else ServedLoop)(env, self.config, handed, loaders, self._divisions)
        self._samples = StepSamples(max(1, len(handed.optimizers)))
        self.finished = loop.join(facts, self._step_of_optimizer).finished
        self._seeds.begin_step(self._made)
        if self.is_main and not self.is_of_library:
            loop.places.tell_empty_passes()
        loop.bound.record_inputs(True)
        return loaders

    def epochs(self, num: int) -> Epochs:
        """Return the epochs of `num` that this worker has left: `for epoch in session.epochs(12)`.

        Alone it is `range(num)`. In a resumed run, or a worker that starts again, it begins with the first pass over
        the prepared loader that is not finished. It ends when training is over. Each epoch makes one pass.
        """
        self._require_prepared("epochs")
        has_schedules = self._handed is not None and bool(self._handed.schedulers)
        return Epochs(num, self._loaders, lambda: self.finished, with_end=not has_schedules)

    def split(self, data: Any) -> Any:
        """Return this worker's part of `data`, a run of neighbours along its first axis: tensors, arrays, lists.

        For loops that walk over their data in order. Call it before anything is derived from the data's length.
        """
        return part_of(data, self.config, self._divisions)

    def rng(self) -> torch.Generator:
        """Return a generator that is seeded before every step by the run's seed, this worker and the step."""
        return self._seeds.new_generator(self._made)

    def begin_batch(self, key: int) -> None:
        """Seed all randomness by the key of a batch."""
        self._seeds.seed(key)

    def begin_empty_pass(self) -> None:
        """Count a pass that begins after the end of training; end a loop that asks for batches without end."""
        if self._is_final:
            what = "a loop over a prepared loader after session.finish(): this worker has left the training"
            raise UserError(f"{what}; to evaluate, loop under torch.no_grad(); a second training is a run of its own")
        self._empty_passes += 1
        if self._empty_passes > MOST_EMPTY_PASSES:
            self._end_script()

    def explain_missing_batch(self) -> None:
        """The script has failed because `next(...)` found no batch: end it if training is over, else say why."""
        if self.finished:
            self._end_script()
        if self._loop is not None and self._loop.places.skips_passes():
            what = f"worker {self.worker} goes on in a later pass, and next(...) found no batch in a finished one"
            print(f"{what}: draw batches in a loop 'for batch in loader', which runs through these", file=sys.stderr)
            raise SystemExit(1)

    def explain(self, error: Exception) -> None:
        """Add to an exception of the script why its loops have had no batch, if that is so."""
        why = self._loop.places.why_empty() if self._loop is not None else None
        if (why or self._empty_passes) and not self._is_final:
            error.add_note(why or OVER)

    def backward(self, loss: Tensor) -> None:
        """Call `loss.backward()`, and show the loss in the run's progress."""
        value = float(loss.detach())
        self._loss = value if self._loss is None else self._loss + value
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, loss: float | Tensor | None = None, weight: float | Tensor | None = None) -> None:
        """Push the gradients of the last backward and load the next weights. `loss` is shown; a NaN ends the run.

        For loops that hand over no optimizer: the server steps the one that `--optimizer` names. Gradients are cleared
        afterwards. `weight` is how many items your mean loss counts (tokens, say), if these are not the samples of the
        batch: the mean over the workers of a round is weighted by it.
        """
        loop = self._require_prepared("step")
        weight = None if weight is None else float(weight)
        if weight is not None and not 0.0 < weight < math.inf:
            raise UserError(f"session.step(loss, weight={weight:g}): give how many items the mean loss counts, above 0")
        if loop is None or loop.optimizers or loop.steps_here:
            raise UserError(
                "session.step(...): the optimizer that you passed to session.prepare(...) steps: call its step()"
            )
        self._push(0, loss, weight)
        loop.bound.clear()

    def _step_of_optimizer(self, number: int, loss: Any, scale: float | None, skipped: bool) -> None:
        self._push(number, loss if isinstance(loss, Tensor | float) else None, None, scale, skipped)

    def _push(self, number: int, loss: float | Tensor | None, weight: float | None, *scaling: Any) -> None:
        loop = self._loop
        assert loop is not None
        if self._evaluates:
            raise UserError("a step inside session.eval_weights(): these weights are not trained; step after the block")
        if self._is_final:
            raise UserError("a step after session.finish(): this worker has left the training")
        if self.finished:
            self._ignored += 1
            has_data = self._handed is not None and bool(self._handed.data)
            again = (self._samples.most_steps - 1) * max(1, len(loop.optimizers))
            if self._ignored > len(loop.optimizers) + again - (not has_data):
                self._end_script()
            return
        if loss is not None:
            self._loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self._samples.draw(loop.settle_batches())
        samples, as_before = self._samples.take(number)
        weight = as_before if weight is None else weight
        if not loop.has_stepped:
            counts_alone = not (self._has_length or self._is_asked_for_steps or (self._handed and self._handed.data))
            note_first_step(self.worker, loop.step_number if counts_alone else 0, loop.ignores_loaders)
        if self.is_main:
            self._first_gradients.look(loop.bound.parameters)
        reply = loop.push(number, samples, self._loss, weight, *scaling)
        self._loss, self.finished = None, reply.finished
        if not number:
            self._seeds.begin_step(self._made)

    def _end_script(self) -> None:
        """End a loop that goes on after the training is over; a loop over a loader ends by itself."""
        if not self._is_final:
            self.finish()
        note_end(self.worker)
        raise TrainingOver(0)

    def _require_prepared(self, call: str) -> ServedLoop | None:
        if self._handed is None:
            raise UserError(f"session.{call}() before session.prepare(model, ...): there is no model yet")
        return self._loop

    @contextmanager
    def eval_weights(self) -> Iterator[nn.Module]:
        """Inside, the model holds the weights that would be scored and saved now, with their running statistics.

        They are averaged if the run averages. The statistics are estimated from this worker's newest batches.
        Afterwards the model has its training weights, buffers and modes back.
        """
        loop = self._require_prepared("eval_weights")
        assert self._handed is not None
        if loop is None or self._evaluates or self._is_final:
            yield self._handed.models[0]
            return
        paused = time.perf_counter(), time.process_time()
        loop.bound.record_inputs(False)
        with loop.bound.restored():
            self._evaluates = True
            try:
                loop.read(final=False)
                yield self._handed.models[0]
            finally:
                self._evaluates = False
        loop.bound.record_inputs(True)
        loop.pause(paused)

    def finish(self, with_optimizers: bool = False) -> None:
        """End this worker's training. Afterwards the model holds the final weights and statistics, as they are saved.

        It waits for the other workers. Leaving the session's `with` block calls it, unless there was an error.
        `with_optimizers` first brings the state of the optimizers here, so that it can be saved afterwards.
        """
        loop = self._require_prepared("finish")
        if self._is_final:
            return
        if self._evaluates:
            raise UserError("session.finish() inside session.eval_weights(): call it after that block")
        if loop is not None:
            if loop.is_drained:
                self._env.transport.close()
                raise TrainingOver(0)
            if not self._made and not self.finished and not loop.places.came_late:
                what = "the loop ended and no step has reached the server"
                instead = "give session.prepare(...) the optimizer whose step() the loop calls"
                raise UserError(f"{what}: weights changed by hand are not seen; {instead}, or call session.step(loss)")
            if not self.finished:
                loop.places.require_new_pass()
            states = [one.optimizer.state_dict() for one in loop.optimizers] if with_optimizers else []
            loop.finish()
            for one, state in zip(loop.optimizers, states, strict=False):
                one.release(state)
        self.finished = self._is_final = True

    def end(self) -> None:
        """Do what `finish` does, at the end of a script that has made steps and did not call it."""
        if self._loop is not None and self._made and not self._is_final:
            if not self._loop.is_drained:
                note_unfinished(self.worker)
            self.finish()

    def report(self, **figures: float | Tensor) -> None:
        """Record metrics you measured (an accuracy, say) in the run's result. `--target` can refer to them."""
        adopt.require_figures(figures)
        self._env.transport.report({name: float(x.item() if hasattr(x, "item") else x) for name, x in figures.items()})


def join(config: RunConfig | None = None) -> Session:
    """Join the run that `paceline run` started. Without one, start a run of one worker with `config`'s settings."""
    global joined
    if inherited is not None:
        joined = Session(inherited)
        return joined
    require_alone()
    flush_subnormals()
    is_plain, config = config is None, config if config is not None else RunConfig(strategy=CLASSIC)
    typed = frozenset(given(config, SCRIPT_MAY_DECIDE))
    alone = resolve_own_loop(dataclasses.replace(config, task=config.task or f"{SCRIPT}:alone"))
    if alone.workers != 1:
        raise UserError(f"this script was started alone, for {alone.workers} workers: 'paceline run -n N script.py'")
    return Session(WorkerEnv(alone, 0, 0, InProcessClient(alone), typed), is_plain)
