"""What constant staleness costs AdamW and Muon on a small character GPT, and the share that the look-ahead gives back.

    python benchmarks/delay_curve.py --text FILE [--device cuda] [--minutes 8] [--out delay_curve.csv]
    python benchmarks/delay_curve.py --text FILE --quick

DELAY + 1 workers push in turn, so every push is DELAY updates stale. Each run makes the same number of updates on one
device, at the learning rate of one worker; the loss is that of the live weights on the last tenth of the text. Runs
that are in the CSV are not made again, so a series can be made in several calls. On a GPU, runs are captured graphs,
and several are trained at once. A step of 10.7 million parameters and 4,096 characters takes 0.3 TFLOP, and 90 runs of
2,000 steps take 54 PFLOP.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

import torch
from cells import STUDENT
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import RunConfig
from paceline.core.muon import Muon
from paceline.core.optimizers import Adam, AdamW, RoundOptimizer
from paceline.core.rules.foresight import Ahead
from paceline.core.rules.plain import Plain
from paceline.core.rules.step_foresight import StepForesight
from paceline.interfaces import Arrival, Layout, Rule
from paceline.settings.rules import warmup_of
from paceline.system.subnormals import flush_subnormals
from paceline.tasks.flat import FlatModule

TEST_BATCH = 128
WARMED_UP = 3  # steps before the capture


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    context: int = 256
    width: int = 384
    heads: int = 6
    layers: int = 6
    batch: int = 16


SIZES = {
    "full": Size(),
    "small": Size(context=128, width=128, heads=4, layers=4),
    "quick": Size(context=16, width=32, heads=2, layers=1, batch=4),
}
VARIANTS: dict[str, dict[str, float]] = {
    "foresight": {},
    "whole-steps": {"holds_back": False},
    "horizon-0": {"horizon": 0.0},
    "horizon-1": {"horizon": 1.0},
    "horizon-2": {"horizon": 2.0},
}
"""The look-ahead rule, and what it is with another constant or without one of its parts."""
GROWING = {"growing-0": 0.0, "growing-20": 20.0, "growing-80": 80.0}
"""The look-ahead rule with steps that grow over so many updates for each other worker, whatever share of the run."""


@dataclass(frozen=True)
class Cell:
    """One run, as it is named in the CSV."""

    optimizer: str
    rule: str
    delay: int
    seed: int
    size: str
    steps: int
    lr: float


class Block(nn.Module):
    """Attention to earlier characters and two linear layers, each behind a norm and beside the residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:  # [B, T, W]
        batch, length, width = hidden.shape
        parts = self.attend(self.norm1(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrow(functional.gelu(self.widen(self.norm2(hidden))))


class CharacterGpt(nn.Module):
    """Predicts each next character of a text, without dropout."""

    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(characters, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.output = nn.LayerNorm(size.width), nn.Linear(size.width, characters, bias=False)
        for name, parameter in self.named_parameters():
            into_residual = name.endswith(("project.weight", "narrow.weight"))
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * size.layers) if into_residual else 0.02)

    def forward(self, characters: Tensor) -> Tensor:  # [B, T] -> [B, T, characters]
        hidden = self.embedding(characters) + self.positions.weight[: characters.shape[1]]
        logits: Tensor = self.output(self.norm(self.blocks(hidden)))
        return logits


class Text:
    """A text as numbers: the first nine tenths to train on, the rest to test on."""

    def __init__(self, path: Path, device: torch.device) -> None:
        text = path.read_text(encoding="utf-8")
        known = {character: number for number, character in enumerate(sorted(set(text)))}
        numbers = torch.tensor([known[character] for character in text], device=device)
        self.characters, cut = len(known), int(0.9 * len(numbers))
        self.train, self.test = numbers[:cut], numbers[cut:]


def make_rule(cell: Cell, layout: Layout) -> Rule:
    """The rule of a cell, around its optimizer."""
    makers: dict[str, type[Adam]] = {"adam": Adam, "adamw": AdamW}

    def optimizer() -> RoundOptimizer:
        if cell.optimizer == "muon":
            return Muon(layout, 0.95, (0.9, 0.99), weight_decay=0.1)
        return makers[cell.optimizer]((0.9, 0.99), weight_decay=0.1 if cell.optimizer == "adamw" else 0.0)

    workers = cell.delay + 1
    if cell.rule in VARIANTS or cell.rule in GROWING:
        return StepForesight(optimizer(), workers, **VARIANTS.get(cell.rule, {}))
    return Ahead(optimizer(), optimizer(), workers) if cell.rule == "ahead" else Plain(optimizer())


def lr_at(step: int, cell: Cell) -> float:
    """The learning rate: it grows over a twentieth of the run or what the rule needs, and falls along a cosine."""
    warmup = max(1.0, cell.steps // 20)
    if cell.rule in GROWING:
        warmup = max(warmup, GROWING[cell.rule] * cell.delay)
    elif cell.rule in VARIANTS:
        run = RunConfig(workers=cell.delay + 1, rule="foresight", optimizer=cell.optimizer)
        warmup = max(warmup, cell.steps * warmup_of(run, cell.steps))
    if step < warmup:
        return cell.lr * (step + 1) / warmup
    return cell.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (cell.steps - warmup)))


