"""Running statistics of batch norm: test scores with those of the workers and with estimated ones, and what these cost.

Workers of `async` push in a random order in this process; all but one leave after a quarter of the run. Then the live
and the averaged weights are scored with the mean of all workers' statistics, and with statistics estimated on so many
training samples. A share is the seconds of one estimate over those of one test evaluation, and over those of the run.

    python benchmarks/norm_statistics.py                   # a net of three convolutions on the built-in sample
    python benchmarks/norm_statistics.py --model resnet18 --dataset cifar10 --data-dir DIR --device cuda --lr 0.05
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.assembly.task import make_task, prepare_device, transform_of
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Leave, Reply
from paceline.core.worker import LocalWorker
from paceline.data.datasets import load, locate_data
from paceline.interfaces import Scores
from paceline.settings.resolve import resolve
from paceline.tasks import norm_statistics, supervised
from paceline.tasks.supervised import SupervisedTask


def small_net() -> SupervisedTask:
    """Three convolutions with batch norm on the built-in sample: the task of a run without `--model`."""
    location = locate_data(RunConfig(dataset=SAMPLE))
    assert location is not None
    dataset = load(location)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        blocks += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    parts = (dataset.train_images, dataset.train_labels), (dataset.test_images, dataset.test_labels)
    train, test = ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in parts)
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 10))
    return SupervisedTask(model, F.cross_entropy, train, test, transform=transform_of(dataset))


SAMPLE = "fashion-mnist-sample"
SAMPLES = (256, 1024, 2048, 4096, 8192)
LEAVING = 0.25  # share of the samples after which all workers but the first leave


@dataclass
class Trained:
    """The end of a run: its task, the live and averaged weights, every worker's statistics, and how long it took."""

    task: SupervisedTask
    weights: dict[str, Tensor]
    states: list[Tensor]
    seconds: float


def train(config: RunConfig, leaving: bool) -> Trained:
    """Train in this process; a random worker pushes next."""
    location, device = locate_data(config), prepare_device(config)
    dataset = load(location) if location is not None else None
    task = make_task(config, dataset).to(device)
    work = work_of(task, config)
    instances: dict[int, LocalWorker] = {}

    def send(reply: Reply) -> None:
        if reply.worker in instances:
            instances[reply.worker].pending = reply

    driver, order = BareDriver(make_server(config, task, work), send), random.Random(config.seed)
    server, began = driver.server, time.perf_counter()
    for worker in range(config.workers or 1):
        join = make_join(config, work, worker, 0)
        instances[worker] = make_worker(config, make_task(config, dataset).to(device), work, join)
        driver.memories[worker] = instances[worker].memory
        driver.handle(join)
    while not server.finished:
        if leaving and server.samples > LEAVING * server.budget.samples and len(instances) > 1:
            for worker in sorted(instances)[1:]:
                del instances[worker]
                driver.handle(Leave(worker, 0))
        push = instances[order.choice([w for w, one in instances.items() if one.pending is not None])].push()
        assert push is not None
        with torch.inference_mode():
            driver.handle(push)
    seconds = time.perf_counter() - began
    weights = {"live": server.weights.clone(), "averaged": server.evaluated.clone()}
    return Trained(task, weights, [state for _, state in sorted(server.worker_states.items())], seconds)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


def rows_of(run: Trained) -> list[dict[str, Any]]:
    """Score both weights with each kind of statistics."""
    task, test = run.task, run.task.test
    assert test is not None
    mean = task.mixture(run.states)
    assert mean is not None, "the model has no running statistics"
    rows: list[dict[str, Any]] = []
    for name, weights in run.weights.items():
        for samples in (0, *SAMPLES):
            supervised.MAX_SAMPLES = samples or norm_statistics.MAX_SAMPLES  # type: ignore[attr-defined]
            task._statistics._found.clear()
            state, seconds = timed(lambda w=weights, s=samples: task.estimated(w, mean) if s else mean)
            scores, scoring = timed(lambda w=weights, s=state: task.evaluate(w, s, test))
            assert isinstance(scores, Scores)
            share = {"of_test": seconds / scoring, "of_run": seconds / run.seconds} if samples else {}
            row = {"weights": name, "samples": samples, "test_accuracy": scores.accuracy, "test_loss": scores.loss}
            rows.append({**row, "seconds": seconds, "test_seconds": scoring, **share})
    return rows


def line(row: dict[str, Any]) -> str:
    what = f"estimated on {row['samples']:5}" if row["samples"] else "mean of the workers"
    text = f"{row['weights']:9} {what:20} {row['test_accuracy']:6.2f} %  loss {row['test_loss']:.4f}"
    if not row["samples"]:
        return text
    return f"{text}  {row['seconds']:6.2f} s: {row['of_test']:.0%} of a test, {row['of_run']:.1%} of the run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dataset", default=SAMPLE)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stay", action="store_true", help="no worker leaves")
    parser.add_argument("--quick", action="store_true", help="a quarter of the epochs")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    parsed = parser.parse_args()
    named = {name: getattr(parsed, name) for name in ("dataset", "device", "workers", "lr", "seed")}
    named |= {"task": f"{__file__}:small_net"} if parsed.model is None else {"model": parsed.model}
    epochs = parsed.epochs / 4 if parsed.quick else parsed.epochs
    settings = {"strategy": "async", "average": "on", "epochs": epochs, "data_dir": parsed.data_dir}
    run = train(resolve(RunConfig(**named, **settings)), not parsed.stay)
    rows = rows_of(run)
    what = f"{parsed.model or 'small net'}, {parsed.dataset}, {parsed.workers} workers"
    print(f"{what}, {epochs:g} epochs in {run.seconds:.1f} s")
    print("\n".join(map(line, rows)))
    if parsed.json:
        print(json.dumps({"benchmark": "norm_statistics", "run_seconds": run.seconds, "rows": rows}, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
