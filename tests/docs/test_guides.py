"""The code on the pages runs, and does what the page says."""

import gzip
import json
import os
import re
import sys
import textwrap
from types import SimpleNamespace

import accelerate
import pytest
import run_many
import run_reader
import torch
from conftest import ROOT, free_port
from pages import README, blocks, guide, section
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def test_the_loop_on_the_first_screen_is_the_scripts():
    loop = blocks(README, "python")[0]
    assert textwrap.indent(loop, "    ") in (ROOT / "scripts" / "mnist_mlp.py").read_text()


@pytest.mark.usefixtures("home")
def test_the_three_snippets_train_a_model_of_your_own(tmp_path, monkeypatch):
    from utils import launch
    from utils.loader import GlobalLoader
    from utils.run import Run

    data, model, loss_and_metrics = blocks(section(README, "Your own model"), "python")[0].split("\n\n")
    monkeypatch.setattr(sys, "argv", ["own.py"])
    args = SimpleNamespace(batch_size=12, lr=0.01, seed=0, output_dir=tmp_path / "run", log_every=1)
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    data_of_own = TensorDataset(torch.rand(30, 4), torch.rand(30, 2))
    scope = {"GlobalLoader": GlobalLoader, "accelerator": accelerator, "args": args, "run": run, "torch": torch}
    scope |= {"MyImages": lambda folder, augment: data_of_own, "MyModel": lambda: nn.Linear(4, 2), "total_steps": 3}
    exec(data, scope)
    exec(model, scope)
    for epoch in run.epochs():
        for batch in run.batches(scope["train_loader"], epoch):
            scope["batch"], (scope["inputs"], scope["targets"]) = batch, batch.data
            with accelerator.accumulate(scope["model"]):
                exec(loss_and_metrics, scope)
                scope["optimizer"].step()
                scope["optimizer"].zero_grad()
    run.finish()
    lines = run_reader.lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["error_px"] ** 2 <= line["loss"] * 1.001 for line in lines)  # a mean, and a mean of squares


def test_the_saved_model_is_loaded_as_it_says(tmp_path, monkeypatch):
    import safetensors.torch

    from scripts.mnist_mlp import MLP, parse_args

    monkeypatch.setattr(sys, "argv", ["mnist_mlp.py"])
    model = MLP(784, parse_args().hidden, 10)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)}
    (block,) = blocks(section(guide("your_own_model"), "Use the model"), "python")
    exec(block, scope)
    torch.testing.assert_close(scope["logits"], model(scope["images"]))


@pytest.mark.slow
def test_a_notebook_trains_in_its_process_and_in_two(launcher, small_mnist):
    """The cells as programs; their folder is not the repository's here."""
    for number, block in enumerate(blocks(section(guide("reference/recipes"), "In a notebook"), "python"), 1):
        short = block.replace('"200"', f'"2", "--dataset", {str(small_mnist)!r}')
        assert short != block
        cell = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{short}"
        (launcher.folder / f"cell_{number}.py").write_text(cell)
        launcher.python(f"cell_{number}.py")
    runs = [run_reader.launches(launcher.folder / "runs" / name)[0] for name in ("notebook", "two_processes")]
    assert [launch["num_processes"] for launch in runs] == [1, 2]


def test_one_loop_four_ways(monkeypatch):
    """They end with the same weights: one batch has all the data, so the order does not matter."""
    group = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**group, **address}.items():
        monkeypatch.setenv(name, str(value))
    images = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    weights = []

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3))

    def flat(model):
        return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])

    for block in blocks(section(guide("from_plain_pytorch"), "One loop, four ways"), "python"):
        scope = {**vars(F), **vars(nn.parallel), **vars(torch.utils.data), **vars(accelerate), **vars(accelerate.utils)}
        scope |= {"os": os, "torch": torch, "nn": nn, "dist": torch.distributed, "make_model": make_model}
        scope["data"] = TensorDataset(images, torch.arange(200) % 3)
        try:
            exec(block, scope)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
                for name in group:  # Accelerate would start another group
                    monkeypatch.delenv(name)
        weights.append(flat(scope["model"]))
    start = flat(make_model())
    assert len(weights) == 4
    for other in weights:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)
        assert (other - start).abs().max() > 1e-3


@pytest.mark.usefixtures("home")
def test_the_profile_has_ten_steps_after_the_first_ten_and_the_run_goes_on_to_the_same_bits(
    tmp_path, small_mnist, capfd
):
    """The lines in mnist_mlp.py, where the page says."""
    script = ROOT / "scripts" / "mnist_mlp.py"
    (block,) = blocks(section(guide("when_something_goes_wrong"), "Where the time goes"), "python")
    place = "    model, optimizer, scheduler = accelerator.prepare("
    before, after = script.read_text().split(place)
    source = f"{before}{textwrap.indent(block, '    ')}\n{place}{after}"
    (tmp_path / "profiled.py").write_text(f"import atexit\n{source}")
    runs = {}
    for name, path in (("plain", script), ("profiled", tmp_path / "profiled.py")):
        runs[name] = tmp_path / "runs" / name
        flags = ["--dataset", small_mnist, "--batch_size", 100, "--max_steps", 24, "--output_dir", runs[name]]
        assert run_many.run(str(path), flags) is None
    table = capfd.readouterr().out
    assert re.search(r"^ *Optimizer.step#AdamW.step .* 10 *$", table, re.M)
    trace = json.loads(gzip.decompress((runs["profiled"] / "trace_rank0.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("Profiler")] == [f"ProfilerStep#{n}" for n in range(10, 20)]
    first, second = (run / "model.safetensors" for run in runs.values())
    assert first.read_bytes() == second.read_bytes()


def test_tar_files_are_read_as_the_guide_says(tmp_path, monkeypatch, home):
    from fakes import fake_accelerator
    from tars import write_tar

    members = [(f"{number}.{kind}", b"%d" % number) for number in range(9) for kind in ("wav", "txt", "json")]
    write_tar(tmp_path / "clips" / "a.tar", members)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(home))

    def decode(sample):
        assert {*sample} == {"__url__", "__key__", "wav", "txt"}
        return int(sample["wav"]) + int(sample["txt"])

    args = SimpleNamespace(seed=0)
    scope = {"decode": decode, "accelerator": fake_accelerator(), "args": args}
    code = blocks(section(guide("data_beyond_memory"), "Tar files"), "python")[0]
    exec(code.replace("num_workers=4", "num_workers=0"), scope)
    assert sorted(int(value) for batch in scope["loader"] for value in batch.data) == [2 * n for n in range(9)]
