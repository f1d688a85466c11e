"""Asynchronous SGD with a parameter server, compared with three ways in which processes wait for each other.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 4 scripts/from_scratch/async_sgd.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 4 \
        scripts/from_scratch/async_sgd.py --stragglers last any

Rank 0 is the server, which only `asynchronous` uses; the other ranks are workers, each with its share of MNIST. One
worker sleeps in each step: always the last one, or a random one. All ways train on the same number of samples with the
same learning rate, and the script draws the test accuracy over time. It runs on the CPU, because receiving from any
source needs gloo.

3 workers on 2 busy cores, the last one 20 ms late: 97 % test accuracy after 11 s with `asynchronous`, 18 s with `local`
and 22 s with the others. With a random one late: `local` 11 s, `asynchronous` 15 s, `stale` 16 s, `synchronous` 20 s.
Sources: asynchronous SGD, https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks; local SGD,
https://arxiv.org/abs/1805.09767; stale gradients, https://arxiv.org/abs/1511.05950.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from pictures import save_picture  # the file beside this one

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import plural, show, stop
from utils.data.images import load_images
from utils.run_folder import RunFolder

MEAN, STD = 33.3184, 78.5675  # of the pixels of the 60,000 training images, 0 to 255
SERVER = 0  # rank
STOP = -1  # sent instead of a version


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    ways = parser.add_argument_group("ways")
    ways.add_argument(
        "--sleep_ms", type=flags.non_negative_float, default=20.0, help="the slow worker's sleep per step"
    )
    ways.add_argument(
        "--stragglers",
        nargs="+",
        choices=("last", "any"),
        default=["last"],
        help="slow worker: the last one, or a random one in each step; both: one run of each (default: last)",
    )
    ways.add_argument("--local_steps", type=flags.positive_int, default=8, help="local: steps between two averages")
    ways.add_argument("--delay", type=flags.non_negative_int, default=1, help="stale: steps of delay of a gradient")
    training = parser.add_argument_group("training")
    training.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of <split>/<class>/ images")
    training.add_argument("--num_epochs", type=flags.positive_int, default=3, help="passes over the training images")
    training.add_argument("--worker_batch_size", type=flags.positive_int, default=64, help="samples per gradient")
    training.add_argument("--hidden", type=flags.positive_int, default=128, help="hidden units")
    training.add_argument(
        "--lr", type=flags.non_negative_float, default=0.2, help="learning rate for the mean gradient"
    )
    training.add_argument("--target", type=flags.non_negative_float, default=0.97, help="test accuracy to be reached")
    training.add_argument("--test_every", type=flags.positive_int, default=16, help="steps between two tests")
    parser.add_run_flags()
    return parser.parse_args()


class Trainee:
    """A model whose parameters are views of one flat tensor, `weights`."""

    def __init__(self, args, data):
        num_inputs, num_classes = data.tensors[0][0].numel(), len(data.classes)
        torch.manual_seed(args.seed)  # the same weights in each process
        layers = [nn.Flatten(), nn.Linear(num_inputs, args.hidden), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(args.hidden, num_classes))
        parameters = list(self.model.parameters())
        self.weights = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.weights, parameters)
        self.history = []  # (time, weights), tested after training

    def logits(self, images):
        return self.model((images.float() - MEAN) / STD)

    def keep_weights(self):
        self.history.append((time.perf_counter(), self.weights.clone()))


class Worker(Trainee):
    """A trainee with its share of the data.

    Args:
        worker: from 0 to num_workers - 1.
        straggler: which worker is slow, "last" or "any".
        group: the process group of all workers, without the server.
    """

    def __init__(self, args, data, worker: int, num_workers: int, straggler: str, group=None):
        super().__init__(args, data)
        self.args, self.group = args, group
        self.worker, self.num_workers, self.straggler = worker, num_workers, straggler
        self.images, self.labels = (tensor[worker::num_workers] for tensor in data.tensors)
        self.order = torch.Generator().manual_seed(args.seed + 1 + worker)
        self.sleeper = torch.Generator().manual_seed(args.seed)  # the same in all workers
        self.remaining = torch.empty(0, dtype=torch.int64)  # indices of samples that this epoch has not used
        self.num_steps = steps_per_worker(args, data, num_workers)

    def sleeps(self) -> bool:
        """Whether this worker is the slow one in its next step."""
        slow = int(torch.randint(self.num_workers, (1,), generator=self.sleeper))
        if self.straggler == "last":
            slow = self.num_workers - 1
        return slow == self.worker

    def gradient(self) -> torch.Tensor:
        """The flat gradient of the next batch's mean loss, at the current weights."""
        if self.sleeps():
            time.sleep(self.args.sleep_ms / 1000)
        size = self.args.worker_batch_size
        if len(self.remaining) < size:
            self.remaining = torch.randperm(len(self.images), generator=self.order)
        batch, self.remaining = self.remaining[:size], self.remaining[size:]
        loss = F.cross_entropy(self.logits(self.images[batch]), self.labels[batch])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])

    def keep_weights_at(self, step: int):
        if step % self.args.test_every == 0 or step == self.num_steps:
            self.keep_weights()


