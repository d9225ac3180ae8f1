"""A replay says where it first departs from the run, and saves the weights of any update on the way."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import UserError
from paceline.runs import arrival_log as arrivals
from paceline.runs.checkpoint import take_checkpoint, write_checkpoint
from paceline.runs.compare_replay import checkpoints_by_record, compare
from paceline.runs.recording import Recording, open_recording
from paceline.runs.recovery import rebuild
from paceline.runs.replay import same_float32
from paceline.runs.result import trained_tensors, weights_sha256
from paceline.studies.replay import describe
from tests.support.recorded_runs import Record, RecordedRun, Small, ignore, small_task
from tests.support.rings import long_but

pytestmark = pytest.mark.long  # left to `make test`

STRATEGIES = ["classic", "sync", "async", "backup:1", "bounded:1"]


def made(record: Record, **settings: Any) -> RecordedRun:
    """A whole run with a result, whose worker 1 left and came back."""
    run = record(**{"strategy": "async", "workers": 2, "epochs": 1.0, **settings})
    run.join_all()
    run.push_at_random(6)
    if len(run.instances) > 1:
        run.leave(1)
        run.push_at_random(3)
        run.join(1)
    run.push_at_random(10_000)
    run.host.finish()
    run.close()
    return run


def replayed(run: RecordedRun, recording: Recording | None = None, **arguments: Any) -> dict[str, Any]:
    """The outcome of a replay, as `paceline replay` has it."""
    recording = recording or open_recording(run.folder.path)
    return compare(
        run.replay(compare_with=checkpoints_by_record(recording), **arguments), recording, small_task(), ignore
    )


def changed(recording: Recording, number: int, **fields: Any) -> Recording:
    """The recording with one record that says something else."""
    records = list(recording.log.records)
    records[number] = dataclasses.replace(records[number], **fields)
    return dataclasses.replace(recording, log=dataclasses.replace(recording.log, records=records))


def pushes(recording: Recording) -> list[int]:
    return [number for number, record in enumerate(recording.log.records) if record.kind == "push"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_replays_identically(record: Record, strategy: str) -> None:
    run = made(record, strategy=strategy, workers=1 if strategy == "classic" else 3)
    outcome = replayed(run)
    assert (outcome["identical"], outcome["first_departure"]) == (True, None)
    assert outcome["weights_sha256"] == outcome["recorded_sha256"]
    assert describe(outcome)[-1] == "identical to the run"


def test_the_first_loss_that_differs_is_named_and_the_replay_goes_on(record: Record) -> None:
    run = made(record)
    recording = open_recording(run.folder.path)
    first, second = pushes(recording)[7], pushes(recording)[9]
    was = recording.log.records[first]
    recording = changed(recording, first, loss=float(torch.tensor(was.loss).nextafter(torch.tensor(math.inf))))
    outcome = replayed(run, changed(recording, second, loss=5.0))
    mismatch = outcome["first_departure"]
    assert outcome["identical"] is False and outcome["updates"] == run.server.version
    assert (mismatch["update"], mismatch["worker"], mismatch["push"]) == (7, was.worker, was.seq)
    assert mismatch["what"] == "loss" and mismatch["replayed"] == pytest.approx(was.loss)
    (line,) = [line for line in describe(outcome) if line.startswith("DIFFERENT")]
    assert f"first at update 7, worker {was.worker}'s push {was.seq}: loss was " in line
    words = line.split()
    assert words[-1] != words[-3], "one bit is seen in what is printed"


def test_another_task_departs_at_the_first_push(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(record)
    monkeypatch.setattr("torch.manual_seed", lambda seed: torch.default_generator.manual_seed(seed + 1))
    outcome = replayed(run)
    assert outcome["identical"] is False
    assert outcome["first_departure"]["update"] == 0 and outcome["first_departure"]["what"] == "loss"


def test_losses_are_compared_as_float32() -> None:
    assert same_float32(math.nan, -math.nan) and same_float32(0.1, 0.1 + 1e-12) and same_float32(1e300, math.inf)
    assert not same_float32(0.1, math.nan) and not same_float32(0.0, -0.0) and not same_float32(0.1, 0.1 + 1e-7)


def test_a_departure_with_a_loss_that_is_no_number_is_json(record: Record) -> None:
    run = made(record)
    recording = open_recording(run.folder.path)
    outcome = replayed(run, changed(recording, pushes(recording)[2], loss=math.nan))
    assert outcome["first_departure"]["recorded"] == "nan"
    json.loads(json.dumps(outcome, allow_nan=False))
    assert "loss was nan, is " in describe(outcome)[1]


def test_another_verdict_ends_the_replay_there(record: Record) -> None:
    run = made(record)
    recording = open_recording(run.folder.path)
    number = pushes(recording)[5]
    outcome = replayed(run, changed(recording, number, disposition=arrivals.Disposition.DROPPED))
    assert outcome["identical"] is False
    found = outcome["first_departure"]
    assert (found["update"], found["what"], found["recorded"], found["replayed"]) == (5, "verdict", "DROPPED", "TAKEN")
    assert f"at record {number} (update 5)" in outcome["stuck"]


def test_other_samples_are_a_departure(record: Record) -> None:
    run = made(record)
    recording = open_recording(run.folder.path)
    outcome = replayed(run, changed(recording, pushes(recording)[0], samples=7))
    assert outcome["first_departure"]["what"] == "samples"
    assert "samples were 7, are 4" in describe(outcome)[1]


def test_a_checkpoint_on_the_way_is_compared_where_it_was_taken(record: Record) -> None:
    run = record(strategy="async", workers=2, epochs=1.0)
    run.join_all()
    run.push_at_random(9)
    checkpoint = take_checkpoint(
        run.server, {w: instance.memory for w, instance in run.instances.items()}, run.host.log.nbytes, 1.0
    )
    write_checkpoint(run.folder.checkpoints, checkpoint)
    run.push_at_random(10_000)
    run.host.finish()
    run.close()
    assert replayed(run)["identical"] is True
    checkpoint.tensors["weights"][0] += 1.0
    write_checkpoint(run.folder.checkpoints, checkpoint)
    outcome = replayed(run)
    assert outcome["identical"] is False
    assert describe(outcome)[1].endswith(": by update 9: its weights were those of checkpoint 9, are others")


def test_weights_that_differ_only_at_the_end_are_a_departure_too(record: Record) -> None:
    run = made(record)
    result = {**(run.folder.result() or {}), "weights_sha256": "0" * 64, "environment": {"torch": "0.1"}}
    run.folder.write_result(result)
    outcome = replayed(run)
    assert outcome["first_departure"]["update"] == run.server.version
    assert describe(outcome)[1:] == [
        f"DIFFERENT from the run: by update {run.server.version}: its weights were those of the result, are others",
        "the run was made with torch 0.1",
    ]


def test_a_resumed_run_says_when_its_pushes_come_out_otherwise(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(6)
    run.close()
    monkeypatch.setattr("torch.manual_seed", lambda seed: torch.default_generator.manual_seed(seed + 1))
    notes: list[str] = []
    rebuild(run.new_server(), run.make_worker, run.task, run.config, run.folder, lambda row: notes.append(row["text"]))
    assert "recomputed pushes differ from the logged ones on this machine (first: worker " in notes[-1]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_diverged_run_replays_to_the_same_rejected_push(record: Record, strategy: str) -> None:
    run = record(strategy=strategy, workers=2, lr=1e30, momentum=0.0)
    run.join_all()
    run.push_at_random(1000)
    result = run.host.finish()
    run.close()
    assert result["status"] == "diverged"
    outcome = replayed(run)
    assert outcome["identical"] is True and outcome["updates"] == result["updates"]


def test_a_killed_run_replays_to_the_end_of_its_log_and_departures_are_found(record: Record) -> None:
    run = record(strategy="bounded:1", workers=2)
    run.join_all()
    run.push_at_random(11)
    run.close()
    outcome = replayed(run)
    assert outcome["identical"] is None and outcome["updates"] == run.server.version
    assert describe(outcome)[-1] == "the run has no result to compare; every push equals its log"
    recording = open_recording(run.folder.path)
    outcome = replayed(run, changed(recording, pushes(recording)[3], loss=9.0))
    assert outcome["identical"] is False and outcome["first_departure"]["update"] == 3


@pytest.mark.parametrize("strategy", long_but(["async"], STRATEGIES))
def test_until_saves_the_weights_the_run_had_at_that_update(record: Record, tmp_path: Path, strategy: str) -> None:
    run = record(strategy=strategy, workers=1 if strategy == "classic" else 3, epochs=1.0)
    run.join_all()
    seen = {0: weights_sha256(trained_tensors(run.server, run.task))}
    while not run.server.finished:
        run.push_at_random(1)
        if run.server.version not in seen:
            seen[run.server.version] = weights_sha256(trained_tensors(run.server, run.task))
    run.host.finish()
    run.close()
    assert len(seen) == run.server.version + 1 > 4
    for version, digest in seen.items():
        recording = open_recording(run.folder.path, version, tmp_path / f"{version}.safetensors")
        outcome = replayed(run, recording)
        assert outcome["weights_sha256"] == digest and outcome["updates"] == version
        assert outcome["identical"] is None and outcome["first_departure"] is None
        saved = load_file(outcome["weights_file"])
        assert weights_sha256(saved) == digest
        Small().load_state_dict(saved)
        assert digest in describe(outcome)[1]


def test_until_goes_by_default_into_the_run_folder_and_overwrites_nothing(record: Record) -> None:
    run = made(record)
    outcome = replayed(run, open_recording(run.folder.path, 3))
    assert outcome["weights_file"] == str(run.folder.path / "replay-3.safetensors")
    with pytest.raises(UserError, match=r"replay-3\.safetensors exists already and is not overwritten"):
        open_recording(run.folder.path, 3)


def test_until_just_before_a_departure_sees_none(record: Record) -> None:
    run = made(record)
    recording = open_recording(run.folder.path, 7)
    recording = changed(recording, pushes(recording)[7], loss=9.0)
    assert replayed(run, recording)["first_departure"] is None
    outcome = replayed(run, dataclasses.replace(recording, until=8, output=run.folder.path / "8"))
    assert outcome["first_departure"]["update"] == 7 and outcome["identical"] is False
    assert (run.folder.path / "8").is_file()


@pytest.mark.parametrize("until", [-1, 10_000])
def test_an_update_that_never_was(record: Record, until: int) -> None:
    run = made(record)
    with pytest.raises(UserError, match=rf"--until {until}: this run has {run.server.version} updates"):
        open_recording(run.folder.path, until)


def test_an_update_that_a_killed_run_never_made(record: Record) -> None:
    run = record(strategy="sync", workers=2)
    run.join_all()
    run.push_at_random(9)
    run.close()
    with pytest.raises(UserError, match="--until 9: this run has 4 updates; give a number from 0 to 4"):
        replayed(run, open_recording(run.folder.path, 9))
    assert not list(run.folder.path.glob("*.safetensors"))
