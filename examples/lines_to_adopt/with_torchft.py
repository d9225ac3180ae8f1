"""The plain program with torchft: a lighthouse, and one process of this program for each replica group."""

import os
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

GROUP, GROUPS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
torch.manual_seed(0)
x = torch.rand(2000, 2) * 4 - 2
data = TensorDataset(x, (x.norm(dim=1) < 1.5).long())
sampler = DistributedSampler(data, replica_group_id=GROUP, num_replica_groups=GROUPS, group_rank=0, num_replicas=1)
loader = DataLoader(data, batch_size=32, sampler=sampler)


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def state_dict():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"group{GROUP}",
)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
model = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=2e-3))

for _epoch in range(5):
    sampler.set_epoch(_epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

if GROUP == 0:
    torch.save(model.module.state_dict(), "model.pt")
