import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.rand(64, 2), batch_size=8)
for x in loader:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
