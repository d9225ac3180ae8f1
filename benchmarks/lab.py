"""Speed of the lab on a GPU, correctness of its kernels, and their shares of the GPU's time.

    python benchmarks/lab.py                     all parts, under a minute once the kernels are compiled
    python benchmarks/lab.py --only speed        LeNet5 and the CNN, few and many runs at once

Weights, images and arrival orders are random: speed does not depend on them. For the whole published table, use
`paceline reproduce optml --device cuda`, which prints its wall time and longest run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.assembly.core import make_model, make_rule
from paceline.config import RunConfig
from paceline.core.rules.plain import StatelessHooks
from paceline.interfaces import Arrival, Layout, pack
from paceline.settings.resolve import resolve
from paceline.simulation.lab.fused_gradients import FUSED
from paceline.simulation.lab.gradients import Autograd
from paceline.simulation.lab.inputs import BatchInputs, Images

BARS = {"lenet5": 60_000, "cnn": 12_000}
SPEEDS = [
    ("lenet5", 1, 1), ("lenet5", 16, 1), ("lenet5", 64, 1), ("lenet5", 8, 10),
    ("cnn", 1, 1), ("cnn", 16, 1), ("cnn", 32, 1), ("cnn", 8, 5), ("cnn", 4, 10),
]  # fmt: skip


class Side:
    """R runs of one model with `pushes` pushes per update, each with its own weights, rule and workers."""

    def __init__(self, model: str, runs: int, pushes: int, batch: int = 32, places: int = 10) -> None:
        device, updates, samples = torch.device("cuda"), 4, 2000
        torch.manual_seed(runs)
        places = 1 if pushes > 1 else places
        net = make_model(model, (1, 28, 28))
        self.layout: Layout = pack([(name, tuple(p.shape), True) for name, p in net.named_parameters()])
        first = torch.cat([torch.nn.functional.pad(p.flatten(), (0, -p.numel() % 16)) for p in net.parameters()])
        self.weights = first.detach().to(device).repeat(runs, 1)
        held = self.weights.repeat_interleave(places, 0)
        scale, shift = torch.tensor([1 / (255 * 0.353)]).to(device), torch.tensor([-0.81]).to(device)
        images = torch.randint(0, 256, (samples, 28, 28, 1), dtype=torch.uint8).to(device)
        self.data = Images(images, torch.randint(0, 10, (samples,)).to(device), scale, shift)
        half = [torch.randint(-(2**31), 2**31, (updates, runs, pushes)).to(device, torch.int32) for _ in range(4)]
        number = torch.randint(0, samples, (updates, runs, pushes * batch)).to(device, torch.int32)
        weight = torch.full(number.shape, 1.0 / (pushes * batch), device=device)
        self.worker = torch.randint(0, places, (updates, runs)).to(device)
        owner = self.worker + torch.arange(runs, device=device) * places
        at = torch.ones(1, dtype=torch.int64, device=device)
        self.inputs = BatchInputs(
            self.data, at, number, weight, [(half[0], half[1]), (half[2], half[3])], owner, held, batch
        )
        self.gradient, self.losses = torch.zeros_like(self.weights), torch.zeros(runs, device=device)
        config = resolve(RunConfig(model=model, strategy="async", workers=2, momentum=0.9, rule="plain"))
        self.rule = make_rule(config, self.layout)
        assert isinstance(self.rule, StatelessHooks)
        self.state = self.rule.start(self.weights)
        self.find = FUSED[model](self.inputs, self.layout, self.gradient, self.losses)

    def update(self) -> None:
        """Make one update: gradients, rule, new weights for workers."""
        self.find()
        at, lr = self.inputs.at, torch.full((len(self.weights), 1), 1e-4, device=self.weights.device)
        self.rule.apply(self.weights, self.state, self.gradient, Arrival(None, 0, lr, 1))
        self.inputs.held.index_copy_(0, self.inputs.owner.index_select(0, at)[0], self.weights)


def seconds_of(work: Callable[[], None], number: int = 20) -> float:
    """Return the seconds of one call, captured as a CUDA graph of several; the best of five."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(number):
            work()
    best = float("inf")
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / number)
    return best


def check() -> None:
    """Compare the gradients of our kernels with torch's, in full precision and in TF32."""
    print("gradients against torch in full precision, as a share of their norm")
    for model in FUSED:
        for pushes, batch in ((1, 32), (5, 32), (1, 20)):
            side = Side(model, 3, pushes, batch)
            wanted = torch.zeros_like(side.gradient)
            torch.set_float32_matmul_precision("highest")
            Autograd(model, side.inputs, side.layout, wanted, side.losses)()
            found = {}
            for precision in ("ieee", "tf32"):
                FUSED[model](side.inputs, side.layout, side.gradient, side.losses, precision)()
                found[f"ours {precision}"] = (side.gradient - wanted).norm() / wanted.norm()
            torch.set_float32_matmul_precision("high")
            torchs = torch.zeros_like(wanted)
            Autograd(model, side.inputs, side.layout, torchs, side.losses)()
            found["torch tf32"] = (torchs - wanted).norm() / wanted.norm()
            shown = ", ".join(f"{name} {value.item():.1e}" for name, value in found.items())
            print(f"  {model} {pushes} x {batch}: {shown}", flush=True)
            assert found["ours ieee"] < 1e-4, "the kernels are wrong"


def speed() -> None:
    print("\nmodel    runs  pushes   us an update   gradients/s   bar")
    for model, runs, pushes in SPEEDS:
        seconds = seconds_of(Side(model, runs, pushes).update)
        rate = runs * pushes / seconds
        print(f"{model:8} {runs:4} {pushes:7} {1e6 * seconds:14.1f} {rate:13,.0f} {BARS[model]:7,}", flush=True)


def where() -> None:
    """Print the kernels by their share of an update's time."""
    for model, runs, pushes in (("lenet5", 64, 1), ("cnn", 16, 1), ("cnn", 8, 5)):
        side = Side(model, runs, pushes)
        side.update()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(10):
                side.update()
            torch.cuda.synchronize()
        spent: Counter[str] = Counter()
        for event in recorded.events() or ():
            if event.device_time > 0:
                spent[_short(event.name)] += event.device_time / 10
        total = sum(spent.values())
        print(f"\nwhere the GPU's time goes: {model}, {runs} runs of {pushes} pushes, {total:.0f} us an update")
        for name, time in spent.most_common(9):
            print(f"  {100 * time / total:5.1f} %  {time:7.1f} us  {name}")


def _short(name: str) -> str:
    """Return a kernel's name without its template arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].rsplit("::", 1)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("check", "speed", "where"))
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, part in (("check", check), ("speed", speed), ("where", where)):
        if only in (None, name):
            part()


if __name__ == "__main__":
    main()
