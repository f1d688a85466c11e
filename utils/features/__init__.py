"""What a run may have beside its core. Each module here can be left out.

    module              asked for by                     what it does
    virtual_processes   --virtual_processes              the same bits on any number of processes
    profiling           --profile                        a table and a trace of some steps
    early_stopping      --patience                       stop when the test no longer gets better
    trackers            --log_with                       log to tensorboard and the like, too
    banner              its file                         what is going to run, on the screen and in run.json
    progress_bar        its file                         a bar on a terminal
    provenance          its file                         versions and commit in run.json
    lasting_output      its file                         a closed pipe or a full disk does not end a run
    orphans             its file                         processes end when their launcher is gone
    peak_memory         its file                         peak memory, in summary.json
    curves              its file                         curves.png at the end of a run
    same_weights        its file, several processes      compare the weights before each checkpoint
    hang_watchdog       its file, several processes      name the rank that the others wait for
    lost_peers          its file, several processes      name the rank that is gone
    quick_steps         its file                         a question of Accelerate in every step, asked once
    out_of_memory       its file, or a script            advice, and the largest batch that fits
    restarts            --max_restarts of the launcher   continue after a failure without being asked
    fsdp                fsdp.yaml, or a script           sharded models
    data_parallel       dp.yaml, or a script             nn.DataParallel, with the loss on each GPU
    batch_norm          a script                         statistics over all processes
    sampling            a script                         weighted draws, repeated augmentation
    gather_samples      a script                         every sample's value on every process
    pretrained          a script                         start from weights of others (--pretrained)
    pipeline            a script                         a model cut over several devices
    pipeline_timeline   pipeline                         a picture of when each stage computes

The core imports none of them at the top of a file. It attaches most of them in two places: `attach_to_process`
in launch.py, and `Run._attach_features` in run.py. To do without one, delete its file: its flag goes
too, and who asks for it all the same is told which file is missing.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType

from ..console import stop


def has(name: str) -> bool:
    """Whether the feature is here."""
    return find_spec(f"{__name__}.{name}") is not None


def feature(name: str, asked_by: str = "this run") -> ModuleType:
    """The module of a feature, imported now.

    Args:
        asked_by: what needs it, for the error: a flag, or a config file.

    Raises:
        SystemExit: if its file is not here.
    """
    if not has(name):
        stop(
            f"{asked_by} needs the feature {name}, and there is no {'/'.join(__name__.split('.'))}/{name}.py: "
            f"copy it there, or take it along with `--with {name}`"
        )
    return importlib.import_module(f"{__name__}.{name}")
