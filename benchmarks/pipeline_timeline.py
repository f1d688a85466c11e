"""Who works when in a split model.

    python benchmarks/pipeline_timeline.py

A step of ResNet-50 on two processes with one thread each, as in benchmarks/model_split.py, with 4 micro-batches: the
fastest of the timed steps of each schedule. `naive` sends a micro-batch through both stages before the next one, so one
stage works at a time; 1F1B fills both. In theory a stage is idle for 1/2 and 1/5 of the step.
"""

import sys
from pathlib import Path

from accelerate.utils import gather_object
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.model_split import STAGES, Steps, busy_s
from utils.accelerator import TrainingAccelerator

PICTURE = common.ROOT / "guides" / "pipeline.png"
MICRO_BATCHES = 4
IN_THEORY = {"naive": 1 / 2, "1f1b": 1 / (MICRO_BATCHES + 1)}
COLOURS = {"forward": "#56b4e9", "backward": "#0072b2"}


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    parser.add_argument("--batch_size", type=common.positive_int, default=32, help="%(default)s")
    return parser.parse_args()


def worker(args) -> dict[str, list]:
    """By schedule, the spans of each stage."""
    accelerator, fastest = TrainingAccelerator(cpu=True), {}
    steps = Steps(accelerator, args.batch_size, MICRO_BATCHES)
    for schedule, (part, pipe) in steps.pipelines(*IN_THEORY).items():
        timed = []
        for _ in range(args.rounds + 1):
            accelerator.wait_for_everyone()
            timed.append(gather_object([steps.run(pipe)]))
            part.zero_grad()
        fastest[schedule] = min(timed[1:], key=length_s)  # the first one is for warm-up
    return fastest


def length_s(step: list[list]) -> float:
    """From the first start of a stage to the last end."""
    return max(end for spans in step for *_, end in spans) - start_of(step)


def start_of(step: list[list]) -> float:
    return min(start for spans in step for *_, start, _ in spans)


def idle(step: list[list]) -> list[float]:
    """The fraction of the step in which each stage does not compute."""
    return [1 - busy_s(spans) / length_s(step) for spans in step]


def measure(args) -> dict[str, list]:
    return common.launch_workers("cpu_ddp", __file__)


def report(measured) -> list[str]:
    columns = {"schedule": "{}", "ms per step": "{:.0f}", "stage 0 idle": "{:.0%}", "stage 1 idle": "{:.0%}"}
    rows = [[name, 1000 * length_s(step), *idle(step), IN_THEORY[name]] for name, step in measured.items()]
    return [common.table(columns | {"in theory": "{:.0%}"}, rows)]


def draw(measured, device: str) -> Figure:
    """A row for each stage, and a bar for each pass of a micro-batch, with its number; idle where there is none."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(len(measured), 1, sharex=True)
    for axes, (schedule, step) in zip(panels, measured.items(), strict=True):
        axes.set_facecolor("#eeeeee")
        for stage, spans in enumerate(step):
            for kind, number, start, end in spans:
                left_ms, width_ms = 1000 * (start - start_of(step)), 1000 * (end - start)
                axes.barh(stage, width_ms, 0.8, left_ms, color=COLOURS[kind], edgecolor="white")
                axes.text(left_ms + width_ms / 2, stage, number, ha="center", va="center", color="white", fontsize=8)
        percent = ", ".join(f"{fraction:.0%}" for fraction in idle(step))
        axes.set_title(f"{schedule}: the stages are idle for {percent} of the step", fontsize=10, loc="left")
        axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
        axes.invert_yaxis()
    panels[-1].set_xlabel("ms; grey: idle; numbers: micro-batches")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return figure


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
