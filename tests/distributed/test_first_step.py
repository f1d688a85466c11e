"""What would make numbers depend on the number of processes is said in the first step, on every topology alike."""

import contextlib
import json

import pytest
import torch
from conftest import ROOT
from fakes import fake_accelerator
from torch import nn

from utils import agree
from utils.parallel.first_step import FirstStep, check_parameters

TOPOLOGIES = {
    "one process": ("cpu", []),
    "accumulation": ("cpu", ["--gradient_accumulation_steps", 2]),
    "DDP": ("cpu_ddp", []),
    "DDP, accumulation": ("cpu_ddp", ["--gradient_accumulation_steps", 2]),
    "FSDP": ("cpu_fsdp", []),
    "HSDP": ("cpu_hsdp", []),
    "virtual processes": ("cpu_ddp", ["--virtual_processes", 4]),
    "virtual processes, FSDP": ("cpu_fsdp", ["--virtual_processes", 4]),
}
ONE = {"one process", "accumulation"}
MICRO_BATCHES = set(TOPOLOGIES) - {"one process"}
SHARDED = {"FSDP", "HSDP", "virtual processes, FSDP"}
DDP = set(TOPOLOGIES) - ONE - SHARDED

# By case: what is said, and on which topologies. On the others nothing is said, and the run trains to its end.
SAID = {
    "ok": [],
    "batch_norm": [("the forward pass changes model.norm.num_batches_tracked", MICRO_BATCHES)],
    "batch_norm averaged": [],
    "codebook averaged": [],
    "frozen batch_norm": [],
    "instance_norm": [("the forward pass changes model.norm.running_mean", MICRO_BATCHES)],
    "spectral_norm": [("the forward pass changes model.norm.parametrizations.weight.0._u", MICRO_BATCHES)],
    "codebook": [("the forward pass changes model.codes by", MICRO_BATCHES)],
    "reassigned": [("the forward pass changes model.codes by", MICRO_BATCHES)],
    "unsaved": [
        ("the forward pass changes model.unsaved, which no checkpoint has", set(TOPOLOGIES)),
        ("the forward pass changes model.unsaved by", MICRO_BATCHES),
    ],
    "cache": [],
    "max_norm": [
        ("the forward pass writes into model.words.weight; if it depends on the samples", {"accumulation"}),
        ("writes into model.words.weight: FSDP gathers a copy", SHARDED),
        ("model.words.weight differs between rank 0 and rank 1 on", DDP),
        ("The forward pass writes into it", DDP),
    ],
    "clipped": [
        ("the forward pass writes into model.out.weight; if it depends on the samples", {"accumulation"}),
        ("writes into model.out.weight: FSDP gathers a copy", SHARDED),
    ],
    "act_norm": [
        ("the forward pass writes into model.norm.scale; if it depends on the samples", {"accumulation"}),
        ("writes into model.norm.scale: FSDP gathers a copy", SHARDED),
        ("The forward pass writes into it", DDP),
    ],
    "outside": [
        ("optimizer trains optimizer.3 of shape (1,), which no model from", ONE | DDP),
        ("a parameter to train or to clip is not sharded", SHARDED),
    ],
    "outside, frozen": [("a parameter to train or to clip is not sharded", SHARDED)],
    "frozen on rank 1": [("words.weight is trained on rank 0 on", DDP | SHARDED)],
    "beside": [("The forward pass of the model from prepare() never ran", DDP - {"virtual processes"})],
    "thawed": [("DDP averages only gradients of parameters that required", DDP - {"virtual processes"})],
    "thawed later": [("DDP averages only gradients of parameters that required", DDP)],
    "changed on rank 1": [
        ("nothing else may change a weight on one process", DDP),
        ("HSDP copies no weights between replicas", {"HSDP"}),
    ],
}
LATER = {"thawed later"}


@pytest.mark.parametrize(
    "topology", [name if name == "DDP" else pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES]
)
def test_what_depends_on_the_number_of_processes_is_said_in_the_first_step(launcher, topology):
    config, flags = TOPOLOGIES[topology]
    done = launcher(config, "--cases", *SAID, *flags, script=ROOT / "tests" / "programs" / "first_step")
    runs = json.loads(done.stdout.partition("SAID ")[2].splitlines()[0])
    for case, expected in SAID.items():
        said, last_step = "\n".join(runs[case]["said"]), runs[case]["last_step"]
        sentences = [sentence for sentence, topologies in expected if topology in topologies]
        for sentence in sentences:
            assert sentence in said, (case, said)
        if not sentences:
            assert said.startswith("done: "), (case, said)
        assert last_step == (6 if case in LATER or "error: " not in said else 0), (case, said)


