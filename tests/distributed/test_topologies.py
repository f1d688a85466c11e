"""Every config that fits this machine: its numbers against those of one process of the same device.

    python -m pytest -m gpu -rA --junitxml=gpu_report.xml    # on the GPUs of this machine, with test_on_gpus.py
    python -m pytest tests/distributed/test_topologies.py -m "slow and not gpu" -n 0    # the same on its CPU

The tests are the same on CPUs and GPUs. All runs of a config are in one launch, which the first
test of it starts.
"""

import itertools
import statistics
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import run_many
import run_reader
import torch
import torchvision
from conftest import CONFIGS, is_older_than
from run_reader import lines
from same_numbers import TOLERANCE, differences, largest_difference

from utils.console import plural, printable

# 2 x 21 steps, the last of each epoch with 3 images: on 4 GPUs or more, some have none of them.
FLAGS = ["--num_epochs", 2, "--batch_size", 50, "--lr", 1e-3, "--hidden", 160, "--dropout", 0.1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 30, "--keep_checkpoints", 0]
STEPS, CUT = 42, 30  # of a run; the one after which it is cut back: in the middle of an epoch
# Of a loss with bf16 to that with float32. bf16 has 8 bits: each number of a pass is rounded by up
# to 2^-9 of it. The losses of an epoch average that out: 4e-4 on a CPU. FSDP also rounds the sums
# of gradients, so four roundings are allowed.
BF16_TOLERANCE = 2**-7
# In float64. A deep network makes rounding larger, most of all with BatchNorm.
SPLIT_TOLERANCE, BATCH_NORM_TOLERANCE = 1e-10, 1e-6
TIMEOUT_S = 600
# Of transformer.py: small, yet FSDP shards its blocks on their own.
TEXT = ["--vocabulary", 290, "--context", 64, "--dim", 128, "--layers", 2, "--heads", 2, "--num_tokens", 8]


ON_CPUS = {"cpu_ddp": 2}  # processes; cpu_fsdp.yaml and cpu_hsdp.yaml are in test_fsdp.py
# hsdp.yaml is for two machines with four GPUs each; here, two replicas of two shards on one machine.
HSDP = ["--num_machines", 1, "--num_processes", 4, "--parallelism_config_dp_shard_size", 2]


class Topology(NamedTuple):
    """A config, and what it needs."""

    config: str
    gpus: int = 0  # at least; 0: it runs on the CPU
    precision: str = "no"

    @property
    def name(self) -> str:
        return self.config + ("" if self.precision == "no" else f", {self.precision}")

    def unfit(self) -> str | None:
        """Why this machine cannot run it, or None."""
        here = torch.cuda.device_count()
        if here < self.gpus:
            return f"needs {plural(self.gpus, 'GPU')}, and this machine has {here}"
        wants_bf16 = self.gpus and self.precision == "bf16"
        if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "the GPU has no bf16"
        return None

    def processes(self) -> int:
        """Not what the config says, but what it is meant to say."""
        fixed = {**ON_CPUS, "hsdp": 4}
        if self.config in fixed:
            return fixed[self.config]
        return torch.cuda.device_count() if self.config in ("ddp", "fsdp") else 1

    def devices(self) -> int:
        return torch.cuda.device_count() if self.config == "dp" else self.processes()

    def distributed_type(self) -> str:
        known = {"cpu_ddp": "MULTI_CPU", "dp": "DATA_PARALLEL", "ddp": "MULTI_GPU"}
        known |= {"fsdp": "FSDP", "hsdp": "HSDP 2 x 2"}
        return known.get(self.config, "NO")

    def reference(self) -> "Topology":
        """One process of the same device, in float32 or float64."""
        return TOPOLOGIES[1 if self.gpus else 0]

    def is_ddp(self) -> bool:
        return self.config in ("cpu_ddp", "ddp")


TOPOLOGIES = [
    Topology("cpu"),
    Topology("single_gpu", 1),
    Topology("cpu_ddp"),
    Topology("dp", 2),
    Topology("ddp", 2),
    Topology("fsdp", 2),
    Topology("hsdp", 4),
]
TOPOLOGIES += [each._replace(precision="bf16") for each in TOPOLOGIES if each.config != "cpu"]


