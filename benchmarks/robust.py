"""What a minority of lying workers does to `sync`, by `--aggregate`; and how far ordinary pushes are from suspicious.

Workers of `sync` train a perceptron of 32 hidden units on the built-in sample, in this process. Liars send -10 times
their gradient, noise of deviation 1e6, or NaN. A run by the mean must collapse or diverge; median and trimmed mean must
come within MARGIN points of the test accuracy of the honest run by the mean (medians over the seeds).

    python benchmarks/robust.py            # 1 liar of 5 and 2 of 7, 3 seeds
    python benchmarks/robust.py --norms    # the largest norm over the usual one, in ordinary runs of several models
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Push, Reply
from paceline.core.server import PushGuard
from paceline.core.worker import LocalWorker
from paceline.data.datasets import load, locate_data
from paceline.settings.resolve import resolve
from paceline.system.strict_json import to_json
from paceline.tasks.supervised import SupervisedTask

SAMPLE = "fashion-mnist-sample"
MARGIN = 5.0  # points of accuracy: liars that agree bias what remains
COLLAPSED = 30.0  # percent
CLUSTERS = ((5, 1), (7, 2))  # workers, and how many of them lie
Lie = Callable[[Push], None]


def reverse(push: Push) -> None:
    """Send the opposite of the gradient, ten times as long."""
    push.update.mul_(-10.0)


def send_noise(push: Push) -> None:
    """Send noise."""
    generator = torch.Generator().manual_seed(1000 * push.worker + push.seq)
    push.update.copy_(1e6 * torch.randn(push.update.shape, generator=generator))


def send_nan(push: Push) -> None:
    """Send NaNs, and a loss that looks honest."""
    push.update.fill_(torch.nan)


LIES: dict[str, Lie] = {"-10 x gradient": reverse, "noise of 1e6": send_noise, "NaN": send_nan}


@functools.cache
def _pixels() -> tuple[tuple[Tensor, Tensor], ...]:
    """The built-in sample as vectors, train and test data."""
    location = locate_data(RunConfig(dataset=SAMPLE))
    assert location is not None
    data = load(location)
    parts = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
    return tuple((torch.from_numpy(x).flatten(1).float() / 255.0, torch.from_numpy(y)) for x, y in parts)


def perceptron() -> SupervisedTask:
    """A task whose step takes half a millisecond."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    return SupervisedTask(model, F.cross_entropy, *_pixels())


class Watched(BareDriver):
    """A driver that lets the first workers lie, and notes how far norms are from the usual one."""

    def __init__(
        self,
        config: RunConfig,
        lie: Lie | None = None,
        liars: int = 0,
        make: Callable[[], SupervisedTask] | None = None,
    ) -> None:
        location = locate_data(config)
        assert location is not None
        dataset = load(location)
        self.task = make() if make is not None else make_task(config, dataset)
        work = work_of(self.task, config)
        super().__init__(make_server(config, self.task, work), self._deliver)
        server = self.server
        self.guard = PushGuard(server.members, server.norms, server.updater)
        server.guard = self.guard
        self.farthest, self._lie, self._liars = 0.0, lie, liars
        self._instances: dict[int, LocalWorker] = {}
        self._random = random.Random(config.seed)
        for worker in range(config.workers or 1):
            join = make_join(config, work, worker, 0)
            task = make() if make is not None else make_task(config, dataset)
            instance = self._instances[worker] = make_worker(config, task, work, join)
            self.memories[worker] = instance.memory
            self.handle(join)

    def _deliver(self, reply: Reply) -> None:
        self._instances[reply.worker].pending = None if reply.finished else reply

    def run(self) -> None:
        """A random worker that has a reply pushes next, until training is over."""
        norms = self.server.norms
        while ready := [worker for worker, one in self._instances.items() if one.pending is not None]:
            worker = self._random.choice(ready)
            push = self._instances[worker].push()
            assert push is not None
            if self._lie is not None and worker < self._liars:
                self._lie(push)
            if norms.usual:
                norm = float(torch.linalg.vector_norm(push.update, dtype=torch.float64))
                member = self.server.members[worker]
                self.farthest = max(self.farthest, norm / (member.lr * member.steps or 1.0) / norms.usual)
            with torch.inference_mode():
                self.handle(push)

    def accuracy(self) -> float:
        """Test accuracy in percent; that of chance if the weights are not finite."""
        if self.server.divergence is not None or not torch.isfinite(self.server.weights).all():
            return 0.0
        assert self.task.test is not None
        scores = self.task.evaluate(self.server.weights, None, self.task.test)
        return 100.0 * scores.correct / scores.total


