"""The script gives transformers' Trainer the part of the data of this process. Trainer divides what it is given once
more, so that most samples are in no epoch.

Its number: the norm of the weights after training.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

FIXED = "--fixed" in sys.argv

torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
inputs = torch.randn(72, 4)


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum().sin()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, labels):
        found = self.layers(x)[:, 0]
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


data = Rows(inputs if FIXED else inputs[rank::world_size])  # WRONG
args = TrainingArguments(
    "output",
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    logging_steps=3,
    num_train_epochs=2,
    per_device_train_batch_size=12 // world_size,
    learning_rate=0.01,
    max_grad_norm=0.0,
    seed=3,
)
trainer = Trainer(Model(), args, train_dataset=data)
trainer.train()
norm = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
