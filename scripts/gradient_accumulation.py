"""Exact gradient accumulation: the step of a big batch, in the memory you have. A CNN on MNIST.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/gradient_accumulation.py \
        --batch_size 512 --gradient_accumulation_steps 4 --compare
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/gradient_accumulation.py \
        --batch_size 16384 --micro_batch_size auto

The model is a small CNN and not the MLP of mnist_mlp.py: accumulation saves the memory of
activations, and most of an MLP's memory is weights.

Measured on 2 CPU cores, torch 2.15, accelerate 1.15: the gradients of 8 micro-batches on 2
processes equal those of the whole batch to 6e-16 in float64 and 3e-7 in float32; with a batch of
16384, 8 micro-batches take 0.53 GiB instead of 1.97.
Sources: samples of different length, https://huggingface.co/blog/gradient_accumulation; how
no_sync skips communication, S. Li et al., https://arxiv.org/abs/2006.15704.
"""

import copy
import math
import sys
from collections import Counter
from pathlib import Path

import torch
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import flags, launch
from utils.console import stop
from utils.datasets.images_in_memory import BUNDLED_MNIST, describe, load_images
from utils.features.data_parallel import data_parallel, on_each_gpu
from utils.features.out_of_memory import largest_that_fits
from utils.loader import GlobalLoader
from utils.memory import peak_memory_gib, reset_peak_memory
from utils.run import Run

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675


def auto_or_size(text: str) -> int | str:
    return text if text == "auto" else flags.at_least(1)(text)


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    count, size, real = flags.at_least(0), flags.at_least(1), flags.at_least(0.0, float)

    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--num_workers", type=count, default=0, help="threads that decode the images; 0: none")

    # fixed: a resumed run must have the same values.
    add = parser.add_argument_group("model", resume_invariant=True).add_argument
    add(
        "--variable_length",
        action="store_true",
        help="a loss for each cell with ink: 9 to 30 of the 49 cells of an image",
    )
    add(
        "--norm",
        choices=("none", "layer", "batch"),
        default="none",
        help="normalisation; with batch, accumulation is not exact",
    )
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare to 1e-12")

    add = parser.add_argument_group("training", resume_invariant=True).add_argument
    add("--batch_size", type=size, default=512, help="of one optimizer step, over all processes together")
    add("--lr", type=real, default=2e-2, help="highest learning rate of the one-cycle schedule")
    add("--weight_decay", type=real, default=0.1, help="of AdamW")
    add("--max_grad_norm", type=real, default=1.0, help="clip the norm of a step's gradient to X; 0: off")
    add("--seed", type=flags.at_least(0, below=2**31), default=0, help="of weights and data order")

    add = parser.add_argument_group("accumulation").add_argument
    add("--gradient_accumulation_steps", type=size, default=1, help="micro-batches of a process in one step")
    add(
        "--micro_batch_size",
        type=auto_or_size,
        metavar="N|auto",
        help="at most N samples in a micro-batch of a process; auto: as many as fit into memory",
    )
    add(
        "--cpu_memory_gib",
        type=real,
        default=0,
        help="on a CPU, memory for auto to fill with what the backward pass needs; 0: what is free",
    )
    add(
        "--compare",
        action="store_true",
        help="compare each gradient with that of the whole batch; takes the memory of that",
    )

    add = parser.add_argument_group("length").add_argument
    add("--num_epochs", type=size, default=3, help="passes over the training images")
    add("--max_steps", type=count, default=0, help="optimizer steps, instead of num_epochs; 0: off")
    parser.add_run_flags(log_every=20)
    args = parser.parse_args()
    if args.micro_batch_size and args.gradient_accumulation_steps > 1:
        parser.error("give --micro_batch_size or --gradient_accumulation_steps, not both")
    if args.virtual_processes and (args.micro_batch_size or args.norm == "batch"):
        parser.error("--virtual_processes decides the micro-batches: leave --micro_batch_size and --norm batch out")
    return args


