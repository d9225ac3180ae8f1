"""Plain PyTorch training loops, the peer of most benchmarks: each in its own process, timed together.

`python loops.py MODEL THREADS SECONDS` runs one loop: it warms up, prints `ready`, waits for a line, prints its times.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from processes import DROPPED_STEPS, LEAST_STEPS, Step, common_rate, ended
from torch import Tensor, nn

BATCH_SIZE, LR, MOMENTUM = 32, 0.005, 0.9
PATIENCE_SECONDS = 120.0


class LeNet5(nn.Module):
    """The same layers as paceline's lenet5, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return F.log_softmax(self.fc3(x), dim=1)


class Cnn(nn.Module):
    """The same layers as paceline's cnn, with torch's own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(F.relu(self.conv1(images))), 2)
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


MODELS: dict[str, type[nn.Module]] = {"lenet5": LeNet5, "cnn": Cnn}


class Shuffled:
    """The train set in memory, normalised and shuffled once; batches are consecutive slices of it."""

    def __init__(self) -> None:
        from paceline.data.datasets import load, locate

        data = load(locate("fashion-mnist-sample", None))
        images = torch.from_numpy(data.train_images).float().div_(255.0)
        order = torch.randperm(len(images))
        self._images = ((images - data.info.mean[0]) / data.info.std[0])[order].contiguous()
        self._labels = torch.from_numpy(data.train_labels)[order].contiguous()
        self._number = len(images) // BATCH_SIZE

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch `number` without a copy."""
        start = number % self._number * BATCH_SIZE
        return self._images[start : start + BATCH_SIZE], self._labels[start : start + BATCH_SIZE]


Body = Callable[[Tensor, Tensor], None]
"""One step on a batch of images and labels."""


def plain_step(model: nn.Module) -> Body:
    """Return the body of a plain training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def times_of_steps(step: Body, data: Shuffled, seconds: float, num_steps: int | None = None) -> list[float]:
    """Return the time of each step, for `seconds`, or for `num_steps` if all processes must make the same number."""
    times: list[float] = []
    deadline = time.monotonic() + (seconds if num_steps is None else 0.0)
    while len(times) < (num_steps or LEAST_STEPS) or time.monotonic() < deadline:
        step(*data.batch(len(times)))
        times.append(time.monotonic())
    return times


def answer_with_steps(step: Body, seconds: float, num_steps: int | None = None) -> None:
    """Run in the child: warm up, print `ready`, wait for a line, then print the time of each step."""
    data = Shuffled()
    for number in range(DROPPED_STEPS):
        step(*data.batch(number))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([times_of_steps(step, data, seconds, num_steps)], allow_nan=False), flush=True)


def timed_together(commands: Sequence[Sequence[str]], silent: int = 0) -> float:
    """Return the samples per second of all processes together; the first `silent` ones serve and print nothing."""
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    with ended(processes, within=PATIENCE_SECONDS):
        for process in processes[silent:]:
            assert process.stdout is not None
            if process.stdout.readline().strip() != b"ready":
                raise RuntimeError(f"a peer ended with exit code {process.wait(PATIENCE_SECONDS)} before it was ready")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        loops: list[list[Step]] = []
        for process in processes[silent:]:
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
            loops.extend([(moment, BATCH_SIZE) for moment in times] for times in json.loads(out.splitlines()[0]))
    return common_rate(dict(enumerate(loops)))


def rate(model: str, loops: int, threads: int, seconds: float) -> float:
    """Return the samples per second of `loops` loops running at the same time."""
    command = [sys.executable, str(Path(__file__).resolve()), model, str(threads), str(seconds)]
    return timed_together([command] * loops)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    answer_with_steps(plain_step(MODELS[sys.argv[1]]()), float(sys.argv[3]))
