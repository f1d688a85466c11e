"""Data parallel training by hand: what DistributedDataParallel does, beside two things that it does not do.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/ddp_from_scratch.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/ddp_from_scratch.py --algorithm ring

On 2 processes and 2 CPU cores, torch 2.15: one_by_one, bucketed and ring end with DDP's weights, bit by bit, and with
94.54 % test accuracy after 2 epochs, local_sgd 94.58 %, stale 94.83 %; a step takes ddp 8.4 ms and local_sgd 4.2 ms.
Sources: buckets, https://arxiv.org/abs/2006.15704; ring, P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
algorithms", 2009; local SGD, https://arxiv.org/abs/1805.09767; stale gradients, https://arxiv.org/abs/1511.05950.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import launch, show
from utils.data import BUNDLED_MNIST, GlobalBatches, load_images
from utils.metrics import SampleStats
from utils.tracking import Tracker, write_json

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675


def losses_and_hits(model, batch):
    """Of the share of this process, one each for a sample: it may have fewer samples than others, or none."""
    logits = model((batch.images.to(next(model.parameters()).dtype) - MEAN) / STD)
    return nn.functional.cross_entropy(logits, batch.labels, reduction="none"), logits.argmax(1) == batch.labels


def backward(model, batch, scale=1):
    """The share's part of the gradient: over the processes, these add up to that of the mean over the whole batch."""
    (losses_and_hits(model, batch)[0].sum() * scale / batch.update_size).backward()


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # None would take the gradients out of the buckets


def ddp(model, optimizer, batches, args):
    """PyTorch's DistributedDataParallel, to compare with."""
    model = nn.parallel.DistributedDataParallel(model)
    for batch in batches:
        backward(model, batch, scale=dist.get_world_size())  # undo that it divides by the processes
        update(optimizer)


def one_by_one(model, optimizer, batches, args, all_reduce=dist.all_reduce):
    """One all-reduce for each parameter, after the backward pass."""
    for batch in batches:
        backward(model, batch)
        for parameter in model.parameters():
            all_reduce(parameter.grad)
        update(optimizer)


def bucketed(model, optimizer, batches, args):
    """A bucket of gradients for each layer, sent while the backward pass goes on to earlier layers."""
    sending = []

    def make_bucket(parameters):
        bucket, ready = next(model.parameters()).new_zeros(sum(p.numel() for p in parameters)), []
        for parameter, piece in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)  # the backward pass adds into the bucket: nothing to copy

            @parameter.register_post_accumulate_grad_hook
            def send_if_full(parameter):
                ready.append(parameter)
                if len(ready) % len(parameters) == 0:
                    sending.append(dist.all_reduce(bucket, async_op=True))

    for layer in model:  # DDP fills its buckets up to 25 MiB, over as many layers as it takes
        make_bucket(list(layer.parameters()))
    for batch in batches:
        backward(model, batch)
        while sending:
            sending.pop().wait()
        update(optimizer)


def ring_all_reduce(tensor):
    """Sum over the n processes, in place. Each sends 2 (n-1)/n of the tensor, however many they are."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(n)  # views; not all as long, and some empty, where n does not divide

    def pass_on(outgoing, incoming):  # both at once: if all sent first, all would wait for a receiver
        both = [dist.P2POp(dist.isend, outgoing, (rank + 1) % n), dist.P2POp(dist.irecv, incoming, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    for step in range(n - 1):  # reduce-scatter: a chunk collects the sum on its way; rank r ends with chunk r+1
        chunk = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(chunk)
        pass_on(chunks[(rank - step) % n], incoming)
        chunk += incoming
    for step in range(n - 1):  # all-gather: the finished chunks go around once more
        pass_on(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])


def ring(*training):
    """The same with an all-reduce by hand: send to the right, receive from the left."""
    one_by_one(*training, all_reduce=ring_all_reduce)


def local_sgd(model, optimizer, batches, args):
    """Not the same updates: each trains on its share alone; every --local_steps, weights are averaged."""

    def average_weights():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    for step, batch in enumerate(batches, 1):
        backward(model, batch, scale=dist.get_world_size())  # its gradient is as long as that of the whole batch
        update(optimizer)
        if step % args.local_steps == 0:
            average_weights()
    average_weights()


def stale(model, optimizer, batches, args):
    """Not the same updates: nobody waits for the others' gradients, which are applied --delay updates late."""
    sending = []

    def apply_oldest():
        for parameter, (gradient, work) in zip(model.parameters(), sending.pop(0), strict=True):
            work.wait()
            parameter.grad = gradient
        update(optimizer)

    for batch in batches:
        backward(model, batch)
        sending.append([(p.grad, dist.all_reduce(p.grad, async_op=True)) for p in model.parameters()])
        optimizer.zero_grad()  # None: the next backward pass makes new gradients, these are on their way
        if len(sending) > args.delay:
            apply_oldest()
    while sending:
        apply_oldest()


