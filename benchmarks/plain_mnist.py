"""The training of scripts/mnist_mlp.py in a script that does nothing else; benchmarks/start.py runs it.

python benchmarks/plain_mnist.py data/mnist
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from torch import nn
from torch.nn import functional as F

FOLDER, HEADER = Path(sys.argv[1]), len(b"P5\n28 28\n255\n")
EPOCHS, BATCH, LR = 4, 256, 6e-3


def load(split):
    table = pyarrow.parquet.read_table(FOLDER / f"{split}-00000-of-00001.parquet")
    files = table.column("image").combine_chunks().field("bytes").to_pylist()
    pixels = np.frombuffer(b"".join(file[HEADER:] for file in files), np.uint8).reshape(len(files), 784)
    return (torch.tensor(pixels).float() - 33.3184) / 78.5675, torch.tensor(table.column("label").to_numpy())


torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = load("train")
test_images, test_labels = load("test")
model = nn.Sequential(nn.Linear(784, 192), nn.SiLU(), nn.Linear(192, 10))
optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.1, fused=True)
steps = EPOCHS * -(-len(images) // BATCH)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, cycle_momentum=False)
for epoch in range(EPOCHS):
    for batch in torch.randperm(len(images)).split(BATCH):
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}")
