"""Make the Accelerator for the topology that the config file asks for."""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import os
import sys
import time
import types
import weakref
from pathlib import Path

import accelerate.optimizer
import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    LoggerType,
    broadcast_object_list,
    gather_object,
    set_seed,
)

from .console import outlive_readers, stop
from .features.hang_watchdog import watch_ranks
from .features.lost_peers import LOST, bind_gloo_to_the_route, explain_lost_peers, introduce_peers
from .features.out_of_memory import explain_out_of_memory
from .features.virtual_processes import use_virtual_processes
from .imports import quick_imports
from .signals import explain_ctrl_c, follow_launcher
from .topology import check_environment, check_topology, same_on_all, wants_cpu


class TrainingAccelerator(Accelerator):
    """Accelerate's Accelerator, and what the features of a run attach to it.

    virtual_processes: as --virtual_processes asked for; 0: off.
    around_backward: functions that return a context manager, entered around every backward pass,
        the last one outermost. Who attaches to `backward` appends to this list and removes its own
        entry: a method replaced on the object, which the next one replaces again, cannot be put
        back without undoing the others.
    """

    virtual_processes = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.around_backward = []

    def backward(self, loss, **kwargs):
        with contextlib.ExitStack() as stack:
            for around in reversed(self.around_backward):
                stack.enter_context(around())
            super().backward(loss, **kwargs)


def make_accelerator(
    args: argparse.Namespace,
    cpu_threads: int | None = None,
    split_batch: bool = True,
    log_with=None,
    find_unused_parameters: bool = False,
    kwargs_handlers=(),
) -> TrainingAccelerator:
    """The Accelerator for the topology in the config file, checked against what runs.

    Also seeds all generators, sets the number of CPU threads, and has a Ctrl-C, a lost peer and a
    lack of memory explained in a sentence.

    Args:
        args: the parsed flags. Read if they are there: batch_size, gradient_accumulation_steps (1),
            virtual_processes (0), seed (0), timeout_s (600), log_with, output_dir and resume. Sets
            `output_dir` to a new folder under runs/ if there is none, and `resume` to True if the
            launcher restarted a run that had failed.
        cpu_threads: threads of each process for work on the CPU. None: the cores of the machine
            divided by its processes; with virtual processes 1, since another number of threads adds
            in another order.
        split_batch: each process gets a part of the batch. False if the processes share the model.
        log_with: trackers besides --log_with: names, objects of a GeneralTracker, or a list.
        find_unused_parameters: as in DistributedDataParallel: for a model in which some parameters
            get no gradient in some steps.
        kwargs_handlers: for Accelerator. One of the same class as ours is used in place of ours.

    Raises:
        SystemExit: with one sentence: other processes or devices run than were asked for, the
            processes have different arguments, a batch has fewer samples than micro-batches,
            --virtual_processes does not fit, a tracker or a precision is not available.
    """
    outlive_readers()
    check_environment()
    follow_launcher()
    if "triton" not in sys.modules:  # at the end it would report what is frozen of it as leaked
        # What the imports made stays: to search it for garbage takes a second at the end.
        gc.freeze()
    with quick_imports():
        importlib.import_module("torch._dynamo")  # the first optimizer imports it anyway
    explain_ctrl_c()
    explain_out_of_memory()
    remember_accelerates_answers()
    output_dir = getattr(args, "output_dir", None)
    is_new_folder = output_dir is None
    if is_new_folder:
        name = f"{Path(sys.argv[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        output_dir = f"runs/{name}"
    check_restarts(is_new_folder)
    trackers = as_list(getattr(args, "log_with", None)) + as_list(log_with)
    check_trackers(trackers)
    accumulation = getattr(args, "gradient_accumulation_steps", 1)
    timeout_s = getattr(args, "timeout_s", 600)
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters),
        # 1 ms more, because Accelerate drops a timeout that equals its own default of 600 s. The
        # default of gloo, 30 minutes, would then hold.
        InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout_s, milliseconds=1)),
    ]
    handlers = {type(handler): handler for handler in [*handlers, *kwargs_handlers]}
    explain_lost_peers(can_resume=getattr(args, "resume", None) is not None)
    bind_gloo_to_the_route()
    try:
        accelerator = TrainingAccelerator(
            # The launcher of several processes does not pass `use_cpu` on. Without it Accelerate
            # looks for GPUs, finds none, reports one process, and N processes train N models.
            cpu=wants_cpu() or not torch.accelerator.is_available(),
            log_with=trackers or None,
            project_dir=output_dir,
            # Without split_batches Accelerate steps the scheduler once a process: N times too fast.
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            # adjust_scheduler would have the scheduler count micro-batches as steps.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=accumulation, sync_with_dataloader=False, adjust_scheduler=False
            ),
            kwargs_handlers=list(handlers.values()),
        )
    except (ValueError, RuntimeError) as error:  # a precision that is not there, FSDP on a CPU, ...
        if LOST.search(str(error)):
            raise
        reason = " ".join(str(error).split())
        stop(f"Accelerate cannot start with this config file and these flags: {reason}")
    check_topology(accelerator)
    introduce_peers()
    watch_ranks(timeout_s)
    if was_restarted():
        args.resume = True  # nobody is there to type --resume
    same_on_all({"script": Path(sys.argv[0]).name, **vars(args)})
    number = getattr(args, "virtual_processes", 0)
    if number:
        use_virtual_processes(accelerator, number, accumulation)
    batch_size = getattr(args, "batch_size", None)
    if split_batch and batch_size is not None:
        check_batch_size(batch_size, number or accelerator.num_processes * accumulation)
    # Another number of threads adds in another order.
    set_cpu_threads((cpu_threads or 1) if number else cpu_threads)
    set_seed(getattr(args, "seed", 0))
    if is_new_folder:
        output_dir = broadcast_object_list([output_dir])[0]  # the name has a time and a process id
        # So that the commands that are printed to resume continue in this folder.
        sys.argv += ["--output_dir", output_dir]
    args.output_dir = output_dir
    return accelerator


