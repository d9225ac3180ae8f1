"""Speed of decoding, augmenting and training on images, to see which of them a run waits for.

    python benchmarks/decoding.py [--data-dir DIR] [--models NAME ...] [--quick] [--json]

DIR is a folder of class folders, as for --dataset imagenet; without it, the script makes images of 500x375. A data set
is decoded once, before training; its batches are cropped and mirrored when they are drawn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.assembly.core import make_model
from paceline.data import decoding, image_folder
from paceline.data.datasets import DATASETS, DecodingOptions, Location, locate
from paceline.errors import PacelineError
from paceline.settings.preprocessing import WAYS
from paceline.system.strict_json import to_json
from paceline.tasks.augmentation import Augment
from paceline.tasks.supervised import Normalise, SupervisedTask

BATCH_SIZE = 32
SMALL = {"lenet5": (3, 32, 32), "inception-28-small": (3, 32, 32)}
LARGE_SHAPE = (3, 224, 224)


def draw_pictures(folder: Path, count: int) -> None:
    """Make images of smooth colours with some noise, about as large as photographs."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375))
        pixels = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (375, 500, 3))
        place = folder / f"class_{number % 2}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place, quality=92)


def decode_rates(location: Location, wanted: int) -> dict[str, float]:
    """Return decoded images per second: of one core's CPU time, and of all cores, process start included."""
    listing = image_folder.list_images(location.path)
    images = (listing.train * (1 + wanted // len(listing.train)))[:wanted]
    side = DecodingOptions().stored_size
    began = time.process_time()
    chunk, _ = decoding.decode_chunk([path for path, _ in images[: wanted // 4]], side)
    alone = len(chunk) / (time.process_time() - began)
    began = time.perf_counter()
    decoding.decode(images, side, np.empty, decoding.Skipped(), lambda done: None)
    return {"one_core": alone, "all_cores": len(images) / (time.perf_counter() - began)}


def median_ms(action: Callable[[int], Any], rounds: int) -> float:
    """Return CPU seconds of one thread, which other programs disturb least."""
    action(0)
    times = []
    for number in range(rounds):
        began = time.process_time()
        action(number)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def step_costs(model: str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of one core for a training step, and for augmenting and normalising its batch."""
    shape = SMALL.get(model, LARGE_SHAPE)
    padding, kept = (4, 32) if model in SMALL else (0, DecodingOptions().stored_size)
    pixels = torch.randint(0, 256, (BATCH_SIZE, 3, kept, kept), dtype=torch.uint8)
    labels = torch.arange(BATCH_SIZE) % 10
    info = DATASETS["cifar10"]
    normalise = Normalise(info.mean, info.std)
    augment = Augment(shape[1:], padding, "mirror" in WAYS)
    task = SupervisedTask(make_model(model, shape, 10), torch.nn.functional.nll_loss, (pixels, labels))
    weights, gradient = task.initial(), torch.zeros(task.layout.size)
    task.bind(weights, gradient, torch.zeros(task.state_size))

    def step(number: int) -> None:
        task.flat.clear()
        task.loss(task.model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    inputs = normalise(augment(pixels, 0))
    augmenting = median_ms(lambda number: augment(pixels, number), 5 * rounds)
    normalising = median_ms(lambda number: normalise(augment(pixels, 0)), 5 * rounds) - augmenting
    stepping = median_ms(step, rounds)
    return {
        "model": model,
        "step_ms": stepping,
        "augment_ms": augmenting,
        "normalise_ms": max(normalising, 0.0),
        "augment_percent": 100 * augmenting / stepping,
        "samples_per_second": 1e3 * BATCH_SIZE / stepping,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="a folder of class folders")
    parser.add_argument("--models", nargs="+", default=[*SMALL, "resnet18", "inception-bn"])
    parser.add_argument("--quick", action="store_true", help="short and rough: to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as drawn:
        try:
            if parsed.data_dir is None:
                draw_pictures(Path(drawn), 64)
            location = locate("imagenet", Path(parsed.data_dir or drawn))
            rates = decode_rates(location, 256 if parsed.quick else 1024)
        except PacelineError as error:
            print(f"decoding: {error}", file=sys.stderr)
            return 2
    print(f"decoded to {DecodingOptions().stored_size}x{DecodingOptions().stored_size}, images a second: ", end="")
    print(f"{rates['one_core']:,.0f} a core, {rates['all_cores']:,.0f} by all cores with their start")
    rows = [step_costs(model, 1 if parsed.quick else 5) for model in parsed.models]
    print(
        f"{'model, batch 32':<20}{'step ms':>9}{'samples/s':>11}{'augment ms':>12}{'of a step':>11}{'normalise ms':>14}"
    )
    for row in rows:
        figures = f"{row['step_ms']:>9.1f}{row['samples_per_second']:>11,.0f}{row['augment_ms']:>12.2f}"
        print(f"{row['model']:<20}{figures}{row['augment_percent']:>9.1f} %{row['normalise_ms']:>14.2f}")
    if parsed.json:
        print(to_json({"benchmark": "decoding", "decode": rates, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
