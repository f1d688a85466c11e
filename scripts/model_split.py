"""ResNet-50 cut over devices or processes: cut evenly, pipelined, and with the numbers of the model that is not cut.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/model_split.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/model_split.py --num_stages 2 \
        --batch_size 256 --num_microbatches 8

One process cuts it over its devices (dp.yaml: all GPUs), several take a stage each, and with --num_stages below the
number of processes several copies of the pipeline share the batch.

On 2 CPU cores, torch 2.15, two processes with one thread each train at 1.67 times the images/s of the model that is not
cut on one thread (8 micro-batches of 8 images of 64 pixels; ideal is 1.78), with the same weights.
Sources: GPipe, Y. Huang et al., https://arxiv.org/abs/1811.06965; 1F1B and interleaved 1F1B, D. Narayanan et al.,
https://arxiv.org/abs/2104.04473; ResNet-50, K. He et al., https://arxiv.org/abs/1512.03385.
"""

import functools
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision
from accelerate.utils import DistributedType, gather_object
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import launch, stop
from utils.checkpoint import Checkpoints, load_pretrained, save_model
from utils.data import BUNDLED_MNIST, GlobalBatches, Images, describe, load_images
from utils.memory import own_peak_memory_gib, reset_peak_memory
from utils.metrics import SampleStats
from utils.pipeline import OneProcess, OverProcesses, as_text, cut_evenly, measure_blocks, stage_table, sum_over_copies
from utils.profiling import Profiler
from utils.tracking import Tracker

# Of ImageNet, 0 to 255, as torchvision's weights expect them: https://pytorch.org/vision/stable/models.html.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# What is cut, in order. The first and the last consist of modules that torchvision has side by side.
BLOCKS = ["stem", *(f"layer{i + 1}.{j}" for i, count in enumerate((3, 4, 6, 3)) for j in range(count)), "head"]
PARTS = {"stem": ("conv1", "bn1", "relu", "maxpool"), "head": ("avgpool", "flatten", "fc")}
STAGES_PER_PROCESS = {"interleaved": 2}  # else 1
RECORDED = range(1, 11)  # updates of this launch that the timeline records; the first one warms up


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    count, size, real = launch.at_least(0), launch.at_least(1), launch.at_least(0.0, float)
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--synthetic", action="store_true", help="random images in 1000 classes instead, to measure speed")
    add("--image_size", type=launch.at_least(32), default=224, help="of --synthetic, in pixels")
    add("--num_workers", type=count, default=0, help="threads that decode the images, once; 0: none")
    add = parser.add_argument_group("pipeline").add_argument
    stages = "pieces of the model; 0: one a process, or one a GPU of one process"
    add("--num_stages", type=count, default=0, help=stages)
    add("--num_microbatches", type=size, default=4, help="in the pipeline, from filling to draining")
    add("--schedule", choices=("naive", "gpipe", "1f1b", "interleaved"), default="1f1b", help="order of the work")
    add("--split", nargs="+", default=["auto"], metavar="BLOCK", help="first block of each later stage (default: auto)")
    add("--balance", choices=("time", "memory"), default="time", help="what auto makes even")
    add("--cpu_threads", type=count, default=0, help="of a process; 0: its share of the cores")
    add = parser.add_argument_group("model").add_argument
    add("--norm", choices=("batch", "group"), default="batch", help="group: micro-batches change nothing but rounding")
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url
    add("--pretrained", nargs="?", const=url, metavar="FILE|URL", help="weights to begin with; no name: torchvision's")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare to 1e-12")
    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=size, default=1, help="passes over the training images, with --max_steps 0")
    add("--max_steps", type=count, default=60, help="optimizer updates, instead of num_epochs; 0: off")
    add("--batch_size", type=size, default=64, help="of one optimizer update, over all micro-batches together")
    add("--gradient_accumulation_steps", type=size, default=1, help="times the pipeline fills and drains in one update")
    add("--lr", type=real, default=1e-3, help="highest learning rate of the one-cycle schedule")
    add("--weight_decay", type=real, default=0.05, help="of AdamW")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of weights and data order")
    parser.add_run_flags(log_every=10)
    return parser.parse_args()


