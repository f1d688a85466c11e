"""What nn.DataParallel does, written by hand: the phases of a step, and what each phase costs on each device.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/from_scratch/data_parallel.py
    accelerate launch --config_file accelerate_configs/dp.yaml scripts/from_scratch/data_parallel.py --batch_size 1024

On a CPU the devices are virtual: each is a part of the memory, with one thread. On GPUs the script calls PyTorch's own
scatter, replicate, parallel_apply and gather; this has not been run on several GPUs yet. The model predicts the grey
level of each pixel of a digit. As in a language model, its logits are by far the largest tensor, so that the cost of
gathering them on the first device shows.

With 90 images in float64 on 3 virtual devices, the first device holds up to 44.7 MiB and the others 12.4 MiB; with the
loss inside the replicas, 24.5 and 13.4 MiB. The weights differ from those of plain autograd by 1e-16.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
"""

import contextlib
import copy
import itertools
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from pictures import save_picture  # the file beside this one

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import show, stop
from utils.data.images import load_images
from utils.loader import GlobalLoader
from utils.run_folder import RunFolder

MEAN, STD = 33.3184, 78.5675  # of the pixels of the 60,000 training images, 0 to 255
HIDDEN = 48
LEVELS = 16  # grey levels: the classes of each pixel
MIB = 2**20
WAYS = {
    "plain": "autograd alone, on one device",
    "gathered": "DataParallel: logits gathered on the first device, loss computed there",
    "inside": "DataParallel: loss computed inside the replicas, one number per sample gathered",
}
COLOURS = {  # of the phases of a step, in the picture
    "scatter": "#999999",
    "replicate": "#e69f00",
    "forward": "#56b4e9",
    "gather": "#f0e442",
    "loss": "#d55e00",
    "loss backward": "#a03000",
    "scatter grads": "#444444",
    "backward": "#0072b2",
    "reduce": "#009e73",
    "step": "#cc79a7",
}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--num_devices", type=flags.positive_int, help="default: all GPUs, or 3 virtual devices on a CPU"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of <split>/<class>/ images")
    training.add_argument("--num_steps", type=flags.at_least(2), default=6, help="steps; the first is not timed")
    training.add_argument(
        "--batch_size", type=flags.positive_int, default=90, help="samples per step, over all devices"
    )
    training.add_argument("--lr", type=flags.non_negative_float, default=0.1, help="learning rate")
    training.add_argument(
        "--dtype", choices=("float32", "float64"), default="float64", help="float32 rounds to 1e-7, float64 to 1e-16"
    )
    parser.add_run_flags()
    return parser.parse_args()


class Painter(nn.Module):
    def __init__(self, num_pixels):
        super().__init__()
        self.fc1 = nn.Linear(num_pixels, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, LEVELS * num_pixels)

    def forward(self, images):
        """Logits (N, LEVELS, pixels) for the grey level of each pixel of uint8 images."""
        x = (images.flatten(1).to(self.fc1.weight.dtype) - MEAN) / STD
        return self.fc2(F.silu(self.fc1(x))).unflatten(1, (LEVELS, -1))


def compute_losses(logits, images):
    """Loss of each sample, (N,): the mean over its pixels."""
    levels = images.flatten(1).long() * LEVELS // 256
    return F.cross_entropy(logits, levels, reduction="none").mean(1)


def forward_and_losses(model, images):
    return compute_losses(model(images), images)


# The phases of a step. The backward pass is the forward pass in reverse: where outputs were gathered, their gradients
# are scattered, and where weights were copied, the gradients of the copies are summed. `loss.backward()` does all of
# it in one call. Here the chain rule is cut wherever data move between devices, so that each phase can be measured.