ALGORITHMS = {f.__name__: f for f in (ddp, one_by_one, bucketed, ring, local_sgd, stale)}


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    size, add = launch.at_least(1), parser.add_argument_group("algorithm").add_argument
    add("--algorithm", choices=["all", *ALGORITHMS], default="all", help="ddp always runs, to compare with")
    add("--local_steps", type=size, default=8, help="local_sgd: updates between two averages")
    add("--delay", type=launch.at_least(0), default=4, help="stale: updates that a gradient comes late; 0: not")
    add = parser.add_argument_group("training").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--num_epochs", type=size, default=2, help="passes over the training images")
    add("--batch_size", type=size, default=256, help="of one update, over all processes together")
    add("--lr", type=launch.at_least(0.0, float), default=0.1, help="learning rate")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of weights and data order")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare to 1e-12")
    parser.add_run_flags()
    parser.set_defaults(gradient_accumulation_steps=1, log_with=None, resume=None)  # launch and Tracker read them
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # matrices this small lose by a second thread
    if not dist.is_initialized():  # one process: a group of one, in which a sum is what it was
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    tracker = Tracker(accelerator, args)

    train_data, test_data = load_images(args.dataset)
    # Every process shuffles alike and takes its own piece of each batch: nothing twice, nothing left out.
    train_batches = GlobalBatches(train_data, args.batch_size, accelerator, args.seed)
    test_batches = GlobalBatches(test_data, 2000, accelerator)
    results, reference = {}, None
    accelerator.print("algorithm   ms/step  weights-DDP  accuracy  what it does", flush=True)
    for name in ALGORITHMS if args.algorithm == "all" else dict.fromkeys(["ddp", args.algorithm]):
        torch.manual_seed(args.seed + accelerator.process_index)  # other weights in each process ...
        shape = train_data.images[0].numel(), 256, len(train_data.classes)
        model = nn.Sequential(nn.Flatten(), nn.Linear(*shape[:2]), nn.SiLU(), nn.Linear(*shape[1:]))
        model.to(accelerator.device, getattr(torch, args.dtype))
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)  # ... until process 0 gives them its own

        optimizer = torch.optim.SGD(model.parameters(), args.lr)
        batches = (batch for epoch in range(args.num_epochs) for batch in train_batches.epoch(epoch))
        started = time.perf_counter()
        ALGORITHMS[name](model, optimizer, batches, args)
        dist.barrier()  # so that the slowest process counts
        step_time_ms = 1000 * (time.perf_counter() - started) / (args.num_epochs * len(train_batches))

        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        reference = weights if name == "ddp" else reference
        # Over all processes: one that went astray shows.
        dist.all_reduce(difference := (weights - reference).abs().max(), dist.ReduceOp.MAX)
        stats = SampleStats(accelerator)
        with torch.no_grad():
            for batch in test_batches.epoch():
                stats.add(*losses_and_hits(model, batch), batch.indices)
        results[name] = {"step_time_ms": step_time_ms, "difference_to_ddp": difference.item(), **stats.reduce()}
        numbers = f"{step_time_ms:>8.2f} {difference.item():>11.1e} {results[name]['accuracy']:>9.2%}"
        accelerator.print(f"{name:<10} {numbers}  {ALGORITHMS[name].__doc__}", flush=True)

    record = {"arguments": vars(args), **launch.describe(accelerator), "results": results}
    if accelerator.is_main_process:
        write_json(tracker.folder / "run.json", record)
        show(f"done: these numbers, arguments and topology in {tracker.folder}/run.json", "green")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
