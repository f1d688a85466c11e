"""What nn.DataParallel does, written by hand: the phases of a step, and what each costs on each device.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/from_scratch/data_parallel.py
    accelerate launch --config_file accelerate_configs/dp.yaml scripts/from_scratch/data_parallel.py --batch_size 1024

On a CPU the devices are virtual: parts of its memory, with a thread each. On GPUs, torch's own scatter, replicate,
parallel_apply and gather run; that path has not been run on several GPUs yet. The model predicts the grey level of each
pixel of a digit. As in a language model, the logits are by far its largest tensor, which shows what gathering them on
the first device means.

On 3 virtual devices, with 90 images in float64, the first one holds up to 44.7 MiB and the others 12.4; with the loss
inside the replicas 24.5 and 13.4. The weights are plain autograd's to 1e-16.
Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html; threads of the backward pass,
https://docs.pytorch.org/docs/main/generated/torch.autograd.grad_mode.set_multithreading_enabled.html.
"""

import contextlib
import copy
import itertools
import os
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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

from utils import flags, launch
from utils.atomic_files import write_json
from utils.console import plural, show, stop
from utils.datasets.images_in_memory import load_images
from utils.extras.banner import describe_topology
from utils.extras.curves import save_picture
from utils.loader import GlobalLoader
from utils.run_folder import RunFolder

MEAN, STD = 33.3184, 78.5675  # of the pixels of the 60,000 training images, 0 to 255
HIDDEN = 48
LEVELS = 16  # of grey: the classes of each pixel
MIB = 2**20
WAYS = {
    "plain": "autograd alone, on one device",
    "gathered": "DataParallel, logits gathered on the first device, loss there",
    "inside": "DataParallel, loss inside the replicas, one number per sample gathered",
}


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
    """One loss per sample, (N,): the mean over its pixels."""
    levels = images.flatten(1).long() * LEVELS // 256
    return F.cross_entropy(logits, levels, reduction="none").mean(1)


def forward_and_losses(model, images):
    return losses_of(model(images), images)


# The phases of a step. The backward pass is the forward pass in reverse: where the outputs were gathered their
# gradients are scattered, and where the weights were copied the gradients of the copies are summed. `loss.backward()`
# does all of it in one call; here the chain rule is cut where the data change devices, so that each phase can be seen.


def data_parallel_step(model, optimizer, images, devices, loss_inside):
    """One step as nn.DataParallel makes it.

    Args:
        images: on the first device, as are the model and the optimizer.
        loss_inside: compute the losses in the replicas, and gather one number per sample.

    Returns:
        The gradients of each replica's weights.
    """
    weights = list(model.parameters())
    with devices.phase("scatter"):
        parts = devices.scatter(images)
    with devices.phase("replicate"):
        replicas, copies = devices.replicate(model, len(parts))
    with devices.phase("forward"):
        functions = replicas
        if loss_inside:
            functions = [partial(forward_and_losses, replica) for replica in replicas]
        outputs = devices.parallel_apply(functions, parts)
    with devices.phase("gather"):
        gathered = devices.gather(outputs)
    # The replicas end here, and the outputs are on the first device. The others hold only what the graph keeps, and
    # edges are places in it.
    outputs = edges(outputs)
    copies = [edges(replica) for replica in copies]
    del functions, replicas
    with devices.phase("loss"), devices.on(0):
        losses = gathered if loss_inside else losses_of(gathered, images)
        # Over all samples: a mean of the means of unequal parts would be another number.
        loss = losses.mean()
    with devices.phase("loss backward"), devices.on(0):
        (gradient,) = torch.autograd.grad(loss, gathered)
    with devices.phase("scatter grads"):
        gradients = list(torch.autograd.grad(gathered, outputs, gradient))
        del gradient
    with devices.phase("backward"):
        gradients = devices.backward(outputs, copies, gradients)
    with devices.phase("reduce"):
        flat = list(itertools.chain(*copies))
        sums = torch.autograd.grad(flat, weights, list(itertools.chain(*gradients)))
    with devices.phase("step"), devices.on(0):
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
        self.phase = ""
        self.lock = threading.RLock()  # tensors are freed in any thread
        self.held = Counter()  # bytes, by the phase that made them
        self.peak = self.highest = 0  # of this phase; of all phases
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
            self.held[self.phase] += storage.nbytes()
            weakref.finalize(storage, self.free, self.phase, storage.nbytes())
            total = sum(self.held.values())
            self.peak = max(self.peak, total)
            if total > self.highest:
                self.highest, self.held_at_highest = total, self.held.copy()

    def free(self, phase, size):
        with self.lock:
            self.held[phase] -= size


