"""Asynchronous SGD with a parameter server, beside three ways in which processes wait for others.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 4 \
        scripts/from_scratch/async_sgd.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 4 \
        scripts/from_scratch/async_sgd.py --stragglers last any

Rank 0 is the server, which only `asynchronous` uses; the other ranks are the workers, each with a
part of MNIST. One worker sleeps in each of its steps: always the last one, or each time another.
All ways see the same number of samples with the same learning rate a sample, and the script draws
the test accuracy over the time. Receiving from any source needs gloo or MPI: it runs on the CPU.
With 3 workers on 2 busy cores, the last of them 20 ms late: 97 % after 11 s with `asynchronous`,
18 s with `local`, 23 s with the others. With each time another one late: `local` 13 s,
`asynchronous` 17 s, `stale` 18 s, `synchronous` 25 s.
Sources: asynchronous SGD, https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks;
local SGD, https://arxiv.org/abs/1805.09767.
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

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch, topology
from utils.atomic_files import write_json
from utils.console import plural, show, stop
from utils.datasets.images_in_memory import BUNDLED_MNIST, load_images
from utils.features.curves import RUN_COLOURS, save_picture
from utils.run_folder import Tracker

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
SERVER = 0
STOP = -1


def count_steps(args, data, num_workers: int) -> int:
    """Steps of each worker, if all make equally many."""
    return args.num_epochs * len(data.images) // (args.worker_batch_size * num_workers)


class Trainee:
    """A model whose parameters are views of one flat tensor, `weights`, and their history."""

    def __init__(self, args, data):
        num_inputs, num_classes = data.images[0].numel(), len(data.classes)
        torch.manual_seed(args.seed)  # the same weights in each process
        layers = [nn.Flatten(), nn.Linear(num_inputs, args.hidden), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(args.hidden, num_classes))
        parameters = list(self.model.parameters())
        self.weights = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.weights, parameters)
        self.history = []  # (time, weights)

    def logits(self, images):
        return self.model((images.float() - MEAN) / STD)

    def note(self) -> None:
        """Keep the weights of this moment: they are tested later, which takes no time here."""
        self.history.append((time.perf_counter(), self.weights.clone()))


class Worker(Trainee):
    """A Trainee with its part of the data. straggler: which worker is slow, "last" or "any"."""

    def __init__(self, args, data, worker: int, num_workers: int, straggler: str, group=None):
        super().__init__(args, data)
        self.args, self.group = args, group
        self.worker, self.num_workers, self.straggler = worker, num_workers, straggler
        self.images = data.images[worker::num_workers]
        self.labels = data.labels[worker::num_workers]
        self.order = torch.Generator().manual_seed(args.seed + 1 + worker)
        self.sleeper = torch.Generator().manual_seed(args.seed)  # alike in all workers
        self.left = torch.empty(0, dtype=torch.int64)
        self.num_steps = count_steps(args, data, num_workers)

    def sleeps(self) -> bool:
        """Whether this worker is the slow one in its next step."""
        slow = int(torch.randint(self.num_workers, (1,), generator=self.sleeper))
        if self.straggler == "last":
            slow = self.num_workers - 1
        return slow == self.worker

    def gradient(self) -> torch.Tensor:
        """The flat gradient of the mean loss of the next batch, with the present weights."""
        if self.sleeps():
            time.sleep(self.args.sleep_ms / 1000)
        size = self.args.worker_batch_size
        if len(self.left) < size:
            self.left = torch.randperm(len(self.images), generator=self.order)
        batch, self.left = self.left[:size], self.left[size:]
        loss = F.cross_entropy(self.logits(self.images[batch]), self.labels[batch])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])

    def note_step(self, step: int) -> None:
        """After `step` steps of all workers."""
        if step % self.args.test_every == 0 or step == self.num_steps:
            self.note()


# The ways. `lr / num_workers` times the sum of the workers' gradients is lr times their mean.


def synchronous(worker, args):
    """each update is the mean of all workers' gradients, as in DDP: all wait for the slowest"""
    for step in range(1, worker.num_steps + 1):
        gradient = worker.gradient()
        dist.all_reduce(gradient, group=worker.group)
        worker.weights -= args.lr / worker.num_workers * gradient
        worker.note_step(step)


