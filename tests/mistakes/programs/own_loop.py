"""A loop whose mistake is the word behind its name."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

mistake = sys.argv[1] if len(sys.argv) > 1 else "none"
if mistake == "before-join":
    raise RuntimeError("no such data")

import paceline  # noqa: E402

session = paceline.join()
data = TensorDataset(torch.rand(1024, 2), torch.arange(1024) % 2)
model = torch.nn.Linear(2, 2, bias=mistake != "other-model" or session.worker == 0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e20 if mistake == "long-steps" else 0.1)
if mistake == "other-optimizer" and session.worker == 1:
    optimizer = torch.optim.Adam(model.parameters())
if mistake == "no-loader":
    model, optimizer = session.prepare(model, optimizer)
    loader = DataLoader(data, batch_size=8, shuffle=True)
elif mistake != "no-prepare":
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=8))
else:
    loader = DataLoader(data, batch_size=8)
if mistake == "raises-early" and session.worker == 1:
    raise ValueError("no such transform")
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    outputs = model(x * float("nan") if mistake == "nan-inputs" else x)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    if mistake == "long-steps":
        loss = loss + outputs.square().mean()
    if mistake != "no-backward":
        loss.backward()
    optimizer.step()
    if mistake == "clamps":
        with torch.no_grad():
            model.weight.clamp_(-0.01, 0.01)
    if step < 4:
        continue
    if mistake == "all-raise" or (mistake == "one-raises" and session.worker == 1):
        raise ValueError("this sample is broken")
    if mistake == "one-exits" and session.worker == 1:
        sys.exit(3)
    if mistake == "one-ends" and session.worker == 1:
        sys.exit(0)
    if mistake == "one-breaks" and session.worker == 1:
        break
if mistake != "no-finish":
    session.finish()
if mistake == "steps-after":
    optimizer.step()
