"""The soak keeps quiet about what works, and finds what was broken on purpose, under the right name."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.core.compression import DeltaEncoder, WorkerCompression
from paceline.core.membership import DataAssignments, Member
from paceline.core.messages import Disposition, Leave, Outcome, Push, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Barrier, StaleSynchronous
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Training
from paceline.core.server import Roster, Server, Updater
from paceline.core.worker import LocalWorker
from paceline.interfaces import Batch, Decision
from paceline.runs import checkpoint
from paceline.runs.replay import Replay
from paceline.settings.codecs import CODECS
from paceline.settings.fault_table import KINDS, read_faults
from paceline.settings.rules import RULES, rule_of
from paceline.settings.strategies import ON_DRIFTS, ON_GRADIENTS
from paceline.simulation.simulator import Simulation
from paceline.simulation.soak.draw import Trial, draw, with_faults
from paceline.simulation.soak.soak import SoakSummary, attempt, soak
from paceline.simulation.step_times import StepTimes
from paceline.tasks.local_sgd import LocalSteps
from tests.support.rings import long_but

pytestmark = pytest.mark.long  # left to `make test`

Patch = pytest.MonkeyPatch
SEEDS_FOR_A_MUTANT = 400


def quietly(text: str) -> None:
    pass


def require_clean(seeds: int, first: int) -> SoakSummary:
    summary = soak(seeds, first, quietly)
    assert summary.failure is None, "\n".join(summary.lines())
    return summary


def test_some_seeds_keep_every_promise() -> None:
    require_clean(25, 2000)


@pytest.mark.parametrize("seed", [2499, 2507, 13905, 17153, 18475, 18801])
def test_seeds_that_broke_a_promise_once_keep_it(seed: int) -> None:
    """Checkpoints at the start barrier (17153, 18801), and workers that wait, drain or join as a run ends."""
    require_clean(1, seed)


@pytest.mark.real
def test_a_few_hundred_seeds_keep_every_promise() -> None:
    summary = require_clean(400, 0)
    assert summary.seeds == 400
    assert set(summary.faults) == set(KINDS)
    assert set(summary.strategies) == {*ON_GRADIENTS, *ON_DRIFTS}
    assert set(summary.optimizers) == {"adam", "momentum", "nesterov", "sgd"}
    for rule in set(RULES) - set(summary.rules):  # those that were not drawn by chance
        require_clean(1, next(seed for seed in range(400, 2000) if rule_of(draw(seed).rule).name == rule))
    assert len(summary.rules) > len(RULES) // 2 and set(summary.codecs) == set(CODECS) - {"none"}
    assert summary.dropped > 500 and summary.averaged > 100
    assert summary.restarts > 50 and summary.pushes > 10_000 and summary.unfinished < 30 and summary.diverged > 2


def test_a_seed_is_the_same_trial_every_time() -> None:
    one, other = draw(7), draw(7)
    assert one.cluster.faults == other.cluster.faults and one.quotas == other.quotas
    assert draw(8).cluster.faults != one.cluster.faults


def test_a_ring_ends_when_its_last_workers_have_no_work_left(tmp_path: Path) -> None:
    """Found by a soak: after the last round of own epochs nobody is live, and the ring's cost divided by that."""
    where = ["--runs", str(tmp_path), "--dataset", "fashion-mnist-sample", "--timing-only"]
    ring = ["--workers", "2", "--strategy", "allreduce", "--link", "1gbit,1ms", "--epochs", "0.05"]
    assert main(["simulate", *where, *ring, "--epoch-mode", "own"]) == 0


def apply_repeats(patch: Patch) -> None:
    """A repeated push is taken for a new one."""
    take = Server._push

    def push(self: Server, push: Push) -> Outcome:
        member = self.members.get(push.worker)
        if member is not None and member.live and push.seq == member.seq and not member.waiting:
            member.seq, member.serial = push.seq - 1, push.reply
        return take(self, push)

    patch.setattr(Server, "_push", push)


def take_pushes_of_the_dead(patch: Patch) -> None:
    """A push of an incarnation that left is not refused."""
    take = Server._push

    def push(self: Server, push: Push) -> Outcome:
        member = self.members.get(push.worker)
        if member is not None and not member.live and push.incarnation == member.incarnation and not self.finished:
            member.live = True
            self.policy.join(push.worker)
        return take(self, push)

    patch.setattr(Server, "_push", push)


def answer_the_dead(patch: Patch) -> None:
    """Who leaves while it is held back is answered all the same."""
    take = Server._leave

    def leave(self: Server, leave: Leave) -> Outcome:
        member = self.members.get(leave.worker)
        waited = member is not None and member.waiting
        outcome = take(self, leave)
        return outcome._replace(replies=(*outcome.replies, self._reply(leave.worker))) if waited else outcome

    patch.setattr(Server, "_leave", leave)


