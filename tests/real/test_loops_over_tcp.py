"""Users' own loops whose workers come over TCP: the bits of one machine, and nothing lost when something dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.runs.arrival_log import read_arrivals
from paceline.runs.folder import RunFolder
from tests.support.cluster_commands import address_of, serve, workers
from tests.support.commands import Command, result_of, run, started_by, wait_for_records
from tests.support.waiting import until

RUN = ("--threads", "1", "--name", "it", "--seed", "3")
HERE = ("--threads", "1", "--name", "here", "--seed", "3")
LOOP = """
import os, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
from sizes import HIDDEN

of_ranks = ("RANK", "WORLD_SIZE", "PROCID", "LOCALID", "NPROCS", "TASKS", "TORCHELASTIC")
seen = sorted(name for name in os.environ if any(word in name for word in of_ranks))
print("launcher:", seen, "threads:", torch.get_num_threads(), file=sys.stderr)
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
        time.sleep(0.0 if os.path.exists("hurry") else float(sys.argv[2]))
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
    """Its script starts from the top and goes on where it was."""
    events = tmp_path / "runs/it/events.jsonl"
    with ExitStack() as stack:
        flags = ("--strategy", "async", "--workers", "2", "--stall", "2")
        server = serve(stack, tmp_path, *RUN, *flags, "--script", "loop.py", "3", "0.2")
        there = workers(stack, tmp_path, 2)
        wait_for_records(tmp_path / "runs/it", 12)
        there[0].process.send_signal(signal.SIGSTOP)
        until(lambda: '"worker_lost"' in events.read_text(), "the loss of the stopped worker")
        there[0].process.send_signal(signal.SIGCONT)
        until(lambda: events.read_text().count('"worker_joined"') == 3, "the worker's return")
        (tmp_path / "hurry").touch()  # the replay too
        assert [worker.finish() for worker in there] == [0, 0], there[0].err
        assert server.finish() == 0, server.err
    assert [worker.err.count("its script starts again") for worker in there] == [1, 0]
    assert result_of(tmp_path / "runs/it")["samples"] == 2400
    replay(tmp_path)


def test_other_code_is_one_line_and_the_place_stays_free(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "loop.py", elsewhere)
    (elsewhere / "sizes.py").write_text("HIDDEN = 7\n")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "async", "--workers", "1", "--script", "loop.py", "1", "0")
        where = (address_of(tmp_path / "runs/it"), "--token-file", "runs/it/token")
        assert "1 worker:\nstarting\n" in run("status", *where, cwd=tmp_path).out, "before a worker has told the model"
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


def test_tasks_of_slurm_run_a_script_that_does_not_know_of_it(tmp_path: Path) -> None:
    """Task 0 serves; the others find it by a file in --runs, which is gone at the end."""
    words = ("run", "--name", "it", "--seed", "3", "--strategy", "sync", "loop.py", "1", "0")
    shared = {
        **{"SLURM_NODEID": "0", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "localhost"},
        **{"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"},
        **{"SLURM_NPROCS": "3", "SLURM_TASKS_PER_NODE": "3", "SLURM_CPUS_PER_TASK": "1"},
    }
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(Command(*words, cwd=tmp_path, environment={
                **shared, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)
            }))
            for task in range(3)
        ]  # fmt: skip
        assert [task.finish() for task in tasks] == [0, 0, 0], [task.err for task in tasks]
    assert "srun started 3 processes (world size 3): rank 0 serves 2 workers" in tasks[0].err
    assert ["launcher: [] threads: 1" in task.err for task in tasks] == [False, True, True]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["it"]
    here = run("run", *HERE, "--strategy", "sync", "loop.py", "1", "0", cwd=tmp_path)
    assert here.process.returncode == 0, here.err
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


def test_a_worker_of_hosts_that_started_again_still_ends_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost workers=2 threads=1 dir={tmp_path}\n")
    flags, mark = ("--hosts", "hosts", "--name", "it", "--strategy", "async"), f"started-by-{tmp_path}"
    with Command("run", *flags, "loop.py", "40", "0.1", cwd=tmp_path, environment={"MARK": mark}) as command:
        wait_for_records(tmp_path / "runs/it", 12)
        (worker,) = (pid for pid, words in started_by(mark).items() if "--worker 0" in words)
        os.kill(worker, signal.SIGSTOP)  # so that it cannot finish by itself when it is drained
        try:
            assert run("drain", "runs/it", "0", "--now", cwd=tmp_path).process.returncode == 0
        finally:
            os.kill(worker, signal.SIGCONT)
        until(lambda: num_joins(tmp_path / "runs/it") == 3, "worker 0, again")
        command.process.kill()
    until(lambda: not started_by(mark), lambda: f"the end of {started_by(mark)}")


def num_joins(folder: Path) -> int:
    records, _ = read_arrivals(folder / "arrivals.log", RunFolder.open(folder).config())
    return sum(record.kind == "join" for record in records)


def test_what_a_served_script_cannot_have_is_one_line(tmp_path: Path) -> None:
    cases = {
        ("--servers", "2", "--script", "loop.py"): "--servers 2: your own loop has one server, which holds all weights",
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
