"""ResNet-20 in the lab on a GPU: right gradients, time of an update, and whether a paused run goes on bit for bit.

    python benchmarks/lab_resnet20.py                  all parts, about two minutes
    python benchmarks/lab_resnet20.py --only speed     us per update, and seconds of a run of 160 epochs
    python benchmarks/lab_resnet20.py --only tiles     other tiles of the convolutions

Images are random: speed does not depend on them. Each part begins with its name and the seconds since the start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lab import _short, seconds_of
from torch.profiler import ProfilerActivity, profile

from paceline.assembly.core import make_model
from paceline.config import RunConfig
from paceline.data.datasets import DATASETS, Dataset, Location
from paceline.interfaces import Layout, pack
from paceline.settings.resolve import resolve
from paceline.simulation.lab import run as lab
from paceline.simulation.lab.gradients import Autograd
from paceline.simulation.lab.inputs import BatchInputs, Images
from paceline.simulation.lab.nets import fused_resnet20
from paceline.simulation.lab.nets.fused_resnet20 import BlockTile, FusedResNet20
from paceline.simulation.lab.run import LabTimes, Pause, run_rows

UPDATES_OF_A_RUN = 62_560  # 160 epochs of 391 batches
RUNS = (1, 4, 12, 32)
DEVICE = torch.device("cuda")


def some_inputs(runs: int, pushes: int, batch: int, num_samples: int = 50_000) -> tuple[BatchInputs, Layout]:
    """Random images, arrivals and keys of runs with four workers each; some batches are not full."""
    torch.manual_seed(0)
    updates, samples, places, side = 4, pushes * batch, 4, (3, 32, 32)
    net = make_model("resnet20", side)
    layout = pack([(name, tuple(p.shape), True) for name, p in net.named_parameters()])
    first = torch.cat([torch.nn.functional.pad(p.detach().flatten(), (0, -p.numel() % 16)) for p in net.parameters()])
    held = first.to(DEVICE).repeat(runs * places, 1)
    images = torch.randint(0, 256, (num_samples, 32, 32, 3), dtype=torch.uint8, device=DEVICE)
    colours = torch.full((3,), 1 / 63, device=DEVICE), torch.full((3,), -1.9, device=DEVICE)
    data = Images(images, torch.randint(0, 10, (num_samples,), device=DEVICE), *colours)
    halves = torch.randint(-(2**31), 2**31, (2, updates, runs, pushes), device=DEVICE).to(torch.int32)
    weights = torch.rand(updates, runs, samples, device=DEVICE) + 0.1
    weights[:, 0, batch - 2 : batch] = 0.0
    owner = torch.randint(0, places, (updates, runs), device=DEVICE) + torch.arange(runs, device=DEVICE) * places
    number = torch.randint(0, num_samples, (updates, runs, samples), dtype=torch.int32, device=DEVICE)
    at = torch.ones(1, dtype=torch.int64, device=DEVICE)
    keys = halves[0], halves[1]
    held = held + 0.01 * torch.randn_like(held)
    weights = weights / weights.sum(-1, keepdim=True)
    return BatchInputs(data, at, number, weights, [], owner, held, batch, ("crop", "mirror"), keys), layout


def fused(inputs: BatchInputs, layout: Layout, precision: str) -> tuple[FusedResNet20, torch.Tensor, torch.Tensor]:
    runs = inputs.samples.shape[1]
    gradient, losses = torch.zeros(runs, layout.size, device=DEVICE), torch.zeros(runs, device=DEVICE)
    return FusedResNet20(inputs, layout, gradient, losses, precision), gradient, losses


def check() -> None:
    """Compare the kernels' gradients with torch's in full precision; IEEE products take minutes to compile."""
    for runs, pushes, batch in ((3, 1, 128), (2, 4, 64)):
        inputs, layout = some_inputs(runs, pushes, batch)
        wanted, losses = torch.zeros(runs, layout.size, device=DEVICE), torch.zeros(runs, device=DEVICE)
        torch.set_float32_matmul_precision("highest")
        Autograd("resnet20", inputs, layout, wanted, losses)()
        for precision in ("tf32x3", "tf32", "bf16"):
            began = time.perf_counter()
            find, found, ours = fused(inputs, layout, precision)
            find()
            first = found.clone()
            find()
            apart, loss = (found - wanted).norm() / wanted.norm(), (ours - losses).abs().max()
            again = "the same again" if torch.equal(first, found) else "NOT THE SAME AGAIN"
            seconds = time.perf_counter() - began
            shown = f"gradient {apart:.1e}, loss {loss:.1e}, {again}, {seconds:.0f} s"
            print(f"  {runs} runs, {pushes} x {batch}, {precision:6}: {shown}", flush=True)
            assert precision != "tf32x3" or apart < 1e-2, "the kernels are wrong"
        torch.set_float32_matmul_precision("high")
        torchs = torch.zeros_like(wanted)
        Autograd("resnet20", inputs, layout, torchs, losses)()
        print(f"  torch with TF32: {(torchs - wanted).norm() / wanted.norm():.1e}", flush=True)


def speed() -> None:
    print("  precision  runs  us an update  us a run  seconds of a run's 160 epochs")
    for precision in ("bf16", "tf32"):
        for runs in RUNS:
            find, *_ = fused(*some_inputs(runs, 1, 128), precision)
            each = 1e6 * seconds_of(find, 5)
            length = each / runs * UPDATES_OF_A_RUN / 1e6
            print(f"  {precision:9} {runs:5} {each:13.0f} {each / runs:9.1f} {length:10.1f}", flush=True)
            del find
    rounds, *_ = fused(*some_inputs(2, 16, 128), "bf16")
    print(f"  2 runs in rounds of 16 pushes: {1e6 * seconds_of(rounds, 3) / 32:.1f} us a push", flush=True)


def where() -> None:
    """Print the kernels by their share of an update of 12 runs."""
    find, *_ = fused(*some_inputs(12, 1, 128), "bf16")
    find()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            find()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in recorded.events() or ():
        if event.device_time > 0:
            spent[_short(event.name)] = spent.get(_short(event.name), 0.0) + event.device_time / 3
    for name, time_of in sorted(spent.items(), key=lambda pair: -pair[1])[:12]:
        print(f"  {100 * time_of / sum(spent.values()):5.1f} %  {time_of:8.1f} us  {name}")


SHAPES = ((64, 4), (128, 4), (128, 8), (256, 8), (256, 4), (128, 4, 2), (128, 4, 4))
"""Positions, warps and perhaps stages."""


def tiles() -> None:
    """Time an update of 12 runs with other tiles, one table at a time."""
    inputs, layout = some_inputs(12, 1, 128)
    for name in ("FORWARD", "TO_INPUTS", "TO_WEIGHTS"):
        table: dict[int, BlockTile] = getattr(fused_resnet20, name)
        for width in (16, 32, 64):
            usual, found = table[width], []
            for tile in (BlockTile(*shape) for shape in SHAPES):
                table[width] = tile
                try:
                    find, *_ = fused(inputs, layout, "bf16")
                    found.append((1e6 * seconds_of(find, 3), tile))
                except Exception as error:  # a tile may need more memory than a multiprocessor has
                    print(f"  {name} {width} {tuple(tile)}: {str(error).splitlines()[0][:80]}")
            table[width] = usual
            best = ", ".join(f"{tuple(tile)} {each:.0f}" for each, tile in sorted(found)[:4])
            print(f"  {name} {width}, now {tuple(usual)}: {best}", flush=True)


def random_data(num_train: int = 12_800) -> Dataset:
    generator = np.random.default_rng(0)
    info = replace(DATASETS["cifar10"], train_size=num_train, test_size=500)
    sides = [generator.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8) for size in (num_train, 500)]
    labels = [generator.integers(0, 10, size) for size in (num_train, 500)]
    return Dataset(
        info, Location("cifar10", "cifar", Path(), "random", False), sides[0], labels[0], sides[1], labels[1]
    )


def whole() -> None:
    """Train whole runs with the rules, at once and in two calls, and compare their bits."""
    usual = RunConfig(
        dataset="cifar10", model="resnet20", strategy="async", workers=16, lr=0.05, weight_decay=1e-4, batch_size=128,
        steps=400, speeds="gamma:1s,.1,.1", split="full", train_score="none",
    )  # fmt: skip
    kinds = {"auto": {"rule": "auto"}, "dana": {"rule": "dana"}, "plain": {"rule": "plain", "nesterov": True}}
    configs = [
        resolve(replace(usual, **settings, seed=seed, name=f"{name}-{seed}"))  # type: ignore[arg-type]
        for name, settings in kinds.items()
        for seed in range(4)
    ]
    data, spent = random_data(), LabTimes()
    began = time.perf_counter()
    once = {one.config.name: one.weights for one in run_rows(configs, data, DEVICE, _silent, spent, ())}
    print(f"  {spent.line()}; {time.perf_counter() - began:.1f} s in all", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        at = time.perf_counter() + spent.tracing + 0.5 * spent.training
        early = list(run_rows(configs, data, DEVICE, _silent, None, (), Pause(Path(folder), at)))
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        left = [config for config in configs if config.name not in {one.config.name for one in early}]
        late = list(run_rows(left, data, DEVICE, _silent, None, (), Pause(Path(folder)))) if left else []
    same = sum(torch.equal(one.weights, once[one.config.name]) for one in late)
    print(
        f"  paused with {size:.0f} MB of state of {len(left)} runs; {same} of {len(late)} that went on have equal bits"
    )


def _silent(text: str, share: float) -> None:
    pass


PARTS: dict[str, Callable[[], None]] = {"check": check, "speed": speed, "where": where, "whole": whole, "tiles": tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS))
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    began = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, chunks of {lab.CHUNK} updates")
    for name, part in PARTS.items():
        if only in (None, name):
            print(f"{name} ({time.perf_counter() - began:.0f} s)", flush=True)
            part()


if __name__ == "__main__":
    main()
