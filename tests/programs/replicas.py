"""mlp.py with a mistake between the replicas of HSDP, by --mistake: they begin with different weights, or the shards of
one do not receive the gradients of the others."""

import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.programs import mlp
from utils.accelerator import TrainingAccelerator

MISTAKE = sys.argv[sys.argv.index("--mistake") + 1 :][0]
MESH = TrainingAccelerator.mesh  # a cached_property


class OtherWeights(mlp.MLP):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        accelerator = TrainingAccelerator()
        with torch.no_grad():
            self.fc2.weight[-1, -1] += accelerator.process_index // accelerator.layout.shards


def main():
    del sys.argv[sys.argv.index("--mistake") :]
    if MISTAKE == "weights":
        with mock.patch.object(mlp, "MLP", OtherWeights):
            mlp.main()
    else:
        of_replica = property(lambda accelerator: MESH.__get__(accelerator)["shards"])
        with mock.patch.object(TrainingAccelerator, "mesh", of_replica):
            mlp.main()


if __name__ == "__main__":
    main()
