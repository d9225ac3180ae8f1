"""Large batches: the published collapse in the first epoch, compared with `--scale-lr auto` and its warm-up.

    python benchmarks/large_batch.py                                        LeNet5 on the built-in sample, simulated
    python benchmarks/large_batch.py --seeds 3 --epochs 4
    python benchmarks/large_batch.py --model resnet18 --dataset mnist --device cuda --epochs 4 --data-dir DIR

The published run (ResNet18, 4 GPUs, batch 128 each, Adam with lr .01 x 4 from the first step) had 13.78 % test accuracy
after its first epoch. Every worker passes over the whole train set each epoch. On a CPU the workers are simulated with
`sync`, which gives the weights of real ones; on a GPU real workers share it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.launch import train
from paceline.reports.console import Console
from paceline.runs.events import read_events
from paceline.simulation.run import simulate
from paceline.studies.published.throughput import epochs_of

PUBLISHED = 13.78
BAR = 60.0
"""Minimum test accuracy of the run with warm-up after its first epoch; guessing gives 10."""


def settings(parsed: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the settings to try, by their name in the table."""
    factor = parsed.workers
    return {
        f"as published: lr x {factor}, no warm-up": {"scale_lr": f"{factor}.0"},
        f"--scale-lr auto: lr x {factor}, with warm-up": {"scale_lr": "auto"},
        "the lr of one worker": {"scale_lr": "none"},
    }


def accuracies(config: RunConfig) -> list[float]:
    """Return the test accuracy after each epoch; a diverged run counts as guessing."""
    run = train if config.device == "cuda" else simulate
    with tempfile.TemporaryDirectory() as runs, Console(quiet=True) as console:
        folder, result = run(replace(config, runs=runs), console)
        found = [epoch.test_accuracy or 0.0 for epoch in epochs_of(read_events(folder.events_file))]
        if len(found) < round(config.epochs):
            found.append(result["test_accuracy"] or 0.0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5", help="[%(default)s]")
    parser.add_argument("--dataset", default="fashion-mnist-sample", help="[%(default)s]")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data set")
    parser.add_argument("--workers", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--batch-size", type=int, default=128, help="of each [%(default)s]")
    parser.add_argument("--lr", type=float, default=0.01, help="of Adam, before it is scaled [%(default)s]")
    parser.add_argument("--epochs", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--seeds", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[%(default)s]")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when the bar is missed")
    parsed = parser.parse_args()
    base = RunConfig(
        dataset=parsed.dataset, data_dir=parsed.data_dir, model=parsed.model, strategy="sync", workers=parsed.workers,
        split="full", batch_size=parsed.batch_size, optimizer="adam", lr=parsed.lr, epoch_mode="own",
        epochs=float(parsed.epochs), eval_every=float(parsed.workers), score="test", device=parsed.device,
    )  # fmt: skip
    print(f"{parsed.model} on {parsed.dataset}, {parsed.workers} workers in step, batch {parsed.batch_size} each, Adam")
    print("| setting | " + " | ".join(f"epoch {number + 1}" for number in range(parsed.epochs)) + " |")
    print("|---" * (parsed.epochs + 1) + "|", flush=True)
    first = {}
    try:
        for name, setting in settings(parsed).items():
            runs = [accuracies(replace(base, seed=seed, **setting)) for seed in range(parsed.seeds)]
            first[name] = [run[0] for run in runs]
            columns = zip(*runs, strict=True)
            cells = [f"{statistics.fmean(column):.2f} (least {min(column):.2f})" for column in columns]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    except PacelineError as error:
        print(f"large_batch: {error}", file=sys.stderr)
        return error.exit_code
    collapsed, kept, _ = first.values()
    disposition = "met" if min(kept) > BAR else "MISSED"
    print(
        f"test accuracy in percent, {parsed.seeds} seed{'s' if parsed.seeds > 1 else ''}. First epoch: "
        f"{min(collapsed):.2f} without warm-up (published {PUBLISHED}), {min(kept):.2f} with it; bar above {BAR:g}: "
        f"{disposition}"
    )
    return 1 if parsed.strict and min(kept) <= BAR else 0


if __name__ == "__main__":
    sys.exit(main())
