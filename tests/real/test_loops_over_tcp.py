"""Users' own loops whose workers come over TCP: the bits of one machine, and nothing lost when something dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster_commands import serve, workers
from tests.support.commands import Command, result_of, run, wait_for_records

RUN = ("--threads", "1", "--name", "it", "--seed", "3")
HERE = ("--threads", "1", "--name", "here", "--seed", "3")
LOOP = """
import os, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
from sizes import HIDDEN

print("launcher:", sorted(name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name), file=sys.stderr)
x = torch.randn(800, 4); y = (x[:, 0] > 0).long()
layers = torch.nn.Linear(4, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.Dropout(0.3), torch.nn.Linear(HIDDEN, 2)
net = torch.nn.Sequential(*layers)
net.register_buffer("scale", torch.tensor([2, 3]))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
batches = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
session = paceline.join()
net, optimizer, scheduler, batches = session.prepare(net, optimizer, scheduler, batches)
for epoch in range(int(sys.argv[1])):
    for a, b in batches:
        time.sleep(float(sys.argv[2]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(a), b).backward()
        optimizer.step()
    with session.eval_weights():
        session.report(accuracy=float((net(x).argmax(1) == y).float().mean()))
    scheduler.step()
moments = optimizer.state_dict()["state"]
session.finish()
print("rows", session.worker, sum(p.sum().item() for p in net.parameters()))
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "sizes.py").write_text("HIDDEN = 6\n")


def replay(cwd: Path) -> None:
    command = run("replay", "runs/it", cwd=cwd)
    assert command.process.returncode == 0 and "identical to the run" in command.out, command.out + command.err


@pytest.mark.parametrize("strategy", ["sync", pytest.param("local:4", marks=pytest.mark.long)])
def test_a_loop_over_tcp_has_the_bits_of_one_machine_and_replays(tmp_path: Path, strategy: str) -> None:
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", strategy, "--workers", "2", "--script", "loop.py", "2", "0")
        there = workers(stack, tmp_path, 2)
        assert [worker.finish() for worker in there] == [0, 0], there[0].err
        assert server.finish() == 0, server.err
    here = run(
        "run", *RUN[:2], "--name", "here", "--seed", "3", "--strategy", strategy, "loop.py", "2", "0", cwd=tmp_path
    )
    assert here.process.returncode == 0, here.err
    over_tcp, shared = result_of(tmp_path / "runs/it"), result_of(tmp_path / "runs/here")
    for name in ("weights_sha256", "updates", "samples", "bytes_pushed", "metrics", "status"):
        assert over_tcp[name] == shared[name], name
    (sums,) = {tuple(re.findall(r"rows . (\S+)", worker.out)) for worker in there}
    assert sums and set(re.findall(r"rows . ([\d.-]+?)(?=rows|\s|$)", here.out)) == set(sums)
    replay(tmp_path)


def test_async_loops_lose_a_killed_worker_and_another_goes_on_in_its_place(tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = ("--strategy", "async", "--workers", "2", "--tls")
        server = serve(stack, tmp_path, *RUN, *flags, "--script", "loop.py", "2", "0.15")
        first, second = workers(stack, tmp_path, 2, "--tls")
        wait_for_records(tmp_path / "runs/it", 12)
        first.process.kill()
        first.finish()
        (newcomer,) = workers(stack, tmp_path, 1, "--tls")
        assert [newcomer.finish(), second.finish()] == [0, 0], newcomer.err
        assert server.finish() == 0, server.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["samples"]) == ("finished", 1600) and len(result["lost_workers"]) == 1
    replay(tmp_path)


def test_a_killed_server_that_restarts_loses_nothing_and_its_scripts_start_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = ("--strategy", "sync", "--workers", "2", "--durable", "--restart", "1", "--checkpoint-every", "0.4")
        server = serve(stack, tmp_path, *RUN, *flags, "--script", "loop.py", "2", "0.02")
        there = workers(stack, tmp_path, 2)
        wait_for_records(tmp_path / "runs/it", 40)
        (child,) = [pid for pid in server.family() if pid != server.process.pid]
        os.kill(child, signal.SIGKILL)
        assert [worker.finish() for worker in there] == [0, 0], there[0].err
        assert server.finish() == 0, server.err
    assert "its script starts again" in there[0].err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["samples"], result["lost_pushes"]) == ("finished", 1600, 0)
    replay(tmp_path)


