"""What users do with a model's parameters before and after `prepare`, each for a few steps; writes parameters.json.

    accelerate launch --config_file accelerate_configs/cpu_fsdp.yaml --fsdp_min_num_params 10 \
        tests/programs/parameters.py

By case: the weights after the last step and whatever the case reads, as one list of numbers, or the error.
"""

import contextlib
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.launch import make_accelerator
from utils.parallel import same_state

SAMPLES, STEPS = 12, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.other_head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.body(x)
        return self.head(x) + self.other_head(x).sin()


class Shared(nn.Module):
    """A block that comes twice, with its activations computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks, self.head = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh())]), nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Case:
    """A model, lists of its parameters made before `prepare`, and the numbers that were read."""

    def __init__(self, accelerator):
        torch.manual_seed(0)
        self.accelerator, self.model, self.numbers = accelerator, Model(), []
        self.bare = self.model
        self.all = list(self.model.parameters())
        self.body, self.head = list(self.model.body.parameters()), list(self.model.head.parameters())
        self.x, self.y = torch.randn(2, STEPS, SAMPLES, 5)
        self.optimizers = [self.sgd(self.all)]

    @staticmethod
    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.3, momentum=0.5)

    def prepare(self, *others):
        self.model, *self.optimizers = self.accelerator.prepare(self.model, *self.optimizers)
        return self

    def loss(self, step):
        size = SAMPLES // self.accelerator.num_processes
        part = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
        return (self.model(self.x[step, part]) - self.y[step, part, :3]).square().mean()

    def steps(self, count=STEPS, before_step=lambda: None):
        for step in range(count):
            self.accelerator.backward(self.loss(step))
            before_step()
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return self

    def read(self, tensors):
        for tensor in tensors:
            self.numbers += whole(tensor).flatten().tolist()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shared_layers_recomputed(case):
    case.model = case.bare = Shared()
    case.optimizers = [case.sgd(case.model.parameters())]
    case.prepare().steps()


def clip(parameters, max_norm, norm_type=2):
    def run(case):
        case.prepare()
        chosen = parameters(case)
        case.steps(before_step=lambda: case.read([case.accelerator.clip_grad_norm_(chosen, max_norm, norm_type)]))

    return run


def frozen_before(case):
    for parameter in case.body:
        parameter.requires_grad_(False)
    case.prepare().steps()


def frozen_by_module(case):
    case.prepare().steps(2)
    with torch.no_grad():
        case.loss(0)
    case.bare.body.requires_grad_(False)
    case.steps()


def unfrozen_later(case):
    """As guides/fine_tune.md says: everything requires gradients at `prepare`."""
    case.prepare()
    for parameter in case.body:
        parameter.requires_grad_(False)
    case.steps(2)
    for parameter in case.body:
        parameter.requires_grad_(True)
    case.steps()


def groups(case):
    """Of which one is added after `prepare`."""
    case.optimizers = [case.sgd([{"params": case.head, "lr": 0.1}, {"params": [*case.model.other_head.parameters()]}])]
    case.prepare()
    case.optimizers[0].add_param_group({"params": case.body, "lr": 0.03})
    case.steps()


def hooked_after_accumulation(case):
    case.prepare()

    def halve(parameter):
        parameter.grad.div_(2)

    case.head[0].register_post_accumulate_grad_hook(halve)
    case.steps()


def names(case):
    by_name = dict(case.model.named_parameters())
    name_of = {parameter: name for name, parameter in by_name.items()}
    case.prepare().steps()
    case.read([by_name[name] for name in ("body.0.weight", "head.bias")])
    case.numbers.append([name_of[parameter] for parameter in case.all].index("head.weight"))
    case.numbers += [size for parameter in case.all for size in (parameter.numel(), *parameter.shape)]


def initialized_after(case):
    case.prepare()
    for parameter in case.head:
        nn.init.constant_(parameter, 0.5)
    case.steps()


def average_of_a_list(case):
    case.prepare()
    averages = [parameter.detach().clone() for parameter in case.all]

    def update():
        with torch.no_grad():
            for average, parameter in zip(averages, case.all, strict=True):
                average.lerp_(parameter, 0.1)

    case.steps(before_step=update)
    case.read(averages)


def an_optimizer_that_is_not_prepared(case):
    case.optimizers = [case.sgd(case.body)]
    case.prepare()
    case.optimizers.append(torch.optim.AdamW(case.head, 0.01))
    case.steps()


def lbfgs(case):
    case.optimizers = [torch.optim.LBFGS(case.all, 0.1, max_iter=3)]
    case.prepare()

    def closure():
        case.optimizers[0].zero_grad()
        loss = case.loss(0)
        case.accelerator.backward(loss)
        return case.accelerator.reduce(loss.detach(), "mean")

    for _ in range(2):
        case.optimizers[0].step(closure)


CASES = {
    "clip all": clip(lambda case: case.all, 0.1),
    "clip a part, listed after": clip(lambda case: case.bare.head.parameters(), 0.01),
    "clip a part by its largest": clip(lambda case: case.body, 0.01, math.inf),
}
CASES |= {
    case.__name__.replace("_", " "): case
    for case in (
        *(shared_layers_recomputed, frozen_before, frozen_by_module, unfrozen_later, groups, names),
        *(initialized_after, hooked_after_accumulation, average_of_a_list, an_optimizer_that_is_not_prepared, lbfgs),
    )
}


def numbers_or_error(accelerator, use) -> list[float] | str:
    case, errors = Case(accelerator), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            use(case)
            models = {"model": case.model}
            same_state.check(accelerator, models, set(), is_first=False)  # as each checkpoint does
    except SystemExit:
        return errors.getvalue().strip()
    except Exception as error:
        with contextlib.redirect_stderr(errors):
            sys.excepthook(type(error), error, error.__traceback__)
        return errors.getvalue().strip()
    case.read(case.bare.parameters())
    return case.numbers


def main():
    torch.set_default_dtype(torch.float64)
    settings = SimpleNamespace(output_dir="run")
    accelerator = make_accelerator(settings, cpu_threads=1, find_unused_parameters=True)
    found = {name: numbers_or_error(accelerator, use) for name, use in CASES.items()}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
