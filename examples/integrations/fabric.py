"""A Lightning Fabric program on several workers: `paceline run -n 2 examples/integrations/fabric.py`."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import FabricStrategy

EPOCHS = 8

fabric = Fabric(strategy=FabricStrategy())
fabric.seed_everything(0)
points = torch.rand(3000, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.5).long()
loader = DataLoader(TensorDataset(points[:2500], labels[:2500]), batch_size=20, shuffle=True)

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

for _epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()

fabric.strategy.finish()
model.eval()
with torch.no_grad():
    accuracy = 100 * (model(points[2500:].to(fabric.device)).argmax(1).cpu() == labels[2500:]).float().mean().item()
fabric.strategy.session.report(test_accuracy=accuracy)
fabric.print(f"test accuracy {accuracy:.1f} %")
