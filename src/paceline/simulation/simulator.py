"""A cluster in one process: the same server and workers as everywhere, under a virtual clock.

One batch's way: reply received, step computed, push carried to the server, served, reply carried back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.buffers import Memory
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Server
from paceline.core.step_balancing import Pacing
from paceline.core.worker import Seat
from paceline.runtimes.server.timing import RECENT
from paceline.settings.fault_table import Fault
from paceline.simulation.event_queue import Agenda
from paceline.simulation.network import DOWN, UP, Job, Link, Shared, Wire, ring_seconds
from paceline.simulation.step_times import StepTimes

RETRY_STEPS = 5.0
"""A message that was lost is sent again after so many mean steps."""


@dataclass(frozen=True)
class Cluster:
    """What is simulated: step times, what connects workers and server, what they share, and what goes wrong."""

    step_times: StepTimes
    nbytes: int
    """Of all weights, as they go round a ring; the server knows what its pushes and replies weigh."""
    link: Link | None = None
    latency: float = 0.0
    """Of a message where there is no link: between processes of one machine."""
    ring: bool = False
    steps_a_push: int = 1
    """At most: a reply may ask for fewer local steps."""
    by_speed: bool = False
    """Whether slower workers make fewer local steps."""
    server_seconds: float = 0.0
    cores: int | None = None
    turns: float = 0.0
    """What the cores lose to cold caches when more want them than there are."""
    delay: Callable[[int, int], float] | None = None
    faults: tuple[Fault, ...] = ()


class ServerSide(Protocol):
    """Drives the server: takes inputs, writes weights into `memories`, and sends replies."""

    server: Server
    memories: dict[int, Memory]

    def handle(self, message: Input) -> None: ...


@dataclass(slots=True)
class Worker:
    """One worker number over all its incarnations, and where its time went."""

    number: int
    incarnation: int = -1
    life: int = 0
    """Counts starts and ends, so that what was meant for an earlier life is known."""
    seat: Seat | None = None
    acted: int = -1
    unanswered: Push | None = None
    step_began: float | None = None
    steps: int = 1
    seconds_a_step: float = 0.0
    """Of the last push."""
    job: Job | None = None
    factor: float = 1.0
    slow_until: float = 0.0
    paused_until: float = 0.0
    owed: float = 0.0
    """Seconds of a pause that fell into the step being computed."""
    done: bool = False
    joined_at: float = 0.0
    present: float = 0.0
    computing: float = 0.0
    num_steps: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of a step, of its latest pushes."""


class Deadlock(Exception):
    """Workers are waiting, nothing is planned, and training is not over: a defect, never a user's mistake."""


