"""Several servers for real: the bits of one, and a run that goes on after one of them was killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_commands import RUN, address_of, serve, workers
from tests.support.commands import Command, replays, result_of, run, wait_for_records
from tests.support.waiting import until

pytestmark = pytest.mark.real


def test_two_servers_have_the_bits_of_shared_memory(tmp_path: Path) -> None:
    """The second is started as the first one says."""
    settings = ("--strategy", "sync", "--workers", "2", "--steps", "30", "--weight-decay", "0.001")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *settings, "--servers", "2", "--shards-elsewhere")
        until((tmp_path / "runs/it").is_dir, "the folder of the run")
        shard = stack.enter_context(Command("shard", "--run", "runs/it", cwd=tmp_path))
        (there,) = workers(stack, tmp_path, 1, "--overlap", "1")  # one process that is both workers
        assert server.finish() == 0, server.err
        assert there.finish() == 0, there.err
        assert shard.finish() == 0, shard.err
        assert "waiting for 1 further server: 'paceline shard --run runs/it'" in server.err
    here = run("train", *RUN[:-4], "--name", "here", "--seed", "3", *settings, cwd=tmp_path)
    assert here.process.returncode == 0, here.err
    cut, shared = result_of(tmp_path / "runs/it"), result_of(tmp_path / "runs/here")
    assert cut["servers"] == 2
    for name in ("weights_sha256", "bytes_pushed", "bytes_pulled", "samples"):
        assert cut[name] == shared[name], name


def kill_the_second(folder: Path) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = json.loads((folder / "server.json").read_text())["shards"]
    os.kill(shards[0]["pid"], signal.SIGKILL)
    return shards


def test_a_killed_server_of_two_is_replaced_or_ends_the_run_in_one_line_and_it_can_be_resumed(tmp_path: Path) -> None:
    settings = ("--strategy", "async", "--workers", "2", "--steps", "300", "--checkpoint-every", "0.2")
    codecs = ("--codec", "int8", "--pull-codec", "int8")  # cut and put together; the replay knows one server alone
    folder = tmp_path / "runs/it"
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *settings, *codecs, "--servers", "2", "--restart", "1")
        (there,) = workers(stack, tmp_path, 1, "--overlap", "1")  # one process that is both workers
        wait_for_records(folder, 60)
        before = kill_the_second(folder)
        wait_for_records(folder, 160)
        shards = kill_the_second(folder)
        assert shards[0]["pid"] != before[0]["pid"]
        assert server.finish() == 1
        assert f"server 1 of floats {shards[0]['span'][0]} to {shards[0]['span'][1]}" in server.err
        assert "going on from what its folder holds (restart 1 of 1)" in server.err
        assert "--resume" in server.err.splitlines()[-1] and "Traceback" not in server.err
        assert any((folder / "checkpoints").iterdir())
        again = serve(stack, tmp_path, "--resume", "runs/it")
        assert again.finish() == 0, again.err
        assert there.finish() == 0, there.err
        assert "joining again" in there.err
    result = result_of(folder)
    assert (result["status"], result["updates"], result["servers"], result["resumes"]) == ("finished", 300, 2, 2)
    assert address_of(folder)
    assert replays(tmp_path / "runs/it")