def steps_per_worker(args, data, num_workers: int) -> int:
    return args.num_epochs * len(data) // (args.worker_batch_size * num_workers)


# The ways. lr / num_workers times the sum of the workers' gradients is lr times their mean. Each way returns the
# staleness of each gradient: how often the weights changed between computing and applying it.


def synchronous(worker, args):
    """each step applies the mean of all gradients, as in DDP: all wait for the slowest worker"""
    for step in range(1, worker.num_steps + 1):
        gradient = worker.gradient()
        dist.all_reduce(gradient, group=worker.group)
        worker.weights -= args.lr / worker.num_workers * gradient
        worker.keep_weights_at(step)
    return [0] * worker.num_steps


def local(worker, args):
    """each worker trains on its own; all wait for the slowest only when weights are averaged"""
    for step in range(1, worker.num_steps + 1):
        worker.weights -= args.lr * worker.gradient()
        if step % args.local_steps == 0 or step == worker.num_steps:
            dist.all_reduce(worker.weights, group=worker.group)
            worker.weights /= worker.num_workers
            worker.keep_weights_at(step)
    return [0] * worker.num_steps


def stale(worker, args):
    """the mean of all gradients, --delay steps late: waits for a sum that was started some steps ago"""
    sending, staleness = [], []
    for step in range(1, worker.num_steps + 1):
        gradient, version = worker.gradient(), len(staleness)
        sending.append((gradient, version, dist.all_reduce(gradient, group=worker.group, async_op=True)))
        while len(sending) > (args.delay if step < worker.num_steps else 0):
            gradient, version, work = sending.pop(0)
            work.wait()  # before this, the gradient must be neither read nor written
            staleness.append(len(staleness) - version)
            worker.weights -= args.lr / worker.num_workers * gradient
        worker.keep_weights_at(step)
    return staleness


def asynchronous(worker, args):
    """the server applies each gradient when it arrives: no worker waits for another"""
    version = 0
    while version != STOP:
        # The last number says which weights the gradient belongs to; float32 is exact up to 2^24.
        message = torch.cat([worker.gradient(), torch.tensor([float(version)])])
        dist.send(message, SERVER)
        dist.recv(message, SERVER)
        worker.weights.copy_(message[:-1])
        version = int(message[-1])
    return []  # the server counts the staleness


def serve(server, num_workers: int, num_gradients: int, args) -> list[int]:
    """The server of `asynchronous`: apply `num_gradients` gradients, each when it arrives. Returns their staleness."""
    message = torch.empty(len(server.weights) + 1)
    staleness, active = [], num_workers
    while active:
        sender = dist.recv(message)  # without a source: the next message from any rank
        if len(staleness) < num_gradients:
            staleness.append(len(staleness) - int(message[-1]))
            server.weights -= args.lr / num_workers * message[:-1]
            is_last = len(staleness) == num_gradients
            if is_last or len(staleness) % (num_workers * args.test_every) == 0:
                server.keep_weights()
        message[:-1] = server.weights
        message[-1] = len(staleness)
        if len(staleness) == num_gradients:
            message[-1] = STOP
            active -= 1
        dist.send(message, sender)
    return staleness


WAYS = {way.__name__: way for way in (synchronous, local, stale, asynchronous)}


@torch.no_grad()
def test(trainee, data, start: float) -> list[tuple[float, float]]:
    """(seconds since `start`, accuracy) of all weights in the history."""
    curve, (images, labels) = [], data.tensors
    for moment, weights in trainee.history:
        trainee.weights.copy_(weights)
        correct = trainee.logits(images).argmax(1) == labels
        curve.append((moment - start, correct.float().mean().item()))
    return curve