class Simulation:
    """Drives workers and a server through virtual time."""

    def __init__(
        self,
        agenda: Agenda,
        cluster: Cluster,
        num_workers: int,
        make_seat: Callable[[int, int], Seat],
        start_server: Callable[[Callable[[Reply], None]], ServerSide],
        places: int | None = None,
        inject: Callable[[Simulation, Fault], None] | None = None,
    ) -> None:
        """`num_workers` join at the start; others, up to `places`, if a fault of kind `join` says so.

        `start_server` is given the function that sends a reply. `inject` applies one fault of `cluster.faults` when its
        time comes.
        """
        assert inject is not None or not cluster.faults, "a cluster with faults needs what applies them"
        self._inject = inject
        self.agenda, self.cluster = agenda, cluster
        self.workers = [Worker(number) for number in range(places or num_workers)]
        self._crew = self.workers[:num_workers]
        link = None if cluster.ring else cluster.link
        latency = link.latency if link is not None else cluster.latency
        self.wire = Wire(agenda, link.bandwidth if link is not None else None, latency, len(self.workers))
        self._make_seat, self._start_server = make_seat, start_server
        cores = float(cluster.cores) if cluster.cores is not None else None
        self._cores = Shared(agenda, cores, 1.0, cluster.turns) if cores is not None else None
        self._pacing = Pacing() if cluster.by_speed else None
        self._queue: deque[Input] = deque()
        self._serving = False
        self._server_life = self.num_here = 0
        self.num_events = 0
        self.side: ServerSide = start_server(self._send)
        assert self.side.server.nbytes == cluster.nbytes, "server and cluster speak of the same weights"

    def run(self) -> None:
        """From everybody's join to the end of training, or until nobody is left."""
        for worker in self._crew:
            self.agenda.at(0.0, self.come, worker)
        for fault in self.cluster.faults:
            self.agenda.at(fault.at, self._apply_fault, fault)
        self.agenda.run()
        for worker in self.workers:
            if worker.seat is not None:
                worker.present += self.agenda.now - worker.joined_at
                worker.joined_at = self.agenda.now
                if worker.step_began is not None:
                    worker.computing += self.agenda.now - worker.step_began
                    worker.step_began = self.agenda.now
        if self.num_here and not self.side.server.over and not self.agenda.stopped:
            raise Deadlock(f"at {self.agenda.now:g} s, update {self.side.server.version}: workers wait for nothing")

    def _apply_fault(self, fault: Fault) -> None:
        assert self._inject is not None
        self._inject(self, fault)

    def come(self, worker: Worker) -> None:
        """A process starts and joins as a new incarnation, with memory of its own; an older one is given up."""
        if worker.seat is not None or worker.done or self.side.server.over:
            return
        if worker.incarnation >= 0:
            self.give_up(worker, 0.0)
        worker.incarnation += 1
        worker.life += 1
        worker.acted, worker.unanswered, worker.owed = -1, None, 0.0
        worker.joined_at = self.agenda.now
        worker.seat = self._make_seat(worker.number, worker.incarnation)
        self.num_here += 1
        self._carry_up(worker, worker.seat.join)

    def go(self, worker: Worker) -> None:
        """The process is no more; whatever is under way to it finds nobody."""
        worker.seat, worker.step_began = None, None
        worker.life += 1
        worker.present += self.agenda.now - worker.joined_at
        self.num_here -= 1
        if worker.job is not None and self._cores is not None:
            self._cores.call_off(worker.job)
            worker.job = None

    def give_up(self, worker: Worker, after: float) -> None:
        """The server notices, some time from now, that the worker as it is now is gone."""
        leave = Leave(worker.number, worker.incarnation)
        if after:
            self.agenda.at(self.agenda.now + after, self.deliver, (self._server_life, leave))
        else:
            self.ask(leave)

    def _receive(self, delivery: tuple[int, Reply]) -> None:
        """A reply has come, perhaps for a worker that is gone, or one that it has acted on before."""
        life, reply = delivery
        worker = self.workers[reply.worker]
        if life != worker.life or worker.seat is None or reply.serial <= worker.acted:
            return
        now = self.agenda.now
        if now < worker.paused_until:
            self.agenda.at(worker.paused_until, self._receive, delivery)
            return
        self.num_events += 1
        worker.acted, worker.unanswered = reply.serial, None
        if reply.over:
            worker.done = True
            self.go(worker)
            self.give_up(worker, 0.0)
            return
        worker.seat.pending = reply
        worker.step_began, worker.steps = now, reply.steps or self.cluster.steps_a_push
        seconds = self._step_seconds(worker, reply.serial)
        if now < worker.slow_until:
            seconds *= worker.factor
        if self._cores is not None:
            worker.job = self._cores.add(seconds, self._computed, (worker, life))
        else:
            self.agenda.at(now + seconds, self._computed, (worker, life))

    def _step_seconds(self, worker: Worker, push: int) -> float:
        """What the work for one push takes."""
        times, most = self.cluster.step_times, self.cluster.steps_a_push
        if most == 1:
            return times.seconds(worker.number, push)
        return sum(times.seconds(worker.number, push * most + place) for place in range(worker.steps))

    def _computed(self, which: tuple[Worker, int]) -> None:
        """A step is done; what is left of a pause and a delay on purpose pass, then the push is sent."""
        worker, life = which
        if life != worker.life:
            return
        worker.job = None
        extra, worker.owed = worker.owed, 0.0
        if self.cluster.delay is not None:
            extra += worker.steps * self.cluster.delay(worker.number, worker.acted)
        if extra:
            self.agenda.at(self.agenda.now + extra, self._push, which)
        else:
            self._push(which)

    def _push(self, which: tuple[Worker, int]) -> None:
        worker, life = which
        if life != worker.life or worker.seat is None or worker.step_began is None:
            return
        self.num_events += 1
        seconds = self.agenda.now - worker.step_began
        worker.computing += seconds
        worker.num_steps += worker.steps
        worker.seconds_a_step = seconds / worker.steps
        worker.recent.append(worker.seconds_a_step)
        worker.step_began = None
        worker.unanswered = worker.seat.push()
        assert worker.unanswered is not None, "a reply that was not the last is worth a push"
        self._carry_up(worker, worker.unanswered)

    def _carry_up(self, worker: Worker, message: Join | Push) -> None:
        delivery = self._server_life, message
        nbytes = self.side.server.updater.nbytes_of(message) if isinstance(message, Push) else None
        self.wire.carry(worker.number, UP, self.deliver, delivery, self._try_again_later, (worker, message), nbytes)

    def _send(self, reply: Reply) -> None:
        """Carry a reply, with its weights, from the server to its worker."""
        worker = self.workers[reply.worker]
        if worker.seat is None or reply.incarnation != worker.incarnation:
            return
        if self.cluster.ring and self.cluster.link is not None and worker.acted >= 0:
            ring = max(1, self.side.server.num_live)  # after the last round nobody has work left
            seconds = ring_seconds(ring, self.cluster.nbytes, self.cluster.link)
            self.wire.lines[worker.number].under_way += seconds
            self.agenda.at(self.agenda.now + seconds, self._receive, (worker.life, reply))
            return
        asked = worker, worker.unanswered or worker.seat.join
        delivery, nbytes = (worker.life, reply), self.side.memories[worker.number].nbytes
        self.wire.carry(worker.number, DOWN, self._receive, delivery, self._try_again_later, asked, nbytes)

    def _try_again_later(self, asked: tuple[Worker, Join | Push]) -> None:
        worker, message = asked
        later = self.agenda.now + RETRY_STEPS * self.cluster.step_times.mean
        self.agenda.at(later, self._try_again, (worker, worker.life, message))

    def _try_again(self, lost: tuple[Worker, int, Join | Push]) -> None:
        """The same push again, which the server answers but does not apply again; a join is a new connection."""
        worker, life, message = lost
        if life != worker.life or self.side.server.over:
            return
        if isinstance(message, Push):
            if worker.unanswered is message:
                self._carry_up(worker, message)
        elif worker.acted < 0:
            self.go(worker)
            self.come(worker)

    def ask(self, message: Input) -> None:
        """Somebody beside the server has a message for it."""
        self.deliver((self._server_life, message))

    def deliver(self, delivery: tuple[int, Input]) -> None:
        """A message has reached the server, which takes one at a time."""
        life, message = delivery
        if life != self._server_life or self.wire.is_down:
            return  # meant for a server that is no more
        if not self.cluster.server_seconds:
            self._serve(message)
            return
        self._queue.append(message)
        if not self._serving:
            self._next()

    def _next(self) -> None:
        self._serving = bool(self._queue)
        if self._serving:
            message = self._queue.popleft()
            work = self.cluster.server_seconds if isinstance(message, Push) else 0.0
            if self._cores is not None:
                self._cores.add(work, self._served, (self._server_life, message))
            else:
                self.agenda.at(self.agenda.now + work, self._served, (self._server_life, message))

    def _served(self, delivery: tuple[int, Input]) -> None:
        life, message = delivery
        if life == self._server_life:
            self._serve(message)
            self._next()

    def _serve(self, message: Input) -> None:
        if isinstance(message, Join):
            seat = self.workers[message.worker].seat
            if seat is None or seat.join is not message:
                return  # its connection is closed already
            self.side.memories[message.worker] = seat.memory
        if self._pacing is not None and isinstance(message, Push):
            told = self._pacing.look(self.side.server, message.worker, self.workers[message.worker].seconds_a_step)
            if told is not None:
                self.side.handle(told)
        self.num_events += 1
        self.side.handle(message)
        if self.side.server.over:
            self.agenda.stopped = True  # the steps that are being computed would come too late

    def stop_server(self) -> None:
        """The server's process dies, with all that was under way to it."""
        self.wire.is_down = True
        self._server_life += 1
        self._queue.clear()
        self._serving = False

    def restart_server(self) -> None:
        """A new server goes on from checkpoint and log; every worker's connection is broken, so all come anew."""
        self.wire.is_down = False
        self.side = self._start_server(self._send)
        for worker in self.workers:
            if worker.seat is not None:
                self.go(worker)
                self.come(worker)
            elif not worker.done and worker in self._crew:
                self.ask(Leave(worker.number, worker.incarnation + 1))
