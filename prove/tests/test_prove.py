"""prove_training: correct programs pass, and each mistake is named.

Programs in the style of others, and the mistakes that somebody has made in them, are in foreign/. They run as the
command runs them, in processes that are forked from this one.
"""

import argparse
import ast
import json
import linecache
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from accelerate.data_loader import BatchSamplerShard
from conftest import ROOT
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from prove_training import command, imports, mistakes, proof, prove, resuming, runs
from prove_training.recording import (
    Recording,
    data,
    files,
    first_of_chain,
    noise,
    pretended_gpu,
    same_work,
    starting,
    where,
)
from prove_training.recording.models import load_shared
from prove_training.records import (
    Batch,
    Draw,
    Evaluation,
    Facts,
    Loader,
    MicroBatch,
    Part,
    Pass,
    Plan,
    Record,
    Save,
    Step,
)
from prove_training.runs import Outcome
from prove_training.stages import Comparison, Finding, Note, several, single, steps, unfinished
from prove_training.stages.evaluations import differing, explained, share, suspects
from prove_training.tensors import differ, sampled
from prove_training.text import CannotTell
from silent_bugs.run import find_cases
from tests.corpus import FOUND, NOTED
from tests.foreign.believed import BELIEVED
from tests.foreign.mistakes import MISTAKES
from tests.foreign.unusual_edits import LOOK, WITH_ACCELERATE, WITH_DDP, WRONG_AT_THE_STEP

FOREIGN = ROOT / "tests" / "foreign"
ACCUSED = {"right/whole_batches_cut_by_hand"}  # see the page of the corpus
CASES = {case.name: case for case in find_cases(["bugs", "right"])}
RIGHT = [name for name, case in CASES.items() if not case.is_bug and name not in ACCUSED]
NOT_PROGRAMS = ("__init__", "believed", "mistakes", "unusual_edits")
CORRECT = sorted(path.stem for path in FOREIGN.glob("*.py") if path.stem not in NOT_PROGRAMS)
RESUMES = {
    "own_trainer": "--resume",
    "ddp_series": "",
    "accelerate_cv": "--resume_from_checkpoint checkpoints/epoch_0",
}


class Said(NamedTuple):
    code: int
    text: str
    verdict: str
    advice: list[str]


@pytest.fixture
def prove_it(tmp_path, monkeypatch, capsys):
    """Run the command on a program, after some edits, and check that it leaves the user's folder alone."""

    def prove_it(path: Path, edits=(), *, name=None, flags=(), processes=(2,), **options) -> Said:
        text, name = path.read_text(), name or path.name
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        folder = tmp_path / "user"
        folder.mkdir()
        (folder / name).write_text(text)
        monkeypatch.chdir(folder)
        args = {
            "resume_flags": None,
            "timeout_s": 60,
            "strict": True,
            "module": None,
            "format": "text",
            "keep": None,
        } | options
        threads = torch.get_num_threads()
        imports.load_common(Path(name), folder)
        code = proof.prove(argparse.Namespace(script=Path(name), flags=list(flags), processes=processes, **args))
        torch.set_num_threads(threads)
        out = capsys.readouterr().out
        assert [entry.name for entry in folder.iterdir()] == [name]
        assert (folder / name).read_text() == text
        lines = out.splitlines()
        return Said(code, out, lines[-1], [line for line in lines if line.startswith("what to do: ")])

    return prove_it


# Programs


def test_one_program_is_proven(prove_it):
    said = prove_it(FOREIGN / "accelerate_accumulation.py")
    assert said.code == 0, said.text
    assert "GPU" not in said.text


def test_one_mistake_is_named(prove_it):
    said = prove_it(FOREIGN / "ddp_series.py", [("        self.train_data.sampler.set_epoch(epoch)\n", "")])
    assert said.code == 1
    assert "each epoch has the same order (samples, ddp_series.py:" in said.verdict


@pytest.mark.slow
def test_gradients_that_a_hook_of_pytorch_rounds_are_the_same(prove_it):
    hook = "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
    wrapped = "self.model = DDP(self.model)\n"
    edits = [("import torch\n", f"import torch\n{hook}")]
    edits += [(wrapped, f"{wrapped}        self.model.register_comm_hook(None, fp16_compress_hook)\n")]
    said = prove_it(FOREIGN / "ddp_series.py", edits)
    assert said.code == 0, said.text
    assert "communication hooks, which round gradients" in said.text


@pytest.mark.slow
@pytest.mark.parametrize("program", CORRECT)
def test_a_correct_program_is_proven_on_one_two_and_three_processes(prove_it, program):
    options = {"resume_flags": RESUMES[program]} if program in RESUMES else {}
    said = prove_it(FOREIGN / f"{program}.py", processes=None, **options)
    draws_batches = program == "nanogpt"
    assert said.code == (3 if draws_batches else 0), said.text
    words = (
        "nothing wrong found; not compared: samples and gradients with 1 process"
        if draws_batches
        else "proven: the same"
    )
    assert said.verdict.startswith(words)
    assert "gradients" in said.verdict
    assert "learning rates" in said.verdict
    assert "samples" in said.verdict
    assert ("evaluations" in said.verdict) == (program not in ("nanogpt", "ddp_series", "hsdp"))
    processes = "1 and 4" if program == "hsdp" else "1, 2 and 3"
    assert draws_batches or f"on {processes} processes" in said.verdict
    assert not said.advice
    if program in RESUMES:
        assert "  resumed       the same after step" in said.text


BETWEEN_REPLICAS = {
    "mesh=mesh)": ('mesh=mesh["shard"])', "ranks 0 and 2 have different gradients at the step"),
    "torch.manual_seed(0)": ("torch.manual_seed(rank // 2)", "ranks 0 and 2 begin with different weights"),
    "world, rank=rank)": ("max(world // 2, 1), rank=rank // 2)", "75 of 75 samples of an epoch count twice"),
}


@pytest.mark.slow
@pytest.mark.parametrize("old", BETWEEN_REPLICAS)
@pytest.mark.parametrize("mesh", ["(world // 2, 2)", "(2, 2)"])
def test_a_mistake_between_the_replicas_of_hsdp_is_named(prove_it, old, mesh):
    new, words = BETWEEN_REPLICAS[old]
    said = prove_it(FOREIGN / "hsdp.py", [(old, new), ("(world // 2, 2)", mesh)], processes=None)
    assert said.code == 1, said.text
    assert words in said.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_somebody_has_made_is_named(prove_it, name):
    mistake = MISTAKES[name]
    file = f"{mistake.program.rpartition('/')[2]}.py"
    said = prove_it(FOREIGN / f"{mistake.program}.py", mistake.edits, timeout_s=30)
    if mistake.kind:
        assert said.code == 1, said.text
        assert said.verdict.startswith("wrong: "), said.text
        assert mistake.words in said.verdict, said.text
        assert mistakes.advice(mistake.kind) in said.advice[0]
        assert f"{file}:" in said.verdict
    else:  # the numbers are right, or may be meant
        assert said.code == (3 if mistake.program == "nanogpt" else 0), said.text
        assert any(mistake.words in line for line in said.text.splitlines() if line.startswith("note: ")), said.text


@pytest.fixture
def prove_case(prove_it):
    """Prove a program of silent_bugs/."""

    def prove_case(name: str) -> Said:
        return prove_it(CASES[name].path, resume_flags="--resume" if CASES[name].resumes else None)

    return prove_case


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_silent_bug_is_named(prove_case, name):
    said = prove_case(name)
    assert said.code == 1, said.text
    assert said.advice[0] == f"what to do: {mistakes.advice(FOUND[name])}", said.text
    assert f"{CASES[name].path.name}:" in said.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTED)
def test_what_may_be_meant_is_a_note(prove_case, name):
    said = prove_case(name)
    assert said.code == 0, said.text
    assert any(NOTED[name] in line for line in said.text.splitlines() if line.startswith("note: ")), said.text


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_not_accused(prove_case, name):
    said = prove_case(name)
    assert said.code in (0, 3), said.text


@pytest.mark.slow
def test_a_sampler_by_the_number_of_the_process_on_its_machine_is_found(prove_it):
    by_local_rank = 'DistributedSampler(dataset, rank=int(os.environ["LOCAL_RANK"]))'
    said = prove_it(FOREIGN / "ddp_series.py", [("DistributedSampler(dataset)", by_local_rank)], processes=(2, 3))
    assert said.code == 1
    assert "  2 processes   the same samples" in said.text
    assert said.verdict.endswith("LOCAL_RANK is 0 on each (samples, ddp_series.py:79)")
    assert said.advice[0] == f"what to do: {mistakes.advice('local_rank')}"


@pytest.mark.slow
def test_what_is_for_one_machine_alone_is_a_note(prove_it):
    edit = ('(backend="gloo")', '(backend="gloo", rank=int(os.environ["LOCAL_RANK"]))')
    said = prove_it(FOREIGN / "ddp_series.py", [edit], processes=(2, 3))
    assert said.code == 0, said.text
    assert "note: process group: a process says that it is rank 0, and is " in said.text


UNUSUAL = {
    "plain": (3, "cannot tell: the script trains on one process only"),
    "gan": (0, "proven: the same samples, gradients"),
    "lbfgs": (3, "cannot tell: LBFGS computes the loss several times"),
    "generated_data": (3, "nothing wrong found; not compared: samples and gradients; the same averaged gradients"),
    "diffusion": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "contrastive": (0, "proven: the same samples, gradients"),
    "queued_reduction": (0, "proven: the same samples, gradients"),
    "reads_ahead": (0, "proven: the same samples, gradients"),
    "like_lightning": (0, "proven: the same samples, gradients"),
    "streams": (0, "proven: the same samples, gradients"),
    "joins": (3, "cannot tell: with Join, its processes make different numbers of steps (joins.py:1"),
    "forks": (3, "cannot tell: it asks for 2 processes, and prove for 1 (forks.py:14)"),
    "has_a_helper": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "starts_in_vain": (3, "cannot tell: it ended before the first optimizer.step()"),
    "augments_by_itself": (3, "cannot tell: the samples have random numbers that prove cannot repeat"),
    "looks_at_a_batch": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "starts_in_a_loop": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "spawns": (0, "proven: the same samples, gradients"),
    "starts_ranks": (3, "cannot tell: it asks for 2 processes, and prove for 1 (starts_ranks.py:4"),
    "notebook": (0, "proven: the same samples, gradients"),
    "missing_file": (2, "fails: on one process, missing_file.py:5: FileNotFoundError"),
    "hangs": (3, "cannot tell: on one process it did not end in 3 s, and stands at hangs.py:10"),
    "prints": (0, "proven: the same samples, gradients"),
    "compiled": (0, "proven: the same samples, gradients"),
    "autocast": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "mixed_precision": (0, "proven: the same samples, gradients"),
    "written_for_cuda": (0, "proven: the same samples, gradients"),
    "teacher": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "spawned_workers": (0, "proven: the same samples, gradients"),
    "fully_sharded": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "sharpness": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "accelerator_only": (0, "proven: the same samples, gradients, learning rates and weights on 1 and 2 processes"),
    "exits_early": (3, "cannot tell: it ended before the first optimizer.step()"),
    "saves_its_schedule": (0, "proven: the same samples, gradients"),
    "grows_its_window": (0, "proven: the same samples, gradients"),
    "many_parameters": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "tiny_rate": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "exits_at_once": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "for_two_at_most": (3, "cannot tell: it refuses 3 processes: it ends with at most 2 processes"),
    "one_batch_size": (3, "cannot tell: the model is made for one batch size, and prove divides it: one_batch"),
    "sharded_state": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "sampler_for_several": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "asks_the_gpu": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "captures_graphs": (3, "cannot tell: it needs a GPU for torch.cuda.make_graphed_callables (captures_graphs.py:14)"),
    "makes_both_loaders_in_a_line": (1, "wrong: 1 sample counted twice: it says"),
    "tested_by_all": (0, "proven: the same samples, gradients, learning rates, weights and evaluations on"),
    "tested_by_all_in_shares": (0, "proven: the same samples, gradients, learning rates, weights and evaluations on"),
    "tested_on_rank_0": (1, "wrong: after 7 steps rank 0 calls DistributedDataParallel.forward, and rank 1 does not"),
    "gathered_in_one_piece": (0, "proven: the same samples, gradients, learning rates, weights and evaluations on"),
    "noise_of_its_own": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "noise_by_hand": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "noise_by_place": (3, "nothing wrong found; not compared: gradients; the same samples, averaged gradients"),
    "batches_by_position": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "asks_for_its_group": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "replaces_its_streams": (2, "fails: on one process, replaces_its_streams.py:16: ValueError: no data"),
    "counts_integers_on_the_gpu": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "steps_by_its_batch": (0, "proven: the same samples, gradients and weights on"),
    "items_ignore_their_index": (3, "nothing wrong found; not compared: samples, gradients"),
    "for_two_gpus_at_least": (0, "proven: the same samples, gradients"),
    "for_two_processes_with_gpus": (3, "cannot tell: it refuses one process with a pretended GPU: for_two_proc"),
    "for_two_gpus_each": (3, "cannot tell: it refuses one process with a pretended GPU: for_two_gpus_each.py:14"),
    "flat_shards": (3, "cannot tell: FullyShardedDataParallel keeps parts of flat parameters (flat_shards.py:26)"),
    "untrained_on_its_own_data": (1, "wrong: all gradients are zero"),
    "profiled": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "counts_its_steps": (0, "proven: the same gradients and weights on 1 and 2 processes"),
    "starts_two": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "starts_several_only": (0, "proven: the same samples, gradients, learning rates and weights on 1, 2 and 3"),
    "groups_several_only": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "for_two_processes": (3, "cannot tell: it refuses one process, with which prove begins: for_two_processes.py:14"),
    "groups_four": (3, "cannot tell: it makes a group of 4 processes, and prove has 1 (groups_four.py:14)"),
    "needs_local_rank": (2, "fails: on one process, it ends with 2; it printed last: "),
    "is_killed": (3, "cannot tell: on 2 processes one dies of SIGKILL, as where memory runs out"),
    "reads_other_variables": (2, "fails: on one process, reads_other_variables.py:33: KeyError: 'SLURM_PROCID'; "),
    "traced": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "drops_paths": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "draws_without_an_end": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "fails_in_a_call": (2, "fails: on one process, fails_in_a_call.py:14: RuntimeError: view size is not compatible"),
    "asks_for_input": (3, "cannot tell: it asks for input (asks_for_input.py:14), and prove gives none"),
    "passes_by_name": (0, "proven: the same samples, gradients"),
    "zero_by_hand": (3, "cannot tell: it averages or exchanges the weights after its steps"),
    "generators_of_their_own": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "batches_of_a_stream": (1, "wrong: each of the 2 processes trains on the same samples: each counts 2 times"),
    "functional_gradients": (0, "proven: the same samples, gradients"),
}


