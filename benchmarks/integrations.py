"""Examples of other libraries on two workers: what they reach alone, under sync and async, and whether they replay.

`make integrations` runs it in an environment that has the libraries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "integrations"
METRICS = {
    "fabric.py": "test_accuracy",
    "lightning_trainer.py": "test_accuracy",
    "huggingface_trainer.py": "perplexity",
    "accelerate_loop.py": "test_accuracy",
}
STRATEGIES = ("sync", "async")


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, and return what it printed. End the program with its errors if it fails."""
    ended = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"python {' '.join(arguments)} ended with code {ended.returncode}:\n{ended.stderr}")
    return ended


def alone(example: str, cwd: Path) -> str:
    """The last line that the program prints, without a run."""
    return command(str(EXAMPLES / example), cwd=cwd).stdout.strip().splitlines()[-1]


def row(example: str, strategy: str, workers: int, cwd: Path) -> str:
    """One run of an example and its replay, as a row of the table."""
    name = f"{Path(example).stem}-{strategy}"
    settings = ["-n", str(workers), "--strategy", strategy, "--threads", "1", "--runs", "runs", "--name", name]
    command("-m", "paceline", "run", *settings, str(EXAMPLES / example), cwd=cwd)
    result = json.loads((cwd / "runs" / name / "result.json").read_text(encoding="utf-8"))
    metric = METRICS[example]
    again = command("-m", "paceline", "replay", f"runs/{name}", cwd=cwd)
    replayed = "identical to the run" in again.stdout + again.stderr
    value = f"{metric} {result['reported']['0'][metric]:.4g}"
    return f"| {example} | {strategy} | {value} | {result['updates']} | {'identical' if replayed else 'DIFFERENT'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--workers", type=int, default=2)
    asked = parser.parse_args()
    print("| example | strategy | reached | updates | replay |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for example in METRICS:
            print(f"| {example} | alone | {alone(example, Path(folder))} | | |", flush=True)
            for strategy in STRATEGIES:
                print(row(example, strategy, asked.workers, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
