"""Cost of each rule per update, in copies of the weights: apply a push and write the reply, per tensor it must touch.

One thread, private memory, pushes of 4 workers in turn. A copy reads one vector and writes another; the times of rule
and copy are measured in pairs, and the median of their ratios is printed.

    python benchmarks/rule_cost.py            # 1.2 M and 11 M floats
    python benchmarks/rule_cost.py --quick
    python benchmarks/rule_cost.py --limit    # only the step limit: `auto` over `auto-counted`, averaged, three sizes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.assembly.core import make_rule
from paceline.config import RunConfig
from paceline.interfaces import Arrival, pack
from paceline.settings.resolve import resolve

WORKERS = 4
VECTORS = 4 * WORKERS
MOST_COPIES = 2.5
MOST_OF_LIMIT = 1.15
TOUCHED = {
    "plain": ("g", "weights", "v", "sent"),
    "damped": ("g", "weights", "v", "sent"),
    "gap": ("g", "weights", "v", "sent", "sent_i", "C"),
    "compensated": ("g", "weights", "v", "sent", "sent_i", "s"),
    "dana": ("g", "weights", "v_i", "total", "sent"),
    "dana-slim": ("g", "weights", "v_i", "sent"),
    "cached": ("g", "weights", "v", "c_i", "total", "sent"),
    "ringleader": ("g", "weights", "v", "G_i", "total", "next total", "sent"),
    "buffered:4": ("g", "weights", "v", "buffer", "sent"),
    "foresight-cached": ("g", "weights", "v", "c_i", "total", "sent"),
    "foresight-cached, averaged": ("g", "weights", "v", "c_i", "total", "average", "sent"),
    "foresight": ("g", "weights", "v", "c_i", "total", "sent"),
    "auto, averaged": ("g", "weights", "v", "c_i", "total", "average", "sent"),
    "plain, adam": ("g", "weights", "m", "s", "sent"),
    "cached, adam": ("g", "weights", "m", "s", "c_i", "total", "sent"),
    "ahead, adam": ("g", "weights", "m", "s", "push before", "m tried", "s tried", "sent"),
    "foresight, adam": ("g", "weights", "m", "s", "before", "sent"),
}
"""Vectors that each rule must read or write, scratch excluded; `sent` is the worker's buffer. The word behind a comma
is an optimizer other than SGD, or says that weights are averaged."""


def updates(name: str, size: int) -> Callable[[], None]:
    """Return an action that applies a push and writes a reply, for the workers in turn."""
    rule_name, _, more = name.partition(", ")
    optimizer, average = ("sgd", "on") if more == "averaged" else (more or "sgd", "none")
    config = resolve(RunConfig(rule=rule_name, workers=WORKERS, average=average, optimizer=optimizer))
    layout = pack([("all", (size,), True)])
    rule, weights = make_rule(config, layout), torch.randn(layout.size)
    state = rule.start(weights)
    pushes = [torch.randn(layout.size) * 1e-3 for _ in range(WORKERS)]
    memories = [torch.empty(layout.size) for _ in range(WORKERS)]
    lr, turn = torch.tensor(1e-4), 0

    def update() -> None:
        nonlocal turn
        worker = turn % WORKERS
        turn += 1
        rule.apply(weights, state, pushes[worker], Arrival(worker, WORKERS - 1, lr, WORKERS))
        rule.reply_weights(weights, state, worker, memories[worker])

    return update


def copies(size: int) -> Callable[[], None]:
    """Return an action that copies one vector into another, cycling over as much memory as the updates of 4 workers."""
    vectors: list[Tensor] = [torch.randn(size) for _ in range(VECTORS)]
    turn = 0

    def copy() -> None:
        nonlocal turn
        turn += 2
        vectors[(turn + 1) % VECTORS].copy_(vectors[turn % VECTORS])

    return copy


def repeat(action: Callable[[], None], times: int) -> None:
    for _ in range(times):
        action()


def seconds(action: Callable[[], None]) -> float:
    """Return CPU seconds of this thread, since other programs interrupt long actions more often."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def cost_of_the_limit(pairs: int) -> None:
    """Print the cost of an update under `auto` over that under `auto-counted`, which measures nothing."""
    print(f"{'floats':>12}{'auto us':>10}{'counted us':>12}{'ratio':>8}   goal: at most {MOST_OF_LIMIT}")
    for size, block in ((62_000, 40), (1_200_000, 4), (11_000_000, 1)):
        limited, counted = updates("auto, averaged", size), updates("auto-counted, averaged", size)

        def once(update: Callable[[], None], block: int = block) -> float:
            return seconds(lambda: repeat(update, block)) / block

        for update in (limited, counted):
            once(update)
        found = [(once(limited), once(counted)) for _ in range(pairs)]
        middle = [1e6 * statistics.median(side) for side in zip(*found, strict=True)]
        ratio = statistics.median(one / other for one, other in found)
        print(f"{size:>12,}{middle[0]:>10.1f}{middle[1]:>12.1f}{ratio:>8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small size and a fifth of the pairs")
    parser.add_argument("--limit", action="store_true", help="only what the step limit costs")
    parsed = parser.parse_args()
    quick = parsed.quick
    torch.set_num_threads(1)
    if parsed.limit:
        cost_of_the_limit(pairs=20 if quick else 60)
        return
    print(
        f"{'rule':<21}{'floats':>12}{'tensors':>9}{'ms':>9}{'copies':>9}{'a tensor':>10}   goal: at most {MOST_COPIES}"
    )
    for size, pairs in ((1_200_000, 40 if quick else 200), *(() if quick else ((11_000_000, 30),))):
        for name, touched in TOUCHED.items():
            update, copy = updates(name, size), copies(size)
            for _ in range(2 * WORKERS):
                update()
                copy()
            times = [(seconds(update), seconds(copy)) for _ in range(pairs)]
            ratio = statistics.median(one / other for one, other in times)
            middle = 1e3 * statistics.median(one for one, _ in times)
            share = ratio / len(touched)
            disposition = "" if share <= MOST_COPIES else "   above the goal"
            print(
                f"{name:<21}{size:>12,}{len(touched):>9}{middle:>9.2f}{ratio:>9.2f}{share:>10.2f}{disposition}",
                flush=True,
            )


if __name__ == "__main__":
    main()
