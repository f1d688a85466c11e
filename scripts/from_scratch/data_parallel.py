"""What nn.DataParallel does, written by hand: its steps, and what each costs on each device.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/from_scratch/data_parallel.py
    accelerate launch --config_file accelerate_configs/dp.yaml scripts/from_scratch/data_parallel.py \
        --batch_size 1024

On a CPU the devices are virtual: parts of its memory, with a thread each. On GPUs, torch's own
scatter, replicate, parallel_apply and gather run; that path has not been run on several GPUs yet.
The model predicts the grey level of each pixel of a digit. As in a language model, the logits are
by far its largest tensor, which shows what gathering them on the first device means.
On 3 virtual devices, with 90 images in float64, the first one holds up to 44.7 MiB and the others
12.4; with the loss inside the replicas 24.5 and 13.4. The weights are plain autograd's to 1e-16.
Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html; threads of the
backward pass,
https://docs.pytorch.org/docs/main/generated/torch.autograd.grad_mode.set_multithreading_enabled.html.
"""

import contextlib
import copy
import itertools
import multiprocessing
import os
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch, topology
from utils.atomic_files import write_json
from utils.console import plural, show, stop
from utils.datasets.images_in_memory import BUNDLED_MNIST, load_images
from utils.features.curves import save_picture
from utils.loader import GlobalLoader
from utils.run_folder import Tracker

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
HIDDEN = 48
LEVELS = 16  # of grey: the classes of each pixel
MIB = 2**20


class Painter(nn.Module):
    def __init__(self, num_pixels):
        super().__init__()
        self.fc1 = nn.Linear(num_pixels, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, LEVELS * num_pixels)

    def forward(self, images):
        """Logits (N, LEVELS, pixels) for the grey level of each pixel of uint8 images."""
        x = (images.flatten(1).to(self.fc1.weight.dtype) - MEAN) / STD
        return self.fc2(F.silu(self.fc1(x))).unflatten(1, (LEVELS, -1))


def losses_of(logits, images):
    """One loss a sample, (N,): the mean over its pixels."""
    levels = images.flatten(1).long() * LEVELS // 256
    return F.cross_entropy(logits, levels, reduction="none").mean(1)


def forward_and_losses(model, images):
    return losses_of(model(images), images)


# The steps of an update. The backward pass is the forward pass in reverse: where the outputs were
# gathered their gradients are scattered, and where the weights were copied the gradients of the
# copies are summed. `loss.backward()` does all of it in one call; here the chain rule is cut where
# the data change devices, so that each step can be seen.


