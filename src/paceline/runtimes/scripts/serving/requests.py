"""What own loops ask their server for beside replies: weights to evaluate, optimizer states, the final weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from paceline.assembly.own_loop import optimizer_state
from paceline.core.messages import EstimatedStatistics, Leave, OwnLoopInput, Push, ReadOptimizer, ReadWeights
from paceline.core.own_loop.compression import gradient_digest
from paceline.core.server import Server
from paceline.core.server.updates import Updater
from paceline.errors import ProtocolError, UserError
from paceline.runs.folder import ALL_GONE, LOOPS_ENDED, ONE_ENDED
from paceline.runs.result import shared_state
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LoopService
from paceline.settings.preprocessing import split_of
from paceline.settings.strategies import strategy_of
from paceline.system.terminal import seconds_text
from paceline.tasks.script_model import ScriptModel
from paceline.transports.protocol import ScriptPeer

ANSWER_SECONDS, ANSWER_STEPS = 10.0, 3
"""How long a loop may take to end after Ctrl-C: the longer of this and so many of its usual steps."""
LONG_BEFORE = 10  # updates that others make, at least, after a worker that left its loop before them
MAX_PLACE = 2.0**31  # passes over the data, or batches of one: no loop gets so far


class FinalStatistics:
    """Collects the running statistics that workers estimate for the final weights; their mixture is saved."""

    def __init__(self, server: Server, model: ScriptModel) -> None:
        self.server, self._model = server, model
        self._estimates: dict[int, tuple[int, Tensor]] = {}

    def read(self, peer: ScriptPeer) -> None:
        """Answer a worker that reads the weights which would be saved now."""
        assert peer.slot is not None
        evaluated = self.server.evaluated
        peer.slot.weights.copy_(evaluated)
        peer.confirm(averaged=evaluated is not self.server.weights)

    def add(self, peer: ScriptPeer, samples: int) -> None:
        """Take the statistics in a worker's memory; they count with the weight `samples`, 0: not at all."""
        assert peer.slot is not None
        self._estimates[peer.worker] = samples, peer.slot.state.clone()

    def all_came(self, peers: Iterable[ScriptPeer]) -> bool:
        """Whether every worker that is connected has sent its statistics, and there are some."""
        return bool(self._estimates) and all(peer.worker in self._estimates for peer in peers)

    def answer(self, peers: Iterable[ScriptPeer]) -> None:
        """Save the mixture with the weights, and send it to the workers."""
        counted = [self._estimates[worker] for worker in sorted(self._estimates) if self._estimates[worker][0]]
        state = self._model.mixture([state for _, state in counted], [samples for samples, _ in counted])
        if state is None:  # no worker could estimate any
            state = shared_state(self.server, self._model, self.server.evaluated)
        else:
            self._model.set_statistics(self.server.evaluated, state)
        for peer in peers:
            if peer.worker in self._estimates and peer.slot is not None:
                if state is not None:
                    peer.slot.state.copy_(state)
                peer.confirm()
        self.clear()

    def clear(self) -> None:
        """Forget what was sent."""
        self._estimates.clear()


