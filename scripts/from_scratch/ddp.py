"""What DistributedDataParallel does, written by hand, and two methods that train differently.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/from_scratch/ddp.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/from_scratch/ddp.py \
        --algorithm bucketed --bucket_kib 1 64 1024 25600 --layers 8

On 2 processes and 2 CPU cores, torch 2.15: one_by_one, reduce_broadcast, flat_copy, bucketed and ring end with exactly
the weights of DDP, and reach 94.54 % test accuracy after 2 epochs; local_sgd reaches 94.58 % and stale 94.83 %. A step
of ddp takes 8.4 ms, a step of local_sgd 4.2 ms.
Sources: buckets, https://arxiv.org/abs/2006.15704; ring, P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
algorithms", 2009; local SGD, https://arxiv.org/abs/1805.09767; stale gradients, https://arxiv.org/abs/1511.05950.
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from pictures import save_picture  # the file beside this one

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import plural, show
from utils.data.images import load_images
from utils.loader import GlobalLoader
from utils.metrics import Metrics
from utils.run_folder import RunFolder

MEAN, STD = 33.3184, 78.5675  # of the pixels of the 60,000 training images, 0 to 255
HIDDEN = 256
TEST_BATCH_SIZE = 2000


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    algorithm = parser.add_argument_group("algorithm")
    algorithm.add_argument(
        "--algorithm",
        choices=["all", *ALGORITHMS],
        default="all",
        metavar="NAME",
        help=f"{', '.join(ALGORITHMS)} or all; ddp always runs, to compare with",
    )
    algorithm.add_argument(
        "--bucket_kib",
        type=flags.positive_int,
        nargs="+",
        default=[64],
        metavar="KIB",
        help="bucketed: size of the largest bucket, one run for each; DDP has 25600 (default: 64)",
    )
    algorithm.add_argument("--local_steps", type=flags.positive_int, default=8, help="local_sgd: steps per average")
    algorithm.add_argument(
        "--delay", type=flags.non_negative_int, default=4, help="stale: steps of delay of a gradient"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of <split>/<class>/ images")
    training.add_argument("--layers", type=flags.positive_int, default=1, help="hidden layers of the model")
    training.add_argument("--num_epochs", type=flags.positive_int, default=2, help="passes over the training images")
    training.add_argument(
        "--batch_size", type=flags.positive_int, default=256, help="samples per step, over all processes"
    )
    training.add_argument("--lr", type=flags.non_negative_float, default=0.1, help="learning rate")
    training.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32", help="float64: weights equal DDP's to 1e-12"
    )
    parser.add_run_flags()
    return parser.parse_args()


def losses_and_hits(model, batch):
    """Loss and correctness of each sample, both (n,), for this process's part of the batch."""
    images, labels = batch.data
    dtype = next(model.parameters()).dtype
    logits = model((images.to(dtype) - MEAN) / STD)
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels


def backward(model, batch, scale=1):
    """Backward pass for this process's part of the batch.

    The sum of all processes' gradients is the gradient of the mean over the whole batch.
    """
    losses, _ = losses_and_hits(model, batch)
    loss = batch.mean_loss(losses) / batch.grad_divisor  # undo the factor that mean_loss has for DDP
    (loss * scale).backward()


