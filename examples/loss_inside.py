"""The loss inside the replicas of nn.DataParallel, so that GPU 0 gathers two numbers per sample and not the logits.

    accelerate launch --config_file accelerate_configs/dp.yaml examples/loss_inside.py

With the loss outside, GPU 0 holds the logits of the whole batch, and their gradients: it runs out of memory first. The
numbers are the same on every config, where the class does no harm.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.data.images import load_images
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--dataset", default="ylecun/mnist")
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=256)
    add("--lr", type=float, default=1e-3)
    add = parser.add_argument_group("length and memory").add_argument
    add("--num_epochs", type=int, default=1)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=50)
    return parser.parse_args()


class WithLoss(nn.Module):
    """A model and its loss in one forward pass. Its state_dict is the model's, with "model." before each name."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        """The loss and whether the answer is right, (N,) each: the mean is the caller's, over parts of any size."""
        logits = self.model(images)
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels


class Scale(nn.Module):
    def forward(self, images):
        return images.to(torch.get_default_dtype()) / 255


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        losses, correct = model(*batch.data)
        metrics.add(batch, loss=losses, accuracy=correct)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, 500, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    classes = len(train_data.classes)
    model = WithLoss(nn.Sequential(Scale(), nn.Flatten(), nn.Linear(784, 128), nn.SiLU(), nn.Linear(128, classes)))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                losses, correct = model(*batch.data)
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=correct)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