@pytest.fixture
def prove_unusual(prove_it):
    """Prove a program of unusual/, or one that is made of with_accelerate.py or with_ddp.py there."""

    def prove_unusual(program, edits=(), **options) -> Said:
        file = FOREIGN / "unusual" / f"{program}.py"
        for base, changed in (("with_accelerate", WITH_ACCELERATE), ("with_ddp", WITH_DDP)):
            if program in changed:
                file, edits = FOREIGN / "unusual" / f"{base}.py", [*changed[program], *edits]
        return prove_it(file, edits, name=f"{program}.py", **options)

    return prove_unusual


@pytest.mark.slow
@pytest.mark.parametrize("program", UNUSUAL)
def test_an_unusual_program_gets_a_right_verdict_or_a_reason_why_there_is_none(prove_unusual, program):
    code, words = UNUSUAL[program]
    processes = {"for_two_at_most": (3,), "starts_several_only": None}.get(program, (2,))
    timeout_s = {"hangs": 3, "tested_on_rank_0": 5}.get(program, 60)
    said = prove_unusual(program, timeout_s=timeout_s, processes=processes)
    assert (said.code, said.verdict[: len(words)]) == (code, words), said.text
    if program == "missing_file":
        assert '|     weights = torch.load("pretrained.pt")' in said.text
    elif code != 2 and "pretended" not in words:
        assert "Traceback" not in said.text


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_AT_THE_STEP)
def test_what_the_optimizer_gets_is_compared(prove_unusual, name):
    program, edits, kind, words = WRONG_AT_THE_STEP[name]
    said = prove_unusual(program, edits)
    assert said.code == 1, said.text
    assert words in said.verdict
    assert said.advice[0] == f"what to do: {mistakes.advice(kind)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", BELIEVED)
def test_a_verdict_can_be_believed(prove_unusual, name):
    program = BELIEVED[name]
    said = prove_unusual(program.program, program.edits, processes=program.processes, resume_flags=program.resume_flags)
    assert said.code == program.code, said.text
    assert program.words in said.verdict, said.text
    if program.kind:
        assert f"[{mistakes.id_of(program.kind)}]" in said.text, said.text


@pytest.mark.slow
def test_a_flag_of_the_script_may_be_the_number_of_processes(prove_unusual):
    said = prove_unusual("starts_ranks", flags=["--gpus={processes}"])
    assert said.code == 0, said.text


@pytest.mark.slow
def test_a_look_at_a_batch_is_no_epoch_of_a_sampler_that_is_only_there_on_several(prove_unusual):
    said = prove_unusual("sampler_for_several", [LOOK])
    assert said.code == 0, said.text


def test_a_note_that_differs_in_the_number_of_processes_is_told_once():
    report = proof.Report(argparse.Namespace(script=Path("train.py"), format="json"))
    for number in (2, 3):
        report.add("", [Note("learning rate", f"{number} times as high on {number} processes")])
    assert [each.message for each in report.notes] == ["2 times as high on 2 processes"]


def test_a_flag_that_torchrun_does_not_add_is_named_and_may_be_given(prove_unusual, tmp_path):
    said = prove_unusual("needs_local_rank")
    assert said.verdict.endswith("torch.distributed.launch adds --local_rank {rank} to its flags, and prove does not")
    shutil.rmtree(tmp_path / "user")
    said = prove_unusual("needs_local_rank", flags=["--local_rank={rank}"])
    assert said.code == 0, said.text


@pytest.mark.slow
def test_a_run_that_resumes_from_no_file_is_not_called_wrong(prove_it):
    said = prove_it(FOREIGN / "accelerate_cv.py", resume_flags="--output_dir checkpoints")
    assert said.verdict == "cannot tell: the run that resumes loads nothing: do its flags name a checkpoint?"


def test_a_model_that_stays_in_evaluation_mode_is_found_also_where_the_test_has_gradients(prove_it):
    said = prove_it(CASES["bugs/reduction/trains_in_eval_mode"].path, [("torch.no_grad()", "torch.enable_grad()")])
    assert said.code == 1, said.text
    assert "from here on the model trains in evaluation mode" in said.verdict


@pytest.mark.slow
def test_the_rank_may_come_from_another_variable(prove_unusual, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "{rank}")
    said = prove_unusual("reads_other_variables")
    assert said.code == 0, said.text
    assert os.environ["SLURM_PROCID"] == "{rank}"


def test_a_script_that_cannot_be_read_fails(prove_it):
    said = prove_it(FOREIGN / "unusual" / "plain.py", [("import torch\n", "import import\n")])
    assert (said.code, said.verdict[:40]) == (2, "fails: on one process, SyntaxError: inva")


def test_recorded_entries_are_of_all_places_in_the_kernels():
    gradient = torch.zeros(512, 512, 3, 3)
    gradient[..., 1, 1] = 1  # as of images of one pixel, with padding
    assert sampled(gradient)[1:].mean().item() == pytest.approx(1 / 9, rel=0.01)


def test_every_unusual_program_is_tried():
    files = {path.stem for path in (FOREIGN / "unusual").glob("*.py")} - {"with_accelerate", "with_ddp"}
    assert files | WITH_ACCELERATE.keys() | WITH_DDP.keys() == {*UNUSUAL}


# The command


@pytest.mark.slow
def test_a_test_of_another_repository_gets_the_report(tmp_path):
    text = (FOREIGN / "ddp_series.py").read_text()
    text = text.replace("loss.backward()", "(loss / int(os.environ['WORLD_SIZE'])).backward()")  # DDP divides, too
    (tmp_path / "mine.py").write_text(text)
    said = prove("--processes", "2", str(tmp_path / "mine.py"), "--batch_size", "16")
    assert said["code"] == 1
    finding = said["findings"][0]
    assert (finding["kind"], finding["stage"], finding["step"]) == ("factor", "gradient", 1)
    assert finding["line"] == "mine.py:53"


@pytest.mark.slow
def test_it_starts_beside_modules_with_the_names_of_others(tmp_path):
    """Also where the script has a relative idea of `utils`, as a module of a package, and where it says "accelerate",
    for which prove imports the library datasets."""
    for name in ("queue", "mistakes", "text", "prove"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    (tmp_path / "utils.py").write_text("def lr():\n    return 1e-2\n")
    (tmp_path / "datasets.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "rates.py").write_text("MOMENTUM = 1.0\n")
    text = (FOREIGN / "ddp_series.py").read_text()
    imported = "import datasets  # to accelerate it\nimport torch\nimport utils\nfrom tests import rates\n"
    text = text.replace("import torch\n", imported, 1)
    text = text.replace("lr=1e-2", "lr=utils.lr() * datasets.FACTOR * rates.MOMENTUM")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rates.py").write_text("def lr():\n    return 1e-2\n")
    text = text.replace("import utils\n", "from . import rates as utils\n")
    (tmp_path / "package" / "train.py").write_text(text)
    by_name = os.environ | {"PYTHONPATH": str(ROOT)}
    for words, script, variables in (
        ([ROOT], ["train.py"], os.environ),
        ([ROOT / "prove_training"], ["train.py"], os.environ),
        (["-m", "prove_training"], ["-m", "package.train"], by_name),
    ):
        command = [sys.executable, *map(str, words), "--processes", "2", *script]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].startswith("proven: ")


@pytest.mark.slow
def test_a_path_with_dots_is_no_reason_to_name_a_line_of_prove():
    script = "silent_bugs/bugs/reduction/divided_by_processes.py"
    command = [sys.executable, f"../{ROOT.name}", "--processes", "2", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"between the loss and its backward pass at {script}:" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_action_installs_it_and_judges_a_script(tmp_path):
    """Its steps as they stand in action.yml; the package goes into a folder of this test."""
    (tmp_path / "train.py").write_text((FOREIGN / "ddp_series.py").read_text())
    left_out = shutil.ignore_patterns("silent_bugs", "tests", "build", "*.egg-info")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_out)  # which pip builds in
    installed = tmp_path / "installed"
    variables = {"GITHUB_ACTION_PATH": str(checkout), "FLAGS": "--processes 2", "SCRIPT": "train.py"}
    variables |= {"PIP_TARGET": str(installed), "PIP_NO_DEPS": "1", "PYTHONPATH": str(installed)}
    variables |= {"PIP_NO_BUILD_ISOLATION": "0"}  # 0 switches it off: this environment's setuptools, and no network
    folders = [str(installed / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    variables |= {"PATH": os.pathsep.join(folders)}
    for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]:
        words = ["bash", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "\nproven: " in done.stdout
    names = {path.name for path in installed.iterdir() if not path.name.endswith("-info")}
    assert names == {"bin", "prove_training"}


def test_it_imports_nothing_of_this_repository():
    for path in (ROOT / "prove_training").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"utils", "tools", "scripts", "tests"}, path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--processes", "1", __file__], "--processes: 1: numbers of processes to compare with one, such as 2 or 2,3"),
        (["--processes", "two", __file__], "--processes: two: numbers of processes"),
        (["--processes", "", __file__], "numbers of processes to compare with one"),
        (["--format", "xml", __file__], "invalid choice: 'xml'"),
        (["train.ipynb"], "train.ipynb is a notebook: jupyter nbconvert --to script makes a script of it"),
    ],
)
def test_bad_flags_are_an_error(words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.parse_args(words)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def reported(tmp_path, monkeypatch, output: str, source: str = "loss.backward()") -> proof.Report:
    """A report of one finding and one note of train.py:1."""
    (tmp_path / "train.py").write_text(f"{source}\n")
    monkeypatch.chdir(tmp_path)
    linecache.checkcache()
    report = proof.Report(argparse.Namespace(script=Path("train.py"), format=output))
    report.add("2 processes", [Finding("factor", "gradient", "0.5 times: 50 %", 1, "train.py:1")])
    report.add("", [Note("samples", "repeats 1 sample", None, "")])
    return report


def test_a_finding_that_is_meant_is_a_note(tmp_path, monkeypatch):
    assert [each.kind for each in reported(tmp_path, monkeypatch, "json").findings] == ["factor"]
    ignored = reported(tmp_path, monkeypatch, "json", "loss.backward()  # prove: ignore[factor] by design")
    assert ignored.findings == []
    assert "0.5 times: 50 % [factor, ignored]" in ignored.notes[0].message
    other = reported(tmp_path, monkeypatch, "json", "loss.backward()  # prove: ignore[gradient]")
    assert [each.kind for each in other.findings] == ["factor"]


def test_github_gets_an_annotation_for_each_finding_and_note_and_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert reported(tmp_path, monkeypatch, "github").end(1, "wrong: 0.5 times") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  2 processes   WRONG in step 1, gradient, train.py:1: 0.5 times: 50 % [factor]" in lines
    error, notice = lines[-2:]
    assert error.startswith("::error file=train.py,line=1,title=prove factor::0.5 times: 50 %25: Distributed")
    assert notice == "::notice title=prove note::repeats 1 sample"
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### wrong: 0.5 times\n")
    assert "[factor]" in summary
    report = proof.Report(argparse.Namespace(script=Path("train.py"), format="github"))
    report.end(3, "cannot tell: a\nb")
    assert capsys.readouterr().out.splitlines()[-1] == "::error title=prove::cannot tell: a%0Ab"


def test_sarif_has_the_place_and_the_id_of_each_finding(tmp_path, monkeypatch, capsys):
    reported(tmp_path, monkeypatch, "sarif").end(1, "wrong: 0.5 times")
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (finding, noted) = run["results"]
    assert (finding["ruleId"], finding["level"], noted["level"]) == ("factor", "error", "note")
    place = finding["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 1)
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"factor", "note"}


def test_a_closed_pipe_ends_the_command_without_a_traceback(monkeypatch):
    monkeypatch.setattr(command, "parse_args", lambda: argparse.Namespace(module=None, script=Path(__file__)))
    monkeypatch.setattr(imports, "load", lambda *_: True)
    monkeypatch.setattr(command.os, "dup2", lambda *_: None)

    def closed(args):
        raise BrokenPipeError

    monkeypatch.setattr(proof, "prove", closed)
    assert command.main() == 141


def test_the_interpreter_of_the_project_is_used_where_pytorch_is_not_installed(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(command.os, "execv", lambda python, words: started.append((str(python), words)))
    assert command.with_other_python() == 2
    assert started == []
    assert "PyTorch is not installed here" in capsys.readouterr().err
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("")
    command.with_other_python()
    ((python, words),) = started
    assert (python, words[1:]) == (".venv/bin/python", [str(ROOT / "prove_training"), *sys.argv[1:]])


def test_the_figures_of_a_pretended_gpu_are_small_and_none_is_zero():
    assert all(pretended_gpu.ANSWERS[name] == 1 for name in pretended_gpu.NUMBERS)
    assert pretended_gpu.ANSWERS["current_device"] == 0
    assert pretended_gpu.ANSWERS["memory_stats"]["allocated_bytes.all.peak"] == 1
    assert pretended_gpu.Finished().elapsed_time(pretended_gpu.Finished()) > 0


def test_the_first_error_of_a_chain_is_found():
    def error_of(function) -> BaseException:
        with pytest.raises(ValueError, match="last") as raised:
            function()
        return first_of_chain(raised.value)

    def handles():
        try:
            {}["first"]
        except KeyError:
            raise ValueError("last")  # noqa: B904

    def hides():
        try:
            {}["first"]
        except KeyError:
            raise ValueError("last") from None

    assert isinstance(error_of(handles), KeyError)
    assert isinstance(error_of(hides), ValueError)


def nodes_of_the_code() -> list[ast.AST]:
    files = (ROOT / "prove_training").rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def strings_in(nodes) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def kinds_in_the_code() -> set[str]:
    """The kinds of findings that are written in prove_training."""
    nodes = nodes_of_the_code()
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"]
    return {word for call in calls for word in strings_in(ast.walk(call.args[0])) if word}


def test_every_mistake_has_its_section_with_wrong_and_right_lines_and_a_thread():
    sections, index = mistakes.sections(), mistakes.PAGE.read_text().partition("\n## ")[0]
    assert all(f"[{heading}](#{heading})" in index and mistakes.advice(heading) for heading in sections)
    assert {mistakes.id_of(kind) for kind in kinds_in_the_code()} <= sections.keys()
    assert sections.keys() <= {mistakes.id_of(word) for word in strings_in(nodes_of_the_code())}, "nothing names it"
    for mistake in filter(lambda mistake: mistake.kind, MISTAKES.values()):
        assert mistake.thread.rpartition("/")[2] in sections[mistake.kind.replace("_", "-")], mistake.thread
    kinds = {mistake.kind for mistake in MISTAKES.values() if mistake.kind} | {*FOUND.values()}
    for kind in kinds - {"hangs", "gradient"}:  # which have no one correction
        text = sections[mistakes.id_of(kind)]
        assert "\n-" in text or "\n+" in text, f"no lines in {kind}"
        assert {line[0] for line in mistakes.correction(kind)} & {"-", "+"}


# The same work


class Items(Dataset):
    def __init__(self, length):
        self.length, self.classes = length, ["cat", "dog"]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def test_a_cut_data_set_is_the_same_object_of_a_class_of_the_same_name():
    data = Items(100)
    assert same_work.cut(data, 10) is data
    assert len(data) == 10
    assert isinstance(data, Items)
    assert type(data).__name__ == "Items"
    assert data.classes == ["cat", "dog"]
    assert len(same_work.cut(Items(5), 10)) == 5


@pytest.mark.parametrize("data", [list(range(100)), tuple(range(100)), torch.arange(100)])
def test_a_list_or_tensor_is_cut_too(data):
    assert list(same_work.cut(data, 10)) == list(range(10))


def made_recording(tmp_path, **plan) -> Recording:
    rank = plan.pop("rank", 0)
    return Recording(Plan(13, output=str(tmp_path), **plan), rank)


@pytest.mark.parametrize("processes", [2, 3])
def test_a_part_made_by_hand_is_cut_to_its_share_and_its_batch_too(processes, tmp_path):
    indices = []
    for rank in range(processes):
        batches = made_recording(tmp_path, processes=processes, lengths={100, 40}, sizes={16}, rank=rank).batches
        indices += batches.cut(Subset(Items(100), range(rank, 100, processes))).indices
        assert len(batches.cut(Items(40))) == len(batches.cut(Items(100))) == 13
        assert batches.batch_size(16 // processes, "") == batches.batch_size(16, "") == 12 // processes
    assert sorted(indices) == list(range(13))


def test_clipping_nothing_or_gradients_that_are_still_scaled_is_recorded(tmp_path):
    models = made_recording(tmp_path, processes=1).models
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    models.optimizers = [first, second]
    step, both = models.recording.step, [first.param_groups[0]["params"][0], second.param_groups[0]["params"][0]]
    step.scaler = ["unscale_"]
    models.unscaled = {id(first)}
    models.clip(both[:1])
    assert step.scaler == ["unscale_", "clip"]
    models.clip(both)
    assert step.scaler == ["clip"]
    models.clip([])
    assert len(step.clips) == 3


def test_a_step_with_a_closure_has_the_gradients_that_the_closure_computes(tmp_path):
    recording = made_recording(tmp_path, processes=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure():
        parameter.grad = torch.full((2,), 3.0)

    args, kwargs = recording.models.before_step(optimizer, (optimizer, closure), {})
    assert args == (optimizer,)
    kwargs["closure"]()
    assert [value[1:].tolist() for value in recording.step.at_step.values()] == [[3, 3]]


@pytest.fixture
def models(tmp_path):
    """The recorder of models of a run on one process, with an optimizer of one parameter."""
    models = made_recording(tmp_path, processes=1).models
    models.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)]
    models.recording.where.line = lambda: "train.py:9"
    return models


@pytest.mark.parametrize(("epoch", "kept"), [(0, 2), (1, 1)])
def test_what_is_left_at_the_end_of_an_epoch_and_zeroed_is_dropped(models, monkeypatch, epoch, kept):
    parts = iter([Part("loader", 0, ["a"]), Part("loader", epoch, ["b"])])
    monkeypatch.setattr(models.batches, "of_backward", lambda: [next(parts)])
    models.begin_backward()
    models.parameters()[0].grad = torch.ones(2)
    models.before_zero_grad()
    models.begin_backward()
    assert len(models.recording.step.micro_batches) == kept


def test_gradients_are_zeroed_only_where_there_are_some(models):
    models.recording.step.micro_batches = [MicroBatch()]
    models.before_zero_grad()
    assert models.recording.step.zeroed == []
    models.parameters()[0].grad = torch.ones(2)
    models.before_zero_grad()
    assert models.recording.step.zeroed == [(1, "train.py:9")]


@pytest.mark.parametrize(
    ("name", "reduction", "target", "loss"),
    [
        ("cross_entropy", "mean", torch.tensor([1, 1, -100]), (1.0, 2, "train.py:9")),
        ("mse_loss", "sum", torch.zeros(3, 2), (6.0, 6, "train.py:9")),
    ],
)
def test_the_coefficient_and_the_number_of_losses_are_recorded(models, name, reduction, target, loss):
    models.recording.step.micro_batches = [MicroBatch()]
    args = torch.ones(3, 2, requires_grad=True), target
    value = getattr(torch.nn.functional, name)(*args, reduction=reduction)
    models.criterion(name, value, reduction, args, {})
    value.backward()
    assert models.recording.step.micro_batches[0].losses == [loss]


@pytest.mark.parametrize(("done", "before"), [(2, [7.0, 7.0]), (1, [1.0, 1.0])])
def test_gradients_before_clipping_are_kept_unless_it_came_too_early(models, done, before):
    step, parameter = models.recording.step, models.parameters()[0]
    step.micro_batches, parameter.grad = [MicroBatch()] * done, torch.full((2,), 7.0)
    models.clip([parameter])
    step.micro_batches, parameter.grad = [MicroBatch()] * 2, torch.ones(2)
    models._note_gradients(models.optimizers[0])
    assert [value[1:].tolist() for value in step.gradients.values()] == [before]


@pytest.mark.parametrize(("size", "value"), [(2, 1.0), (3, 0.0)])
def test_weights_are_shared_only_where_they_have_the_same_shapes(models, tmp_path, size, value):
    torch.save(([torch.ones(size)], [{}]), tmp_path / "weights.pt")
    models.plan.weights = {0: str(tmp_path / "weights.pt")}
    models.share_weights(0, models.optimizers)
    assert models.parameters()[0].tolist() == [value] * 2


def test_parameters_without_a_gradient_are_named_by_their_numbers_among_those_that_train(models):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1))
    models.in_ddp[0] = model
    error = "Parameter indices which did not receive grad for rank 0: 1 7"
    assert models.unused(error) == ["1.bias"]
    assert models.unused("another error") == []