def make_step(optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # None would take the gradients out of the buckets


# The algorithms. Each trains `model` on `batches`, of which every process gets its own part.


def ddp(model, optimizer, batches, args):
    """PyTorch's DistributedDataParallel, to compare with"""
    model = nn.parallel.DistributedDataParallel(model)
    for batch in batches:
        # DDP divides the sum of the gradients by the number of processes.
        backward(model, batch, scale=dist.get_world_size())
        make_step(optimizer)


def one_by_one(model, optimizer, batches, args, all_reduce=dist.all_reduce):
    """one all-reduce for each parameter, after the backward pass"""
    for batch in batches:
        backward(model, batch)
        for parameter in model.parameters():
            all_reduce(parameter.grad)
        make_step(optimizer)


def reduce_broadcast(model, optimizer, batches, args):
    """each gradient is summed on rank 0 (reduce), and sent from there to all (broadcast)"""

    def through_rank_0(gradient):
        dist.reduce(gradient, dst=0)
        dist.broadcast(gradient, src=0)

    one_by_one(model, optimizer, batches, args, all_reduce=through_rank_0)


def flat_copy(model, optimizer, batches, args):
    """one all-reduce of a flat copy of all gradients, after the backward pass"""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    for batch in batches:
        backward(model, batch)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        make_step(optimizer)


def make_buckets(parameters, bucket_kib):
    """Lists of parameters, each of up to `bucket_kib`; a larger parameter is alone in its list.

    The backward pass computes the gradients of the last layers first, so these make the first bucket.
    """
    buckets, room = [], 0
    for parameter in reversed(list(parameters)):
        if not buckets or parameter.nbytes > room:
            buckets.append([])
            room = 1024 * bucket_kib
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def fill_buckets(model, bucket_kib, send):
    """Have gradients written to buckets, and `send(bucket, parameters)` called as soon as a bucket is full."""

    def fill(parameters):
        sizes = [parameter.numel() for parameter in parameters]
        bucket = parameters[0].new_zeros(sum(sizes))
        ready = []

        def send_if_full(parameter):
            ready.append(parameter)
            if len(ready) == len(parameters):
                ready.clear()
                send(bucket, parameters)

        for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
            # The backward pass adds to the gradient in place: nothing is copied into the bucket.
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(send_if_full)

    for parameters in make_buckets(model.parameters(), bucket_kib):
        fill(parameters)


def bucketed(model, optimizer, batches, args, bucket_kib):
    """buckets of gradients of several layers, each sent while the backward pass goes on"""
    sending = []
    fill_buckets(model, bucket_kib, lambda bucket, _: sending.append(dist.all_reduce(bucket, async_op=True)))
    for batch in batches:
        backward(model, batch)
        for work in sending:
            work.wait()
        sending.clear()
        make_step(optimizer)


def ring_all_reduce(tensor):
    """Sum over the n processes, in place.

    Each process sends 2 (n-1)/n of the tensor, whatever n is.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # Views. If n does not divide the length, they differ in length and some may be empty.
    chunks = tensor.view(-1).tensor_split(n)

    def pass_on(outgoing, incoming):
        # Both at once: if all processes sent first, all would wait for a receiver.
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    # Reduce-scatter: each chunk is passed around the ring, and every process adds its own values.
    # At the end rank r has the sum of chunk r + 1.
    for step in range(n - 1):
        chunk = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(chunk)
        pass_on(chunks[(rank - step) % n], incoming)
        chunk += incoming
    # All-gather: the sums are passed around the ring once.
    for step in range(n - 1):
        pass_on(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])


def ring(model, optimizer, batches, args):
    """as one_by_one, with an all-reduce by hand: send to the right, receive from the left"""
    one_by_one(model, optimizer, batches, args, all_reduce=ring_all_reduce)


def local_sgd(model, optimizer, batches, args):
    """different steps: each process trains on its own; weights are averaged every --local_steps"""

    def average_weights():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    for step, batch in enumerate(batches, 1):
        # Scaled to the length of the gradient of the whole batch.
        backward(model, batch, scale=dist.get_world_size())
        make_step(optimizer)
        if step % args.local_steps == 0:
            average_weights()
    average_weights()


def stale(model, optimizer, batches, args):
    """different steps: gradients are applied --delay steps late, and waited for only then"""
    sending = []

    def apply_oldest():
        for parameter, (gradient, work) in zip(model.parameters(), sending.pop(0), strict=True):
            work.wait()
            parameter.grad = gradient
        make_step(optimizer)

    for batch in batches:
        backward(model, batch)
        gradients = [parameter.grad for parameter in model.parameters()]
        sending.append([(gradient, dist.all_reduce(gradient, async_op=True)) for gradient in gradients])
        # None, so that the next backward pass makes new tensors: these are still being sent.
        optimizer.zero_grad()
        if len(sending) > args.delay:
            apply_oldest()
    while sending:
        apply_oldest()


SAME_STEPS = (ddp, one_by_one, reduce_broadcast, flat_copy, bucketed, ring)
ALGORITHMS = {function.__name__: function for function in (*SAME_STEPS, local_sgd, stale)}


def make_runs(args) -> list[tuple[str, int | None]]:
    """The name of each run's algorithm and, for `bucketed`, the size of its buckets."""
    names = ALGORITHMS if args.algorithm == "all" else dict.fromkeys(["ddp", args.algorithm])
    return [(name, size) for name in names for size in (args.bucket_kib if name == "bucketed" else [None])]


def make_model(args, accelerator, num_inputs: int, num_classes: int):
    """An MLP with the same weights in each process. Collective."""
    torch.manual_seed(args.seed + accelerator.process_index)  # different weights in each process ...
    layers = [nn.Flatten(), nn.Linear(num_inputs, HIDDEN), nn.SiLU()]
    for _ in range(args.layers - 1):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, num_classes))
    model.to(accelerator.device, getattr(torch, args.dtype))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # ... until rank 0 sends its own
    return model


