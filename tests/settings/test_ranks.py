"""What a launcher's variables say, and what each of its processes is to do."""

from __future__ import annotations

import os

import pytest

from paceline import join
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.ranks import SLURM_VARIABLES, VARIABLES, Rank, config_of, hide_launcher, rank_here, require_alone

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[07-09],gpu1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_CPUS_PER_TASK": "4",
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*VARIABLES, *STEP, "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(variables: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        variables.setenv(name, value)


def test_a_step_of_slurm_is_read(variables: pytest.MonkeyPatch) -> None:
    set_all(variables, STEP)
    rank = rank_here()
    assert rank is not None
    assert (rank.number, rank.size, rank.local, rank.local_size) == (3, 5, 1, 2)
    assert (rank.address, rank.step, rank.cpus, rank.store_is_there) == ("node07", "4711.2.0", 4, False)
    assert 20_000 <= rank.port < 32_000 and not rank.is_alone
    variables.setenv("SLURM_PROCID", "0")
    again = rank_here()
    assert again is not None and again.port == rank.port and again.leads


def test_a_requeued_job_is_another_attempt(variables: pytest.MonkeyPatch) -> None:
    set_all(variables, {**STEP, "SLURM_RESTART_COUNT": "2"})
    rank = rank_here()
    assert rank is not None and (rank.attempt, rank.step) == (2, "4711.2.2")


def test_a_batch_script_and_a_step_of_one_are_no_launch(variables: pytest.MonkeyPatch) -> None:
    """A batch script has SLURM_PROCID and SLURM_NTASKS, and is one process all the same."""
    set_all(variables, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"})
    assert rank_here() is None
    set_all(variables, {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert rank_here() is None


def test_torchrun_within_a_step_wins(variables: pytest.MonkeyPatch) -> None:
    torchrun = dict(zip(VARIABLES, ("1", "2", "10.0.0.1", "29500"), strict=True))
    set_all(variables, {**STEP, **torchrun, "TORCHELASTIC_RESTART_COUNT": "1"})
    rank = rank_here()
    assert rank is not None and (rank.number, rank.size, rank.step, rank.attempt) == (1, 2, None, 1)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("SLURM_PROCID", "x", "must be numbers, found SLURM_PROCID=x"),
        ("SLURM_PROCID", "5", "SLURM_PROCID=5 with SLURM_STEP_NUM_TASKS=5: ranks are counted from 0 to 4"),
        ("SLURM_STEP_TASKS_PER_NODE", "5", "must be numbers"),
    ],
)
def test_bad_variables_of_slurm_are_one_line(
    variables: pytest.MonkeyPatch, name: str, value: str, complaint: str
) -> None:
    set_all(variables, {**STEP, name: value})
    with pytest.raises(UserError, match=complaint):
        rank_here()
    variables.delenv(SLURM_VARIABLES[2])
    with pytest.raises(UserError, match=r"SLURM_LOCALID=\(not set\)"):
        rank_here()


def of(size: int, cpus: int | None = None) -> Rank:
    return Rank(0, size, 0, size, "127.0.0.1", 1, store_is_there=False, cpus=cpus)


def test_on_a_ring_all_processes_are_workers() -> None:
    assert config_of(of(4), RunConfig(strategy="allreduce")).workers == 4
    with pytest.raises(UserError, match=r"--workers 3, but the launcher started 4 processes: leave .* or start 3"):
        config_of(of(4), RunConfig(strategy="allreduce", workers=3))


def test_on_a_star_the_first_process_serves() -> None:
    assert config_of(of(4), RunConfig(strategy="async")).workers == 3
    assert config_of(of(4, cpus=8), RunConfig(strategy="local:4", path="star")).threads == 8
    with pytest.raises(UserError, match=r"started 4 processes, the first of which serves 3: leave .* or start 5"):
        config_of(of(4), RunConfig(strategy="async", workers=4))
    with pytest.raises(UserError, match=r"needs one process that serves and at least one that works"):
        config_of(of(1), RunConfig(strategy="sync"))
    with pytest.raises(
        UserError, match=r"launcher started 4 processes of this command: strategy classic is one worker"
    ):
        config_of(of(4), RunConfig(strategy="classic"))


def test_a_script_does_not_see_that_a_launcher_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any of these it would start DDP, or wait for others."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    launched |= {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "PMIX_RANK": "1"}
    kept = {"SLURM_JOB_ID": "7", "PACELINE_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(os, "environ", {**launched, **kept})
    hide_launcher()
    assert os.environ == kept
    assert rank_here() is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun started 2 processes of"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 processes of"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "mpirun started 3 processes of"),
    ],
)
def test_a_script_that_a_launcher_starts_several_times_does_not_train_alone(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(SystemExit) as stop:
        join()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "'paceline run -n" in line


def test_a_script_that_a_launcher_starts_once_may_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"})
    require_alone()
