"""Simulate a cluster in one process: a real server and real workers exchange replies and pushes in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Server
from paceline.core.step_balancing import StepBalancer
from paceline.core.worker import LocalWorker
from paceline.runtimes.server.timing import RECENT
from paceline.settings.fault_table import Fault
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.network import CapacityShare, NetworkLink, SharedCapacity, SimulatedNetwork, ring_seconds
from paceline.simulation.step_times import StepTimes

RETRY_STEPS = 5.0  # delay before a lost message is sent again, in mean step times


@dataclass(frozen=True)
class Cluster:
    """The simulated cluster: step times, network, shared cores, delays and faults."""

    step_times: StepTimes
    nbytes: int
    """Bytes of all weights, as a ring all-reduce sends them; the server computes the size of its own messages."""
    link: NetworkLink | None = None
    latency: float = 0.0  # seconds per message without a link: between processes of one machine
    ring: bool = False
    steps_per_push: int = 1  # maximum local steps per push; a reply may ask for fewer
    by_speed: bool = False  # whether slower workers get fewer local steps
    server_seconds: float = 0.0
    cores: int | None = None
    switching_loss: float = 0.0  # share of the cores' capacity lost to cold caches if more processes than cores compute
    delay: Callable[[int, int], float] | None = None
    faults: tuple[Fault, ...] = ()


class SimulatedServer(Protocol):
    """The server as the simulation sees it: handles inputs, writes weights into `memories`, replies through `send`."""

    server: Server
    memories: dict[int, WorkerBuffers]

    def handle(self, message: Input) -> None: ...


@dataclass(slots=True)
class SimulatedWorker:
    """One worker number over all its incarnations, with its time accounting."""

    number: int
    incarnation: int = -1
    life: int = 0  # number of starts and ends; events planned for an earlier life are ignored
    instance: LocalWorker | None = None
    last_reply: int = -1
    unanswered: Push | None = None
    step_began: float | None = None
    steps: int = 1
    seconds_per_step: float = 0.0  # seconds per step of the last push
    job: CapacityShare | None = None
    factor: float = 1.0
    slow_until: float = 0.0
    paused_until: float = 0.0
    pause_left: float = 0.0  # seconds of pause to add to the current step
    done: bool = False
    joined_at: float = 0.0
    present: float = 0.0
    computing: float = 0.0
    longest: float = 0.0  # seconds of one push
    num_steps: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds per step of the latest pushes


class Deadlock(Exception):
    """Workers wait, no event is planned and training is not finished: a bug, never a user's mistake."""


