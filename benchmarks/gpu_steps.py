"""Speed of our training steps on one GPU, compared with eager PyTorch and with published figures.

    PYTHONPATH=src python benchmarks/gpu_steps.py --data-dir DIR                all parts, under 8 minutes
    PYTHONPATH=src python benchmarks/gpu_steps.py --data-dir DIR --only speed --models resnet18 --seconds 5
    PYTHONPATH=src python benchmarks/gpu_steps.py --device cpu --only check    tests the script itself; slow

DIR holds MNIST and CIFAR-10. `check`: gradients of every kind of step against eager fp32. `speed`: ResNets on MNIST,
batch 128: eager PyTorch (fp32 with torch's defaults, torch.optim.Adam, images on the device) and a whole
`paceline train`, taking turns. `inception`: seconds of training until 90 % test accuracy on CIFAR-10.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import paceline
from paceline.assembly.core import make_model
from paceline.data.datasets import Dataset, load, locate
from paceline.errors import PacelineError
from paceline.interfaces import Batch
from paceline.system.strict_json import to_json
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import Normalise, SupervisedTask

BARS = {"resnet18": 2.0, "resnet50": 1.5, "resnet101": 1.3}
BATCH = 128
LR = 0.001
PUBLISHED = Path(__file__).parents[1] / "src/paceline/studies/published/distml.csv"
PUBLISHED_EPOCHS, PUBLISHED_EPOCH_SECONDS = 40, 83
KINDS = {
    "captured": StepSettings(capture=True),
    "bf16": StepSettings("bf16"),
    "bf16, channels last, captured": StepSettings("bf16", capture=True, channels_last=True),
    "in 4 parts, captured": StepSettings(capture=True, accumulate=4),
    "compiled": StepSettings(compile=True),
    "bf16, channels last, compiled, captured": StepSettings("bf16", True, True, True),
}
WITHIN = {"fp32": (1e-3, 0.05), "bf16": (0.03, 0.6)}
"""Relative tolerance of loss and gradient; a residual network on images of one pixel amplifies rounding errors."""
Eager = Callable[[int], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds MNIST and CIFAR-10")
    parser.add_argument("--only", choices=("check", "speed", "inception"), help="one part [all]")
    parser.add_argument("--models", default="resnet18,resnet50,resnet101", help="of speed [%(default)s]")
    parser.add_argument("--steps", choices=("captured", "compiled"), action="append", help="ours, of speed [both]")
    parser.add_argument("--rounds", type=int, default=3, help="turns each side takes [%(default)s]")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn, about [%(default)s]")
    parser.add_argument("--limit", type=float, default=460.0, help="start no part later than this [%(default)s s]")
    parser.add_argument("--epochs", type=float, default=30.0, help="of inception, at most [%(default)s]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    parsed = parser.parse_args()
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_steps: no CUDA device that torch can use: --device cpu --only check tries the script", file=sys.stderr
        )
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the value of our runs, set before the first product
    deadline = time.monotonic() + parsed.limit
    what = torch.cuda.get_device_name() if parsed.device == "cuda" else "CPU"
    print(f"{what}, torch {torch.__version__}", flush=True)
    found: dict[str, Any] = {"device": what, "torch": torch.__version__}
    ok = True
    try:
        if parsed.only in (None, "check"):
            found["check"] = checked(parsed.device)
            ok = all(row["ok"] for row in found["check"])
        if parsed.only in (None, "speed"):
            found["speed"] = speeds(parsed, deadline)
        if parsed.only in (None, "inception") and parsed.device == "cuda":
            found["inception"] = inception(parsed, deadline)
    except PacelineError as error:
        print(f"gpu_steps: {error}", file=sys.stderr)
        return error.exit_code
    if parsed.json:
        Path(parsed.json).write_text(to_json(found, indent=2) + "\n")
    return 0 if ok else 1


def plainly() -> None:
    """Reset torch to its defaults: our runs select deterministic kernels."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def checked(device: str) -> list[dict[str, Any]]:
    """Compare loss and gradient of three batches by each kind of step with eager fp32."""
    plainly()
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 1, 28, 28).to(device), torch.randint(0, 10, (BATCH,)).to(device)
    rows = []
    for model in ("cnn", "resnet18"):
        exact = gradients(model, StepSettings(), images, labels)
        for kind, settings in KINDS.items():
            if device == "cpu":
                settings = replace(settings, capture=False)
            if settings.accumulate > 1 and model != "cnn":
                continue  # batch norm depends on the accumulated parts
            began = time.perf_counter()
            found = gradients(model, settings, images, labels)
            off = [
                max(pair) for pair in zip(*(distances(a, b) for a, b in zip(found, exact, strict=True)), strict=True)
            ]
            ok = all(far <= most for far, most in zip(off, WITHIN[settings.precision], strict=True))
            seconds = time.perf_counter() - began
            rows.append({"model": model, "kind": kind, "loss": off[0], "gradient": off[1], "ok": ok})
            disposition = "ok" if ok else "WRONG"
            print(
                f"{model:9} {kind:40} loss off {off[0]:.1e}, gradient {off[1]:.1e}  {disposition} ({seconds:.0f} s)",
                flush=True,
            )
    return rows