def run(name: str, straggler: str, data, args, group) -> dict:
    """Train in one way, then test. Collective."""
    (train_data, test_data), rank, num_workers = data, dist.get_rank(), dist.get_world_size() - 1
    if rank == SERVER:
        trainee = Trainee(args, train_data)
    else:
        trainee = Worker(args, train_data, rank - 1, num_workers, straggler, group)
    staleness = []
    dist.barrier()
    start = time.perf_counter()
    if rank != SERVER:
        staleness = WAYS[name](trainee, args)
    elif name == "asynchronous":
        staleness = serve(trainee, num_workers, num_workers * steps_per_worker(args, train_data, num_workers), args)
    # `asynchronous` keeps its weights on the server; in the other ways all workers keep the same weights.
    tester = SERVER if name == "asynchronous" else 1
    gathered = gather_object([(test(trainee, test_data, start), staleness) if rank == tester else None])
    curve, staleness = gathered[tester]
    return {
        "way": name,
        "straggler": straggler,
        "target_s": next((seconds for seconds, accuracy in curve if accuracy >= args.target), None),
        "total_s": curve[-1][0],
        "accuracy": curve[-1][1],
        "mean_staleness": statistics.mean(staleness),
        "max_staleness": max(staleness),
        "curve": curve,
    }


def row(result: dict) -> str:
    """A line of the printed table."""
    reached = "never" if result["target_s"] is None else f"{result['target_s']:.1f}"
    numbers = f"{reached:>14} {result['total_s']:>7.1f} {result['accuracy']:>9.2%}"
    staleness = f"{result['mean_staleness']:.1f}, at most {result['max_staleness']}"
    return f"{result['straggler']:<10} {result['way']:<14}{numbers}  {staleness}"


def draw(results: list[dict], args, num_workers: int):
    """A panel for each kind of straggler: test accuracy over time, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(args.stragglers), 4.5), layout="constrained")
    panels = figure.subplots(1, len(args.stragglers), squeeze=False, sharey=True)[0]
    titles = {"last": "The last worker is slow", "any": "A random worker is slow in each step"}
    for axes, straggler in zip(panels, args.stragglers, strict=True):
        chosen = [result for result in results if result["straggler"] == straggler]
        for result in chosen:
            reached = "not reached" if result["target_s"] is None else f"{result['target_s']:.1f} s"
            axes.plot(*zip(*result["curve"], strict=True), label=f"{result['way']}: {reached}")
        axes.axhline(args.target, color="black", linewidth=1, linestyle="--")
        axes.set(title=titles[straggler], xlabel="seconds of training", ylim=(max(0, 4 * args.target - 3), 1))
        axes.grid(alpha=0.3)
        axes.legend(title=f"time to {args.target:.0%}", loc="lower right")
    panels[0].set_ylabel("test accuracy")
    figure.suptitle(f"{plural(num_workers, 'worker')}, one of them {args.sleep_ms:g} ms late")
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    num_workers = accelerator.num_processes - 1
    if num_workers == 0:
        accelerator.print("one process: the server has no worker; add --num_processes 4")
        return accelerator.end_training()
    if accelerator.device.type != "cpu":
        stop(f"{dist.get_backend()} cannot receive from any source: use cpu_ddp.yaml")
    data = load_images(args.dataset)
    share = len(data[0]) // num_workers
    if args.worker_batch_size > share:
        stop(f"--worker_batch_size must be at most a worker's share of {share} images, got {args.worker_batch_size}")
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    group = dist.new_group(list(range(1, num_workers + 1)))
    results = []
    accelerator.print(f"straggler  way           seconds to {args.target:.0%}   total  accuracy  staleness", flush=True)
    for straggler in args.stragglers:
        for name in WAYS:
            results.append(run(name, straggler, data, args, group))
            accelerator.print(row(results[-1]), flush=True)
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    if accelerator.is_main_process:
        write_json(folder.path / "run.json", {**facts, "results": results})
        save_picture(folder.path / "accuracy.png", lambda: draw(results, args, num_workers))
        show(f"done: the numbers are in {folder.path}/run.json, curves in accuracy.png")
    accelerator.end_training()


if __name__ == "__main__":
    main()
