"""Samples per second of `paceline train`, compared with bare PyTorch loops on the same cores.

    python benchmarks/throughput.py [--only NAME] [--peers] [--pairs N] [--quick] [--json] [--strict]

Classic is compared with one loop with the same threads; several workers with as many loops of one thread, at most one
per core. With --peers, DDP on Gloo, a torch RPC parameter server and a Ray actor are compared with the same loops.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass

import loops
import ours
import pairs
import peers

SECONDS, QUICK_SECONDS = 4.0, 1.5


@dataclass(frozen=True)
class Case:
    """One of our strategies and the minimum share of the bare loops' speed."""

    strategy: str
    model: str
    workers: int
    bar: float


CASES = {
    "classic": Case("classic", "lenet5", 1, 0.97),
    "async-2": Case("async", "lenet5", 2, 0.95),
    "sync-2": Case("sync", "lenet5", 2, 0.90),
    "async-2-cnn": Case("async", "cnn", 2, 0.92),
    "sync-2-cnn": Case("sync", "cnn", 2, 0.88),
    "async-10": Case("async", "lenet5", 10, 0.90),
    "sync-10": Case("sync", "lenet5", 10, 0.90),
    "allreduce-2": Case("allreduce", "lenet5", 2, 0.80),
    "allreduce-2-cnn": Case("allreduce", "cnn", 2, 0.80),
}
NUM_PEERS = 2
RULES = ("auto", "foresight-cached")
RULE_BAR = 0.97
"""Minimum throughput relative to rule plain, LeNet5 with 2 workers."""


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument(
        "--only", metavar="NAME", choices=[*CASES, *RULES, *peers.KINDS], help=", ".join([*CASES, *RULES, *peers.KINDS])
    )
    parser.add_argument("--peers", action="store_true", help="also measure other ways to train on two processes")
    parsed = parser.parse_args()
    number, seconds = pairs.num_pairs(parsed), QUICK_SECONDS if parsed.quick else SECONDS
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name, case in CASES.items():
        if parsed.only not in (None, name):
            continue
        num_loops, threads = (1, cores) if case.strategy == "classic" else (min(case.workers, cores), 1)
        our_side = functools.partial(ours.rate, case.strategy, case.model, case.workers, threads, seconds)
        bare_side = functools.partial(loops.rate, case.model, num_loops, threads, seconds)
        say = pairs.teller(parsed, name)
        rows.append(pairs.compare(name, our_side, bare_side, number, at_least=case.bar, say=say))
    if rows:
        print(pairs.table(rows, "samples/s"))
    ruled = []
    for rule in RULES:
        if parsed.only in (None, rule):
            with_rule = functools.partial(ours.rate, "async", "lenet5", 2, 1, seconds, rule)
            plain = functools.partial(ours.rate, "async", "lenet5", 2, 1, seconds)
            say = pairs.teller(parsed, rule)
            ruled.append(pairs.compare(f"rule {rule}", with_rule, plain, number, at_least=RULE_BAR, say=say))
    if ruled:
        print(pairs.table(ruled, "samples/s", sides=("the rule", "plain")))
    theirs = []
    for kind in peers.KINDS:
        if parsed.only != kind and (parsed.only is not None or not parsed.peers):
            continue
        if kind == "ray" and importlib.util.find_spec("ray") is None:
            print("ray is not installed")
            continue
        their_side = functools.partial(peers.rate, kind, NUM_PEERS, seconds)
        model = "cnn" if kind.endswith("-cnn") else "lenet5"
        bare_side = functools.partial(loops.rate, model, min(NUM_PEERS, cores), 1, seconds)
        theirs.append(pairs.compare(kind, their_side, bare_side, number, say=pairs.teller(parsed, kind)))
    if theirs:
        print(pairs.table(theirs, "samples/s", sides=("theirs", "bare")))
    return pairs.close(parsed, "throughput", [*rows, *ruled, *theirs], cores=cores, seconds_a_side=seconds)


if __name__ == "__main__":
    sys.exit(main())
