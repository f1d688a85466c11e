"""ResNet-50 split over devices or processes: balanced, pipelined, and equal to the unsplit model.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/model_split.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/model_split.py \
        --num_stages 2 --batch_size 256 --num_microbatches 8

A single process splits the model over its devices (dp.yaml: all GPUs). With several processes, each has one stage. If
--num_stages is less than the number of processes, several replicas of the pipeline share the batch.

Measured by benchmarks/model_split.py on 2 CPU cores, torch 2.14: two processes with one thread each reach 1.40 times
the images/s of the unsplit model on one thread (4 micro-batches of 16 images of 64 pixels; the ideal is 1.60).

Sources: GPipe, Y. Huang et al., https://arxiv.org/abs/1811.06965; 1F1B, D. Narayanan et al.,
https://arxiv.org/abs/2104.04473; ResNet-50, K. He et al., https://arxiv.org/abs/1512.03385.
"""

import functools
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import new_subgroups_by_enumeration
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.console import plural, stop
from utils.data.images import load_images
from utils.flags import ArgumentParser, non_negative_float, non_negative_int, positive_int
from utils.loader import GlobalLoader
from utils.parallel.pipeline import (
    ModelParts,
    OneProcess,
    OverProcesses,
    balance_stages,
    measure_blocks,
    stage_table,
    sum_over_replicas,
)
from utils.pretrained import load_pretrained
from utils.run import Run

# Mean and standard deviation of ImageNet's pixels per channel, 0 to 255; torchvision's weights expect them.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# The model can be split between any two blocks. "stem" and "head" stand for several of torchvision's modules.
BLOCKS = ["stem"]
for layer, count in (("layer1", 3), ("layer2", 4), ("layer3", 6), ("layer4", 3)):
    BLOCKS += [f"{layer}.{number}" for number in range(count)]
BLOCKS += ["head"]
PARTS = {"stem": ("conv1", "bn1", "relu", "maxpool"), "head": ("avgpool", "flatten", "fc")}


def parse_args():
    parser = ArgumentParser(__doc__)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of parquet files or of images")
    data.add_argument("--max_test_samples", type=non_negative_int, default=0, help="test on the first N images; 0: all")

    model = parser.add_argument_group("model and training")
    model.add_argument("--norm", choices=("batch", "group"), default="batch", help="group: exact with micro-batches")
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url
    model.add_argument("--pretrained", nargs="?", const=url, metavar="FILE|URL", help="weights; no value: ImageNet's")
    model.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="type of the parameters")
    model.add_argument("--batch_size", type=positive_int, default=64, help="samples per step, over all pipelines")
    model.add_argument("--lr", type=non_negative_float, default=1e-3, help="peak learning rate of one cycle")
    model.add_argument("--weight_decay", type=non_negative_float, default=0.05, help="weight decay of AdamW")

    # may_change: when resuming. All other flags must be the same.
    pipe = parser.add_argument_group("pipeline", may_change=True)
    pipe.add_argument("--num_stages", type=non_negative_int, default=0, help="stages; 0: one per process, or device")
    pipe.add_argument("--num_microbatches", type=positive_int, default=4, help="micro-batches per pass of the pipeline")
    pipe.add_argument("--schedule", choices=("naive", "gpipe", "1f1b"), default="1f1b", help="pipeline schedule")
    pipe.add_argument("--split", nargs="+", default=["auto"], metavar="BLOCK", help="first block of stages 2, 3, ...")
    pipe.add_argument("--cpu_threads", type=non_negative_int, default=0, help="threads per process; 0: share of cores")
    pipe.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="pipeline passes per step")
    length = parser.add_argument_group("length", may_change=True)
    length.add_argument("--num_epochs", type=positive_int, help="passes over the training images")
    length.add_argument("--max_steps", type=positive_int, help="optimizer steps instead of epochs (default: 60)")

    parser.add_run_flags(virtual_processes=False, log_every=10)
    args = parser.parse_args()
    if not args.num_epochs and not args.max_steps:
        args.max_steps = 60
    return args


