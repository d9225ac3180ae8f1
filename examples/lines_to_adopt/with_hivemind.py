"""The plain program with hivemind: one process of this program for each peer, `PEERS` names one that runs."""

import os

import hivemind
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(2000, 2) * 4 - 2
data = TensorDataset(x, (x.norm(dim=1) < 1.5).long())
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
dht = hivemind.DHT(initial_peers=os.environ.get("PEERS", "").split(), start=True)
print([str(address) for address in dht.get_visible_maddrs()])
optimizer = hivemind.Optimizer(
    dht=dht,
    run_id="disc",
    optimizer=optimizer,
    batch_size_per_step=32,
    target_batch_size=128,
    use_local_updates=False,
)
optimizer.load_state_from_peers()

while optimizer.local_epoch < 5 * len(data) // 128:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

torch.save(model.state_dict(), "model.pt")
