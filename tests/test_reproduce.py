"""Published tables: their rows, ours beside them, and what is kept between two calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import reproduce
from paceline.assemble import resolve
from paceline.cli import main
from paceline.data.datasets import locate
from paceline.errors import UserError
from paceline.published.optml import choose_rows, published_rows


def test_the_table_has_all_its_rows() -> None:
    rows = published_rows()
    assert len(rows) == 55
    assert sum(row.test_accuracy is None for row in rows) == 1
    assert len({row.name for row in rows}) == 55
    assert {row.mode for row in rows} == {"classic", "sync", "async"}
    for row in rows:
        resolve(row.config(seed=0, epochs=6.0, data_dir=None, runs="runs"))


def test_rows_are_chosen_by_number_and_by_words() -> None:
    assert [row.number for row in choose_rows("2,5-7")] == [2, 5, 6, 7]
    chosen = choose_rows("async cnn labels")
    assert chosen and all(row.mode == "async" and row.split == "labels" and row.model == "cnn" for row in chosen)
    assert len(choose_rows(None)) == 55


@pytest.mark.parametrize(
    ("text", "words"), [("56", "rows 1 to 55"), ("asink", "did you mean"), ("classic cnn", "no row has all of these")]
)
def test_rows_that_do_not_exist_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_rows(text)


@pytest.mark.real
def test_rows_run_once_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = locate("fashion-mnist-sample", None)
    monkeypatch.setattr(reproduce, "locate_data", lambda config: sample)
    flags = ["reproduce", "optml", "--rows", "1,2,20", "--epochs", "0.02", "--runs", str(tmp_path / "optml")]
    assert main(flags) == 0
    first = capsys.readouterr()
    assert "01-classic-1-full-lenet5-sgd" in first.out and "89.20" in first.out
    table = (tmp_path / "optml" / "table.csv").read_text()
    assert table.count("\n") == 4 and "finished" in table
    assert main(flags) == 0
    assert capsys.readouterr().out == first.out
    assert main([*flags[:-4], "--epochs", "0.04", *flags[-2:]]) == 2
    assert "was made with 0.02 epochs" in capsys.readouterr().err
