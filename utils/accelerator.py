"""Accelerate's Accelerator, where it trains something else or lacks what a run needs."""

import collections
import contextlib
import functools
import os

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, patch_environment
from torch import distributed

from .console import show, stop
from .failures.processes import end_process_group
from .launched import check_sharding, data_parallel_gpus
from .layout import Layout


class PlainOptimizer(AcceleratedOptimizer):
    """Accelerate's (1.15.0), but its step does not search the disk for a package, nor zero_grad inspect a signature."""

    def step(self, closure=None):
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)

    def zero_grad(self, *args, **kwargs):
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(*args, **kwargs)


class TrainingAccelerator(Accelerator):
    """Accelerate's Accelerator with the attributes of a run."""

    steps_done = 0  # by the run
    micro_batches = 0  # begun in this launch, also of tests; for the watchdog
    sharded_calls = 0  # a number for the order in which FSDP's units ran
    of_earlier_runs = ()  # what prepare returned before the last run.start

    def __init__(
        self, *args, virtual_processes: int = 0, whole_gradients: bool = False, split_batch: bool = True, **kwargs
    ):
        self.whole_gradients = whole_gradients
        shards = check_sharding()
        with patch_environment(accelerate_use_parallelism_config="false"):  # Accelerate refuses it on CPUs
            super().__init__(*args, **kwargs)
        self.norms = collections.deque(maxlen=10_000)  # (step, norm) of clipped gradients since the last log line
        self.found_inf = torch.zeros((), dtype=torch.float32, device=self.device)  # 1 as soon as one is not finite
        self.watch_backward = contextlib.nullcontext  # returns the context manager of every backward pass
        self.gradient_sums = []  # of the models, with virtual processes
        self.loaders = {}  # by name; None after run.start
        if self.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            plugin = FullyShardedDataParallelPlugin()  # Accelerate would use DDP
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)
            self.state.fsdp_plugin = plugin
            self.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.layout = Layout(
            processes=self.num_processes,
            rank=self.process_index,
            shards=(shards or self.num_processes) if self.distributed_type == DistributedType.FSDP else 1,
            accumulation=self.gradient_accumulation_steps,
            virtual_processes=virtual_processes,
            split_batch=split_batch,
        )

    @functools.cached_property
    def mesh(self):
        """FSDP's mesh of the processes: "shards", or with HSDP "replicas" x "shards". Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        shards, replicas = self.layout.shards, self.layout.replicas
        sizes = {"replicas": replicas, "shards": shards} if replicas > 1 else {"shards": shards}
        mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        # New groups have a default timeout of up to 30 minutes. Before torch 2.14 the function had another name.
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        for group in mesh.get_all_groups() if replicas > 1 else ():
            set_timeout(self.init_handler.timeout, group)
        return mesh

    def backward(self, loss, **kwargs):
        if kwargs.get("inputs") is not None and self.is_fsdp2:
            stop("accelerator.backward(inputs=...) gives sharded models no gradients: omit it, and use zero_grad")
        with self.watch_backward():
            for gradient_sum in self.gradient_sums:
                gradient_sum.prepare()
            # Accelerate (1.15.0) also divides by 1, which is one more node of autograd.
            if self.gradient_accumulation_steps > 1 and not self.layout.virtual_processes:
                loss = loss / self.gradient_accumulation_steps
            (self.scaler.scale(loss) if self.scaler else loss).backward(**kwargs)
            for gradient_sum in self.gradient_sums:
                gradient_sum.collect()

    def accumulate(self, *models):
        """As in Accelerate (1.15.0), whose generator takes 10 us; FSDP, which would keep whole gradients, reduces."""
        self._do_sync()
        stack = contextlib.ExitStack()
        for model in models if not self.sync_gradients and (self.whole_gradients or not self.is_fsdp2) else ():
            stack.enter_context(self.no_sync(model))
        return stack

    def print(self, *words, **options):
        """As in Accelerate, but the run goes on if nobody reads what it prints, as in `python train.py | head -1`."""
        if options:
            super().print(*words, **options)
        elif self.is_local_main_process:
            show(" ".join(map(str, words)))

    def end_training(self):
        end_process_group()
        super().end_training()

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """As in Accelerate, plus nn.DataParallel for dp.yaml, which Accelerate lacks."""
        is_new = not evaluation_mode and not getattr(model, "_is_accelerate_prepared", False)
        if is_new and data_parallel_gpus(self) > 1 and not self.verify_device_map(model):
            from .parallel.data_parallel import data_parallel

            model = data_parallel(model, self)
        model = super().prepare_model(model, device_placement, evaluation_mode)
        for part in model.modules() if is_new else ():
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                from .parallel.data_parallel import fix_buckets

                fix_buckets(part)
        return model

    def prepare_optimizer(self, optimizer, device_placement=None):
        """As in Accelerate, but a PlainOptimizer unless there is a GradScaler."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.scaler is None:
            prepared.__class__ = PlainOptimizer
        return prepared

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """As in Accelerate, also of a part of the parameters, sharded or with a GradScaler. Collective.

        With virtual processes, the 2-norm is added up in an order that no sharding changes.
        """
        parameters = list(parameters)
        if self.is_fsdp2:
            from .parallel.fsdp import shards_of

            parameters = shards_of(parameters)
        for optimizer in self._optimizers if self.scaler else []:
            if not {p for group in optimizer.param_groups for p in group["params"]}.isdisjoint(parameters):
                with contextlib.suppress(RuntimeError):  # another part of its parameters was clipped before
                    self.unscale_gradients(optimizer)
        if self.layout.virtual_processes and norm_type == 2:
            from .parallel.virtual_processes import total_norm

            norm = total_norm(self, parameters)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        if self.scaler is None:  # a GradScaler skips such steps itself
            self._refuse_step_if_not_finite(norm)
        return norm

    def _refuse_step_if_not_finite(self, norm: torch.Tensor) -> None:
        """Keep gradients that are not finite out of the weights, without waiting for a GPU.

        Sets `found_inf`, as GradScaler does, so that a fused optimizer skips the step; the run stops at its next log
        line. Other optimizers take the step, but on a CPU the run stops before it.
        """
        self.norms.append((self.steps_done + 1, norm))
        torch.ne(norm * 0 + self.found_inf, 0, out=self.found_inf)  # nan is not 0; once 1, it stays 1
        for optimizer in [optimizer.optimizer for optimizer in self._optimizers]:
            if all(group.get("fused") for group in optimizer.param_groups):
                optimizer.found_inf = self.found_inf
            elif norm.device.type == "cpu":
                self.check_norms()

    def check_norms(self) -> None:
        """Stop if the norm of clipped gradients was not finite in a step; waits for the GPU."""
        if self.norms and self.found_inf:
            step = next((step for step, norm in self.norms if not norm.isfinite()), self.steps_done)
            stop(
                f"the norm of the gradients is not finite in step {step}: train with a smaller learning rate, or in a "
                "precision with a larger range; the last checkpoint is from before it"
            )
        self.norms.clear()

    def clip_grad_value_(self, parameters, clip_value):
        """As in Accelerate, which refuses sharded models."""
        if not self.is_fsdp2:
            return super().clip_grad_value_(parameters, clip_value)
        from .parallel.fsdp import shards_of

        # Not as DTensors, which a list of plain operations does not take.
        for parameter in shards_of(parameters):
            if parameter.grad is not None:
                parameter.grad.to_local().clamp_(-clip_value, clip_value)

    def prepare(self, *args, device_placement=None):
        """As in Accelerate, which under FSDP takes only one model, and leaves whole or refuses some kinds."""
        if not self.is_fsdp2:
            return super().prepare(*args, device_placement=device_placement)
        from .parallel.fsdp import shard, train_shards

        for model in [arg for arg in args if isinstance(arg, torch.nn.Module)]:
            shard(self, model)
            model._is_accelerate_prepared = True
            self._models.append(model)
        for optimizer in [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]:
            train_shards(optimizer)
        for first_pass in (True, False):  # schedulers second
            args = [
                arg if isinstance(arg, torch.nn.Module) else self._prepare_one(arg, first_pass=first_pass)
                for arg in args
            ]
        return tuple(args) if len(args) > 1 else args[0]