class Training:
    """One run: the weights, what every worker was sent, and the tables that its steps read."""

    def __init__(self, cell: Cell, size: Size, text: Text, device: torch.device) -> None:
        self.cell, self.size, self.text, self.device = cell, size, text, device
        torch.manual_seed(cell.seed)
        self.model = CharacterGpt(size, text.characters).to(device)
        flat = FlatModule(self.model)
        self.weights = flat.initial()[None]
        self.computing, self.gradient = self.weights[0].clone(), torch.zeros_like(self.weights[0])
        flat.bind(self.computing, self.gradient, torch.empty(0, device=device))
        for parameter, view in zip(self.model.parameters(), flat.layout.views(self.gradient).values(), strict=True):
            parameter.grad = view
        workers = cell.delay + 1
        self.rule = make_rule(cell, flat.layout)
        self.state = self.rule.start(self.weights)
        self.sent = self.weights.repeat(workers, 1)
        self.reply = torch.empty_like(self.weights)
        steps = torch.arange(cell.steps)
        places = len(text.train) - size.context - 1
        chosen = torch.Generator().manual_seed(cell.seed)
        self.starts = torch.randint(0, places, (cell.steps, size.batch), generator=chosen).to(device)
        self.workers = (steps % workers).to(device)
        self.staleness = steps.clamp(max=cell.delay)[:, None].to(device)
        self.lrs = torch.tensor([[lr_at(step, cell)] for step in range(cell.steps)], device=device)
        self.live = torch.full((1, 1), workers, device=device)
        self.window = torch.arange(size.context + 1, device=device)
        self.step_number = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> None:
        """One push and its reply; all it reads lies on the device, so it can be captured."""
        number = self.step_number
        worker = self.workers.index_select(0, number)
        self.computing.copy_(self.sent.index_select(0, worker)[0])
        self.gradient.zero_()
        starts = self.starts.index_select(0, number)[0]
        batch = self.text.train[starts[:, None] + self.window]
        self.loss_of(batch[:, :-1], batch[:, 1:], "mean").backward()
        staleness, lr = self.staleness.index_select(0, number), self.lrs.index_select(0, number)
        self.rule.apply(self.weights, self.state, self.gradient[None], Arrival(worker, staleness, lr, self.live))
        self.rule.reply_weights(self.weights, self.state, worker, self.reply)
        self.sent.index_copy_(0, worker, self.reply)
        number += 1

    def loss_of(self, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    @torch.no_grad()
    def test_loss(self) -> float:
        """The mean loss of the live weights over all test characters."""
        self.computing.copy_(self.weights[0])
        context, text = self.size.context, self.text.test
        count = (len(text) - 1) // context
        inputs, targets = text[: count * context].view(count, -1), text[1 : count * context + 1].view(count, -1)
        parts = zip(inputs.split(TEST_BATCH), targets.split(TEST_BATCH), strict=True)
        return sum(self.loss_of(*part, "sum").item() for part in parts) / (count * context)


def train_together(trainings: list[Training]) -> None:
    """Train all runs; on a GPU each as a captured graph on a stream of its own."""
    if trainings[0].device.type != "cuda":
        for training in trainings:
            for _ in range(training.cell.steps):
                training.step()
        return
    captured = []
    for training in trainings:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMED_UP):
                training.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            training.step()
        captured.append((stream, graph))
    for number in range(trainings[0].cell.steps - WARMED_UP):
        for stream, graph in captured:
            with torch.cuda.stream(stream):
                graph.replay()
        if number % 50 == 0:
            torch.cuda.synchronize()  # the host must not run far ahead
    torch.cuda.synchronize()


def cells_of(parsed: argparse.Namespace) -> Iterator[Cell]:
    """All runs, whole seeds first, so that a series that is cut short can be read."""
    for seed, optimizer in product(range(parsed.seeds), parsed.optimizers.split(",")):
        base = Cell(optimizer, "alone", 0, seed, parsed.size, parsed.steps, parsed.lr)
        yield base
        for delay, rule in product(map(int, parsed.delays.split(",")), parsed.rules.split(",")):
            if delay:
                yield replace(base, rule=rule, delay=delay)


