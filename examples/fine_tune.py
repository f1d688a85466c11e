"""Fine-tune a small CNN on MNIST: own weights, a new head, a body that is frozen at first and learns more slowly.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/fine_tune.py
    accelerate launch --config_file accelerate_configs/ddp.yaml examples/fine_tune.py --weights FILE

The page is guides/fine_tune.md.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import flags, launch
from utils.data.images import MNIST, load_images
from utils.loader import GlobalLoader
from utils.pretrained import load_pretrained
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", default=MNIST, help="a folder of images or a Hub id")
    add("--weights", help="a .safetensors file to start from; its head is left out if it has other classes")
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=flags.positive_int, default=100, help="samples per optimizer step, over all processes")
    add("--lr", type=flags.non_negative_float, default=2e-3, help="peak learning rate of the head")
    add("--body_lr", type=flags.non_negative_float, default=2e-4, help="peak learning rate of the body")
    add("--frozen_epochs", type=int, default=1, help="epochs in which only the head learns")
    add("--num_epochs", type=flags.positive_int, default=3)
    add = parser.add_argument_group("memory", may_change=True).add_argument
    add("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=10)
    return parser.parse_args()


class CNN(nn.Module):
    """Images (N, C, 28, 28), uint8, to logits (N, classes)."""

    def __init__(self, channels, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2), nn.SiLU(), nn.Conv2d(16, 32, 5, stride=2), nn.SiLU(), nn.Flatten()
        )
        self.head = nn.Linear(32 * 4 * 4, classes)

    def forward(self, images):
        return self.head(self.body(images.to(self.head.weight.dtype) / 255))


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
    # While the body is frozen, DDP must not wait for its gradients.
    accelerator = launch.make_accelerator(args, cpu_threads=1, find_unused_parameters=True)
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, 500, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    model = CNN(train_data.images.shape[1], len(train_data.classes))
    if args.weights:
        load_pretrained(model, args.weights, head="head")
    body, head = list(model.body.parameters()), list(model.head.parameters())
    optimizer = torch.optim.AdamW([{"params": body, "lr": args.body_lr}, {"params": head, "lr": args.lr}])
    rates = [args.body_lr, args.lr]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps, cycle_momentum=False)
    # Everything requires gradients here: DDP averages the gradients of no other parameters, ever.
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)

    for epoch in run.epochs():
        for parameter in body:  # depends on the epoch alone, so a resumed run does the same
            parameter.requires_grad_(epoch >= args.frozen_epochs)
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