def gradients(model: str, settings: StepSettings, images: Tensor, labels: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """Return loss, gradient and running statistics of three batches."""
    torch.manual_seed(0)
    task = SupervisedTask(make_model(model, (1, 28, 28)), F.nll_loss, (images, labels)).to(images.device)
    task.configure_step(settings)
    gradient, state = torch.zeros(task.layout.size).to(images), torch.zeros(task.state_size).to(images)
    task.bind(task.initial(), gradient, state)
    found = []
    for key in (1, 2, 2**63 + 5):
        loss = task.gradient(Batch(images.roll(key % 7, 0), labels, BATCH, key))
        found.append((loss, gradient.clone(), state.clone()))
    return found


def distances(found: tuple[float, Tensor, Tensor], exact: tuple[float, Tensor, Tensor]) -> tuple[float, float]:
    """Return the relative errors of loss (or statistics) and gradient."""
    loss = abs(found[0] - exact[0]) / abs(exact[0])
    statistic = ((found[2] - exact[2]).norm() / exact[2].norm()).item() if exact[2].numel() else 0.0
    return max(loss, statistic), ((found[1] - exact[1]).norm() / exact[1].norm()).item()


def eager_loop(model_name: str, dataset: Dataset, device: str) -> Eager:
    """Return a plain PyTorch training loop that takes a number of steps and returns samples per second."""
    torch.manual_seed(0)
    model = make_model(model_name, (1, 28, 28)).to(device)
    normalise = Normalise(dataset.info.mean, dataset.info.std)
    images = normalise(torch.from_numpy(dataset.train_images).to(device))
    labels = torch.from_numpy(dataset.train_labels).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def run(steps: int) -> float:
        plainly()
        wait(device)
        began = time.perf_counter()
        order = torch.randperm(len(images), device=device)
        for step in range(steps):
            start = step * BATCH % (len(images) - BATCH)
            rows = order[start : start + BATCH]
            optimizer.zero_grad(set_to_none=True)
            F.nll_loss(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        wait(device)
        return steps * BATCH / (time.perf_counter() - began)

    return run


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(model: str, steps: int, compiled: bool, parsed: argparse.Namespace, runs: str) -> dict[str, Any]:
    """Train a complete run (loader, step, server, rule, log); compiling and capturing are not timed."""
    return paceline.train(
        dataset="mnist", data_dir=parsed.data_dir, model=model, strategy="classic", optimizer="adam", lr=LR,
        batch_size=BATCH, steps=steps, device=parsed.device, precision="bf16", capture=parsed.device == "cuda",
        compile=compiled, score="test", runs=runs, quiet=True,
    )  # fmt: skip


def published(model: str) -> float | None:
    """Return the published data/sec of one GPU, on the faster of the two machines."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model and row["gpus"] == "1"]
    return max((float(row["samples_per_second"]) for row in rows), default=None)


def speeds(parsed: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    dataset = load(locate("mnist", Path(parsed.data_dir) if parsed.data_dir else None))
    rows = []
    for kind in parsed.steps or ["captured", "compiled"]:
        for model in parsed.models.split(","):
            if time.monotonic() > deadline:
                print(f"{model}, {kind}: left out, --limit is reached", flush=True)
                continue
            eager = eager_loop(model, dataset, parsed.device)
            eager(20)  # warm-up
            steps = max(5, int(eager(20) * parsed.seconds / BATCH))
            theirs, mine = [], []
            with tempfile.TemporaryDirectory() as runs:
                for _ in range(parsed.rounds):
                    theirs.append(eager(steps))
                    result = ours(model, steps, kind == "compiled", parsed, runs)
                    mine.append(result["samples_per_second"])
                    if time.monotonic() > deadline:
                        break
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            row = {
                "model": model,
                "steps": kind,
                "eager": statistics.median(theirs),
                "ours": statistics.median(mine),
                "ratio": ratio,
                "bar": BARS.get(model),
                "published": published(model),
                "rounds": len(mine),
                "test_accuracy": result["test_accuracy"],
            }
            rows.append(row)
            print(f"{model}, {kind}: {row['ours']:,.0f} samples/s, {ratio:.2f} times eager", flush=True)
            if parsed.device == "cuda":
                torch.cuda.empty_cache()
    print("\n| model, batch 128 | our steps | eager PyTorch | ours | ratio | bar | published (1 RTX 2080 Ti) |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | bf16, {row['steps']} | {row['eager']:,.0f} | {row['ours']:,.0f} | {row['ratio']:.2f} "
            f"| {row['bar'] or ''} | {row['published'] or ''} |"
        )
    print("samples/s; medians of", parsed.rounds, "turns", flush=True)
    return rows


def inception(parsed: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Measure the seconds until 90 % test accuracy, tested once per epoch."""
    if time.monotonic() > deadline:
        print("inception: left out, --limit is reached", flush=True)
        return None
    with tempfile.TemporaryDirectory() as runs:
        result = paceline.train(
            dataset="cifar10", data_dir=parsed.data_dir, model="inception-28-small", strategy="classic", lr=0.1,
            momentum=0.9, nesterov=True, weight_decay=5e-4, schedule="cosine", warmup=0.05, batch_size=BATCH,
            epochs=parsed.epochs, eval_every=1.0, target_accuracy=90.0, device="cuda", precision="bf16", capture=True,
            score="test", runs=runs, quiet=True,
        )  # fmt: skip
        events = [json.loads(line) for line in (Path(result["folder"]) / "events.jsonl").read_text().splitlines()]
    row = {name: result[name] for name in ("test_accuracy", "train_seconds", "samples_per_second", "status", "samples")}
    reached = result["test_accuracy"] >= 90.0
    for event in events:
        if event.get("kind") == "evaluation":
            print(f"  {event['samples'] / 50_000:5.1f} epochs: {event['test_accuracy']:.2f} %", flush=True)
    print(
        f"inception-28-small on CIFAR-10: {result['test_accuracy']:.2f} % after {result['train_seconds']:.1f} s "
        f"({result['samples'] / 50_000:.0f} epochs){'' if reached else ', 90 % NOT reached'}; published: 89.99 % after "
        f"{PUBLISHED_EPOCHS} x {PUBLISHED_EPOCH_SECONDS} s = {PUBLISHED_EPOCHS * PUBLISHED_EPOCH_SECONDS:,} s",
        flush=True,
    )
    return {**row, "reached": reached}


if __name__ == "__main__":
    sys.exit(main())