def settings(seed: int, workers: int, steps: int, **more: Any) -> RunConfig:
    fixed: dict[str, Any] = {"dataset": SAMPLE, "workers": workers, "steps": steps, "seed": seed, "threads": 1}
    return resolve(RunConfig(**{**fixed, "strategy": "sync", "lr": 0.05, "momentum": 0.9, **more}))


def compare(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Train every combination; a row has the accuracies over the seeds."""
    rows = []
    for workers, liars in CLUSTERS:
        kinds: list[tuple[str, Lie | None, str]] = [("none", None, "mean"), ("none", None, "median")]
        kinds += [(name, lie, way) for name, lie in LIES.items() for way in ("mean", "median", f"trimmed:{liars}")]
        for name, lie, way in kinds:
            found = []
            for seed in range(seeds):
                driver = Watched(settings(seed, workers, steps, aggregate=way, batch_size=128), lie, liars, perceptron)
                driver.run()
                found.append(round(driver.accuracy(), 2))
            row = {"workers": workers, "liars": liars if lie else 0, "lie": name, "aggregate": way, "accuracy": found}
            rows.append(row)
            text = " ".join(f"{value:6.2f}" for value in found)
            print(f"{workers} workers, {row['liars']} liars  {name:<16} {way:<10} {text}", flush=True)
    return rows


def verdict(rows: list[dict[str, Any]]) -> bool:
    """Whether every mean collapsed and every robust way is near the honest run."""
    honest = {row["workers"]: statistics.median(row["accuracy"]) for row in rows if not row["liars"]}
    fine = True
    for row in rows:
        middle = statistics.median(row["accuracy"])
        if row["liars"] and row["aggregate"] == "mean":
            fine &= middle < COLLAPSED
        elif row["liars"]:
            fine &= middle > honest[row["workers"]] - MARGIN
    return fine


ORDINARY: dict[str, dict[str, Any]] = {
    "lenet5 sync": {"strategy": "sync"},
    "lenet5 async, warm-up, cosine": {"strategy": "async", "warmup": 0.2, "schedule": "cosine", "lr": 0.01},
    "lenet5 async, labels": {"strategy": "async", "split": "labels", "lr": 0.01},
    "lenet5 async, adam": {"strategy": "async", "optimizer": "adam", "lr": 0.001},
    "cnn bounded:3": {"strategy": "bounded:3", "model": "cnn", "lr": 0.01},
    "lenet5 diloco:8, warm-up": {"strategy": "diloco:8", "path": "star", "warmup": 0.3, "steps": 100},
    "lenet5 async-local:8": {"strategy": "async-local:8", "steps": 200},
    "inception-28-small async": {"strategy": "async", "model": "inception-28-small", "batch_size": 8, "steps": 100},
    "resnet18 async": {"strategy": "async", "model": "resnet18", "batch_size": 4, "steps": 60, "lr": 0.02},
}


def watch_norms(steps: int) -> list[dict[str, Any]]:
    """Ordinary runs: the largest norm of a push over the usual largest one."""
    rows = []
    for name, more in ORDINARY.items():
        more = {**more, "steps": min(steps, more.get("steps", steps))}
        driver = Watched(settings(0, 4, **more))
        driver.run()
        row = {"run": name, "farthest": round(driver.farthest, 2), "suspicious": len(driver.guard.findings)}
        rows.append(row)
        print(f"{name:<32} largest / usual {row['farthest']:8.2f}, suspicious {row['suspicious']}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", action="store_true", help="watch the norms of ordinary runs instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    if parsed.norms:
        rows = watch_norms(parsed.steps)
        fine = not any(row["suspicious"] for row in rows)
    else:
        rows = compare(parsed.seeds, parsed.steps)
        fine = verdict(rows)
    print("as it should be" if fine else "NOT as it should be")
    if parsed.json:
        print(to_json({"benchmark": "robust", "rows": rows, "fine": fine}))
    return int(parsed.strict and not fine)


if __name__ == "__main__":
    sys.exit(main())