def data_parallel_step(model, optimizer, images, devices, loss_inside):
    """One step as nn.DataParallel makes it.

    Args:
        images: on the first device, like the model and the optimizer.
        loss_inside: compute the losses inside the replicas, and gather one number per sample.

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
    # Replicas and outputs are freed here, except what the autograd graph saves for the backward pass. An edge refers
    # to a tensor's place in this graph without keeping the tensor alive.
    outputs = edges(outputs)
    copies = [edges(replica_weights) for replica_weights in copies]
    del functions, replicas
    with devices.phase("loss"), devices.on(0):
        losses = gathered if loss_inside else compute_losses(gathered, images)
        loss = losses.mean()  # over all samples: the mean of the parts' means is wrong for parts of unequal size
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
    """Counts the bytes of the tensors that are created in `with memory:`, until they are freed."""

    def __init__(self):
        super().__init__()
        self.lock = threading.RLock()  # tensors may be freed in any thread
        self.held = self.peak = 0  # bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        inputs = set()
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                inputs.add(value.untyped_storage()._cdata)
        result = operation(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            # Views and in-place operations need no new memory.
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in inputs:
                self.add(value)
        return result

    def add(self, tensor):
        storage = tensor.untyped_storage()
        with self.lock:
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self.remove, storage.nbytes())

    def remove(self, size):
        with self.lock:
            self.held -= size


class Devices:
    """What each phase costs on each device.

    Attributes:
        spans: [(phase, device, start, end)] of all work, in seconds.
        moved: {(phase, device): bytes}; a byte that is copied counts for the sender and for the receiver.
        peaks: {(phase, device): the most bytes held at once}.
    """

    def __init__(self, count):
        self.count = count
        self.reset()

    def reset(self):
        self.spans, self.moved, self.peaks = [], Counter(), {}

    def seconds(self):
        """{(phase, device): the time that the device worked in this phase}."""
        total = Counter()
        for phase, device, start, end in self.spans:
            total[phase, device] += end - start
        return total

    def count_copy(self, tensor, source, target):
        for device in (source, target):
            self.moved[self.current_phase, device] += tensor.nbytes


class CpuDevices(Devices):
    """Virtual devices: each is a part of the CPU's memory, with one thread.

    Args:
        counts_memory: count the bytes of each operation's result. This is done in Python and takes time, so measure
            memory and times in different steps.
    """

    def __init__(self, count, counts_memory=False):
        super().__init__(count)
        self.counts_memory = counts_memory
        self.memories = [Memory() for _ in range(count)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.skeletons = None

    @contextlib.contextmanager
    def phase(self, name):
        self.current_phase = name
        for memory in self.memories:
            memory.peak = memory.held
        yield
        for device, memory in enumerate(self.memories):
            self.peaks[name, device] = memory.peak

    @contextlib.contextmanager
    def on(self, device):
        """Count the time and the memory of the block for `device`."""
        start = time.perf_counter()
        with self.memories[device] if self.counts_memory else contextlib.nullcontext():
            yield
        self.spans.append((self.current_phase, device, start, time.perf_counter()))

    def add_to_first(self, tensors):
        """Count the memory of existing tensors for the first device."""
        for tensor in tensors:
            self.memories[0].add(tensor)

    def copy(self, tensor, source, target):
        if source == target:
            return tensor
        with self.on(target):
            result = tensor.clone()
        self.count_copy(tensor, source, target)
        return result

    def in_threads(self, call, *lists):
        """Call `call(*arguments)` for all devices at once, each in its device's thread; returns all results."""

        def run(device, *arguments):
            with self.on(device):
                return call(*arguments)

        futures = []
        for device, arguments in enumerate(zip(*lists, strict=True)):
            futures.append(self.threads[device].submit(run, device, *arguments))
        return [future.result() for future in futures]

    def scatter(self, images):
        """Split into equal parts. The last part may be smaller, and the last devices may get none."""
        return [self.copy(part, 0, i) for i, part in enumerate(images.chunk(self.count))]

    def replicate(self, model, count):
        """A function for each device that calls the model with that device's weights, and these weights.

        The first device uses the weights of `model` itself.
        """
        if self.skeletons is None:  # copies of the modules without weights: these are passed in each call
            self.skeletons = [copy.deepcopy(model).to("meta") for _ in range(self.count)]
        weights = dict(model.named_parameters())
        flat = CopyToDevices.apply(self, count, *weights.values())
        copies = [flat[i * len(weights) : (i + 1) * len(weights)] for i in range(count)]
        replicas = []
        for skeleton, replica_weights in zip(self.skeletons, copies, strict=False):
            named = dict(zip(weights, replica_weights, strict=True))
            replicas.append(partial(torch.func.functional_call, skeleton, named))
        return replicas, copies

    def parallel_apply(self, functions, parts):
        return self.in_threads(lambda function, part: function(part), functions, parts)

    def gather(self, outputs):
        return GatherOnFirst.apply(self, *outputs)

    def backward(self, outputs, copies, gradients):
        """The gradients of each replica's weights. Autograd has one thread for the CPU; here each device has one."""
        return self.in_threads(torch.autograd.grad, outputs, copies, gradients)


