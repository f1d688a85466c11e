"""Exact gradient accumulation: the optimizer step of a large batch in little memory. A CNN on MNIST.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/gradient_accumulation.py \
        --batch_size 512 --gradient_accumulation_steps 4
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/gradient_accumulation.py \
        --batch_size 16384 --gradient_accumulation_steps 8

The model is a small CNN, not the MLP of mnist_mlp.py, because accumulation saves memory for activations, and most of an
MLP's memory is taken by its weights.

Measured on 2 CPU cores, torch 2.14, accelerate 1.15, by benchmarks/gradient_accumulation.py: the gradients of
4 micro-batches on 2 processes equal those of the whole batch to 3e-16 in float64 and 2e-7 in float32; with a batch of
16384 samples, the peak memory of a process is 1.4 GiB with 8 micro-batches and 2.8 GiB with one.
Sources: samples of different lengths, https://huggingface.co/blog/gradient_accumulation; how no_sync skips
communication, S. Li et al., https://arxiv.org/abs/2006.15704.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.data.images import load_images
from utils.flags import ArgumentParser, non_negative_float, positive_int
from utils.loader import GlobalLoader
from utils.run import Run

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
NORMS = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


def parse_args():
    parser = ArgumentParser(__doc__)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of parquet files or of images")

    model = parser.add_argument_group("model and training")
    model.add_argument("--variable_length", action="store_true", help="one loss per cell with ink, 9 to 30 per image")
    model.add_argument("--norm", choices=NORMS, default="none", help="with batch, accumulation is not exact")
    model.add_argument("--batch_size", type=positive_int, default=512, help="samples per step, over all processes")
    model.add_argument("--lr", type=non_negative_float, default=2e-2, help="peak learning rate of one cycle")
    model.add_argument("--weight_decay", type=non_negative_float, default=0.1, help="weight decay of AdamW")
    model.add_argument("--max_grad_norm", type=non_negative_float, default=1.0, help="clip the gradient norm; 0: off")

    length = parser.add_argument_group("length and memory", may_change=True)  # when resuming
    length.add_argument("--num_epochs", type=positive_int, default=3, help="passes over the training images")
    length.add_argument("--max_steps", type=positive_int, default=None, help="optimizer steps, instead of --num_epochs")
    length.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step")

    parser.add_run_flags(log_every=20)
    args = parser.parse_args()
    if args.virtual_processes and args.norm == "batch":
        parser.error("--virtual_processes needs statistics that are the same on all processes: omit --norm batch")
    return args


class CellNet(nn.Module):
    """A small CNN: it classifies the 16 x 16 pixels around each cell of 4 x 4 pixels, and sums the cells' logits.

    It uses matrix products (unfold, then Linear) instead of nn.Conv2d: cuDNN computes convolutions in TF32 by default,
    and with oneDNN's order of additions, the float32 gradient of a large batch is off by 1e-5.
    """

    def __init__(self, num_channels: int, num_classes: int, norm: str = "none", variable_length: bool = False):
        super().__init__()
        self.fc1 = nn.Linear(num_channels * 16 * 16, 64)
        self.norm1 = NORMS[norm](64)
        self.fc2 = nn.Linear(64, 64)
        self.norm2 = NORMS[norm](64)
        self.head = nn.Linear(64, num_classes)
        self.variable_length = variable_length

    def forward(self, images):
        """Logits (N, classes) of uint8 images (N, C, H, W).

        With variable_length, logits for each cell (N, cells, classes), like a language model's logits for each token.
        """
        x = images.to(self.head.weight.dtype).sub_(MEAN).mul_(1 / STD)
        x = F.unfold(x, 16, padding=6, stride=4).transpose(1, 2)
        num_cells = x.shape[1]
        x = F.silu(self.norm1(self.fc1(x.flatten(0, 1))))  # with relu, runs on different process counts diverge sooner
        x = F.silu(self.norm2(self.fc2(x)))
        logits = self.head(x).unflatten(0, (len(images), num_cells))
        if self.variable_length:
            return logits
        return logits.sum(1) / num_cells**0.5


def ink_cells(images):
    """Which cells of 4 x 4 pixels have ink, bool (N, cells), in uint8 images (N, C, H, W)."""
    brightest = images.amax(1, keepdim=True).float()
    return F.max_pool2d(brightest, 4).flatten(1) > 127


def count_ink_cells(data):
    """The number of terms in the loss of each sample of a batch, int64 (N,)."""
    images, _ = data
    return ink_cells(images).sum(1)


def losses_and_predictions(model, images, labels):
    """One loss and one prediction per sample, both (N,).

    With logits for each cell, the loss of a sample is the mean over its cells with ink.
    """
    logits = model(images)
    if logits.ndim == 2:
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1)
    ink = ink_cells(images).to(logits.dtype)
    labels = labels[:, None].expand(ink.shape)
    cell_losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses = (cell_losses * ink).sum(1) / ink.sum(1).clamp(min=1)
    return losses, (logits * ink[..., None]).sum(1).argmax(1)


@torch.no_grad()
def evaluate(model, loader, run) -> dict:
    """Loss and accuracy over all test samples; each counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        images, labels = batch.data
        losses, predicted = losses_and_predictions(model, images, labels)
        metrics.add(batch, loss=losses, accuracy=predicted == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # a second thread would slow matrices this small down
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    model = CellNet(train_data.tensors[0].shape[1], len(train_data.classes), args.norm, args.variable_length)
    # Samples of different lengths are weighted by their length. The loader sums the weights of a step over all
    # micro-batches and processes before the first backward pass; the mean of the micro-batches' means would be wrong.
    weights = count_ink_cells if args.variable_length else None
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed, loss_weights=weights)
    # The test uses micro-batches of the same size, so that they fit into memory.
    steps = accelerator.gradient_accumulation_steps
    test_loader = GlobalLoader(test_data, args.batch_size, accelerator, accumulation=steps)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):  # the micro-batches of all steps
            images, labels = batch.data
            # DDP's no_sync() for the forward and backward pass: no all-reduce before the last micro-batch of a step.
            with accelerator.accumulate(model):
                losses, predicted = losses_and_predictions(model, images, labels)
                # sum(weights * losses) / (sum of the step's weights), times what DDP and Accelerate divide by
                accelerator.backward(batch.mean_loss(losses))
                if args.max_grad_norm and accelerator.sync_gradients:
                    # Once per step, because the norm of the sum is not known before.
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()  # Accelerate's wrappers: all three do nothing before the last micro-batch
                scheduler.step()
                optimizer.zero_grad()
            # In the log each image counts once, as in evaluate().
            run.log_train(batch, weights=torch.ones_like(losses), loss=losses, accuracy=predicted == labels)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