def on(*configs, precisions=("no", "bf16")):
    """Parametrize a test with the topologies of these configs; without configs, with all."""
    marked = []
    for each in TOPOLOGIES:
        if (configs and each.config not in configs) or each.precision not in precisions:
            continue
        marks = [pytest.mark.slow, *([pytest.mark.gpu] if each.gpus else [])]
        name = each.name.replace(", ", "-").replace(" ", "_")
        marked.append(pytest.param(each, marks=marks, id=name))
    return pytest.mark.parametrize("topology", marked, indirect=True)


SEVERAL = (*ON_CPUS, "dp", "ddp", "fsdp", "hsdp")
PLAIN = {"precisions": ("no",)}


def planned_runs(topology: Topology, mnist: Path, tiny: Path, texts: Path) -> dict[str, list]:
    """The runs of a launch: by name, what run_many.py takes, in which the run is in folder NAME."""
    gpus = torch.cuda.device_count()
    plain, runs = topology.precision == "no", {}
    is_reference = topology == topology.reference()
    mlp = ["--dataset", mnist, *FLAGS]
    script, small = ["--script", "mlp"], ["--script", "small"]
    runs["float32"] = [*script, *mlp]
    if plain:
        runs["float64"] = [*mlp, "--dtype", "float64"]
    runs["resumed"] = ["--back_to", "float32", CUT, "resumed", *mlp, "--resume"]

    # Not of 16 pixels, of which the last block would get one: on a CPU, the backward pass of a
    # convolution with stride 2 in bf16 then reads memory that nobody wrote (PyTorch 2.15).
    tiny_images = ["--dataset", tiny, "--image_size", 32, "--max_steps", 3, "--log_every", 1]
    tiny_images += ["--batch_size", 4 * max(gpus, 2)]
    runs["resnet50"] = [*small, "resnet50", *tiny_images, "--num_workers", 0]
    # The other scripts. With variable lengths, the last of the 5 micro-batches of a step has no sample.
    text = ["--dataset", texts, *TEXT, "--batch_size", 4 * max(gpus, 2), "--max_steps", 6, "--log_every", 1]
    cells = ["--dataset", mnist, "--batch_size", 250, "--num_epochs", 1, "--log_every", 1, "--variable_length"]
    cells += ["--gradient_accumulation_steps", 5 if topology.config in ("cpu", "single_gpu", "dp") else 1]
    transformer = [*small, "transformer", *text]
    accumulation = ["--script", "gradient_accumulation", *cells]
    runs |= {"transformer": transformer, "gradient_accumulation": accumulation}
    if not plain:
        return runs

    virtual = ["--virtual_processes", max(4, gpus)]
    runs["workers"] = [*runs["resnet50"][:-1], 2]
    split = ["--dataset", tiny, "--norm", "group", "--dtype", "float64", "--batch_size", 16]
    split += ["--max_steps", 2, "--lr", 1e-4, "--log_every", 1]
    if is_reference or topology.config in ("cpu_ddp", "dp", "ddp"):
        for schedule in schedules(topology):
            runs[f"split_{schedule}"] = [*small, "model_split", *split, "--schedule", schedule]
    if topology.gpus and (is_reference or topology.config == "ddp"):
        norm = ["--bn", "local" if is_reference else "sync"]
        runs["batch_norm"] = [*small, "resnet50", "--float64", *tiny_images, "--num_workers", 0, *norm]
    if is_reference or topology.is_ddp():
        dropout = [*transformer, "--dropout", 0.1, *virtual]
        runs |= {"virtual": [*script, *mlp, *virtual], "virtual_transformer": dropout}
        runs["virtual_again"] = dropout
    if is_reference:
        for other in [each for each in TOPOLOGIES if saves_for(each, topology) and each.unfit() is None]:
            saved, own = f"../{other.name}/virtual", f"{other.name}_virtual"
            runs[own] = [*script, "--back_to", saved, CUT, own, *mlp, *virtual, "--resume"]
        runs["recomputed"] = [*transformer, "--checkpoint_activations"]
    if is_reference and topology.gpus:  # a compiler takes a minute for it on a CPU
        runs["compiled"] = [*transformer, "--compile"]
    return runs


def schedules(topology: Topology) -> list[str]:
    """Of model_split.py; all of them over GPUs. On CPUs they are in test_model_split.py."""
    if topology.processes() > 1 and is_older_than("2.12"):
        return []
    return ["1f1b", "gpipe", "naive"] if topology.config == "ddp" else ["1f1b"]