def make_resnet(num_classes: int, norm: str = "batch") -> nn.Module:
    norm_layer = functools.partial(nn.GroupNorm, 32) if norm == "group" else nn.BatchNorm2d
    resnet = torchvision.models.resnet50(num_classes=num_classes, norm_layer=norm_layer)
    resnet.flatten = nn.Flatten()  # torchvision calls torch.flatten between avgpool and fc
    return resnet


class Stage(nn.Module):
    """Some blocks of a ResNet, with their names in the whole model, so that the state dicts can be merged."""

    def __init__(self, resnet: nn.Module, blocks: list[str]):
        super().__init__()
        self.sequence = []  # not a ModuleList, which would give the modules a second name
        for block in blocks:
            for name in PARTS.get(block, (block,)):
                parent, _, _ = name.rpartition(".")
                if parent and not hasattr(self, parent):
                    self.add_module(parent, nn.Module())
                self.set_submodule(name, resnet.get_submodule(name))
                self.sequence.append(self.get_submodule(name))

    def forward(self, x):
        """x: uint8 (N, 1 or 3, H, W) for the stem, the output of the previous block otherwise."""
        if x.dtype == torch.uint8:
            x = to_input(x, next(self.parameters()).dtype)
        for module in self.sequence:
            x = module(x)
        return x


