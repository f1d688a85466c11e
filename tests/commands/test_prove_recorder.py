"""The recorder of prove: a record has what a run did, as a plain loop computes it."""

from types import SimpleNamespace

import psutil
import pytest
import run_many
import torch
from conftest import ROOT
from fakes import fake_accelerator
from test_prove import AFTER_SCHEDULE, AVERAGE, MISTAKES, TWO_GROUPS, edited
from torch.nn import functional as F

from tests.programs import planted
from utils import prove
from utils.fingerprint import digest
from utils.loader import GlobalLoader
from utils.prove import tensors, worker

STEPS = 6
# The second group has another learning rate, and a moving average of the model is tested too.
EDITS = [*TWO_GROUPS, *AVERAGE, ("    model = Net()", "    factor = 0.5\n    model = Net()")]


@pytest.fixture(scope="module")
def record_of(tmp_path_factory, home):
    """Runs a program in this process and returns what is recorded, and the folder of the run."""
    top = tmp_path_factory.mktemp("recorded")

    def record_of(name, edits=EDITS, **settings):
        script = top / f"{name}.py"
        script.write_text(edited(edits).replace("parents[2]", f"parents[0] / {str(ROOT)!r}"))
        folder = top / name
        settings = {"folder": str(folder), "steps": STEPS, "batch_size": 12, **settings}
        with worker.recording(worker.Settings(**settings)):
            assert run_many.run(str(script), []) is None
        (record,) = prove.read_records(folder)
        return record, folder

    return record_of


@pytest.fixture(scope="module")
def recorded(record_of):
    """With accumulation: in the last step of an epoch, of 2 samples, one of 3 micro-batches has a stand-in."""
    return record_of("whole", accumulation=3)


@pytest.fixture(scope="module")
def plain():
    """The same training by a plain loop: what there is to record of each step and each test."""
    lengths = worker.Settings("", STEPS, 12)
    accelerator = fake_accelerator()
    options = {"seed": 0, "max_samples": lengths.train_items}
    train_loader = GlobalLoader(planted.Points(200), 12, accelerator, **options)
    test_loader = GlobalLoader(planted.Points(60), 12, accelerator, max_samples=lengths.test_items)
    torch.manual_seed(0)
    model = planted.Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    parts = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(parts, 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    parameters = dict(model.named_parameters())
    steps, tests = [], []

    def copies(tensors):
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def losses_of(network, batch):
        points, labels = batch.data
        return F.cross_entropy(network(points), labels, reduction="none")

    def test():
        with torch.no_grad():
            passes = {name: [losses_of(each, b) for b in test_loader] for name, each in networks.items()}
        return {name: torch.cat(losses) for name, losses in passes.items()}

    networks = {"average": average, "model": model}
    for epoch in range(2):
        for batch in train_loader.epoch(epoch):
            losses = losses_of(model, batch)
            losses.mean().backward()
            step = SimpleNamespace(batch=batch, losses=losses.detach())
            step.gradients = copies({name: parameter.grad for name, parameter in parameters.items()})
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            step.at_step = copies({name: parameter.grad for name, parameter in parameters.items()})
            step.rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            step.weights, step.average = copies(model.state_dict()), copies(average.state_dict())
            step.momentum = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in parameters.items()}
            steps.append(step)
            if len(steps) == STEPS:
                break
        tests.append(test())
    return SimpleNamespace(steps=steps, tests=tests)


def assert_sampled(found: dict, expected: dict, prefix: str, ending: str = "") -> None:
    """What is recorded under names such as "optimizer: body.weight" is the norm and the entries of these tensors."""
    assert {f"{prefix}: {name}{ending}" for name in expected} == {n for n in found if n.startswith(f"{prefix}: ")}
    for name, tensor in expected.items():
        wanted = torch.cat([tensor.norm().view(1), tensor.flatten()]).double()
        torch.testing.assert_close(found[f"{prefix}: {name}{ending}"], wanted, rtol=1e-4, atol=1e-6, msg=name)


