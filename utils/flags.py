"""Command-line flags: argparse with one-line errors, and the flags that every script has."""

import argparse
import math
import os
import sys
import textwrap

from .console import stop

# These flags may differ between machines. The data are compared by their fingerprint.
PER_MACHINE = frozenset({"output_dir", "dataset", "cache_dir", "num_workers"})

# When resuming, all flags must be the same but these, and the script's in groups with `may_change=True`.
MAY_CHANGE = PER_MACHINE | {
    *("gradient_accumulation_steps", "resume", "timeout_s", "checkpoint_every", "keep_checkpoints", "patience"),
    *("log_every", "log_with", "deterministic", "whole_gradients", "may_change"),
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows each flag's default, if it has one, and keeps the line breaks of the examples."""

    def _get_help_string(self, action):
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, printed once per machine.

    The parsed namespace has a list `may_change`: the flags in groups made with `may_change=True`.

    Args:
        docstring: the script's. --help shows its first line, and its indented lines as examples.
    """

    def __init__(self, docstring: str | None = None):
        first, *others = (docstring or "").splitlines() or [""]  # python -OO removes docstrings
        commands = [f"  {' '.join(line.split())}" for line in others if line.startswith("    ")]
        note = "CONFIG alone sets the number of processes, the devices and the precision."
        super().__init__(
            usage=f"accelerate launch --config_file CONFIG {sys.argv[0]} [flags]".replace("%", "%%"),
            description=textwrap.fill(f"{first} {note}", 80),
            epilog="\n".join(["examples:", *commands]) if commands else None,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def add_argument_group(self, *args, may_change: bool = False, **kwargs):
        """As in argparse; may_change: the flags of this group may change when resuming, as they change no numbers."""
        group = super().add_argument_group(*args, **kwargs)
        group.may_change = may_change
        return group

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse, plus `may_change`; parse_args() calls this method too."""
        namespace, unknown = super().parse_known_args(args, namespace)
        groups = [group for group in self._action_groups if group.may_change]
        namespace.may_change = [action.dest for group in groups for action in group._group_actions]
        return namespace, unknown

    def add_run_flags(self, log_every: int | None = None, *, virtual_processes: bool = True) -> None:
        """Add the last group, "run": the seed, where the output goes, and how to save, resume and log.

        Args:
            log_every: default of --log_every. None, for a script that neither logs steps nor resumes: only --seed,
                --output_dir and --timeout_s.
            virtual_processes: add --virtual_processes. False if the processes share the model.
        """
        run = self.add_argument_group("run")
        run.add_argument("--seed", type=at_least(0, below=2**32), default=0, help="seed of all random numbers")
        # bash leaves the ~ of --output_dir=~/runs/x to the program: a folder called ~ would be made.
        run.add_argument("--output_dir", type=os.path.expanduser, help="folder of this run (default: new, under runs/)")
        run.add_argument("--timeout_s", type=positive_int, default=600, help="seconds a process waits for the others")
        if log_every is None:
            return
        run.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --output_dir")
        run.add_argument("--checkpoint_every", type=non_negative_int, default=0, help="in steps; 0: every epoch")
        run.add_argument("--keep_checkpoints", type=non_negative_int, default=2, help="number to keep; 0: all")
        run.add_argument("--save_best", metavar="METRIC", help="keep the best model: by loss, min:NAME or max:NAME")
        run.add_argument("--patience", type=non_negative_int, default=0, help="stop when N tests are no better; 0: off")
        run.add_argument("--log_every", type=positive_int, default=log_every, help="steps per log line")
        run.add_argument("--log_with", metavar="TRACKER", help="also log to an Accelerate tracker: tensorboard, wandb")
        run.add_argument("--deterministic", action="store_true", help="the same bits in each run; slower on GPUs")
        if virtual_processes:
            run.add_argument(
                "--virtual_processes", type=non_negative_int, default=0, help="same bits on 1 to N processes; 0: off"
            )
            run.add_argument("--whole_gradients", action="store_true", help="FSDP: reduce once per step; more memory")

    def error(self, message):
        stop(f"{message} (--help lists all flags)")


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of `args` in which missing run flags have their defaults."""
    parser = ArgumentParser()
    parser.add_run_flags(log_every=10)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **vars(args)})


def at_least(minimum: float, kind: type = int, below: float = math.inf, most: float = math.inf):
    """An argparse type: a number with minimum <= number < below, and number <= most."""

    def number(text: str):
        value = kind(text)
        if not (minimum <= value < below and value <= most):  # also true for NaN
            limit = f" and below {below}" if below < math.inf else f" and at most {most}" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be at least {minimum}{limit}, got {text}")
        return value

    number.__name__ = kind.__name__  # for argparse's "invalid int value"
    return number


non_negative_int = at_least(0)
positive_int = at_least(1)
non_negative_float = at_least(0.0, float)
fraction = at_least(0.0, float, below=1.0)