def make_resnet(num_classes: int, norm: str = "batch") -> nn.Module:
    norm_layer = functools.partial(nn.GroupNorm, 32) if norm == "group" else nn.BatchNorm2d
    resnet = torchvision.models.resnet50(num_classes=num_classes, norm_layer=norm_layer)
    resnet.flatten = nn.Flatten()  # torchvision calls torch.flatten between avgpool and fc
    return resnet


class Stage(nn.Module):
    """Some blocks of a ResNet, its own modules under its own names: state dicts need no translation."""

    def __init__(self, resnet: nn.Module, blocks: list[str]):
        super().__init__()
        self.sequence = []  # a list and no ModuleList, which would give the modules a second name
        for name in itertools.chain.from_iterable(PARTS.get(block, (block,)) for block in blocks):
            parent, _, _ = name.rpartition(".")
            if parent and not hasattr(self, parent):
                self.add_module(parent, nn.Module())
            self.set_submodule(name, resnet.get_submodule(name))
            self.sequence.append(self.get_submodule(name))

    def forward(self, x):
        """x: uint8 (N, 1 or 3, H, W) for the stem, else what the block before returned."""
        if x.dtype == torch.uint8:
            x = to_input(x, next(self.parameters()).dtype)
        for module in self.sequence:
            x = module(x)
        return x


def to_input(images, dtype):
    """uint8 (N, 1 or 3, H, W) to normalised RGB (N, 3, H, W), H and W at least 32: five halvings leave one pixel."""
    x = images.to(dtype).expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(values, dtype=dtype, device=x.device)[:, None, None] for values in (MEAN, STD))
    height, width = (max(32 - side, 0) for side in x.shape[2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)).sub(mean).div_(std)


