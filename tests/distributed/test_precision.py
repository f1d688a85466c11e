"""torch.compile by the config file; and what --compile and --bn sync of resnet50 do."""

import count_all_reduces
import pytest
import run_many
import run_reader
import torch
from fakes import fake_accelerator
from run_reader import losses, weights

from scripts import resnet50

FLAGS = ["--batch_size", 250, "--hidden", 32, "--num_epochs", 2, "--dropout", 0.1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]
FLOAT64 = [*FLAGS, "--dtype", "float64", "--num_epochs", 1]
# torch.compile, without the compiler: what it puts around the model is the same.
COMPILED = 'distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: "-1,-1"\n'
COMPILED += "dynamo_config:\n  dynamo_backend: EAGER\n"


def assert_close(run, other):
    expected, found = weights(run), weights(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)
    assert losses(other) == pytest.approx(losses(run), rel=1e-9)
    assert losses(other, "test") == pytest.approx(losses(run, "test"), rel=1e-9)


@pytest.mark.slow
def test_a_compiled_model_has_the_numbers_and_names_of_an_eager_one(launcher, small_mnist):
    """By dynamo_config, on two processes: also a resume in both directions, gradient accumulation
    and virtual processes."""
    config = launcher.folder / "compiled.yaml"
    config.write_text(COMPILED)
    flags = ["--dataset", small_mnist, *FLOAT64]
    folder = launcher.folder
    assert run_many.run("mlp", [*flags, "--output_dir", folder / "eager"]) is None
    virtual = ["--virtual_processes", 4]
    assert run_many.run("mlp", [*flags, *virtual, "--output_dir", folder / "tree"]) is None
    two_parts = ["--gradient_accumulation_steps", 2]
    counted = ["--dataset", small_mnist, *two_parts, "--max_steps", 1]
    again = ["--resume", "--output_dir", "compiled"]
    words = run_many.words(
        "mlp",
        [*flags, *virtual, "--output_dir", "compiled_tree"],
        ["--back_to", "eager", 2, "compiled", *flags, *two_parts, *again],
        ["--script", "gradient_accumulation", *counted, "--output_dir", "counted"],
    )
    launcher(str(config), *words, script=count_all_reduces.FILE)
    assert_close(folder / "eager", folder / "compiled")
    assert_close(folder / "tree", folder / "compiled_tree")
    _, tensors = run_reader.checkpoint(folder / "compiled" / "checkpoints" / "step_00000004")
    names = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert set(tensors["model.safetensors"]) == names
    moments = {name.rpartition("/")[0] for name in tensors["optimizer.safetensors"]}
    assert moments == names
    later = run_many.back_to(folder / "compiled", 4, folder / "later")
    assert run_many.run("mlp", [*flags, "--resume", "--output_dir", later]) is None
    assert_close(folder / "eager", later)
    assert run_reader.summary(folder / "counted")["gradient_all_reduces"] == 1


@pytest.mark.parametrize(
    ("device", "gpus", "virtual_processes", "sentence"),
    [
        ("cpu", 1, 0, "--bn sync works on GPUs only"),
        ("cuda", 2, 0, "--bn sync needs one process per GPU, but this config uses DataParallel"),
        ("cuda", 1, 4, "--bn sync depends on the number of processes"),
    ],
)
def test_bn_sync_is_refused_where_it_would_be_something_else(
    monkeypatch, capsys, device, gpus, virtual_processes, sentence
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    accelerator = fake_accelerator(device=device)
    monkeypatch.setattr("sys.argv", ["resnet50.py", "--bn", "sync"])
    args = resnet50.parse_args()
    args.virtual_processes = virtual_processes
    with pytest.raises(SystemExit):
        resnet50.check_args(args, accelerator)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    args.virtual_processes = 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    accelerator.device = torch.device("cuda")
    resnet50.check_args(args, accelerator)
