"""Runs whose rounds are combined by median or trimmed mean: their oracle, recovery, replay, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import RunConfig, max_workers_of
from paceline.core.server import AppliedUpdate
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runtimes.sharded.spans import require_cuttable
from paceline.settings.resolve import resolve
from paceline.simulation.run import simulate
from paceline.studies.batch_runs import resolve_for_simulation
from tests.support.recorded_runs import Record, assert_replays

pytestmark = pytest.mark.long  # left to `make test`

STAR = {"path": "star"}
RUNS = [("sync", "median", {}), ("sync", "trimmed:1", {"codec": "int8"}), ("backup:1", "trimmed:1", {})]
RUNS += [("sync", "median", {"max_workers": 6}), ("diloco:2", "median", STAR), ("local:2", "trimmed:1", STAR)]


@pytest.mark.parametrize(("strategy", "aggregate", "settings"), RUNS)
def test_a_run_survives_a_crash_and_replays(
    record: Record, strategy: str, aggregate: str, settings: dict[str, Any]
) -> None:
    run = record(strategy=strategy, aggregate=aggregate, workers=5, epochs=4.0, **settings)
    run.join_all()
    run.push_at_random(11)
    run.checkpoint()
    run.push_at_random(8)
    run.leave(3)
    before = run.server
    run.resume()
    assert torch.equal(run.server.weights, before.weights)
    run.join_all()
    run.run_to_the_end()
    assert_replays(run)


@pytest.mark.parametrize(("aggregate", "trim"), [("median", 2), ("trimmed:1", 1), ("mean", 0)])
def test_sync_is_one_loop_that_combines_the_same_gradients(record: Record, aggregate: str, trim: int) -> None:
    """Momentum written out in numpy."""
    run = record(strategy="sync", aggregate=aggregate, workers=5, epochs=4.0, momentum=0.9, lr=0.1)
    weights, velocity = run.server.weights.numpy().copy(), 0.0

    def follow(update: AppliedUpdate) -> None:
        nonlocal weights, velocity
        values = np.sort(np.stack([push.update.numpy() for push in update.pushes]), axis=0)
        if trim:
            gradient = values[trim : len(values) - trim].mean(axis=0)
        else:
            gradient = np.average([p.update.numpy() for p in update.pushes], 0, [p.samples for p in update.pushes])
        velocity = np.float32(0.9) * velocity + gradient.astype(np.float32)
        weights = weights - np.float32(0.1) * velocity
        np.testing.assert_allclose(run.server.weights.numpy(), weights, rtol=1e-5, atol=1e-6)

    run.server.on_update = follow
    run.join_all()
    run.run_to_the_end()
    assert run.server.version > 5


@pytest.mark.parametrize("aggregate", ["median", "trimmed:1"])
def test_a_simulated_run_replays(aggregate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"strategy": "sync", "workers": 3, "aggregate": aggregate, "steps": 6, "threads": 1}
    settings |= {"dataset": "fashion-mnist-sample", "batch_size": 4, "score": "none", "runs": "runs"}
    _, one = simulate(resolve_for_simulation(RunConfig(**settings, name="one")), Console(quiet=True))
    _, two = simulate(resolve_for_simulation(RunConfig(**settings, name="two")), Console(quiet=True))
    mean = {**settings, "aggregate": "mean", "name": "mean"}
    _, other = simulate(resolve_for_simulation(RunConfig(**mean)), Console(quiet=True))
    assert one["weights_sha256"] == two["weights_sha256"] != other["weights_sha256"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"strategy": "async", "aggregate": "median"}, "--aggregate median: strategy async applies one push at a time"),
        ({"strategy": "bounded:2", "aggregate": "median"}, "applies one push at a time; use sync or backup:B"),
        ({"strategy": "async-local:4", "aggregate": "median"}, "applies one push at a time"),
        ({"strategy": "classic", "workers": 1, "aggregate": "median"}, "applies one push at a time"),
        ({"strategy": "allreduce", "aggregate": "median"}, "is a ring, which adds pushes up on their way"),
        ({"strategy": "diloco:4", "aggregate": "trimmed:1"}, "or add --path star"),
        ({"strategy": "sync", "aggregate": "trimmed:2"}, "with 4 workers has 4 pushes, and 4 are left out"),
        ({"strategy": "backup:2", "aggregate": "trimmed:1"}, "has 2 pushes, and 2 are left out"),
        ({"strategy": "sync", "aggregate": "trimmed:0"}, "must be a whole number of at least 1"),
        ({"strategy": "sync", "aggregate": "trimmed"}, "write trimmed:K"),
        ({"strategy": "allreduce", "robust": True}, "--robust: strategy allreduce is a ring, where no server takes"),
        ({"strategy": "sync", "aggregate": "medain"}, "did you mean 'median'"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as refusal:
        resolve(RunConfig(**{"workers": 4, **settings}))
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_several_servers_refuse_what_needs_whole_pushes() -> None:
    with pytest.raises(UserError, match="--robust needs the norm of a whole push"):
        require_cuttable(resolve(RunConfig(strategy="async", robust=True)), 2)
    require_cuttable(resolve(RunConfig(strategy="sync", aggregate="median")), 2)


def test_mean_is_the_default_by_another_name() -> None:
    assert resolve(RunConfig(strategy="async", aggregate="mean")) == resolve(RunConfig(strategy="async"))
    assert max_workers_of(resolve(RunConfig(strategy="sync", aggregate="median", workers=3))) == 3