def split(values, size):
    return [values[first : first + size] for first in range(0, len(values), size)]


class Devices:
    """What the phases cost: times, bytes moved and memory held, for each phase and device.

    spans: (device, phase, began_s, ended_s). moved, peaks: bytes by (phase, device); a byte that is copied counts for
    both devices.
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

    Args:
        counts_memory: look at each operation in Python, which takes time: measure memory and times in different steps.
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
    def phase(self, name):
        self.now = name
        for memory in self.memories:
            memory.phase, memory.peak = name, sum(memory.held.values())
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
        self.memories[0].phase = name
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
        """Equal parts; the last is smaller if they do not divide, and the last devices may get none."""
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
    def phase(self, name):
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


def plain_step(model, optimizer, images):
    """One step by autograd alone, on one device."""
    losses_of(model(images), images).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    dtype = "float32: half the memory, and differences of 1e-7 instead of 1e-16"
    add = parser.add_argument_group("devices").add_argument
    add("--num_devices", type=flags.positive_int, help="default: all GPUs, or 3 virtual devices on a CPU")
    add = parser.add_argument_group("training").add_argument
    add("--dataset", default="ylecun/mnist", help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--num_steps", type=flags.at_least(2), default=6, help="steps; the first is not timed")
    add("--batch_size", type=flags.positive_int, default=90, help="samples per step, over all devices together")
    add("--lr", type=flags.non_negative_float, default=0.1, help="learning rate")
    add("--dtype", choices=("float32", "float64"), default="float64", help=dtype)
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


def load_batches(args, accelerator, kind):
    """The images of each step."""
    train_data, _ = load_images(args.dataset)
    loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    all_batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    batches = [batch.data[0] for batch in itertools.islice(all_batches, args.num_steps)]
    return [images.cpu() for images in batches] if kind is CpuDevices else batches  # a Mac has a GPU


def make(args, batches):
    """The model, with the same weights each time, and its optimizer."""
    torch.manual_seed(args.seed)
    model = Painter(batches[0][0].numel()).to(batches[0].device, getattr(torch, args.dtype))
    return model, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def flat_weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_plain(args, batches):
    """The final weights, and the median time of a step in ms."""
    model, optimizer = make(args, batches)
    times_ms = []
    for images in batches:
        began = time.perf_counter()
        plain_step(model, optimizer, images)
        if images.is_cuda:
            torch.cuda.synchronize()
        times_ms.append(1000 * (time.perf_counter() - began))
    return flat_weights(model), statistics.median(times_ms[1:])


def train(args, batches, devices, loss_inside):
    """The final weights, and the spans of each step but the first."""
    model, optimizer = make(args, batches)
    steps = []
    for images in batches:
        devices.clear()
        data_parallel_step(model, optimizer, images, devices, loss_inside)
        steps.append(devices.spans)
    return flat_weights(model), steps[1:]


def measure(args, batches, kind, loss_inside):
    """Train, and find what each phase costs on each device.

    Returns:
        The final weights; {phase: {"time_ms": [one number per device], "moved_mib": ..., "peak_mib": ...}}; the spans
        of the fastest step; the devices that have counted the memory.
    """
    weights, steps = train(args, batches, kind(args.num_devices), loss_inside)
    counting = kind(args.num_devices, counts_memory=True)
    model, optimizer = make(args, batches)
    counting.place(model.parameters(), "model")
    for images in batches[:2]:  # in the second one the optimizer has its momentum
        images = images.clone()
        counting.place([images], "batch")
        counting.clear()
        data_parallel_step(model, optimizer, images, counting, loss_inside)

    costs = {}
    for phase in dict.fromkeys(name for _, name, _, _ in steps[0]):
        costs[phase] = {"time_ms": [], "moved_mib": [], "peak_mib": []}
        for device in range(args.num_devices):
            times_ms = []
            for spans in steps:
                times_ms.append(sum(1000 * (end - begin) for *of, begin, end in spans if of == [device, phase]))
            costs[phase]["time_ms"].append(statistics.median(times_ms))
            costs[phase]["moved_mib"].append(counting.moved[phase, device] / MIB)
            costs[phase]["peak_mib"].append(counting.peaks.get((phase, device), 0) / MIB)
    return weights, costs, min(steps, key=duration), counting


def duration(spans, phase=None):
    """Seconds from the beginning of the first span (of a phase) to the end of the last."""
    spans = [span for span in spans if phase in (None, span[1])]
    return max(span[3] for span in spans) - min(span[2] for span in spans)


def summarize(reference, weights, costs, spans):
    """The record of one way for run.json."""
    peaks = zip(*(cost["peak_mib"] for cost in costs.values()), strict=True)
    return {
        "step_time_ms": 1000 * duration(spans),
        "difference_to_plain": (weights - reference).abs().max().item(),
        "moved_mib": sum(sum(cost["moved_mib"]) for cost in costs.values()) / 2,
        "peak_mib": [max(of_device) for of_device in peaks],
        "phases": costs,
    }


def phase_table(costs, count):
    """One line per phase; three groups of columns, with one for each device."""
    groups = {"time_ms": "time, ms", "moved_mib": "moved, MiB", "peak_mib": "peak memory, MiB"}
    numbers = "".join(f"{device:>8}" for device in range(count))
    lines = [" " * 14 + "".join(f" {title:>{8 * count}}" for title in groups.values())]
    lines.append(f"{'phase, device':<14}" + f" {numbers}" * 3)
    for phase, cost in costs.items():
        columns = ("".join(f"{value:>8.2f}" for value in cost[group]) for group in groups)
        lines.append(f"{phase:<14} " + " ".join(columns))
    return "\n".join(lines)


def way_table(summary):
    """One line per way."""
    lines = ["way         ms/step  weights-plain  moved, MiB  peak MiB of each device  what it does"]
    for way, text in WAYS.items():
        row = summary[way]
        peaks = " ".join(f"{peak:.1f}" for peak in row.get("peak_mib", []))
        numbers = f"{row['step_time_ms']:>9.1f} {row['difference_to_plain']:>14.1e} {row.get('moved_mib', 0):>11.2f}"
        lines.append(f"{way:<9} {numbers}  {peaks:<23}  {text}")
    return "\n".join(lines)


# What is said of nn.DataParallel, and what is measured.


def sizes_of_parts(kind, count, images):
    """{(inputs, devices): how many inputs each device gets}."""
    sizes = {}
    for inputs, num_devices in ((30, 1), (30, 2), (30, 3), (4, 3)):
        if kind is CpuDevices or num_devices <= count:
            devices = kind(num_devices)
            with devices.phase("scatter"):
                parts = devices.scatter(images.new_zeros(inputs, 1))
            sizes[inputs, num_devices] = [len(part) for part in parts]
    return sizes


def look_at_replicas(args, batches, kind):
    """Train, and compare the replicas with the model before each step, and with each other in it."""
    devices = kind(args.num_devices)
    model, optimizer = make(args, batches)
    weights = list(model.parameters())
    differences, spread = [], []
    for images in batches:
        with devices.phase("replicate"):
            _, copies = devices.replicate(model, args.num_devices)
        for replica in copies:
            for weight, copied in zip(weights, replica, strict=True):
                differences.append((weight.cpu() - copied.cpu()).abs().max().item())
        addresses = {tensor.data_ptr() for tensor in (*weights, *copies[0])}
        del copies
        devices.clear()
        gradients = data_parallel_step(model, optimizer, images, devices, False)
        first, last = (torch.cat([tensor.flatten().cpu() for tensor in gradients[i]]) for i in (0, -1))
        spread.append(float((first - last).norm() / first.norm()))
    return {
        "weights_on_first_device": len(addresses) / len(weights),
        "replica_to_model": max(differences),
        "gradients_of_replicas": statistics.median(spread),
        "backward_threads": len(devices.backward_threads),
    }


def train_apart(args, batches):
    """The largest difference of a weight, if replicas trained on their parts without the sum."""
    ends = []
    for device in range(args.num_devices):
        model, optimizer = make(args, batches)
        for images in batches:
            parts = images.chunk(args.num_devices)
            if device < len(parts):
                plain_step(model, optimizer, parts[device])
        ends.append(flat_weights(model))
    return max((end - ends[0]).abs().max().item() for end in ends)


def compare_backward(args, batches):
    """The backward pass with a thread for each virtual device, and with autograd's one thread."""
    (weights, steps), (other_weights, other_steps) = (
        train(args, batches, CpuDevices(args.num_devices, one_call=one_call), False) for one_call in (False, True)
    )
    best_ms = [min(1000 * duration(spans, "backward") for spans in each) for each in (steps, other_steps)]
    difference = (weights - other_weights).abs().max().item()
    return {"backward_threads_ms": best_ms[0], "backward_one_thread_ms": best_ms[1], "backward_difference": difference}


