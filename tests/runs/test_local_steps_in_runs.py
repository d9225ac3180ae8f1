"""Local steps in recorded runs: replayed to the same bits, and gone on with after a crash, own state and all."""

from __future__ import annotations

import pytest
import torch

from paceline.core.messages import SetLocalSteps
from paceline.runs.checkpoint import write_checkpoint
from paceline.runs.recovery import rebuild
from paceline.runtimes.server.runtime import LocalRuntime
from tests.support.recorded_runs import Record, assert_replays, assert_same, checkpoint_now, records_of, small_task

pytestmark = pytest.mark.long  # left to `make test`

STRATEGIES = ["local:2", "diloco:3", "async-local:2"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_replays_to_the_same_bits_whoever_comes_and_goes(record: Record, strategy: str, optimizer: str) -> None:
    run = record(3, strategy=strategy, workers=3, optimizer=optimizer, schedule="cosine", lr=0.01, epochs=4.0)
    run.join_all()
    run.push_at_random(5)
    run.leave(1)
    run.host.handle(SetLocalSteps(2, 1))
    run.push_at_random(3)
    run.join(1)
    run.run_to_the_end()
    assert run.server.steps == {2: 1}
    assert_replays(run)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_replays_from_a_cut_too(record: Record, momentum: float, codec: str) -> None:
    settings = {"momentum": momentum, "schedule": "cosine", "epochs": 4.0, "codec": codec}
    run = record(3, strategy="async-local:2", workers=3, **settings)
    run.join_all()
    run.host.handle(SetLocalSteps(2, 1))
    run.push_at_random(7)
    checkpoint = checkpoint_now(run)
    run.run_to_the_end()
    again = run.replay(checkpoint=checkpoint)
    again.feed(records_of(run, checkpoint.log_offset))
    assert again.mismatch is None
    assert_same(again.server, run.server)


@pytest.mark.parametrize(
    ("strategy", "path"), [*((strategy, "star") for strategy in STRATEGIES), ("local:2", "ring"), ("diloco:3", "ring")]
)
def test_a_run_goes_on_where_it_was_from_a_checkpoint_or_around_a_ring_from_the_start(
    record: Record, strategy: str, path: str
) -> None:
    """A ring's checkpoint is made by its first worker, who does not know the others' optimizers."""
    run = record(1, strategy=strategy, workers=2, epochs=40.0, path=path)
    run.join_all()
    run.push_at_random(6)
    while not run.server.can_checkpoint:
        run.push_at_random(1)
    write_checkpoint(run.folder.checkpoints, checkpoint_now(run))
    run.push_at_random(5)
    while not run.server.can_checkpoint:
        run.push_at_random(1)
    run.close()
    server, notes = run.new_server(), list[dict[str, str]]()
    rebuild(server, run.make_worker, small_task(), run.config, run.folder, notes.append)
    assert_same(server, run.server)
    assert ("since the start" if path == "ring" else "since checkpoint") in notes[-1]["text"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", ["local:2", "diloco:3"])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(record: Record, strategy: str, optimizer: str) -> None:
    """Whether it was killed or stopped, in the middle of a round: the inner optimizers go on where they were."""
    settings = {"strategy": strategy, "workers": 3, "optimizer": optimizer, "lr": 0.01, "epochs": 6.0}
    for path in ("star", "ring"):
        whole, run = (record(seed, **settings, path=path, name=f"{path}{seed}") for seed in (1, 2))
        whole.join_all()
        whole.run_to_the_end()
        run.join_all()
        run.push_at_random(4)
        run.resume()  # killed
        run.join_all()
        run.push_at_random(5)
        if path == "star":
            run.checkpoint()
        run.push_at_random(2)
        run.resume()
        run.join(2)
        run.resume()  # killed before the others are back
        run.join_all()
        run.push_at_random(4)
        run.host.stop("interrupted")
        for worker in (0, 1):
            run.leave(worker)
        run.host.finish()
        run.resume()
        run.join_all()
        run.run_to_the_end()
        assert torch.equal(run.server.weights, whole.server.weights)
        again = run.replay()
        again.feed(records_of(run))
        assert again.mismatch is None
        assert_same(again.server, run.server)
        assert not any("anew" in note for note in run.notes)


def test_where_a_worker_is_not_brought_its_optimizer_the_resume_says_so(record: Record) -> None:
    run = record(2, LocalRuntime(lambda reply: run.deliver(reply)), strategy="local:2", workers=2, epochs=4.0)
    assert run.runtime is not None
    run.runtime.brings_own_states = False  # as over TCP
    run.join_all()
    run.push_at_random(5)
    run.resume()
    assert run.notes[-1] == "the optimizers of the workers' local steps begin anew, without a state"
    run.join_all()
    run.run_to_the_end()
    assert_replays(run)
