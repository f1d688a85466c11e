"""examples/kfold.py, with an accelerator for each fold or one for all; leaves the losses that each process gets."""

import argparse
import sys
from pathlib import Path
from unittest import mock

from accelerate import PartialState

from examples import kfold
from utils import launch
from utils.atomic_files import write_json

make_accelerator = launch.make_accelerator


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one_accelerator", action="store_true")
    parser.add_argument("--trained_folds", type=int, default=3)
    own, sys.argv[1:] = parser.parse_known_args()
    args, made = kfold.parse_args(), []

    def make_first(*given, **options):
        made.extend([] if made and own.one_accelerator else [make_accelerator(*given, **options)])
        return made[-1]

    with mock.patch.object(launch, "make_accelerator", make_first):
        losses = [kfold.train(args, fold)["test_loss"] for fold in range(own.trained_folds)]
    write_json(Path(args.output_dir) / f"rank_{PartialState().process_index}.json", {"losses": losses})


if __name__ == "__main__":
    main()