class CopyToDevices(torch.autograd.Function):
    """Forward: copy the weights to each device. Backward: sum the gradients of the copies on the first device."""

    @staticmethod
    def forward(ctx, devices, count, *weights):
        ctx.devices, ctx.num_weights = devices, len(weights)
        return tuple(devices.copy(weight, 0, i) for i in range(count) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        sums = []
        for first in range(ctx.num_weights):
            total, *others = gradients[first :: ctx.num_weights]
            for device, gradient in enumerate(others, 1):
                received = ctx.devices.copy(gradient, device, 0)
                with ctx.devices.on(0):
                    total = total + received if device == 1 else total.add_(received)
                del received
            sums.append(total)
        return None, None, *sums


class GatherOnFirst(torch.autograd.Function):
    """Forward: concatenate the outputs on the first device. Backward: send each device the gradient of its output."""

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
    """GPUs, with the functions of PyTorch that nn.DataParallel calls."""

    def __init__(self, count, counts_memory=True):  # the allocator counts it, and this takes no time
        super().__init__(count)
        self.ids = list(range(count))

    @contextlib.contextmanager
    def phase(self, name):
        self.current_phase = name
        for device in self.ids:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        for device in self.ids:  # a device's time includes waiting for the devices before it
            torch.cuda.synchronize(device)
            self.spans.append((name, device, start, time.perf_counter()))
            self.peaks[name, device] = torch.cuda.max_memory_allocated(device)

    def on(self, device):
        return torch.cuda.device(device)

    def add_to_first(self, tensors):
        pass  # the allocator has counted them

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
            replica_weights = []
            for module in replica.modules():  # a replica's weights are plain tensors, not parameters
                replica_weights += module._former_parameters.values()
            copies.append(replica_weights)
            for weight in replica_weights if device else []:
                self.count_copy(weight, 0, device)
        return replicas, copies

    def parallel_apply(self, functions, parts):
        return nn.parallel.parallel_apply(functions, parts, devices=self.ids[: len(parts)])

    def gather(self, outputs):
        self.count_copies(outputs)
        return nn.parallel.gather(outputs, 0)

    def backward(self, outputs, copies, gradients):
        """The gradients of each replica's weights, in one call: autograd has a thread for each GPU."""
        flat = torch.autograd.grad(outputs, list(itertools.chain(*copies)), gradients)
        for device in self.ids:  # the backward pass moves as many bytes as the forward pass
            self.moved["scatter grads", device] = self.moved["gather", device]
            self.moved["reduce", device] = self.moved["replicate", device]
        size = len(copies[0])
        return [flat[first : first + size] for first in range(0, len(flat), size)]


def choose_devices(args, accelerator):
    """The class of the devices. Sets args.num_devices.

    Raises:
        SystemExit: if there are several processes, or fewer GPUs than --num_devices.
    """
    if accelerator.num_processes > 1:
        stop(f"nn.DataParallel runs in one process, got {accelerator.num_processes}: use cpu.yaml or dp.yaml")
    if accelerator.device.type != "cuda":
        args.num_devices = args.num_devices or 3
        return CpuDevices
    visible = torch.cuda.device_count()
    args.num_devices = args.num_devices or visible
    if args.num_devices > visible:
        stop(f"--num_devices {args.num_devices}: only {visible} GPUs are visible; use fewer, or cpu.yaml")
    return Gpus


def load_batches(args, accelerator, device_class):
    """The images of each step."""
    train_data, _ = load_images(args.dataset)
    loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    all_batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    batches = [batch.data[0] for batch in itertools.islice(all_batches, args.num_steps)]
    return [images.cpu() for images in batches] if device_class is CpuDevices else batches  # a Mac has a GPU


def make_model(args, batches):
    """The model, with the same initial weights each time, and its optimizer."""
    torch.manual_seed(args.seed)
    model = Painter(batches[0][0].numel()).to(batches[0].device, getattr(torch, args.dtype))
    return model, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def flat_weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_plain(args, batches):
    """Train with autograd alone. Returns the final weights, and the median time of a step in ms."""
    model, optimizer = make_model(args, batches)
    times_ms = []
    for images in batches:
        start = time.perf_counter()
        compute_losses(model(images), images).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()
        times_ms.append(1000 * (time.perf_counter() - start))
    return flat_weights(model), statistics.median(times_ms[1:])


def train(args, batches, devices, loss_inside):
    """Train by hand. Returns the final weights, and (time in ms, seconds, spans) of each step but the first."""
    model, optimizer = make_model(args, batches)
    steps = []
    for images in batches:
        devices.reset()
        start = time.perf_counter()
        data_parallel_step(model, optimizer, images, devices, loss_inside)
        time_ms = 1000 * (time.perf_counter() - start)
        steps.append((time_ms, devices.seconds(), devices.spans))
    return flat_weights(model), steps[1:]


def measure(args, batches, device_class, loss_inside, reference):
    """Train by hand, and measure what each phase costs on each device.

    Args:
        reference: the weights after training with plain autograd.

    Returns:
        The record for run.json, whose "phases" are {phase: {"time_ms": [one number per device], "moved_mib": ...,
        "peak_mib": ...}}; and the spans of each phase where it was fastest.
    """
    weights, steps = train(args, batches, device_class(args.num_devices), loss_inside)
    counting = device_class(args.num_devices, counts_memory=True)
    model, optimizer = make_model(args, batches)
    counting.add_to_first(model.parameters())
    for images in batches[:2]:  # from the second step on, the optimizer has its momentum
        images = images.clone()
        counting.add_to_first([images])
        counting.reset()
        data_parallel_step(model, optimizer, images, counting, loss_inside)

    costs = {}
    for phase in dict.fromkeys(phase for phase, _ in counting.peaks):
        costs[phase] = {"time_ms": [], "moved_mib": [], "peak_mib": []}
        for device in range(args.num_devices):
            time_s = statistics.median(seconds[phase, device] for _, seconds, _ in steps)
            costs[phase]["time_ms"].append(1000 * time_s)
            costs[phase]["moved_mib"].append(counting.moved[phase, device] / MIB)
            costs[phase]["peak_mib"].append(counting.peaks[phase, device] / MIB)
    peaks = zip(*(cost["peak_mib"] for cost in costs.values()), strict=True)
    record = {
        "step_time_ms": statistics.median(time_ms for time_ms, _, _ in steps),
        "difference_to_plain": (weights - reference).abs().max().item(),
        "moved_mib": sum(sum(cost["moved_mib"]) for cost in costs.values()) / 2,
        "peak_mib": [max(device_peaks) for device_peaks in peaks],
        "phases": costs,
    }
    return record, fastest_phases([spans for *_, spans in steps])


def fastest_phases(steps):
    """The spans of each phase from the step in which it was fastest, one phase after the other, from time 0."""
    timeline, now = [], 0.0
    for phase in COLOURS:
        repetitions = []
        for spans in steps:
            of_phase = [span for span in spans if span[0] == phase]
            first = min((start for _, _, start, _ in of_phase), default=0)
            repetitions.append([(phase, device, start - first, end - first) for _, device, start, end in of_phase])
        lengths = [max((end for *_, end in spans), default=0) for spans in repetitions]
        fastest = repetitions[lengths.index(min(lengths))]
        timeline += [(phase, device, now + start, now + end) for _, device, start, end in fastest]
        now += min(lengths)
    return timeline


def phase_table(costs, count):
    """One line per phase; three groups of columns, with one column per device."""
    groups = {"time_ms": "time, ms", "moved_mib": "moved, MiB", "peak_mib": "peak memory, MiB"}
    numbers = "".join(f"{device:>8}" for device in range(count))
    lines = [" " * 14 + "".join(f" {title:>{8 * count}}" for title in groups.values())]
    lines.append(f"{'phase, device':<14}" + f" {numbers}" * 3)
    for phase, cost in costs.items():
        columns = ("".join(f"{value:>8.2f}" for value in cost[group]) for group in groups)
        lines.append(f"{phase:<14} " + " ".join(columns))
    return "\n".join(lines)


def way_table(results):
    """One line per way."""
    lines = ["way        ms/step  max |weight - plain|  moved, MiB  peak MiB per device     what it does"]
    for way, text in WAYS.items():
        row = results[way]
        peaks = " ".join(f"{peak:.1f}" for peak in row.get("peak_mib", []))
        numbers = f"{row['step_time_ms']:>8.1f} {row['difference_to_plain']:>21.1e} {row.get('moved_mib', 0):>11.2f}"
        lines.append(f"{way:<9} {numbers}  {peaks:<22}  {text}")
    return "\n".join(lines)


def draw(results, spans, count):
    """For both ways: when each device works, and the peak memory of each phase."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex="row", sharey="row", height_ratios=(1, 1.4))
    titles = {"gathered": "logits gathered, loss on device 0", "inside": "loss inside the replicas"}
    for (way, title), (timeline, memory) in zip(titles.items(), panels.T, strict=True):
        for phase, device, start, end in spans[way]:
            timeline.barh(device, 1000 * (end - start), 0.7, 1000 * start, color=COLOURS[phase])
        timeline.set(title=title, xlabel="ms, each phase from its fastest step", ylim=(count - 0.5, -0.5))
        timeline.set_yticks(range(count), [f"device {device}" for device in range(count)])
        costs = results[way]["phases"]
        for device in range(count):
            places = [number + 0.8 * ((device + 0.5) / count - 0.5) for number in range(len(costs))]
            peaks = [cost["peak_mib"][device] for cost in costs.values()]
            memory.bar(places, peaks, 0.8 / count, color=COLOURS.values(), edgecolor="white")
        memory.set_xticks(range(len(costs)), costs, rotation=45, ha="right")
        memory.set_xlabel(f"{count} bars per phase: one per device, the first one left")
    panels[0, 0].set_ylabel("who works")
    panels[1, 0].set_ylabel("peak memory, MiB")
    figure.legend(handles=[Patch(color=colour, label=phase) for phase, colour in COLOURS.items()], loc="outside right")
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # each virtual device stands for one thread
    device_class = choose_devices(args, accelerator)
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    batches = load_batches(args, accelerator, device_class)
    reference, time_ms = train_plain(args, batches)
    results, spans = {"plain": {"step_time_ms": time_ms, "difference_to_plain": 0.0}}, {}
    for way in ("gathered", "inside"):
        results[way], spans[way] = measure(args, batches, device_class, way == "inside", reference)
        print(f"{WAYS[way]}\n{phase_table(results[way]['phases'], args.num_devices)}\n", flush=True)
    print(way_table(results), flush=True)
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    write_json(folder.path / "run.json", {**facts, "results": results})
    save_picture(folder.path / "data_parallel.png", lambda: draw(results, spans, args.num_devices))
    show(f"done: these numbers are in {folder.path}/run.json, a picture in data_parallel.png")


if __name__ == "__main__":
    main()
