"""Builds transformer.py's model; writes, per rank, a digest of its whole weights, and the peak of its memory."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from scripts.transformer import Transformer
from utils import launch
from utils.fingerprint import digest
from utils.flags import ArgumentParser
from utils.parallel import fsdp
from utils.pretrained import load_pretrained

SIZES = {"vocabulary": 1001, "dim": 512, "layers": 12, "heads": 4}  # 39 million parameters, 150 MiB


class WithRow(Transformer):
    """With one row, which two of three processes have nothing of, and a weight that two modules have."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.row, self.head = nn.Parameter(torch.empty(1, 7)), nn.Linear(512, 1001, bias=False)
        self.head.weight = self.embed.weight
        self.initialize("row", self.row)


def make():
    return WithRow(**SIZES)


def whole(model) -> str:
    """A digest of the names and weights of a model, sharded or not. Collective."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    return digest({n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()})


def peak_mib() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--pretrained")
    parser.add_run_flags()
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args)
    before = peak_mib()
    torch.rand(accelerator.process_index)  # what was drawn before does not matter
    model = fsdp.build(accelerator, make, seed=7)
    if args.pretrained:
        load_pretrained(model, args.pretrained)
    found = {"peak_mib": peak_mib() - before}
    found |= {"digest": whole(model), "is_tied": model.head.weight is model.embed.weight}
    folder = Path(args.output_dir)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
