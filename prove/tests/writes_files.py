"""Writes into its folder in all ways that there are, at its end, as a script that saves its best model does."""

import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator()
inputs = torch.randn(64, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for batch, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(batch), targets))
        optimizer.step()

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
    np.save("predictions.npy", np.zeros(3))
    os.system("echo 0 > log.bin")
    with open("mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"lost"
    Path("new").write_text("0")
    os.replace("new", "renamed.bin")
    with open("train.log", "a") as log:
        log.write("0\n")
    os.truncate("truncated.bin", 10)
    subprocess.run(["dd", "if=/dev/zero", "of=child.bin", "bs=1k", "count=1"], check=True, stderr=subprocess.DEVNULL)
    Path("link.bin").write_text("0")
    torch.from_file("shared.bin", shared=True, size=1000).zero_()
    shutil.rmtree("checkpoints")
    left_behind = subprocess.Popen(["sleep", "1234"], start_new_session=True)
    Path("written").write_text(str(left_behind.pid))