def local(worker, args):
    """each worker trains alone; all wait for the slowest only where the weights are averaged"""
    for step in range(1, worker.num_steps + 1):
        worker.weights -= args.lr * worker.gradient()
        if step % args.local_steps == 0 or step == worker.num_steps:
            dist.all_reduce(worker.weights, group=worker.group)
            worker.weights /= worker.num_workers
            worker.note_step(step)


def stale(worker, args):
    """the mean of all gradients, --delay steps late: wait for what was sent some steps ago"""
    sending = []
    for step in range(1, worker.num_steps + 1):
        gradient = worker.gradient()
        sending.append((gradient, dist.all_reduce(gradient, group=worker.group, async_op=True)))
        while len(sending) > (args.delay if step < worker.num_steps else 0):
            gradient, work = sending.pop(0)
            work.wait()  # until then the gradient is partly a sum: neither read nor write it
            worker.weights -= args.lr / worker.num_workers * gradient
        worker.note_step(step)


def asynchronous(worker, args):
    """the server applies whatever gradient comes: nobody waits for anybody"""
    version = 0
    while version != STOP:
        # The last number says which weights the gradient belongs to: float32 holds it to 2^24.
        message = torch.cat([worker.gradient(), torch.tensor([float(version)])])
        dist.send(message, SERVER)
        dist.recv(message, SERVER)
        worker.weights.copy_(message[:-1])
        version = int(message[-1])


def serve(server, num_workers: int, num_updates: int, args) -> list[int]:
    """The other end of `asynchronous`.

    Returns:
        for each update, how many others were made since its worker got the weights.
    """
    message = torch.empty(len(server.weights) + 1)
    staleness, working = [], num_workers
    while working:
        sender = dist.recv(message)  # without a source: the first gradient that comes, of any rank
        if len(staleness) < num_updates:
            staleness.append(len(staleness) - int(message[-1]))
            server.weights -= args.lr / num_workers * message[:-1]
            steps, rest = divmod(len(staleness), num_workers)
            is_last = len(staleness) == num_updates
            if is_last or (rest == 0 and steps % args.test_every == 0):
                server.note()
        message[:-1] = server.weights
        message[-1] = len(staleness)
        if len(staleness) == num_updates:
            message[-1] = STOP
            working -= 1
        dist.send(message, sender)
    return staleness


WAYS = {way.__name__: way for way in (synchronous, local, stale, asynchronous)}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    count, size, real = flags.at_least(0), flags.at_least(1), flags.at_least(0.0, float)
    add = parser.add_argument_group("ways").add_argument
    add("--sleep_ms", type=real, default=20.0, help="how long the slow worker sleeps in a step")
    add(
        "--stragglers",
        nargs="+",
        choices=("last", "any"),
        default=["last"],
        help="the last worker is slow, or another one in each step; both: a run of each (default: last)",
    )
    add("--local_steps", type=size, default=8, help="local: steps between two averages")
    add("--delay", type=count, default=1, help="stale: steps that a gradient comes late")
    add = parser.add_argument_group("training").add_argument
    source = "Hub id, or folder of parquet files or of <split>/<class>/ images"
    add("--dataset", default=BUNDLED_MNIST, help=source)
    add("--num_epochs", type=size, default=3, help="passes over the training images")
    add("--worker_batch_size", type=size, default=64, help="images of one gradient")
    add("--hidden", type=size, default=128, help="hidden units")
    add("--lr", type=real, default=0.2, help="learning rate, for the mean of all workers")
    add("--seed", type=flags.at_least(0, below=2**31), default=0, help="of weights and data order")
    add("--target", type=real, default=0.97, help="test accuracy whose time is printed")
    add("--test_every", type=size, default=16, help="steps between two tests")
    parser.add_run_flags()
    return parser.parse_args()


@torch.no_grad()
def test(trainee, data, began: float) -> list[tuple[float, float]]:
    """(seconds since `began`, accuracy) of all weights in the history."""
    curve = []
    for moment, weights in trainee.history:
        trainee.weights.copy_(weights)
        hits = trainee.logits(data.images).argmax(1) == data.labels
        curve.append((moment - began, hits.float().mean().item()))
    return curve


