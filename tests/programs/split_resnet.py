"""scripts/model_split.py with a narrow ResNet-50; with --exact, by SGD, and with a file `passes` in the run's folder.

AdamW divides the rounding of the smallest gradients by their size, and the size of all by itself.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
from small_resnets import use_narrow

from scripts import model_split
from utils.parallel.pipeline import OneProcess

make_pipeline = model_split.make_pipeline


def sgd(parameters, lr, weight_decay, fused):
    return torch.optim.SGD(parameters, lr, weight_decay=weight_decay)


def main():
    use_narrow(setattr)
    if "--exact" not in sys.argv:
        return model_split.main()
    sys.argv.remove("--exact")
    passes = []  # of the first stage: "f" for a forward and "b" for a backward pass

    def record(module, inputs, output):
        passes.append("f")
        if output.requires_grad:
            output.register_hook(lambda gradient: passes.append("b"))

    def make_and_record(*args):
        made = make_pipeline(*args)
        stage = made[1].stages[0] if isinstance(made[1], OneProcess) else made[1].stage
        stage.register_forward_hook(record)
        return made

    with mock.patch.object(torch.optim, "AdamW", sgd), mock.patch.object(model_split, "make_pipeline", make_and_record):
        model_split.main()
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[sys.argv.index("--output_dir") + 1], "passes").write_text("".join(passes[:24]))
