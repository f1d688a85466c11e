"""A teacher looks at each batch first, without a gradient; a part is computed anew in the backward pass; keywords."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=True))


dist.init_process_group(backend="gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(300, 4), torch.randint(2, (300,)))
sampler = DistributedSampler(dataset=data, shuffle=True)
loader = DataLoader(dataset=data, batch_size=16, sampler=sampler)
student = Student()
teacher = copy.deepcopy(student).requires_grad_(False)
model = DistributedDataParallel(module=student)
optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with torch.no_grad():
            wanted = teacher(x).softmax(dim=1)
        logits = model(x)
        loss = nn.functional.cross_entropy(input=logits, target=y)
        loss = loss + nn.functional.mse_loss(input=logits.softmax(dim=1), target=wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for average, value in zip(teacher.parameters(), student.parameters(), strict=True):
            average.lerp_(value.detach(), 0.1)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
        torch.save(obj=student.state_dict(), f="student.pt")
