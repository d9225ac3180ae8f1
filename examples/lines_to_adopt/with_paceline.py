"""The plain program on several workers: `paceline run -n 4 examples/lines_to_adopt/with_paceline.py`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
x = torch.rand(2000, 2) * 4 - 2
data = TensorDataset(x, (x.norm(dim=1) < 1.5).long())
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
session = paceline.join()
model, optimizer, loader = session.prepare(model, optimizer, loader)

for _epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

session.finish()
if session.is_main:
    torch.save(model.state_dict(), "model.pt")
