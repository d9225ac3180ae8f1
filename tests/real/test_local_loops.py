"""Local steps and all-reduce in own loops, on processes: equal to one process that does the same, and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.commands import result_of, run

SCRIPT = """
import sys, torch, paceline
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
adam = torch.optim.Adam(net.parameters(), lr=0.05)
session = paceline.join()
net, adam = session.prepare(net, adam)
for number in range(int(sys.argv[1 + session.worker])):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * session.worker + number))
    adam.zero_grad()
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    adam.step()
session.finish()
session.report(steps=session.iteration)
"""


def local_sgd(steps: int, every: int) -> Tensor:
    """Two models with an Adam each; after `every` steps both have their mean."""
    nets, adams = [], []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
        adams.append(torch.optim.Adam(nets[-1].parameters(), lr=0.05))
    for number in range(steps):
        for worker, (net, adam) in enumerate(zip(nets, adams, strict=True)):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * worker + number))
            adam.zero_grad()
            (net(x) - x.sum(1, keepdim=True)).square().mean().backward()  # type: ignore[no-untyped-call]
            adam.step()
        if number % every == every - 1 or number == steps - 1:
            with torch.no_grad():
                for first, second in zip(*(net.parameters() for net in nets), strict=True):
                    first.copy_((first + second) / 2)
                    second.copy_(first)
    return torch.cat([parameter.detach().flatten() for parameter in nets[0].parameters()])


def start(cwd: Path, strategy: str, *steps: str) -> tuple[Tensor, str]:
    (cwd / "loop.py").write_text(SCRIPT)
    command = run("run", "-n", "2", "--strategy", strategy, "--name", strategy, "loop.py", *steps, cwd=cwd)
    assert command.process.returncode == 0, command.err
    again = run("replay", f"runs/{strategy}", cwd=cwd)
    assert again.process.returncode == 0 and "identical to the run" in again.out, again.out + again.err
    saved = load_file(cwd / "runs" / strategy / "weights.safetensors")
    return torch.cat([saved[name].flatten() for name in ("0.weight", "0.bias", "2.weight", "2.bias")]), command.out


def test_local_steps_are_those_of_one_process_that_averages_the_models(tmp_path: Path) -> None:
    weights, _ = start(tmp_path, "local:3", "14", "14")
    torch.testing.assert_close(weights, local_sgd(14, 3), rtol=1e-5, atol=1e-6)
    assert result_of(tmp_path / "runs/local:3")["reported"]["0"]["steps"] == 14.0


def test_a_killed_worker_is_started_again_between_two_exchanges(tmp_path: Path) -> None:
    die = "    if session.worker and number == 7 and not os.path.exists('died'):\n"
    die += "        open('died', 'w'); os.kill(os.getpid(), 9)\n"
    loop = SCRIPT.replace("import sys", "import os, sys").replace("range(int", "range(session.iteration, int")
    (tmp_path / "loop.py").write_text(loop.replace("    adam.zero_grad()\n", f"{die}    adam.zero_grad()\n"))
    flags = ("-n", "2", "--strategy", "local:3", "--restart-workers", "1", "--name", "it")
    command = run("run", *flags, "loop.py", "14", "14", cwd=tmp_path)
    assert command.process.returncode == 0 and "worker 1 was lost (killed by SIGKILL): it is started" in command.err
    assert result_of(tmp_path / "runs/it")["reported"]["1"]["steps"] == 14.0, "it began again after its last exchange"
    again = run("replay", "runs/it", cwd=tmp_path)
    assert again.process.returncode == 0 and "identical to the run" in again.out, again.out + again.err


@pytest.mark.parametrize("strategy", ["diloco:4", "async-local:4"])
def test_workers_with_unequal_loops_finish_and_the_run_replays(tmp_path: Path, strategy: str) -> None:
    start(tmp_path, strategy, "14", "9")
    result = result_of(tmp_path / "runs" / strategy)
    assert (result["status"], result["samples"]) == ("finished", 23), "loops without data count their steps"


def test_allreduce_is_sync_and_ends_with_the_first_loop(tmp_path: Path) -> None:
    both = [start(tmp_path, strategy, "12", "12")[0] for strategy in ("allreduce", "sync")]
    assert torch.equal(*both)
    assert result_of(tmp_path / "runs/allreduce")["reason"] == "every worker ended its loop"
    (tmp_path / "short").mkdir()
    start(tmp_path / "short", "allreduce", "12", "5")
    result = result_of(tmp_path / "short/runs/allreduce")
    assert (result["status"], result["updates"]) == ("finished", 5)
    assert result["reason"] == "a worker ended its loop (worker 1), and allreduce needs all"
