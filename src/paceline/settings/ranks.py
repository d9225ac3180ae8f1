"""Read the rank of this process from the variables of torchrun or srun. Importing this imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.features import Feature
from paceline.settings.strategies import on_ring, require_feature
from paceline.system.cpu import cores

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
LAUNCHER_VARIABLES = ("RANK", "SLURM_STEP_NUM_TASKS")  # without any of these no launcher started this process
HIDDEN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""What launchers tell a process about its rank, besides TORCHELASTIC_*. A script that sees it starts DDP by itself."""
SIZES = {
    "WORLD_SIZE": ("torchrun", "torchrun ... -m "),
    "SLURM_STEP_NUM_TASKS": ("srun", "srun "),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", None),
}
"""How many processes a launcher has started, by its variable; and how it starts `paceline run`, if it can."""
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Rank:
    """One of `size` processes, of which `local_size` are on this machine."""

    number: int
    size: int
    local: int
    local_size: int
    address: str
    port: int
    store_is_there: bool  # whether the launcher keeps the rendezvous store; if not, rank 0 does
    attempt: int = 0  # how often the launcher has restarted all ranks
    step: str | None = None  # the job step of Slurm; None under torchrun
    cpus: int | None = None  # CPUs of each process, if the launcher says so

    @property
    def leads(self) -> bool:
        """Whether this rank keeps the run folder and prints to the user."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
        """Whether all ranks share one machine."""
        return self.local_size == self.size


def rank_here() -> Rank | None:
    """The rank of this process; None if no launcher started it. A command reads it once and passes it on."""
    if all(name in os.environ for name in VARIABLES):
        return _checked(_of_torchrun, VARIABLES)
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _checked(_of_slurm, SLURM_VARIABLES)
    return None  # a batch script has SLURM_PROCID and SLURM_NTASKS too, but is no step of several tasks


def require_alone() -> None:
    """Exit with code 2 and one line if a launcher started several processes of a script: each would train alone."""
    script = Path(sys.argv[0]).name
    for name, (launcher, start) in SIZES.items():
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            what = f"{launcher} started {count} processes of {script} ({name}={count})"
            instead = f"'paceline run -n {count} {script}'"
            instead += f" or '{start}paceline run {script}'" if start is not None else ""
            print(f"paceline: {what}, and each would train a model of its own: use {instead}", file=sys.stderr)
            raise SystemExit(2)


def hide_launcher() -> None:
    """Remove from the environment what would tell a user's script that a launcher started it."""
    for name in [name for name in os.environ if name in HIDDEN_VARIABLES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def _checked(read: Callable[[Mapping[str, str]], Rank], names: tuple[str, ...]) -> Rank:
    try:
        rank = read(os.environ)
    except (ValueError, KeyError):
        found = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)
        raise UserError(f"a launcher's variables must be numbers, found {found}") from None
    number, size = rank.number, rank.size
    if not 0 <= number < size:
        raise UserError(f"{names[0]}={number} with {names[1]}={size}: ranks are counted from 0 to {size - 1}")
    return rank


def _of_torchrun(environment: Mapping[str, str]) -> Rank:
    number, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local, local_size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    store_is_there = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Rank(number, size, local, local_size, environment["MASTER_ADDR"], port, store_is_there, attempt)


def _of_slurm(environment: Mapping[str, str]) -> Rank:
    number, size, local, job = (int(environment[name]) for name in SLURM_VARIABLES)
    step, attempt = int(environment.get("SLURM_STEP_ID", "0")), int(environment.get("SLURM_RESTART_COUNT", "0"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(size))
    address = environment.get("MASTER_ADDR") or first_node(nodes)
    port = int(environment.get("MASTER_PORT") or FIRST_PORT + (131 * job + step) % NUM_PORTS)
    local_size = tasks_of_node(tasks, int(environment.get("SLURM_NODEID", "0")))
    cpus = int(environment["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in environment else None
    return Rank(number, size, local, local_size, address, port, False, attempt, f"{job}.{step}.{attempt}", cpus)


def first_node(nodes: str) -> str:
    """The first node of Slurm's list, which runs task 0.

    >>> first_node("node[07-09,12],gpu1"), first_node("login"), first_node("rack[1-2]-node[01,03]")
    ('node07', 'login', 'rack1-node01')
    """
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head.group() if head is not None else nodes)


def tasks_of_node(tasks: str, node: int) -> int:
    """The number of tasks on node number `node`, from a list such as 2(x3),1.

    >>> [tasks_of_node("2(x3),1", node) for node in range(4)]
    [2, 2, 2, 1]
    """
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        repeated = int(times.rstrip(")")) if times else 1
        if node < repeated:
            return int(count)
        node -= repeated
    raise ValueError(f"{tasks} has no node {node}")


def config_of(rank: Rank, config: RunConfig, has_server: bool = False) -> RunConfig:
    """The config of one rank: on a ring every process is a worker; on a star rank 0 serves the others.

    A run that `has_server` under every strategy is a star.
    """
    require_feature(config, Feature.LAUNCHER, f"a launcher started {rank.size} processes of this command")
    ring = on_ring(config) and not has_server
    workers = rank.size if ring else rank.size - 1
    if not workers:
        raise UserError(
            f"strategy {config.strategy} needs one process that serves and at least one that works, and the launcher "
            "started 1: start 2 or more, or leave the launcher out"
        )
    if config.workers is not None and config.workers != workers:
        served = "" if ring else f", the first of which serves {workers}"
        raise UserError(
            f"--workers {config.workers}, but the launcher started {rank.size} processes{served}: leave --workers "
            f"out, or start {config.workers if ring else config.workers + 1}"
        )
    threads = config.threads or rank.cpus or max(1, cores() // rank.local_size)
    return replace(config, workers=workers, threads=threads)
