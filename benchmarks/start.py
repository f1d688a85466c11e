"""From the command to its end.

    python benchmarks/start.py

Seconds of whole commands on one CPU process: four epochs of MNIST in batches of 256, with imports, reading the data,
and files at the end.

- plain script: benchmarks/plain_mnist.py, the same training and nothing else
- mnist_mlp.py, without a launcher: python scripts/mnist_mlp.py
- accelerate-launch, and accelerate launch: the same script; they first import PyTorch for themselves. The second one
  also imports Accelerate's other commands, and transformers and timm where they are installed, as here: without them it
  is as fast as the first
"""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

PLAIN = "plain script"


def parse_args():
    return common.make_parser(__doc__, rounds=5, dataset=True).parse_args()


def seconds(*command) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=common.ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(args) -> dict[str, list[float]]:
    config, programs = ["--config_file", "accelerate_configs/cpu.yaml"], Path(sys.executable).parent
    launchers = {
        "mnist_mlp.py, without a launcher": [sys.executable],
        "accelerate-launch": [programs / "accelerate-launch", *config],
        "accelerate launch": [programs / "accelerate", "launch", *config],
    }

    def launched(launcher) -> float:
        with tempfile.TemporaryDirectory() as output:
            flags = ["--dataset", args.dataset, "--output_dir", Path(output, "run")]
            return seconds(*launcher, "scripts/mnist_mlp.py", *flags)

    ways = {PLAIN: lambda: seconds(sys.executable, "benchmarks/plain_mnist.py", args.dataset)}
    ways |= {way: functools.partial(launched, launcher) for way, launcher in launchers.items()}
    return common.take_turns(ways, args.rounds, warm_up=True)


def report(measured) -> list[str]:
    return [common.compare("on", [("1 process", measured)], "s", PLAIN, "{:.2f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