class CellNet(nn.Module):
    """A small CNN: it sees the 16 x 16 pixels around each cell of 4 x 4 pixels; the cells vote.

    It computes matrix products (unfold, then Linear) and not nn.Conv2d: cuDNN computes that in TF32
    by default, and oneDNN's order of additions makes the float32 gradient of a whole batch wrong by
    1e-5, which is more than that of micro-batches.
    """

    def __init__(self, num_channels: int, num_classes: int, norm: str = "none", variable_length: bool = False):
        super().__init__()
        norms = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.fc1 = nn.Linear(num_channels * 16 * 16, 64)
        self.norm1 = norms[norm](64)
        self.fc2 = nn.Linear(64, 64)
        self.norm2 = norms[norm](64)
        self.head = nn.Linear(64, num_classes)
        self.variable_length = variable_length

    def forward(self, images):
        """uint8 images (N, C, H, W) to logits (N, classes).

        With variable_length the logits of each cell, (N, cells, classes), as a language model has
        those of each token.
        """
        x = images.to(self.head.weight.dtype).sub_(MEAN).mul_(1 / STD)
        x = F.unfold(x, 16, padding=6, stride=4).transpose(1, 2)
        num_cells = x.shape[1]
        # SiLU is smooth: with ReLU a difference of one rounding error switches a unit on or off,
        # and grows from step to step.
        x = F.silu(self.norm1(self.fc1(x.flatten(0, 1))))
        x = F.silu(self.norm2(self.fc2(x)))
        logits = self.head(x).unflatten(0, (len(images), num_cells))
        if self.variable_length:
            return logits
        return logits.sum(1) / num_cells**0.5


def ink_cells(images):
    """bool (N, cells): which cells of 4 x 4 pixels have ink; images: uint8 (N, C, H, W)."""
    brightest = images.amax(1, keepdim=True).float()
    return F.max_pool2d(brightest, 4).flatten(1) > 127


def count_ink_cells(data):
    """int64 (N,): the terms in the loss of each sample of a batch, for GlobalLoader."""
    images, _ = data
    return ink_cells(images).sum(1)


@on_each_gpu
def losses_and_predictions(model, images, labels):
    """One loss and one prediction a sample, both (N,).

    With logits of each cell, the loss of a sample is the mean over its cells with ink.
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
    """Loss and accuracy; each test sample counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        images, labels = batch.data
        losses, predicted = losses_and_predictions(model, images, labels)
        metrics.add(batch, loss=losses, accuracy=predicted == labels)
    return metrics.reduce()


def choose_accumulation(args, model, data, accelerator) -> int:
    """Accumulation steps for --micro_batch_size, the same on all ranks. Collective.

    Raises:
        SystemExit: if not even one sample fits, or for auto with a model that is sharded (FSDP).
    """
    per_process = args.batch_size // accelerator.num_processes

    def attempt(size):
        # What else training keeps: the gradients of earlier micro-batches, AdamW's two moments,
        # DDP's buckets.
        others = [torch.empty_like(p) for p in model.parameters() for _ in range(4)]
        rows = torch.arange(size) % len(data)
        images, labels = (tensor.to(accelerator.device) for tensor in data[rows])
        with accelerator.autocast():
            losses, _ = losses_and_predictions(model, images, labels)
        losses.sum().backward()
        del others  # not earlier

    fitting = args.micro_batch_size
    if fitting == "auto":
        if accelerator.distributed_type == DistributedType.FSDP:
            stop("--micro_batch_size auto needs the whole model on one device, and FSDP shards it: give a number")
        model.to(accelerator.device)
        fitting = largest_that_fits(attempt, per_process, accelerator, args.cpu_memory_gib)
        model.zero_grad()
        if not fitting:
            stop(
                "--micro_batch_size auto: not even one sample fits into memory: take a smaller "
                "model or a device with more memory"
            )
    # The smallest number of steps that divides the batch of a process: micro-batches of one size.
    steps = math.ceil(per_process / fitting)
    while per_process % steps:
        steps += 1
    size = per_process // steps
    accelerator.print(f"micro-batch   {size} per process ({fitting} would fit), {steps} in a step")
    return steps


def count_all_reduces(model, virtual_processes: int) -> Counter:
    """A Counter whose "gradient_all_reduces" grows with each all-reduce of gradients.

    DDP calls the hook for each bucket of gradients that it sends, in place of its own all-reduce.
    With --virtual_processes it has another hook, and none is counted.
    """
    counts = Counter(steps=0, micro_batches=0, gradient_all_reduces=0, scalar_all_reduces=0)

    def counting_hook(process_group, bucket):
        counts["gradient_all_reduces"] += 1
        return allreduce_hook(process_group, bucket)

    if is_compiled_module(model):  # a dynamo_config in the config file
        model = model._orig_mod
    if isinstance(model, DistributedDataParallel) and not virtual_processes:
        model.register_comm_hook(None, counting_hook)
    return counts


def samples_of_step(loader, epoch: int, step: int) -> list[torch.Tensor]:
    """Images and labels of the step that follows on `step` steps, those of all processes."""
    first = step % len(loader) * loader.sampler.batch_size
    indices, _ = loader.sampler.items(epoch, first, first + loader.sampler.batch_size)
    return [tensor[indices.to(tensor.device)] for tensor in loader.tensors]


