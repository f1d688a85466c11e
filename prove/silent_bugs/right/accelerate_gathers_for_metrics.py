"""gather_for_metrics() leaves out the samples that fill the last batch."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs, tested = torch.randn(96, 4), torch.randn(50, 4)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
tested = TensorDataset(tested, (tested.sum(1) > 0).long())
loader = DataLoader(data, batch_size=12 // accelerator.num_processes)
test_loader = DataLoader(tested, batch_size=12 // accelerator.num_processes)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    with torch.no_grad():
        right = count = 0
        for x, y in test_loader:
            predictions, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right, count = right + (predictions == labels).sum().item(), count + len(labels)
    accelerator.print(f"epoch {epoch}: accuracy {right / count:.6f}")


accelerator.end_training()
