"""What one stale worker costs Adam, and what rule `ahead` gives back: ablation of its two constants.

    python benchmarks/stale_adam.py [--seeds N] [--workers 2] [--epochs 2] [--dataset NAME --data-dir DIR]

A variational autoencoder (784-400-20), Adam at lr .001, batch 128. Workers push in turn, in one process, so that each
push is WORKERS - 1 updates stale. The loss is that of the test images; "alone" is one worker, with as many updates.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.optimizers import Adam
from paceline.core.rules.foresight import Ahead
from paceline.core.rules.plain import Plain
from paceline.data.datasets import SAMPLE, load, locate
from paceline.interfaces import Arrival, Rule
from paceline.system.subnormals import flush_subnormals

BATCH, LR, LATENT, HIDDEN = 128, 0.001, 20, 400
CASES: dict[str, Callable[[int], Rule]] = {
    "plain": lambda workers: Plain(Adam()),
    "ahead": lambda workers: Ahead(Adam(), Adam(), workers),
    "ahead, without the push before": lambda workers: Ahead(Adam(), Adam(), workers, share=0.0),
    "ahead, a quarter of it": lambda workers: Ahead(Adam(), Adam(), workers, share=0.25),
    "ahead, nothing tried": lambda workers: Ahead(Adam(), Adam(), workers, horizon=0.0),
    "ahead, horizon 1": lambda workers: Ahead(Adam(), Adam(), workers, horizon=1.0),
    "ahead, horizon 1.5": lambda workers: Ahead(Adam(), Adam(), workers, horizon=1.5),
    "ahead, horizon 3": lambda workers: Ahead(Adam(), Adam(), workers, horizon=3.0),
}


class Autoencoder(nn.Module):
    """Encodes an image into the mean and log-variance of a code, and decodes a sample of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(784, HIDDEN), nn.Linear(LATENT, HIDDEN)
        self.mean, self.logvar, self.image = (
            nn.Linear(HIDDEN, LATENT),
            nn.Linear(HIDDEN, LATENT),
            nn.Linear(HIDDEN, 784),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The loss, summed over the images."""
        hidden = functional.relu(self.encode(images))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        logits = self.image(functional.relu(self.decode(code)))
        found = functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return found - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()


def train(make: Callable[[int], Rule], workers: int, images: Tensor, epochs: int, seed: int) -> Autoencoder:
    """Train one model under a rule: each worker computes its gradient on the weights that it was sent last."""
    torch.manual_seed(seed)
    model = Autoencoder()
    parameters = list(model.parameters())
    weights = nn.utils.parameters_to_vector(parameters).detach().clone()
    computing, gradient = weights.clone(), torch.zeros_like(weights)
    begin = 0
    for parameter in parameters:
        span = slice(begin, begin := begin + parameter.numel())
        parameter.data, parameter.grad = computing[span].view_as(parameter), gradient[span].view_as(parameter)
    rule = make(workers)
    state, sent = rule.start(weights), [weights.clone() for _ in range(workers)]
    lr, update = torch.tensor(LR), 0
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            worker = update % workers
            computing.copy_(sent[worker])
            gradient.zero_()
            model(images[rows]).backward()
            rule.apply(weights, state, gradient, Arrival(worker, min(update, workers - 1), lr, workers))
            rule.reply_weights(weights, state, worker, sent[worker])
            update += 1
    computing.copy_(weights)
    return model


def test_loss(model: Autoencoder, images: Tensor) -> float:
    """The mean loss per image, with the same random numbers every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return sum(model(part).item() for part in images.split(1000)) / len(images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to N [3]")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dataset", default=SAMPLE, help=f"grey images of 28 x 28 [{SAMPLE}]")
    parser.add_argument("--data-dir", type=Path)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    flush_subnormals()
    data = load(locate(parsed.dataset, parsed.data_dir))
    images, tests = (
        torch.as_tensor(part).reshape(-1, 784).float() / 255.0 for part in (data.train_images, data.test_images)
    )
    cases = {"alone": (CASES["plain"], 1), **{name: (make, parsed.workers) for name, make in CASES.items()}}
    alone = 0.0
    print(f"{'rule':<32} {'test loss':>9} {'std':>6}  of alone")
    for name, (make, workers) in cases.items():
        losses = [
            test_loss(train(make, workers, images, parsed.epochs, seed), tests) for seed in range(1, parsed.seeds + 1)
        ]
        mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        alone = alone or mean
        print(f"{name:<32} {mean:>9.2f} {spread:>6.2f} {100 * (mean / alone - 1):>+8.2f} %", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
