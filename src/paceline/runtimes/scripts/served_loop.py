"""The worker side of an own loop that a server trains: the model in shared memory, and a push for every step."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.assembly.own_loop import loop_compression
from paceline.config import RunConfig
from paceline.core.buffers import view
from paceline.core.messages import Join, Push, Reply, loss_of_push
from paceline.core.own_loop.settings import LoopLayout
from paceline.errors import SERVER_GONE, RunFailed, UserError
from paceline.interfaces import State
from paceline.runs.durable_files import write_atomically
from paceline.runs.folder import RunFolder
from paceline.runtimes.local.failures import NO_GROUP
from paceline.runtimes.scripts.adopt import UserObjects
from paceline.runtimes.scripts.bound_model import BoundModel
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.facts import MAX_SAMPLES
from paceline.runtimes.scripts.loading.kept_states import KeptStates
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.runtimes.scripts.loading.places import LoopPlaces
from paceline.runtimes.scripts.optimizer import AdoptedOptimizer, PushStep, join_states, settings_of
from paceline.runtimes.scripts.standalone import InProcessClient
from paceline.runtimes.worker_loop import StepTimer
from paceline.settings.preprocessing import split_of
from paceline.tasks.script_model import save_tensors
from paceline.transports.protocol import ScriptTransport

COMPARED_FULLY_EVERY = 64
"""Steps after which all weights are compared with those that the server sent; also at 0, 1, 2, 4, 8, ..."""


@dataclass(frozen=True)
class WorkerEnv:
    """What `paceline run` gave this process: its config, its number, its transport, and the run folder if it is here.

    `keep` takes what no push brings: the tensors beside the weights that are saved, and states of used optimizers.
    """

    config: RunConfig
    worker: int
    incarnation: int
    transport: ScriptTransport
    typed: frozenset[str] = frozenset()
    folder: Path | None = None
    keep: Callable[[State, State], None] | None = None


def keep_in(folder: RunFolder, frozen: State, optimizers: State) -> None:
    """Write what no push brings into the run's folder, unless another worker has."""
    if frozen and not folder.frozen_file.exists():
        write_atomically(folder.frozen_file, save_tensors(frozen))
    if optimizers and not folder.optimizer_file.exists():
        write_atomically(folder.optimizer_file, save_tensors(optimizers))