@pytest.mark.long
def test_a_worker_that_the_server_has_dropped_joins_again(tmp_path: Path) -> None:
    """It hung in a step. Its script starts from the top and goes on where it was."""
    hangs = "        seen = globals().get('seen', 0) + 1\n"
    hangs += "        if session.worker == 0 and seen == 8 and not os.path.exists('hung'):\n"
    hangs += "            open('hung', 'w').close(); time.sleep(5)\n"
    (tmp_path / "loop.py").write_text(
        LOOP.replace("        optimizer.zero_grad()\n", f"{hangs}        optimizer.zero_grad()\n")
    )
    with ExitStack() as stack:
        flags = ("--strategy", "async", "--workers", "2", "--stall", "2")
        server = serve(stack, tmp_path, *RUN, *flags, "--script", "loop.py", "2", "0.3")
        there = workers(stack, tmp_path, 2)
        assert [worker.finish() for worker in there] == [0, 0], there[0].err
        assert server.finish() == 0, server.err
    assert sum("its script starts again" in worker.err for worker in there) == 1
    assert result_of(tmp_path / "runs/it")["samples"] == 1600
    replay(tmp_path)


def test_other_code_is_one_line_and_the_place_stays_free(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "loop.py", elsewhere)
    (elsewhere / "sizes.py").write_text("HIDDEN = 7\n")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "async", "--workers", "1", "--script", "loop.py", "1", "0")
        (other,) = workers(stack, tmp_path, 1, "--script", "elsewhere/loop.py")
        assert other.finish() == 2
        assert "elsewhere/sizes.py differs from the file on the server's machine" in other.err
        assert len(other.err.splitlines()) == 1
        (missing,) = workers(stack, tmp_path, 1, "--script", "nowhere.py")
        assert missing.finish() == 2 and "is not here (looked for" in missing.err
        (good,) = workers(stack, tmp_path, 1)
        assert good.finish() == 0, good.err
        assert server.finish() == 0, server.err


def test_overlap_runs_several_workers_of_a_script(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "async", "--workers", "2", "--script", "loop.py", "1", "0")
        (both,) = workers(stack, tmp_path, 1, "--overlap", "1")
        assert both.finish() == 0, both.err
        assert server.finish() == 0, server.err
    assert result_of(tmp_path / "runs/it")["samples"] == 800


def test_torchrun_starts_a_script_that_does_not_know_of_it(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "-m", "paceline", "run", *RUN, "--strategy", "sync", "loop.py", "1", "0")
    with Command(*words, cwd=tmp_path, module="torch.distributed.run") as command:
        assert command.finish() == 0, command.err
    assert command.err.count("launcher: []") == 2
    here = run(
        "run", *RUN[:2], "--name", "here", "--seed", "3", "--strategy", "sync", "loop.py", "1", "0", cwd=tmp_path
    )
    assert here.process.returncode == 0
    assert result_of(tmp_path / "runs/it")["weights_sha256"] == result_of(tmp_path / "runs/here")["weights_sha256"]


def test_hosts_run_the_script_and_refuse_other_code_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost workers=2 threads=1 dir={tmp_path}\n")
    flags = ("--hosts", "hosts", "--name", "it", "--strategy", "async")
    done = run("run", *flags, "loop.py", "1", "0", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert result_of(tmp_path / "runs/it")["samples"] == 800
    replay(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "hosts").write_text(f"localhost workers=2 dir={tmp_path / 'there'}\n")
    refused = run("run", "--hosts", "hosts", "--name", "no", "loop.py", "1", "0", cwd=tmp_path)
    assert refused.process.returncode == 2
    assert "the script loop.py is not there: copy it to the same place" in refused.err


def test_what_a_served_script_cannot_have_is_one_line(tmp_path: Path) -> None:
    cases = {
        ("--servers", "2", "--script", "loop.py"): "one server holds all weights of users' own loops",
        ("--dataset", "mnist", "--script", "loop.py"): "--dataset mnist: loop.py decides that; leave it out",
        ("--script", "nothing.py"): "script nothing.py does not exist",
        ("--script",): "which script?",
        ("--resume", "runs/it", "--script", "loop.py"): "leave --script out",
    }
    for words, expected in cases.items():
        refused = run("server", "--strategy", "sync", *words, cwd=tmp_path)
        assert refused.process.returncode == 2, refused.err
        assert expected in refused.err and len(refused.err.splitlines()) == 1, refused.err
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
