"""Command-line flags: argparse with one-sentence errors, and the flags that every script has."""

import argparse
import sys
import textwrap

from .console import is_local_main, stop


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Names the default of a flag that has one, keeps the lines of the examples, and shows N for an integer and X for a
    float."""

    def _get_help_string(self, action):
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default and "default" not in action.help else action.help

    def _get_default_metavar_for_optional(self, action):
        metavars = {"int": "N", "float": "X"}
        return metavars.get(getattr(action.type, "__name__", "")) or super()._get_default_metavar_for_optional(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose help and errors are printed once a machine, an error as one sentence.

    The parsed namespace has an attribute `resume_invariants`: the names (dest) of all flags that must have the same
    value when a run is resumed, as a tuple: "seed", and those in groups made with `resume_invariant=True`.

    Args:
        docstring: the script's. --help shows its first line, and its indented lines as examples.
    """

    def __init__(self, docstring: str = ""):
        first, *others = docstring.splitlines() or [""]
        commands = [f"  {' '.join(line.split())}" for line in others if line.startswith("    ")]
        sets = "CONFIG alone sets the number of processes, devices and precision."
        super().__init__(
            usage=f"accelerate launch --config_file CONFIG {sys.argv[0]} [flags]".replace("%", "%%"),
            description=textwrap.fill(f"{first} {sets}", 80),
            epilog="\n".join(["examples:", *commands]) if commands else None,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def add_argument_group(self, *args, resume_invariant: bool = False, **kwargs):
        """A group of flags; resume_invariant: a resumed run must have the same values for all of them."""
        group = super().add_argument_group(*args, **kwargs)
        group.resume_invariant = resume_invariant
        return group

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse, plus `resume_invariants`; parse_args() calls this method too."""
        namespace, unknown = super().parse_known_args(args, namespace)
        names = ["seed"] if "seed" in namespace else []
        for group in self._action_groups:
            names += [action.dest for action in group._group_actions if group.resume_invariant]
        namespace.resume_invariants = tuple(names)
        return namespace, unknown

    def add_run_flags(self, log_every: int | None = None, *, virtual_processes: bool = True) -> None:
        """Add the last group, "run": the seed, where the output goes, and how to save, resume and log.

        Args:
            log_every: default of --log_every. None: for a script that neither logs its steps nor can be resumed; it
                gets --seed, --output_dir and --timeout_s only.
            virtual_processes: whether the script has --virtual_processes. False where the processes share the model.
        """
        add = self.add_argument_group("run").add_argument
        add("--seed", type=non_negative_int, default=0, help="seed of all random numbers")
        add("--output_dir", type=folder_name, metavar="FOLDER", help="of this run (default: a new one under runs/)")
        if log_every:
            add("--resume", action="store_true", help="continue from the newest checkpoint in --output_dir, if any")
            add("--checkpoint_every", type=non_negative_int, default=0, help="save every N steps; 0: after each epoch")
            add("--keep_checkpoints", type=non_negative_int, default=2, help="keep the newest N checkpoints; 0: all")
            add("--save_best", metavar="METRIC", help="also keep the model of the best test METRIC, such as accuracy")
            add("--log_every", type=positive_int, default=log_every, help="log every N steps")
            add("--patience", type=non_negative_int, default=0, help="stop after N tests without a better; 0: never")
            add("--log_with", metavar="TRACKER", help="also log to a tracker of Accelerate, such as tensorboard")
            profile = {"nargs": "?", "type": positive_int, "const": 10, "default": 0, "metavar": "STEPS"}
            add("--profile", **profile, help="table and trace of STEPS steps (10) after the first ten (default: none)")
        if log_every and virtual_processes:
            add("--virtual_processes", type=non_negative_int, default=0, help="same bits on 1 to N processes; 0: off")
        seconds = at_least(1, below=10**8)  # more overflow in torch, which then hangs
        add("--timeout_s", type=seconds, default=600, help="how long a process waits for another, also during a save")

    def print_help(self, file=None):
        if is_local_main():
            super().print_help(file)

    def error(self, message):
        stop(f"{message} (--help lists all flags)")


def folder_name(text: str) -> str:
    """An argparse type: the name of a folder, which a person can read and type."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid folder name")
    return text


def at_least(minimum: float, kind: type = int, below: float = float("inf")):
    """An argparse type: a number of type `kind` with minimum <= number < below."""
    if kind is int:
        below = min(below, 2**31)  # more overflow later, in one of the libraries

    def number(text: str):
        value = kind(text)
        if not minimum <= value < below:  # also true for NaN
            limit = "" if below == float("inf") else f" and below {below}"
            raise argparse.ArgumentTypeError(f"must be at least {minimum}{limit}, got {text}")
        return value

    number.__name__ = kind.__name__  # argparse puts it into "invalid int value"
    return number


non_negative_int = at_least(0)
positive_int = at_least(1)
non_negative_float = at_least(0.0, float)
fraction = at_least(0.0, float, below=1.0)


def as_json(flags: dict) -> dict:
    """The parsed flags for run.json, without `resume_invariants`; what JSON cannot hold becomes text."""
    known = (bool, int, float, str, list, tuple, type(None))
    shown = {name: value for name, value in flags.items() if name != "resume_invariants"}
    return {name: value if isinstance(value, known) else str(value) for name, value in shown.items()}
