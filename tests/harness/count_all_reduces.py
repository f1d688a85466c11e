"""run_many.py with the all-reduces of gradients, which DDP's hook counts, in each run's summary.json."""

import run_many
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from utils.run import Run

FILE = run_many.FILE.with_name("count_all_reduces")
START = Run.start


def start_and_hook(run, *args, checkpoint, **options):
    START(run, *args, checkpoint=checkpoint, **options)
    run.summary["gradient_all_reduces"] = 0

    def count(process_group, bucket):
        run.summary["gradient_all_reduces"] += 1
        return allreduce_hook(process_group, bucket)

    for model in checkpoint.values():
        model = getattr(model, "_orig_mod", model)  # with a dynamo_config in the config file
        # Virtual processes do not all-reduce.
        if isinstance(model, DistributedDataParallel) and not run.accelerator.layout.virtual_processes:
            model.register_comm_hook(None, count)


if __name__ == "__main__":
    Run.start = start_and_hook
    run_many.main()