def update(model, optimizer, images, devices, loss_inside):
    """One update as nn.DataParallel makes it. Returns the gradients of the replicas' weights.

    images: on the first device, as are the model and the optimizer.
    loss_inside: compute the losses in the replicas, and gather one number a sample.
    """
    weights = list(model.parameters())
    with devices.step("scatter"):
        parts = devices.scatter(images)
    with devices.step("replicate"):
        replicas, copies = devices.replicate(model, len(parts))
    with devices.step("forward"):
        functions = replicas
        if loss_inside:
            functions = [partial(forward_and_losses, replica) for replica in replicas]
        outputs = devices.parallel_apply(functions, parts)
    with devices.step("gather"):
        gathered = devices.gather(outputs)
    # The replicas end here, and the outputs are on the first device. On the others there is only
    # what the graph keeps: edges are places in it.
    outputs = edges(outputs)
    copies = [edges(own) for own in copies]
    del functions, replicas
    with devices.step("loss"), devices.on(0):
        losses = gathered if loss_inside else losses_of(gathered, images)
        # Over all samples: a mean of the means of unequal parts would be another number.
        loss = losses.mean()
    with devices.step("loss backward"), devices.on(0):
        (gradient,) = torch.autograd.grad(loss, gathered)
    with devices.step("scatter grads"):
        gradients = list(torch.autograd.grad(gathered, outputs, gradient))
        del gradient
    with devices.step("backward"):
        gradients = devices.backward(outputs, copies, gradients)
    with devices.step("reduce"):
        flat = list(itertools.chain(*copies))
        sums = torch.autograd.grad(flat, weights, list(itertools.chain(*gradients)))
    with devices.step("update"), devices.on(0):
        for weight, gradient in zip(weights, sums, strict=True):
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def edges(tensors):
    return [get_gradient_edge(tensor) for tensor in tensors]


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in `with memory:`, until they are freed."""

    def __init__(self):
        super().__init__()
        self.step, self.made_in = "", {}
        self.lock = threading.RLock()  # tensors are freed in any thread
        self.held = Counter()  # bytes, by the step that made them
        self.peak = self.highest = 0  # of this step; of all steps
        self.held_at_highest = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = set()
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                given.add(value.untyped_storage()._cdata)
        result = operation(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            # A view, or an operation in place, needs no memory.
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given:
                self.hold(value)
        return result

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        with self.lock:
            self.held[self.step] += storage.nbytes()
            weakref.finalize(storage, self.free, self.step, storage.nbytes())
            total = sum(self.held.values())
            self.peak = max(self.peak, total)
            if total > self.highest:
                self.highest, self.held_at_highest = total, self.held.copy()

    def free(self, step, size):
        with self.lock:
            self.held[step] -= size


def split(values, size):
    return [values[first : first + size] for first in range(0, len(values), size)]


class Devices:
    """What the steps cost: times, bytes moved and memory held, for each step and device.

    spans: (device, step, began_s, ended_s). moved, peaks: bytes by (step, device); a byte that is
    copied counts for both devices.
    """

    def __init__(self, count):
        self.count = count
        self.clear()

    def clear(self):
        self.spans, self.moved, self.peaks = [], Counter(), {}
        self.backward_threads = set()

    def watch_threads(self, copies):
        """Have the thread noted in which each replica's backward pass runs."""
        for own in copies:
            own[0].register_hook(self.note_thread)

    def note_thread(self, gradient):
        if self.now == "backward":  # and not when the gradient is summed
            self.backward_threads.add(threading.get_ident())

    def count_copy(self, tensor, source, target):
        for device in (source, target):
            self.moved[self.now, device] += tensor.nbytes