@torch.no_grad()
def evaluate(model, loader, accelerator) -> dict:
    """Loss and accuracy; each test sample counts once. Collective."""
    metrics = Metrics(accelerator)
    for batch in loader:
        losses, hits = losses_and_hits(model, batch)
        metrics.add(batch, loss=losses, accuracy=hits)
    return metrics.reduce()


def passed_on(model, batch) -> list[tuple[float, float]]:
    """What DDP's last layer passes to the layer before, and the gradient of its own weights. Collective.

    Some say that DDP passes the averaged gradient on. It does not: on each rank the backward pass continues with the
    gradient of that rank's samples, and only the gradients of the weights are averaged.

    Returns:
        For each rank: the sum of the gradient passed on, and the sum of the absolute gradients of the layer's weights.
    """
    model = nn.parallel.DistributedDataParallel(model)
    layer, passed_sums = model.module[-1], []
    layer.register_full_backward_hook(lambda layer, passed, received: passed_sums.append(passed[0].sum()))
    backward(model, batch, scale=dist.get_world_size())
    sums = torch.stack([*passed_sums, layer.weight.grad.abs().sum()])
    sums_of_ranks = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(sums_of_ranks, sums)
    return [tuple(sums.tolist()) for sums in sums_of_ranks]


def record_overlap(model, batch, bucket_kib) -> list[dict]:
    """When gradients are computed and buckets are sent, in the fastest of ten backward passes on a CPU. Collective.

    Returns:
        For each rank, by the clock of their machine: "gradients": (name of the parameter, ms when computed), last layer
        first; "buckets": (names of the first and the last parameter, ms when sent, ms when summed).
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients, buckets, sending, passes = [], [], [], []

    def now_ms():
        return 1000 * (time.perf_counter() - began)

    def send(bucket, parameters):
        first_and_last = dict.fromkeys([names[parameters[0]], names[parameters[-1]]])
        span = [" .. ".join(first_and_last), now_ms()]
        work = dist.all_reduce(bucket, async_op=True)
        sending.append(work.get_future().then(lambda _: span.append(now_ms())))
        buckets.append(span)

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.append((names[p], now_ms())))
    fill_buckets(model, bucket_kib, send)
    for _ in range(10):
        model.zero_grad(set_to_none=False)
        losses, _ = losses_and_hits(model, batch)
        dist.barrier()
        start = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.broadcast(start, src=0)  # for times of all ranks on one axis
        began = start.item()
        losses.mean().backward()
        for done in sending:
            done.wait()
        passes.append((now_ms(), {"gradients": gradients.copy(), "buckets": buckets.copy()}))
        for record in (gradients, buckets, sending):
            record.clear()
    passes_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(passes_of_ranks, passes)
    fastest = min(zip(*passes_of_ranks, strict=True), key=lambda ranks: max(ms for ms, _ in ranks))
    return [overlap for _, overlap in fastest]


def draw_overlap(overlaps: list[dict], title: str):
    """For each rank a bar for its backward pass, divided where a gradient was ready; and below, in its colour, a bar
    for each bucket's all-reduce, from where this rank sent it. It ends when both have sent theirs."""
    from matplotlib.figure import Figure

    overlaps, names = overlaps[:2], [name for name, *_ in overlaps[0]["buckets"]]
    figure = Figure(figsize=(10, 1.6 + 0.4 * (len(overlaps) + len(names))), layout="constrained")
    axes = figure.subplots()
    for rank, overlap in enumerate(overlaps):
        colour = f"C{rank}"
        before_ms = 0
        for _, ms in overlap["gradients"]:
            axes.barh(rank, ms - before_ms, left=before_ms, color=colour, edgecolor="white", linewidth=0.5)
            before_ms = ms
        axes.axvline(before_ms, color=colour, linewidth=1, linestyle=":")
        height = 0.8 / len(overlaps)
        for row, (_, sent_ms, done_ms) in enumerate(overlap["buckets"], len(overlaps)):
            place = row + height * (rank - (len(overlaps) - 1) / 2)
            axes.barh(place, done_ms - sent_ms, height, left=sent_ms, color=colour)
    labels = [f"rank {rank}: gradients, last layer first" for rank in range(len(overlaps))] + names
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set(xlabel="ms since the backward pass began; dotted lines: its end on each rank", title=title)
    axes.invert_yaxis()
    return figure


