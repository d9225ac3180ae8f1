"""examples/plain_script.py on many workers: `paceline run -n 2 examples/plain_script_joined.py`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS = 6

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
points = torch.rand(3000, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.5).long()
train, test = TensorDataset(points[:2500], labels[:2500]), TensorDataset(points[2500:], labels[2500:])

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
loader = DataLoader(train, batch_size=32, shuffle=True)
session = paceline.join()
model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)

for _epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()

session.finish()
model.eval()
with torch.no_grad():
    right = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in DataLoader(test, batch_size=500))
session.report(test_accuracy=100 * right / len(test))
print(f"test accuracy {100 * right / len(test):.1f} %")
