"""`paceline replay` from the command line: what it prints, where it saves, and what it ends with."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.main import main
from paceline.runs.arrival_log import RECORD_BYTES

TASK = """
import torch, paceline
def build():
    x = torch.randn(64, 8)
    return paceline.Task(torch.nn.Linear(8, 1), torch.nn.functional.mse_loss, train=(x, x[:, :1]))
"""
BODY = struct.Struct("<BBHIIIIfd")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished run of 12 updates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    arguments = ["--task", "task.py:build", "--strategy", "classic", "--steps", "12", "--name", "it", "--threads", "1"]
    assert main(["train", *arguments]) == 0
    capsys.readouterr()
    return Path("runs/it")


def with_loss(log: Path, number: int, loss: float) -> None:
    """Write another loss into a record, under a checksum that is right."""
    content = log.read_bytes()
    at = content.find(b"\n") + 1 + number * RECORD_BYTES
    fields = list(BODY.unpack(content[at : at + BODY.size]))
    fields[7] = loss
    body = BODY.pack(*fields)
    log.write_bytes(content[:at] + body + struct.pack("<I", zlib.crc32(body)) + content[at + RECORD_BYTES :])


def test_an_identical_replay_ends_with_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["replay", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical to the run"
    assert main(["replay", str(run), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["identical"] is True and outcome["first_departure"] is None and outcome["updates"] == 12
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_departure_ends_with_1_and_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_loss(run / "arrivals.log", 6, 0.5)
    assert main(["replay", str(run)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line]
    assert "first at update 5, worker 0's push 5: loss was 0.5, is " in line
    assert main(["replay", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["first_departure"]
    assert (found["update"], found["worker"], found["push"], found["what"]) == (5, 0, 5, "loss")
    assert main(["replay", str(run), "--until", "5"]) == 0
    assert main(["replay", str(run), "--until", "6"]) == 1


def test_until_saves_weights_that_plain_torch_loads(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--until", "12"]) == 0
    assert "weights of update 12 are in runs/it/replay-12.safetensors, sha256 " in capsys.readouterr().out
    saved, final = load_file(run / "replay-12.safetensors"), load_file(run / "weights.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in final.items())
    torch.nn.Linear(8, 1).load_state_dict(saved)
    assert main(["replay", str(run), "--until", "0", "--output", "start.safetensors"]) == 0
    assert not torch.equal(load_file("start.safetensors")["weight"], final["weight"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--until", "13"], "--until 13: this run has 12 updates; give a number from 0 to 12"),
        (["--until=-1"], "--until -1: this run has 12 updates"),
        (["--until", "soon"], "'soon' is not a whole number"),
        (["--output", "x"], "add --until N"),
        (["--until", "3", "--output", "task.py"], "task.py exists already and is not overwritten"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ") and expected in line


def test_a_run_without_a_result_is_replayed_all_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    assert main(["replay", str(run)]) == 0
    assert "the run has no result to compare; every push equals its log" in capsys.readouterr().out
    with_loss(run / "arrivals.log", 3, 0.5)
    assert main(["replay", str(run)]) == 1