def measure_answers(args, batches, kind):
    found = {"parts": sizes_of_parts(kind, args.num_devices, batches[0])}
    found |= look_at_replicas(args, batches, kind)
    found["apart"] = train_apart(args, batches)
    return found | (compare_backward(args, batches) if kind is CpuDevices else {})


def answers_as_text(found, count):
    """What `measure_answers` found, as sentences."""
    lines = [f"{inputs} inputs on {plural(n, 'device')}: {sizes}" for (inputs, n), sizes in found["parts"].items()]
    is_parallel = found["backward_threads"] == count > 1
    backward = f"  {plural(count, 'replica')} in {plural(found['backward_threads'], 'thread')}"
    if "backward_difference" in found:
        backward += f": {found['backward_threads_ms']:.1f} ms; in one thread {found['backward_one_thread_ms']:.1f} ms; "
        backward += (
            f"on {plural(os.cpu_count(), 'core')}.\n  The weights then differ by {found['backward_difference']:g}"
        )
    copies, differ = found["weights_on_first_device"], found["replica_to_model"]
    lines += [
        "",
        f"Is the backward pass parallel? {'Yes' if is_parallel else 'No'}.",
        f"{backward}. No replica needs anything from another.",
        "  Autograd has one thread for each GPU, and one for a CPU: here each replica has its own.",
        "  So is the forward pass. In all other phases the other devices wait for the first one.",
        f"Are there two copies of the model on the first device? {'No' if copies == 1 else 'Yes'}.",
        f"  It holds {copies:g} of each weight: its replica uses those of the model.",
        f"Do replicas learn different models? {'No' if differ == 0 else 'Yes'}.",
        f"  They differ from the model by {differ:g} before each step, their gradients by "
        f"{found['gradients_of_replicas']:.0%}.",
        "  The sum of the gradients steps the model, and the replicas are thrown away.",
        f"  Trained apart, without the sum, they would now differ by {found['apart']:.1e}.",
    ]
    return "\n".join(lines)