@functools.cache
def mean_and_std(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """MEAN and STD, (3, 1, 1). Cached, because each copy to a GPU waits until the GPU is idle."""
    values = torch.tensor([MEAN, STD], dtype=dtype, device=device)
    return values[:, :, None, None].unbind()


def to_input(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 (N, 1 or 3, H, W) to normalised RGB (N, 3, H, W), padded to H, W >= 32.

    ResNet-50 halves height and width five times, from 32 pixels to one.
    """
    x = images.to(dtype).expand(-1, 3, -1, -1)
    mean, std = mean_and_std(dtype, x.device)
    height, width = (max(32 - side, 0) for side in x.shape[2:])
    padding = (width // 2, width - width // 2, height // 2, height - height // 2)
    return F.pad(x, padding).sub(mean).div_(std)


class PipelineLayout(NamedTuple):
    """How the processes share the model and the batch."""

    num_stages: int  # processes in a pipeline, or devices of one process
    devices: list[torch.device]  # of this process
    replicas: int  # of the pipeline
    replica: int  # which of them this process belongs to
    accumulation: int  # micro-batches of each replica in one step
    micro_batch_size: int


def choose_layout(args, accelerator) -> PipelineLayout:
    processes = accelerator.num_processes
    devices = [accelerator.device]
    if processes == 1 and accelerator.device.type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    num_stages = args.num_stages or max(processes, len(devices))
    replicas = 1 if processes == 1 else processes // num_stages
    accumulation = args.num_microbatches * args.gradient_accumulation_steps
    return PipelineLayout(
        num_stages=num_stages,
        devices=devices,
        replicas=replicas,
        replica=accelerator.process_index // num_stages,
        accumulation=accumulation,
        micro_batch_size=args.batch_size // max(accumulation * replicas, 1),
    )


def check_layout(args, layout: PipelineLayout, accelerator) -> None:
    """Check that the flags suit the number of processes.

    Raises:
        SystemExit: if not.
    """
    processes, num_stages = accelerator.num_processes, layout.num_stages
    if accelerator.distributed_type == DistributedType.FSDP or accelerator.scaler is not None:
        stop("a split model works neither with FSDP nor in fp16: use ddp.yaml with mixed_precision no or bf16")
    if processes > 1 and torch.__version__ < (2, 11, 99):  # 2.12.0a0 comes before 2.12
        stop(f"model_split.py over several processes needs torch 2.12 or newer, and this is {torch.__version__}")
    if processes > 1 and processes % num_stages:
        stop(f"{processes} processes are not divisible by --num_stages {num_stages}")
    if processes > 1 and num_stages == 1:
        stop("--num_stages 1 on several processes does not split the model: use another value, or resnet50.py")
    if layout.num_stages > len(BLOCKS):
        stop(f"{layout.num_stages} stages are more than the {len(BLOCKS)} blocks of ResNet-50")
    micro_batches = layout.accumulation * layout.replicas
    if args.batch_size % micro_batches:
        stop(
            f"--batch_size {args.batch_size} is not divisible by {plural(layout.replicas, 'pipeline')} x "
            f"{plural(args.num_microbatches, 'micro-batch')} x "
            f"{plural(args.gradient_accumulation_steps, 'accumulation step')}: use a multiple of {micro_batches}"
        )
    if args.split != ["auto"]:
        first_blocks = [BLOCKS.index(name) if name in BLOCKS else -1 for name in args.split]
        in_order = first_blocks == sorted(set(first_blocks)) and min(first_blocks) > 0
        if len(first_blocks) != layout.num_stages - 1 or not in_order:
            stop(
                f"--split {' '.join(args.split)} must be {plural(layout.num_stages - 1, 'block')} "
                f"in order, for {plural(layout.num_stages, 'stage')}; the blocks are {' '.join(BLOCKS[1:])}"
            )


def check_batch_norm(args, layout, train_data, total_steps: int) -> None:
    """Check that BatchNorm gets more than one value per channel: several images, or several pixels.

    Raises:
        SystemExit: if a micro-batch has one image that is one pixel at the end of the model.
    """
    if args.norm != "batch" or max(train_data.tensors[0].shape[2:]) > 32:
        return
    smallest = layout.micro_batch_size
    last_step = len(train_data) % args.batch_size
    if last_step and total_steps * args.batch_size >= len(train_data):
        smallest = last_step // (layout.accumulation * layout.replicas)
    if smallest < 2:
        stop(
            f"--batch_size {args.batch_size} leads to micro-batches of one sample, with one pixel at the end, which "
            "BatchNorm cannot normalise: use fewer --num_microbatches, a different batch size, or --norm group"
        )


def split_model(args, layout, train_data, accelerator, is_resumed):
    """Make the model and split it. Collective.

    Returns:
        The results of make_pipeline, and a table of the stages.
    """
    resnet = make_resnet(len(train_data.classes), args.norm).to(getattr(torch, args.dtype))
    if args.pretrained and not is_resumed:
        load_pretrained(resnet, args.pretrained, head="fc")
    items = torch.arange(layout.micro_batch_size) % len(train_data)
    images = train_data.tensors[0][items].to(accelerator.device)
    with accelerator.autocast():
        costs = measure_blocks({block: Stage(resnet, [block]) for block in BLOCKS}, images)
    if args.split == ["auto"]:
        blocks = balance_stages(costs, layout.num_stages)
    else:
        boundaries = [0, *(BLOCKS.index(name) for name in args.split), len(BLOCKS)]
        blocks = [BLOCKS[first:last] for first, last in itertools.pairwise(boundaries)]
    examples = [images.to("meta"), *(costs[names[-1]].output for names in blocks)]
    parts = make_pipeline(resnet, blocks, examples, args.schedule, layout.num_stages, accelerator, layout.devices)
    return *parts, stage_table(blocks, costs)


def make_pipeline(resnet, blocks, examples, schedule, num_stages, accelerator, devices):
    """Put the stages of this process on its devices. Collective.

    Args:
        blocks: the names of the blocks of each stage.
        examples: a micro-batch as the input of the first stage, and as the output of each stage, on the meta device.
        num_stages: processes, or devices of one process, in a pipeline.
        devices: of this process.

    Returns:
        The part of the model on this process; the pipeline that runs it; and the process group of all replicas of this
        part, None if there is only one.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    if processes == 1:
        devices = [devices[index % len(devices)] for index in range(num_stages)]
        stages = [Stage(resnet, names).to(device) for names, device in zip(blocks, devices, strict=True)]
        # The same modules in one object, for the optimizer and the checkpoints.
        model = Stage(resnet, BLOCKS)
        # naive: no overlap; gpipe: all forward passes first.
        max_in_flight = {"naive": 1, "gpipe": sys.maxsize}.get(schedule, num_stages)
        return model, OneProcess(stages, devices, max_in_flight), None
    replicas = processes // num_stages
    ranks = torch.arange(processes).view(replicas, num_stages)
    timeout = accelerator.init_handler and accelerator.init_handler.timeout
    # nccl-lazy makes a communicator for each pair of neighbours; with one for all, their transfers wait for each other.
    backend = "nccl-lazy" if accelerator.device.type == "cuda" else None
    stage_group, _ = new_subgroups_by_enumeration(ranks.tolist(), timeout, backend)
    replica_group, _ = new_subgroups_by_enumeration(ranks.T.tolist(), timeout) if replicas > 1 else (None, None)
    index = rank % num_stages
    model = Stage(resnet, blocks[index]).to(devices[0])
    return model, OverProcesses(model, index, examples, schedule, stage_group, accelerator.device), replica_group


def make_loss_fn(count):
    """The function that the last stage calls with the logits and the Batch of a micro-batch.

    Args:
        count: run.log_train, or `add` of a test's metrics.
    """

    def loss_fn(logits, batch):
        _, labels = batch.data
        labels = labels.to(logits.device, non_blocking=True)
        losses = F.cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(1) == labels
        device = batch.indices.device  # with several GPUs in one process, the first stage's
        count(batch, loss=losses.detach().to(device), accuracy=correct.to(device))
        return batch.mean_loss(losses)  # scaled so that gradients of micro-batches and replicas can be summed

    return loss_fn


@torch.no_grad()
def evaluate(model, pipeline, loader, run) -> dict:
    """Loss and accuracy over all test samples, run through the pipeline; each counts once."""
    model.eval()
    metrics = run.new_metrics()
    loss_fn = make_loss_fn(metrics.add)
    for micro_batches in run.test_steps(loader):
        with run.accelerator.autocast():
            images = [batch.data[0] for batch in micro_batches]
            pipeline.run(images, run.seeded(micro_batches), loss_fn)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, args.cpu_threads or None, split_batch=False)
    layout = choose_layout(args, accelerator)
    check_layout(args, layout, accelerator)
    if args.norm == "batch":  # BatchNorm depends on it, so it must be the same when resuming, as a flag must
        args.micro_batch_size = layout.micro_batch_size
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    # All processes of a pipeline get the same samples: the first stage needs the images, the last stage the labels.
    shares = {"shard": (layout.replica, layout.replicas), "accumulation": layout.accumulation}
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed, **shares)
    test_loader = GlobalLoader(test_data, args.batch_size, accelerator, max_samples=args.max_test_samples, **shares)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)
    check_batch_norm(args, layout, train_data, total_steps)

    is_resumed = run.folder.has_checkpoint
    model, pipeline, replica_group, table = split_model(args, layout, train_data, accelerator, is_resumed)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    # Without the model, which DDP would broadcast and reduce as if it were the same on all processes.
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)

    filling = plural(args.num_microbatches, "micro-batch")
    parts = ModelParts(
        batch=f"{layout.micro_batch_size} per micro-batch x {filling} x {plural(layout.replicas, 'pipeline')}",
        notes={"num_stages": layout.num_stages, "replicas": layout.replicas, "stages": table},
    )
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint, model_parts=parts)
    for stage in table:
        row = "stage {stage}: {blocks}, {parameters:,} parameters, {time_ms} ms per micro-batch ({time_share:.0%})"
        accelerator.print(row.format(**stage), flush=True)

    loss_fn = make_loss_fn(run.log_train)
    for epoch in run.epochs():
        model.train()
        for micro_batches in run.steps(train_loader, epoch):
            with accelerator.autocast():
                for first in range(0, len(micro_batches), args.num_microbatches):
                    batches = micro_batches[first : first + args.num_microbatches]
                    images = [batch.data[0] for batch in batches]
                    pipeline.run(images, run.seeded(batches), loss_fn)
            sum_over_replicas(model, replica_group)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.log_test(evaluate(model, pipeline, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
