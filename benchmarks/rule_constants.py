"""Ablations of two constants of the rules, simulated, on a validation split: mean and spread over seeds.

    python benchmarks/rule_constants.py --part finished    the averaging while workers that have finished are missing
    python benchmarks/rule_constants.py --part weight      the largest weight of a single push in `foresight-fair`

LeNet5 on the built-in sample (10,800 images to train on, 1,200 to validate), 6 epochs, batch 32, lr .005, momentum .9,
step times with 20 % jitter. With `--data-dir DIR`, on all of Fashion-MNIST. Averaged weights, unless a row says live.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cells import cell_text
from torch import Tensor

from paceline.assembly.run import make_server, make_worker, work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Join, Reply
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.foresight import ForesightFair
from paceline.core.rules.plain import StatelessHooks
from paceline.core.server import AppliedUpdate, Server
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Dataset, load, locate
from paceline.interfaces import Arrival, State
from paceline.settings.resolve import resolve
from paceline.simulation.cluster import cluster_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.simulator import Simulation

JITTER = "lognormal:1s,.2"
Settings = dict[str, Any]
Rows = Iterator[tuple[str, float]]  # the name of a line of the table, and an accuracy


def one_slow(workers: int, factor: int) -> Settings:
    """The last worker is `factor` times slower than the others."""
    return {"workers": workers, "speeds": f"{JITTER}*{'1,' * (workers - 1)}{factor}"}


def config_of(seed: int, settings: Settings) -> RunConfig:
    usual: Settings = {
        "epochs": 6.0,
        "lr": 0.005,
        "momentum": 0.9,
        "strategy": "async",
        "speeds": JITTER,
        "validation": 0.1,
    }
    return resolve(RunConfig(model="lenet5", seed=seed, batch_size=32, threads=1, **(usual | settings)))


Watch = Callable[[Server, AppliedUpdate], None]
Score = Callable[[Tensor], float]


def trained(config: RunConfig, dataset: Dataset, watch: Watch | None = None) -> tuple[Server, Score]:
    """Simulate a run; return its server at the end, and what finds the validation accuracy of any weights."""
    task = make_task(config, dataset)
    work = work_of(task, config)
    drivers: list[BareDriver] = []

    def start(send: Callable[[Reply], None]) -> BareDriver:
        server = make_server(config, task, work)
        server.on_update = None if watch is None else lambda update: watch(server, update)
        drivers.append(BareDriver(server, send))
        return drivers[-1]

    def make(worker: int, incarnation: int) -> LocalWorker:
        return make_worker(config, make_task(config, dataset), work, Join(worker, incarnation, work.quotas[worker]))

    Simulation(EventQueue(), cluster_of(config, task.layout.size), config.workers or 1, make, start).run()
    rows = torch.from_numpy(work.validation)
    return drivers[-1].server, lambda weights: task.evaluate(weights, None, task.train, rows).accuracy


class _Unmoved(StatelessHooks):
    """A rule for weights that another rule moves."""

    name = "unmoved"

    def start(self, weights: Tensor) -> State:
        return {}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        pass


FINISHED: dict[str, Settings] = {
    "5 iid": {"workers": 5, "split": "iid"},
    "5 iid, one 3 times slower": {**one_slow(5, 3), "split": "iid"},
    "5 labels": {"workers": 5, "split": "labels"},
    "5 labels, one 3 times slower": {**one_slow(5, 3), "split": "labels"},
    "5 dirichlet:0.1": {"workers": 5, "split": "dirichlet:0.1"},
    "10 dirichlet:0.1": {"workers": 10, "split": "dirichlet:0.1"},
}
"""Every worker makes its own passes over its shard."""


def finished(seed: int, settings: Settings, dataset: Dataset) -> Rows:
    """Several averages of one run: the live weights do not depend on them."""
    averages = {power: Averaged(_Unmoved(), power=power) for power in (0, 1, 2, 4)}
    states: dict[int, State] = {}

    def watch(server: Server, update: AppliedUpdate) -> None:
        arrival = Arrival(None, 0, torch.tensor(update.lr), update.num_live, update.present)
        for power, average in averages.items():
            if power not in states:
                states[power] = average.start(server.weights)
            average.apply(server.weights, states[power], server.weights, arrival)

    config = config_of(seed, {**settings, "epoch_mode": "own", "average": "none"})
    server, accuracy = trained(config, dataset, watch)
    yield "live", accuracy(server.weights)
    for power, average in averages.items():
        yield f"exponent {power}", accuracy(average.evaluated(server.weights, states[power]))


HALF_SLOW = f"{JITTER}*1,1,1,1,1,3,3,3,3,3"
WEIGHT: dict[str, Settings] = {
    "4 iid, one 10 times slower": {**one_slow(4, 10), "split": "iid"},
    "4 labels, one 10 times slower": {**one_slow(4, 10), "split": "labels"},
    "10 labels, half 3 times slower": {"workers": 10, "speeds": HALF_SLOW, "split": "labels"},
}


def weight(seed: int, settings: Settings, dataset: Dataset) -> Rows:
    """`foresight`, where every push counts once, and `foresight-fair` with several caps."""
    for most in (1.0, 2.0, 3.0, 5.0, math.inf):
        ForesightFair.max_weight = most
        rule = "foresight" if most == 1.0 else "foresight-fair"
        server, accuracy = trained(config_of(seed, {**settings, "rule": rule}), dataset)
        yield rule if most == 1.0 else f"{rule}, at most {most:g}", accuracy(server.evaluated)


PARTS = {"finished": (FINISHED, finished), "weight": (WEIGHT, weight)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=tuple(PARTS))
    parser.add_argument("--data-dir", type=Path, help="folder of all of Fashion-MNIST [the built-in sample]")
    parser.add_argument("--seeds", type=int, default=3)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load(locate("fashion-mnist" if parsed.data_dir else "fashion-mnist-sample", parsed.data_dir))
    cells, run = PARTS[parsed.part]
    found: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for cell, settings in cells.items():
        for seed in range(parsed.seeds):
            for name, accuracy in run(seed, settings, dataset):
                found[name][cell].append(accuracy)
    print("| | " + " | ".join(cells) + " |\n" + "|---" * (len(cells) + 1) + "|")
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(cell_text(row[cell]) for cell in cells) + " |")


if __name__ == "__main__":
    main()
