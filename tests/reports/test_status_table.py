"""The text of a status: it fits, it says what is known, and leaves out what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.status import RunStatus, WorkerStatus
from paceline.reports.status_table import MAX_WORKERS, format_status, worker_table
from tests.support.statuses import RUNS


@given(RUNS, st.sampled_from([40, 60, 80, 120]))
def test_no_line_is_longer_than_the_terminal(status: RunStatus, width: int) -> None:
    text = format_status(status, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert status.status in text.replace("\n", " ")


def test_the_least_telling_columns_go_first_and_never_who_and_what() -> None:
    shares = {"computing": 0.5, "sending": 0.2, "waiting": 0.2, "server": 0.1}
    one = WorkerStatus(0, "live", shares, 0.01, 0.01, 10, 123_456, 3.5, 0.2)
    heads = {width: worker_table([one], width).split("\n")[0].split() for width in (80, 60, 40, 10)}
    assert heads[80] == ["worker", "state", "compute", "send", "wait", "server", "step", "pushes", "stale", "seen"]
    assert heads[10] == ["worker", "state", "compute"]
    for wide, narrow in ((80, 60), (60, 40), (40, 10)):
        assert set(heads[narrow]) < set(heads[wide])


def test_what_nobody_measured_has_no_column() -> None:
    text = worker_table([WorkerStatus(0, "done", {"computing": 1.0}), WorkerStatus(1, "done", {"computing": 0.5})])
    assert text.split("\n")[0].split() == ["worker", "state", "compute"]


def test_a_thousand_workers_are_a_screenful_with_the_stragglers_in_it() -> None:
    crew = [WorkerStatus(n, "live", {"computing": 1.0}, 9.0 if n == 777 else 1.0, None, 10, 10) for n in range(1000)]
    text = format_status(RunStatus("runs/it", "async", "lenet5", 1000, "running", workers=tuple(crew)))
    assert len(text.splitlines()) < MAX_WORKERS + 8
    assert "\n777 " in text
    assert "worker 777 is slow (compute): 9 s per step, the others 1 s" in text
    assert "and 968 more workers" in text


@pytest.mark.parametrize(("status", "said"), [("running", True), ("evaluating", False), ("finished", False)])
def test_a_silent_server_is_told_of_while_it_should_speak(status: str, said: bool) -> None:
    crew = tuple(WorkerStatus(n, "live", {"computing": 1.0}, 1.0, None, 10, 10) for n in range(2))
    found = RunStatus("runs/it", "sync", "lenet5", 2, status, quiet_seconds=60.0, workers=crew)
    text = format_status(found)
    assert ("nothing was written for 1 min" in text) == said
    assert ("no stragglers" in text) != said


@pytest.mark.parametrize(
    ("status", "at", "said"),
    [("running", 2.0, True), ("running", 4.95, False), ("killed", 5.0, True), ("finished", 2.0, False)],
)
def test_older_figures_of_workers_say_of_when_they_are(status: str, at: float, said: bool) -> None:
    crew = (WorkerStatus(0, "live", {"computing": 1.0}, 1.0, None, 10, 10),)
    found = RunStatus("runs/it", "sync", "lenet5", 1, status, updates=709, seconds=5.0, workers=crew, workers_at=at)
    text = " ".join(format_status(found).split())
    assert (f"since the server started, as last written after {at:g} s:" in text) == said
    assert ("killed, at least update 709" in text) == (status == "killed")


@pytest.mark.parametrize(("factor", "said"), [(None, False), (1.0, False), (0.6131, True)])
def test_steps_that_the_rule_shortens_are_one_line(factor: float | None, said: bool) -> None:
    text = format_status(RunStatus("runs/it", "async", "lenet5", 8, "running", step_factor=factor))
    assert ("step limit: lr x 0.61: the loss is too sharply curved for 8 workers' steps" in text) == said
    assert ("step limit" in text) == said


@pytest.mark.parametrize(("at", "said"), [(188, "loss 1.5268,"), (34, "loss 1.5268 at update 34,"), (None, "loss")])
def test_a_loss_says_of_which_update_it_is_if_more_followed(at: int | None, said: str) -> None:
    loss = None if at is None else 1.5268
    found = RunStatus("it", "async", "own", 2, "finished", updates=188, rate=10.0, loss=loss, loss_at=at)
    assert (said in format_status(found)) == (at is not None)
