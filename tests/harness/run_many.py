"""Several runs of a script in one launch: to start processes takes far longer than the runs of
these tests.

    accelerate launch --config_file CONFIG tests/harness/run_many.py mnist_mlp \\
        "--output_dir a --lr 1e-3" "--output_dir b"

Each run leaves what a launch of its own would leave, bit by bit. Before one that begins with
`--back_to a 20 b` the folder `a` is copied to `b`, as a kill between step 20 and the next
checkpoint would have left it. One that begins with `--script path.py` is a run of another script,
and so are those after it. With a config that asks for FSDP, models must be sharded.
"""

import gc
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


FILE = Path(__file__).with_suffix("")  # as `launcher(script=...)` takes it


def path_of(script: str) -> Path:
    """The file of a script: a name in scripts/, examples/ or tests/programs/, or the path of any other."""
    if script.endswith(".py"):
        return Path(script)
    folders = (ROOT / "scripts", ROOT / "examples", ROOT / "tests" / "programs")
    return next(path for folder in folders if (path := folder / f"{script}.py").exists())


def words(script: str, *runs: list) -> list[str]:
    """What the launcher hands to this file; runs: the flags of each."""
    return [script, *(shlex.join(map(str, flags)) for flags in runs)]


def reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def load(script: str, path: Path):
    """The module of a script; one that lies elsewhere finds what lies beside it."""
    if path.is_relative_to(ROOT) and path.parent.name in ("scripts", "examples", "programs"):
        return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where workers of data loaders look for its classes
    spec.loader.exec_module(module)
    return module


def run(script: str, flags: list) -> int | None:
    """`main` of a script in this process; returns its exit code: None after a run.

    script: as in `path_of`. flags: of the script; with --float64 among them it makes its models in float64, and
        `batch.randn` is float64, too.
    """
    import torch

    from utils.loader import Batch

    path = path_of(script)
    dtype, randn = torch.get_default_dtype(), Batch.randn
    if "--float64" in flags:
        flags = [flag for flag in flags if flag != "--float64"]
        torch.set_default_dtype(torch.float64)
        Batch.randn = lambda *args, **options: randn(*args, **options).double()
    own_argv, sys.argv = sys.argv, [str(path), *map(str, flags)]
    module = load(script, path)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # which a run's summary.json has
    try:
        module.main()
        return None
    except SystemExit as stopped:
        return stopped.code
    finally:
        torch.set_default_dtype(dtype)
        Batch.randn = randn
        sys.argv = own_argv
        gc.collect()  # the lock of the folder goes with the RunFolder
        # The end of a process waits for the checkpoint that is being written.
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint"):
                thread.join()
        if not torch.distributed.is_initialized():
            reset_accelerate()  # the next run may have a different precision


def back_to(run: Path, step: int, copied: Path) -> Path:
    """Copy a run's folder without its end and without the checkpoints after `step`, whose own must
    be there."""
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("summary.json", "*.safetensors", "step_*"))
    for checkpoint in (run / "checkpoints").glob("step_*"):
        if int(checkpoint.name[5:]) <= step:
            shutil.copytree(checkpoint, copied / "checkpoints" / checkpoint.name)
    assert (copied / "checkpoints" / f"step_{step:08d}").is_dir()
    return copied


def check_shards() -> None:
    """Have `prepare` fail where a process holds more than its part of a model, so that no test passes with DDP."""
    from torch import nn

    from utils.accelerator import TrainingAccelerator

    prepare = TrainingAccelerator.prepare

    def prepare_and_check(self, *args, **options):
        prepared = prepare(self, *args, **options)
        for model in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(model, nn.Module) and self.num_processes > 1:
                held = sum(parameter.to_local().numel() for parameter in model.parameters())
                part = sum(parameter.numel() for parameter in model.parameters()) / self.layout.shards
                assert 0.6 * part < held < 1.4 * part, (held, part)
        for group in self.mesh.get_all_groups() if self.mesh.ndim > 1 else ():
            assert group._get_backend(self.device).options._timeout == self.init_handler.timeout
        return prepared

    TrainingAccelerator.prepare = prepare_and_check


def main():
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        check_shards()
    script, *runs = sys.argv[1:]
    for flags in map(shlex.split, runs):
        if flags[0] == "--script":
            script, flags = flags[1], flags[2:]
        if flags[:1] == ["--back_to"]:
            (_, folder, step, copied), flags = flags[:4], flags[4:]
            if os.environ.get("RANK", "0") == "0":  # the others wait for it in `make_accelerator`
                back_to(Path(folder), int(step), Path(copied))
        code = run(script, flags)
        if code is not None:
            sys.exit(code)


if __name__ == "__main__":
    main()