def check_restarts(is_new_folder: bool) -> None:
    """Check that processes which the launcher restarts after a failure can continue.

    Raises:
        SystemExit: if --max_restarts is used without an output folder, or in a way in which
            restarted processes do not find each other.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
        stop(
            "--max_restarts needs --rdzv_backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
            "otherwise restarted processes find the addresses of the old ones in the launcher's "
            "store"
        )
    if is_new_folder:
        stop("--max_restarts needs an --output_dir, to continue from the checkpoints in it")


def was_restarted() -> bool:
    """Whether the launcher restarted any process. Collective: call it on every rank.

    On a machine where no process failed the launcher's count stays 0.
    """
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return any(gather_object([count]))


def check_trackers(trackers: list) -> None:
    """Check that each tracker is known to Accelerate, and that its package is installed.

    Accelerate itself leaves a tracker out whose package is missing, and does not say so.

    Raises:
        SystemExit: if not.
    """
    for tracker in trackers:
        name = str(tracker)  # a LoggerType of Accelerate becomes its name
        if isinstance(tracker, GeneralTracker) or name == "all":  # all: those that are installed
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            stop(f"Accelerate has no tracker {name}: use --log_with with one of {known}")
        is_built_in = name in LoggerType.list()
        if is_built_in and name not in map(str, get_available_trackers()):
            stop(f"--log_with {name} needs a package that is not installed: pip install {name}")


def as_list(value) -> list:
    """None as an empty list, a list or tuple as a list, anything else as a list of one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_batch_size(batch_size: int, micro_batches: int) -> None:
    """Raises: SystemExit if the global batch of a step has fewer samples than micro-batches."""
    if batch_size < micro_batches:
        stop(
            f"--batch_size {batch_size} is less than the {micro_batches} micro-batches of a "
            f"step (processes x accumulation steps): use {micro_batches} or more"
        )


def set_cpu_threads(cpu_threads: int | None) -> None:
    """Set the threads of this process; None: its part of the machine's physical cores."""
    if cpu_threads is None:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        cpu_threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(cpu_threads)


# By function and not by optimizer; weak, so that a function made for one optimizer can go with it.
SIGNATURES = weakref.WeakKeyDictionary()


def remembered_signature(method) -> inspect.Signature:
    """inspect.signature(method), computed once for all objects of a class."""
    function = getattr(method, "__func__", method)
    signature = SIGNATURES.get(function)
    if signature is None:
        signature = inspect.signature(method)
        SIGNATURES[function] = signature
    return signature


def remember_accelerates_answers() -> None:
    """Speed up optimizer.step and zero_grad of Accelerate by remembering two answers.

    `step` asks twice whether a package "lomo_optim" is installed, which searches the disk, and
    `zero_grad` asks for the signature of the optimizer's zero_grad. Neither answer changes. For a
    small model on the CPU the questions take as long as the step.
    """
    module = accelerate.optimizer
    if not hasattr(module.is_lomo_available, "cache_info"):
        module.is_lomo_available = functools.cache(module.is_lomo_available)
    names = {**vars(inspect), "signature": remembered_signature}
    module.inspect = types.SimpleNamespace(**names)
