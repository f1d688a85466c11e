"""Where the last step of an epoch has fewer samples than micro-batches, accumulation changes no number.

Some micro-batches get a stand-in then, which must count nothing: in float64, for each script and each program of
examples/ that accumulates gradients, against one micro-batch per step. resnet50.py leaves such a step out, and
test_users_programs.py has the models of other libraries.
"""

import pytest
import run_many
import same_numbers
from small_resnets import use_narrow

from utils.loader import Batch
from utils.sampler import GlobalSampler

# The last step of each epoch has 2 samples. It is not the last of the run, where learning rates are close to 0.
MNIST = "--batch_size 143 --num_epochs 2"  # of 1003 images
PIPELINE = "--batch_size 48 --max_steps 3 --num_stages 2"  # of 50 images
POINTS = "--batch_size 33"  # of 200
PROGRAMS = {
    "mnist_mlp": MNIST,
    "gradient_accumulation": MNIST,
    "gradient_accumulation, weights": f"{MNIST} --variable_length",
    "transformer": "--vocabulary 257 --context 8 --dim 16 --layers 1 --heads 2 --max_steps 5",
    "model_split": f"{PIPELINE} --lr 1e-4 --norm group --dtype float64 --cpu_threads 1",
    "mlp": f"{MNIST} --dropout 0.1 --dtype float64",
    "cnn": "--batch_size 31 --num_workers 0",
    "hub_images": "--batch_size 143 --num_workers 0 --max_steps 10",
    "regression": POINTS,
    "text": "--batch_size 67",
    "gan": "--batch_size 31",
    "wgan": "--batch_size 31",
    "schedules": f"{POINTS} --recipe two_optimizers",
    "own_metrics": POINTS,
}
QUICK = ("mnist_mlp", "cnn", "gan", "schedules", "own_metrics")
MARKS = dict.fromkeys(PROGRAMS.keys() - set(QUICK), pytest.mark.slow)
MARKS["own_metrics"] = pytest.mark.others("torchmetrics")
CASES = [pytest.param(program, marks=MARKS.get(program, ())) for program in PROGRAMS]


@pytest.fixture
def stand_ins(monkeypatch):
    """One entry for each stand-in of a training step."""
    seen, micro_batches = [], GlobalSampler.micro_batches

    def watched(sampler, *args):
        for micro_batch in micro_batches(sampler, *args):
            seen.extend([0] * (micro_batch.is_stand_in and sampler.seed is not None))
            yield micro_batch

    monkeypatch.setattr(GlobalSampler, "micro_batches", watched)
    return seen


@pytest.mark.parametrize("program", CASES)
def test_stand_ins_count_nothing(program, request, tmp_path, monkeypatch, stand_ins):
    name, _, _ = program.partition(",")
    flags = ["--float64", "--log_every", 1, *PROGRAMS[program].split()]
    accumulate = "--gradient_accumulation_steps"
    if name in ("mnist_mlp", "gradient_accumulation", "mlp", "hub_images"):
        flags += ["--dataset", request.getfixturevalue("small_mnist")]
    if name == "transformer":
        for split, lines in (("train", 18), ("test", 3)):
            (tmp_path / "text").mkdir(exist_ok=True)
            (tmp_path / "text" / f"{split}.txt").write_text("abcdefg," * (lines - 1) + "abcdefg")
        flags += ["--dataset", tmp_path / "text"]
    if name == "model_split":
        use_narrow(monkeypatch.setattr)
        flags += ["--dataset", request.getfixturevalue("tiny_mnist")]
        accumulate = "--num_microbatches"
    randn = Batch.randn
    monkeypatch.setattr(Batch, "randn", lambda *args, **options: randn(*args, **options).double())
    for micro_batches in (1, 4):
        folder = tmp_path / f"{micro_batches}"
        assert run_many.run(name, [*flags, accumulate, micro_batches, "--output_dir", folder]) is None
        assert len(stand_ins) % 2 == 0
        assert bool(stand_ins) == (micro_batches == 4)
    one, other = tmp_path / "1", tmp_path / "4"
    # AdamW divides the rounding of the smallest gradients of ResNet-50 by their size.
    assert same_numbers.largest_difference(one, other) <= (1e-6 if name == "model_split" else 1e-12)