def make_pipeline(resnet, blocks, ends, schedule, num_stages, accelerator, devices):
    """Returns what this process has of the model, the pipeline to run it in, and the group of the copies of this part.

    blocks: the names of each stage's blocks; ends: tensors on the meta device, a micro-batch that goes into the first
    stage and what comes out of each.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    own = range(len(blocks)) if processes == 1 else range(rank % num_stages, len(blocks), num_stages)
    places = [(index % num_stages, devices[index % num_stages % len(devices)]) for index in own]  # line in the picture
    stages = {index: Stage(resnet, blocks[index]).to(device) for index, (_, device) in zip(own, places, strict=True)}
    model = Stage(resnet, [block for index in own for block in blocks[index]])  # the same modules, for the optimizer
    if processes == 1:
        return model, OneProcess(stages, places, schedule), None
    shape = (processes // num_stages, num_stages)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("copy", "stage"))
    pipeline = OverProcesses(stages, ends, schedule, mesh.get_group("stage"), accelerator.device, rank)
    return model, pipeline, mesh.get_group("copy") if shape[0] > 1 else None


def record_losses(stats, accelerator, step=0):
    """A loss function for `run`: it adds a micro-batch to `stats`, and returns its part of the mean over the update."""

    def loss_fn(logits, batch):
        labels = batch.labels.to(logits.device, non_blocking=True)
        losses = F.cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(1) == labels
        stats.add(losses.detach().to(accelerator.device), correct.to(accelerator.device), batch.indices, step)
        return losses.sum() / batch.update_size

    return loss_fn


@torch.no_grad()
def evaluate(model, pipeline, batches, accelerator, stop_signal) -> dict | None:
    """Loss and accuracy, each test sample counted once, through the pipeline; None if a signal came."""
    model.eval()
    stats = SampleStats(accelerator)
    for window in zip(*[batches.epoch()] * batches.accumulation, strict=True):
        with accelerator.autocast():
            pipeline.run(window, record_losses(stats, accelerator))
        if stop_signal.agreed():
            return None
    return stats.reduce()


def layout(args, accelerator) -> tuple[int, int, list[torch.device]]:
    """Stages, copies of the pipeline, and the devices of this process. Raises: SystemExit if they do not fit."""
    processes, devices = accelerator.num_processes, [accelerator.device]
    if processes == 1 and accelerator.device.type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    stages = args.num_stages or max(processes, len(devices))
    copies = 1 if processes == 1 else processes // stages
    virtual, pieces = stages * STAGES_PER_PROCESS.get(args.schedule, 1), args.num_microbatches * copies
    pieces *= args.gradient_accumulation_steps
    if accelerator.distributed_type == DistributedType.FSDP or accelerator.scaler is not None:
        stop("a split model runs neither under FSDP nor in fp16: take ddp.yaml, with mixed_precision no or bf16")
    if processes > 1 and processes % stages:
        stop(f"--num_stages {stages} does not divide the {processes} processes")
    if processes > 1 and stages == 1:
        stop("--num_stages 1 on several processes splits nothing: data parallelism alone is what resnet50.py does")
    if virtual > len(BLOCKS):
        stop(f"{virtual} stages are more than the {len(BLOCKS)} blocks of ResNet-50: take a smaller --num_stages")
    if args.batch_size % pieces:
        below = args.batch_size - args.batch_size % pieces
        stop(
            f"--batch_size {args.batch_size} does not divide by {copies} copies of the pipeline x "
            f"{args.num_microbatches} micro-batches x {args.gradient_accumulation_steps} accumulation steps: "
            f"take {below or pieces} or {below + pieces}"
        )
    if args.split != ["auto"]:
        places = [BLOCKS.index(name) if name in BLOCKS else -1 for name in args.split]
        if len(places) != virtual - 1 or places != sorted(set(places)) or min(places, default=1) < 1:
            stop(
                f"--split {' '.join(args.split)} must be {virtual - 1} blocks in order, for {virtual} stages; "
                f"the blocks are {' '.join(BLOCKS[1:])}"
            )
    return stages, copies, devices


def synthetic(count: int, image_size: int, seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, image_size, image_size), dtype=torch.uint8, generator=generator)
    return Images(images, torch.randint(0, 1000, (count,), generator=generator), [str(i) for i in range(1000)])


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, args.cpu_threads or None, split_batch=False)
    num_stages, copies, devices = layout(args, accelerator)
    stop_signal = launch.StopSignal(accelerator)
    tracker = Tracker(accelerator, args)

    if args.synthetic:
        train_data, test_data = (synthetic(count, args.image_size, args.seed) for count in (512, 64))
    else:
        train_data, test_data = load_images(args.dataset, args.num_workers)
    name = "synthetic" if args.synthetic else args.dataset
    data = launch.same_on_all(accelerator, describe(name, train_data, test_data))
    # All processes of one pipeline see the same samples: the first stage needs the images, the last one the labels.
    rank, processes = accelerator.process_index, accelerator.num_processes
    share = SimpleNamespace(device=accelerator.device, num_processes=copies, process_index=rank // num_stages)
    pieces = args.num_microbatches * args.gradient_accumulation_steps
    train_batches = GlobalBatches(train_data, args.batch_size, share, args.seed, pieces)
    test_batches = GlobalBatches(test_data, args.batch_size, share, accumulation=pieces)
    steps_per_epoch = len(train_batches)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    num_epochs = -(-total_steps // steps_per_epoch)
    micro_batch_size = args.batch_size // (copies * pieces)
    last = len(train_data.labels) % args.batch_size if total_steps >= steps_per_epoch else 0  # update of an epoch
    alone = micro_batch_size == 1 or (last and last < 2 * copies * pieces)
    if args.norm == "batch" and alone and max(train_data.images.shape[2:]) <= 32:
        stop(
            f"--batch_size {args.batch_size} leads to micro-batches of one sample, which has one pixel in the end, and "
            "BatchNorm cannot normalise one number: take fewer --num_microbatches, another batch, or --norm group"
        )

    reset_peak_memory(accelerator.device)
    start_gib = [own_peak_memory_gib(device) for device in devices]
    resnet = make_resnet(len(train_data.classes), args.norm).to(getattr(torch, args.dtype))
    if args.pretrained:
        load_pretrained(resnet, args.pretrained, head="fc")
    images = train_data.images[torch.arange(micro_batch_size) % len(train_data.labels)].to(accelerator.device)
    with accelerator.autocast():
        costs = measure_blocks({block: Stage(resnet, [block]) for block in BLOCKS}, images)
    num_virtual = num_stages * STAGES_PER_PROCESS.get(args.schedule, 1)
    if args.split == ["auto"]:
        blocks = cut_evenly(costs, num_virtual, args.balance, args.schedule, args.num_microbatches)
    else:
        bounds = [0, *map(BLOCKS.index, args.split), len(BLOCKS)]
        blocks = [BLOCKS[first:last] for first, last in itertools.pairwise(bounds)]
    table = stage_table(blocks, costs)

    ends = [images.to("meta"), *(costs[names[-1]].output for names in blocks)]
    model, pipeline, copy_group = make_pipeline(resnet, blocks, ends, args.schedule, num_stages, accelerator, devices)
    del resnet  # and with it the blocks of other processes

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)  # not the model: DDP would copy and reduce it

    facts = {"data": data["fingerprint"], "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    if args.norm == "batch":
        facts["micro_batch_size"] = micro_batch_size  # BatchNorm's numbers depend on it
    checkpoints = Checkpoints(accelerator, args, facts, copy=rank // num_stages)
    step, extra, saved_stats = checkpoints.load(model, optimizer, scheduler)
    best_accuracy = extra.get("best_accuracy", 0.0)
    stats = SampleStats(accelerator, saved_stats)
    batch = f"{micro_batch_size} per micro-batch x {args.num_microbatches} micro-batches x {copies} copies of the model"
    topology = launch.announce(accelerator, args, steps_per_epoch, total_steps, data, batch)
    accelerator.print(as_text(table), flush=True)
    if step == total_steps and tracker.is_complete():
        accelerator.print(f"all {total_steps} updates are done: nothing to do")
        return accelerator.end_training()
    topology |= {"num_stages": num_stages, "copies": copies, "stages": table}
    profiler = Profiler(accelerator, args, model, optimizer, total_steps - step)
    tracker.start(step, total_steps, steps_per_epoch, extra.get("metrics_bytes", 0), topology, data)

    def save():
        stats.check()
        extra = {"best_accuracy": best_accuracy, "metrics_bytes": tracker.metrics_bytes()}
        checkpoints.save(step, model, optimizer, scheduler, stats.state(), extra)

    first_step, peaks = step, []
    # A run resumed at the end of an epoch finds no batch left in it, and begins with its evaluation.
    for epoch in range(max(step - 1, 0) // steps_per_epoch, num_epochs):
        model.train()
        batches = train_batches.epoch(epoch, first_update=step - epoch * steps_per_epoch)
        batches = tracker.timed(profiler.waits(batches), pieces)
        for window in zip(*[batches] * pieces, strict=True):  # the micro-batches of one update
            if step - first_step in RECORDED:
                for device in devices:
                    reset_peak_memory(device)
                accelerator.wait_for_everyone()  # a common zero
                pipeline.timeline.begin()
            with accelerator.autocast(), profiler.phase("forward, backward"):
                for first in range(0, pieces, args.num_microbatches):
                    pipeline.run(window[first : first + args.num_microbatches], record_losses(stats, accelerator, step))
            if pipeline.timeline.recording:
                pipeline.timeline.end()
            if copy_group is not None:
                sum_over_copies(model, copy_group)
            optimizer.step()
            if step - first_step in RECORDED:  # now, because a save takes memory as well
                peaks.append([own_peak_memory_gib(device) for device in devices])
            lr = optimizer.param_groups[0]["lr"]
            scheduler.step()
            model.zero_grad()
            step += 1  # updates done: the one number that says where the run is
            profiler.step()
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
        result = evaluate(model, pipeline, test_batches, accelerator, stop_signal)
        if result is None:
            save()
            stop_signal.leave(step)
        best_accuracy = max(best_accuracy, result["accuracy"])
        tracker.log("test", step, epoch + 1, {name: result[name] for name in ("loss", "accuracy", "samples")})

    report = {}
    if peaks:
        peaks = [max(column) - start for *column, start in zip(*peaks, start_gib, strict=True)]
        overlap = args.schedule != "naive" and (processes > 1 or len(devices) > 1)  # one CPU runs one stage at a time
        rounds = args.num_microbatches * num_virtual // num_stages if overlap else 1
        title = f"{args.schedule}, {num_stages} stages, {args.num_microbatches} micro-batches of {micro_batch_size}"
        report = {
            "peak_memory_gib_above_start": [round(gib, 3) for gib in gather_object(peaks)],
            "idle_share": pipeline.timeline.report(accelerator, title, Path(args.output_dir) / "timeline.png"),
            "idle_share_in_theory": round((num_stages - 1) / (rounds + num_stages - 1), 4),
        }
    accelerator.print("\n".join(f"{name} {value}" for name, value in report.items()), flush=True)
    save_model(accelerator, model, Path(args.output_dir) / "model.safetensors", copy=rank // num_stages)
    tracker.finish(step, result, best_accuracy=best_accuracy, **report)


if __name__ == "__main__":
    main()