def saves_for(topology: Topology, reference: Topology) -> bool:
    """Whether one process of this device goes on with what this topology has saved."""
    return topology.is_ddp() and topology.precision == "no" and topology.reference() == reference


class Launches:
    """One launch for each topology, made when a test first asks for a run of it."""

    def __init__(self, launcher, *data: Path):
        self.launcher, self.data, self.output = launcher, data, {}

    def launch(self, topology: Topology) -> None:
        for other in TOPOLOGIES if topology == topology.reference() else ():
            if saves_for(other, topology) and other.unfit() is None and other not in self.output:
                self.launch(other)
        folder = self.launcher.folder / topology.name
        folder.mkdir()
        planned = planned_runs(topology, *self.data)
        runs = [[*flags, "--timeout_s", 120, "--output_dir", name] for name, flags in planned.items()]
        own, self.launcher.folder = self.launcher.folder, folder
        try:
            done = self.launcher(
                topology.config,
                *run_many.words("mlp", *runs),
                script=run_many.FILE,
                launch_flags=["--mixed_precision", topology.precision, *(HSDP if topology.config == "hsdp" else ())],
                timeout=TIMEOUT_S,
                check=False,
            )
            self.output[topology] = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            self.launcher.end()  # the next launch needs the GPUs
            self.output[topology] = f"not done after {TIMEOUT_S} s"
        finally:
            self.launcher.folder = own

    def run(self, topology: Topology, name: str, split: bool = False) -> Path:
        """The folder of a run, which must have ended, on the processes of this topology.

        split: a run whose processes share the model.
        """
        if topology not in self.output:
            self.launch(topology)
        folder = self.launcher.folder / topology.name / name
        assert (folder / "summary.json").exists(), f"{name} or a run before it did not end\n{self.output[topology]}"
        launch = run_reader.launches(folder)[-1]
        kinds = {process["device"].partition(":")[0] for process in launch["processes"]}
        assert kinds == {"cuda" if topology.gpus else "cpu"}
        replicas = topology.devices() if topology.config == "dp" and not split else 1
        assert (launch["num_processes"], launch["data_parallel_gpus"]) == (topology.processes(), replicas)
        if not split:
            assert launch["distributed_type"] == topology.distributed_type()
        assert launch["mixed_precision"] == topology.precision
        return folder


@pytest.fixture(scope="module")
def launches(shared_launcher, small_mnist, tiny_mnist, texts):
    return Launches(shared_launcher, small_mnist, tiny_mnist, texts)


@pytest.fixture
def topology(request) -> Topology:
    reason = request.param.unfit()
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def at_most(record_property):
    """Checks measured values against their limits, once both are in the report."""

    def at_most(measured: dict[str, float], limits: dict[str, float]):
        for column, values in (("figure", measured), ("tolerance", limits)):
            shown = [f"{value:.1e}" if value else "0" for value in values.values()]
            if column == "figure":
                shown = [f"{name} {value}" for name, value in zip(values, shown, strict=True)]
            record_property(column, ", ".join(dict.fromkeys(shown)))
        for name, value in measured.items():
            assert value <= limits[name], f"{name} differs by {value}, more than {limits[name]}"

    return at_most


def different_bits(run: Path, other: Path) -> int:
    """How many files of the last checkpoint, and lines of the log, are not the same."""
    ours, theirs = (run_reader.last_checkpoint(folder) for folder in (run, other))
    names = [file.name for file in ours.glob("*.safetensors")]
    assert any("optimizer" in name for name in names)
    count = sum((ours / name).read_bytes() != (theirs / name).read_bytes() for name in names)
    assert len(lines(run)) == len(lines(other)) > STEPS
    return count + sum(a != b for a, b in zip(lines(run), lines(other), strict=True))


@on(*SEVERAL, **PLAIN)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_numbers_equal_one_process(topology, dtype, launches, at_most):
    one, run = (launches.run(each, dtype) for each in (topology.reference(), topology))
    losses, weights = differences(one, run, STEPS)
    at_most({"loss": losses, "weights": weights}, dict.fromkeys(("loss", "weights"), TOLERANCE[dtype]))


def of_epochs(run: Path, other: Path) -> float:
    """The largest relative difference of what `epoch_means` returns."""
    pairs = zip(epoch_means(run), epoch_means(other), strict=True)
    return max(abs(b / a - 1) for a, b in pairs)


