"""Local steps on real processes: the weights of the simulated run, and a replay from the log alone."""

from __future__ import annotations

from pathlib import Path

from paceline.runs.arrival_log import read_arrivals
from paceline.runs.folder import RunFolder
from tests.support.commands import replays, result_of, run, simulate


def test_star_equals_ring_equals_simulated_equals_replayed(tmp_path: Path, small_files: Path) -> None:
    flags = ["--data-dir", str(small_files), "--threads", "1", "--workers", "2", "--runs", str(tmp_path)]
    flags += ["--strategy", "diloco:3", "--steps", "5", "--optimizer", "adam", "--schedule", "cosine"]
    for path in ("star", "ring"):
        done = run("train", *flags, "--name", path, "--path", path, cwd=tmp_path)
        assert done.process.returncode == 0, done.err
    simulate(*flags, "--name", "simulated", "--speeds", "lognormal:1s,1")
    star, ring, simulated = (result_of(tmp_path / name) for name in ("star", "ring", "simulated"))
    assert star["weights_sha256"] == ring["weights_sha256"] == simulated["weights_sha256"]
    assert (star["updates"], star["samples"]) == (5, simulated["samples"])
    assert replays(tmp_path / "star")


def test_a_slow_process_makes_fewer_steps_and_the_replay_knows(tmp_path: Path, small_files: Path) -> None:
    flags = [
        "--data-dir",
        str(small_files),
        "--threads",
        "1",
        "--workers",
        "2",
        "--runs",
        str(tmp_path),
        "--name",
        "it",
    ]
    done = run("train", *flags, "--strategy", "async-local:4", "--steps", "90", "--delay", "150ms@1", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    records, _ = read_arrivals(tmp_path / "it" / "arrivals.log", RunFolder.open(tmp_path / "it").config())
    assert any(record.kind == "steps" and record.worker == 1 and record.seq < 4 for record in records)
    assert replays(tmp_path / "it")
