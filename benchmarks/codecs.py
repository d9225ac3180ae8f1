"""Time of each codec: encode and decode 11 M floats (the layers of a ResNet18), compared with one copy of them.

    python benchmarks/codecs.py [--rounds N] [--threads N] [--quick] [--json]

Private memory, one thread by default. Each round times a copy, then every codec's encode and decode on the next of
several updates; it prints the median of the rounds. A link takes bytes x 8 / 1e9 seconds; `saved` is the seconds that a
push saves compared with codec `none`, encode and decode included; `up to` is the link speed in Gbit/s above which the
codec costs more time than it saves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from paceline.interfaces import Layout, pack
from paceline.settings.codecs import build_codec
from paceline.system.strict_json import to_json

NAMES = ("none", "fp16", "bf16", "int8", "sign", "topk:0.01", "topk:0.001", "lowrank:1", "lowrank:4", "lowrank:16")
NUM_UPDATES = 3
ROUNDS, QUICK_ROUNDS = 9, 3
LINK = 1e9


def resnet18() -> Layout:
    """Return the parameter shapes of a ResNet18 for 10 classes."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3)]
    before = 64
    for width in (64, 128, 256, 512):
        for entering in (before, width):
            shapes += [(width, entering, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(width, entering, 1, 1), (width,), (width,)] if entering != width else []
        before = width
    shapes += [(10, 512), (10,)]
    return pack([(f"parameter{number}", shape, True) for number, shape in enumerate(shapes)])


def milliseconds(action: Callable[[], object]) -> float:
    """Return the wall time of an action."""
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


class Measured:
    """One codec and the times of its rounds."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name = name
        self._codec = build_codec(name, layout)
        self._memory = self._codec.start(1)
        self._out = torch.zeros(self._codec.capacity, dtype=torch.uint8)
        self._decoded = torch.empty(layout.size)
        self.nbytes = 0
        self.encodes: list[float] = []
        self.decodes: list[float] = []

    def round(self, update: torch.Tensor) -> None:
        began = time.perf_counter()
        self.nbytes = self._codec.encode(update, self._memory, self._out)
        self.encodes.append(1000 * (time.perf_counter() - began))
        self.decodes.append(milliseconds(lambda: self._codec.decode(self._out[: self.nbytes], self._decoded)))

    @property
    def encode(self) -> float:
        return statistics.median(self.encodes)

    @property
    def decode(self) -> float:
        return statistics.median(self.decodes)

    @property
    def seconds(self) -> float:
        """Seconds of a push over the link, encode and decode included."""
        return (self.encode + self.decode) / 1000 + 8 * self.nbytes / LINK


def line(row: Measured, plain: Measured, copy: float) -> dict[str, float | str]:
    """Return one row of the table as numbers."""
    dearer = (row.encode + row.decode - plain.encode - plain.decode) / 1000
    fewer = plain.nbytes - row.nbytes
    return {
        "codec": row.name,
        "encode_ms": row.encode,
        "decode_ms": row.decode,
        "encode_copies": row.encode / copy,
        "decode_copies": row.decode / copy,
        "nbytes": row.nbytes,
        "times_fewer": plain.nbytes / row.nbytes,
        "saved_seconds": plain.seconds - row.seconds,
        "up_to_gbit": 8 * fewer / 1e9 / dearer if dearer > 0 else float("inf"),
    }


def table(lines: list[dict[str, float | str]]) -> str:
    """Format the rows as a table."""
    heads = ("codec", "encode ms", "decode ms", "copies", "MB", "times fewer", "saved s", "up to Gbit/s")
    text = [f"{heads[0]:<11}" + "".join(f"{head:>13}" for head in heads[1:])]
    for row in lines:
        copies = f"{row['encode_copies']:.1f} + {row['decode_copies']:.1f}"
        reach = "-" if row["codec"] == "none" else f"{row['up_to_gbit']:.1f}"
        figures = (
            f"{row['encode_ms']:.1f}",
            f"{row['decode_ms']:.1f}",
            copies,
            f"{float(row['nbytes']) / 1e6:.2f}",
            f"{row['times_fewer']:.1f}",
            f"{row['saved_seconds']:.3f}",
            reach,
        )
        text.append(f"{row['codec']:<11}" + "".join(f"{figure:>13}" for figure in figures))
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"[{ROUNDS}; with --quick {QUICK_ROUNDS}]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(NAMES), help="codecs by name")
    parser.add_argument("--quick", action="store_true", help="short and rough: to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    layout = resnet18()
    updates = [torch.zeros(layout.size) for _ in range(NUM_UPDATES)]
    for update in updates:
        for view in layout.views(update).values():
            view.copy_(torch.randn(view.shape) * 1e-3 * torch.rand(()))
    target, copies = torch.empty(layout.size), []
    measured = [Measured(name, layout) for name in dict.fromkeys(["none", *parsed.only])]
    for number in range((parsed.rounds or (QUICK_ROUNDS if parsed.quick else ROUNDS)) + 1):
        update = updates[number % NUM_UPDATES]
        copies.append(milliseconds(lambda update=update: target.copy_(update)))
        for row in measured:
            row.round(update)
    for times in (copies, *(row.encodes for row in measured), *(row.decodes for row in measured)):
        del times[0]  # the first round touches memory for the first time
    copy = statistics.median(copies)
    lines = [line(row, measured[0], copy) for row in measured]
    print(f"{layout.num_parameters:,} floats, {parsed.threads} thread(s); one copy takes {copy:.1f} ms")
    print(table(lines))
    if parsed.json:
        print(to_json({"benchmark": "codecs", "copy_ms": copy, "rows": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