# Colour, and what the phase makes. What the first device does alone is red, orange and brown.
PHASES = {
    "model": ("#555555", "the weights"),
    "batch": ("#bbbbbb", "the images"),
    "scatter": ("#cab2d6", "parts of the images"),
    "replicate": ("#6a3d9a", "copies of the weights"),
    "forward": ("#1f78b4", "activations"),
    "gather": ("#e31a1c", "logits of all samples"),
    "loss": ("#fb9a99", "log-softmax"),
    "loss backward": ("#ff7f00", "gradients of the logits"),
    "scatter grads": ("#fdbf6f", "parts of these gradients"),
    "backward": ("#33a02c", "gradients of the weights"),
    "reduce": ("#b15928", "the others' gradients, the sum"),
    "step": ("#dfc27d", "momentum of the optimizer"),
}
TITLES = {"gathered": "outputs gathered, loss on device 0", "inside": "loss inside the replicas"}


def draw_phases(results, title):
    """For each way: when each device does what, the bytes moved, and the memory of each phase."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 11), layout="constrained")
    panels = figure.subplots(3, 2, sharex="row", sharey="row", height_ratios=(2, 3, 3))
    for way, (timeline, moved, memory) in zip(TITLES, panels.T, strict=True):
        _, costs, spans, _ = results[way]
        draw_timeline(timeline, spans)
        timeline.set_title(TITLES[way])
        draw_bars(moved, costs, "moved_mib")
        moved.legend(loc="upper right")  # the last phase, which is there, moves nothing
        draw_bars(memory, costs, "peak_mib")
    for axes, label in zip(panels[:, 0], ("device", "MiB sent and received", "peak memory, MiB"), strict=True):
        axes.set_ylabel(label)
    handles = [Patch(color=PHASES[phase][0], label=phase) for phase in results["gathered"][1]]
    figure.legend(handles=handles, loc="outside lower center", ncols=10)
    figure.suptitle(title)
    return figure


def draw_timeline(axes, spans):
    start = min(span[2] for span in spans)
    for device, phase, began, ended in spans:
        axes.barh(device, 1000 * (ended - began), left=1000 * (began - start), height=0.8, color=PHASES[phase][0])
    devices = sorted({span[0] for span in spans})
    axes.set(yticks=devices, xlabel="ms of the fastest step", ylim=(len(devices) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")


def draw_bars(axes, costs, kind):
    """A group of bars for each phase, with one for each device."""
    from matplotlib import colormaps

    count = len(costs["forward"][kind])
    width = 0.8 / count
    for device in range(count):
        places = [number + (device - (count - 1) / 2) * width for number in range(len(costs))]
        values = [cost[kind][device] for cost in costs.values()]
        colour = colormaps["Blues"](0.9 - 0.6 * device / max(count - 1, 1))
        axes.bar(places, values, width, color=colour, label=f"device {device}")
    axes.set_xticks(range(len(costs)), [phase.replace(" ", "\n") for phase in costs], fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def draw_memory(results, title):
    """What fills each device at the moment when it holds most, by the phase that made it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    handles = {}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, way in zip(panels, TITLES, strict=True):
        memories = results[way][3].memories
        bottoms = [0.0] * len(memories)
        for phase, (colour, what) in PHASES.items():
            values = [memory.held_at_highest[phase] / MIB for memory in memories]
            axes.bar(range(len(memories)), values, 0.7, bottoms, color=colour)
            bottoms = [a + b for a, b in zip(bottoms, values, strict=True)]
            if max(values) > 0.01 * max(bottoms):
                handles[phase] = Patch(color=colour, label=f"{phase}: {what}")
        for device, total in enumerate(bottoms):
            axes.text(device, total, f"{total:.1f}", ha="center", va="bottom")
        axes.set(title=TITLES[way], xlabel="device", xticks=range(len(memories)))
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("most memory held, MiB, by the phase that made it")
    figure.legend(
        handles=[handles[phase] for phase in reversed(PHASES) if phase in handles], loc="outside right center"
    )
    figure.suptitle(title)
    return figure


