"""What would make numbers depend on the topology is said in the first step, on every topology alike, and of right
programs nothing."""

import json

import pytest
from conftest import ROOT

TOPOLOGIES = {
    "one process": ("cpu", []),
    "accumulation": ("cpu", ["--gradient_accumulation_steps", 2]),
    "virtual processes on one": ("cpu", ["--virtual_processes", 4]),
    "DDP": ("cpu_ddp", []),
    "DDP, accumulation": ("cpu_ddp", ["--gradient_accumulation_steps", 2]),
    "FSDP": ("cpu_fsdp", []),
    "FSDP, accumulation": ("cpu_fsdp", ["--gradient_accumulation_steps", 2]),
    "HSDP": ("cpu_hsdp", []),
    "virtual processes": ("cpu_ddp", ["--virtual_processes", 4]),
    "virtual processes, FSDP": ("cpu_fsdp", ["--virtual_processes", 4]),
}
QUICK = {"accumulation", "virtual processes on one", "DDP"}
ALL = set(TOPOLOGIES)
ONE = {"one process", "accumulation", "virtual processes on one"}
VIRTUAL = {name for name in TOPOLOGIES if "virtual" in name}
ACCUMULATION = {name for name in TOPOLOGIES if "accumulation" in name}
SEVERAL = VIRTUAL | ACCUMULATION  # micro-batches on each process
SHARDED = {name for name in TOPOLOGIES if "FSDP" in name} | {"HSDP"}
DDP = ALL - ONE - SHARDED
BROADCAST = DDP - VIRTUAL  # buffers

CODES = [
    ("model.codes changed in one micro-batch, of", SEVERAL),
    ("error: model.codes changed in one micro-batch, of", VIRTUAL),
    ("model.codes differs between processes", {"DDP"}),
    ("model.codes differs between rank 0 and rank", {"FSDP", "HSDP"}),
]
# By case: what is said, and on which topologies. On the others nothing is said, and the run trains to its end.
SAID = {
    "ok": [],
    "batch_norm": [
        ("model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked changed in one", SEVERAL),
        ("model.norm.running_mean, model.norm.running_var differs between processes", {"DDP"}),
        ("model.norm.running_mean differs between rank 0", {"FSDP", "HSDP"}),
    ],
    "codebook averaged": [],
    "frozen batch_norm": [],
    "spectral_norm": [("model.norm.parametrizations.weight.0._u", SEVERAL)],  # without several, it is the same on all
    "codebook, compiled": CODES,
    "changed by a method": CODES,
    "late": [
        ("model.codes differs between processes", BROADCAST),
        ("model.codes differs between rank 0", {*SHARDED, "virtual processes"}),
        ("model.codes changed in one micro-batch, of 4", {"virtual processes on one"}),
    ],
    "unsaved": [],
    "growing cache": [],
    "max_norm": [
        ("writes into words.weight: FSDP gathers a copy", SHARDED),
        ("model.words.weight differs between rank 0 and rank 1 on", DDP),
        ("nothing else may change a weight on one process, as nn.Embedding(max_norm=...) does", DDP),
    ],
    "act_norm": [
        ("writes into norm.scale: FSDP gathers a copy", SHARDED),
        ("model.norm.scale differs between rank 0", DDP),
    ],
    "outside": [
        ("optimizer trains optimizer.3 of shape (1,), which no model from", ONE | DDP),
        ("a parameter to train or to clip is not sharded", SHARDED),
    ],
    "frozen on rank 1": [("words.weight.requires_grad False, not True as rank 0 on", DDP | SHARDED)],
    "beside": [("once per forward pass of the prepared model", BROADCAST)],
    "thawed later": [("parameters that required them at prepare", DDP)],
    "changed on rank 1": [
        ("nothing else may change a weight on one process", DDP | {"HSDP"}),
    ],
    "weights of the first half": [("unlike DDP, FSDP copies no weights", SHARDED)],
    "picks": [("has called other sharded layers than", SHARDED)],
    "clears first": [
        ("the gradient of words.weight, out.weight, out.bias changed between two", ACCUMULATION),
        ("a backward pass adds to gradients of the last step", VIRTUAL),
    ],
    "never clears": [("a backward pass adds to gradients of the last step", VIRTUAL)],
    "model.zero_grad in steps": [("warning: the gradient of words.weight", ACCUMULATION)],
    "clips each time": [("the gradient of words.weight, out.weight, out.bias changed between two", ACCUMULATION)],
    "clips": [],
    "logs norms": [],
    "raw optimizer": [
        ("words.weight, out.weight, out.bias changed between two", ACCUMULATION - SHARDED),
        ("optimizer trains optimizer.0 of shape (64, 8), which no model from accelerator.prepare has", SHARDED),
    ],
    "raw schedule": [("optimizer, schedule changed between two", SEVERAL)],
    "schedule": [],
    "average, each time": [("average.n_averaged changed between two", SEVERAL)],
    "average": [],
    "average, batch_norm averaged": [],
    "own average, each time": [("warning: own changed with each micro-batch", SEVERAL)],
    "own average": [],
    "noise, put back": [],
    "loss.backward": [("changed without accelerator.backward", SEVERAL)],
    "no backward": [],
    "some without backward": [("some micro-batches of a step had accelerator.backward", SEVERAL)],
    "plain mean": [("a loss is not from batch.mean_loss", ALL - {"one process"})],
    "forgotten model": [("Linear from accelerator.prepare, which trains weight, bias", ALL)],
    "in one module": [],
    "in an object": [],
    "reference": [],
    "optimizer forgotten": [("lacks SGD from accelerator.prepare", ALL)],
    "optimizer left out": [],
}
LATER = {"thawed later", "late"}


@pytest.mark.parametrize(
    "topology", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES]
)
def test_what_depends_on_the_topology_is_said_and_no_right_program_is_stopped(launcher, topology):
    config, flags = TOPOLOGIES[topology]
    # Virtual processes need each prepared model under a name of its own.
    cases = [case for case in SAID if case != "in one module" or topology not in VIRTUAL]
    done = launcher(config, "--cases", *cases, *flags, script=ROOT / "tests" / "programs" / "first_step")
    runs = json.loads(done.stdout.partition("SAID ")[2].splitlines()[0])
    for case in cases:
        expected, said, last_step = SAID[case], "\n".join(runs[case]["said"]), runs[case]["last_step"]
        sentences = [sentence for sentence, topologies in expected if topology in topologies]
        for sentence in sentences:
            assert sentence in said, (case, said)
        if not sentences:
            assert said.startswith("done: "), (case, said)
        assert last_step == (6 if "error: " not in said else 0) or (case in LATER and last_step in (3, 6)), (case, said)


@pytest.mark.slow
def test_a_weight_that_is_trained_later_has_the_same_bits_sharded_or_not(launcher, tmp_path):
    models = []
    for config in ("cpu", "cpu_fsdp"):
        flags = ["--virtual_processes", 4, "--output_dir", tmp_path / config]
        launcher(config, "--cases", "thawed later", *flags, script=ROOT / "tests" / "programs" / "first_step")
        models.append((tmp_path / config / "thawed_later" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
