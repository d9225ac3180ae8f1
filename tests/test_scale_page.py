"""`docs/scale.md`: its cells agree with what can be worked out by hand, and the page says how it was made."""

from __future__ import annotations

import re
from pathlib import Path

import make_scale_page as maker
import pytest
import scale_model as model
from scale_model import Cell

ROOT = Path(__file__).parents[1]

PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _few_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "LEAST_PUSHES", 200)


@pytest.mark.parametrize("strategy", ["sync", "allreduce", "local"])
@pytest.mark.parametrize(("workers", "gbits"), [(10, 1), (10, 100), (100, 10)])
def test_rounds_of_equal_workers_take_what_the_formula_says(strategy: str, workers: int, gbits: int) -> None:
    cell = Cell(strategy, workers, gbits)
    found = model.simulate(cell)
    assert found is not None
    samples = workers * model.BATCH * cell.steps_a_push
    assert found.rate == pytest.approx(samples / model.round_seconds(cell))
    assert found.computing == pytest.approx(cell.steps_a_push * model.STEP_SECONDS / model.round_seconds(cell))
    assert found.staleness == 0 == found.dropped


def test_the_ring_is_the_textbook_formula() -> None:
    cell = Cell("allreduce", 100, 10)
    exchange = 2 * 99 / 100 * 102.4e6 / 1.25e9 + 2 * 99 * 1e-4
    assert model.round_seconds(cell) == pytest.approx(0.12 + exchange)


def test_a_full_star_serves_what_its_server_can_and_everybody_else_comes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "LEAST_PUSHES", 2_000)
    found = model.simulate(Cell("async", 50, 100))
    assert found is not None
    assert found.rate == pytest.approx(model.BATCH / model.SERVER_SECONDS, rel=0.01)
    assert found.staleness == pytest.approx(49, abs=0.5)


def test_what_one_server_feeds_is_where_both_bounds_meet() -> None:
    link = Cell("async", 1, 10).link
    fed = model.workers_fed(model.NBYTES, model.STEP_SECONDS, link, model.SERVER_SECONDS)
    alone = model.STEP_SECONDS + 2 * (102.4e6 / 1.25e9 + 1e-4) + model.SERVER_SECONDS
    assert fed / alone == pytest.approx(model.star_limit(model.NBYTES, link, model.SERVER_SECONDS))


def test_slow_workers_hold_a_ring_back_and_crashes_hold_it_until_they_are_noticed() -> None:
    even, slow = (model.simulate(Cell("allreduce", 20, 100, name)) for name in ("even", "stragglers"))
    assert even is not None and slow is not None and slow.rate < even.rate / 3
    faults = model.crashes(Cell("allreduce", 20, 100, "crashes"), horizon=3600.0)
    assert len(faults) == 20 and {fault.kind for fault in faults} == {"crash"}
    assert model.never_ends(Cell("sync", 10_000, 1, "crashes")) and not model.never_ends(Cell("sync", 10_000, 1))


def test_the_page_names_its_command_and_its_figures_are_there() -> None:
    assert f"Made by `{maker.COMMAND}`" in PAGE and (ROOT / maker.COMMAND.split()[1]).is_file()
    linked = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert sum(target.endswith(".svg") for target in linked) == 3
    assert all((ROOT / "docs" / target.partition("#")[0]).is_file() for target in linked)


def test_the_page_was_made_from_this_model() -> None:
    """What the template can say without simulating stands in the page as it would be said today."""
    assert maker.fed_table() in PAGE
    cell = Cell("sync", 1_000, 10)
    assert f"| {maker.plain(1_000 * model.BATCH / model.round_seconds(cell))} (" in PAGE