def epoch_means(folder: Path) -> list[float]:
    """The mean training loss of each epoch, and the loss of each test."""
    means = []
    for split in ("train", "test"):
        for epoch in (1, 2):
            losses = [line["loss"] for line in lines(folder, split) if line["epoch"] == epoch]
            means.append(statistics.fmean(losses))
    return means


def of_losses(run: Path, other: Path) -> float:
    """The largest relative difference of a loss."""
    return max(abs(b / a - 1) for a, b in zip(*(run_reader.losses(each, None) for each in (run, other)), strict=True))


@on(*SEVERAL)
@pytest.mark.parametrize("script", ["transformer", "gradient_accumulation"])
def test_losses_of_the_other_scripts_equal_one_process(topology, script, launches, at_most):
    one, run = (launches.run(each, script) for each in (topology.reference(), topology))
    limit = BF16_TOLERANCE if topology.precision == "bf16" else TOLERANCE["float32"]
    at_most({"loss": of_losses(one, run)}, {"loss": limit})


@on("cpu", "single_gpu", **PLAIN)
@pytest.mark.parametrize("name", ["recomputed", "compiled"])
def test_a_flag_changes_no_numbers(topology, name, launches, at_most):
    if name == "compiled" and not topology.gpus:
        pytest.skip("a compiler takes a minute on a CPU")
    plain = launches.run(topology, "transformer")
    at_most({"loss": of_losses(plain, launches.run(topology, name))}, {"loss": TOLERANCE["float32"]})


@on(**PLAIN)
def test_workers_read_what_one_process_reads(topology, launches, at_most):
    """Their batches lie in pinned memory on GPUs, whose convolutions do not have the same bits twice."""
    run, other = (launches.run(topology, name) for name in ("resnet50", "workers"))
    at_most({"loss": of_losses(run, other)}, {"loss": 1e-3 if topology.gpus else 0})


@on(**PLAIN)
def test_a_prompt_is_continued_as_by_the_processes_of_the_run(topology, launches, capsys, record_property):
    """Twice the same, on the CPU, from what the run has left. All its ranks end, though they draw different tokens."""
    folder = launches.run(topology, "transformer")
    for _ in range(2):
        assert run_many.run("transformer", ["--output_dir", folder, "--prompt", "", *TEXT[-2:]]) is None
    sample = printable(run_reader.summary(folder)["test_sample"])
    record_property("figure", repr(sample))
    assert capsys.readouterr().out == f"{sample}\n" * 2


@on(precisions=("bf16",))
def test_losses_with_bf16_are_near_float32(topology, launches, at_most):
    one, run = (launches.run(each, "float32") for each in (topology.reference(), topology))
    difference = of_epochs(one, run)
    assert difference > 1e-6, "bf16 was asked for, and float32 ran"
    at_most({"loss of an epoch": difference}, {"loss of an epoch": BF16_TOLERANCE})


@on()
def test_each_test_sample_counts_once(topology, launches, record_property):
    figures = []
    for name, samples in (("float32", 203), ("resnet50", 23)):
        folder = launches.run(topology, name)
        summary = run_reader.summary(folder)
        counts = {line["samples"] for line in lines(folder, "test")}
        counts |= {summary["test_samples"]}
        figures.append(f"{', '.join(map(str, sorted(counts)))} of {samples}")
        record_property("figure", ", ".join(figures))
        assert counts == {samples}
        hits = summary["test_accuracy"] * samples
        assert abs(hits - round(hits)) < 1e-4


@on()
def test_a_run_that_is_resumed_has_the_same_bits(topology, launches, at_most):
    """Model, optimizer, random numbers and logged values.

    Except with plain DDP on 3 processes or more: a restarted one orders its buckets anew.
    """
    run, resumed = (launches.run(topology, name) for name in ("float32", "resumed"))
    launched = run_reader.launches(resumed)
    assert [launch["from_step"] for launch in launched] == [0, CUT]
    if topology.is_ddp() and topology.processes() > 2:
        if topology.precision == "bf16":
            difference = {"loss of an epoch": of_epochs(run, resumed)}
            return at_most(difference, {"loss of an epoch": BF16_TOLERANCE})
        return at_most({"all numbers": largest_difference(run, resumed)}, {"all numbers": TOLERANCE["float32"]})
    at_most({"tensors and lines": different_bits(run, resumed)}, {"tensors and lines": 0})


