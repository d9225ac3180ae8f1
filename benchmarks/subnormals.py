"""A pass of momentum over subnormal floats, with and without flushing them to zero, beside a pass over normal ones.

Intel cores handle subnormal floats in microcode; AMD cores hardly notice them. The three passes are timed in turn.

    python benchmarks/subnormals.py
    python benchmarks/subnormals.py --floats 1200000 --rounds 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from paceline.system.subnormals import flush_subnormals


def milliseconds(value: float, floats: int) -> float:
    """The time of `m = .9 m + 0; w += m` for a momentum that starts at `value`."""
    momentum, weights, zero = torch.full((floats,), value), torch.zeros(floats), torch.zeros(floats)
    began = time.perf_counter()
    momentum.mul_(0.9).add_(zero)
    weights.add_(momentum)
    return 1e3 * (time.perf_counter() - began)


def processor() -> str:
    """The name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floats", type=int, default=1_200_000)
    parser.add_argument("--rounds", type=int, default=30)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"normal": [], "subnormal": [], "subnormal, flushed": []}
    for _ in range(parsed.rounds):
        torch.set_flush_denormal(False)
        found["normal"].append(milliseconds(1e-3, parsed.floats))
        found["subnormal"].append(milliseconds(1e-39, parsed.floats))
        flush_subnormals()
        found["subnormal, flushed"].append(milliseconds(1e-39, parsed.floats))
    print(f"{parsed.floats:,} floats on one core, {processor()}, median of {parsed.rounds}:")
    normal = statistics.median(found["normal"])
    for name, times in found.items():
        median = statistics.median(times)
        print(f"  {name:<20} {median:8.2f} ms  {median / normal:6.2f} times normal floats")


if __name__ == "__main__":
    main()