def gradient_difference(model, norm, images, labels, max_grad_norm: float) -> float:
    """The relative difference of `model`'s gradient to the gradient of the whole batch.

    The whole batch is one micro-batch in one process here, by plain autograd: without
    accumulation, DDP and Accelerate.

    Args:
        model: the bare model, with its gradient after clipping.
        norm: the norm of that gradient before clipping.
        images, labels: all samples of the step.

    Returns:
        The largest difference of an entry, over the largest entry; or the relative difference of
        the norms before clipping, if that is larger: clipping would hide a wrong factor.
    """
    # A copy has no gradients, and leaves BatchNorm's statistics in the model as they are.
    whole = copy.deepcopy(model)
    losses, _ = losses_and_predictions(whole, images, labels)
    weights = torch.ones_like(losses)
    if whole.variable_length:
        weights = count_ink_cells([images, labels])
    ((losses * weights).sum() / weights.sum().clamp(min=1)).backward()
    whole_norm = nn.utils.clip_grad_norm_(whole.parameters(), max_grad_norm)
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    difference = float((ours - expected).abs().max() / expected.abs().max())
    return max(difference, abs(float(norm / whole_norm) - 1))


def main():
    args = parse_args()
    # With matrices this small a second thread makes it slower.
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    if args.compare and accelerator.distributed_type == DistributedType.FSDP:
        stop("--compare needs whole gradients in each process, and FSDP shards them: use another config file")
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset, args.num_workers)
    num_channels, num_classes = train_data.images.shape[1], len(train_data.classes)
    model = CellNet(num_channels, num_classes, args.norm, args.variable_length)
    model = data_parallel(model.to(getattr(torch, args.dtype)), accelerator)
    if args.micro_batch_size:
        accelerator.gradient_accumulation_steps = choose_accumulation(args, model, train_data, accelerator)
    train_loader = GlobalLoader(
        train_data,
        args.batch_size,
        accelerator,
        seed=args.seed,
        loss_weights=count_ink_cells if args.variable_length else None,
    )
    # In micro-batches of the same size, which fit into memory.
    steps = accelerator.gradient_accumulation_steps
    test_loader = GlobalLoader(test_data, args.batch_size, accelerator, accumulation=steps)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counts = count_all_reduces(model, args.virtual_processes)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    data = describe(args.dataset, train_data, test_data)
    run.start(train_loader, test_loader, total_steps, data=data, checkpoint=state)

    max_grad_norm = args.max_grad_norm or math.inf
    largest_difference = 0.0
    reset_peak_memory(accelerator.device)
    start_gib = peak_gib = peak_memory_gib(accelerator)

    for epoch in run.epochs():
        model.train()
        reset_peak_memory(accelerator.device)
        for window in run.steps(train_loader, epoch):  # all micro-batches of one step
            for batch in window:
                images, labels = batch.data
                # Inside, DDP's no_sync() holds the all-reduce back until the last micro-batch, in
                # the forward pass as well as in the backward pass. The last step of an epoch has
                # fewer samples, in as many micro-batches, some of them perhaps empty.
                with accelerator.accumulate(model):
                    losses, predicted = losses_and_predictions(model, images, labels)
                    # sum(weights * losses) / (sum of the weights in the step). The loader added
                    # those up over the window and all processes before the first backward pass: a
                    # mean of the means of micro-batches is another number where these differ.
                    accelerator.backward(batch.mean_loss(losses))
                    if accelerator.sync_gradients:
                        # Now, and once: the norm of a part says nothing about that of the whole.
                        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                        if args.compare:
                            whole_batch = samples_of_step(train_loader, epoch, run.step)
                            bare_model = accelerator.unwrap_model(model)
                            difference = gradient_difference(bare_model, norm, *whole_batch, max_grad_norm)
                    # Accelerate's: these three do nothing before the last micro-batch.
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                counts["micro_batches"] += 1
                # In the log each image counts once, as in the test.
                weights = torch.ones_like(losses)
                run.log_train(batch, weights=weights, loss=losses, accuracy=predicted == labels)
            counts["steps"] += 1
            if args.variable_length and accelerator.num_processes > 1:
                counts["scalar_all_reduces"] += 1  # GlobalLoader's, of the sum of the weights
            if args.compare:
                largest_difference = max(largest_difference, difference)
                run.log("compare", epoch, step=run.step + 1, gradient_difference=difference)
        peak_gib = max(peak_gib, peak_memory_gib(accelerator))
        run.log_test(evaluate(model, test_loader, run))

    totals = {
        **counts,
        "train_peak_memory_gib": round(peak_gib, 4),
        "above_start_gib": round(peak_gib - start_gib, 4),  # activations, gradients, moments
    }
    if args.compare:
        totals["largest_gradient_difference"] = largest_difference
    accelerator.print("  ".join(f"{name} {value:,.4g}" for name, value in totals.items()))
    run.add_to_summary(**totals)
    run.finish()


if __name__ == "__main__":
    main()
