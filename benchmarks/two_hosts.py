"""Speed of training on two hosts with a 1 Gbit/s link, as a share of two bare loops that exchange nothing.

    python benchmarks/two_hosts.py [--only NAME] [--model MODEL] [--dataset NAME] [--data-dir DIR] [--batch N]

The hosts are network namespaces with one pinned core each (needs root; see hosts.py). The peers are the same loop with
DistributedDataParallel on Gloo, and with its fp16 hook. `--rate 100mbit` sets another link speed.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs
from hosts import RATE, Host, cannot_measure, two_hosts
from processes import ended

HERE = str(Path(__file__).resolve())
LR, MOMENTUM = 0.01, 0.9
PORT = "29511"
PATIENCE_SECONDS = 900.0
Steps = list[tuple[float, int]]


@dataclass(frozen=True)
class Case:
    """One of our ways to train on both hosts, and the minimum share of the bare loops' speed."""

    strategy: str
    codec: str | None
    bar: float | None
    steps_a_push: int = 1


CASES = {
    "allreduce": Case("allreduce", None, None),
    "bf16": Case("allreduce", "bf16", None),
    "int8": Case("allreduce", "int8", 0.90),
    "lowrank:4": Case("allreduce", "lowrank:4", 0.90),
    "diloco:20": Case("diloco:20", None, None, steps_a_push=20),
    "diloco:20,int8": Case("diloco:20", "int8", 0.97, steps_a_push=20),
}
PEERS = ("ddp", "ddp-fp16")


@dataclass(frozen=True)
class What:
    """Model, data and duration of a measurement."""

    model: str
    dataset: str
    data_dir: str | None
    batch: int
    steps: int
    dropped: int

    @property
    def flags(self) -> list[str]:
        """The flags for `paceline train`."""
        words = ["--model", self.model, "--dataset", self.dataset, "--batch-size", str(self.batch), "--split", "full"]
        words += ["--lr", str(LR), "--momentum", str(MOMENTUM), "--threads", "1"]
        return words + (["--data-dir", self.data_dir] if self.data_dir is not None else [])


def rate(workers: Sequence[Steps], dropped: int) -> float:
    """Return the samples per second of both workers together, without their first pushes."""
    start = max(steps[dropped - 1][0] for steps in workers)
    stop = min(steps[-1][0] for steps in workers)
    return sum(samples for steps in workers for moment, samples in steps if start < moment <= stop) / (stop - start)


def taken(run: Path, num_workers: int) -> list[Steps]:
    """Return the times and samples of each worker's accepted pushes, from the run's log."""
    from paceline.core.messages import Disposition
    from paceline.runs.arrival_log import read_arrivals
    from paceline.runs.folder import RunFolder

    records, _ = read_arrivals(run / "arrivals.log", RunFolder.open(run).config())
    workers: list[Steps] = [[] for _ in range(num_workers)]
    for record in records:
        if record.kind == "push" and record.disposition is Disposition.TAKEN:
            workers[record.worker].append((record.now, record.samples))
    return workers


def ours(case: Case, what: What, hosts: tuple[Host, Host]) -> float:
    """Run `paceline train` on both hosts, timed by its log."""
    pushes = max(what.dropped + 2, what.steps // case.steps_a_push)
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, "-m", "paceline", "train", "--strategy", case.strategy, *what.flags]
        words += ["--steps", str(pushes), "--score", "none", "--runs", runs, "--name", "run"]
        words += ["--codec", case.codec] if case.codec is not None else []
        _both(words, hosts)
        return rate(taken(Path(runs) / "run", 2), 1 if case.steps_a_push > 1 else what.dropped)


def theirs(kind: str, what: What, hosts: tuple[Host, Host]) -> float:
    """Run a plain loop on each host: `bare`, `ddp` or `ddp-fp16`."""
    words = [sys.executable, HERE, "loop", kind, json.dumps(what.__dict__, allow_nan=False)]
    lines = [json.loads(out.splitlines()[-1]) for out in _both(words, hosts)]
    return rate([[(moment, what.batch) for moment in times] for times in lines], what.dropped)