def read_results(path: Path) -> dict[Cell, float]:
    """The losses of the runs that the CSV holds."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {cell: float(row["loss"]) for row in csv.DictReader(file) for cell in (cell_of(row),)}


def cell_of(row: dict[str, str]) -> Cell:
    whole = {name: int(row[name]) for name in ("delay", "seed", "steps")}
    return Cell(**whole, optimizer=row["optimizer"], rule=row["rule"], size=row["size"], lr=float(row["lr"]))


def write_results(path: Path, results: dict[Cell, float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(field.name for field in fields(Cell)), "loss"])
        writer.writerows([*asdict(cell).values(), f"{loss:.5f}"] for cell, loss in results.items())


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error over seeds (nan with one seed)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def share_closed(alone: list[float], stale: list[float], found: list[float]) -> tuple[float, float]:
    """The share of the gap that is closed, and the half-width of its 95 % interval from differences of equal seeds.

    >>> share, half = share_closed([1.0, 1.1], [2.0, 2.1], [1.2, 1.3])
    >>> round(share, 3), round(half, 3)
    (0.8, 0.0)
    """
    gap = statistics.mean(stale) - statistics.mean(alone)
    share = (statistics.mean(stale) - statistics.mean(found)) / gap
    rests = [(s - f) - share * (s - a) for a, s, f in zip(alone, stale, found, strict=True)]
    return share, STUDENT.get(len(rests) - 1, math.nan) * mean_and_error(rests)[1] / abs(gap)


def table(results: dict[Cell, float], cells: Iterable[Cell]) -> list[str]:
    """One line for each optimizer, delay and rule; a gap of at most twice its seed error is not divided by."""
    cells = list(cells)
    lines = [f"{'optimizer':<10}{'delay':>6}  {'rule':<10}{'loss':>8}{'error':>8}{'gap':>8}   share of the gap closed"]
    for optimizer, delay, rule in dict.fromkeys((cell.optimizer, cell.delay, cell.rule) for cell in cells):
        mine = [cell for cell in cells if (cell.optimizer, cell.delay, cell.rule) == (optimizer, delay, rule)]
        others = [(c, replace(c, rule="alone", delay=0), replace(c, rule="plain")) for c in mine]
        if delay == 0:
            others = [(c, c, c) for c in mine]
        rows = [[results[one] for one in trio] for trio in others if all(one in results for one in trio)]
        if not rows:
            continue
        found, alone, stale = (list(column) for column in zip(*rows, strict=True))
        loss, error = mean_and_error(found)
        gap, gap_error = mean_and_error([s - a for s, a in zip(stale, alone, strict=True)])
        text = ""
        if delay and rule != "plain" and gap > 2.0 * gap_error:
            share, half = share_closed(alone, stale, found)
            text = f"{100 * share:.0f} % ± {100 * half:.0f}"
        elif delay and rule != "plain":
            text = "one seed" if len(rows) == 1 else "the gap is within twice its error"
        lines.append(f"{optimizer:<10}{delay:>6}  {rule:<10}{loss:>8.3f}{error:>8.3f}{gap:>8.3f}   {text}".rstrip())
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text file, as Shakespeare's of nanoGPT")
    parser.add_argument("--out", type=Path, default=Path("delay_curve.csv"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--optimizers", default="adamw,muon", help="of adam, adamw, muon [adamw,muon]")
    known = ("plain", "ahead", *VARIANTS, *GROWING)
    parser.add_argument("--rules", default="plain,foresight", help=f"of {', '.join(known)} [plain,foresight]")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="10.7 or .8 million weights [full]")
    parser.add_argument("--delays", default="0,2,4,8,16")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--together", type=int, default=6, help="runs trained at once [6]")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 12 steps, one seed; nothing is written")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    flush_subnormals()
    if unknown := set(parsed.rules.split(",")) - set(known):
        parser.error(f"--rules: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    size = SIZES["quick" if parsed.quick else parsed.size]
    if parsed.quick:
        parsed.steps, parsed.seeds = 12, 1
    device = torch.device(parsed.device)
    text, cells = Text(parsed.text, device), list(cells_of(parsed))
    results = {} if parsed.quick else read_results(parsed.out)
    missing, began = [cell for cell in cells if cell not in results], time.monotonic()
    for start in range(0, len(missing), parsed.together):
        if time.monotonic() - began > 60.0 * parsed.minutes:
            break
        trainings = [Training(cell, size, text, device) for cell in missing[start : start + parsed.together]]
        since = time.monotonic()
        train_together(trainings)
        seconds = (time.monotonic() - since) / len(trainings)
        for training in trainings:
            cell, loss = training.cell, training.test_loss()
            results[cell] = loss
            print(f"{cell.optimizer} {cell.rule} delay {cell.delay} seed {cell.seed}: {loss:.4f}, {seconds:.1f} s")
        sys.stdout.flush()
        if not parsed.quick:
            write_results(parsed.out, results)
    print("\n".join(table(results, cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
