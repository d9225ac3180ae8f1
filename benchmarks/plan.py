"""Does `paceline plan` choose well? Its forecast beside real runs, on models that its shares were not fitted on.

    python benchmarks/plan.py [--only NAME] [--workers 2] [--seeds 0] [--data-dir DIR]

For each setting: the plan of this machine, then a real run of every candidate. The test loss that a run ends with, and
the curve of one worker, tell with how many samples one worker gets as far. Beside the columns `count` and `times` of
the plan's table stand the measured ones. `of the best` is the measured `times` of the plan's choice, of the highest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline
from paceline.data.datasets import load, locate
from paceline.runs.events import read_events

Result = dict[str, Any]
SAMPLE = ("--dataset", "fashion-mnist-sample")
HERE = str(Path(__file__).resolve())
EVALUATIONS = 24


def _images(model: nn.Module) -> paceline.Task:
    data = load(locate("fashion-mnist-sample", None))
    x, x_test = (
        torch.from_numpy(np.array(part)).float().flatten(1) / 255 for part in (data.train_images, data.test_images)
    )
    y, y_test = (torch.from_numpy(np.array(part)).long() for part in (data.train_labels, data.test_labels))
    return paceline.Task(model, nn.functional.cross_entropy, train=(x, y), test=(x_test, y_test))


def softmax() -> paceline.Task:
    """A convex problem."""
    return _images(nn.Linear(784, 10))


def perceptron() -> paceline.Task:
    """Three layers without convolutions."""
    return _images(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)))


def normed() -> paceline.Task:
    """Layers with layer norm, which keeps steps of any length stable."""
    layers = [nn.Linear(784, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()]
    return _images(nn.Sequential(*layers, nn.Linear(128, 10)))


def spirals() -> paceline.Task:
    """Two interleaved spirals in the plane."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(12000) % 2
    radius = torch.rand(12000, generator=generator) * 3 + 0.3
    angle = radius * 3 + labels * torch.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    points += 0.1 * torch.randn(points.shape, generator=generator)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    train, test = (points[:10000], labels[:10000]), (points[10000:], labels[10000:])
    return paceline.Task(model, nn.functional.cross_entropy, train=train, test=test)


def own(name: str, parameters: int, *flags: str) -> tuple[str, ...]:
    return ("--task", f"{HERE}:{name}", "--parameters", str(parameters), *flags)


SETTINGS: dict[str, tuple[str, ...]] = {
    "softmax": own("softmax", 7850, "--lr", "0.01", "--epochs", "2"),
    "perceptron": own("perceptron", 218058, "--lr", "0.01", "--epochs", "3"),
    "perceptron, batch 128": own("perceptron", 218058, "--lr", "0.02", "--epochs", "5", "--batch-size", "128"),
    "layer norm": own("normed", 118806, "--lr", "0.01", "--epochs", "3"),
    "spirals": own("spirals", 4482, "--lr", "0.05", "--epochs", "6"),
    "cnn": (*SAMPLE, "--model", "cnn", "--lr", "0.005", "--epochs", "1.5"),
    "cnn, batch 128": (*SAMPLE, "--model", "cnn", "--lr", "0.02", "--epochs", "4", "--batch-size", "128"),
    "transformer, Adam": ("--dataset", "sst5", "--model", "transformer", "--optimizer", "adam", "--lr", "3e-4"),
}


def run(*words: str) -> str:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def train(flags: list[str], folder: Path, name: str, *more: str) -> tuple[Result, Path]:
    words = [*flags, "--runs", str(folder), "--name", name, "--average", "on", *more]
    try:
        run("train", *words)
    except subprocess.CalledProcessError as error:
        if error.returncode != 3:  # diverged or collapsed
            sys.exit(error.stderr)
    return json.loads((folder / name / "result.json").read_text()), folder / name


def curve(folder: Path, result: Result) -> tuple[list[float], list[float]]:
    """The test losses of one worker, falling, and the logarithm of the samples that it needed to reach each first."""
    rows = [row for row in read_events(folder / "events.jsonl") if row["kind"] == "evaluation"]
    points = [(row["test_loss"], row["samples"]) for row in rows]
    points.append((result["test_loss"], result["samples"]))
    reached: list[tuple[float, float]] = []
    for loss, samples in points:
        if not reached or loss < reached[-1][0]:
            reached.append((loss, math.log(samples)))
    return [loss for loss, _ in reached], [samples for _, samples in reached]


