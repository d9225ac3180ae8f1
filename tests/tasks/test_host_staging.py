"""A task behind memory of the host makes the pushes that it makes in its own: here the CPU stands for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.run import make_server, make_worker, work_of
from paceline.cli.main import main
from paceline.core.messages import Join, Reply
from paceline.core.worker import LocalWorker
from tests.support.recorded_runs import small_config, small_task


def pushes_of(tmp_path: Path, staged: bool, **settings: Any) -> list[torch.Tensor]:
    """All that a worker sends in a run of its own, and what its memory holds at the end."""
    config = small_config(tmp_path, workers=1, **settings)
    task = small_task()
    work = work_of(task, config)
    server, join = make_server(config, task, work), Join(0, 0)
    instance: LocalWorker = make_worker(config, small_task(), work, join, staged=staged)
    replies: list[Reply] = list(server.handle(join).replies)
    found = []
    for _ in range(6):
        for reply in replies:
            server.send_weights(reply, instance.memory)
        instance.pending = replies[-1]
        push = instance.push()
        assert push is not None
        found += [
            push.update.clone(),
            push.state.clone(),
            torch.tensor(push.loss),
            instance.memory.saved_state(push.seq).clone(),
        ]
        replies = list(server.handle(push).replies)
    return [*found, server.weights]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "async"},
        {"strategy": "async", "codec": "int8", "pull_codec": "int8"},
        {"strategy": "async-local:2", "optimizer": "adam", "lr": 0.01},
    ],
    ids=["one step", "codecs", "local steps"],
)
def test_staged_pushes_are_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    there, here = (pushes_of(tmp_path, staged, **settings) for staged in (True, False))
    assert len(there) == len(here) and all(torch.equal(one, other) for one, other in zip(there, here, strict=True))
    assert any(one.count_nonzero() for one in there)


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "a worker computes on cpu, cuda or one of several"), ("cuda:", "a worker computes on cpu, cuda")],
)
def test_another_device_is_refused(capsys: pytest.CaptureFixture[str], device: str, message: str) -> None:
    assert main(["worker", "--connect", "127.0.0.1:1", "--device", device]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--connect", "127.0.0.1:1", "--device", "cuda"]) == 2
    assert "paceline: --device cuda: this machine has no CUDA devices that torch can use" in capsys.readouterr().err