@pytest.mark.parametrize(("rate", "modes"), [(0.0, {}), (0.5, {0: False})])
def test_the_mode_of_a_model_matters_only_with_layers_that_differ_in_it(models, rate, modes):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(rate)).eval()
    models.models[0] = model
    assert models.modes([*model.parameters()]) == modes


def test_the_last_batch_of_a_loader_that_reads_ahead_is_of_its_pass(models):
    batches, ended = models.batches, Pass("loader", read=[["a"], ["b"]], used=[Part("loader", 0, ["?"])])
    batches.read_to_end = ended
    assert [part.digests for part in batches.of_backward()] == [["b"]]
    assert ended.used[0].digests == ["a"]
    batches.read_to_end = replace(ended, read=[["a"], ["b"], ["c"]], used=ended.used[:1])
    assert batches.of_backward() == [], "two batches have not been used"


def test_a_part_of_the_test_data_has_a_part_of_the_batch(tmp_path):
    batches = made_recording(tmp_path, processes=2, tests={"test": 16}, sizes={16}).batches
    assert [batches.batch_size(8, "test", is_whole) for is_whole in (False, True)] == [6, 12]


@pytest.mark.parametrize(("length", "most"), [(None, 3), (20, 3), (4, 2), (1, 1)])
def test_a_shortened_test_reads_three_batches_or_half_of_them(tmp_path, length, most):
    batches = made_recording(tmp_path, processes=1, shorter=["test"]).batches
    for key, expected in (("test", [False] * most + [True]), ("loader", [False] * (most + 1))):
        current = Pass(key, length=length)
        read = [argparse.Namespace(prove_pass=current, _num_yielded=number) for number in range(most + 1)]
        assert list(map(batches.is_short, read)) == expected


def test_a_pass_is_whole_after_its_last_batch_and_batches_of_a_test_are_dropped(tmp_path):
    batches, current = made_recording(tmp_path, processes=1).batches, Pass("loader", length=2)
    batches.deliver(current, ["a"], torch.ones(1))
    assert not current.is_whole
    batches.fresh[0].is_tested = True
    batches.deliver(current, ["b"], torch.ones(1))
    assert current.is_whole
    assert [batch.digests for batch in batches.fresh] == [["b"]]


