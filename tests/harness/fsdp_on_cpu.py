"""run_many.py with FSDP2 on processes of the CPU: the same words, and fsdp.yaml.

    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 2 \\
        --gpu_ids=-1,-1 tests/harness/fsdp_on_cpu.py mnist_mlp "--output_dir a"

Accelerate shards on GPUs only. Here it takes these processes for such with GPUs when it asks
whether it may shard; all else is its own and torch's: `prepare`, fully_shard, and gloo.
"""

import run_many

FILE = run_many.FILE.with_name("fsdp_on_cpu")
LAUNCH = {"script": FILE, "launch_flags": ["--num_processes", 2, "--gpu_ids=-1,-1"]}


def shard_on_cpus() -> None:
    from accelerate.state import DistributedType, PartialState

    init = PartialState.__init__

    def init_as_with_gpus(self, *args, **options):
        init(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU  # AcceleratorState makes it FSDP

    PartialState.__init__ = init_as_with_gpus


def check_shards() -> None:
    """Have `prepare` fail where a model is not cut, so that no test passes with plain DDP."""
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.tensor import DTensor

    prepare = Accelerator.prepare

    def prepare_and_check(self, *args, **options):
        prepared = prepare(self, *args, **options)
        for part in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(part, nn.Module):
                held = 0
                for name, parameter in part.named_parameters():
                    assert isinstance(parameter, DTensor), name
                    held += parameter.to_local().numel()
                whole = sum(parameter.numel() for parameter in part.parameters())
                assert 0.3 * whole < held < 0.7 * whole, (held, whole)
        return prepared

    Accelerator.prepare = prepare_and_check


def main() -> None:
    shard_on_cpus()
    check_shards()
    run_many.main()


if __name__ == "__main__":
    main()