def draw(results: dict, title: str):
    """A bar for each run: the time per step; the colour says whether its steps are the same as DDP's."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 2 + 0.35 * len(results)), layout="constrained")
    axes = figure.subplots()
    same, different = "#0072b2", "#d55e00"
    names = []
    for run, result in results.items():
        count = result["buckets"]
        names.append(f"{run}: {plural(count, 'bucket')}" if count else run)
    times = [result["step_time_ms"] for result in results.values()]
    colours = [same if result["same_steps"] else different for result in results.values()]
    axes.bar_label(axes.barh(names, times, color=colours), fmt=" {:.1f}")
    axes.set(xlabel="ms per step, slowest process", title=title, xlim=(0, 1.15 * max(times)))
    axes.invert_yaxis()
    handles = [Patch(color=same, label="same steps as DDP"), Patch(color=different, label="different steps")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # a second thread would slow matrices this small down
    if not dist.is_initialized():  # one process: a group of one, in which a sum changes nothing
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    train_data, test_data = load_images(args.dataset)
    # All processes use the same order, and each takes its part of every batch, so that each sample is used once.
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    images, _ = train_data.tensors
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator)
    new_model = partial(make_model, args, accelerator, images[0].numel(), len(train_data.classes))
    results = {}
    accelerator.print("algorithm           ms/step  max |w-DDP|  accuracy  what it does", flush=True)
    for name, bucket_kib in make_runs(args):
        run = f"{name} {bucket_kib} KiB" if bucket_kib and len(args.bucket_kib) > 1 else name
        algorithm = partial(bucketed, bucket_kib=bucket_kib) if bucket_kib else ALGORITHMS[name]
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), args.lr)
        batches = (batch for epoch in range(args.num_epochs) for batch in train_loader.epoch(epoch))
        started = time.perf_counter()
        algorithm(model, optimizer, batches, args)
        dist.barrier()  # the slowest process counts
        step_time_ms = 1000 * (time.perf_counter() - started) / (args.num_epochs * len(train_loader))
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        if name == "ddp":
            reference = weights
        difference = (weights - reference).abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)  # over all processes, so that none has different weights
        results[run] = {
            "step_time_ms": step_time_ms,
            "difference_to_ddp": difference.item(),
            "same_steps": ALGORITHMS[name] in SAME_STEPS,
            "buckets": bucket_kib and len(make_buckets(model.parameters(), bucket_kib)),
            **evaluate(model, test_loader, accelerator),
        }
        numbers = f"{step_time_ms:>8.2f} {difference.item():>11.1e} {results[run]['accuracy']:>9.2%}"
        accelerator.print(f"{run:<18} {numbers}  {ALGORITHMS[name].__doc__}", flush=True)

    sums = passed_on(new_model(), next(iter(train_loader.epoch(0))))
    accelerator.print("DDP's last layer: sum of the gradient that it passes on, sum of |gradient| of its weights")
    for rank, (passed, of_weights) in enumerate(sums):
        accelerator.print(f"  rank {rank}: {passed:>9.6f}  {of_weights:.6f}", flush=True)
    overlap = None
    if accelerator.device.type == "cpu":  # the times of a GPU need torch.profiler
        overlap = record_overlap(new_model(), next(iter(train_loader.epoch(0))), args.bucket_kib[0])
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    if accelerator.is_main_process:
        write_json(folder.path / "run.json", {**facts, "results": results, "passed_on": sums, "overlap": overlap})
        title = f"{plural(args.layers, 'hidden layer')}, {plural(accelerator.num_processes, 'process')}"
        save_picture(folder.path / "times.png", lambda: draw(results, title))
        title = f"Buckets of up to {args.bucket_kib[0]} KiB during the backward pass"
        if overlap is not None:
            save_picture(folder.path / "buckets.png", lambda: draw_overlap(overlap, title))
        show(f"done: these numbers and pictures are in {folder.path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