def flags_of(cell: Result, setting: list[str]) -> list[str]:
    words = ["--strategy", cell["strategy"], *setting]
    if cell["workers"] > 1:
        words += ["--workers", str(cell["workers"])]
    return [*words, "--threads", "1", *(["--scale-lr", f"{cell['lr_scale']:g}"] if cell["lr_scale"] != 1 else [])]


def check(name: str, setting: tuple[str, ...], workers: int, seeds: list[int], data: list[str]) -> float:
    """Print a table of one setting; return what the plan's choice reaches of the best."""
    trained = [word for at, word in enumerate(setting) if "--parameters" not in setting[max(0, at - 1) : at + 1]]
    plan = json.loads(run("plan", *setting, *data, "--workers", str(workers), "--json"))
    cells, choice = [cell for cell in plan["forecasts"] if cell["workers"] in (1, workers)], plan["choice"]
    alone = next(cell for cell in cells if cell["workers"] == 1)
    counts: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder, base = Path(temporary), [*trained, *data, "--seed", str(seed)]
            longer = [*base, "--epochs", str(1.5 * _epochs(base))]
            every = str(1.5 * _epochs(base) / EVALUATIONS)
            result, path = train(flags_of(alone, longer), folder, "curve", "--eval-every", every)
            reached, needed = curve(path, result)
            for cell in cells:
                result, _ = train(
                    flags_of(cell, base), folder, f"{cell['workers']}-{cell['strategy'].replace(':', '')}"
                )
                loss = result["test_loss"] if result["status"] == "finished" else math.inf
                useful = math.exp(np.interp(-loss, -np.array(reached), needed))
                counts.setdefault(_key(cell), []).append(useful / result["samples"])
                speeds.setdefault(_key(cell), []).append(result["samples_per_second"])
    count = {key: statistics.median(values) for key, values in counts.items()}
    first = count[_key(alone)] * statistics.median(speeds[_key(alone)])
    times = {key: count[key] * statistics.median(values) / first for key, values in speeds.items()}
    best = max(times.values())
    print(f"\n{name}: {' '.join(trained)}\n{'':28}{'count':>8}{'measured':>10}{'times':>8}{'measured':>10}")
    for cell in cells:
        mark = "  <- plan" if _key(cell) == _key(choice) else ""
        ratio = cell["useful_per_second"] / alone["useful_per_second"]
        shares = f"{cell['efficiency']:8.2f}{count[_key(cell)]:10.2f}"
        print(f"{_key(cell):28}{shares}{ratio:8.2f}{times[_key(cell)]:10.2f}{mark}")
    share = times[_key(choice)] / best if _key(choice) in times else math.nan
    print(f"of the best: {share:.2f}", flush=True)
    return share


def _key(cell: Result) -> str:
    longer = f", lr x {cell['lr_scale']:g}" if cell["lr_scale"] != 1 else ""
    return f"{cell['workers']} x {cell['strategy']}{longer}"


def _epochs(flags: list[str]) -> float:
    return float(flags[flags.index("--epochs") + 1]) if "--epochs" in flags else 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name begins with this [all]")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--data-dir", help="the folder of SST-5; without it that setting is left out")
    parsed = parser.parse_args()
    shares = []
    for name, setting in SETTINGS.items():
        needs_data = "sst5" in setting
        if name.startswith(parsed.only) and (parsed.data_dir or not needs_data):
            data = ["--data-dir", parsed.data_dir] if needs_data else []
            longer = (*setting, "--epochs", "2") if "--epochs" not in setting else setting
            shares.append(check(name, longer, parsed.workers, [int(seed) for seed in parsed.seeds.split(",")], data))
    print(f"\nthe plan's choice, of the best measured: median {statistics.median(shares):.2f}, least {min(shares):.2f}")


if __name__ == "__main__":
    main()
