"""`make demo`: train one model with several strategies in real processes, then compare the runs in a table."""

import subprocess
import sys
import time
from pathlib import Path

EPOCHS = "10"
PACES = (("classic", "1"), ("sync", "2"), ("async", "2"), ("bounded:2", "4"))


def paceline(*arguments: str) -> None:
    """Print a `paceline` command and run it."""
    print(f"\n$ paceline {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "paceline", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    """Train LeNet5 on the built-in sample with four strategies and compare them, all with averaged weights."""
    runs = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    dataset = ("--dataset", "fashion-mnist-sample", "--model", "lenet5", "--epochs", EPOCHS, "--average", "on")
    for strategy, workers in PACES:
        name = strategy.replace(":", "")
        paceline("train", "--strategy", strategy, "--workers", workers, *dataset, "--runs", str(runs), "--name", name)
    paceline("compare", *(str(runs / strategy.replace(":", "")) for strategy, _ in PACES))
    print(f"\nThe run folders are under {runs}; 'paceline replay {runs}/async' repeats that run bit for bit.")


if __name__ == "__main__":
    main()
