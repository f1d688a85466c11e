"""Gradient accumulation that is exact: the update of the big batch, in the memory you have. A small CNN on MNIST.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/gradient_accumulation.py \
        --batch_size 512 --gradient_accumulation_steps 4 --compare
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/gradient_accumulation.py \
        --batch_size 16384 --micro_batch_size auto

A small CNN and not the MLP of mnist_mlp.py: accumulation saves activations, and an MLP's memory is mostly weights.

Measured on 2 CPU cores, torch 2.15, accelerate 1.15: gradients of 8 micro-batches on 2 processes are those of the whole
batch to 6e-16 in float64 and 3e-7 in float32; with a batch of 16384, 8 micro-batches take 0.53 GiB instead of 1.97.
Sources: the weights over samples of variable length, https://huggingface.co/blog/gradient_accumulation; the
communication that is left out, DDP's no_sync in S. Li et al., https://arxiv.org/abs/2006.15704.
"""

import copy
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import launch, stop
from utils.checkpoint import Checkpoints, save_model
from utils.data import BUNDLED_MNIST, GlobalBatches, describe, load_images
from utils.memory import largest_that_fits, peak_memory_gib, reset_peak_memory
from utils.metrics import SampleStats
from utils.profiling import Profiler
from utils.tracking import Tracker

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675


def auto_or_size(text: str) -> int | str:
    return text if text == "auto" else launch.at_least(1)(text)


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    count, size, real = launch.at_least(0), launch.at_least(1), launch.at_least(0.0, float)
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--variable_length", action="store_true", help="a loss over the cells with ink: 9 to 30 of 49 in an image")
    add("--num_workers", type=count, default=0, help="threads that decode the images, once; 0: none")
    add = parser.add_argument_group("model").add_argument
    add("--norm", choices=("none", "layer", "batch"), default="none", help="batch: accumulation is not exact")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare to 1e-12")
    add = parser.add_argument_group("accumulation").add_argument
    add("--batch_size", type=size, default=512, help="of one optimizer update, over all processes together")
    add("--gradient_accumulation_steps", type=size, default=1, help="micro-batches of a process in one update")
    most = "samples of a micro-batch, at most; auto: as many as fit"
    add("--micro_batch_size", type=auto_or_size, metavar="N|auto", help=most)
    room = "for auto, on a CPU: for what the backward pass needs; 0: what is free"
    add("--cpu_memory_gib", type=real, default=0, help=room)
    add("--compare", action="store_true", help="hold each gradient against the whole batch's; takes its memory")
    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=size, default=3, help="passes over the training images")
    add("--max_steps", type=count, default=0, help="optimizer updates, instead of num_epochs; 0: off")
    add("--lr", type=real, default=2e-2, help="highest learning rate of the one-cycle schedule")
    add("--weight_decay", type=real, default=0.1, help="of AdamW")
    add("--max_grad_norm", type=real, default=1.0, help="clip the gradient of the update to this length; 0: off")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of weights and data order")
    parser.add_run_flags(log_every=20)
    args = parser.parse_args()
    if args.micro_batch_size and args.gradient_accumulation_steps > 1:
        parser.error("give --micro_batch_size or --gradient_accumulation_steps: one follows from the other")
    return args


def ink_cells(images):
    """uint8 (N, C, H, W) to bool (N, cells): in which cells of 4 x 4 pixels something is drawn."""
    return F.max_pool2d(images.amax(1, keepdim=True).float(), 4).flatten(1) > 127