def exceed_the_bound(patch: Patch) -> None:
    make = StaleSynchronous.__init__
    patch.setattr(StaleSynchronous, "__init__", lambda self, bound: make(self, bound + 1))


def hold_back_too_early(patch: Patch) -> None:
    make = StaleSynchronous.__init__
    patch.setattr(StaleSynchronous, "__init__", lambda self, bound: make(self, max(0, bound - 1)))


def average_stale_pushes(patch: Patch) -> None:
    """A late push of an earlier round is let into this one."""
    push = Barrier.push
    patch.setattr(Barrier, "push", lambda self, worker, staleness: push(self, worker, 0))


def lose_the_last_record(patch: Patch) -> None:
    feed = Replay.feed
    patch.setattr(Replay, "feed", lambda self, records: feed(self, records[:-1]))


def forget_the_rule_state(patch: Patch) -> None:
    restore = checkpoint.restore_server

    def forget(server: Server, facts: dict[str, Any], weights: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        restore(server, facts, weights, {name: torch.zeros_like(tensor) for name, tensor in state.items()})

    patch.setattr(checkpoint, "restore_server", forget)


def forget_who_waits(patch: Patch) -> None:
    """A restored policy lets nobody go who was held back."""
    restore = StaleSynchronous.restore
    patch.setattr(StaleSynchronous, "restore", lambda self, facts: restore(self, {**facts, "waiting": []}))


def wait_for_who_left(patch: Patch) -> None:
    """A round waits for a worker that is gone."""

    def leave(self: Barrier, worker: int) -> Decision:
        self._live.discard(worker)
        self._pushed.pop(worker, None)
        return Decision()

    patch.setattr(Barrier, "leave", leave)


def never_send_again(patch: Patch) -> None:
    patch.setattr(Simulation, "_retry", lambda self, lost: None)


def never_come_up_again(patch: Patch) -> None:
    patch.setattr(Simulation, "restart_server", lambda self: None)


def skip_a_batch(patch: Patch) -> None:
    """A dropped push counts as accepted."""
    take = Server._push

    def push(self: Server, push: Push) -> Outcome:
        outcome = take(self, push)
        if outcome.disposition != Disposition.DROPPED:
            return outcome
        self.members[push.worker].accepted += 1
        return outcome._replace(replies=tuple(reply._replace(batch=reply.batch + 1) for reply in outcome.replies))

    patch.setattr(Server, "_push", push)


def send_half_the_weights(patch: Patch) -> None:
    """A torn read: the first half of the new version over the second half of the old one."""

    def torn(self: Plain, weights: torch.Tensor, state: object, worker: int, out: torch.Tensor) -> None:
        out[:2].copy_(weights[:2])

    patch.setattr(Plain, "reply_weights", torn)


def average_without_weights(patch: Patch) -> None:
    def mean(self: Updater, pushes: list[Push], samples: int) -> torch.Tensor:
        return torch.stack([push.update for push in pushes]).mean(0)

    patch.setattr(Updater, "_weighted_mean", mean)


def leave_a_coordinate_alone(patch: Patch) -> None:
    step = Sgd.step

    def partly(self: Sgd, weights: torch.Tensor, state: Any, gradient: torch.Tensor, lr: torch.Tensor) -> None:
        kept = weights[3].clone()
        step(self, weights, state, gradient, lr)
        weights[3] = kept

    patch.setattr(Sgd, "step", partly)


def spend_too_much(patch: Patch) -> None:
    make = Server.__init__

    def init(self: Server, weights: Any, rule: Any, policy: Any, training: Training, *others: Any) -> None:
        budget = training.budget
        budget = dataclasses.replace(budget, samples=budget.samples + 20, steps=budget.steps and budget.steps + 1)
        make(self, weights, rule, policy, dataclasses.replace(training, budget=budget), *others)

    patch.setattr(Server, "__init__", init)


def work_beyond_the_quota(patch: Patch) -> None:
    patch.setattr(Member, "quota_reached", property(lambda self: self.quota is not None and self.accepted > self.quota))


def send_an_old_version(patch: Patch) -> None:
    build = Server._reply

    def older(self: Server, worker: int, over: bool = False, again: bool = False) -> Reply:
        reply = build(self, worker, over, again)
        return reply._replace(version=max(0, reply.version - 1))

    patch.setattr(Server, "_reply", older)


def miscount_what_is_dropped(patch: Patch) -> None:
    """A push that was held when the run ended is not counted."""
    drop = Server._drop

    def miscount(self: Server, workers: Iterable[int]) -> None:
        if workers is self.held:
            self.held.clear()
        else:
            drop(self, workers)

    patch.setattr(Server, "_drop", miscount)


def let_a_nan_pass(patch: Patch) -> None:
    """A push with a NaN is mended instead of refused."""
    apply = Updater.apply

    def mend(self: Updater, pushes: list[Push], *others: Any) -> Push | None:
        return apply(self, [push._replace(update=torch.nan_to_num(push.update)) for push in pushes], *others)

    patch.setattr(Updater, "apply", mend)


def draw_from_a_stream(patch: Patch) -> None:
    """Step times are consumed instead of addressed, so a second run draws others."""
    count = itertools.count(1)
    patch.setattr(StepTimes, "seconds", lambda self, worker, step: 1.0 + (next(count) % 997) / 997)


def drain_without_the_last_push(patch: Patch) -> None:
    """Who is drained is told so at once, whatever it is computing."""
    drain = Server._drain

    def at_once(self: Server, worker: int) -> Outcome:
        outcome = drain(self, worker)
        taken = outcome.disposition == Disposition.TAKEN and not outcome.replies
        return outcome._replace(replies=self._carry_out(Decision(release=(worker,)))) if taken else outcome

    patch.setattr(Server, "_drain", at_once)


def deal_to_who_is_gone(patch: Patch) -> None:
    """Only newcomers change the deal."""
    look = DataAssignments.look
    patch.setattr(
        DataAssignments, "look", lambda self, at_work: look(self, tuple(sorted({*self.now.members, *at_work})))
    )


def go_on_counting_after_a_deal(patch: Patch) -> None:
    """A new deal is begun in its middle."""
    tell = DataAssignments.tell
    patch.setattr(DataAssignments, "tell", lambda self, worker, accepted: tell(self, worker, 0))


def wait_for_newcomers(patch: Patch) -> None:
    """A round waits for who came in its middle."""
    make = Barrier.__init__
    patch.setattr(
        Barrier, "__init__", lambda self, spare, joins_wait, num_workers: make(self, spare, False, num_workers)
    )


def lose_batch_size_instead_of_a_spare(patch: Patch) -> None:
    """A round waits for one push fewer for each worker that is lost."""
    make = Barrier.__init__
    patch.setattr(Barrier, "__init__", lambda self, spare, joins_wait, num_workers: make(self, spare, joins_wait))


def forget_the_deals(patch: Patch) -> None:
    patch.setattr(DataAssignments, "restore", lambda self, facts: None)


def consume_the_feedback_of_dropped_pushes(patch: Patch) -> None:
    """A worker goes on from the memory of a push that was dropped."""

    def count_alone(self: WorkerCompression, seq: int, discarded: int) -> None:
        self._discarded = discarded

    patch.setattr(WorkerCompression, "take_back", count_alone)


def forget_what_a_worker_keeps(patch: Patch) -> None:
    """A replayed worker starts with an empty error feedback and a new inner optimizer."""
    patch.setattr(LocalWorker, "load_state", lambda self, local_state: None)


def average_half_as_fast(patch: Patch) -> None:
    share = Averaged._share
    patch.setattr(Averaged, "_share", lambda self, count: 0.5 * share(self, count))


def drift_from_the_wrong_weights(patch: Patch) -> None:
    """Local steps go on where the last ones ended, not where the server says."""
    gradient = LocalSteps.gradient

    def wander(self: LocalSteps, batch: Batch) -> float:
        begin = self._weights.clone()
        self._weights.copy_(self._moving if batch.first else begin)  # type: ignore[attr-defined]
        loss = gradient(self, batch)
        self._weights.copy_(begin)
        return loss

    patch.setattr(LocalSteps, "gradient", wander)


def ask_for_more_local_steps(patch: Patch) -> None:
    ask = Roster.set_local_steps
    patch.setattr(Roster, "set_local_steps", lambda self, worker, steps, lr: ask(self, worker, steps + 1, lr))


def forget_what_replies_brought(patch: Patch) -> None:
    """The server does not count what an encoded reply changes."""
    encode = DeltaEncoder.encode

    def forget(self: DeltaEncoder, worker: int, write_wanted: Any, out: torch.Tensor) -> int:
        held = self.held[worker].clone()
        nbytes = encode(self, worker, write_wanted, out)
        self.held[worker].copy_(held)
        return nbytes

    patch.setattr(DeltaEncoder, "encode", forget)


MUTANTS: dict[Callable[[Patch], None], str] = {
    apply_repeats: "once",
    take_pushes_of_the_dead: "dead",
    answer_the_dead: "dead",
    exceed_the_bound: "bound",
    hold_back_too_early: "held",
    average_stale_pushes: "bound",
    lose_the_last_record: "kept",
    forget_the_rule_state: "kept",
    forget_who_waits: "kept",
    wait_for_who_left: "held",
    never_send_again: "deadlock",
    skip_a_batch: "batch",
    send_half_the_weights: "weights",
    average_without_weights: "weights",
    leave_a_coordinate_alone: "optimum",
    spend_too_much: "budget",
    work_beyond_the_quota: "budget",
    send_an_old_version: "growth",
    miscount_what_is_dropped: "counts",
    let_a_nan_pass: "finite",
    draw_from_a_stream: "same",
    drain_without_the_last_push: "last push",
    deal_to_who_is_gone: "deal",
    go_on_counting_after_a_deal: "batch",
    wait_for_newcomers: "held",
    forget_the_deals: "kept",
    lose_batch_size_instead_of_a_spare: "round",
    consume_the_feedback_of_dropped_pushes: "feedback",
    forget_what_a_worker_keeps: "kept",
    average_half_as_fast: "average",
    drift_from_the_wrong_weights: "weights",
    ask_for_more_local_steps: "batch",
    forget_what_replies_brought: "feedback",
}


@pytest.mark.parametrize("mutant", long_but(list(MUTANTS)[:1], MUTANTS), ids=lambda mutant: mutant.__name__)
def test_what_was_broken_on_purpose_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    summary = soak(SEEDS_FOR_A_MUTANT, 0, quietly)
    assert summary.failure is not None
    assert summary.failure.promise == MUTANTS[mutant], summary.failure.text


@pytest.mark.long
def test_a_worker_that_is_left_behind_is_found_even_where_the_run_goes_on_without_it(monkeypatch: Patch) -> None:
    never_send_again(monkeypatch)
    broken = [broken.promise for _, broken in map(attempt, map(draw, range(60))) if broken is not None]
    assert set(broken) == {"deadlock", "forgotten"}


def test_a_cluster_that_never_ends_is_found(monkeypatch: Patch) -> None:
    """The server stays down: every try is lost again, for ever."""
    never_come_up_again(monkeypatch)
    summary = soak(SEEDS_FOR_A_MUTANT, 0, quietly)
    assert summary.failure is not None and summary.failure.promise == "livelock"
    assert [fault.kind for fault in summary.failure.faults] == ["server"]


@pytest.mark.long
def test_the_table_that_is_left_still_fails_and_none_of_it_can_be_left_out(monkeypatch: Patch) -> None:
    wait_for_who_left(monkeypatch)
    failure = soak(SEEDS_FOR_A_MUTANT, 0, quietly).failure
    assert failure is not None and failure.faults
    trial = draw(failure.seed)
    assert set(failure.faults) < set(trial.cluster.faults)
    for left_out in range(len(failure.faults) + 1):  # the last leaves nothing out
        faults = tuple(fault for place, fault in enumerate(failure.faults) if place != left_out)
        _, broken = attempt(with_faults(trial, faults))
        same = broken is not None and broken.promise == failure.promise
        assert same == (left_out == len(failure.faults))


def test_a_failure_says_how_to_see_it_again(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_who_left(monkeypatch)
    assert main(["soak", "--seeds", "400", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["failure"]
    assert main(["soak", "--seeds", "1", "--first", str(found["seed"])]) == 1
    told = capsys.readouterr().out
    assert found["faults"] in told and f"paceline soak --seeds 1 --first {found['seed']}" in told
    table = tmp_path / "faults.toml"
    table.write_text(found["faults"])
    assert read_faults(table, draw(found["seed"]).max_workers)
    again = ["soak", "--seeds", "1", "--first", str(found["seed"]), "--faults", str(table)]
    assert main(again) == 1
    monkeypatch.undo()
    assert main(again) == 0


def test_the_summary_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--seeds", "20", "--first", "5", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["seeds"], row["first"], row["failure"]) == (20, 5, None)
    assert sum(row["strategies"].values()) == sum(row["optimizers"].values()) == 20 and row["pushes"] > 200


def test_a_long_soak_tells_how_far_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr("paceline.simulation.soak.soak.PROGRESS_SECONDS", 0.0)
    lines: list[str] = []
    soak(3, 0, lines.append)
    assert len(lines) == 3 and lines[1].startswith("2 of 3 seeds, ") and lines[1].endswith("s left")


def test_an_interrupted_soak_says_what_it_found_so_far(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop_at_five(seed: int) -> Trial:
        if seed == 5:
            raise KeyboardInterrupt
        return draw(seed)

    monkeypatch.setattr("paceline.simulation.soak.soak.draw", stop_at_five)
    assert main(["soak", "--seeds", "100"]) == 130
    said = capsys.readouterr()
    assert said.out.startswith("5 seeds from 0 on ") and "interrupted" in said.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seeds", "0"], "--seeds 0: give at least one seed"),
        (["--seeds", "-3"], "--seeds -3: give at least one seed"),
        (["--seeds", "many"], "'many' is not a whole number"),
        (["--first", "-1"], "--first -1: seeds are counted from 0"),
        (["--faults", "nowhere.toml"], "no file nowhere.toml"),
        (["--sedes", "3"], "did you mean --seeds"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
