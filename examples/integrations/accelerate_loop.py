"""An Accelerate program on several workers: `paceline run -n 2 examples/integrations/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS, ACCUMULATED = 12, 2

torch.manual_seed(0)
points = torch.rand(3000, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.5).long()
loader = DataLoader(TensorDataset(points[:2500], labels[:2500]), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
session = paceline.join()
model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)

for _epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

session.finish()
model.eval()
with torch.no_grad():
    scores = model(points[2500:].to(accelerator.device)).argmax(1).cpu()
accuracy = 100 * (scores == labels[2500:]).float().mean().item()
session.report(test_accuracy=accuracy)
accelerator.print(f"test accuracy {accuracy:.1f} %")