class Simulation:
    """Drives workers and a server through virtual time."""

    def __init__(
        self,
        queue: EventQueue,
        cluster: Cluster,
        num_workers: int,
        make_worker: Callable[[int, int], LocalWorker],
        start_server: Callable[[Callable[[Reply], None]], SimulatedServer],
        max_workers: int | None = None,
        inject: Callable[[Simulation, Fault], None] | None = None,
    ) -> None:
        """Start with `num_workers`; faults of kind `join` add others, up to `max_workers`.

        `start_server` gets the function that sends a reply. `inject` applies a fault of the cluster when it is due.
        """
        assert inject is not None or not cluster.faults, "a cluster with faults needs `inject`"
        self.queue, self.cluster, self._inject = queue, cluster, inject
        self.workers = [SimulatedWorker(number) for number in range(max_workers or num_workers)]
        self._initial_workers = self.workers[:num_workers]
        link = None if cluster.ring else cluster.link
        bandwidth, latency = (link.bandwidth, link.latency) if link is not None else (None, cluster.latency)
        self.network = SimulatedNetwork(queue, bandwidth, latency, len(self.workers))
        self._make_worker, self._start_server = make_worker, start_server
        self._cores: SharedCapacity | None = None
        if cluster.cores is not None:
            self._cores = SharedCapacity(queue, float(cluster.cores), 1.0, cluster.switching_loss)
        self._balancer = StepBalancer() if cluster.by_speed else None
        self._inbox: deque[Input] = deque()
        self._serving = False
        self._server_life = self.num_running = self.num_events = 0
        self.side: SimulatedServer = start_server(self._send)
        assert self.side.server.nbytes == cluster.nbytes, "server and cluster have the same number of weights"

    def run(self) -> None:
        """Run from the first join until training ends or no worker is left."""
        for worker in self._initial_workers:
            self.queue.at(0.0, self.start_worker, worker)
        if self._inject is not None:
            for fault in self.cluster.faults:
                self.queue.at(fault.at, partial(self._inject, self), fault)
        self.queue.run()
        for worker in self.workers:
            if worker.instance is not None:
                worker.present += self.queue.now - worker.joined_at
                worker.joined_at = self.queue.now
                if worker.step_began is not None:
                    begun = self.queue.now - worker.step_began
                    worker.computing, worker.longest = worker.computing + begun, max(worker.longest, begun)
                    worker.step_began = self.queue.now
        if self.num_running and not self.side.server.finished and not self.queue.stopped:
            raise Deadlock(f"at {self.queue.now:g} s, update {self.side.server.version}: all workers wait")

    def start_worker(self, worker: SimulatedWorker) -> None:
        """Start a worker process that joins as a new incarnation; the server drops an older one."""
        if worker.instance is not None or worker.done or self.side.server.finished:
            return
        if worker.incarnation >= 0:
            self.report_loss(worker, 0.0)
        worker.incarnation += 1
        worker.life += 1
        worker.last_reply, worker.unanswered, worker.pause_left = -1, None, 0.0
        worker.joined_at = self.queue.now
        worker.instance = self._make_worker(worker.number, worker.incarnation)
        self.num_running += 1
        self._send_up(worker, worker.instance.join)

    def end_worker(self, worker: SimulatedWorker) -> None:
        """End the worker's process; messages on their way to it are lost."""
        worker.instance, worker.step_began = None, None
        worker.life += 1
        worker.present += self.queue.now - worker.joined_at
        self.num_running -= 1
        if worker.job is not None and self._cores is not None:
            self._cores.cancel(worker.job)
            worker.job = None

    def report_loss(self, worker: SimulatedWorker, after: float) -> None:
        """Let the server notice, in `after` seconds, that this incarnation is gone."""
        leave = Leave(worker.number, worker.incarnation)
        if after:
            self.queue.at(self.queue.now + after, self.deliver, (self._server_life, leave))
        else:
            self.send_to_server(leave)

    def _receive(self, delivery: tuple[int, Reply]) -> None:
        """Deliver a reply to its worker; ignore it if the worker is gone or has seen it."""
        life, reply = delivery
        worker = self.workers[reply.worker]
        if life != worker.life or worker.instance is None or reply.serial <= worker.last_reply:
            return
        now = self.queue.now
        if now < worker.paused_until:
            self.queue.at(worker.paused_until, self._receive, delivery)
            return
        self.num_events += 1
        worker.last_reply, worker.unanswered = reply.serial, None
        if reply.finished:
            worker.done = True
            self.end_worker(worker)
            self.report_loss(worker, 0.0)
            return
        worker.instance.pending = reply
        worker.step_began, worker.steps = now, reply.steps or self.cluster.steps_per_push
        seconds = self._step_seconds(worker, reply.serial) * (worker.factor if now < worker.slow_until else 1.0)
        if self._cores is not None:
            worker.job = self._cores.add(seconds, self._computed, (worker, life))
        else:
            self.queue.at(now + seconds, self._computed, (worker, life))

    def _step_seconds(self, worker: SimulatedWorker, push: int) -> float:
        times, most = self.cluster.step_times, self.cluster.steps_per_push
        if most == 1:
            return times.seconds(worker.number, push)
        return sum(times.seconds(worker.number, push * most + place) for place in range(worker.steps))

    def _computed(self, which: tuple[SimulatedWorker, int]) -> None:
        """Finish a step: wait for the rest of a pause and for the configured delay, then push."""
        worker, life = which
        if life != worker.life:
            return
        worker.job = None
        extra, worker.pause_left = worker.pause_left, 0.0
        if self.cluster.delay is not None:
            extra += worker.steps * self.cluster.delay(worker.number, worker.last_reply)
        if extra:
            self.queue.at(self.queue.now + extra, self._push, which)
        else:
            self._push(which)

    def _push(self, which: tuple[SimulatedWorker, int]) -> None:
        worker, life = which
        if life != worker.life or worker.instance is None or worker.step_began is None:
            return
        self.num_events += 1
        seconds = self.queue.now - worker.step_began
        worker.computing += seconds
        worker.longest = max(worker.longest, seconds)
        worker.num_steps += worker.steps
        worker.seconds_per_step = seconds / worker.steps
        worker.recent.append(worker.seconds_per_step)
        worker.step_began = None
        worker.unanswered = worker.instance.push()
        assert worker.unanswered is not None, "every reply but the last leads to a push"
        self._send_up(worker, worker.unanswered)

    def _send_up(self, worker: SimulatedWorker, message: Join | Push) -> None:
        delivery, request = (self._server_life, message), (worker, message)
        nbytes = self.side.server.updater.nbytes_of(message) if isinstance(message, Push) else None
        self.network.send(worker.number, "push", self.deliver, delivery, self._schedule_retry, request, nbytes)

    def _send(self, reply: Reply) -> None:
        """Send a reply with its weights from the server to its worker."""
        worker = self.workers[reply.worker]
        if worker.instance is None or reply.incarnation != worker.incarnation:
            return
        if self.cluster.ring and self.cluster.link is not None and worker.last_reply >= 0:
            ring = max(1, self.side.server.num_live)  # after the last round no worker is live
            seconds = ring_seconds(ring, self.cluster.nbytes, self.cluster.link)
            self.network.links[worker.number].seconds_in_flight += seconds
            self.queue.at(self.queue.now + seconds, self._receive, (worker.life, reply))
            return
        request = worker, worker.unanswered or worker.instance.join
        delivery, nbytes = (worker.life, reply), self.side.memories[worker.number].nbytes
        self.network.send(worker.number, "reply", self._receive, delivery, self._schedule_retry, request, nbytes)

    def _schedule_retry(self, request: tuple[SimulatedWorker, Join | Push]) -> None:
        worker, message = request
        later = self.queue.now + RETRY_STEPS * self.cluster.step_times.mean
        self.queue.at(later, self._retry, (worker, worker.life, message))

    def _retry(self, lost: tuple[SimulatedWorker, int, Join | Push]) -> None:
        """Send a lost push again, which the server applies only once, or join again as a new incarnation."""
        worker, life, message = lost
        if life != worker.life or self.side.server.finished:
            return
        if isinstance(message, Push):
            if worker.unanswered is message:
                self._send_up(worker, message)
        elif worker.last_reply < 0:
            self.end_worker(worker)
            self.start_worker(worker)

    def send_to_server(self, message: Input) -> None:
        """Hand the server a message that needs no network."""
        self.deliver((self._server_life, message))

    def deliver(self, delivery: tuple[int, Input]) -> None:
        """Queue a message that reached the server, which handles one at a time."""
        life, message = delivery
        if life != self._server_life or self.network.server_down:
            return  # sent to a server that has crashed
        if not self.cluster.server_seconds:
            self._serve(message)
            return
        self._inbox.append(message)
        if not self._serving:
            self._serve_next()

    def _serve_next(self) -> None:
        self._serving = bool(self._inbox)
        if self._serving:
            message = self._inbox.popleft()
            work = self.cluster.server_seconds if isinstance(message, Push) else 0.0
            if self._cores is not None:
                self._cores.add(work, self._served, (self._server_life, message))
            else:
                self.queue.at(self.queue.now + work, self._served, (self._server_life, message))

    def _served(self, delivery: tuple[int, Input]) -> None:
        life, message = delivery
        if life == self._server_life:
            self._serve(message)
            self._serve_next()

    def _serve(self, message: Input) -> None:
        if isinstance(message, Join):
            instance = self.workers[message.worker].instance
            if instance is None or instance.join is not message:
                return  # the worker has closed this connection
            self.side.memories[message.worker] = instance.memory
        if self._balancer is not None and isinstance(message, Push):
            seconds = self.workers[message.worker].seconds_per_step
            change = self._balancer.look(self.side.server, message.worker, seconds)
            if change is not None:
                self.side.handle(change)
        self.num_events += 1
        self.side.handle(message)
        if self.side.server.finished:
            self.queue.stopped = True  # pushes of unfinished steps would come too late

    def stop_server(self) -> None:
        """Crash the server; messages on their way to it are lost."""
        self.network.server_down = True
        self._server_life += 1
        self._inbox.clear()
        self._serving = False

    def restart_server(self) -> None:
        """Start a server from checkpoint and log; all connections are broken, so every worker joins again."""
        self.network.server_down = False
        self.side = self._start_server(self._send)
        for worker in self.workers:
            if worker.instance is not None:
                self.end_worker(worker)
                self.start_worker(worker)
            elif not worker.done and worker in self._initial_workers:
                self.send_to_server(Leave(worker.number, worker.incarnation + 1))