class CellNet(nn.Module):
    """A small CNN: it looks at the 16 x 16 pixels around each cell of 4 x 4 pixels, and the cells vote.

    As matrix products (unfold, then Linear), and not as nn.Conv2d: cuDNN computes that in TF32 unless told otherwise,
    and oneDNN adds up its weights' gradients so that a whole batch in float32 is off by 1e-5, more than micro-batches.
    """

    def __init__(self, num_channels: int, num_classes: int, norm: str = "none", variable_length: bool = False):
        super().__init__()
        norms = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.fc1, self.norm1 = nn.Linear(num_channels * 16 * 16, 64), norms[norm](64)
        self.fc2, self.norm2 = nn.Linear(64, 64), norms[norm](64)
        self.head = nn.Linear(64, num_classes)
        self.variable_length = variable_length

    def forward(self, images, labels):
        """images: uint8 (N, C, H, W); labels: (N,). Returns sums of losses (N,), their terms (N,), predictions (N,).

        One term an image, or with variable_length one for each cell with ink, as a language model has one for each
        token that is not padding. The losses are sums: what to divide by is not known inside a micro-batch.
        """
        x = images.to(self.head.weight.dtype).sub_(MEAN).mul_(1 / STD)
        x = F.unfold(x, 16, padding=6, stride=4).transpose(1, 2)
        num_cells = x.shape[1]
        # SiLU is smooth: with ReLU a difference of one rounding flips a unit, and grows from update to update.
        x = F.silu(self.norm1(self.fc1(x.flatten(0, 1))))
        x = F.silu(self.norm2(self.fc2(x)))
        logits = self.head(x).unflatten(0, (len(labels), num_cells))
        if not self.variable_length:
            logits = logits.sum(1) / num_cells**0.5
            losses = F.cross_entropy(logits, labels, reduction="none")
            return losses, torch.ones_like(losses), logits.argmax(1)
        ink = ink_cells(images).to(logits.dtype)
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, None].expand(ink.shape), reduction="none") * ink
        return losses.sum(1), ink.sum(1), (logits * ink[..., None]).sum(1).argmax(1)


@torch.no_grad()
def evaluate(model, batches, accelerator, stop_signal) -> dict | None:
    """Loss and accuracy, with each test sample counted once; None if a signal came."""
    model.eval()
    stats = SampleStats(accelerator)
    for batch in batches.epoch():
        losses, terms, predicted = model(batch.images, batch.labels)
        stats.add(losses / terms.clamp(min=1), predicted == batch.labels, batch.indices)
        if stop_signal.agreed():
            return None
    return stats.reduce()


