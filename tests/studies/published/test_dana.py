"""The DANA paper's table: its rows, our settings, and runs in several calls."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import Interrupted
from paceline.settings.resolve import resolve
from paceline.simulation.lab import run as lab
from paceline.studies.published.dana import choose_rows, published_rows
from tests.support.data_files import cifar_batches

pytestmark = pytest.mark.long


def test_the_rows_are_the_methods_at_four_sizes() -> None:
    rows = published_rows()
    assert len(rows) == 17 and len({row.name for row in rows}) == 17
    figures = {row.name: row.test_accuracy for row in rows}
    assert figures["01-alone-1"] == 91.63 and figures["09-dana-32"] == 83.0 and figures["02-auto-4"] is None
    for row in rows:
        config = resolve(row.config(0, 160.0, "homogeneous", None, "runs"))
        assert (config.schedule, config.batch_size, config.workers) == ("steps:80,120", 128, row.workers)
        assert config.warmup * config.epochs == pytest.approx(5.0) and config.speeds == "gamma:1s,.1,.1"
    assert resolve(rows[0].config(0, 16.0, "heterogeneous", None, "runs")).schedule == "steps:8,12"


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in cifar_batches(per_batch=52).items():
        (folder / name).write_bytes(content)
    return folder.parent


@pytest.mark.real
def test_a_call_goes_on_where_the_last_one_stopped(
    cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "CHUNK", 1)
    assert [row.name for row in choose_rows("1,6")] == ["01-alone-1", "06-dana-4"]

    def flags(runs: str, *more: str) -> list[str]:
        usual = ["--rows", "1", "--epochs", "1", "--data-dir", str(cifar), "--runs", str(tmp_path / runs)]
        return ["reproduce", "dana", *usual, *more]

    assert main(flags("whole")) == 0
    whole = capsys.readouterr().out
    calls, code = 0, Interrupted.exit_code
    while code == Interrupted.exit_code:
        code, calls = main(flags("parts", "--pause-after", "1e-6")), calls + 1
        told = capsys.readouterr()
        assert code == 0 or "0 of 1 runs are done, the state of the others is kept in" in told.err
    assert code == 0 and calls > 2
    table = [(tmp_path / runs / "table.csv").read_text() for runs in ("whole", "parts")]
    assert table[0] == table[1] and not list((tmp_path / "parts" / ".unfinished").iterdir())
    assert "| alone | 1 | 91.63 |" in " ".join(whole.split())
    (row,) = csv.DictReader(table[0].splitlines())
    assert row["row"] == "01-alone-1" and float(row["test_accuracy_mean"]) > 0


@pytest.mark.parametrize(
    ("more", "words"), [("--pause-after=0", "give a number of seconds"), ("--epochs=-1", "above zero")]
)
def test_settings_that_mean_nothing_are_refused(more: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "dana", more]) == 2
    assert words in capsys.readouterr().err
