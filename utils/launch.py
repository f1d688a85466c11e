"""Create the Accelerator for the topology in the config file."""

import argparse
import atexit
import contextlib
import datetime
import gc
import os
import sys
import time
from pathlib import Path

import psutil
import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    set_seed,
)
from torch import distributed

from . import launched
from .accelerator import TrainingAccelerator
from .agree import same_on_all
from .banner import code_digests
from .console import stop
from .failures.processes import check_restarts, follow_launcher
from .flags import with_defaults


def make_accelerator(
    args: argparse.Namespace,
    cpu_threads: int | None = None,
    split_batch: bool = True,
    find_unused_parameters: bool = False,
) -> TrainingAccelerator:
    """Create the Accelerator, check it against the config file, seed all generators and set CPU threads. Collective.

    Args:
        args: the parsed flags; missing run flags get their defaults. If it has no `output_dir`, that is set to a new
            folder under runs/.
        cpu_threads: CPU threads per process. None: OMP_NUM_THREADS, or else the usable cores divided by the processes;
            1 with virtual processes, because the number of threads changes the order of additions.
        split_batch: each process gets a part of the batch. False if the processes share the model.
        find_unused_parameters: as in DistributedDataParallel, for models in which some parameters get no gradient.
    """
    if "triton" not in sys.modules:  # it would report frozen objects as leaked at exit
        gc.freeze()  # excludes imported objects from garbage collection: each start is 1 s faster
    install_error_hooks()
    settings = with_defaults(args)
    is_new_folder = not settings.output_dir
    if is_new_folder:
        settings.output_dir = f"runs/{Path(sys.argv[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if settings.resume:
            stop("--resume needs the --output_dir of the run to continue")
    check_restarts(is_new_folder)
    # Accelerate leaves out one that is not installed: huggingface/accelerate#520
    if settings.log_with and settings.log_with not in ("all", *map(str, get_available_trackers())):
        stop(f"--log_with {settings.log_with} is not a tracker of Accelerate whose package is installed")
    accelerator = create_accelerator(settings, split_batch, find_unused_parameters)
    # From here on, collectives work.
    if accelerator.device.type == "cuda":
        atexit.register(abort_process_group)
    launched.check_topology(accelerator)
    if accelerator.num_processes > 1:
        from .failures.watchdog import watch

        watch(accelerator, settings.timeout_s)
    code = {f"SHA-256 of {name}": digest for name, digest in code_digests().items()}
    same_on_all({"script": Path(sys.argv[0]).name, **code, **vars(args)})
    if settings.virtual_processes:
        from .parallel.virtual_processes import use_virtual_processes

        use_virtual_processes(accelerator)
    set_cpu_threads(cpu_threads or (1 if settings.virtual_processes else None))
    set_seed(settings.seed)
    if is_new_folder:  # the name contains a time and a process id: all ranks use the main process's
        args.output_dir = broadcast_object_list([settings.output_dir])[0]
        accelerator.project_configuration.set_directories(args.output_dir)
    return accelerator


def use_deterministic_algorithms() -> None:
    """Add numbers in the same order in each run. cuBLAS and NCCL read these settings once, when they are first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # https://docs.nvidia.com/cuda/cublas, reproducibility
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)  # also has torch leave out NCCL's NVLS
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory


def create_accelerator(settings: argparse.Namespace, split_batch: bool, find_unused: bool) -> TrainingAccelerator:
    """Create the Accelerator without the defaults that silently train something else."""
    launched.check_gpus()
    if settings.deterministic or settings.virtual_processes:
        use_deterministic_algorithms()
    # 1 ms more: Accelerate ignores a timeout equal to its default of 600 s, and gloo would use its own 30 minutes.
    timeout = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=settings.timeout_s, milliseconds=1))
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=find_unused)
    return TrainingAccelerator(
        # The multi-process launcher does not pass `use_cpu` on. Without it Accelerate looks for GPUs, finds none
        # and reports a single process: N processes would train N separate models.
        cpu=launched.wants_cpu() or not torch.accelerator.is_available(),
        log_with=settings.log_with,
        project_dir=settings.output_dir,
        # Without split_batches Accelerate steps the scheduler once per process: N times too fast.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        # With adjust_scheduler the scheduler would count micro-batches as steps.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            getattr(settings, "gradient_accumulation_steps", 1), sync_with_dataloader=False, adjust_scheduler=False
        ),
        kwargs_handlers=[timeout, ddp],
        virtual_processes=settings.virtual_processes,
        whole_gradients=settings.whole_gradients,
        split_batch=split_batch,
    )


def install_error_hooks() -> None:
    """Follow the launcher to its death, and explain the errors of libraries."""

    def hook(kind, error, trace) -> None:
        from .failures.errors import report

        if not report(error):
            hook.other_hook(kind, error, trace)

    # A second run in the same process replaces the hook of the first.
    hook.other_hook = getattr(sys.excepthook, "other_hook", sys.excepthook)
    sys.excepthook = hook
    follow_launcher()
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        launched.bind_gloo_to_the_route()


def abort_process_group() -> None:
    """End the process group of a run that failed, without waiting for other ranks; otherwise NCCL prints a warning."""
    with contextlib.suppress(Exception):  # there is none after a run that succeeded
        groups = [*distributed.distributed_c10d._world.pg_names]
        distributed.distributed_c10d._abort_process_group()
        for group in groups:
            group.shutdown()


def set_cpu_threads(cpu_threads: int | None) -> None:
    """Set the threads of this process; None: OMP_NUM_THREADS as the user set it, else `share_of_cores`."""
    if cpu_threads is None:
        environment = os.environ
        if launched.has_launcher():  # it sets a default
            try:
                environment = psutil.Process().parent().environ()
            except (psutil.Error, AttributeError):  # somebody else's process, or in another container
                environment = {}
        asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
        cpu_threads = int(asked) if asked.isdecimal() else launched.share_of_cores()
    torch.set_num_threads(max(1, cpu_threads))