def by_item(micro_batches: list[dict], entry) -> dict:
    """What micro-batches have of each item; each item once."""
    pairs = [(i, x) for part in micro_batches for i, x in zip(part["indices"].tolist(), entry(part), strict=False)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_samples_of_a_step_are_recorded_once_each_with_content_values_and_what_the_model_got(recorded, plain):
    record, _ = recorded
    assert [step["step"] for step in record["steps"]] == [1, 2, 3, 4, 5, 6]
    for step, expected in zip(record["steps"], plain.steps, strict=True):
        items = expected.batch.indices.tolist()
        assert step["step_samples"] == len(items) == (2 if step["step"] == 4 else 12)
        assert len(step["samples"]) == 3  # micro-batches
        contents = dict(zip(items, zip(*expected.batch.data, strict=True), strict=True))
        digests = by_item(step["samples"], lambda part: part["digests"])
        assert digests == {item: digest((point, int(label))) for item, (point, label) in contents.items()}
        losses = by_item(step["samples"], lambda part: part["values"]["loss"].tolist())
        assert losses == pytest.approx(dict(zip(items, expected.losses.tolist(), strict=True)), rel=1e-4)
        of_reals = [part for part in step["samples"] if len(part["indices"])]
        for item, (size, norm) in by_item(of_reals, lambda part: part["inputs"].tolist()).items():
            assert (size, norm) == (4, pytest.approx(contents[item][0].norm().item()))


def test_gradients_before_and_after_clipping_rates_weights_and_state_of_each_step_are_recorded(recorded, plain):
    record, _ = recorded
    for step, expected in zip(record["steps"], plain.steps, strict=True):
        assert_sampled(step["gradients"], expected.gradients, "optimizer")
        assert_sampled(step["at_step"], expected.at_step, "optimizer")
        assert_sampled(step["weights"], expected.weights, "model")
        average = {name: tensor for name, tensor in expected.average.items() if tensor.is_floating_point()}
        assert_sampled(step["weights"], average, "average")
        assert_sampled(step["optimizer"], expected.momentum, "optimizer", "/momentum_buffer")
        assert step["optimizer_calls"] == {"optimizer": 1}
        rates = dict(zip(("optimizer", "optimizer, group 1"), expected.rates, strict=True))
        assert step["learning_rates"] == pytest.approx(rates)


def test_each_pass_and_the_result_of_each_test_are_recorded(recorded, plain):
    record, _ = recorded
    assert [test["step"] for test in record["tests"]] == [4, 6]
    for test, expected in zip(record["tests"], plain.tests, strict=True):
        for micro_batches, losses in zip(test["passes"], expected.values(), strict=True):
            assert len(micro_batches) == 2  # of 12 and 5, whatever the script says
            found = by_item(micro_batches, lambda part: part["values"]["loss"].tolist())
            assert found == pytest.approx(dict(enumerate(losses.tolist())), rel=1e-4)
            digests = by_item(micro_batches, lambda part: part["digests"])
            assert len(set(digests.values())) == len(losses)
        means = {"loss": expected["model"].mean().item(), "average_loss": expected["average"].mean().item()}
        assert test["result"] == pytest.approx({**means, "samples": 17}, rel=1e-4)


def test_the_layers_and_what_the_files_hold_are_recorded(recorded, plain):
    record, _ = recorded
    assert {"Net", "Linear", "Tanh"} <= set(record["modules"])
    assert record["unsaved"] == []
    for folder in ("", "checkpoints/step_00000006/"):
        held = {f"model: {name}": entries for name, entries in record["files"][f"{folder}model.safetensors"].items()}
        assert_sampled(held, plain.steps[-1].weights, "model")


def test_a_large_tensor_is_recorded_by_its_norm_and_entries_of_all_of_it():
    large = torch.zeros(4 * tensors.MAX_ENTRIES)
    large[-tensors.MAX_ENTRIES // 2 :] = 1
    norm, *entries = tensors.sampled(large).tolist()
    assert norm == pytest.approx(large.norm().item())
    assert len(entries) == tensors.MAX_ENTRIES
    assert sum(entries) == tensors.MAX_ENTRIES / 8
    last = large.clone()
    last[-2] = 5  # between two entries that are recorded: the norm tells
    assert tensors.sampled(last)[0] != norm


def test_each_step_begins_with_the_weights_and_the_state_of_a_run_that_is_named(recorded, record_of):
    """So that a mistake in a step stays what it is in one step, and does not grow."""
    record, folder = recorded
    mistake = """\
                if accelerator.sync_gradients:
                    for state in optimizer.state.values():
                        state["momentum_buffer"].mul_(0.9)
                    accelerator.unwrap_model(model).head.bias.data += 0.01
"""
    edits = [*EDITS, (AFTER_SCHEDULE, AFTER_SCHEDULE + mistake)]
    found, _ = record_of("again", edits, accumulation=3, weights_of=str(folder))
    for step, reference in zip(found["steps"], record["steps"], strict=True):
        for name, tensor in reference["weights"].items():
            if name.startswith("model: "):
                moved = 0.01 if name == "model: head.bias" else 0
                torch.testing.assert_close(step["weights"][name][1:], tensor[1:] + moved, rtol=1e-5, atol=1e-7)
        for name, tensor in reference["optimizer"].items():
            torch.testing.assert_close(step["optimizer"][name], 0.9 * tensor, rtol=1e-5, atol=1e-7)


def test_a_loop_over_whole_steps_is_recorded_alike(record_of, recorded, plain):
    in_steps = ("for batch in run.batches(train_loader, epoch):", "for (batch,) in run.steps(train_loader, epoch):")
    record, _ = record_of("in_steps", [*EDITS, in_steps])
    for step, expected in zip(record["steps"], plain.steps, strict=True):
        assert_sampled(step["gradients"], expected.gradients, "optimizer")
        assert_sampled(step["weights"], expected.weights, "model")
        assert len(step["samples"][0]["indices"]) == step["step_samples"]


def test_the_script_runs_with_the_workers_threads_and_precision_that_prove_asks_for(record_of, recorded, monkeypatch):
    """A number of workers and threads of the script's own would compare a run with itself, or with other sums."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    in_worker = ("label = index % 3", "label = (index + (torch.utils.data.get_worker_info() is not None)) % 3")
    in_float64 = ("self.body(points)", "self.body(points.to(self.body.weight.dtype))")
    edits = [*EDITS, in_worker, in_float64, ("args, cpu_threads=1", "args")]
    threads = torch.get_num_threads()
    try:
        record, _ = record_of("by_a_worker", edits, num_workers=1, float64=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    first, of_whole = record["steps"][0], recorded[0]["steps"][0]
    digests, of_main = (by_item(step["samples"], lambda part: part["digests"]) for step in (first, of_whole))
    assert digests.keys() == of_main.keys()
    assert not set(digests.values()) & set(of_main.values())
    weights = first["weights"]["model: body.weight"][1:]
    assert not torch.equal(weights, weights.float().double())


def test_tensors_and_weighted_losses_are_recorded_too(record_of):
    """Tensors that are not read item by item have contents as well, and weights still count in the mean."""
    tensors = "TensorDataset(*default_collate([Points(200)[item] for item in range(200)]))"
    imports = ("Dataset\n", "Dataset, TensorDataset, default_collate\n")
    record, _ = record_of("tensors", [*EDITS, imports, ("GlobalLoader(Points(200)", f"GlobalLoader({tensors}")])
    assert len(set(by_item(record["steps"][0]["samples"], lambda part: part["digests"]).values())) == 12
    options = "args.batch_size, accelerator, loss_weights=lambda data: data[1] + 1.0"
    record, _ = record_of("weighted", [*EDITS, ("args.batch_size, accelerator", options)])
    torch.manual_seed(0)
    model = planted.Net()
    loader = GlobalLoader(planted.Points(200), 12, fake_accelerator(), seed=0, max_samples=38)
    points, labels = next(loader.epoch(0)).data
    losses = F.cross_entropy(model(points), labels, reduction="none")
    ((labels + 1) * losses).sum().div((labels + 1).sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_sampled(record["steps"][0]["gradients"], gradients, "optimizer")


def test_each_call_of_a_step_and_parameters_that_no_checkpoint_has_are_recorded(record_of):
    edits = MISTAKES["a step in each micro-batch"].edits + MISTAKES["a copy of the model is saved"].edits
    record, folder = record_of("calls", edits, accumulation=3)
    assert [step["optimizer_calls"] for step in record["steps"]] == [{"optimizer": 3}] * STEPS
    assert len(record["unsaved"]) == 4
    (folder / "record_rank1.pt").write_bytes((folder / "record_rank0.pt").read_bytes())
    assert len(prove.read_records(folder)) == 2


def test_a_process_that_leaves_no_record_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(prove.Launches, "_launch", lambda *_: 0)
    args = SimpleNamespace(cpu=True, steps=6, float64=False)
    launches = prove.Launches(args, tmp_path, ROOT / "accelerate_configs")
    for records in ([{}], []):
        monkeypatch.setattr(prove, "read_records", lambda _, records=records: records)
        (tmp_path / "2_processes.log").write_text("step 1: the output of a script, which is no reason\n")
        said = f"{len(records)} of 2 processes left a record: does it train by Run, to the end?"
        assert launches.run(prove.TWO) == said


def test_half_a_record_of_a_process_that_was_killed_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(prove.Launches, "_launch", lambda *_: -9)
    args = SimpleNamespace(cpu=True, steps=6, float64=False)
    launches = prove.Launches(args, tmp_path, ROOT / "accelerate_configs")
    (tmp_path / "1_process").mkdir()
    (tmp_path / "1_process" / "record_rank0.pt").write_bytes(b"PK")
    (tmp_path / "1_process.log").write_text("")
    assert launches.run(prove.REFERENCE) == "exit code -9"
    (tmp_path / "1_process.log").write_text("  rmtree(path, onerror)\nOSError: gone\nend\n")
    assert launches.run(prove.REFERENCE) == "OSError: gone"
