"""Models, optimizers and steps: gradients, weights, learning rates, and with which coefficient each loss counts."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, optimizer

from ..tensors import sampled
from .where import wrap

MOST_STEPS = 60
STEPS_WITHOUT_LOADER = 10
LARGEST_MODEL = 5_000_000  # parameters; of a larger one no weights are handed on
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
LOSSES += ("binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss")


class Models:
    """Models that the script calls, their optimizers, and each step of these."""

    def __init__(self, recording):
        self.recording, self.plan, self.batches = recording, recording.plan, recording.batches
        self.models, self.names, self.optimizers, self.schedules = {}, {}, [], []
        self.in_ddp, self.ddp_lines, self.around_ddp = {}, [], []
        self.initial, self.weights = None, []
        self.schedule_calls, self.depth, self.in_loss, self.in_backward = 0, 0, 0, False

    def begin_call(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """A model is called by the script itself, and not by another model."""
        if not torch.is_grad_enabled():
            return self.recording.evaluations.begin()
        if id(model) not in self.models:
            self.models[id(model)] = model
            for name, parameter in model.named_parameters():
                name = name.replace("_orig_mod.", "").removeprefix("module.")
                self.names.setdefault(id(parameter), name)
            if self.initial is None and self.optimizers:
                self.initial = self.tensors_of(self.parameters())
                self.hand_on(0)
        if "statistics" not in self.recording.step:
            self.recording.step["statistics"] = {name: sampled(value) for name, value in self._statistics()}
        if id(model) in self.in_ddp:
            self.around_ddp.append(self.recording.where.line())
        if isinstance(model, DistributedDataParallel):
            self.recording.step["syncs"] = model.require_backward_grad_sync
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
        self.batches.model_called(tensors)

    def parameters(self) -> list[nn.Parameter]:
        found = [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]
        return list({id(parameter): parameter for parameter in found}.values())

    def tensors_of(self, parameters, value=lambda parameter: parameter) -> dict[str, torch.Tensor]:
        return {
            self.names.get(id(parameter), f"parameter {number}"): sampled(value(parameter))
            for number, parameter in enumerate(parameters)
            if value(parameter) is not None
        }

    def state_of(self, optimizer) -> dict[str, torch.Tensor]:
        return {
            f"{self.names.get(id(parameter), '?')}/{name}": sampled(value)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    def hand_on(self, number: int) -> None:
        """Weights and state of the optimizers after `number` steps: kept in the reference, and taken over later.

        A difference then cannot grow, and what is found in one step does not show in the next.
        """
        parameters = self.parameters()
        is_large = sum(parameter.numel() for parameter in parameters) > LARGEST_MODEL
        if self.plan["is_resumed"] is not None or is_large:
            return
        states = [optimizer.state.get(parameter, {}) for optimizer in self.optimizers for parameter in parameters]
        if self.plan.get("weights") is None:
            states = [{name: copied(value) for name, value in state.items()} for state in states]
            self.weights.append(([parameter.detach().clone() for parameter in parameters], states))
        elif number < len(self.plan["weights"]):
            weights, known = self.plan["weights"][number]
            if [each.shape for each in weights] == [each.shape for each in parameters] and len(known) == len(states):
                take_over(parameters, states, weights, known)

    def begin_backward(self) -> None:
        recording, step = self.recording, self.recording.step
        if recording.is_ending:
            recording.end()
        if not step["micro_batches"]:
            recording.evaluations.end()
            if len(recording.steps) >= (MOST_STEPS if self.batches.loaders else STEPS_WITHOUT_LOADER):
                recording.end()
            held = [each.grad for each in self.parameters() if each.grad is not None]
            step["holds"] = bool(recording.steps) and any(bool(gradient.any()) for gradient in held)
        micro = {"samples": self.batches.of_backward(), "losses": [], "syncs": step.get("syncs")}
        step["micro_batches"].append(micro | {"draws": self.batches.draws(), "line": recording.where.line()})

    def criterion(self, name: str, loss: torch.Tensor, reduction: str, args: tuple, kwargs: dict) -> None:
        """A loss was computed: note with which coefficient its mean enters the gradient."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        count = loss.numel()
        if reduction != "none":
            count = target.numel() if isinstance(target, torch.Tensor) else 1
            if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
                count = int((target != kwargs.get("ignore_index", -100)).sum())
        step, line = self.recording.step, self.recording.where.line()

        def note(gradient: torch.Tensor) -> None:
            total = float(gradient.detach().double().sum()) * (count if reduction == "sum" else 1)
            if step["micro_batches"]:
                step["micro_batches"][-1]["losses"].append((total, count, line))

        loss.register_hook(note)

    def clip(self) -> None:
        step = self.recording.step
        step["clips"].append((len(step["micro_batches"]), self.recording.where.line()))
        step["gradients"] = self.tensors_of(self.parameters(), lambda each: each.grad)

    def before_step(self, optimizer, *_) -> None:
        recording, step = self.recording, self.recording.step
        if recording.is_ending:
            recording.end()
        if optimizer not in self.optimizers:
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = self.tensors_of(own, lambda each: each.grad)
        step |= {"line": recording.where.line(), "optimizer": self.optimizers.index(optimizer), "at_step": gradients}
        step["rates"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step["options"] = [repr({**group, "params": None}) for group in optimizer.param_groups]
        step["schedule_calls"] = self.schedule_calls
        if not step["clips"] or step["clips"][-1][0] < len(step["micro_batches"]):
            step["gradients"] = gradients
        step |= {"before": self.tensors_of(own), "state_before": self.state_of(optimizer)}

    def after_step(self, optimizer, *_) -> None:
        recording = self.recording
        if optimizer not in self.optimizers:
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        recording.step["weights"] = self.tensors_of(own)
        recording.steps.append(recording.step)
        self.hand_on(len(recording.steps))
        recording.new_step()

    def _statistics(self):
        """The running statistics of BatchNorm, before DistributedDataParallel copies those of rank 0."""
        for model in self.models.values():
            for name, buffer in model.named_buffers():
                if name.endswith(("running_mean", "running_var")):
                    yield name.removeprefix("module."), buffer

    def result(self) -> tuple[dict, dict]:
        facts = {"optimizers": [type(optimizer).__name__ for optimizer in self.optimizers], "ddp": self.ddp_lines}
        facts |= {"around_ddp": self.around_ddp, "schedules": len(self.schedules)}
        record = {"initial": self.initial or {}, "final": self.tensors_of(self.parameters())}
        if self.recording.rank == 0 and self.plan.get("weights") is None:
            record["weights"] = self.weights
        return facts, record

    def install(self) -> None:
        install_calls(self)
        install_losses(self)
        install_optimizers(self)


def copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def take_over(parameters: list, states: list[dict], weights: list, known: list[dict]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    for state, values in zip(states, known, strict=True):
        for name, value in values.items():
            if name in state and isinstance(value, torch.Tensor):
                state[name].copy_(value)


def install_calls(models: Models) -> None:
    recording = models.recording

    @wrap(nn.Module, "__call__")
    def call(original, model, *args, **kwargs):
        if models.depth == 0 and not recording.is_ending and next(model.parameters(), None) is not None:
            models.begin_call(model, args, kwargs)
        models.depth += 1
        try:
            return original(model, *args, **kwargs)
        finally:
            models.depth -= 1

    @wrap(DistributedDataParallel, "__init__")
    def init_ddp(original, ddp, module, device_ids=None, output_device=None, **kwargs):
        original(ddp, module, **kwargs)
        models.in_ddp[id(module)] = module
        models.ddp_lines.append(recording.where.line())

    @wrap(torch.autograd, "backward")
    def backward(original, *args, **kwargs):
        if models.depth or models.in_backward:  # in a model's forward, or of a checkpointed part of it
            return original(*args, **kwargs)
        models.begin_backward()
        models.in_backward = True
        try:
            return original(*args, **kwargs)
        finally:
            models.in_backward = False


def install_losses(models: Models) -> None:
    for name in LOSSES:

        @wrap(F, name)
        def criterion(original, *args, name=name, **kwargs):
            models.in_loss += 1  # PyTorch calls it once more where a TorchFunctionMode is on
            try:
                loss = original(*args, **kwargs)
            finally:
                models.in_loss -= 1
            if not models.in_loss:
                models.criterion(name, loss, kwargs.get("reduction", "mean"), args, kwargs)
            return loss


def install_optimizers(models: Models) -> None:
    @wrap(optimizer.Optimizer, "__init__")
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self not in models.optimizers:
            models.optimizers.append(self)

    optimizer.register_optimizer_step_pre_hook(models.before_step)
    optimizer.register_optimizer_step_post_hook(models.after_step)

    for name in ("clip_grad_norm_", "clip_grad_value_"):

        @wrap(nn.utils, name)
        def clip(original, *args, **kwargs):
            models.clip()
            return original(*args, **kwargs)

    @wrap(lr_scheduler.LRScheduler, "__init__")
    def init_schedule(original, schedule, *args, **kwargs):
        original(schedule, *args, **kwargs)
        models.schedules.append(schedule)

    @wrap(lr_scheduler.LRScheduler, "step")
    def step(original, schedule, *args, **kwargs):
        models.schedule_calls += not getattr(schedule, "_is_initial", False)
        return original(schedule, *args, **kwargs)
