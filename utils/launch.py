"""Start a run on the topology that the config file asks for, and end it when a signal asks for that."""

import argparse
import atexit
import contextlib
import ctypes
import datetime
import functools
import gc
import os
import re
import shlex
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate.optimizer
import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from torch import nn

from utils import CLEAR_LINE, show, stop

# BSD's "temporary failure, try again" (sysexits.h): the state is saved, the same command with --resume goes on from it.
EXIT_REQUEUE = 75

# What a machine may have as its own: where its files are, and how many threads read them.
OWN = {"output_dir", "dataset", "num_workers"}
# What gloo, NCCL and their store say when another process is gone or silent, and not when they are used wrongly.
LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process", re.I
)


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default behind a flag's help, unless that speaks of it, and N or X where a number goes."""

    def __init__(self, prog: str, **kwargs):
        super().__init__(prog, max_help_position=27, **kwargs)

    def _get_help_string(self, action):
        default = action.default
        is_switch = default is None or default == argparse.SUPPRESS or (default is False and action.const is True)
        if is_switch or "default" in action.help:
            return action.help
        if isinstance(default, str) and os.path.isabs(default):
            default = os.path.relpath(default)
        # So that no line ends before the value.
        return f"{action.help} (default:\N{NO-BREAK SPACE}{default})".replace("%", "%%")

    def _fill_text(self, text, width, indent):
        return text if text.startswith("examples") else super()._fill_text(text, width, indent)

    def format_help(self):
        return super().format_help().replace("\N{NO-BREAK SPACE}", " ")

    def _get_default_metavar_for_optional(self, action):
        numbers = {"int": "N", "float": "X"}
        return numbers.get(getattr(action.type, "__name__", "")) or super()._get_default_metavar_for_optional(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with --help and errors that are printed once and not once a process, an error as one sentence.

    docstring: that of the script; its first line and its indented lines, the commands, are what --help says of it.
    """

    def __init__(self, docstring: str | None = None):
        first, *others = (docstring or "").splitlines() or [""]
        commands = [f"  {' '.join(line.split())}" for line in others if line.startswith("    ")]
        super().__init__(
            usage=f"accelerate launch --config_file CONFIG {sys.argv[0]} [flags]".replace("%", "%%"),
            description=f"{first} The number of processes, their devices and the precision are in CONFIG alone.",
            epilog="\n".join(["examples:", *commands]) if commands else None,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def add_run_flags(self, log_every: int | None = None) -> None:
        """The flags that say where a run writes and how it goes on: the same words, and the last group, in each script.

        log_every: the default of the flag; None: a script that neither logs its updates nor can go on.
        """
        add = self.add_argument_group("run").add_argument
        add("--output_dir", metavar="FOLDER", help="what this run leaves goes here (default: a new one under runs/)")
        if log_every:
            count, size = at_least(0), at_least(1)
            add("--resume", action="store_true", help="go on from the newest checkpoint in --output_dir, if any")
            add("--checkpoint_every", type=count, default=0, help="updates from one to the next; 0: after each epoch")
            add("--keep_checkpoints", type=count, default=2, help="the newest ones that stay; 0: all")
            add("--log_every", type=size, default=log_every, help="updates from one line to the next")
            add("--log_with", metavar="TRACKER", help="one that Accelerate knows, such as tensorboard")
            few = "measure so many updates (10) after the first ten: a table, a trace for a viewer (default: none)"
            add("--profile", nargs="?", type=size, const=10, default=0, metavar="UPDATES", help=few)
        wait = "seconds that a process waits for another one, also while the main process saves, before all end"
        add("--timeout_s", type=at_least(1), default=600, help=wait)

    def print_help(self, file=None):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def error(self, message):
        stop(f"{message} (--help lists all flags)")


def at_least(minimum: float, kind: type = int, below: float = float("inf")):
    """An argparse type: a number from `minimum` up, and below `below`."""

    def number(text: str):
        value = kind(text)
        if not minimum <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not from {minimum} up and below {below}")
        return value

    number.__name__ = kind.__name__  # argparse puts it into "invalid int value"
    return number


def make_accelerator(args: argparse.Namespace, cpu_threads: int | None = None, split_batch: bool = True) -> Accelerator:
    """The Accelerator for the topology in the config file, checked against what really started.

    Reads `batch_size`, `gradient_accumulation_steps`, `seed`, `timeout_s`, `log_with`, `output_dir` and `resume` (None:
    no such flag) from `args`, fills in `output_dir` where none was given, and sets `resume` where the launcher
    restarted a run that had failed.
    `cpu_threads`: threads of a process for work on the CPU; None: its share of the cores. `split_batch`: whether each
    process takes a share of the batch; not so where processes share the model.

    From here on, a process that loses another one ends with a sentence (`explain_lost_peers`).

    Raises: SystemExit, in one sentence, if fewer or other processes run than were asked for, if a GPU was asked for
    and none is there, if processes have different arguments, or if the global batch does not divide.
    """
    if not gc.isenabled():  # utils/__init__.py has disabled it; not again in a second run of one process
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else triton reports what it finds frozen as leaked
    # Accelerate searches the disk for a package "lomo" in each optimizer.step and zero_grad: as long as a step of a
    # small model takes. The answer does not change.
    accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)
    fresh_dir = args.output_dir is None
    if fresh_dir:
        args.output_dir = f"runs/{Path(sys.argv[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
            stop(
                "--max_restarts needs --rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 set: else the "
                "processes that it restarts find the addresses of the old ones in the launcher's store"
            )
        if fresh_dir:
            stop("--max_restarts needs an --output_dir, to go on from what is in it")
    peers = explain_lost_peers(can_resume=getattr(args, "resume", None) is not None)
    bind_gloo_to_the_route()
    try:
        accelerator = Accelerator(
            # The launcher of several processes does not hand `use_cpu` on. Without it Accelerate looks for GPUs, finds
            # none, reports one process, and N processes train N models.
            cpu=wants_cpu() or not torch.accelerator.is_available(),
            log_with=args.log_with,
            project_dir=args.output_dir,
            # split_batches: without it Accelerate steps the learning-rate schedule once a process, N times too fast.
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                # Not 600 s to the dot: Accelerate leaves out what equals its own default, and gloo's is half an hour.
                InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=args.timeout_s, milliseconds=1)),
            ],
        )
    except (ValueError, RuntimeError) as error:  # a precision or a tracker that is not there, FSDP on a CPU, ...
        if LOST.search(str(error)):
            raise
        stop(f"Accelerate cannot start with this config and these flags: {' '.join(str(error).split())}")
    check_topology(accelerator)
    peers += gather_object([introduction()])
    # Nobody is there to type --resume. On a machine where no process had failed the count stays 0.
    if any(peer["restarts"] for peer in peers):
        args.resume = True
    same_on_all(accelerator, {"script": Path(sys.argv[0]).name, **vars(args)})
    pieces = accelerator.num_processes * args.gradient_accumulation_steps
    if split_batch and args.batch_size % pieces:
        below = args.batch_size - args.batch_size % pieces
        stop(
            f"--batch_size {args.batch_size} does not divide by {accelerator.num_processes} processes x "
            f"{args.gradient_accumulation_steps} accumulation steps: take {below or pieces} or {below + pieces}"
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    torch.set_num_threads(cpu_threads or max(1, cores // local_processes))
    set_seed(args.seed)
    if fresh_dir:
        args.output_dir = broadcast_object_list([args.output_dir])[0]
        sys.argv += ["--output_dir", args.output_dir]  # so that the commands that are printed go on in this folder
    return accelerator


def introduction() -> dict:
    """This process, for the others: its host, the address it has for them, and how often its launcher restarted it."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return {"host": socket.gethostname(), "address": own_address(), "restarts": restarts}


def own_address() -> str | None:
    """The address by which this machine reaches the main process; None with one machine, or without a route."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing: it only looks the route up
        except OSError:  # an IPv6 address, or no route
            return None
        address = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def same_on_all(accelerator: Accelerator, facts: dict) -> dict:
    """`facts`, if all processes have the same ones, but for those in OWN. A collective.

    Different arguments or data would train one model on two machines by two recipes, or hang.
    Raises: SystemExit on all processes; names the first one that differs, its host, and in what.
    """
    shared = {name: value for name, value in facts.items() if name not in OWN}
    everyone = gather_object([(socket.gethostname(), shared)])
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        pairs = {name: (theirs.get(name), first.get(name)) for name in {**first, **theirs}}
        differ = [f"{name} {their!r}, not {ours!r}" for name, (their, ours) in pairs.items() if their != ours]
        if differ:
            stop(f"rank {rank} on {host} has {'; '.join(differ)} as rank 0 on {first_host}")
    return facts


def bind_gloo_to_the_route() -> None:
    """Have gloo listen on the interface that leads to the main process, unless GLOO_SOCKET_IFNAME names one.

    gloo takes the address that the host's own name resolves to: 127.0.1.1 on a stock Debian or Ubuntu, where no other
    machine finds it.
    """
    address = own_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def explain_lost_peers(can_resume: bool = True) -> list[dict]:
    """Turn the error of a collective whose other end is gone or silent into one sentence, on each process that sees it.

    It names this process, the line of code that waited, and the ranks on the machine that the error names, or on those
    that do not answer. Returns a list to be filled with the `introduction`s of all processes.
    """
    peers, rank, host, other_hook = [], int(os.environ.get("RANK", 0)), socket.gethostname(), sys.excepthook

    def explain(kind, error, trace):
        if not (issubclass(kind, RuntimeError) and LOST.search(str(error))):
            return other_hook(kind, error, trace)
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].split(". This is typically")[0]
        addresses = {peer["address"] for peer in peers} - {None, own_address()}
        lost = {each for each in addresses if re.search(rf"\b{re.escape(each)}\b", reason)}
        if not lost:
            with ThreadPoolExecutor(64) as pool:
                lost = {each for each, up in zip(addresses, pool.map(is_up, addresses), strict=True) if not up}
        names = [f"rank {other} on {peer['host']}" for other, peer in enumerate(peers) if peer["address"] in lost]
        ours = [frame for frame in traceback.extract_tb(trace) if "site-packages" not in frame.filename]
        where = f" at {os.path.relpath(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
        way_on = f"; to go on: {resume_command()}" if can_resume else ""
        peer = " or ".join(names) or "another process"
        show(f"error: rank {rank} on {host} lost {peer}{where}: {reason}{way_on}", "red", sys.stderr)

    if "RANK" in os.environ:
        sys.excepthook = explain
    return peers


def is_up(address: str) -> bool:
    """Whether a machine answers, be it by refusing a connection to a port where nobody listens."""
    try:
        socket.create_connection((address, 1), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


@functools.cache
def launcher_words() -> list[str] | None:
    """The words after `accelerate launch` in the command above this process; None if it was started otherwise.

    The launcher does not hand its config to the script, but it stays the script's ancestor while the script runs.
    """
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for at, word in enumerate(words[:4]):
            if Path(word).name == "accelerate" and words[at + 1 : at + 2] == ["launch"]:
                return words[at + 2 :]
            if Path(word).name == "accelerate-launch" or word == "accelerate.commands.launch":
                return words[at + 1 :]
    return None


@functools.cache
def requested_topology():
    """What `accelerate launch` was asked for: its options and its config, each None where there is none."""
    if launcher_words() is None:
        return None, None
    options = launch_command_parser().parse_args(launcher_words())
    if options.config_file is None and os.path.isfile(default_config_file) and not options.cpu:
        options.config_file = default_config_file  # Accelerate takes it without a word
    return options, options.config_file and load_config_from_file(options.config_file)


def wants_cpu() -> bool:
    """Whether the config file or a flag of the launcher asks for the CPU, on a machine with GPUs as well."""
    options, config = requested_topology()
    gpus_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    return gpus_hidden or bool(options and options.cpu) or bool(config and config.use_cpu)


def check_topology(accelerator: Accelerator) -> None:
    """Compare what runs with what was asked for. Raises: SystemExit where they differ."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        stop(
            f"the launcher started {started} processes, but they do not find each other and would train {started} "
            "separate models: take accelerate_configs/cpu_ddp.yaml for several processes on the CPU"
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator.device.type == "cuda" and local_processes > torch.cuda.device_count():
        stop(
            f"{local_processes} processes were started on a machine where {torch.cuda.device_count()} GPUs are "
            "visible, and some would share one: set num_processes in the config file to the number of GPUs"
        )
    options, config = requested_topology()
    if config is None:
        return
    name = os.path.relpath(options.config_file)
    asked, kind = options.num_processes or config.num_processes, config.distributed_type
    if isinstance(asked, int) and asked != accelerator.num_processes:  # else a word for torchrun: "gpu"
        stop(
            f"{name} asks for {asked} processes by distributed_type {kind.value}, but what runs is "
            f"{accelerator.num_processes}: accelerate_configs has files that start what they say"
        )
    if accelerator.device.type == "cpu" and not wants_cpu():
        stop(f"{name} asks for a GPU and none is visible here: take cpu.yaml or cpu_ddp.yaml")
    if kind == DistributedType.FSDP != accelerator.distributed_type:
        stop(f"{name} asks for FSDP, but {accelerator.distributed_type.value} runs: Accelerate shards on GPUs only")


def data_parallel(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """nn.DataParallel where one process has several GPUs (dp.yaml), else the model unchanged. Call it before `prepare`.

    The model's forward must return one loss a sample, not logits: then each replica computes its own losses, and the
    first GPU gathers N numbers instead of N x classes. Before `prepare`, because Accelerate replaces `model.forward`
    with a method bound to the first replica.
    """
    if accelerator.device.type == "cuda" and accelerator.num_processes == 1 and torch.cuda.device_count() > 1:
        return nn.DataParallel(model.to(accelerator.device))
    return model


def describe(accelerator: Accelerator, split_batch: bool = True) -> dict:
    """The topology that runs, with one entry a process, for run.json. A collective: call it on all ranks."""
    on_gpu = accelerator.device.type == "cuda"
    data_parallel = on_gpu and accelerator.num_processes == 1 and split_batch
    data_parallel_gpus = torch.cuda.device_count() if data_parallel else 1
    options, _ = requested_topology()
    mine = {
        "rank": accelerator.process_index,
        "local_rank": accelerator.local_process_index,
        "host": socket.gethostname(),
        "device": "cpu" if accelerator.device.type == "cpu" else str(accelerator.device),
        "device_name": torch.cuda.get_device_name(accelerator.device) if on_gpu else None,
        "cpu_threads": torch.get_num_threads(),
    }
    return {
        "config_file": options and options.config_file and os.path.relpath(options.config_file),
        "distributed_type": "DATA_PARALLEL" if data_parallel_gpus > 1 else accelerator.distributed_type.value,
        "backend": accelerator.state.backend,
        "num_processes": accelerator.num_processes,
        "data_parallel_gpus": data_parallel_gpus,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "processes": gather_object([mine]),
    }


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 'es' if word.endswith('s') else 's'}"


def announce(
    accelerator: Accelerator,
    args: argparse.Namespace,
    steps_per_epoch: int,
    total_steps: int,
    data: dict,
    batch: str | None = None,
) -> dict:
    """Print what will run, to be read before it runs; returns the topology as `describe` does. A collective.

    `batch`: how a script whose processes share the model makes up the global batch.
    """
    topology = describe(accelerator, split_batch=batch is None)
    processes, accumulation = accelerator.num_processes, accelerator.gradient_accumulation_steps
    hosts = len({process["host"] for process in topology["processes"]})
    first = topology["processes"][0]
    device = first["device_name"] or first["device"]
    if first["device"] == "cpu":
        device += f" with {plural(first['cpu_threads'], 'thread')}"
    kind = ""
    if topology["data_parallel_gpus"] > 1:
        kind = f" (DataParallel over {topology['data_parallel_gpus']} GPUs)"
    elif processes > 1:
        kind = f" ({topology['distributed_type']} over {topology['backend']})"
    dataset = data.get("dataset", "")
    shown = data | {"dataset": os.path.relpath(dataset)} if os.path.isabs(dataset) else data
    if batch is None:
        batch = f"{args.batch_size // processes // accumulation} per process x {plural(processes, 'process')}"
    accelerator.print(
        f"topology      {plural(processes, 'process')} on {plural(hosts, 'machine')}{kind}, "
        f"each {device}, precision {topology['mixed_precision']}\n"
        f"config        {topology['config_file']}\n"
        f"global batch  {args.batch_size} = {batch} x {plural(accumulation, 'accumulation step')}\n"
        f"steps         {total_steps} updates = {total_steps / steps_per_epoch:.4g} epochs of {steps_per_epoch}\n"
        f"data          {', '.join(f'{name} {value}' for name, value in shown.items())}\n"
        f"output        {args.output_dir}",
        flush=True,
    )
    return topology


def resume_command() -> str:
    """The command line of this run with --resume, as the user would type it again."""
    words = [Path(sys.executable).name]
    if launcher_words() is not None:
        options, _ = requested_topology()
        words = ["accelerate", "launch", *launcher_words()[: launcher_words().index(options.training_script)]]
    return shlex.join([*words, sys.argv[0], *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])


class StopSignal:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a stop after the current update; a second Ctrl-C stops at once.

    `agreed()` answers on all processes alike, whichever of them got the signal.
    """

    def __init__(self, accelerator: Accelerator, check_every_s: float = 0.25):
        self.accelerator, self.check_every_s = accelerator, check_every_s
        self.received, self.pid = None, os.getpid()
        self.calls, self.next_check, self.checked_at = 0, 1, time.perf_counter()
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(name, self._receive)
        if sys.platform == "linux" and (launcher_words() or "TORCHELASTIC_RUN_ID" in os.environ):
            # A launcher that is killed leaves its children running, unseen: have the kernel send them a SIGTERM. Not
            # without a launcher: then the parent is a shell, which may well end before the run.
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG, prctl(2)

    def _receive(self, number, _frame):
        if os.getpid() != self.pid:  # a worker that decodes images, which this process will end
            return
        again = number == self.received == signal.SIGINT
        self.received = number
        if number == signal.SIGINT and self.accelerator.is_main_process:
            says = "Ctrl-C: the run is saved and ends; a second Ctrl-C ends it at once"
            if again:
                says = f"stopped at once; to go on from the last checkpoint: {resume_command()}"
            with contextlib.suppress(OSError):  # of a terminal that is gone: the save counts
                os.write(2, f"{CLEAR_LINE * os.isatty(2)}{says}\n".encode())  # print may be in the middle of a line
        if again:
            os._exit(130)  # a checkpoint that is being written stays an unnamed temporary folder

    def agreed(self) -> bool:
        """True on every process at the same call, once one of them got a signal. Call it once an update, on all ranks.

        Between processes this costs a collective, so they ask each other only every `check_every_s`; the number of
        calls until the next time is agreed on as well.
        """
        if self.accelerator.num_processes == 1:
            return self.received is not None
        self.calls += 1
        if self.calls < self.next_check:
            return False
        now = time.perf_counter()
        calls_a_check = self.calls * self.check_every_s / max(now - self.checked_at, 1e-9)
        mine = [float(self.received is not None), -max(1.0, calls_a_check // 1)]
        votes = torch.tensor(mine, device=self.accelerator.device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
        stopped, negative_calls = votes.tolist()
        self.calls, self.next_check, self.checked_at = 0, int(-negative_calls), now
        return bool(stopped)

    def leave(self, step: int) -> None:
        """End all processes after a save at `step`, with the exit code that asks a scheduler to requeue."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            show(f"stopped by a signal; step {step} is saved; to go on: {resume_command()}", "yellow")
        self.accelerator.end_training()
        sys.exit(EXIT_REQUEUE)
