"""`paceline status` beside a run on real processes: it names who is slow to compute and who is stopped."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.status import read_status
from paceline.analysis.stragglers import stragglers
from tests.support.commands import Command, run, wait_for_records
from tests.support.waiting import until

SAMPLE = ("--dataset", "fashion-mnist-sample", "--strategy", "async", "--workers", "3", "--epochs", "200")
PAUSE = '[[fault]]\nkind = "pause"\nat = "1s"\nworker = 2\nlasts = "10min"\n'


def wait_for_causes(folder: Path, wanted: dict[int, str]) -> None:
    """Until the status names these workers with these causes, and no other worker."""

    def causes() -> dict[int, str]:
        return {one.worker: one.cause for one in stragglers(read_status(folder).workers)}

    until(lambda: causes() == wanted, lambda: f"{wanted}; the status says {causes()}")


def test_a_slow_worker_and_a_stopped_one_are_named_while_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(PAUSE)
    folder = tmp_path / "runs/it"
    flags = ("--delay", "60ms@1", "--faults", "faults.toml", "--name", "it")
    with Command("train", *SAMPLE, *flags, cwd=tmp_path) as command:
        wait_for_records(folder, 3)
        wait_for_causes(folder, {1: "compute", 2: "paused"})
        look = run("status", "runs/it", cwd=tmp_path)
        assert look.process.returncode == 0, look.err
        assert "runs/it: async, lenet5 on fashion-mnist-sample, 3 workers: running, update" in look.out
        assert "worker 1 is slow (compute): " in look.out
        assert "worker 2 is paused: silent for" in look.out
        assert command.process.poll() is None
    found = read_status(folder)
    assert found.status == "killed"
    assert found.workers[2].state == "paused"
