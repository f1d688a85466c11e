"""run_many.py with the all-reduces of gradients, which DDP's hook counts, in each run's summary.json."""

import run_many
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

FILE = run_many.FILE.with_name("count_all_reduces")


def main() -> None:
    from utils.run import Run

    start, finish = Run.start, Run.finish

    def start_and_hook(run, *args, checkpoint, **options):
        start(run, *args, checkpoint=checkpoint, **options)
        run.all_reduces = 0

        def count(process_group, bucket):
            run.all_reduces += 1
            return allreduce_hook(process_group, bucket)

        for model in checkpoint.values():
            model = getattr(model, "_orig_mod", model)  # with a dynamo_config in the config file
            # Virtual processes do not all-reduce.
            if isinstance(model, DistributedDataParallel) and not run.accelerator.layout.virtual_processes:
                model.register_comm_hook(None, count)

    def finish_and_tell(run):
        run.summary["gradient_all_reduces"] = run.all_reduces
        finish(run)

    Run.start, Run.finish = start_and_hook, finish_and_tell
    run_many.main()


if __name__ == "__main__":
    main()
