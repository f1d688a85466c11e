"""guardtower instruments one training step: the first backward pass of the script, on each process of torchrun."""

import os
import runpy
import sys

import guardtower
import torch

models, optimizers = [], []
call, make, backward = torch.nn.Module.__call__, torch.optim.Optimizer.__init__, torch.Tensor.backward


def audit(loss, **_):
    torch.Tensor.backward = backward
    model = models[0] if models else torch.nn.Module()  # a method may be called in place of forward
    report = guardtower.audit(model, lambda: loss, optimizer=optimizers[0] if len(optimizers) == 1 else None)
    print(report, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0 if report.ok else 1)


torch.nn.Module.__call__ = lambda module, *args, **named: models.append(module) or call(module, *args, **named)
torch.optim.Optimizer.__init__ = lambda self, *args, **named: optimizers.append(self) or make(self, *args, **named)
torch.Tensor.backward = audit
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