def main():
    args = parse_args()
    # One thread for each device is what is shown: no operation has more than one.
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    kind = choose_devices(args, accelerator)
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # locked as long as it is referred to
    batches = load_batches(args, accelerator, kind)
    reference, time_ms = train_plain(args, batches)
    results, summary = {}, {"plain": {"step_time_ms": time_ms, "difference_to_plain": 0.0}}
    for way in TITLES:
        results[way] = weights, costs, spans, _ = measure(args, batches, kind, way == "inside")
        summary[way] = summarize(reference, weights, costs, spans)
        print(f"{WAYS[way]}\n{phase_table(costs, args.num_devices)}\n", flush=True)
    print(way_table(summary), end="\n\n")
    found = measure_answers(args, batches, kind)
    print(answers_as_text(found, args.num_devices), flush=True)

    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    answers = {**found, "parts": {f"{inputs} on {n}": sizes for (inputs, n), sizes in found["parts"].items()}}
    write_json(folder.path / "run.json", {**facts, "results": summary, "answers": answers})
    title = f"one step of {args.batch_size} images on {args.num_devices} {kind.kind}"
    save_picture(folder.path / "phases.png", lambda: draw_phases(results, title))
    if kind is CpuDevices:
        save_picture(folder.path / "memory.png", lambda: draw_memory(results, title))
    show(f"done: these numbers in {folder.path}/run.json, pictures beside it", "green")


if __name__ == "__main__":
    main()