class ServedLoop:
    """One worker's model, optimizer and place in its data, as the server knows them."""

    steps_here = False  # whether the optimizer steps in this process, and not in the server

    def __init__(
        self,
        env: WorkerEnv,
        config: RunConfig,
        handed: UserObjects,
        loaders: Sequence[WorkerLoader],
        divisions: Divisions,
    ) -> None:
        if any(isinstance(model, DistributedDataParallel) for model in handed.models):
            raise UserError(f"session.prepare(...): the model is a DistributedDataParallel{NO_GROUP}")
        self._env, self._config, self._loaders, self._divisions = env, config, loaders, divisions
        self._transport, self._timer = env.transport, StepTimer(config, env.worker)
        self.optimizers = self._adopt(handed.optimizers)
        self.places = LoopPlaces(loaders, handed.schedulers, divisions)
        self._states = KeptStates(RunFolder(env.folder).streams if env.folder else None, env.worker, loaders)
        self.pushes = 0  # of this incarnation
        self._said_unclear = False
        self._layouts = [self._loop_layout(one) for one in self.optimizers] or [LoopLayout(self.places.num, (), ())]
        loop_size = max(layout.size for layout in self._layouts)
        compression = partial(loop_compression, config, env.worker, self._layouts)
        self.bound = BoundModel(handed.models, handed.parameters(), loop_size, self.steps_here, compression)
        if loaders:
            self.bound.on_forward = self._on_forward
        self._replies: list[Reply] = []  # the newest of each optimizer
        self._frozen_at_first: dict[str, bytes] = {}  # hashes of the tensors that no optimizer trains
        self._began = 0.0, 0.0  # when the step began: by the clock, and by the CPU time of this process

    def _adopt(self, optimizers: Sequence[Optimizer]) -> list[AdoptedOptimizer]:
        """The optimizers that step in the server."""
        return [AdoptedOptimizer(one, number) for number, one in enumerate(optimizers)]

    def _follow_steps(self, push_step: PushStep) -> None:
        """Call `push_step` when the loop makes a step."""
        for optimizer in self.optimizers:
            optimizer.take_over(push_step, self._read_optimizer, begun=self.step_number > 0)

    def _loop_layout(self, adopted: AdoptedOptimizer) -> LoopLayout:
        """What a push of an optimizer says; that of the first also where the loop is."""
        sizes = adopted.group_sizes
        ends = list(itertools.accumulate(sizes))
        groups = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
        return LoopLayout(self.places.num if not adopted.number else 0, tuple(adopted.numbers), groups)

    def join(self, facts: dict[str, Any], push_step: PushStep) -> Reply:
        """Join the run and load its weights. Go on where this worker's last incarnation was.

        From then on the optimizer's `step()` calls `push_step`.
        """
        env, flat, bound = self._env, self.bound.flat, self.bound
        if isinstance(env.transport, InProcessClient):
            env.transport.initial = [one.packed_state() for one in self.optimizers]
        elif env.keep is not None:
            frozen = {name: tensor.cpu().clone() for name, tensor in flat.frozen().items()}
            self._frozen_at_first = _digests(frozen) if not env.worker else {}
            env.keep(frozen, join_states([optimizer.packed_state() for optimizer in self.optimizers]))
        sources = flat.sources()
        strays = {part.name: part.name for part in flat.layout.parameters if part.name not in sources.values()}
        own_names = {part.name: part.name for part in (*flat.layout.parameters, *flat.state_layout.parameters)}
        facts = {
            "layout": flat.layout.to_rows(),
            "state_layout": flat.state_layout.to_rows(),
            "sources": None if {**sources, **strays} == own_names else {**sources, **strays},
            "optimizers": [
                {"class": one.description, "settings": settings_of(one.optimizer), "loop": layout.to_facts()}
                for one, layout in zip(self.optimizers, self._layouts, strict=False)
            ],
            "numbers": bound.slot.loop.numel(),
            "loaders": len(self._loaders),
            "notes": self._notes(),
            "max_samples": MAX_SAMPLES,
            **facts,
        }
        join = Join(env.worker, env.incarnation, None, torch.get_num_threads(), own_loop=True)
        state = bound.slot.state.clone()
        reply = self._transport.hello(join, bound.slot, facts)
        if reply is None:
            raise RunFailed(SERVER_GONE)
        if not torch.equal(state, bound.slot.state):  # of the last incarnation, as the server has kept it
            bound.load_state()
        self._replies = [reply] * len(self._layouts)
        self._hear_of_drain()
        self._follow_steps(push_step)
        said, layout = bound.slot.loop.tolist(), self._layouts[0]
        goes_on = self.places.begin_at(reply, self.step_number, [int(number) for number in said[: layout.num_places]])
        if goes_on and self.optimizers and not self.places.can_go_on:
            self.optimizers[0].set_rates(said[layout.num_places :][: len(layout.numbers)])
        self._states.go_on()
        self._timer.restart()
        self._began = time.perf_counter(), time.process_time()
        bound.renew(fully=True)
        return reply

    def _notes(self) -> list[str]:
        notes = [note for loader in self._loaders for note in (loader.facts.note, loader.facts.unresumable) if note]
        shares_data = self._divisions.newest.parts > 1 and split_of(self._config).kind != "full"
        if shares_data and not self._loaders and not self._divisions.is_split:
            what = "session.prepare(...) was given no loader or data set, so a step counts as one sample"
            notes.append(f"{what}, and data that the loop reads is not divided: every worker trains on all of it")
        if converted := self.bound.converted:
            more = f" and {len(converted) - 1} more" if len(converted) > 1 else ""
            kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.bound.parameters} - {"float32"})
            what = f"parameter {converted[0]}{more}: {' and '.join(kinds)} in the workers"
            notes.append(f"{what}; the server keeps and saves float32 weights")
        return notes

    @property
    def is_drained(self) -> bool:
        """Whether training is over for this worker alone."""
        return self._replies[0].released

    def _hear_of_drain(self) -> None:
        if self.is_drained:
            what = f"worker {self._env.worker} was drained: its loop ends, and its script at session.finish()"
            print(what, file=sys.stderr)

    def _on_forward(self, inputs: Any) -> None:
        is_waiting = any(loader.handed_out.waiting for loader in self._loaders)
        if any(loader.handed_out.trains_on_look(inputs, is_waiting) for loader in self._loaders):
            what = f"worker {self._env.worker} goes on in a later pass, and next(...) began a finished one"
            raise UserError(f"{what}: train in a loop 'for batch in loader', which runs through finished passes")
        for loader in self._loaders:
            loader.handed_out.forward(inputs)

    def settle_batches(self) -> int:
        """Decide which batches the next push holds; return the samples in those of the first loader."""
        samples = [loader.handed_out.push() for loader in self._loaders]
        if not self._said_unclear and not self._env.worker and any(one.handed_out.is_unclear for one in self._loaders):
            self._said_unclear = True
            what = "the loop took several batches before it called the model, with inputs that are none of them"
            print(f"{what}: if it holds a copy of one for its next step, a restart skips that batch", file=sys.stderr)
        return samples[0] if samples else 0

    @property
    def ignores_loaders(self) -> bool:
        """Whether the script has loaders of `prepare`, and its loop has asked none of them for a batch."""
        return bool(self._loaders) and not any(loader.has_given for loader in self._loaders)

    @property
    def has_stepped(self) -> bool:
        """Whether the loop has made a step in this process."""
        return self.pushes > 0

    @property
    def step_number(self) -> int:
        """The steps of this worker's loop so far, those of earlier incarnations and dropped ones included."""
        return self._replies[0].batch + self._replies[0].dropped

    @property
    def _compares_fully(self) -> bool:
        number = self.pushes
        return number % COMPARED_FULLY_EVERY == 0 or number & (number - 1) == 0

    def push(
        self,
        number: int,
        samples: int,
        loss: float | None,
        weight: float | None,
        scale: float | None = None,
        skipped: bool = False,
    ) -> Reply:
        """Push the gradients of an optimizer and load its next weights. A `skipped` step has none to apply."""
        bound = self.bound
        bound.require_unchanged()
        first = sum(layout.num_parameters for layout in self._layouts[:number])
        members = range(first, first + self._layouts[number].num_parameters) if self.optimizers else None
        flags = bound.collect(members, scale)
        if skipped:
            bound.zero_gradients()
        return self._exchange(number, samples, loss, 0.0 if skipped else weight, flags)

    def _exchange(
        self, number: int, samples: int, loss: float | None, weight: float | None, flags: list[float]
    ) -> Reply:
        """Send what was collected, and load the next weights."""
        bound, before, env = self.bound, self._replies[number], self._env
        bound.require_same_layers()
        says = self._says(number, flags)
        slot, named = bound.slot, (env.worker, env.incarnation, before.serial, before.serial)
        update = bound.compression.send(number, before.serial, skipped=weight == 0.0)
        push = Push(*named, samples, loss_of_push(loss), update, slot.state, weight, says, number)
        bound.push_inputs()
        timing = self._timer.end(*self._began, before.serial, before.steps)
        reply = self._transport.exchange(push, timing)
        if reply is None:
            raise RunFailed(SERVER_GONE)
        is_discarded = reply.discarded != before.discarded
        bound.compression.receive(number, before.serial, reply.discarded if is_discarded else None)
        self._replies[number] = reply
        self._hear_of_drain()
        if not number and not reply.finished:
            self.places.hear(reply.assignment)
        self.pushes += 1
        self._states.after_push()
        self._began = time.perf_counter(), time.process_time()
        bound.renew(self._compares_fully)
        bound.record_inputs(True)
        return reply

    def _says(self, number: int, flags: list[float]) -> Tensor:
        """Write what the loop says with a push into the shared buffer, and return it.

        A push has the buffer's begin to itself: there is one at a time.
        """
        places = [] if number else self.places.said()
        settings = self.optimizers[number].settings() if self.optimizers else []
        values = [*places, *settings, *(flags if self.optimizers else ())]
        slot = self.bound.slot.loop
        slot.numpy()[: len(values)] = values
        return slot[: len(values)]

    def read(self, final: bool) -> bool:
        """Load the weights that are evaluated; return whether the statistics in the model belong to them.

        One worker's live weights have those of the training, as in plain torch; for others they are estimated.
        """
        averaged = self._transport.read_weights(final)
        if averaged is None:
            raise RunFailed(SERVER_GONE)
        self.bound.load_weights()
        is_own = not averaged and (self._config.workers or 1) == 1 and not self._env.incarnation
        return is_own or self.bound.estimate_statistics()

    def finish(self) -> None:
        """Leave in the model the weights and statistics that are saved. Waits for the other workers."""
        bound = self.bound
        bound.record_inputs(False)
        if self.pushes:
            bound.require_unchanged()
            bound.require_same_layers(at_once=True)
        bound.release()
        self._warn_of_changes()
        is_estimate = self.read(final=True)
        if bound.flat.state_size:
            bound.send_state()
            passes = [loader.facts.batch_size * (loader.facts.batches or 1) for loader in self._loaders[:1]]
            samples = min(sum(passes) or 1, MAX_SAMPLES)  # a sampler may draw without end
            if not self._transport.merge_statistics(samples if is_estimate else 0):
                raise RunFailed(SERVER_GONE)
            bound.load_state()

    def _warn_of_changes(self) -> None:
        """Say which tensors the loop has changed that no optimizer trains: they are saved as they were at the start."""
        first, now = self._frozen_at_first, _digests(self.bound.flat.frozen()) if self._frozen_at_first else {}
        changed = [name for name, digest in first.items() if name in now and now[name] != digest]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            what = f"{changed[0]}{more} changed, and no optimizer of session.prepare(...) trains it"
            print(f"{what}: the saved weights have its first value; save it in the script", file=sys.stderr)

    def pause(self, began: tuple[float, float]) -> None:
        """Do not count the time since `began` as a part of the step: it was an evaluation."""
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        self._began = self._began[0] + wall, self._began[1] + cpu

    def _read_optimizer(self, number: int) -> State:
        state = self._transport.read_optimizer(number)
        if state is None:
            raise RunFailed(SERVER_GONE)
        return state


def _digests(tensors: State) -> dict[str, bytes]:
    """The hashes of the tensors of floats."""
    floats = {name: tensor.detach().cpu().reshape(-1) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return {name: hashlib.sha256(view(tensor)).digest() for name, tensor in floats.items()}