def run(name: str, straggler: str, data, args, rank: int, num_workers: int, group) -> dict:
    """Train in one way. Collective: call it on every rank. Returns what rank 0 knows in the end."""
    train_data, test_data = data
    staleness, is_server = [], rank == SERVER
    if is_server:
        trainee = Trainee(args, train_data)
    else:
        trainee = Worker(args, train_data, rank - 1, num_workers, straggler, group)
    dist.barrier()
    began = time.perf_counter()
    if not is_server:
        WAYS[name](trainee, args)
    elif name == "asynchronous":
        updates = num_workers * count_steps(args, train_data, num_workers)
        staleness = serve(trainee, num_workers, updates, args)
    # The server has the weights of the asynchronous way, and the workers have all the same ones
    # where they noted them.
    curves = gather_object([test(trainee, test_data, began) if rank < 2 else []])
    curve = curves[0] or curves[1]
    reached = [seconds for seconds, accuracy in curve if accuracy >= args.target]
    return {
        "way": name,
        "straggler": straggler,
        "target_s": reached[0] if reached else None,
        "total_s": curve[-1][0],
        "accuracy": curve[-1][1],
        "mean_staleness": statistics.mean(staleness) if staleness else 0,
        "max_staleness": max(staleness, default=0),
        "curve": curve,
    }


def draw(results: list[dict], args, num_workers: int):
    """A panel for each kind of straggler: the test accuracy over the time, a line for each way."""
    from matplotlib.figure import Figure

    width = 5.5 * len(args.stragglers)
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    panels = figure.subplots(1, len(args.stragglers), squeeze=False, sharey=True)[0]
    titles = {"last": "The last worker is slow", "any": "Each time another worker is slow"}
    for axes, straggler in zip(panels, args.stragglers, strict=True):
        own = [result for result in results if result["straggler"] == straggler]
        for result, colour in zip(own, RUN_COLOURS, strict=False):
            reached = result["target_s"]
            label = f"{result['way']}: " + (f"{reached:.1f} s" if reached else "not reached")
            seconds, accuracies = zip(*result["curve"], strict=True)
            axes.plot(seconds, accuracies, color=colour, label=label)
        axes.axhline(args.target, color="black", linewidth=1, linestyle="--")
        axes.set(title=titles[straggler], xlabel="seconds of training")
        axes.set_ylim(max(0, 4 * args.target - 3), 1)
        axes.grid(alpha=0.3)
        axes.legend(title=f"time to {args.target:.0%}", loc="lower right")
    panels[0].set_ylabel("test accuracy")
    figure.suptitle(f"{plural(num_workers, 'worker')}, one of them {args.sleep_ms:g} ms late")
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    rank, num_workers = accelerator.process_index, accelerator.num_processes - 1
    if num_workers == 0:
        accelerator.print("one process: a server has no worker; add --num_processes 4")
        return accelerator.end_training()
    if accelerator.device.type != "cpu":
        stop(f"{dist.get_backend()} cannot receive from any source: use cpu_ddp.yaml")
    data = load_images(args.dataset)
    if args.worker_batch_size > len(data[0].images) // num_workers:
        stop(
            f"--worker_batch_size {args.worker_batch_size} is more than a worker's part of "
            f"{len(data[0].images)} images: use at most {len(data[0].images) // num_workers}"
        )
    tracker = Tracker(accelerator, args.output_dir, None)
    group = dist.new_group(list(range(1, num_workers + 1)))
    results = []
    title = f"seconds to {args.target:.0%}"
    accelerator.print(f"straggler  way           {title}  in all  accuracy  staleness", flush=True)
    for straggler in args.stragglers:
        for name in WAYS:
            result = run(name, straggler, data, args, rank, num_workers, group)
            results.append(result)
            reached = f"{result['target_s']:.1f}" if result["target_s"] else "never"
            words = f"{straggler:<10} {name:<14}{reached:>{len(title)}} {result['total_s']:>7.1f}"
            staleness = f"{result['mean_staleness']:.1f}, at most {result['max_staleness']}"
            accelerator.print(f"{words} {result['accuracy']:>9.2%}  {staleness}", flush=True)
    facts = {"arguments": flags.as_json(vars(args)), **topology.describe(accelerator)}
    if accelerator.is_main_process:
        write_json(tracker.folder / "run.json", {**facts, "results": results})
        picture = tracker.folder / "accuracy.png"
        save_picture(picture, lambda: draw(results, args, num_workers))
        show(f"done: numbers in {tracker.folder}/run.json, curves in {picture}", "green")
    accelerator.end_training()


if __name__ == "__main__":
    main()
