"""The plain program with Lightning Fabric: `python examples/lines_to_adopt/with_fabric.py`."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
x = torch.rand(2000, 2) * 4 - 2
data = TensorDataset(x, (x.norm(dim=1) < 1.5).long())
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

for _epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()

if fabric.is_global_zero:
    torch.save(model.state_dict(), "model.pt")
