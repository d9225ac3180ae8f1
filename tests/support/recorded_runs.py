"""Runs in this process, recorded as a real host records them, with pushes in a seeded random order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.config import RunConfig
from paceline.core.messages import Join, Leave, Reply
from paceline.core.server import Server, server_facts
from paceline.core.worker import LocalWorker
from paceline.models.dropout import AddressedDropout
from paceline.runs import arrival_log
from paceline.runs.checkpoint import Checkpoint, take_checkpoint
from paceline.runs.folder import RunFolder
from paceline.runs.recovery import RecoveryResult, rebuild
from paceline.runs.replay import Replay
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LocalRuntime, Runtime
from paceline.settings.resolve import resolve
from paceline.tasks.supervised import SupervisedTask


class Small(nn.Module):
    """A few weights, dropout by address, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.dropout = AddressedDropout(0.3, layer=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.dropout(F.relu(self.norm(self.first(inputs)))))


def small_task() -> SupervisedTask:
    """The same task every time."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    train = torch.randn(54, 5, generator=generator), torch.randint(0, 3, (54,), generator=generator)
    test = torch.randn(12, 5, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    return SupervisedTask(Small(), F.cross_entropy, train, test)


def small_config(folder: Path, **settings: Any) -> RunConfig:
    """A config that fits the small task."""
    fixed: dict[str, Any] = {
        "batch_size": 4,
        "lr": 0.1,
        "epochs": 2.0,
        "threads": 1,
        "runs": str(folder),
        "name": "run",
    }
    return resolve(RunConfig(**{**fixed, **settings}))


def ignore(row: dict[str, Any]) -> None:
    """A report that nobody reads."""


@dataclass
class RecordedRun:
    """A host, its seats, and whatever the test wants to happen to them."""

    config: RunConfig
    seed: int = 0
    instances: dict[int, LocalWorker] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    runtime: Runtime | None = None
    """Of the host; None: replies go to `deliver`."""

    def __post_init__(self) -> None:
        self.folder = RunFolder.create(self.config)
        self.task = small_task()
        self.work = work_of(self.task, self.config)
        self.server = self.new_server()
        self.runtime = self.runtime or LocalRuntime(lambda reply: self.deliver(reply))
        pieces = self.config, self.folder, self.rows.append
        self.host = Host(self.server, self.task, self.work, *pieces, self.runtime)
        self._order = random.Random(self.seed)
        self.incarnations = dict.fromkeys(range(self.config.workers or 1), 0)

    def make_worker(self, join: Join) -> LocalWorker:
        return make_worker(self.config, small_task(), self.work, join)

    def join(self, worker: int) -> None:
        join = make_join(self.config, self.work, worker, self.incarnations[worker])
        self.incarnations[worker] += 1
        self.instances[worker] = self.make_worker(join)
        self.host.memories[worker] = self.instances[worker].memory
        self.host.handle(join)

    def join_all(self) -> None:
        for worker in self.incarnations:
            self.join(worker)

    def leave(self, worker: int) -> None:
        instance = self.instances.pop(worker)
        self.host.handle(Leave(worker, instance.join.incarnation))

    def push(self, worker: int) -> None:
        push = self.instances[worker].push()
        if push is not None:
            self.host.handle(push)

    def deliver(self, reply: Reply) -> None:
        if reply.worker in self.instances:  # else it has left meanwhile
            self.instances[reply.worker].pending = reply

    def push_at_random(self, times: int) -> None:
        """So many pushes by whoever is ready, or fewer when the run ends before."""
        for _ in range(times):
            ready = [worker for worker, instance in self.instances.items() if instance.pending is not None]
            if not ready:
                return
            self.push(self._order.choice(ready))

    def run_to_the_end(self) -> None:
        self.push_at_random(10_000)
        assert self.server.finished
        self.close()

    def close(self) -> None:
        """Let go of the files, once."""
        if not self.closed:
            self.closed = True
            self.host.close()

    def checkpoint(self) -> None:
        """A checkpoint at the next moment that allows one, on disk when this returns."""
        while not self.server.can_checkpoint:
            self.push_at_random(1)
        self.host.checkpoint_now()

    def resume(self, **upkeep: Any) -> RecoveryResult:
        """As after a SIGKILL: another server and host over what lies in the folder, and nobody there yet."""
        self.close()
        self.config = dataclasses.replace(self.config, **upkeep)
        self.server, self.instances = self.new_server(), {}
        pieces = self.config, self.folder, self.rows.append
        rebuilt = rebuild(self.server, self.make_worker, self.task, *pieces)
        assert self.runtime is not None
        self.host = Host(self.server, self.task, self.work, *pieces, self.runtime, rebuilt.now)
        self.closed = False
        self.host.resume_from(rebuilt)
        return rebuilt

    @property
    def notes(self) -> list[str]:
        """What the user was told."""
        return [row["text"] for row in self.rows if row["kind"] == "note"]

    def new_server(self) -> Server:
        """A server as it was at the start."""
        return make_server(self.config, small_task(), self.work)

    def replay(self, **arguments: Any) -> Replay:
        return Replay(self.new_server(), self.make_worker, **arguments)


def assert_same(found: Server, expected: Server) -> None:
    """Bit for bit: weights, rule state, running statistics and every count."""
    assert torch.equal(found.weights, expected.weights)
    for name, tensor in expected.rule_state.items():
        assert torch.equal(found.rule_state[name], tensor), name
    assert found.worker_states.keys() == expected.worker_states.keys()
    for worker, state in expected.worker_states.items():
        assert torch.equal(found.worker_states[worker], state), f"running statistics of worker {worker}"
    assert server_facts(found) == server_facts(expected)


def records_of(run: RecordedRun, start: int = 0) -> list[arrival_log.Record]:
    """All whole records of a run's log from `start` on."""
    records, whole = arrival_log.read_arrivals(run.folder.arrivals_file, run.config, start)
    assert whole == run.folder.arrivals_file.stat().st_size
    return records


def assert_replays(run: RecordedRun) -> None:
    """A replay of the whole log finds no mismatch and ends with the run's server."""
    again = run.replay()
    again.feed(records_of(run))
    assert again.mismatch is None
    assert_same(again.server, run.server)


def checkpoint_now(run: RecordedRun) -> Checkpoint:
    """A cut at the next moment that allows one, as the host takes it."""
    while not run.server.can_checkpoint:
        run.push_at_random(1)
    sent = {w: run.instances[w].memory for w, m in run.server.members.items() if m.live and not m.inactive}
    return take_checkpoint(run.server, sent, run.host.log.nbytes, run.host.clock.now())


Record = Callable[..., RecordedRun]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """Make recorded runs whose files are closed when the test ends."""
    runs: list[RecordedRun] = []

    def make(seed: int = 0, runtime: Runtime | None = None, **settings: Any) -> RecordedRun:
        runs.append(RecordedRun(small_config(tmp_path, **settings), seed, runtime=runtime))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