class FirstPushes:
    """Compares the first push of each worker with those of the others: equal ones were computed from the same data."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._digests: dict[int, bytes | None] = {}

    def check(self, push: Push, updater: Updater) -> None:
        """Raise UserError if another worker pushed the same gradient first."""
        known = self._digests
        if len(known) == self._num_workers or push.worker in known or push.weight == 0.0:
            return
        digest = gradient_digest(push, updater)
        same = next((worker for worker, other in known.items() if other == digest), None)
        if same is not None and digest is not None:
            what = f"workers {same} and {push.worker} pushed the same gradient first: they train on the same data"
            walks = "if the loop walks over its data in order, data = session.split(data)"
            draws = "if it draws from a torch.Generator of its own, session.rng() gives one that differs"
            raise UserError(f"{what}; give session.prepare(...) the loader or data set; {walks}; {draws}")
        known[push.worker] = digest


class LoopRequests(LoopService):
    """Answers the evaluations of own loops, and at the end brings all of them to the weights that are saved."""

    def __init__(
        self,
        host: Host,
        model: ScriptModel,
        connected: Mapping[int, ScriptPeer],
        awaits_worker: Callable[[], bool],
        note: Callable[[str], None] = lambda text: None,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """`connected` are the workers by number; `awaits_worker` says whether the run waits for one that may return.

        `note` shows the user one line; `ending` is called before the workers get the final weights.
        """
        self._note, self._end = note, ending
        self._interrupted: float | None = None
        self._left: dict[int, int] = {}  # the update at which workers left their loops, until that is said
        self._host, self._connected, self._awaits_worker = host, connected, awaits_worker
        self._statistics = FinalStatistics(host.server, model)
        self._ended_first: int | None = None  # the worker whose loop ended first, if training needs all
        self._ending: dict[int, ScriptPeer] = {}  # workers that wait for the final weights
        self._at_end: set[int] = set()  # workers that have them
        self._has_statistics = not model.state_layout.parameters  # whether those of the final weights are known
        self._is_saved = False
        self._stop_reason = ALL_GONE
        self._first_pushes = FirstPushes(host.server.num_workers) if _needs_other_data(host) else None

    def check_push(self, push: Push) -> None:
        """Stop the run if two workers push the same gradient first: then they see the same data.

        ProtocolError if it is for an optimizer that does not exist, or says a place in the data that is none.
        """
        server = self._of_optimizer(push.worker, push.optimizer)
        layout, says = server.own_loops.layout, push.loop if push.loop is not None else push.state[:0]
        places = says[: layout.num_places] if layout.size else says  # without an optimizer a loop says nothing else
        if not bool((places.abs() <= MAX_PLACE).all()):
            raise ProtocolError(f"worker {push.worker} said that its loop is at {places.tolist()}")
        if self._first_pushes is not None:
            self._first_pushes.check(push, server.updater)
        if self._ended_first is not None and not self._host.server.finished:
            self._end_for_all()
            self.settle()
        if self._left:
            self._say_who_left()

    def _say_who_left(self) -> None:
        """Name the workers that left their loops long before the others, who still train."""
        for worker, update in list(self._left.items()):
            if self._host.server.version > update + max(LONG_BEFORE, update // 10):
                del self._left[worker]
                self._note(f"worker {worker} left its loop at update {update}, before the others, who go on without it")

    def _of_optimizer(self, worker: int, number: int) -> Server:
        servers = self._host.server.by_optimizer
        if number >= len(servers):
            raise ProtocolError(f"worker {worker} asked for optimizer {number}, which this run does not have")
        return servers[number]

    def take(self, peer: ScriptPeer, message: OwnLoopInput) -> None:
        """Take a message that only a user's own loop sends. ProtocolError if no loop of this run can send it."""
        if isinstance(message, ReadWeights) and message.final:
            self._await_end(peer)
            return
        if isinstance(message, ReadOptimizer):
            self._of_optimizer(peer.worker, message.optimizer)
        self._host.handle(message)
        if isinstance(message, ReadWeights):
            self._statistics.read(peer)
        elif isinstance(message, ReadOptimizer):
            peer.send_optimizer(optimizer_state(self._host.server, message.optimizer))
        elif isinstance(message, EstimatedStatistics):
            self._statistics.add(peer, message.samples)
            self.settle()

    def _await_end(self, peer: ScriptPeer) -> None:
        """Let a worker wait for the final weights. If it has work left, it leaves training now."""
        server = self._host.server
        member = server.members[peer.worker]
        if member.live and not member.inactive and not server.finished:
            self._stop_reason = LOOPS_ENDED
            if strategy_of(self._host.config).needs_all:
                self._ended_first = peer.worker if self._ended_first is None else self._ended_first
                if any(one.held for one in server.by_optimizer):
                    self._end_for_all()
            else:
                self._left[peer.worker] = server.version
                self._host.handle(Leave(peer.worker, peer.incarnation, done=True))
        self._ending[peer.worker] = peer
        self.settle()

    def _end_for_all(self) -> None:
        """End a run that needs all workers: one has ended its loop, and another has work left."""
        self._host.stop(f"{ONE_ENDED} (worker {self._ended_first}), and {self._host.config.strategy} needs all")

    def forget(self, peer: ScriptPeer) -> None:
        """A worker is gone: the others do not wait for it."""
        if self._ending.get(peer.worker) is peer:
            del self._ending[peer.worker]

    def interrupt(self, now: float) -> None:
        """Ctrl-C or SIGTERM has come: every loop is to end."""
        self._interrupted = self._interrupted or now

    def silent(self, now: float) -> list[tuple[int, str]]:
        """Workers whose loops have not ended in time after that, and why to go on without them."""
        if self._interrupted is None:
            return []
        found, seconds = [], now - self._interrupted
        for worker in sorted(self._connected.keys() - self._ending.keys() - self._at_end):
            usual = self._host.accounting.stall_detector.usual(worker) or 0.0
            if seconds >= max(ANSWER_SECONDS, ANSWER_STEPS * usual):
                what = f"worker {worker} has not ended its loop after {seconds_text(round(seconds))}"
                found.append((worker, f"{what}: it is killed, and what there is is saved"))
        return found

    def settle(self) -> None:
        """Answer the workers that wait for the end, if it has come."""
        connected, host = self._connected, self._host
        if self._ending and connected.keys() <= self._ending.keys() and not self._awaits_worker():
            host.stop(self._stop_reason)
        if host.server.finished and self._ending:
            self._end()
        while host.server.finished and self._ending:
            worker = min(self._ending)
            host.handle(ReadWeights(worker, final=True))
            self._statistics.read(self._ending.pop(worker))
            self._at_end.add(worker)
        if self._statistics.all_came(connected.values()):
            self._statistics.answer(connected.values())
            self._has_statistics = True
        is_over = host.server.finished and self._has_statistics and connected and connected.keys() <= self._at_end
        if is_over and not self._is_saved and host.server.pushes:  # the scripts go on: they may be ended, or killed
            self._is_saved = True
            host.save_finished()


def _needs_other_data(host: Host) -> bool:
    """Whether workers must push different gradients: there are several, and not all have all data on purpose."""
    return host.server.num_workers > 1 and split_of(host.config).kind != "full" and not host.server.version