def test_weights_that_are_averaged_after_a_step_are_told_from_other_sums(tmp_path):
    recording = made_recording(tmp_path, processes=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    recording.models.optimizers = [torch.optim.SGD([parameter], lr=0.1)]
    recording.steps.append(Step())
    with recording.processes.calling("all_reduce", (torch.ones(2),)):
        pass
    assert not single.cannot_judge(Record(0, recording.facts, made_up()[0].steps))
    recording.where.line = lambda: "train.py:9"
    with recording.processes.calling("all_reduce", (parameter.data,)):
        pass
    assert "averages or exchanges the weights" in single.cannot_judge(Record(0, recording.facts, made_up()[0].steps))


def test_random_numbers_of_the_first_step_after_an_evaluation_are_not_of_the_evaluation(tmp_path):
    """As those of a detection model, which draws the boxes that it learns from."""
    recording = made_recording(tmp_path, processes=1)
    recording.facts.loaders["train.py:5"] = Loader("train.py:5")
    recording.evaluations.current = Evaluation(0, "train.py:9")
    recording.batches.expect_draws()
    torch.rand(1)
    recording.models.begin_backward()
    assert recording.step.micro_batches[0].draws
    assert not recording.record.evaluations[0].draws


def test_lightning_has_a_device_for_each_process(tmp_path):
    class Fabric:
        __module__ = "lightning.fabric.fabric"

        def __init__(self, **options):
            self.options = options

    starting.watch_devices(Fabric, made_recording(tmp_path, processes=3))
    options = {"accelerator": "cpu", "devices": 3, "num_nodes": 1, "precision": "32-true", "strategy": "ddp"}
    assert Fabric(accelerator="gpu", devices=1, precision="bf16-mixed").options == options
    assert Fabric(strategy="fsdp").options["strategy"] == "fsdp"
    strategy = argparse.Namespace(_accelerator="cuda", _parallel_devices=["cuda:0"])
    assert Fabric(strategy=strategy, accelerator="gpu").options["accelerator"] == "cpu"
    assert (strategy._accelerator, strategy._parallel_devices) == (None, None), "Lightning refuses two"


def test_batches_that_are_read_before_the_first_is_used_are_told_apart_by_their_memory(tmp_path):
    batches = made_recording(tmp_path, processes=1).batches
    batches.new_loader(argparse.Namespace(), "any")
    ids, masks, targets = torch.arange(12).view(3, 4), torch.ones(3, 4), torch.arange(3.0)
    first, second = (batches.begin_pass(argparse.Namespace(prove_key=key)) for key in ("ids", "targets"))
    for number in range(3):
        batches.deliver(first, [f"ids {number}"], {"ids": ids[number], "more": [masks[number]]})
    batches.deliver(second, ["targets"], (targets,))

    def used(*inputs) -> list:
        batches.model_called(list(inputs))
        return [part.digests for part in batches.of_backward()]

    assert used({"ids": ids[0, :-1]}, targets) == [["ids 0"], ["targets"]]
    assert used({"ids": ids[0]}) == [], "another loss of the same samples"
    assert used(masks[1]) == [["ids 1"]]
    assert used(ids[2] / 2) == [["ids 2"]], "what was computed is of the last batch"
    batches.deliver(first, ["ids 0"], {"ids": ids[0]})
    batches.deliver(first, ["ids 1"], {"ids": ids[1]})
    assert used(ids[1]) == [["ids 1"]]
    assert used(ids[2] / 2) == [], "the script has skipped it"
    batches.deliver(first, ["ids 0"], {"ids": ids[0]})
    batches.deliver(first, ["ids 1"], {"ids": ids[1]})
    batches.model_called([ids[0]])
    assert used(ids[0] / 2) == [["ids 0"]], "the second call has what was computed of the first"


def test_a_run_that_will_be_resumed_goes_on_after_the_first_file(tmp_path):
    recording = made_recording(tmp_path, processes=1, stop_after_save=True)
    recording.steps.append(Step())
    recording.end = lambda: pytest.fail("files that are written after the first one are missing")
    files.saved(recording)
    assert recording.facts.has_saved


@pytest.mark.parametrize(
    ("content", "has", "counters"),
    [
        (3, set(), []),
        ({1: 3, "losses": [0.5, 0.25]}, set(), ["1"]),
        ({"epoch": 1, "optimizer_states": [{"state": {}, "param_groups": []}]}, {"optimizer"}, ["epoch"]),
    ],
)
def test_any_content_of_a_file_can_be_described(content, has, counters):
    found = files.described(content)
    assert (found["has"], found["prefix"], found["counters"]) == (has, "", counters)


def test_the_indices_of_a_sampler_are_cut_and_not_the_data(tmp_path):
    """As those of a fold of a cross-validation."""
    batches = made_recording(tmp_path, processes=1).batches
    sampler = SubsetRandomSampler(range(50, 100))
    assert batches.cut_indices(sampler)
    assert list(sampler.indices) == list(range(50, 63))
    assert not batches.cut_indices(None)
    assert not batches.cut_indices(DistributedSampler(Items(50), 2, 0))


@pytest.mark.parametrize(("own_generator", "expected"), [(False, [2, 0, 1]), (True, [0, 1, 2])])
def test_a_shuffle_with_a_generator_of_the_script_keeps_its_own_order(own_generator, expected, tmp_path):
    """One that each process seeds for itself would be hidden by the order of one process."""
    batches = made_recording(tmp_path, processes=2, orders={"train.py:5": [[2, 0, 1]]}).batches
    sampler = RandomSampler(range(3))
    sampler.prove_key, sampler.prove_generator = "train.py:5", own_generator
    assert batches.order(sampler, lambda: [0, 1, 2]) == expected


@pytest.mark.parametrize(("number", "is_share"), [(31, False), (32, True), (33, True), (34, True), (35, False)])
def test_a_share_by_hand_may_differ_by_one(number, is_share, tmp_path):
    batches = made_recording(tmp_path, processes=3, lengths={100, 31}).batches
    assert batches.whole(number, "lengths") == (100 if is_share else None)
    assert batches.whole(100, "lengths") is None


def test_each_pass_has_its_own_order_of_the_reference_if_it_has_as_many_items(tmp_path):
    batches = made_recording(tmp_path, processes=2, orders={"train.py:5": [[2, 0, 1], [1, 2, 0], [1, 0]]}).batches
    sampler = RandomSampler(range(3))
    sampler.prove_key, sampler.prove_generator = "train.py:5", False
    orders = [batches.order(sampler, lambda: [0, 1, 2]) for _ in range(4)]
    assert orders == [[2, 0, 1], [1, 2, 0], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("given", "total"), [(64, 12), (12, 12), (8, 6), (1, 6)])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_batch_of_all_processes_is_the_same_on_each_number_of_them(given, total, processes, tmp_path):
    recording = made_recording(tmp_path, processes=processes, tests={"test": given})
    assert recording.batches.batch_size(given, "train") * processes == total
    assert recording.batches.batch_size(given, "test") == total
    recording.plan.sizes = {given}
    assert recording.batches.batch_size(given // processes or 1, "test", is_whole=True) == total
    recording.batches.splits_batches = True
    assert recording.batches.batch_size(given, "train") == total


def test_two_processes_do_not_divide_an_epoch():
    assert len(DistributedSampler(Items(same_work.items_of_epoch()), 2, 0)) * 2 > same_work.items_of_epoch()


@pytest.mark.parametrize(
    ("init", "is_alike"),
    [
        (lambda worker: np.random.seed(worker), True),
        (lambda worker: np.random.seed((torch.initial_seed() + worker) % 2**32), False),
        (lambda worker: 1 / 0, False),
        (None, False),
    ],
)
def test_workers_that_are_seeded_by_their_number_alone_are_known(init, is_alike):
    state = np.random.get_state()[1].tolist()
    assert bool(data.seeds_of_workers(init)) == is_alike
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("given", [16, 6])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_an_epoch_has_as_many_steps_on_each_number_of_processes(given, processes, drops):
    """Also without the last batch, whether a sampler or Accelerate divides the data."""
    items, total = Items(same_work.items_of_epoch()), same_work.micro_batch(given)
    expected, own = len(DataLoader(items, total, drop_last=drops)), total // processes
    assert len(items) % total > 1, "BatchNorm needs two samples"
    for sampler_drops in (False, True):
        sampler = DistributedSampler(items, processes, 0, drop_last=sampler_drops)
        assert len(DataLoader(items, own, sampler=sampler, drop_last=drops)) == expected
    batches = BatchSampler(range(len(items)), own, drops)
    assert len(BatchSamplerShard(batches, processes, 0)) == expected


# The stages, on records that are made up


def made_up(processes: int = 1, steps: int = 4) -> list[Record]:
    """The records of a correct run: samples 0 to 5 in step 1, 6 to 11 in step 2 and so on."""
    ranks = []
    for rank in range(processes):
        loader = Loader("train.py:5", given=6, length=24, items=24, sampler="RandomSampler", shuffles=True)
        facts = Facts(loaders={"loader": loader}, optimizers=["SGD"], schedules=1, ddp=["train.py:7"])
        facts.group, facts.is_complete = "train.py:3", True
        record = Record(rank, facts, [made_up_step(number, rank, processes) for number in range(steps)])
        record.passes = [Pass("loader", 0, in_training=True, batches=4, is_whole=True)]
        record.weights = dict.fromkeys(range(steps + 1), "weights.pt")
        record.initial, record.final = {"weight": sampled(torch.ones(3))}, {"weight": sampled(torch.ones(3))}
        ranks.append(record)
    return ranks


def made_up_step(number: int, rank: int, processes: int) -> Step:
    samples = [str(6 * number + index) for index in range(rank, 6, processes)]
    gradient = {"weight": sampled(torch.tensor([1.0, 2.0, 3.0]) + number)}
    losses = [(1.0, len(samples), "train.py:8")]
    micro = MicroBatch([Part("loader", 0, samples)], losses, syncs=True, line="train.py:9")
    step = Step("train.py:10", [micro], gradients=gradient, at_step=dict(gradient), schedule_calls=number)
    step.rates, step.bases, step.options, step.modes = [0.1 * 0.8**number], [0.1], ["lr"], {0: True}
    step.before = {"weight": sampled(torch.ones(3))}
    step.weights = {"weight": sampled(torch.ones(3) - 0.1 * gradient["weight"][1:])}
    return step


def found(reference: Record, ranks: list[Record]) -> list[Finding]:
    return [*single.findings(reference), *several.findings(Comparison(reference, ranks))]


def test_made_up_records_without_a_change_are_the_same():
    (reference,), ranks = made_up(), made_up(2)
    assert found(reference, ranks) == []
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert both.compared >= {"samples", "gradients", "learning rates", "weights"}


def scale(entries: dict, factor: float) -> None:
    entries["weight"] = entries["weight"] * factor


def add(entries: dict, values: list[float]) -> None:
    entries["weight"] = sampled(entries["weight"][1:] + torch.tensor(values))


def every_step(records: list[Record], **changes) -> None:
    for record in records:
        for step in record.steps:
            vars(step).update(changes)


def drawn(digest: str, **others) -> list[Draw]:
    return [Draw("train.py:8", "randn", digest, 3, is_per_sample=True, **others)]


def save_state(**others) -> Save:
    return Save("save_state", 2, "last", "train.py:9", **others)


def evaluation(after: int = 2, **others) -> Evaluation:
    return Evaluation(after, "train.py:20", {"test": ["a", "b"]}, models={1: 0.5}, **others)


def accumulated(counts: list[int], weight: float = 0.5) -> Record:
    """The record of one process whose steps have these numbers of micro-batches, each with samples of its own."""
    (record,) = made_up(steps=len(counts))
    record.facts.loaders["loader"].length = 27  # five batches, of which one is left
    samples = iter(range(100))
    for step, count in zip(record.steps, counts, strict=True):
        micro = replace(step.micro_batches[0], losses=[(weight, 6, "train.py:8")])
        step.micro_batches = [replace(micro, samples=[Part("loader", 0, [str(next(samples))])]) for _ in range(count)]
    return record


@pytest.mark.parametrize(
    ("counts", "kinds"), [([1, 2, 2, 2], ["first_step"]), ([2, 2, 2, 1], ["last_step"]), ([2, 1, 2, 2], ["last_step"])]
)
def test_a_step_after_the_first_micro_batch_is_not_taken_for_a_shorter_last_one(counts, kinds):
    assert [finding.kind for finding in single.findings(accumulated(counts))] == kinds


def test_micro_batches_that_are_left_because_data_are_cut_are_not_a_mistake():
    shorter, longer = accumulated([2, 2, 2, 1]), accumulated([2, 2, 3, 2])
    for micro, number in zip(longer.steps[2].micro_batches, (0, 1, 1), strict=True):
        micro.samples[0].number = number
    for record, kind in ((shorter, "last_step"), (longer, "leftover")):
        assert kind in [finding.kind for finding in single.findings(record)]
        record.facts.loaders["loader"].length = 24
        assert kind not in [finding.kind for finding in single.findings(record)]


def test_what_a_framework_does_in_the_last_step_is_a_note():
    record = accumulated([2, 2, 2, 1])
    record.facts.framework = "Lightning"
    (finding,) = single.findings(record)
    assert (finding.kind, finding.message[-13:]) == ("", " by Lightning")


def test_samples_that_nothing_is_known_of_are_not_called_the_same():
    """As those of a stream that one process reads for all."""
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps:
            step.micro_batches[0].samples = []
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert ("samples" in both.compared, "samples" in both.not_compared) == (False, True)


def test_running_statistics_that_are_synchronised_are_not_compared(tmp_path):
    models = made_recording(tmp_path, processes=1).models
    models.models[0] = torch.nn.ModuleList([torch.nn.SyncBatchNorm(2), torch.nn.BatchNorm1d(2)])
    assert [name for name, _ in models._statistics()] == ["1.running_mean", "1.running_var"]


def test_gradients_may_be_set_to_zero_between_two_backward_passes_of_one_batch():
    """As for an adversarial example, whose gradient is no gradient of the step."""
    record = accumulated([2, 2, 2], weight=0.5)
    record.steps[1].zeroed = [(1, "train.py:9")]
    assert [finding.kind for finding in single.findings(record)] == ["zeroed"]
    record.steps[1].micro_batches[1].samples = []
    assert list(single.findings(record)) == []


def test_rewards_that_are_all_the_same_are_no_mistake():
    (record,) = made_up()
    for step in record.steps:
        step.at_step["weight"] = sampled(torch.zeros(3))
    assert single.cannot_judge(record) is None  # the loss is known, and has no gradient
    for step in record.steps:
        step.micro_batches[0].losses = []
    assert single.cannot_judge(record).startswith("every gradient is zero")


def test_a_script_that_fails_with_fewer_samples_is_run_with_all():
    def outcome(processes: int, plan: Plan) -> Outcome:
        error = "Got 75 predictions and 100 features" if plan.limit < 100 else None
        return Outcome(made_up(), error, Path(), [], [], [])

    proven = proof.Proof(argparse.Namespace(processes=None), outcome, None)
    assert proven._first_run().error is None
    assert proven.plan.limit >= 100


def first_run(answer, **facts) -> proof.Proof:
    """A proof after its first run; `answer` says what a run with a plan leaves: the error, and whether it has steps."""

    def outcome(processes: int, plan: Plan) -> Outcome:
        error, has_steps = answer(plan)
        (record,) = made_up(steps=4 if has_steps else 0)
        vars(record.facts).update(facts, refuses=bool(error))
        record.facts.loaders["loader"].given = 9
        return Outcome([record], error, Path(), [], [], [])

    made = proof.Proof(argparse.Namespace(processes=None), outcome, None)
    made._first_run()
    return made


def test_a_model_for_one_batch_size_is_compared_with_numbers_of_processes_that_divide_it():
    made = first_run(lambda plan: (None if plan.own_batch_size else "shapes differ", True))
    assert (made.plan.limit, made.processes) == (same_work.items_of_epoch(9), (3,))


@pytest.mark.parametrize(("has_steps", "pretends"), [(False, True), (True, False)])
def test_a_gpu_is_pretended_to_a_script_that_asks_for_one_and_does_not_train_without(has_steps, pretends):
    made = first_run(lambda plan: ("no" if plan.without_gpu else None, has_steps), asks=True, ddp=[])
    assert (made.plan.without_gpu, made.pretends_gpu) == (pretends, pretends)


@pytest.mark.parametrize("trains", [True, False])
def test_more_devices_are_pretended_only_to_a_script_that_trains_with_them(trains):
    made = first_run(lambda plan: (None, bool(plan.devices) and trains))
    assert made.plan.devices == proof.MANY * trains
    assert not made.pretends_gpu


@pytest.fixture
def made_up_proof():
    """A proof whose runs return what is given."""

    def made_up_proof(outcomes: list[Outcome]) -> proof.Proof:
        args = argparse.Namespace(script=Path("train.py"), format="json", processes=[2, 3])
        made = proof.Proof(args, lambda *_, **__: outcomes.pop(0), proof.Report(args))
        (made.reference,) = made_up()
        made._begin(made.reference.facts)
        return made

    return made_up_proof


def test_a_script_may_refuse_all_but_the_first_number_of_processes(made_up_proof):
    refused = made_up(2)
    refused[0].facts.refuses = True
    for processes in (2, 3):
        made = made_up_proof([Outcome(refused, "it ends with at most 1", Path(), [], [], [])] * 2)
        if processes == 3:
            assert made._compare(processes)
            assert made.report.lines[-1] == "  3 processes   not compared, it refuses them: it ends with at most 1"
        else:
            with pytest.raises(CannotTell, match="refuses 2 processes"):
                made._compare(processes)


@pytest.mark.parametrize(
    ("share", "later", "draws", "is_accused"),
    [
        (["a", "b"], [["c"]], False, True),
        (["c", "d"], [["a"]], False, True),
        (["c", "d"], [["c"]], False, False),
        (["c", "d"], [], False, True),
        (["c", "d"], [], True, False),
    ],
)
def test_items_with_numbers_that_differ_by_process_are_not_accused(made_up_proof, share, later, draws, is_accused):
    """Each rank has read the same samples: one that is augmented by the same numbers as the other is the same item.

    An item that comes again in the next pass, or is the same if it is read twice, is not augmented.
    """
    first, again = made_up(2), made_up(2)
    for part in (step.micro_batches[0].samples[0] for record in first for step in record.steps):
        part.digests = [f"other {digest}" for digest in part.digests]
    first[0].passes = [replace(first[0].passes[0], read=[read]) for read in (["a", "b"], *later)]
    first[0].facts.draws_by_itself = draws
    for record, read in zip(again, (["a", "b"], share), strict=True):
        record.passes[0].read = [read]
    made = made_up_proof([Outcome(records, None, Path(), [], [], []) for records in (first, again)])
    made.plan.seeds_own = True  # without effect: they are not of a generator that the items hold
    if is_accused:
        assert not made._compare(2)
        assert [each.kind for each in made.report.findings] == ["items"]
    else:
        with pytest.raises(CannotTell, match="random numbers that prove cannot repeat"):
            made._compare(2)


def test_a_schedule_is_tried_with_as_large_batches_of_more_data(made_up_proof):
    made, plans = made_up_proof([]), []
    made.runs = lambda processes, plan: plans.append(plan) or Outcome(made_up(2), None, Path(), [], [], [])
    assert made._counts_its_batches(2)
    assert (plans[0].whole_batches, plans[0].limit) == (True, 2 * made.plan.limit)


@pytest.mark.parametrize(("again", "kinds"), [("accuracy 0.70", ["eval_mean"]), ("accuracy 0.72", [])])
def test_a_printed_number_is_a_result_only_if_it_repeats_and_depends_on_the_samples(made_up_proof, again, kinds):
    def records(said: str, processes: int = 1) -> list[Record]:
        ranks = made_up(processes)
        for rank in ranks:
            rank.evaluations.append(evaluation(said=[said]))
        return ranks

    outcomes = [Outcome(records(said), None, Path(), [], [], []) for said in (again, "accuracy 0.60")]
    made = made_up_proof(outcomes)
    (made.reference,) = records("accuracy 0.70")
    comparison = Comparison(made.reference, records("accuracy 0.75", 2))
    assert [each.kind for each in made._evaluations(comparison)] == kinds


def test_evaluations_without_a_loader_that_differ_are_not_called_the_same(made_up_proof):
    def outcome(said: str, processes: int = 1) -> Outcome:
        ranks = made_up(processes)
        for rank in ranks:
            rank.evaluations.append(Evaluation(2, "train.py:20", said=[said]))
        return Outcome(ranks, None, Path(), [], [], [])

    one = "accuracy 0.70"
    made = made_up_proof([outcome("accuracy 0.75", 2), outcome(one), outcome(one), outcome(one, 2)])
    (made.reference,) = outcome(one).records
    assert made._compare(2)
    assert ("evaluations" in made.compared, "evaluations" in made.not_compared) == (False, True)
    assert made._compare(2)
    assert "evaluations" in made.compared


def test_items_with_generators_of_their_own_are_compared_when_these_are_seeded(made_up_proof):
    first, again, ranks = made_up(2), made_up(2), made_up(2)
    for step in (step for record in first for step in record.steps):
        step.micro_batches[0].samples[0].digests = [f"{step.line} {number}" for number in range(3)]
    first[0].facts.draws_by_itself = True
    for rank in again:
        rank.passes[0].read = [[f"of rank {rank.rank}"]]
    made = made_up_proof([Outcome(records, None, Path(), [], [], []) for records in (first, again, made_up(), ranks)])
    assert made._compare(2)
    assert made.plan.seeds_own
    assert "gradients" in made.compared


@pytest.mark.parametrize(
    "generator", [np.random.RandomState(), np.random.default_rng(), random.Random(), torch.Generator()]
)
def test_a_generator_that_a_transform_holds_is_seeded(generator):
    items, transform = Items(5), argparse.Namespace(generator=generator)
    items.transform = argparse.Namespace(transforms=[print, transform])
    assert list(same_work.generators_in(items)) == [generator]

    def draw() -> float:
        return (
            torch.rand(1, generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()
        )

    drawn = []
    for seed in (1, 1, 2):
        same_work.seed_generator(generator, seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_run_that_resumes_and_differs_ends_the_proof(made_up_proof):
    (whole,), (same,), (other,) = made_up(), made_up(), made_up()
    same.steps, other.steps = same.steps[2:], other.steps[2:]
    other.steps[1].rates = [0.7]
    outcomes = [Outcome([record], None, Path(), [], [], []) for record in (same, other)]
    made = made_up_proof([])
    assert made._goes_on(outcomes[0], whole, 2)
    assert made.report.lines[-1] == "  resumed       the same after step 2"
    with pytest.raises(CannotTell, match="do its flags name a checkpoint"):
        made._goes_on(outcomes[1], whole, 2)
    other.facts.has_loaded = True
    assert not made._goes_on(outcomes[1], whole, 2)
    assert [each.stage for each in made.report.findings] == ["resumed learning rate"]


@pytest.mark.parametrize(("factor", "kinds"), [(torch.tensor([1.0, 1.0, 1.1, 1.0]), []), (1.01, []), (2.0, ["factor"])])
def test_a_state_of_the_script_may_remember_a_sample_that_was_there_twice(factor, kinds):
    """As running statistics do after the last step of an epoch, which DistributedSampler fills."""
    (reference,), ranks = made_up(), made_up(2)
    ranks[0].steps[1].micro_batches[0].samples[0].digests.append("7")
    for rank in ranks:
        scale(rank.steps[3].gradients, factor)
        rank.steps[3].rates = [0.99 * rate for rate in rank.steps[3].rates]
    both = Comparison(reference, ranks)
    assert [finding.kind for finding in several.findings(both) if finding.kind] == kinds
    assert ("gradients after it" in both.not_compared) == (not kinds)
    ranks[0].steps[1].micro_batches[0].samples[0].digests.pop()
    assert {"gradient", "factor"}.intersection(finding.kind for finding in found(reference, ranks))


def test_gradients_that_the_optimizer_averages_may_differ_before():
    (reference,), ranks = made_up(), made_up(2)
    every_step(ranks, in_step=True)
    for rank, factor in zip(ranks, (0.5, 1.5), strict=True):
        for step in rank.steps:
            scale(step.gradients, factor)
    comparison = Comparison(reference, ranks)
    assert list(several.findings(comparison)) == []
    assert "gradients" in comparison.compared


def test_the_first_of_several_calls_that_clip_may_be_too_early():
    record = accumulated([2, 2])
    record.steps[0].clips = [(1, "train.py:8"), (2, "train.py:9")]
    (finding,) = single.findings(record)
    assert (finding.kind, finding.line) == ("clip_early", "train.py:8")


def test_a_sample_that_a_step_lacks_does_not_excuse_a_later_gradient():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders["loader"].drop_last = True
    digests_of(ranks[0], 1).digests.pop()
    for rank in ranks:
        scale(rank.steps[3].gradients, torch.tensor([1.0, 1.0, 1.1, 1.0]))
    assert [each.kind for each in several.findings(Comparison(reference, ranks)) if each.kind] == ["gradient"]


@pytest.mark.parametrize(("calls", "kinds"), [(["all_gather"], []), (["all_reduce"], ["gradient"]), ([], ["gradient"])])
def test_a_queue_that_is_gathered_ends_within_a_step_after_a_shorter_one(calls, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        samples = record.steps[1].micro_batches[0].samples[0].digests
        del samples[len(samples) * 2 // 3 :]
        record.facts.loaders["loader"].drop_last = True
    for rank in ranks:
        rank.steps[3].collectives = [(name, "train.py:11") for name in calls]
        scale(rank.steps[3].gradients, torch.tensor([1.0, 1.0, 1.5, 1.0]))
    both = Comparison(reference, ranks)
    assert [finding.kind for finding in several.findings(both) if finding.kind] == kinds
    assert ("gradients after it" in both.not_compared) == (not kinds)


def test_what_comes_after_a_step_whose_weights_are_not_kept_is_not_compared():
    (reference,), ranks = made_up(), made_up(2)
    reference.weights = {}
    scale(ranks[0].steps[1].gradients, 2.0)
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert "gradients" in both.compared
    assert "steps after 1" in both.not_compared


@pytest.mark.parametrize("is_exact", [True, False])
def test_running_statistics_of_one_process_are_a_mistake_only_where_exactness_is_promised(is_exact):
    (reference,), ranks = made_up(), made_up(2)
    reference.facts.is_exact = is_exact
    for rank, record in enumerate(ranks):
        record.steps[1].statistics = {"norm.running_mean": sampled(torch.ones(3) + rank)}
    (finding,) = several.findings(Comparison(reference, ranks))
    assert (finding.kind, finding.step) == ("statistics", 2) if is_exact else ("", None)
    assert "norm.running_mean: ranks 0 and 1" in finding.message


def test_a_checkpoint_that_nothing_loads_may_lack_the_optimizer():
    (reference,) = made_up()
    reference.facts.has_state = True
    reference.saves = [Save("torch.save", 2, "last.pt", "train.py:9", has={"model"}, counters=["epoch"])]
    (noted,) = single.findings(reference)
    assert noted.kind == ""
    assert noted.message == "last.pt has epoch, and not the optimizer and the schedule: the script cannot resume"
    reference.facts.loads = True
    assert [finding.kind for finding in single.findings(reference)] == ["checkpoint_lacks"]


def kinds_of_a_result(calls: list[str], samples=("ab", "ab")) -> list[str]:
    """What explains that two processes, with these collective calls and samples of each, print another accuracy."""
    (reference,), ranks = made_up(), made_up(2)
    reference.evaluations.append(evaluation(said=["accuracy 0.70"]))
    for rank, own in zip(ranks, samples, strict=True):
        test = evaluation(said=["accuracy 0.75"], collectives=[(call, "train.py:22") for call in calls])
        test.samples["test"] = [*own]
        rank.evaluations.append(test)
    both = Comparison(reference, ranks)
    return [explained(both, suspect).kind for suspect in suspects(both)]


@pytest.mark.parametrize(("cuts", "kind"), [(0, "eval_repeated"), (2, "eval_repeated"), (3, "eval_mean")])
def test_samples_count_twice_unless_gather_for_metrics_is_called_in_each_batch(cuts, kind):
    assert kinds_of_a_result(["gather", *["gather_for_metrics"] * cuts], ("ab", "ba")) == [kind]


def test_samples_that_the_processes_share_out_are_not_repeated():
    assert kinds_of_a_result(["gather"], ("a", "b")) == ["eval_mean"]


def test_evaluations_after_as_many_steps_are_compared():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.evaluations = [evaluation(after, said=[f"accuracy {after / 10}"]) for after in (2, 4)]
    assert suspects(Comparison(reference, ranks)) == []
    ranks[0].evaluations[1].said = ["accuracy 0.9"]
    assert [each.key for each in suspects(Comparison(reference, ranks))] == [(4, "accuracy")]


@pytest.mark.parametrize(("others", "kind"), [([], "eval_extreme"), (["gather"], "eval_mean")])
def test_an_extreme_is_named_only_where_nothing_is_added_up(others, kind):
    assert kinds_of_a_result(["all_reduce(MAX)", *others]) == [kind]


def test_what_happens_in_one_step_only_is_not_a_mistake():
    """No gradient, as where a loss is zero, and evaluation mode."""
    (reference,) = made_up()
    reference.steps[1].at_step = {}
    reference.evaluations.append(evaluation())
    reference.steps[2].modes = {0: False}
    assert list(single.findings(reference)) == []


OTHERS = {  # what no program of MISTAKES has: the kind and words of what is found in records of three processes
    "a gradient by 1 %": (
        ("factor", "1.01 times"),
        lambda one, ranks: [scale(rank.steps[2].gradients, 1.01) for rank in ranks],
    ),
    "a parameter": (
        ("unused", "weight has a gradient on 1 process only"),
        lambda one, ranks: [rank.steps[0].gradients.clear() for rank in ranks],
    ),
    "the same noise in a model": (
        ("", "randn draws the same"),
        lambda one, ranks: every_step(ranks, drawn=drawn("a", in_model=True)),
    ),
    "initial weights of the last rank": (
        ("initial_weights", "ranks 0 and 2 begin with different weights"),
        lambda one, ranks: scale(ranks[2].initial, 1.01),
    ),
    "clipped gradients of the last rank": (
        ("clipped", "ranks 0 and 2 have different gradients after clipping"),
        lambda one, ranks: scale(ranks[2].steps[1].at_step, 1.01),
    ),
    "clipped gradients of all ranks": (
        ("factor", "weight: 1.01 times what it is on 1 process, after clipping"),
        lambda one, ranks: [
            every_step([one, *ranks], clips=[(1, "train.py:9")]),
            *(scale(rank.steps[1].at_step, 1.01) for rank in ranks),
        ],
    ),
    "a factor of its own for each parameter": (
        ("gradient", "weight and 1 other: not a multiple of what it is on 1 process"),
        lambda one, ranks: [
            *(rank.steps[2].gradients.update(bias=2 * sampled(torch.ones(2))) for rank in ranks),
            one.steps[2].gradients.update(bias=sampled(torch.ones(2))),
            *(scale(rank.steps[2].gradients, 3.0) for rank in ranks),
        ],
    ),
    "weights before a step": (
        ("weights", "after the step before, rank 2 changes the weights by another amount"),
        lambda one, ranks: scale(ranks[2].steps[1].before, 1.01),
    ),
    "the state of the optimizer before a step": (
        ("weights", "after the step before, rank 1 changes the optimizer state by another amount"),
        lambda one, ranks: [
            *(rank.steps[2].state_before.update(weight=sampled(torch.ones(3))) for rank in (one, *ranks)),
            scale(ranks[1].steps[2].state_before, 1.01),
        ],
    ),
    "a group of processes that is not all": (
        ("not_reduced", "ranks 0 and 2 have different gradients at the step"),
        lambda one, ranks: scale(ranks[2].steps[0].gradients, 1.01),
    ),
    "a gradient that one process does not have": (
        ("not_reduced", "ranks 0 and 1 have different gradients at the step"),
        lambda one, ranks: ranks[1].steps[0].gradients.clear(),
    ),
    "the wrong micro-batch": (
        ("not_reduced", "averaged after micro-batch 1 of 2, and not after the last one"),
        lambda one, ranks: [
            scale(ranks[1].steps[0].gradients, 2.0),
            *(rank.steps[0].micro_batches.append(MicroBatch(syncs=False)) for rank in ranks),
        ],
    ),
    "a gradient that is divided after the backward pass": (
        ("factor", "0.5 times what it is on 1 process, and the loss is not"),
        lambda one, ranks: [scale(rank.steps[0].gradients, 0.5) for rank in ranks],
    ),
    "a sum by hand": (
        ("summed", "the processes' gradients are added up, and not divided by 3"),
        lambda one, ranks: [
            every_step([rank], own=dict(rank.steps[0].gradients), collectives=[("all_reduce", "train.py:9")])
            or [scale(step.gradients, 3.0) for step in rank.steps[:1]]
            for rank in ranks
        ],
    ),
    "weights that nothing is taken of": (
        ("loads_nothing", "all names differ, as that of module.weight"),
        lambda one, ranks: [
            vars(rank.facts).update(loads_nothing="train.py:4", lost="module.weight") for rank in ranks
        ],
    ),
    "DataParallel in each process": (
        ("data_parallel", "nn.DataParallel gives each process all GPUs"),
        lambda one, ranks: [setattr(rank.facts, "data_parallel", "train.py:4") for rank in ranks],
    ),
    "class weights of each process": (
        ("gradient", "not a multiple of what it is on 1 process: the weights of the classes in the loss differ"),
        lambda one, ranks: [
            setattr(ranks[2].steps[0].micro_batches[0], "class_weights", "others"),
            setattr(ranks[1].steps[0].micro_batches[0], "class_weights", "mine"),
            *(add(rank.steps[0].gradients, [0.0, 0.1, 0.0]) for rank in ranks),
        ],
    ),
    "labels of each process": (
        ("gradient", "the targets of the loss differ from those of the same samples on 1 process"),
        lambda one, ranks: [
            setattr(one.steps[0].micro_batches[0], "targets", {0: 1, 1: 2}),
            *(
                setattr(rank.steps[0].micro_batches[0], "targets", {label: 1})
                for rank, label in zip(ranks, (0, 0, 1), strict=True)
            ),
            *(add(rank.steps[0].gradients, [0.0, 0.1, 0.0]) for rank in ranks),
        ],
    ),
    "a buffer of each process": (
        ("gradient", "the buffer center differs, which each forward pass changes by its own samples"),
        lambda one, ranks: [
            *(setattr(rank.steps[0], "buffers", {"center": str(rank.rank // 2)}) for rank in (one, *ranks)),
            *(add(rank.steps[0].gradients, [0.0, 0.1, 0.0]) for rank in ranks),
        ],
    ),
    "a penalty times the batch": (
        ("gradient", "the difference is a multiple of the weights, as of a penalty that grows with the batch"),
        lambda one, ranks: [add(rank.steps[0].gradients, [0.1, 0.1, 0.1]) for rank in ranks],
    ),
    "workers that are seeded alike": (
        ("worker_seeds", "worker_init_fn gives the workers of each process the same numbers"),
        lambda one, ranks: [
            vars(rank.facts).update(draws_others=True, worker_seeds={"train.py:5": "a"}) for rank in ranks
        ],
    ),
    "weights after a step": (
        ("weights", "weight changes by another amount than on 1 process, from the same gradient"),
        lambda one, ranks: [
            rank.steps[1].weights.update(weight=sampled(torch.ones(3) - 0.105 * torch.tensor([2.0, 3.0, 4.0])))
            for rank in ranks
        ],
    ),
    "a loss that ReduceLROnPlateau gets": (
        ("plateau", "ReduceLROnPlateau gets 0.7 on rank 0 and 0.707 on rank 2"),
        lambda one, ranks: [
            rank.plateaus.append((loss, "train.py:9")) for rank, loss in zip(ranks, (0.7, 0.7, 0.707), strict=True)
        ],
    ),
    "the same augmentation": (
        ("", "the augmentation draws the same"),
        lambda one, ranks: [setattr(rank.facts, "draws_items", True) for rank in ranks],
    ),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_number_that_differs_in_one_place_is_found(change):
    (kind, words), apply = OTHERS[change]
    (reference,), ranks = made_up(), made_up(3)
    apply(reference, ranks)
    finding = found(reference, ranks)[0]
    assert (finding.kind, words in finding.message) == (kind, True), finding


@pytest.mark.parametrize(("same", "kinds"), [(3, ["same_noise"]), (2, [])])
def test_noise_is_the_same_only_if_it_is_in_each_of_three_steps_or_more(same, kinds):
    (reference,), ranks = made_up(), made_up(3)
    for rank in ranks:
        every_step([replace(rank, steps=rank.steps[:same])], drawn=drawn("a"))
    assert [finding.kind for finding in found(reference, ranks)] == kinds
    ranks[2].steps[same].drawn = drawn("after a batch of another length")
    assert [finding.kind for finding in found(reference, ranks)] == kinds
    ranks[2].steps[same - 1].drawn = drawn("another")
    assert found(reference, ranks) == []


@pytest.mark.parametrize(("own", "kinds"), [(9, []), (8, ["eval_share"])])
@pytest.mark.parametrize("calls", [[], [("all_reduce", "train.py:22")]])
def test_a_test_of_a_part_of_the_samples_is_told_unless_the_parts_are_added_up(own, kinds, calls):
    (reference,), ranks = made_up(), made_up(2)
    for record, samples in ((reference, 10), (ranks[0], own), (ranks[1], 10 - own)):
        test = evaluation(collectives=calls * (record.rank == 1))
        test.samples = {"loader": ["of training"] * 100, "test": [*map(str, range(samples))]}
        record.evaluations.append(test)
    assert [finding.kind for finding in share(Comparison(reference, ranks))] == kinds * (not calls)


@pytest.mark.parametrize("others", [0.5, 0.7])
def test_a_factor_of_gradients_with_noise_is_trusted_if_all_steps_have_it(others):
    (reference,), ranks = made_up(), made_up(2)
    every_step(ranks, drawn=drawn("a"))
    for rank in ranks:
        for number, step in enumerate(rank.steps):
            step.drawn = [Draw("train.py:8", "rand", f"{rank.rank} {number}", 1, is_per_sample=False)]
            scale(step.gradients, others if number else 0.5)
            step.at_step = step.gradients
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == ["factor"] * (others == 0.5)
    assert ("random numbers" in both.not_compared["gradients"]) == (others != 0.5)


def test_gradients_that_are_rounding_alone_are_no_finding():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps:
            values = [1e-8, 2e-8, 3e-8] if record is reference else [2e-8, 1e-8, 1e-8]
            step.gradients = step.at_step = {"weight": sampled(torch.tensor(values))}
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert both.not_compared["gradients"].startswith("they are rounding alone")


def test_batches_without_a_loader_are_compared_if_their_rows_can_be_told_apart():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders = {}
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert both.compared >= {"samples", "gradients"}
    for record, samples in ((reference, "aaaa01"), (ranks[0], "aa0"), (ranks[1], "aa1")):
        for number in range(4):
            digests_of(record, number).digests = [*samples]
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert not both.compared & {"samples", "gradients"}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["eval_share"]),
        ({"inputs": ["c", "a"]}, []),
        ({"said": ["loss 0.5"]}, []),
        ({"draws": True}, []),
        ({"collectives": [("all_reduce", "train.py:22")]}, []),
        ({"inputs": ["0", "a", "c"]}, []),  # a row of the training
    ],
)
def test_a_test_without_a_loader_is_of_all_processes_or_told_to_be_of_rank_0(changes, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record, rows in ((reference, "ab"), (ranks[0], "ac"), (ranks[1], "bd")):
        record.evaluations = [Evaluation(2, "train.py:20", inputs=[*rows], said=["loss 0.5"] * (record is ranks[0]))]
    vars(ranks[1].evaluations[0]).update(changes)
    assert [each.kind for each in share(Comparison(reference, ranks))] == kinds


def test_items_that_ignore_their_index_are_the_same_only_by_equal_generators():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.ignores_index = True
        for number in range(4):
            digests_of(record, number).digests = [str(6 * number + index) for index in range(6)]
        record.passes[0].random = f"state {record.rank}"
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert both.not_compared["samples"].startswith("its items are random numbers")
    ranks[1].passes[0].random = ranks[0].passes[0].random
    assert [each.kind for each in several.findings(Comparison(reference, ranks))] == ["all_the_data"]
    reference.steps += [replace(step) for step in reference.steps]
    for step in reference.steps[4:]:
        micro = step.micro_batches[0]
        step.micro_batches = [replace(micro, samples=[replace(micro.samples[0], number=1)])]
    assert [each.kind for each in single.findings(reference)] == []


def test_own_gradients_show_by_which_parts_of_a_sum_each_process_divides():
    (reference,), ranks = made_up(), made_up(2)
    own = [torch.tensor([float(rank), 1.0, *range(9)]) ** (rank + 1) for rank in range(2)]
    for rank, gradient in zip(ranks, own, strict=True):
        rank.steps[1].gradients = {"weight": sampled(gradient)}
    finding = Finding("gradient", "gradient", "not a multiple", 2, "train.py:9")
    for right, kind in ((0.25 * own[0] + 0.75 * own[1], "token_weights"), (own[0] + own[1], "gradient")):
        reference.steps[1].gradients = {"weight": sampled(right)}
        assert steps.with_cause(reference, ranks, finding).kind == kind
    plane = torch.linalg.qr(torch.stack(own, 1))[0]
    rest = right.sin() - plane @ (plane.T @ right.sin())
    reference.steps[1].gradients = {"weight": sampled(0.25 * own[0] + 0.75 * own[1] + 100 * rest)}
    assert steps.with_cause(reference, ranks, finding) == finding


def test_noise_of_a_sample_is_the_same_in_each_part_of_a_batch(tmp_path):
    recording, drawn = made_recording(tmp_path, processes=1), []
    for samples in (["a", "b", "c"], ["c", "a"], ["b"]):
        batch = Batch(Pass("loader"), samples)
        recording.batches.fresh, recording.step = [batch], Step()
        draws, rows = noise.Noise(recording), len(samples)
        shifts = torch.tensor([[ord(sample)] for sample in samples], dtype=torch.float)
        made = [
            draws.draw(torch.randn, "randn", (rows, 2), {}),
            draws.draw(torch.rand, "rand", (rows,), {"generator": torch.Generator().manual_seed(rows)}),
            draws.draw(torch.randint, "randint", (3, 9, (rows,)), {}),
            draws.draw(torch.randint_like, "randint_like", (torch.zeros(rows), 4), {}),
            draws.draw(torch.normal, "normal", (shifts, 0.5), {}),
            draws.draw(torch.bernoulli, "bernoulli", (shifts / 200,), {}),
            draws.draw(torch.Tensor.uniform_, "uniform_", (torch.empty(rows, 2), 5.0, 6.0), {}),
            draws.draw(torch.Tensor.exponential_, "exponential_", (torch.empty(rows),), {"lambd": 2.0}),
        ]
        assert [draw.is_repeated for draw in recording.step.drawn] == [True] * len(made)
        drawn.append([dict(zip(samples, numbers.tolist(), strict=True)) for numbers in made])
    for whole, *parts in zip(*drawn, strict=True):
        assert whole == parts[0] | parts[1]
        assert whole["a"] != whole["b"] or set(map(float, whole.values())) <= {
            0.0,
            1.0,
            2.0,
            3.0,
            4.0,
            5.0,
            6.0,
            7.0,
            8.0,
        }
    assert len({str(row) for row in drawn[0][0].values()}) == 3
    assert all(3 <= number < 9 for number in drawn[0][2].values())
    assert 90 < drawn[0][4]["a"][0] < 105
    assert all(5 <= each <= 6 for row in drawn[0][6].values() for each in row)
    state = torch.get_rng_state()
    first = draws.draw(torch.randn, "randn", (1,), {})
    torch.set_rng_state(state)
    assert torch.equal(draws.draw(torch.randn, "randn", (1,), {}), first), "as a checkpointed part draws again"
    assert not torch.equal(draws.draw(torch.randn, "randn", (1,), {}), first)
    draws.draw(torch.randn, "randn", (7, 2), {})
    assert not recording.step.drawn[-1].is_repeated


def test_numbers_for_a_single_sample_may_be_the_same():
    (reference,), ranks = made_up(), made_up(3)
    every_step(ranks, drawn=[Draw("train.py:8", "randn", "a", 1, is_per_sample=True)])
    assert found(reference, ranks) == []


@pytest.mark.parametrize("digests", ["aab", "abb", "abc"])
def test_noise_that_one_of_three_processes_shares_is_not_the_same_on_all(digests):
    (reference,), ranks = made_up(), made_up(3)
    for rank, digest in zip(ranks, digests, strict=True):
        every_step([rank], drawn=drawn(digest))
        rank.steps[1].drawn = drawn("equal in one step")
    assert found(reference, ranks) == []


def test_calls_that_agree_are_not_a_mistake():
    (reference,), ranks = made_up(), made_up(3)
    for rank in ranks:
        rank.plateaus += [(value, "train.py:9") for value in (0.7 + 1e-6 * rank.rank, float("nan"))]
        rank.saves += [save_state(), Save("torch.save", 2, "?", "train.py:9")]  # a file that is open already
        rank.facts.draws_items = True
        rank.passes[0].random = rank.rank
        rank.passes.append(replace(rank.passes[0], in_training=False, random="a"))
    assert found(reference, ranks) == []


def test_batches_that_the_script_makes_may_not_overlap():
    def kinds(last: list[str]) -> list[str]:
        (reference,), ranks = made_up(), made_up(2)
        for record in (reference, *ranks):
            record.facts.loaders["loader"].given = None
        for step, samples in zip(ranks[1].steps, (["0", "2", "4"], ["6", "8", "10"], last), strict=False):
            step.micro_batches[0].samples[0].digests = samples
        return [finding.kind for finding in found(reference, ranks)]

    assert kinds(["12", "14", "16"]) == ["samples"], "9 samples of both ranks, and a step has 6"
    assert kinds(["13", "15", "17"]) == [], "one step: the last one may be filled up"


# Runs that do not end


def interrupted(**of_ranks) -> list[Record]:
    ranks = made_up(2)
    for rank in ranks:
        rank.passes[0].is_whole = False
    ranks[1].error = "train.py:9: RuntimeError: gloo: Connection closed"
    ranks[1].doing = "in the backward pass at train.py:9"
    return ranks


def why(ranks: list[Record], calls=((), ())) -> tuple[str, str]:
    finding = unfinished.explain("the run", ranks, ranks[1].error, [], [list(each) for each in calls])
    return finding.kind, finding.message


def test_it_is_said_why_a_run_does_not_end():
    ranks = interrupted()
    assert why(ranks) == (
        "stops_alone",
        "rank 0 has ended after 4 steps, and rank 1 waits in the backward pass of train.py:9",
    )
    ranks[0].passes[0].is_whole = True
    assert why(ranks)[0] == "stops_alone", "an epoch has as many batches"
    ranks[0].passes[0].is_whole = False
    ranks[1].passes[0].batches = 5
    assert why(ranks)[0] == "stops_alone", "the epoch of rank 0 is not over"
    ranks[0].passes[0].is_whole = True
    assert why(ranks) == ("uneven", "an epoch has 4 batches on rank 0, and more on rank 1")
    ranks[1].passes[0].is_whole, ranks[0].passes[0].batches = True, 6
    assert why(ranks) == ("uneven", "an epoch has 5 batches on rank 1, and more on rank 0")
    ranks[1].unused, ranks[1].error = ["head"], "train.py:7: RuntimeError: Expected to have finished reduction"
    assert why(ranks)[0] == "unused"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("3 gather train.py:4 2x2", "shapes", "calls gather with a tensor of 2, and rank 1 with one of 2x2"),
        ("3 reduce train.py:5 2x2", "hangs", "after 3 steps rank 0 calls gather, and rank 1 does not"),
    ],
)
def test_a_call_with_another_shape_is_told_from_another_call(call, kind, words):
    ranks = made_up(2)
    ranks[1].error = "train.py:9: RuntimeError: gloo: Connection closed"
    found = why(ranks, [["3 gather train.py:4 2"], [call]])
    assert (found[0], words in found[1]) == (kind, True), found


@pytest.mark.parametrize("cause", [0, 1])
def test_the_cause_of_an_error_is_told_and_not_its_consequences(tmp_path, cause):
    def left(rank: int, error: str | None) -> None:
        torch.save(Record(rank, error=error, waits="in gather"), tmp_path / f"record_{rank}.pt")
        (tmp_path / f"log_{rank}.txt").write_text(f"of rank {rank}")

    def outcome(is_over: bool) -> Outcome:
        return runs.Runs._outcome(argparse.Namespace(timeout_s=60), tmp_path, 2, tmp_path, is_over)

    left(cause, "train.py:7: ValueError: no")
    left(1 - cause, "train.py:9: RuntimeError: Connection closed")
    assert (outcome(False).error, outcome(False).log) == ("train.py:7: ValueError: no", [f"of rank {cause}"])
    assert outcome(False).waits == []
    torch.save(Record(1 - cause), tmp_path / f"record_{1 - cause}.pt")
    (tmp_path / f"record_{cause}.pt").unlink()
    assert (outcome(False).error, outcome(False).log) == ("a process ended without a record", [f"of rank {cause}"])
    assert outcome(True).error == "it did not end in 60 s"
    (tmp_path / "died").write_text("6")  # SIGABRT, by which a library ends a process that has failed
    assert outcome(False).error == "a process ended without a record"
    (tmp_path / "died").write_text("11")
    with pytest.raises(CannotTell, match="on 2 processes one dies of SIGSEGV, in a library"):
        outcome(False)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: No CUDA GPUs are available",
        "train.py:3: AssertionError: Torch not compiled with CUDA enabled",
        "train.py:3: ImportError: libcudart.so.13: cannot open shared object file",
        "train.py:3: ModuleNotFoundError: No module named 'triton'",
        "train.py:3: RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
    ],
)
def test_an_error_about_gpus_is_known_by_its_words_and_not_by_its_place(error):
    assert proof.is_about_gpus(error)
    assert not proof.is_about_gpus("multi-gpu/train_gpu.py:3: ModuleNotFoundError: No module named 'multi_gpu'")
    assert not proof.is_about_gpus(None)


def verdict(ranks: list[Record], waits=(), is_strict: bool = True) -> tuple[int, str]:
    """The verdict on runs with these records, after one with a correct record of one process."""
    (reference,) = made_up()
    args = argparse.Namespace(
        script=Path("train.py"), format="json", processes=(2,), resume_flags=None, timeout_s=60, strict=is_strict
    )
    outcomes = [
        Outcome([reference], None, Path(), [], [], [[]]),
        Outcome(ranks, None, Path(), list(waits), [], [[], []]),
    ]

    def run(*_) -> Outcome:
        return outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]

    return proof.Proof(args, run, proof.Report(args)).verdict()


def test_a_wrong_evaluation_does_not_condemn_the_training():
    proven = proof.Proof(argparse.Namespace(processes=None), None, None)
    proven.compared = {"samples", "gradients"}
    finding = Finding("eval_repeated", "evaluation", "1 sample counted twice")
    words = "wrong: 1 sample counted twice (evaluation); in training, the same samples and gradients"
    assert proven.wrong([finding]) == (1, words)
    assert proven.wrong([finding, Finding("samples", "samples", "no")])[1] == words.partition(";")[0]


def draw_by_place(ranks: list[Record]) -> None:
    """Random numbers, and with them gradients, that are others than on one process."""
    for step in (step for rank in ranks for step in rank.steps):
        step.micro_batches[0].draws = True
        add(step.gradients, [1.0, 0.0, 0.0])
        step.at_step = step.gradients


def test_what_was_not_compared_is_not_proven():
    same = "the same samples, gradients, learning rates and weights on 1 and 2 processes"
    assert verdict(made_up(2)) == (0, f"proven: {same}")
    ranks = made_up(2)
    for rank in ranks:
        for step in rank.steps:
            step.micro_batches[0].draws = True
    assert verdict(ranks)[1] == f"proven: {same}", "random numbers that change nothing"
    draw_by_place(ranks)
    code, words = verdict(ranks)
    assert (code, words[:50]) == (3, "nothing wrong found; not compared: gradients; the ")


def test_what_was_not_compared_ends_with_3_only_if_asked():
    ranks = made_up(2)
    draw_by_place(ranks)
    for is_strict in (True, False):
        assert verdict(ranks, is_strict=is_strict)[0] == 3 * is_strict


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda ranks: scale(ranks[1].steps[0].gradients, 2.0), "not_reduced"),
        (lambda ranks: ranks[1].saves.extend(ranks[0].saves), ""),
        (lambda ranks: setattr(digests_of(ranks[1], 0), "digests", ["0", "2", "4"]), "local_rank"),
        (lambda ranks: vars(ranks[0].facts).update(asked=1, cannot_tell="it asks for 1 process"), "local_rank"),
    ],
)
def test_what_differs_only_on_several_machines_is_a_mistake_in_training(made_up_proof, change, kind):
    apart, on_one = made_up(3), made_up(3)
    for ranks in (apart, on_one):
        ranks[0].saves = [Save("torch.save", 2, "last.pt", "train.py:9")]
    change(apart)
    made = made_up_proof([Outcome(ranks, None, Path(), [], [], []) for ranks in (apart, on_one)])
    assert made._compare(3) == (not kind)
    findings = made.report.findings or made.report.notes
    assert findings[0].kind == kind
    assert "if each process has a machine of its own" in findings[0].message


def test_a_run_that_waits_is_wrong_only_if_steps_are_missing():
    assert verdict(made_up(2), ["rank 0 waits in gather at train.py:4"])[0] == 0
    code, words = verdict(made_up(2, steps=3), ["rank 0 waits in gather at train.py:4"])
    assert (code, "waits forever: rank 0 waits in gather at train.py:4" in words) == (1, True)


def test_another_error_is_not_explained_by_what_others_wait_for():
    ranks = interrupted()
    ranks[1].error = "train.py:9: ValueError: no"
    assert why(ranks, [["3 gather train.py:4 2"], []]) == ("fails", "train.py:9: ValueError: no")


def test_advice_is_given_in_the_terms_of_the_framework():
    assert "prepare" in mistakes.advice("all_the_data")
    assert "TrainingArguments" in mistakes.advice("schedule", "Trainer")
    assert mistakes.advice("schedule", "Lightning") == mistakes.advice("schedule")
    for framework in mistakes.FRAMEWORKS:
        assert any(mistakes.advice(heading, framework) != mistakes.advice(heading) for heading in mistakes.sections())


@pytest.mark.parametrize(("others", "bias"), [(1.0, 1e-9), (1e-4, 2e-8), (1e3, 1e-3)])
def test_a_parameter_whose_gradient_is_rounding_is_not_compared(others, bias):
    """As the key bias of attention with Adam, or a bias that adds the same to all choices of a tiny model."""
    (reference,), ranks = made_up(), made_up(2)
    for record, sign in ((reference, 1), *((rank, -1) for rank in ranks)):
        for step in record.steps:
            scale(step.gradients, others)
            scale(step.at_step, others)
            values = {"gradients": sign * bias, "at_step": sign * bias, "before": 0.0, "weights": -sign * 0.1}
            for kind, value in values.items():
                getattr(step, kind)["bias"] = sampled(torch.full((3,), value))
    assert found(reference, ranks) == []


def test_unequal_weights_of_tokens_are_not_told_again_as_different_weights():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        step = rank.steps[2]
        for kind in ("gradients", "at_step"):
            scale(getattr(step, kind), 1.5)
        step.weights["weight"] = sampled(torch.ones(3) - 0.1 * step.at_step["weight"][1:])
    ranks[1].steps[2].micro_batches[0].losses = [(2.0, 3, "train.py:8")]
    assert [finding.kind for finding in found(reference, ranks)] == ["token_weights"]


def test_a_process_without_samples_does_not_hide_unequal_weights_of_tokens():
    (reference,), ranks = made_up(), made_up(3)
    for rank, (samples, weight) in zip(ranks, ((3, 1.0), (3, 2.0), (0, 0.5)), strict=True):
        micro = rank.steps[2].micro_batches[0]
        micro.losses, micro.samples[0].digests = (
            [(weight, 3, "train.py:8")],
            [f"{rank.rank} {n}" for n in range(samples)],
        )
    ranks[2].steps[2].micro_batches[0].samples = []
    (finding,) = steps.findings(Comparison(reference, ranks))
    assert finding.kind == "token_weights"


@pytest.mark.parametrize(("count", "kinds"), [(3, ["token_weights"]), (1, [])])
def test_a_single_loss_may_have_a_weight_of_its_own(count, kinds):
    """As an advantage, by which the loss of a sample is multiplied."""
    (reference,), ranks = made_up(), made_up(2)
    for rank, weight in zip(ranks, (1.0, -0.9), strict=True):
        rank.steps[2].micro_batches[0].losses = [(weight, count, "train.py:8")]
    assert [finding.kind for finding in found(reference, ranks)] == kinds


def test_a_single_loss_that_is_a_mean_like_the_others_is_one_in_a_mean_of_means():
    (reference,), ranks = made_up(), made_up(2)
    for record, samples in ((reference, 3), (ranks[0], 2), (ranks[1], 1)):
        micro = record.steps[3].micro_batches[0]
        del micro.samples[0].digests[samples:]
        micro.losses = [(1.0, samples, "train.py:8")]
    said = [each.message for each in several.findings(Comparison(reference, ranks))]
    assert any("a sample of the smaller micro-batch weighs 2 times" in message for message in said), said


def test_a_schedule_that_is_twice_as_fast_is_found_though_milestones_may_be_rounded():
    (reference,), ranks = made_up(steps=8), made_up(2, steps=8)
    for number, step in (entry for rank in ranks for entry in enumerate(rank.steps)):
        step.rates, step.schedule_calls = [0.1 * 0.8 ** (2 * number)], 2 * number
    finding = found(reference, ranks)[0]
    assert (finding.kind, finding.step, finding.message[-34:]) == ("schedule", 3, ": the schedule is 2 times too fast")


def test_a_schedule_is_called_too_fast_only_where_two_steps_show_it():
    known = [1.0, 0.9, 0.5, 0.2, 0.1]
    assert steps.are_faster([1.0, 0.5, 0.1], known, 2, 2)
    assert not steps.are_faster([1.0, 0.5], known, 2, 2)


@pytest.mark.parametrize(
    ("number", "where"), [(2, "in the last step of an epoch"), (1, "where the micro-batches of a")]
)
def test_a_mean_of_means_is_told_where_it_is(number, where):
    (reference,), ranks = made_up(), made_up(2)
    micro_batches = [record.steps[number].micro_batches[0] for record in (reference, *ranks)]
    whole, larger, smaller = (micro.samples[0].digests for micro in micro_batches)
    last = smaller.pop()
    if number == 2:
        whole.remove(last)
    else:
        larger.append(last)
    for micro in micro_batches:
        micro.losses = [(1.0, len(micro.samples[0].digests), "train.py:8")]
    said = [each.message for each in several.findings(Comparison(reference, ranks))]
    assert [message.startswith(where) for message in said if "a mean of means" in message] == [True]


def test_a_group_of_parameters_may_be_added_while_training():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps[2:]:
            step.rates, step.bases = [*step.rates, 0.01], [0.1, 0.01]
    assert found(reference, ranks) == []
    ranks[1].steps[3].rates[1] = 0.02
    assert found(reference, ranks)[0].message == "group 1: a rate of 0.01 on rank 0 and of 0.02 on rank 1"


def test_two_loaders_that_a_library_makes_in_one_line_have_different_names():
    def make():
        return where.Where("/of/the/script").place()

    def for_training():
        return make()

    def for_testing():
        return make()

    names = [function() for function in (for_training, for_testing) for _ in range(2)]
    assert names[0] == names[1] != names[2] == names[3]


def test_loaders_of_one_line_are_told_apart_by_the_length_of_their_data(tmp_path):
    batches = made_recording(tmp_path).batches
    names = [batches.key(length) for _ in range(2) for length in (300, 100)]  # of two epochs
    assert names[0] == names[2] != names[1] == names[3]


@pytest.mark.parametrize("bases", [(0.0, 0.0), (0.1, 0.2)])  # without a scheduler, and with one
def test_a_warm_up_to_a_rate_that_grows_with_the_processes_may_be_meant(bases):
    (reference,), ranks = made_up(steps=6), made_up(2, steps=6)
    for factor, record in ((1, reference), (2, ranks[0]), (2, ranks[1])):
        for number, step in enumerate(record.steps):
            step.rates, step.bases = [0.1 * factor * number], [bases[factor - 1]]
    (said,) = {each.message for each in found(reference, ranks)}
    assert said.startswith("2 times as high on 2 processes")


def test_a_rate_may_grow_with_the_processes_and_fall_to_a_constant():
    (reference,), ranks = made_up(steps=6), made_up(2, steps=6)
    for highest, record in ((1.0, reference), (2**0.5, ranks[0]), (2**0.5, ranks[1])):
        for number, step in enumerate(record.steps):
            step.rates, step.bases = [highest + (0.1 - highest) * number / 5], [0.0]
    (said,) = {each.message for each in found(reference, ranks)}
    assert said.startswith("1.41 times as high on 2 processes")


def test_the_bits_of_gradients_are_compared_under_virtual_processes():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.virtual_processes = 6
    assert found(reference, ranks) == []
    for rank in ranks:
        scale(rank.steps[1].gradients, 1 + 1e-9)
    (finding,) = found(reference, ranks)
    assert finding.kind == "float_sums"
    assert "other bits than on 1 process, by up to 1.0e-09 of its value" in finding.message


def digests_of(rank: Record, step: int) -> Part:
    return rank.steps[step].micro_batches[0].samples[0]


@pytest.mark.parametrize(("kept", "repeated", "kinds"), [(1, 0, ["samples"]), (1, 1, ["samples"]), (3, 0, [])])
def test_a_part_made_by_hand_that_is_divided_once_more_is_found(kept, repeated, kinds):
    """Accelerate repeats samples to fill the last batch."""
    (reference,), ranks = made_up(), made_up(2)
    for record in ranks:
        record.facts.loaders["loader"].is_part = True
        for step in record.steps:
            del step.micro_batches[0].samples[0].digests[kept:]
    digests_of(ranks[1], 3).digests += digests_of(ranks[0], 0).digests[:repeated]
    assert [finding.kind for finding in several.findings(Comparison(reference, ranks)) if finding.kind] == kinds


def test_a_part_made_by_hand_with_samples_of_its_own_is_not_called_divided_twice():
    (reference,), ranks = made_up(), made_up(2)
    for record in ranks:
        record.facts.loaders["loader"].is_part = True
        for number in range(4):
            digests_of(record, number).digests = [f"{record.rank} {number}"] * (record.rank == 0 == number)
    comparison = Comparison(reference, ranks)
    assert list(several.findings(comparison)) == []
    assert "own part" in comparison.not_compared["samples"]


@pytest.mark.parametrize(("batch", "kinds"), [(None, []), (["a", "b", "c"], ["same_batches"])])
def test_batches_of_the_script_are_the_same_only_where_their_samples_are_known(batch, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders.clear()
        digests_of(record, 1).digests = batch
    assert [each.kind for each in several.findings(Comparison(reference, ranks)) if each.kind] == kinds


def test_parts_made_by_hand_count_twice_only_where_ranks_share_them():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        rank.facts.loaders["loader"].is_part = True
        for step in range(4):
            digests_of(rank, step).digests = [f"{rank.rank} {step} {number}" for number in range(3)]
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert "own part" in both.not_compared["samples"]
    assert "samples" not in both.compared
    for step in range(4):
        digests_of(ranks[1], step).digests = digests_of(ranks[0], 3 - step).digests
    (finding,) = found(reference, ranks)
    assert "12 of 24 samples of an epoch count twice" in finding.message


@pytest.mark.parametrize(
    ("length", "said"), [(24, []), (25, ["drop_last leaves out the last samples of the test data"])]
)
def test_samples_that_a_test_leaves_out_are_told(length, said):
    (record,) = made_up()
    record.facts.loaders["test"] = Loader("train.py:6", given=6, length=length, drop_last=True)
    record.evaluations.append(evaluation())
    assert [each.message for each in single.findings(record)] == said


def test_an_epoch_that_ends_early_and_begins_alike_has_the_same_order():
    (record,) = made_up(steps=7)
    for number, step in enumerate(record.steps[4:]):
        part = step.micro_batches[0].samples[0]
        part.number, part.digests = 1, digests_of(record, number).digests
    assert [each.kind for each in single.findings(record)] == ["same_order"]


def test_samples_that_one_process_does_not_read_do_not_count_twice():
    """As where each process has a part of its own, of any size, and the reference a part of them."""
    (reference,), ranks = made_up(), made_up(2)
    for step in range(4):
        digests_of(ranks[1], step).digests += [f"more {step} {number}" for number in range(6)]
    both = Comparison(reference, ranks)
    assert [finding for finding in several.findings(both) if finding.kind] == []
    assert "one process does not" in both.not_compared["samples"]
    digests_of(ranks[1], 0).digests += digests_of(ranks[0], 0).digests
    assert [finding.kind for finding in several.findings(Comparison(reference, ranks))][:1] == ["samples"]


def test_any_of_two_models_may_stay_in_evaluation_mode():
    (record,) = made_up()
    for number, step in enumerate(record.steps):
        step.modes = {0: True, 1: number < 2}
    assert [(each.kind, each.step) for each in single.findings(record)] == [("train_mode", 3)]


@pytest.mark.parametrize(("prefix", "notes"), [("_orig_mod.", 1), ("", 0)])
def test_names_of_a_compiled_model_are_a_note(prefix, notes):
    (reference,), ranks = made_up(), made_up(2)
    ranks[0].saves = [Save("torch.save", 2, "last.pt", "train.py:9", prefix=prefix)]
    assert [each.kind for each in found(reference, ranks)] == [""] * notes


@pytest.mark.parametrize(("missing", "kinds"), [(5, []), (6, ["samples"])])
def test_as_many_samples_as_a_batch_are_missing(missing, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        rank.facts.loaders["loader"].drop_last = True
    for number in range(missing):
        digests_of(ranks[number % 2], number // 2).digests.pop()
    assert [each.kind for each in found(reference, ranks)] == kinds


def test_the_process_is_named_that_tests_other_weights():
    (reference,), ranks = made_up(), made_up(3)
    for record in (reference, *ranks):
        record.evaluations.append(evaluation(said=[f"loss 0.{record.rank + len(ranks)}"]))
    reference.evaluations[0].said = ["loss 0.5"]
    ranks[2].evaluations[0].models = {1: 0.75}
    (suspect,) = suspects(Comparison(reference, ranks))
    finding = explained(Comparison(reference, ranks), suspect)
    assert (finding.kind, "on rank 2 than on rank 0" in finding.message) == ("eval_weights", True)


@pytest.mark.parametrize(("name", "prefix"), [("module.bias", "module."), ("bias", "")])
def test_a_prefix_is_one_of_all_names(name, prefix):
    assert files.described({"model": {"module.weight": torch.ones(1), name: torch.ones(1)}})["prefix"] == prefix


def test_a_number_that_is_none_is_only_equal_to_another_one():
    none, one = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])
    assert (differ(none, none), differ(one, one)) == (0.0, 0.0)
    assert (differ(none, one), differ(one, none)) == (torch.inf, torch.inf)


def test_the_step_from_which_on_a_model_trains_in_evaluation_mode_is_named():
    (record,) = made_up()
    for step in record.steps[2:]:
        step.modes = {0: False}
    (finding,) = single.findings(record)
    assert (finding.kind, finding.step) == ("train_mode", 3)


def test_of_two_windows_as_frequent_the_larger_is_the_usual_one():
    assert single.usual_micro_batches(accumulated([1, 3, 3, 1])) == 3


@pytest.mark.parametrize(("items", "kinds"), [(2, []), (1, ["eval_repeated"])])
def test_a_result_of_more_samples_than_the_data_have_is_told(items, kinds):
    (record,) = made_up()
    record.facts.loaders["test"] = Loader("train.py:6", items=items)
    record.evaluations.append(evaluation(result={"samples": 2.0}))
    assert [each.kind for each in single.findings(record)] == kinds


def test_the_usual_window_is_that_of_steps_within_an_epoch():
    record = accumulated([4, 7, 7])
    for step in record.steps[1:]:
        for micro in step.micro_batches[:3]:
            micro.samples[0].number = -1
    record.facts.loaders["loader"].length = 6 * 938
    assert single.usual_micro_batches(record) == 4
    assert "leftover" in [finding.kind for finding in single.findings(record)]


def test_an_epoch_that_the_script_ends_early_may_have_fewer_samples():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        del rank.steps[2:]
    assert "12 of 24 samples" in found(reference, ranks)[0].message
    for rank in ranks:
        rank.passes[0].is_whole = False
    assert found(reference, ranks) == []


def test_an_epoch_that_is_read_to_its_end_may_train_on_a_part():
    """As where a script counts its steps by its own size of batches."""
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        del rank.steps[2:]
        rank.passes[0].read = [[*map(str, range(24))]]
    assert found(reference, ranks) == []


def test_other_samples_may_be_left_out_of_the_last_batch():
    """As by a RandomSampler on one process, and a DistributedSampler on two."""
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders["loader"].drop_last, record.facts.loaders["loader"].items = True, 26
    digests_of(ranks[1], 2).digests = ["24", "25", "13"]
    assert found(reference, ranks) == []
    digests_of(ranks[1], 1).digests = ["other 1", "other 2", "other 3"]
    assert [finding.kind for finding in found(reference, ranks)] == ["items"]


@pytest.mark.parametrize(("key", "kinds"), [("loader", []), ("test", ["split"])])
def test_samples_that_a_teacher_has_seen_are_not_those_of_a_test(key, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders["loader"].drop_last, record.facts.loaders["loader"].items = True, 26
    digests_of(ranks[1], 2).digests = ["24", "25", "13"]
    reference.evaluations.append(evaluation())
    reference.evaluations[0].samples = {key: ["24", "25"]}
    assert [finding.kind for finding in found(reference, ranks)] == kinds


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ("accuracy: 74.00", "accuracy: 75.00", True),
        ("accuracy: 74.00", "accuracy: 74.01", False),
        ("loss 2.3286, 17/23", "loss 2.3286, 18/23", True),
        ("{'f1': 0.8135593220338984}", "{'f1': 0.8135593220338982}", False),
        ("accuracy: 74.00", "something else: 75.00", False),
        ("Acc@1:74 loss:0.52", "Acc@1:75 loss:0.52", True),
        ("1:53", "1:54", False),
        ("loss 0.5", "loss 0.52", False),
        ("time ( 0.25) accuracy 74.00", "time (250.31) accuracy 75.00", True),
        ("steps_per_second =  9.5", "steps_per_second = 11.5", True),
        (
            "2026-11-24 10:59:09,917 f1 0.5, eta 1 day, 0:00:01",
            "2026-11-24 11:00:10,004 f1 0.5, eta 1 day, 0:00:02",
            False,
        ),
    ],
)
def test_numbers_after_an_evaluation_may_differ_in_their_last_digit(one, other, differs):
    assert bool(list(differing([one], [other]))) == differs


def test_a_run_that_resumes_is_compared_with_one_that_was_not_interrupted():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    assert list(resuming.compare(whole, resumed, 2)) == []
    (replays,) = made_up()
    kinds = [finding.stage for finding in resuming.compare(whole, replays, 2)]
    assert kinds == ["resumed learning rate", "resumed samples"]
    resumed.steps[1].rates = [0.07]  # a schedule that began anew may have the same rate in its first step
    assert [finding.stage for finding in resuming.compare(whole, resumed, 2)] == ["resumed learning rate"]


def test_a_state_that_the_run_that_resumes_does_not_have_is_not_restored():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    whole.steps[2] = replace(whole.steps[2], state_before={"weight/exp_avg": sampled(torch.ones(3))})
    (finding,) = resuming.compare(whole, resumed, 2)
    assert (finding.stage, finding.message[:13]) == ("resumed optimizer", "weight/exp_av")


def test_the_first_gradient_of_a_run_that_resumes_is_compared_unless_random_numbers_are_drawn():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    scale(resumed.steps[0].gradients, 1.01)
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.stage == "resumed gradient"
    assert list(resuming.compare(whole, resumed, 2, has_gradients=False)) == []
    resumed.steps[0].micro_batches[0].draws = True
    assert list(resuming.compare(whole, resumed, 2)) == []


def test_the_epoch_of_a_run_that_resumes_is_compared():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = [replace(step) for step in resumed.steps[2:]]
    for number, record in enumerate((whole, resumed), 1):
        record.passes[0].epoch = number
    for step in whole.steps[2:]:
        step.micro_batches[0].samples[0].number = 1
    whole.passes.append(replace(whole.passes[0], number=1, epoch=1))
    assert list(resuming.compare(whole, resumed, 2)) == [], "the same samples"
    digests_of(resumed, 0).digests = [f"other {number}" for number in range(6)]
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.message == "the epoch has the order of epoch 2, and not of 1"
    digests_of(resumed, 0).digests = [str(number) for number in range(6)]
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.message == "the epoch after the checkpoint has the order of the first one"
    digests_of(resumed, 0).digests = [f"other {number}" for number in range(6)]
    resumed.passes[0].epoch = None
    assert [each.kind for each in resuming.compare(whole, resumed, 2)] == [""]


@pytest.mark.parametrize("kind", ["before", "state_before"])
def test_what_only_rank_0_has_loaded_is_told(kind):
    ranks = made_up(3)
    for rank in ranks:
        rank.steps[0].state_before = {"weight": sampled(torch.ones(3))}
    assert list(resuming.differing_ranks(ranks, False)) == []
    scale(getattr(ranks[2].steps[0], kind), 2.0)
    (finding,) = resuming.differing_ranks(ranks, False)
    assert (finding.kind, "ranks 0 and 2 begin with" in finding.message) == ("resume_alone", True)
    assert len(list(resuming.differing_ranks(ranks, True))) == (kind == "before"), "its state may be divided"
    ranks = made_up(2)
    for rank in ranks:
        rank.evaluations.append(evaluation())
    ranks[1].evaluations[0].models = {1: 0.7}
    (finding,) = resuming.differing_ranks(ranks, False)
    assert "the tested model has other weights on rank 1" in finding.message


def test_a_run_without_a_loader_that_resumes_is_compared():
    whole, resumed = made_up()[0], made_up()[0]
    for record in (whole, resumed):
        for step in record.steps:
            step.micro_batches[0].samples = [Part(None, None, ["a"])]
    resumed.steps = resumed.steps[2:]
    assert [each.kind for each in resuming.compare(whole, resumed, 2)] == []


def test_weights_and_the_state_of_the_optimizer_are_taken_over():
    parameters, state = [torch.zeros(2)], {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}
    load_shared(parameters, [state], [torch.ones(2)], [{"exp_avg": torch.full((2,), 3.0), "step": torch.tensor(7.0)}])
    assert parameters[0].tolist() == [1, 1]
    assert (state["exp_avg"].tolist(), state["step"].item()) == ([3, 3], 7)


def test_random_items_are_the_same_in_each_process_and_told_as_random():
    class Random(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(3)

    fetcher = argparse.Namespace(auto_collation=True, dataset=Random(), collate_fn=list)
    state = torch.get_rng_state()
    tag, items, digests, is_random = same_work.fetch_with_digests(fetcher, [0, 1])
    assert is_random == {"draws_items", "ignores_index"}
    fetcher.dataset.__class__.__getitem__ = lambda _, index: torch.rand(3) + index
    del fetcher.has_read_twice
    assert same_work.fetch_with_digests(fetcher, [0, 1])[3] == {"draws_items"}
    fetcher.dataset.__class__.__getitem__ = lambda *_: torch.rand(3)
    assert tag == same_work.TAG
    torch.rand(5)
    again = argparse.Namespace(auto_collation=True, dataset=Random(), collate_fn=list)
    assert same_work.fetch_with_digests(again, [0, 1])[2] == digests
    assert torch.equal(same_work.fetch_with_digests(fetcher, [1])[1][0], items[1])
    torch.set_rng_state(state)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
