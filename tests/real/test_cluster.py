"""Workers that come over TCP: the bits of shared memory, and nothing lost when a worker, a link or the server dies."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster_commands import RUN, address_of, serve, workers
from tests.support.commands import Command, replays, result_of, run, wait_for_records

pytestmark = pytest.mark.real


def test_sync_over_tcp_has_the_bits_of_shared_memory(tmp_path: Path) -> None:
    """With a model whose last reply is larger than what a socket holds: it must come through all the same."""
    settings = ("--strategy", "sync", "--workers", "2", "--model", "resnet18", "--batch-size", "4", "--steps", "3")
    settings += ("--score", "none")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *settings)
        there = workers(stack, tmp_path, 2)
        assert server.finish() == 0, server.err
        assert [worker.finish() for worker in there] == [0, 0], there[0].err
    here = run("train", *RUN[:-4], "--name", "here", "--seed", "3", *settings, cwd=tmp_path)
    assert here.process.returncode == 0, here.err
    over_tcp, shared = result_of(tmp_path / "runs/it"), result_of(tmp_path / "runs/here")
    assert over_tcp["weights_sha256"] == shared["weights_sha256"]
    assert over_tcp["bytes_pushed"] == shared["bytes_pushed"]


def test_a_newcomer_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "sync", "--workers", "2", "--steps", "160")
        first, second = workers(stack, tmp_path, 2)
        wait_for_records(tmp_path / "runs/it", 60)
        first.process.kill()
        first.finish()
        newcomer = workers(stack, tmp_path, 1)[0]
        assert server.finish() == 0, server.err
        assert [newcomer.finish(), second.finish()] == [0, 0], newcomer.err
    assert result_of(tmp_path / "runs/it")["lost_workers"] in ([0], [1])
    assert replays(tmp_path / "runs/it")


def test_a_killed_server_goes_on_where_it_was_and_its_workers_find_back(tmp_path: Path) -> None:
    """The resumed server has TLS, certificate and token of before, without being told."""
    settings = ("--strategy", "async", "--rule", "foresight-cached", "--average", "on", "--codec", "int8")
    with ExitStack() as stack:
        length = ("--workers", "2", "--steps", "280", "--checkpoint-every", "0.3")
        server = serve(stack, tmp_path, *RUN, *settings, *length, "--tls")
        there = workers(stack, tmp_path, 2, "--tls")
        wait_for_records(tmp_path / "runs/it", 150)
        server.process.kill()
        server.finish()
        again = serve(stack, tmp_path, "--resume", "runs/it")
        assert again.finish() == 0, again.err
        assert [worker.finish() for worker in there] == [0, 0]
        assert "joining again" in there[0].err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"]) == ("finished", 280)
    assert replays(tmp_path / "runs/it")


def test_a_server_that_keeps_itself_going_is_found_at_the_same_address(tmp_path: Path) -> None:
    settings = (
        "--strategy",
        "async",
        "--workers",
        "2",
        "--steps",
        "250",
        "--rule",
        "foresight-cached",
        "--average",
        "on",
    )
    upkeep = ("--checkpoint-every", "0.3", "--restart", "1", "--recovery", "checkpoint", "--durable")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *settings, *upkeep)
        there = workers(stack, tmp_path, 2)
        address = address_of(tmp_path / "runs/it")
        wait_for_records(tmp_path / "runs/it", 100)
        os.kill(json.loads((tmp_path / "runs/it/server.json").read_text())["pid"], signal.SIGKILL)
        assert server.finish() == 0, server.err
        assert [worker.finish() for worker in there] == [0, 0]
        assert "ended (killed by SIGKILL): going on from what its folder holds (restart 1 of 1)" in server.err
        assert address_of(tmp_path / "runs/it") == address and not server.family()
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"], result["resumes"]) == ("finished", 250, 1)
    assert replays(tmp_path / "runs/it")


def test_strangers_and_misfits_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("correct horse battery staple\n")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "other").write_text("wrong, but long enough\n")
    (tmp_path / "other").chmod(0o600)
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "async", "--steps", "20", "--token-file", "token")
        wrong = workers(stack, tmp_path, 1, "--token-file", "other")[0]
        assert wrong.finish() == 2
        assert "token" in wrong.err and "Traceback" not in wrong.err
        busy = run("server", *RUN[:-4], "--name", "two", "--listen", address_of(tmp_path / "runs/it"), cwd=tmp_path)
        assert (
            busy.process.returncode == 2
            and "another program listens there" in busy.err
            and len(busy.err.splitlines()) == 1
        )
        look = run("status", address_of(tmp_path / "runs/it"), "--token-file", "token", "--json", cwd=tmp_path)
        assert look.process.returncode == 0, look.err
        assert [worker["state"] for worker in json.loads(look.out)["workers"]] == ["awaited"] * 2
        right = [stack.enter_context(Command("worker", "--run", "runs/it", cwd=tmp_path)) for _ in range(2)]
        assert server.finish() == 0, server.err
        assert "turned away" in server.err
        assert [worker.finish() for worker in right] == [0, 0]