def _both(words: list[str], hosts: tuple[Host, Host]) -> list[str]:
    """Run a command on both hosts as a launcher does, and return its outputs."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": PORT}
    processes = [
        subprocess.Popen(
            host.command(words),
            env={**host.environment, **common, "RANK": str(number), "MASTER_ADDR": hosts[0].address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, host in enumerate(hosts)
    ]
    with ended(processes, within=PATIENCE_SECONDS):
        found = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
        for process, (_, complaints) in zip(processes, found, strict=True):
            if process.returncode:
                raise RuntimeError(f"exit code {process.returncode}: {complaints.decode()[-800:]}")
        return [out.decode() for out, _ in found]


def loop(kind: str, what: What) -> None:
    """Run in its own process on one host: a plain training loop on prepared batches."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    task, batches = batches_of(what)
    dist.init_process_group("gloo")
    model: Any = task.model
    if kind != "bare":
        model = DistributedDataParallel(model)
        if kind == "ddp-fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    times = []
    dist.barrier()
    for number in range(what.steps):
        batch = batches[number % len(batches)]
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        times.append(time.monotonic())
    print(json.dumps(times, allow_nan=False))
    dist.barrier()
    dist.destroy_process_group()


def batches_of(what: What) -> tuple[Any, list[Any]]:
    from paceline.assembly.run import work_of
    from paceline.assembly.task import make_task
    from paceline.config import RunConfig
    from paceline.data.datasets import load, locate
    from paceline.settings.resolve import resolve

    where = Path(what.data_dir) if what.data_dir is not None else None
    config = resolve(RunConfig(model=what.model, dataset=what.dataset, batch_size=what.batch, strategy="classic"))
    task = make_task(config, load(locate(what.dataset, where)))
    loader = task.loader(work_of(task, config).batches(0, config), 0, 0)
    return task, [loader.batch(number) for number in range(min(what.steps, 20))]


def training_flags(description: str | None, batch: int) -> argparse.ArgumentParser:
    """Return a parser with the flags of the benchmarks on two hosts."""
    parser = pairs.flags(description)
    parser.add_argument("--dataset", default="fashion-mnist-sample")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--batch", type=int, default=batch, help="samples of one step on one host")
    parser.add_argument("--rate", default=RATE, help="of the link, as tc takes it")
    return parser


def main() -> int:
    parser = training_flags(__doc__, batch=128)
    parser.add_argument("--only", metavar="NAME", choices=[*CASES, *PEERS], help=", ".join([*CASES, *PEERS]))
    parser.add_argument("--model", default="resnet18")
    parsed = parser.parse_args()
    if cannot_measure():
        return 2
    number, steps = pairs.num_pairs(parsed), 8 if parsed.quick else 20
    what = What(parsed.model, parsed.dataset, parsed.data_dir, parsed.batch, steps, dropped=3)
    rows = []
    with two_hosts(parsed.rate) as hosts:
        bare = functools.partial(theirs, "bare", what, hosts)
        for name in [*CASES, *PEERS]:
            if parsed.only not in (None, name):
                continue
            bar = CASES[name].bar if name in CASES else None
            side = functools.partial(ours, CASES[name], what, hosts) if name in CASES else None
            side = side or functools.partial(theirs, name, what, hosts)
            say = pairs.teller(parsed, name)
            rows.append(pairs.compare(name, side, bare, number, at_least=bar, say=say))
            print(pairs.table(rows[-1:], "samples/s"), flush=True)
    if len(rows) > 1:
        print(pairs.table(rows, f"{parsed.model}, {parsed.rate}"))
    return pairs.close(parsed, "two_hosts", rows, model=parsed.model, rate=parsed.rate, batch=parsed.batch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        loop(sys.argv[2], What(**json.loads(sys.argv[3])))
    else:
        sys.exit(main())
