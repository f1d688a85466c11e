"""MNIST with Accelerate alone: nothing of utils/, in one file.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml examples/plain_accelerate.py

Proven by `python prove examples/plain_accelerate.py`. What scripts/mnist_mlp.py promises, and this does not:

- it resumes, bit for bit, also after kill -9; this starts again, and a new run replaces the model of the last one
- every image trains in each epoch; this drops the last, smaller batch, which Accelerate would fill with repeated images
- any batch size on any number of processes; 256 must be divisible by them, here and in gradient accumulation
- the same bits on any number of processes (--virtual_processes); this has the same numbers up to rounding
- an error if fewer processes start than the config asks for, or no GPU is there; this trains on what it finds
- cpu_fsdp.yaml shards; with plain Accelerate only GPUs do, and on CPUs this trains with DDP and does not say so
- a log, curves, signals, the best model, and processes that do not wait for ever when one is lost
"""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from datasets import load_dataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import pil_to_tensor

MNIST = Path(__file__).resolve().parents[1] / "data" / "mnist"
EPOCHS, BATCH_SIZE, LR = 4, 256, 6e-3


def load(split):
    data = load_dataset("parquet", data_files=str(MNIST / f"{split}-*.parquet"), split="train")[:]
    images = torch.stack([pil_to_tensor(image) for image in data["image"]])
    return TensorDataset((images - 33.3184) / 78.5675, torch.tensor(data["label"]))


def main():
    # split_batches: BATCH_SIZE is that of all processes, and a step of the schedule is a step of the optimizer.
    # use_seedable_sampler: the order of the images depends on the seed and the epoch, on any number of processes.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=loading)
    set_seed(0)
    train_loader = DataLoader(load("train"), BATCH_SIZE, shuffle=True, drop_last=True)
    test_loader = DataLoader(load("test"), 2000)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 192), nn.SiLU(), nn.Linear(192, 10))
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.1)
    total_steps = EPOCHS * len(train_loader)  # before `prepare`, after which a loader may have another length
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps, cycle_momentum=False)
    prepared = accelerator.prepare(model, optimizer, scheduler, train_loader, test_loader)
    model, optimizer, scheduler, train_loader, test_loader = prepared
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:  # in a new order in each epoch
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():  # gather_for_metrics leaves out the images that fill the last batch
            tested = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in test_loader]
        correct = torch.cat([predicted == labels for predicted, labels in tested])
        accelerator.print(f"epoch {epoch + 1}: test accuracy {correct.double().mean():.2%} of {len(correct)} images")
    accelerator.save_model(model, "runs/plain_accelerate")
    accelerator.end_training()


if __name__ == "__main__":
    main()
