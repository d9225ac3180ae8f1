"""Every way to start workers encrypts what leaves the machine, and tells the workers so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import launch
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runtimes.cluster import rank_star, ssh_launch
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.serve import Listening
from paceline.runtimes.ring import rank as ring_rank
from paceline.settings.ranks import Rank
from paceline.transports.auth import wants_tls


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "of these tests alone")


class Started(Exception):
    """The server would run now."""


def serve(
    config: RunConfig,
    options: ListenOptions,
    console: Console,
    tell: Callable[[Listening], None],
    command: list[str] | None = None,
) -> None:
    """Decide as a server does, and tell the workers."""
    tell(Listening("0.0.0.0:7000", wants_tls(options.tls, options.address), lambda reason: None))
    raise Started


def rank(number: int, machines: int) -> Rank:
    return Rank(number, 2, 0, 2 // machines, "10.0.0.1", 7000, store_is_there=False, step="7.0")


@pytest.mark.parametrize(
    ("machines", "chosen", "encrypted"), [(2, None, True), (2, False, False), (1, None, False), (1, True, True)]
)
def test_ranks_of_a_star(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: int, chosen: bool | None, encrypted: bool
) -> None:
    told: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(rank_star, "serve", serve)
    monkeypatch.setattr(rank_star, "_linger", lambda rank, store: None)
    monkeypatch.setattr(rank_star.FileRendezvous, "tell", lambda store, name, row: told.setdefault(name, row))
    with pytest.raises(Started):
        rank_star.train_as_rank_of_star(RunConfig(runs=str(tmp_path)), rank(0, machines), Console(quiet=True), chosen)
    assert told["server"]["tls"] is encrypted


@pytest.mark.parametrize(("chosen", "flag"), [(None, "--tls"), (True, "--tls"), (False, "--plain")])
def test_workers_over_ssh(monkeypatch: pytest.MonkeyPatch, chosen: bool | None, flag: str) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(
        ssh_launch.RemoteWorkers, "start", lambda workers, ready, token, folder, more, gone: given.append(more)
    )
    plan = ssh_launch.HostPlan([], ListenOptions("0.0.0.0:7000", tls=chosen), None)
    with pytest.raises(Started):
        ssh_launch._work(
            plan, Console(quiet=True), lambda start: serve(RunConfig(), plan.listen, Console(quiet=True), start)
        )
    assert given == [[flag]]


@pytest.mark.parametrize(("number", "machines", "said"), [(0, 2, True), (0, 1, False), (1, 2, False)])
def test_a_ring_between_machines_says_once_that_it_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, machines: int, said: bool
) -> None:
    notes: list[str] = []
    console = Console(quiet=True)
    monkeypatch.setattr(console, "note", notes.append)
    monkeypatch.setattr(ring_rank, "train_as_rank", lambda *given: (None, {}))
    config = RunConfig(strategy="allreduce", dataset="fashion-mnist-sample", runs=str(tmp_path))
    launch.train(config, console, rank(number, machines))
    assert any("neither encrypted nor authenticated" in note for note in notes) == said
    with pytest.raises(UserError, match="without encryption: leave it out"):
        launch.train(config, console, rank(number, machines), tls=True)
