"""A diverged run goes on from its newest checkpoint, if asked also without the batch that ended it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runs.arrival_log import scan_log
from paceline.runs.result import status_of
from paceline.tasks.supervised import SupervisedTask
from tests.support import recorded_runs
from tests.support.recorded_runs import Record, RecordedRun, Small, assert_same, small_config

NAMES = ["async", "sync", "bounded:1", "backup:1"]
healed = [False]


def task_with_a_bad_sample() -> SupervisedTask:
    """Sample 3 of 54 is a NaN: its batch, and no other, makes any run diverge, until the data is healed."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    inputs, targets = torch.randn(54, 5, generator=generator), torch.randint(0, 3, (54,), generator=generator)
    inputs[3] = 0.0 if healed[0] else math.nan
    return SupervisedTask(Small(), F.cross_entropy, (inputs, targets), (inputs[:12], targets[:12]))


@pytest.fixture(autouse=True)
def bad_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recorded_runs, "small_task", task_with_a_bad_sample)
    healed[0] = False
    yield


def diverged(record: Record, strategy: str, **settings: Any) -> RecordedRun:
    """A run that took a checkpoint and then met the bad sample."""
    run = record(**{"strategy": strategy, "workers": 3, "epochs": 1.0, "epoch_mode": "own", **settings})
    run.host.verify_with(run.make_worker)
    run.join_all()
    run.push_at_random(2)
    if run.server.divergence is None:
        run.checkpoint()
    run.push_at_random(1000)
    assert run.server.divergence is not None, "the bad sample came too late for this order"
    run.host.finish()
    return run


def replays(run: RecordedRun) -> None:
    again = run.replay()
    again.feed(scan_log(run.folder.arrivals_file, run.config).effective_records)
    assert again.mismatch is None
    assert_same(again.server, run.server)


@pytest.mark.parametrize("strategy", NAMES)
def test_a_diverged_run_passes_over_the_batch_and_finishes(record: Record, strategy: str) -> None:
    run = diverged(record, strategy)
    found = run.server.divergence
    assert found is not None
    assert run.folder.result()["divergence"] == {"worker": found.worker, "batch": found.batch}  # type: ignore[index]
    rebuilt = run.resume(recovery="skip-batch")
    assert rebuilt.skip == (found.worker, found.batch)
    run.join_all()
    run.run_to_the_end()
    assert run.server.divergence is None and status_of(run.server, None) == "finished"
    assert any(note == f"batch {found.batch} of worker {found.worker} is passed over" for note in run.notes)
    replays(run)


def test_the_batch_stays_out_after_further_crashes(record: Record) -> None:
    run = diverged(record, "async", keep=9)
    run.resume(recovery="skip-batch")
    for recovery in ("log", "checkpoint"):
        run.join_all()
        run.checkpoint()
        run.push_at_random(2)
        run.resume(recovery=recovery)
    run.join_all()
    run.run_to_the_end()
    assert run.server.divergence is None
    replays(run)


def test_without_skipping_the_batch_comes_again(record: Record) -> None:
    run = diverged(record, "async")
    version = run.server.version
    rebuilt = run.resume(recovery="checkpoint")
    assert rebuilt.skip is None and run.server.version < version
    run.join_all()
    run.push_at_random(1000)
    assert run.server.divergence is not None


def test_from_its_checkpoint_a_run_goes_on_once_the_cause_is_gone(record: Record) -> None:
    run = diverged(record, "sync")
    healed[0] = True
    run.resume(recovery="checkpoint")
    run.join_all()
    run.run_to_the_end()
    assert status_of(run.server, None) == "finished"
    replays(run)


def test_the_batch_can_be_the_first_of_a_run_without_a_checkpoint(record: Record) -> None:
    run = record(strategy="async", workers=3, epochs=1.0)
    run.join_all()
    for worker in range(3):
        push = run.instances[worker].push()
        assert push is not None
        run.host.handle(push._replace(loss=math.inf) if worker == 2 else push)
    run.host.finish()
    rebuilt = run.resume(recovery="skip-batch")
    assert rebuilt.skip == (2, 0)
    run.join_all()
    reply = run.instances[2].pending
    assert reply is not None and reply.batch == 1


def test_it_is_refused_where_a_batch_has_no_name(record: Record, tmp_path: Path) -> None:
    run = diverged(record, "async")
    for settings, why in (
        ({"strategy": "local:2", "path": "star"}, "several batches"),
        ({"max_workers": 4}, "divides"),
    ):
        config = small_config(tmp_path, **{"workers": 3, "strategy": "async", **settings}, recovery="skip-batch")
        run.config = config
        with pytest.raises(UserError, match=why):
            run.resume()


def test_resume_says_how_a_diverged_run_can_go_on(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    run = diverged(record, "async")
    assert main(["resume", str(run.folder.path)]) == 2
    said = capsys.readouterr().err
    assert "is diverged after" in said and "--recovery checkpoint goes back to its newest checkpoint" in said