def choose_accumulation(args, model, data, accelerator) -> int:
    """The accumulation steps for --micro_batch_size, the same on all processes. A collective.

    Raises: SystemExit if not even one sample fits, or for auto with a model that no single device holds.
    """
    share = args.batch_size // accelerator.num_processes

    def attempt(size):
        # What else training keeps: the gradients of earlier micro-batches, AdamW's two moments, DDP's buckets.
        room = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(4)]
        rows = torch.arange(size) % len(data.labels)
        with accelerator.autocast():
            losses, _, _ = model(*(tensor[rows].to(accelerator.device) for tensor in (data.images, data.labels)))
        losses.sum().backward()
        del room  # here, and no earlier

    fitting = args.micro_batch_size
    if fitting == "auto":
        if accelerator.distributed_type == DistributedType.FSDP:
            stop("--micro_batch_size auto tries the whole model on one device, which FSDP avoids: give a number")
        model.to(accelerator.device)
        fitting = largest_that_fits(attempt, share, accelerator, args.cpu_memory_gib)
        model.zero_grad()
        if not fitting:
            stop("--micro_batch_size auto: not even one sample fits into memory: take a smaller model or more memory")
    # The smallest number of micro-batches that divides the share: all of them are then of one size.
    steps = next(steps for steps in range(-(-share // fitting), share + 1) if share % steps == 0)
    accelerator.print(f"micro-batch   {share // steps} per process ({fitting} would fit), {steps} in an update")
    return steps


def count_all_reduces(model) -> Counter:
    """Counts what is really sent: DDP calls the hook for each bucket of gradients, in place of its own all-reduce."""
    counts = Counter(micro_batches=0, gradient_all_reduces=0, scalar_all_reduces=0)

    def counting(process_group, bucket):
        counts["gradient_all_reduces"] += 1
        return allreduce_hook(process_group, bucket)

    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, counting)
    return counts


def gradient_difference(model, norm, data, indices, max_grad_norm: float) -> float:
    """Of the gradient in `model`, clipped, to that of the whole batch: largest difference of an entry / largest entry.

    Or that of the length before clipping, `norm`, if it is larger: clipping hides a wrong factor. The whole batch is
    one micro-batch in one process here, by plain autograd: no accumulation, no DDP, no Accelerate.
    """
    whole = copy.deepcopy(model)  # without gradients, and BatchNorm's statistics of the real one stay as they are
    losses, terms, _ = whole(data.images[indices], data.labels[indices])
    (losses.sum() / terms.sum().clamp(min=1)).backward()
    whole_norm = nn.utils.clip_grad_norm_(whole.parameters(), max_grad_norm)
    ours, reference = (torch.cat([p.grad.flatten() for p in module.parameters()]) for module in (model, whole))
    return max(float((ours - reference).abs().max() / reference.abs().max()), abs(float(norm / whole_norm) - 1))


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # matrices this small lose by a second thread
    stop_signal = launch.StopSignal(accelerator)
    tracker = Tracker(accelerator, args)
    if args.compare and accelerator.distributed_type == DistributedType.FSDP:
        stop("--compare needs whole gradients in each process, and FSDP has them in pieces: take another config file")

    train_data, test_data = load_images(args.dataset, args.num_workers)
    data = launch.same_on_all(accelerator, describe(args.dataset, train_data, test_data))
    model = CellNet(train_data.images.shape[1], len(train_data.classes), args.norm, args.variable_length)
    model = launch.data_parallel(model.to(getattr(torch, args.dtype)), accelerator)
    if args.micro_batch_size:
        args.gradient_accumulation_steps = choose_accumulation(args, model, train_data, accelerator)
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    accumulation = args.gradient_accumulation_steps
    train_batches = GlobalBatches(train_data, args.batch_size, accelerator, args.seed, accumulation)
    test_batches = GlobalBatches(test_data, args.batch_size // accumulation, accelerator)  # fits: it has no backward
    steps_per_epoch = len(train_batches)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    num_epochs = -(-total_steps // steps_per_epoch)

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counts = count_all_reduces(model)

    facts = {"data": data["fingerprint"], "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    checkpoints = Checkpoints(accelerator, args, facts)
    step, extra, saved_stats = checkpoints.load(model, optimizer, scheduler)
    best_accuracy = extra.get("best_accuracy", 0.0)
    stats = SampleStats(accelerator, saved_stats)
    topology = launch.announce(accelerator, args, steps_per_epoch, total_steps, data)
    if step == total_steps and tracker.is_complete():
        accelerator.print(f"all {total_steps} updates are done: nothing to do")
        return accelerator.end_training()
    profiler = Profiler(accelerator, args, model, optimizer, total_steps - step)
    tracker.start(step, total_steps, steps_per_epoch, extra.get("metrics_bytes", 0), topology, data)

    def save():
        stats.check()
        extra = {"best_accuracy": best_accuracy, "metrics_bytes": tracker.metrics_bytes()}
        checkpoints.save(step, model, optimizer, scheduler, stats.state(), extra)

    # DDP averages gradients over the processes and accelerator.backward divides by the accumulation steps: right only
    # where all micro-batches hold as many terms. Undo both, and divide the sums by the terms of the whole update.
    undo = accelerator.num_processes * accumulation
    max_grad_norm = args.max_grad_norm or math.inf
    first_step, images, train_time_s, peak_gib, largest_difference = step, 0, 0.0, 0.0, 0.0
    reset_peak_memory(accelerator.device)
    start_gib = peak_memory_gib(accelerator)

    # A run resumed at the end of an epoch finds no batch left in it, and begins with its evaluation.
    for epoch in range(max(step - 1, 0) // steps_per_epoch, num_epochs):
        model.train()
        started = time.perf_counter()
        reset_peak_memory(accelerator.device)
        batches = train_batches.epoch(epoch, first_update=step - epoch * steps_per_epoch)
        batches = tracker.timed(profiler.waits(batches))
        for window in zip(*[batches] * accumulation, strict=True):  # the micro-batches of one update
            # Known before the first backward pass, for the whole window and all processes: a mean of the means of
            # micro-batches is another number as soon as one of them has fewer terms.
            terms = window[0].update_size
            if args.variable_length:
                terms = sum(ink_cells(batch.images).sum() for batch in window)
                terms = accelerator.reduce(terms, "sum").clamp(min=1)
                counts["scalar_all_reduces"] += accelerator.num_processes > 1
            for batch in window:
                # Inside, DDP's no_sync() holds the all-reduce back until the last micro-batch, for forward as well as
                # backward. A last window with fewer samples has empty micro-batches, which cost next to nothing.
                with accelerator.accumulate(model):
                    losses, own_terms, predicted = model(batch.images, batch.labels)
                    counts["micro_batches"] += 1
                    # In this order: undo / terms, a number by a tensor of integers, would be rounded to float32.
                    accelerator.backward(losses.sum() * undo / terms)
                    if accelerator.sync_gradients:
                        # Now, once: a piece of a gradient says nothing about the length of the whole.
                        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                        if args.compare:
                            first = step % steps_per_epoch * args.batch_size
                            indices = train_batches.order(epoch)[first : first + batch.update_size]
                            bare_model = accelerator.unwrap_model(model)
                            difference = gradient_difference(bare_model, norm, train_batches, indices, max_grad_norm)
                    optimizer.step()  # Accelerate's: does nothing before the last micro-batch
                stats.add(losses / own_terms.clamp(min=1), predicted == batch.labels, batch.indices, step)
            images += batch.update_size
            lr = optimizer.param_groups[0]["lr"]
            scheduler.step()  # once an update
            model.zero_grad()  # Accelerate's optimizer.zero_grad takes 0.1 ms more
            step += 1  # updates done: the one number that says where the run is
            profiler.step()
            if args.compare:
                largest_difference = max(largest_difference, difference)
                tracker.log("compare", step, epoch + 1, {"gradient_difference": difference})
            epoch_ends = step % steps_per_epoch == 0 or step == total_steps
            if step % args.log_every == 0 or epoch_ends:
                tracker.log("train", step, epoch + 1, {**stats.reduce(), "lr": lr})
            if step == total_steps or (step % args.checkpoint_every == 0 if args.checkpoint_every else epoch_ends):
                save()
            if stop_signal.agreed():
                save()
                stop_signal.leave(step)
            if step == total_steps:
                break
        train_time_s += time.perf_counter() - started
        peak_gib = max(peak_gib, peak_memory_gib(accelerator))
        result = evaluate(model, test_batches, accelerator, stop_signal)
        if result is None:
            save()
            stop_signal.leave(step)
        best_accuracy = max(best_accuracy, result["accuracy"])
        tracker.log("test", step, epoch + 1, {name: result[name] for name in ("loss", "accuracy", "samples")})

    save_model(accelerator, model, Path(args.output_dir) / "model.safetensors")
    totals = {
        "updates": step - first_step,
        **counts,
        "train_peak_memory_gib": round(peak_gib, 4),
        "above_start_gib": round(peak_gib - start_gib, 4),  # activations, gradients, optimizer state
        "train_images_per_s": round(images / max(train_time_s, 1e-9), 1),
    }
    if args.compare:
        totals["largest_gradient_difference"] = largest_difference
    accelerator.print("  ".join(f"{name} {value:,.4g}" for name, value in totals.items()), flush=True)
    tracker.finish(step, result, best_accuracy=best_accuracy, **totals)


if __name__ == "__main__":
    main()
