"""A worker that works honestly for a while and then lies about a push: for chaos.py.

    python benchmarks/liar.py samples|seconds|number|weight PUSHES [flags of paceline worker]

After PUSHES honest pushes it claims a false number of samples, a step of NaN seconds, the number of another push, or a
negative weight. The server must expel it and go on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from paceline.cli.main import main
from paceline.core.messages import Push, Reply
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.transports.protocol import Timing

LIES: dict[str, Callable[[Push, Timing], tuple[Push, Timing]]] = {
    "samples": lambda push, timing: (push._replace(samples=(1 << 32) - 1), timing),
    "seconds": lambda push, timing: (push, timing._replace(wall=math.nan)),
    "number": lambda push, timing: (push._replace(seq=push.seq + 7), timing),
    "weight": lambda push, timing: (push._replace(weight=-1.0), timing),
}


def lie(what: str, after: int) -> None:
    """Make the pushes of this process false, from the `after`-th on."""
    honest, told = WorkerLoop.step, LIES[what]

    def step(self: WorkerLoop, reply: Reply) -> tuple[Push, Timing]:
        push, timing = honest(self, reply)
        return told(push, timing) if push.seq >= after else (push, timing)

    WorkerLoop.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    lie(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["worker", *sys.argv[3:]]))
