"""The optional trackers: TensorBoard's files as TensorBoard reads them, the others against what they call."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder
from paceline.tracking.backends import CsvFile, MLflow, TensorBoard, Wandb
from paceline.tracking.feed import feed

RESULT = {"status": "finished", "updates": 24, "samples": 768, "train_seconds": 3.0, "test_accuracy": 55.0, "lr": 0.1}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(RunConfig(runs=str(tmp_path), name="run", workers=2, lr=0.1))
    with EventLog(made.events_file) as events:
        events.write("run_started", 0.0, workers=2, strategy="async", updates=0)
        events.write("progress", 1.0, updates=10, samples=320, loss=2.25, rate=None)
        events.write("worker_lost", 2.5, worker=0, pushes=12, live=1)
    made.write_result(RESULT)
    return made


class Calls:
    """A module or an object of which every call is noted."""

    def __init__(self, heard: list[tuple[Any, ...]]) -> None:
        self.heard = heard

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.heard.append((name, *arguments, named) if named else (name, *arguments))
            return SimpleNamespace(
                **{one: getattr(self, one) for one in ("log", "define_metric", "finish")}, summary={}
            )

        return call


def test_mlflow_is_called_as_it_wants_to_be(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "mlflow", Calls(heard))
    feed(folder, "mlflow", MLflow())
    assert heard[0] == ("start_run", {"run_name": "run"})
    assert heard[1][0] == "log_params" and heard[1][1]["lr"] == 0.1 and None not in heard[1][1].values()
    assert heard[2] == ("log_metrics", {"progress/loss": 2.25}, {"step": 10})
    last = {"result/train_seconds": 3.0, "result/test_accuracy": 55.0}
    assert heard[3:] == [("log_metrics", last, {"step": 24}), ("end_run", "FINISHED")]


def test_wandb_is_called_as_it_wants_to_be(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "wandb", Calls(heard))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    folder.result_file.unlink()
    feed(folder, "wandb", Wandb())
    name, told = heard[0]
    assert name == "init" and (told["project"], told["name"], told["dir"]) == ("paceline", "run", str(folder.path))
    assert told["config"]["workers"] == 2
    assert heard[-2:] == [
        ("log", {"updates": 10, "seconds": 1.0, "progress/loss": 2.25}),
        ("finish", {"exit_code": 1}),
    ]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the extra tensorboard")
def test_tensorboard_reads_the_event_files(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with EventLog(folder.events_file) as events:
        events.write("progress", 3.0, updates=20, samples=640, loss=2.0)
        events.write("run_resumed", 2.0, updates=15)  # from a checkpoint: update 20 was taken back
        events.write("progress", 4.0, updates=22, samples=700, loss=1.5)
    for _ in range(2):  # told again, it is written anew
        feed(folder, "tensorboard", TensorBoard())
    assert len(list((folder.path / "tensorboard").iterdir())) == 1
    found = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("progress/loss")] == [(10, 2.25), (22, 1.5)]
    assert found.Scalars("result/test_accuracy")[0].value == 55.0
    (lost,) = found.Tensors("events/worker_lost/text_summary")
    assert lost.tensor_proto.string_val == [b"worker 0, pushes 12, live 1"]
    assert b"| lr | 0.1 |" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_what_own_loops_report_is_a_line_of_the_csv_file_each(tmp_path: Path) -> None:
    tracker = CsvFile()
    tracker.started({}, tmp_path)
    figures = {"f1": 0.5, "recall": "nan", "loss": 2.0}
    tracker.row("reported", {"now": 1.0, "updates": 3, "samples": 60, "worker": 1, "figures": figures})
    tracker.finished(None)
    with (tmp_path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    found = [(line["kind"], line["updates"], line["worker"], line["metric"], line["value"]) for line in lines]
    assert found == [("reported", "3", "1", "f1", "0.5"), ("reported", "3", "1", "loss", "2.0")]