class CpuDevices(Devices):
    """Virtual devices: parts of the CPU's memory, with a thread each.

    counts_memory: each operation is then looked at in Python, which takes time: measure the memory
        and the times in different updates.
    one_call: the backward pass as autograd alone makes it on a CPU: in one thread.
    """

    kind = "virtual devices"

    def __init__(self, count, counts_memory=False, one_call=False):
        super().__init__(count)
        self.counts_memory, self.one_call = counts_memory, one_call
        self.memories = [Memory() for _ in range(count)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.skeletons = None

    @contextlib.contextmanager
    def step(self, name):
        self.now = name
        for memory in self.memories:
            memory.step, memory.peak = name, sum(memory.held.values())
        yield
        for device, memory in enumerate(self.memories):
            self.peaks[name, device] = memory.peak

    @contextlib.contextmanager
    def on(self, device):
        """What runs in here runs on `device`, in the time of `device` and in its memory."""
        began = time.perf_counter()
        with self.memories[device] if self.counts_memory else contextlib.nullcontext():
            yield
        self.spans.append((device, self.now, began, time.perf_counter()))

    def place(self, tensors, name):
        """Declare that the tensors lie on the first device."""
        self.memories[0].step = name
        for tensor in tensors:
            self.memories[0].hold(tensor)

    def copy(self, tensor, source, target):
        if source == target:
            return tensor
        with self.on(target):
            result = tensor.clone()
        self.count_copy(tensor, source, target)
        return result

    def in_threads(self, call, *lists):
        """call(*arguments) for each device, in the thread of the device; returns all results."""

        def run(device, *arguments):
            with self.on(device):
                return call(*arguments)

        running = []
        for device, arguments in enumerate(zip(*lists, strict=True)):
            running.append(self.threads[device].submit(run, device, *arguments))
        return [future.result() for future in running]

    def scatter(self, images):
        """Equal parts; the last is smaller if they do not divide, and the last devices may get
        none."""
        return [self.copy(part, 0, i) for i, part in enumerate(images.chunk(self.count))]

    def replicate(self, model, count):
        """A model for each device, and its weights. The first one has the weights of `model`."""
        if self.skeletons is None:  # without memory for weights: these are passed in each call
            self.skeletons = [copy.deepcopy(model).to("meta") for _ in range(self.count)]
        weights = dict(model.named_parameters())
        flat = Copies.apply(self, count, *weights.values())
        copies = split(flat, len(weights))
        self.watch_threads(copies)
        replicas = []
        for skeleton, own in zip(self.skeletons, copies, strict=False):
            named = dict(zip(weights, own, strict=True))
            replicas.append(partial(torch.func.functional_call, skeleton, named))
        return replicas, copies

    def parallel_apply(self, functions, parts):
        return self.in_threads(lambda function, part: function(part), functions, parts)

    def gather(self, outputs):
        return Gathered.apply(self, *outputs)

    def backward(self, outputs, copies, gradients):
        """The gradients of each replica's weights, by the gradients of its outputs."""
        if not self.one_call:
            return self.in_threads(torch.autograd.grad, outputs, copies, gradients)
        with self.on(0):
            found = torch.autograd.grad(outputs, list(itertools.chain(*copies)), gradients)
        return split(found, len(copies[0]))


class Copies(torch.autograd.Function):
    """Weights for each device. Backward: the sum of their gradients, on the first device."""

    @staticmethod
    def forward(ctx, devices, count, *weights):
        ctx.devices, ctx.num_weights = devices, len(weights)
        return tuple(devices.copy(weight, 0, i) for i in range(count) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        sums = []
        for first in range(ctx.num_weights):
            own, *others = gradients[first :: ctx.num_weights]
            total = own
            for device, other in enumerate(others, 1):
                arrived = ctx.devices.copy(other, device, 0)
                with ctx.devices.on(0):
                    total = total + arrived if device == 1 else total.add_(arrived)
                del arrived
            sums.append(total)
        return None, None, *sums


class Gathered(torch.autograd.Function):
    """Outputs of all devices, on the first one. Backward: to each the gradient of its own."""

    @staticmethod
    def forward(ctx, devices, *outputs):
        ctx.devices, ctx.sizes = devices, [len(output) for output in outputs]
        for device, output in enumerate(outputs[1:], 1):
            devices.count_copy(output, device, 0)
        with devices.on(0):
            return torch.cat(outputs)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.split(ctx.sizes)
        return None, *(ctx.devices.copy(part, 0, i) for i, part in enumerate(parts))


class Gpus(Devices):
    """GPUs, with torch's own functions: those that nn.DataParallel calls."""

    kind = "GPUs"
    counts_memory = True  # the allocator does, and it takes no time

    def __init__(self, count, counts_memory=False, one_call=True):
        super().__init__(count)
        self.ids = list(range(count))

    @contextlib.contextmanager
    def step(self, name):
        self.now = name
        for device in self.ids:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        yield
        for device in self.ids:  # the time at which this one and those before it are done
            torch.cuda.synchronize(device)
            self.spans.append((device, name, began, time.perf_counter()))
            self.peaks[name, device] = torch.cuda.max_memory_allocated(device)

    def on(self, device):
        return torch.cuda.device(device)

    def place(self, tensors, name):
        pass  # they are there

    def scatter(self, images):
        parts = nn.parallel.scatter(images, self.ids)
        self.count_copies(parts)
        return parts

    def count_copies(self, tensors):
        for device, tensor in enumerate(tensors[1:], 1):
            self.count_copy(tensor, 0, device)

    def replicate(self, model, count):
        replicas = nn.parallel.replicate(model, self.ids[:count])
        copies = []
        for device, replica in enumerate(replicas):
            own = []
            for module in replica.modules():  # replicas have tensors, and no parameters
                own += module._former_parameters.values()
            copies.append(own)
            for weight in own if device else []:
                self.count_copy(weight, 0, device)
        self.watch_threads(copies)
        return replicas, copies

    def parallel_apply(self, functions, parts):
        return nn.parallel.parallel_apply(functions, parts, devices=self.ids[: len(parts)])

    def gather(self, outputs):
        self.count_copies(outputs)
        return nn.parallel.gather(outputs, 0)

    def backward(self, outputs, copies, gradients):
        """One call: autograd has a thread for each GPU."""
        found = torch.autograd.grad(outputs, list(itertools.chain(*copies)), gradients)
        for device in self.ids:  # the way back is as long as the way there
            self.moved["scatter grads", device] = self.moved["gather", device]
            self.moved["reduce", device] = self.moved["replicate", device]
        return split(found, len(copies[0]))


def plain(model, optimizer, images):
    """One update by autograd alone, on one device."""
    losses_of(model(images), images).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Threads against processes. Only one thread of a process runs Python at a time: the one that holds
# the GIL. Inside a large operation, and in autograd's engine, PyTorch lets go of it.

SIZES = {"large layers": (2, 512, 128), "small layers": (100, 8, 8)}  # layers, width, rows
PASSES = {"large layers": 1, "small layers": 4}
PHASES = ("forward", "backward")
REPEATS = 5  # short ones, and the best counts: what else runs on the machine is not meant
ROUNDS = 2


def passes(size, barrier):
    """(forward_s, backward_s): the best times until all that share the barrier are done."""
    torch.set_num_threads(1)
    layers, width, rows = SIZES[size]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    x = torch.ones(rows, width)
    times = []
    for _ in range(REPEATS):
        barrier.wait(60)
        began = time.perf_counter()
        outputs = [model(x) for _ in range(PASSES[size])]
        barrier.wait(60)
        half = time.perf_counter()
        for output in outputs:
            output.sum().backward()
        barrier.wait(60)
        times.append((half - began, time.perf_counter() - half))
    return [min(of_phase) for of_phase in zip(*times, strict=True)]


def give_barrier(barrier):
    global shared_barrier
    shared_barrier = barrier


def passes_of_a_process(size):
    return passes(size, shared_barrier)


def speed_ups(workers):
    """How much faster workers in threads, and in processes, are than one after another.

    {(size, phase): {"threads": ratio, "processes": ratio}}. The ways take turns.
    """
    # A fork is quick, but on GPUs and outside Linux it is not safe.
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    shared = (context.Barrier(workers),)
    best = {}
    with (
        ProcessPoolExecutor(workers, context, give_barrier, shared) as processes,
        ThreadPoolExecutor(workers) as threads,
    ):
        for size, _ in itertools.product(SIZES, range(ROUNDS)):
            sizes, barrier = [size] * workers, threading.Barrier(workers)
            ways = {
                "processes": list(processes.map(passes_of_a_process, sizes)),
                "threads": list(threads.map(passes, sizes, [barrier] * workers)),
                "alone": [passes(size, threading.Barrier(1))],
            }
            for way, times in ways.items():
                for phase, column in zip(PHASES, zip(*times, strict=True), strict=True):
                    slowest = max(column)
                    best[size, phase, way] = min(slowest, best.get((size, phase, way), slowest))
    found = {}
    for size, phase in itertools.product(SIZES, PHASES):
        one_after_another = workers * best[size, phase, "alone"]
        found[size, phase] = {way: one_after_another / best[size, phase, way] for way in ("threads", "processes")}
    return found


WAYS = {
    "plain": "autograd alone, on one device",
    "gathered": "DataParallel, logits gathered on the first device, loss there",
    "inside": "DataParallel, loss inside the replicas, one number a sample gathered",
}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    size = flags.at_least(1)
    add = parser.add_argument_group("devices").add_argument
    add("--num_devices", type=size, help="default: all GPUs, or 3 virtual devices on a CPU")
    add = parser.add_argument_group("training").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--num_steps", type=flags.at_least(2), default=6, help="updates; the first is not timed")
    add("--batch_size", type=size, default=90, help="of one update, over all devices together")
    add("--lr", type=flags.at_least(0.0, float), default=0.1, help="learning rate")
    add("--seed", type=flags.at_least(0, below=2**31), default=0, help="of weights and data order")
    add(
        "--dtype",
        choices=("float32", "float64"),
        default="float64",
        help="float32: half the memory, and differences of 1e-7 and not of 1e-16",
    )
    parser.add_run_flags()
    return parser.parse_args()


def choose_devices(args, accelerator):
    """The class of the devices. Sets args.num_devices.

    Raises:
        SystemExit: with several processes, or if there are fewer GPUs than asked for.
    """
    if accelerator.num_processes > 1:
        stop(f"nn.DataParallel runs in one process and here are {accelerator.num_processes}: use cpu.yaml or dp.yaml")
    if accelerator.device.type != "cuda":
        args.num_devices = args.num_devices or 3
        return CpuDevices
    visible = torch.cuda.device_count()
    args.num_devices = args.num_devices or visible
    if args.num_devices > visible:
        stop(f"--num_devices {args.num_devices}: only {visible} GPUs are visible, or use cpu.yaml")
    return Gpus


def make(args, batches):
    """The model, with the same weights each time, and its optimizer."""
    torch.manual_seed(args.seed)
    model = Painter(batches[0][0].numel()).to(batches[0].device, getattr(torch, args.dtype))
    return model, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def flat_weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_plain(args, batches):
    """The weights in the end, and the median time of an update."""
    model, optimizer = make(args, batches)
    times_ms = []
    for images in batches:
        began = time.perf_counter()
        plain(model, optimizer, images)
        if images.is_cuda:
            torch.cuda.synchronize()
        times_ms.append(1000 * (time.perf_counter() - began))
    return flat_weights(model), statistics.median(times_ms[1:])


def train(args, batches, devices, loss_inside):
    """The weights in the end, and the spans of each update but the first."""
    model, optimizer = make(args, batches)
    updates = []
    for images in batches:
        devices.clear()
        update(model, optimizer, images, devices, loss_inside)
        updates.append(devices.spans)
    return flat_weights(model), updates[1:]


def measure(args, batches, kind, loss_inside):
    """Train, and find what each step costs on each device. Returns weights, costs, spans, Memory.

    costs: {step: {"time_ms": [a number a device], "moved_mib": ..., "peak_mib": ...}}.
    """
    devices = kind(args.num_devices)
    weights, updates = train(args, batches, devices, loss_inside)
    counting = kind(args.num_devices, counts_memory=True)
    model, optimizer = make(args, batches)
    counting.place(model.parameters(), "model")
    for images in batches[:2]:  # in the second one the optimizer has its momentum
        images = images.clone()
        counting.place([images], "batch")
        counting.clear()
        update(model, optimizer, images, counting, loss_inside)

    costs = {}
    for step in dict.fromkeys(name for _, name, _, _ in updates[0]):
        costs[step] = {"time_ms": [], "moved_mib": [], "peak_mib": []}
        for device in range(args.num_devices):
            times_ms = []
            for spans in updates:
                own = [e - b for d, name, b, e in spans if (d, name) == (device, step)]
                times_ms.append(1000 * sum(own))
            costs[step]["time_ms"].append(statistics.median(times_ms))
            costs[step]["moved_mib"].append(counting.moved[step, device] / MIB)
            costs[step]["peak_mib"].append(counting.peaks.get((step, device), 0) / MIB)
    return weights, costs, min(updates, key=duration), counting


def duration(spans, step=None):
    """Seconds from the beginning of the first span (of a step) to the end of the last."""
    spans = [span for span in spans if step in (None, span[1])]
    return max(span[3] for span in spans) - min(span[2] for span in spans)


def table(costs, count):
    """A line a step; three groups of columns, with one for each device."""
    groups = ("time_ms", "moved_mib", "peak_mib")
    titles = ("time, ms", "moved, MiB", "peak memory, MiB")
    lines = [" " * 14 + "".join(f" {title:>{8 * count}}" for title in titles)]
    numbers = "".join(f"{device:>8}" for device in range(count))
    lines.append(f"{'step, device':<14}" + f" {numbers}" * 3)
    for step, cost in costs.items():
        line = f"{step:<14}"
        for group in groups:
            line += " " + "".join(f"{value:>8.2f}" for value in cost[group])
        lines.append(line)
    return "\n".join(lines)


def answers(args, batches, kind):
    """What is said of nn.DataParallel, and what is measured here."""
    count = args.num_devices
    devices = kind(count)
    found = {"parts": {}}
    for inputs, others in ((30, (1, 2, 3)), (4, (3,))):
        for n in others:
            if kind is CpuDevices or n <= count:
                some = kind(n)
                with some.step("scatter"):
                    parts = some.scatter(batches[0].new_zeros(inputs, 1))
                found["parts"][inputs, n] = [len(part) for part in parts]

    model, optimizer = make(args, batches)
    weights = list(model.parameters())
    differences, spread = [0.0], []
    for images in batches:
        with devices.step("replicate"):
            _, copies = devices.replicate(model, count)
        for own in copies:
            for weight, copied in zip(weights, own, strict=True):
                differences.append((weight.cpu() - copied.cpu()).abs().max().item())
        addresses = {tensor.data_ptr() for tensor in (*weights, *copies[0])}
        del copies
        devices.clear()
        gradients = update(model, optimizer, images, devices, False)
        flat = [torch.cat([tensor.flatten().cpu() for tensor in own]) for own in gradients]
        spread.append(float((flat[0] - flat[-1]).norm() / flat[0].norm()))
    found["weights_on_first_device"] = len(addresses) / len(weights)
    found["replica_to_model"] = max(differences)
    found["gradients_of_replicas"] = statistics.median(spread)
    found["backward_threads"] = len(devices.backward_threads)
    found["apart"] = train_apart(args, batches)
    return found


def train_apart(args, batches):
    """The largest difference of a weight, if replicas trained on their parts without the sum."""
    ends = []
    for device in range(args.num_devices):
        model, optimizer = make(args, batches)
        for images in batches:
            parts = images.chunk(args.num_devices)
            if device < len(parts):
                plain(model, optimizer, parts[device])
        ends.append(flat_weights(model))
    return max((end - ends[0]).abs().max().item() for end in ends)


def say_answers(found, count):
    """The answers as text. found: what `answers` and main measured."""
    parts = []
    for (inputs, devices), sizes in found["parts"].items():
        parts.append(f"{inputs} inputs on {plural(devices, 'device')}: {sizes}")
    threads = found["backward_threads"]
    backward = [f"  {plural(count, 'replica')} in {plural(threads, 'thread')}."]
    if "backward_one_thread_ms" in found:
        backward = [
            f"  {plural(count, 'replica')} in {plural(threads, 'thread')}: "
            f"{found['backward_threads_ms']:.1f} ms; in one thread "
            f"{found['backward_one_thread_ms']:.1f} ms; on {plural(os.cpu_count(), 'core')}.",
            f"  The weights then differ by {found['backward_difference']:g}: no replica needs anything of another.",
        ]
    copies = found["weights_on_first_device"]
    differ = found["replica_to_model"]
    lines = [
        *parts,
        "",
        f"Is the backward pass parallel? {'Yes' if threads == count > 1 else 'No'}.",
        *backward,
        "  Autograd has one thread for each GPU, and one for a CPU: here each replica has its own.",
        "  So is the forward pass. In all other steps the others wait for the first device.",
        f"Are there two copies of the model on the first device? {'No' if copies == 1 else 'Yes'}.",
        f"  It holds {copies:g} of each weight: its replica uses those of the model.",
        f"Do replicas learn different models? {'No' if differ == 0 else 'Yes'}.",
        f"  They differ from the model by {differ:g} before each update, their gradients by "
        f"{found['gradients_of_replicas']:.0%}.",
        "  The model is updated by the sum of the gradients, and the replicas are thrown away.",
        f"  Trained apart, without the sum, they would now differ by {found['apart']:.1e}.",
        "",
        f"{found['workers']} workers, how much faster than one after another: threads   processes",
        "  (other work on the cores takes the gain away)",
    ]
    for (size, phase), ratios in found["speed_ups"].items():
        name = f"{size}, {phase}"
        lines.append(f"  {name:<51} {ratios['threads']:>7.2f} {ratios['processes']:>11.2f}")
    return "\n".join(lines)


# One colour a step in all pictures; what the first device does alone is red, orange and brown.
COLOURS = {
    "model": "#555555",
    "batch": "#bbbbbb",
    "scatter": "#cab2d6",
    "replicate": "#6a3d9a",
    "forward": "#1f78b4",
    "gather": "#e31a1c",
    "loss": "#fb9a99",
    "loss backward": "#ff7f00",
    "scatter grads": "#fdbf6f",
    "backward": "#33a02c",
    "reduce": "#b15928",
    "update": "#dfc27d",
}
MADE_BY = {
    "model": "the weights",
    "batch": "the images",
    "scatter": "parts of the images",
    "replicate": "copies of the weights",
    "forward": "activations",
    "gather": "logits of all samples",
    "loss": "log-softmax",
    "loss backward": "gradients of the logits",
    "scatter grads": "parts of these gradients",
    "backward": "gradients of the weights",
    "reduce": "the others' gradients, the sum",
    "update": "momentum of the optimizer",
}
TITLES = {"gathered": "outputs gathered, loss on device 0", "inside": "loss inside the replicas"}


def draw_steps(results, title):
    """For each way: when each device does what, the bytes moved, and the memory of each step."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 11), layout="constrained")
    panels = figure.subplots(3, 2, sharex="row", sharey="row", height_ratios=(2, 3, 3))
    for column, way in enumerate(TITLES):
        _, costs, spans, _ = results[way]
        timeline, moved, memory = (row[column] for row in panels)
        draw_timeline(timeline, spans)
        timeline.set_title(TITLES[way])
        draw_bars(moved, costs, "moved_mib", "MiB sent and received")
        moved.legend(loc="upper right")  # "update", which is there, moves nothing
        draw_bars(memory, costs, "peak_mib", "peak memory, MiB")
        if column:
            for axes in (timeline, moved, memory):
                axes.set_ylabel("")
    handles = [Patch(color=COLOURS[step], label=step) for step in results["gathered"][1]]
    figure.legend(handles=handles, loc="outside lower center", ncols=10)
    figure.suptitle(title)
    return figure


def draw_timeline(axes, spans):
    start = min(span[2] for span in spans)
    for device, step, began, ended in spans:
        left, width = 1000 * (began - start), 1000 * (ended - began)
        axes.barh(device, width, left=left, height=0.8, color=COLOURS[step])
    devices = sorted({span[0] for span in spans})
    axes.set(yticks=devices, ylabel="device", xlabel="ms of the fastest update")
    axes.set_ylim(len(devices) - 0.5, -0.5)
    axes.grid(alpha=0.3, axis="x")


def draw_bars(axes, costs, kind, label):
    """A group of bars for each step, with one for each device."""
    from matplotlib import colormaps

    count = len(costs["forward"][kind])
    width = 0.8 / count
    for device in range(count):
        places = [number + (device - (count - 1) / 2) * width for number in range(len(costs))]
        values = [cost[kind][device] for cost in costs.values()]
        colour = colormaps["Blues"](0.9 - 0.6 * device / max(count - 1, 1))
        axes.bar(places, values, width, color=colour, label=f"device {device}")
    axes.set_xticks(range(len(costs)), [step.replace(" ", "\n") for step in costs], fontsize=8)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def draw_memory(results, title):
    """What fills each device at the moment when it holds most, by the step that made it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    handles = {}
    for axes, way in zip(panels, TITLES, strict=True):
        memories = results[way][3].memories
        bottoms = [0.0] * len(memories)
        for step, colour in COLOURS.items():
            values = [memory.held_at_highest[step] / MIB for memory in memories]
            axes.bar(range(len(memories)), values, 0.7, bottoms, color=colour)
            bottoms = [a + b for a, b in zip(bottoms, values, strict=True)]
            if max(values) > 0.01 * max(bottoms):
                handles[step] = Patch(color=colour, label=f"{step}: {MADE_BY[step]}")
        for device, total in enumerate(bottoms):
            axes.text(device, total, f"{total:.1f}", ha="center", va="bottom")
        axes.set(title=TITLES[way], xlabel="device", xticks=range(len(memories)))
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("most memory held, MiB, by the step that made it")
    ordered = [handles[step] for step in reversed(COLOURS) if step in handles]
    figure.legend(handles=ordered, loc="outside right center")
    figure.suptitle(title)
    return figure


def draw_speed_ups(found, workers):
    """Threads and processes, over the same work one after another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{size}\n{phase}" for size, phase in found]
    for place, (way, colour) in enumerate((("threads", "#0072b2"), ("processes", "#d55e00"))):
        places = [number + 0.4 * place - 0.2 for number in range(len(names))]
        values = [ratios[way] for ratios in found.values()]
        bars = axes.bar(places, values, 0.4, color=colour, label=way)
        axes.bar_label(bars, fmt="{:.2f}", label_type="center", color="white")
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="one after another")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="times as fast", title=f"{workers} workers, in threads and in processes")
    axes.margins(y=0.15)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def as_json(found):
    """The answers with names of one word, "30 on 3", for JSON."""
    return {
        **found,
        "parts": {f"{a} on {b}": sizes for (a, b), sizes in found["parts"].items()},
        "speed_ups": {", ".join(key): ratios for key, ratios in found["speed_ups"].items()},
    }


def main():
    args = parse_args()
    # A thread of its own for each device is what is shown: none has more than one.
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    kind = choose_devices(args, accelerator)
    tracker = Tracker(accelerator, args.output_dir, None)
    workers = min(args.num_devices, 2)
    found = {"workers": workers, "speed_ups": speed_ups(workers)}

    train_data, _ = load_images(args.dataset)
    loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    all_batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    batches = [batch.data[0] for batch in itertools.islice(all_batches, args.num_steps)]
    if kind is CpuDevices:
        batches = [images.cpu() for images in batches]  # no change, but for Apple's GPU

    reference, time_ms = train_plain(args, batches)
    results, summary = {}, {"plain": {"update_time_ms": time_ms, "difference_to_plain": 0.0}}
    for way in TITLES:
        results[way] = measure(args, batches, kind, way == "inside")
        weights, costs, spans, _ = results[way]
        peaks = [max(column) for column in zip(*(c["peak_mib"] for c in costs.values()), strict=True)]
        summary[way] = {
            "update_time_ms": 1000 * duration(spans),
            "difference_to_plain": (weights - reference).abs().max().item(),
            "moved_mib": sum(sum(cost["moved_mib"]) for cost in costs.values()) / 2,
            "peak_mib": peaks,
            "steps": costs,
        }
        print(f"{WAYS[way]}\n{table(costs, args.num_devices)}\n", flush=True)
    print("way       ms/update  weights-plain  moved, MiB  peak MiB of each device  what it does")
    for way, text in WAYS.items():
        row = summary[way]
        peaks = " ".join(f"{peak:.1f}" for peak in row.get("peak_mib", []))
        moved = f"{row.get('moved_mib', 0):.2f}"
        numbers = f"{row['update_time_ms']:>9.1f} {row['difference_to_plain']:>14.1e} {moved:>11}"
        print(f"{way:<9} {numbers}  {peaks:<23}  {text}")

    found |= answers(args, batches, kind)
    if kind is CpuDevices:
        ends = []
        for name, one_call in (("threads", False), ("one_thread", True)):
            devices = CpuDevices(args.num_devices, one_call=one_call)
            weights, updates = train(args, batches, devices, False)
            best_s = min(duration(spans, "backward") for spans in updates)
            found[f"backward_{name}_ms"] = 1000 * best_s
            ends.append(weights)
        found["backward_difference"] = (ends[0] - ends[1]).abs().max().item()
    print(f"\n{say_answers(found, args.num_devices)}", flush=True)

    facts = {"arguments": flags.as_json(vars(args)), **topology.describe(accelerator)}
    record = {**facts, "results": summary, "answers": as_json(found)}
    write_json(tracker.folder / "run.json", record)
    title = f"one update of {args.batch_size} images on {args.num_devices} {kind.kind}"
    save_picture(tracker.folder / "steps.png", lambda: draw_steps(results, title))
    if kind is CpuDevices:
        save_picture(tracker.folder / "memory.png", lambda: draw_memory(results, title))
    picture = tracker.folder / "threads.png"
    save_picture(picture, lambda: draw_speed_ups(found["speed_ups"], workers))
    show(f"done: these numbers in {tracker.folder}/run.json, pictures beside it", "green")


if __name__ == "__main__":
    main()
