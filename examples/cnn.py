"""Your own CNN on your own torch Dataset, with a random crop, a flip and noise, read by two workers.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/cnn.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=48)
    add("--lr", type=float, default=0.05)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=2)
    add("--num_workers", type=int, default=2)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


class Stripes(Dataset):
    """Grey images of 20 x 20 pixels with horizontal, vertical or diagonal stripes."""

    def __init__(self, length, augment):
        self.length = length
        self.augment = augment

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 3
        y, x = np.mgrid[:24, :24]
        phase = (y, x, x + y)[label] + index // 3
        image = np.sin(phase * (0.6 + 0.01 * (index % 7)))
        top, left = (2, 2)
        if self.augment:
            top, left = torch.randint(0, 5, (2,)).tolist()
            if random.random() < 0.5:
                image = image[::-1]
            image = image + 0.3 * np.random.randn(24, 24)
        crop = image[top : top + 20, left : left + 20]
        return torch.tensor(crop.copy(), dtype=torch.get_default_dtype())[None], label


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        images, labels = batch.data
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        metrics.add(batch, loss=losses, accuracy=logits.argmax(1) == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(
        Stripes(250, augment=True), args.batch_size, accelerator, seed=args.seed, num_workers=args.num_workers
    )
    test_loader = GlobalLoader(Stripes(101, augment=False), 50, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run.start(
        train_loader,
        test_loader,
        total_steps,
        checkpoint={"model": model, "optimizer": optimizer, "scheduler": scheduler},
    )

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            images, labels = batch.data
            with accelerator.accumulate(model):
                logits = model(images)
                losses = F.cross_entropy(logits, labels, reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=logits.argmax(1) == labels)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
