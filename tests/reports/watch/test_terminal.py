"""The view in a terminal: it fits, it shows what matters, and elsewhere it is plain lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.analysis.status import RunSnapshot, RunStatus, read_run_snapshot
from paceline.cli.main import main
from paceline.reports.watch.sources import FolderSource
from paceline.reports.watch.terminal import (
    MAX_LOSSES,
    RunHistory,
    other_runs,
    select_run,
    sentences,
    sparkline,
    view,
)
from tests.support.made_up_runs import accounts, log_events, make_folder, progress, result_of, started, whole_run
from tests.support.statuses import RUNS


@settings(max_examples=30)
@given(RUNS, st.sampled_from([40, 80, 120]), st.integers(4, 50), st.lists(st.floats(0.0, 1e6), max_size=90))
def test_it_fits(status: RunStatus, width: int, height: int, losses: list[float]) -> None:
    history = RunHistory()
    history.add([{"kind": "progress", "now": float(at), "loss": loss} for at, loss in enumerate(losses)])
    joined = [{"kind": "worker_lost", "now": 1.5, "worker": worker, "live": 1} for worker in range(9)]
    lines = view(RunSnapshot(status, joined), history, width, height)
    assert len(lines) <= height and all(len(line.text) <= width for line in lines)


def test_how_far_the_loss_the_workers_and_what_happened_last(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    states = ["live", "live", "paused"]
    rows = [started(), progress(1.0, 320, 0.25), progress(2.0, 640, 0.5), accounts(2.0, [1.0, 1.0, 1.0], states)]
    lost = {"kind": "worker_lost", "now": 2.5, "worker": 2, "pushes": 9, "live": 2}
    log_events(folder, *rows, lost, {"kind": "evaluation", "now": 2.5, "test_accuracy": 61.5})
    snapshot, history = read_run_snapshot(folder.path), RunHistory()
    history.add(snapshot.events)
    history.add(snapshot.events)
    text = "\n".join(line.text for line in view(snapshot, history, 60, 40))
    assert "━━━" in text and " 50 %" in text
    assert "loss █▁" in text and "loss 0.6667" in text, "each row counts once"
    assert "worker 2 is paused" in text
    assert text.index("Test accuracy 61.50 %") < text.index("Worker 2 was lost"), "the latest first"


def test_many_who_join_are_one_line() -> None:
    joins = [{"kind": "worker_joined", "now": 0.0, "worker": worker, "incarnation": 0} for worker in range(10_000)]
    assert sentences(joins, "live") == [(0.0, "10,000 workers joined")]
    assert sentences([{"kind": "worker_lost"}, {"now": 1.0}], "live") == [], "rows that are none"


def test_a_history_of_any_length_stays_short_and_keeps_its_course() -> None:
    history = RunHistory()
    rows = [{"kind": "progress", "now": float(at), "loss": 10_000.0 - at} for at in range(10_000)]
    for row in rows:
        history.add([row])
    assert len(history.losses) < MAX_LOSSES
    assert sparkline(history.losses, 8) == "█▇▆▅▄▃▂▁"


def test_the_run_under_way_is_shown_in_full_and_the_others_in_a_line() -> None:
    names = {"a": "finished", "b": "running", "c": "killed"}
    run_snapshots = [
        RunSnapshot(RunStatus(name, "async", "cnn", 2, status, fraction=0.5), []) for name, status in names.items()
    ]
    shown = select_run(run_snapshots)
    assert shown.status.run == "b"
    assert [line.text.split() for line in other_runs(run_snapshots, shown, 40)] == [
        ["50", "%", "finished", "a"],
        ["50", "%", "killed", "c"],
    ]


def test_plain_lines_where_nothing_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path)
    assert main(["watch", "--terminal", str(folder.path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.splitlines()[-1].endswith("run: finished, 100 %, update 40, loss 0.4000, 320 samples/s")
    assert said.count("Test accuracy") == 4 == said.count("(averaged weights)"), "as on a terminal"


def test_on_a_terminal_it_is_drawn_until_the_run_ends(tmp_path: Path) -> None:
    from paceline.reports.watch.terminal import watch_in_terminal

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    folder = whole_run(tmp_path, end=False)
    folder.write_result(result_of(folder))
    stream = Terminal()
    watch_in_terminal(FolderSource(folder.path), stream)
    assert "━" in stream.getvalue() and "finished" in stream.getvalue()
