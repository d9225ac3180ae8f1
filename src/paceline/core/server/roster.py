"""The workers of a run: which take part, which are still expected, and what a reply asks of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping

from torch import Tensor

from paceline.core.membership import DataAssignments, Member
from paceline.core.messages import Join


class Roster:
    """Every worker that joined, the start barrier, and what a reply asks of its worker.

    With `max_workers`, up to that many workers join and leave at any time, and the data is assigned again each time.
    With `shared_data`, every worker computes on all of it.
    """

    def __init__(self, num_workers: int, max_workers: int | None = None, shared_data: bool = False) -> None:
        self.num_workers, self.max_workers = num_workers, max_workers or num_workers
        self.assignments = DataAssignments(num_workers) if max_workers is not None else None
        self.members: dict[int, Member] = {}
        self.pending = set(range(num_workers))  # workers that the start barrier still waits for
        self.returning: set[int] = set()  # lost workers that may join again: the run does not end without them
        self.order: list[int] = []  # the numbers of all members, sorted
        self.steps: dict[int, int] = {}  # local steps of the workers that make fewer than the others
        self.at_work: set[int] = set()  # workers that are connected and have work left
        self.present = 1.0
        """The share of the data that is still computed on, without that of lost and drained workers.

        1 without quotas, and if the data of a worker that has finished is also that of others.
        """
        self.skipped: set[tuple[int, int]] = set()  # (worker, batch): batches that are passed over
        self._batches_at_work = self._batches_finished = 0  # quotas of the workers at work, and of those that are done
        self._counted: dict[int, tuple[int, int]] = {}  # what each worker adds to these two sums
        self._has_own_data = max_workers is None and not shared_data
        self._is_assigned = True

    def changed(self, worker: int) -> None:
        """Note that a worker came, left, or got to the end of its work: the next reply assigns the data again."""
        member = self.members[worker]
        works = member.live and not member.inactive
        (self.at_work.add if works else self.at_work.discard)(worker)
        before, quota = self._counted.get(worker, (0, 0)), member.quota or 0
        self._counted[worker] = now = quota * works, quota * member.quota_reached
        self._batches_at_work += now[0] - before[0]
        self._batches_finished += now[1] - before[1]
        if self._has_own_data and self._batches_finished:
            self.present = self._batches_at_work / (self._batches_at_work + self._batches_finished)
        self._is_assigned = False

    def admit(self, join: Join) -> Member | None:
        """Make a worker, or its next incarnation, a member; None if it is not admitted."""
        before = self.members.get(join.worker)
        is_known = before is not None and (before.live or join.incarnation <= before.incarnation)
        is_out = before is not None and before.expelled
        if is_known or is_out or join.worker >= self.max_workers:
            return None
        member = Member(join.incarnation, join.quota, threads=join.threads, own_loop=join.own_loop)
        if before is None:
            insort(self.order, join.worker)
        else:
            member.accepted, member.pushes, member.dropped = before.accepted, before.pushes, before.dropped
            member.released = before.draining and not before.released  # it was lost before it heard of its drain
        member.accepted = self.past_skipped(join.worker, member.accepted)
        self.members[join.worker] = member
        self.pending.discard(join.worker)
        self.returning.discard(join.worker)
        self.changed(join.worker)
        return member

    def skip(self, worker: int, batch: int) -> None:
        """Pass over one batch of a worker, now or when its turn comes."""
        self.skipped.add((worker, batch))
        if (member := self.members.get(worker)) is not None:
            member.accepted = self.past_skipped(worker, member.accepted)

    def past_skipped(self, worker: int, batch: int) -> int:
        """The first batch of a worker, from `batch` on, that is not passed over."""
        while (worker, batch) in self.skipped:
            batch += 1
        return batch

    def expect_again(self) -> None:
        """Set the start barrier for every worker of the start that has work left, the expelled ones included."""
        known = self.members
        self.returning.clear()
        for member in known.values():
            member.expelled = False
        self.pending = {w for w in range(self.num_workers) if w not in known or not known[w].inactive}

    @property
    def all_quotas_reached(self) -> bool:
        """Whether every worker that the run started with has reached its quota."""
        return all(worker in self.members and self.members[worker].quota_reached for worker in range(self.num_workers))

    def waiting(self) -> list[int]:
        """Workers that wait for a reply, in worker order."""
        return [worker for worker in self.order if self.members[worker].live and self.members[worker].waiting]

    def assign_data(self, worker: int, assignments: DataAssignments) -> None:
        """Give a worker the newest assignment of the data; the first reply after a change of membership makes it."""
        if not self._is_assigned:
            members = ((w, self.members[w]) for w in self.order)
            assignments.look(tuple(w for w, m in members if m.live and not (m.inactive or m.draining)))
            self._is_assigned = True
        assignments.tell(worker, self.members[worker].accepted)

    def state_for(self, worker: int, states: Mapping[int, Tensor]) -> Tensor | None:
        """The buffers (running statistics) that the model of an own loop begins with: those of its last push.

        One that has not pushed begins with those of the lowest-numbered worker that trains, or else that has pushed.
        """
        if not self.members[worker].own_loop or not states:
            return None
        return states[min({worker} & states.keys() or self.at_work & states.keys() or states)]

    def set_local_steps(self, worker: int, steps: int, lr: float) -> None:
        """Set what the next reply asks for: `steps` local steps, or fewer if the worker is slow or near its quota."""
        member = self.members[worker]
        left = steps if member.quota is None else member.quota - member.accepted
        member.steps = max(0, min(self.steps.get(worker, steps), left))
        member.lr = lr

    def replace_members(self, members: dict[int, Member], pending: Iterable[int]) -> None:
        """Become the roster of a checkpoint."""
        self.members.clear()
        self.members.update(members)
        self.order[:] = sorted(members)
        self.pending = set(pending)
        self.at_work.clear()
        self._counted.clear()
        self.present, self._batches_at_work, self._batches_finished = 1.0, 0, 0
        for worker in self.order:
            self.changed(worker)
