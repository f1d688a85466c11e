"""mnist_mlp.py with more flags: float64, ReLU, SGD, torch.compile, a moving average, data workers, and dropout with
noise from `batch.rand`."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.mnist_mlp import MEAN, STD
from utils import launch
from utils.data.images import load_images
from utils.flags import ArgumentParser, fraction, non_negative_float, positive_int
from utils.loader import GlobalLoader
from utils.run import Run

TEST_BATCH_SIZE = 2000
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="ylecun/mnist")
    add("--num_workers", type=int, default=0)
    add = parser.add_argument_group("model and training").add_argument
    add("--hidden", type=positive_int, default=192)
    add("--activation", choices=ACTIVATIONS, default="silu")
    add("--dropout", type=fraction, default=0.0)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--batch_size", type=positive_int, default=256)
    add("--ema", action="store_true")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--lr", type=non_negative_float, default=6e-3)
    add("--weight_decay", type=non_negative_float, default=0.1)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=positive_int, default=4)
    add("--compile", action="store_true")
    add("--max_steps", type=positive_int, default=None)
    add("--gradient_accumulation_steps", type=positive_int, default=1)
    parser.add_run_flags(log_every=100)
    return parser.parse_args()


class MLP(nn.Module):
    def __init__(self, num_inputs, hidden, num_classes, activation="silu", dropout=0.0):
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, num_classes)
        self.dropout = dropout

    def forward(self, images, dropout_noise=None):
        """Logits (N, num_classes) of images, uint8 (N, C, H, W); dropout_noise: uniform in [0, 1), (N, hidden)."""
        x = ((images.flatten(1) - MEAN) / STD).to(self.fc1.weight.dtype)
        x = self.activation(self.fc1(x))
        if dropout_noise is not None:
            x = x * (dropout_noise >= self.dropout) / (1 - self.dropout)
        return self.fc2(x)


def losses_and_hits(model, images, labels, dropout_noise=None):
    logits = model(images, dropout_noise)
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        losses, hits = losses_and_hits(model, *batch.data)
        metrics.add(batch, loss=losses, accuracy=hits)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    items = list(train_data) if args.num_workers else train_data
    train_loader = GlobalLoader(items, args.batch_size, accelerator, seed=args.seed, num_workers=args.num_workers)
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)

    num_inputs, num_classes = train_data.tensors[0][0].numel(), len(train_data.classes)
    model = MLP(num_inputs, args.hidden, num_classes, args.activation, args.dropout)
    model = model.to(getattr(torch, args.dtype))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if args.ema else None
    if args.compile:
        model = torch.compile(model, backend="eager")
    fused = args.optimizer == "adamw"  # torch 2.15 has no fused SGD for sharded parameters
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr, weight_decay=args.weight_decay, fused=fused)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint |= {"average": average} if average else {}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            dropout_noise = batch.rand(args.hidden) if args.dropout else None
            with accelerator.accumulate(model):
                losses, hits = losses_and_hits(model, *batch.data, dropout_noise)
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if average and accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model, keep_torch_compile=False))
            run.log_train(batch, loss=losses, accuracy=hits)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