@on("cpu_ddp", "ddp", **PLAIN)
def test_virtual_processes_have_the_bits_of_one_process(topology, launches, at_most):
    """Also where one process goes on with what several have saved; of transformer.py, with dropout and loss weights."""
    resumed = f"{topology.name}_virtual"
    pairs = [("virtual", topology, "virtual"), ("virtual", topology.reference(), resumed)]
    pairs += [("virtual_transformer", topology, name) for name in ("virtual_transformer", "virtual_again")]
    count = 0
    for name, where, other_name in pairs:
        one, other = launches.run(topology.reference(), name), launches.run(where, other_name)
        weights = [(folder / "model.safetensors").read_bytes() for folder in (one, other)]
        losses = [run_reader.losses(folder, None) for folder in (one, other)]
        count += sum(a != b for a, b in zip(*losses, strict=True)) + (weights[0] != weights[1])
    at_most({"lines and models": count}, {"lines and models": 0})


@on()
def test_resnet50_trains_and_leaves_its_files(topology, launches, record_property):
    folder = launches.run(topology, "resnet50")
    losses = run_reader.losses(folder)
    record_property("figure", f"losses {', '.join(f'{loss:.3f}' for loss in losses)}")
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)
    expected = {"model.safetensors", "metrics.jsonl"}
    assert expected <= {path.name for path in folder.iterdir()}
    model = torchvision.models.resnet50(num_classes=10)
    names = {name for name in model.state_dict() if not name.startswith("layer") or ".0." in name}
    weights = run_reader.weights(folder)
    assert weights.keys() == names
    assert all(tensor.isfinite().all() for tensor in weights.values())
    # One step of the running statistics a step, on each device.
    assert weights["bn1.num_batches_tracked"] == 3


@on("ddp", **PLAIN)
def test_synchronised_batch_norm_equals_the_whole_batch(topology, launches, at_most):
    one, run = (launches.run(each, "batch_norm") for each in (topology.reference(), topology))
    at_most({"all numbers": largest_difference(one, run)}, {"all numbers": BATCH_NORM_TOLERANCE})


@on("cpu_ddp", "dp", "ddp", **PLAIN)
def test_a_model_that_is_split_has_the_numbers_of_the_whole_one(topology, launches, at_most):
    if not schedules(topology):
        pytest.skip("needs torch 2.12")
    one, found = launches.run(topology.reference(), "split_1f1b", split=True), {}
    for schedule in schedules(topology):
        run = launches.run(topology, f"split_{schedule}", split=True)
        stages = [run_reader.launches(folder)[0]["num_stages"] for folder in (one, run)]
        assert stages == [1, topology.devices()]
        found[schedule] = largest_difference(one, run)
    at_most(found, dict.fromkeys(found, SPLIT_TOLERANCE))


# The tests of these tests.


def test_each_config_is_here_and_its_gpu_parameters_are_marked(request):
    files = {path.stem for path in CONFIGS}
    assert {each.config for each in TOPOLOGIES} == files - {"multi_node", "cpu_fsdp", "cpu_hsdp"}
    for item in request.session.items:
        if item.path == Path(__file__) and "topology" in item.fixturenames:
            on_gpu = item.callspec.params["topology"].gpus > 0
            assert on_gpu == (item.get_closest_marker("gpu") is not None)


@pytest.mark.parametrize(
    ("gpus", "on_gpus"), [(0, []), (2, ["single_gpu", *SEVERAL[1:4]]), (8, ["single_gpu", *SEVERAL[1:]])]
)
def test_what_runs_on_a_machine_has_flags_that_its_scripts_know(monkeypatch, gpus, on_gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    here = [each for each in TOPOLOGIES if each.precision == "no" and each.unfit() is None]
    assert {each.config for each in here} == {"cpu", *ON_CPUS, *on_gpus}
    runs = [planned_runs(each, Path("mnist"), Path("tiny"), Path("texts")) for each in here]
    script = "mlp"
    for name, flags in itertools.chain(*(each.items() for each in runs)):
        words = list(map(str, flags))
        if words[0] == "--script":
            script, words = words[1], words[2:]
        if words[0] == "--back_to":
            words = words[4:]
        chosen, words = (words[0], words[1:]) if script == "small" else (script, words)
        monkeypatch.setattr("sys.argv", [name, *(word for word in words if word != "--float64")])
        run_many.load(chosen, run_many.path_of(chosen)).parse_args()
