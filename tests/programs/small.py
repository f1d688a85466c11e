"""A script of scripts/, named first, with what is small or odd for a test.

resnet50.py has 4 blocks instead of 16, model_split.py narrow ones. In others, all ranks but the first draw an EOS at
once, so that they would not end together if each one ended by itself.
"""

import os
import sys

import pytest
import run_many
import small_resnets
import torch


def main():
    script = sys.argv.pop(1)
    with pytest.MonkeyPatch.context() as patch:
        if script == "resnet50":
            small_resnets.use_4_blocks(patch.setattr)
        elif script == "model_split":
            small_resnets.use_narrow(patch.setattr)
        elif os.environ.get("RANK", "0") != "0":
            patch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([0]))
        run_many.load(script, run_many.path_of(script)).main()


if __name__ == "__main__":
    main()