@pytest.mark.slow
def test_a_weight_that_is_trained_later_has_the_same_bits_sharded_or_not(launcher, tmp_path):
    models = []
    for config in ("cpu", "cpu_fsdp"):
        flags = ["--virtual_processes", 4, "--output_dir", tmp_path / config]
        launcher(config, "--cases", "thawed later", *flags, script=ROOT / "tests" / "programs" / "first_step")
        models.append((tmp_path / config / "thawed_later" / "model.safetensors").read_bytes())
    assert models[0] == models[1]


class Counts(nn.Module):
    """Counts its calls in a buffer, and writes its weight."""

    def __init__(self, persistent: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1), persistent=persistent)

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.scale.clamp_(max=1)
        return x * self.scale


def test_a_pass_in_evaluation_mode_is_not_looked_at_and_none_after_the_end():
    model = Counts()
    first_step = FirstStep(fake_accelerator(1), {"model": model})
    model.eval()(torch.ones(1))
    assert (first_step.called, first_step.changed, first_step.written) == ({"model"}, {}, set())
    model.train()(torch.ones(1))
    assert ([*first_step.changed], first_step.written) == (["model.calls"], {"model.scale"})
    first_step.end()
    first_step.changed = {}
    model(torch.ones(1))
    assert first_step.changed == {}


STATED = {
    "unsaved": "warning: the forward pass changes model.calls, which no checkpoint has",
    "lost": "the forward pass writes into model.scale: FSDP gathers a copy",
    "virtual": "by one micro-batch, of 4 in a step, which --virtual_processes cannot add up",
    "buffer": "warning: the forward pass changes model.calls by one micro-batch, of 2 in a step, so numbers depend",
    # On several processes, same_weights compares it.
    "weight": "warning: the forward pass writes into model.scale; if it depends on the samples",
}


@pytest.mark.parametrize(
    ("processes", "options", "persistent", "kinds"),
    [
        (1, {}, True, []),
        (1, {}, False, ["unsaved"]),
        (1, {"accumulation": 2}, True, ["weight", "buffer"]),
        (1, {"accumulation": 2}, False, ["unsaved", "weight", "buffer"]),
        (1, {"virtual_processes": 4}, True, ["weight", "virtual"]),
        (2, {}, True, ["buffer"]),
        (2, {"rank": 1}, False, []),  # rank 0 says it
        (2, {"rank": 1, "virtual_processes": 4}, True, ["virtual"]),
        (2, {"kind": "FSDP"}, True, ["lost"]),
        (4, {"kind": "FSDP", "shards": 2}, True, ["lost"]),
    ],
)
def test_what_is_said_of_a_buffer_and_a_weight_that_a_forward_pass_changes(
    capsys, processes, options, persistent, kinds
):
    model = Counts(persistent)
    first_step = FirstStep(fake_accelerator(processes, **options), {"model": model})
    model(torch.ones(1))
    with pytest.raises(SystemExit) if {"lost", "virtual"} & {*kinds} else contextlib.nullcontext():
        first_step.end()
    captured = capsys.readouterr()
    said = f"{captured.out}{captured.err}"
    assert {kind for kind, sentence in STATED.items() if sentence in said} == {*kinds}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([True, False], "weight is trained on rank 0 on alpha, and frozen or missing on rank 1 on beta"),
        ([False, True], "weight is trained on rank 1 on beta, and frozen or missing on rank 0 on alpha"),
        ([True, None], "weight is trained on rank 0 on alpha, and frozen or missing on rank 1 on beta"),
        ([False, False], ""),
    ],
)
def test_a_parameter_that_not_all_processes_train_is_named_with_who_does(capsys, monkeypatch, values, said):
    gathered = [{} if value is None else {"weight": value} for value in values]
    monkeypatch.setattr(agree, "gather_object", lambda mine: [*zip(("alpha", "beta"), gathered, strict=True)])
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    accelerator = fake_accelerator(2, _models=[model])
    with pytest.raises(SystemExit) if said else contextlib.nullcontext():
        check_parameters(accelerator, {"optimizer": optimizer}, {id(model.weight): "weight"})
    assert said in capsys.readouterr().err


def test_statistics_of_all_processes_are_no_reason_for_a_warning(capsys):
    first_step = FirstStep(fake_accelerator(2), {})
    for layer in (nn.SyncBatchNorm(3), nn.BatchNorm1d(3)):
        first_step.changed = {"model.running_mean": layer}
        first_step.end()
        assert ("warning: the forward pass changes" in capsys.readouterr().out) == (type(layer) is nn.BatchNorm1d)
