"""Your own model with Paceline's training loop: `python examples/own_model.py`.

Any torch module with a mean loss over tensors works; workers import `build` by name.
"""

import torch
from torch import nn

import paceline


def build() -> paceline.Task:
    """Return a task: a small network classifies two noisy spirals; every worker makes the same data."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(4000) % 2
    radius = torch.rand(4000, generator=generator) * 3 + 0.3
    angle = radius * 2 + labels * torch.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    points += 0.1 * torch.randn(points.shape, generator=generator)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    train, test = (points[:3200], labels[:3200]), (points[3200:], labels[3200:])
    return paceline.Task(model, nn.functional.cross_entropy, train=train, test=test)


if __name__ == "__main__":
    result = paceline.train(build, strategy="async", workers=2, epochs=30, lr=0.05, momentum=0.5)
    print(f"test accuracy {result['test_accuracy']:.2f} % in {result['train_seconds']:.1f} s: {result['folder']}")
