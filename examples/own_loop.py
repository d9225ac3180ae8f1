"""Your own training loop on several workers: `paceline run -n 2 --lr 0.05 examples/own_loop.py`.

`python examples/own_loop.py` trains in one process, without workers.
"""

import torch
from torch import nn

import paceline

torch.manual_seed(0)
angles = torch.rand(6000) * 2 * torch.pi
inputs = torch.stack([angles.cos(), angles.sin()], dim=1)
targets = (angles > torch.pi).long()
model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

with paceline.join() as session:
    model, batches = session.prepare(model, (inputs[:5000], targets[:5000]), batch_size=32)
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        session.step(loss)
    session.finish()  # the model now holds the weights that are saved
    accuracy = (model(inputs[5000:]).argmax(1) == targets[5000:]).float().mean().item()
    if session.worker == 0:
        session.report(test_accuracy=100 * accuracy)
        print(f"worker 0 of {session.num_workers}: test accuracy {100 * accuracy:.1f} %")
