"""The state of a model by the plain names of the bare nn.Module, whatever it is wrapped in."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from ..atomic_files import fsync_folder, remove
from ..console import stop
from ..features import feature
from .folder import copy_to_cpu, write_tensors
from .processes import gather_first_copy, on_main


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile adds, to the model or to layers of it."""
    return name.replace("_orig_mod.", "")


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has cut the parameters.

    The parameters do not tell: after a forward pass without a backward pass, as during testing,
    those of the outermost module are whole until its state_dict is asked for.
    """
    # Importing the class takes a second, and who shards has done so.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def fsdp():
    """The feature that a sharded model needs; imported where one is met."""
    return feature("fsdp", "a sharded model")


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model by plain names; if it is sharded, whole and on the main process alone. Collective.

    Args:
        model: without DistributedDataParallel or DataParallel around it.
    """
    if is_sharded(model):
        return fsdp().whole_model_state(model)
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


def model_differences(model: nn.Module, saved: dict[str, torch.Tensor], is_whole: bool = True) -> list[str]:
    """Which names, shapes and dtypes differ between a model and a saved one.

    Args:
        is_whole: False if the model has some of the parameters of the saved one.
    """
    current = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    differences = []
    for name in sorted(current.keys() | saved.keys() if is_whole else current):
        was, now = (
            f"{str(state[name].dtype).removeprefix('torch.')} {tuple(state[name].shape)}" if name in state else "absent"
            for state in (saved, current)
        )
        if was != now:
            differences.append(f"{name} was {was} and is {now}")
    return differences


def load_model(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Load what `model_state` returned, on any number of processes, sharded or not. Collective if sharded.

    Args:
        model: without DistributedDataParallel or DataParallel around it.
        saved: on every process.
    """
    if is_sharded(model):
        fsdp().load_whole_model(model, saved)
    else:
        model.load_state_dict({name: saved[plain_name(name)] for name in model.state_dict()})


def check_finite(models: dict[str, nn.Module], tensors: dict[str, dict[str, torch.Tensor]], step: int) -> None:
    """Raises: SystemExit: if a parameter is not finite. Buffers may well be infinite, as masks are.

    Args:
        tensors: by file, those of a checkpoint.
    """
    for model_name, model in models.items():
        buffers = {plain_name(name) for name, _ in model.named_buffers()}
        parameters = {
            name: tensor
            for name, tensor in tensors[f"{model_name}.safetensors"].items()
            if name not in buffers and tensor.is_floating_point() and tensor.itemsize > 1
        }
        if torch.nn.utils.get_total_norm(parameters.values()).isfinite():
            continue  # a tenth of the time of looking at each of them
        for name, tensor in parameters.items():
            if not tensor.isfinite().all():
                stop(
                    f"{model_name}.{name} is not finite after step {step}, and no checkpoint of it is saved: "
                    "train with a smaller learning rate, or clip the gradients"
                )


def save_model(accelerator: Accelerator, model: nn.Module, path: Path, model_copy: int | None = None) -> None:
    """Write a model by plain parameter names: loads with strict=True into the bare nn.Module. Collective.

    Args:
        model: as `prepare` returned it.
        model_copy: as in `Checkpoints`.
    """
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    state = gather_first_copy(accelerator, model_copy, model_state(model))

    def write():
        # In a folder of its own, for what safetensors leaves there when it is killed.
        part = path.with_name(f".part_{path.name}")
        remove(part)
        part.mkdir()
        write_tensors(part / path.name, copy_to_cpu(state))
        (part / path.name).replace(path)
        fsync_folder(path.parent)
        remove(part)

    on_main(accelerator, write)
