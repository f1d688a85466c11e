"""prove_training: correct programs pass, and each mistake is named.

Programs in the style of others, and the mistakes that somebody has made in them, are in foreign/. They run as the
command runs them, in processes that are forked from this one.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT

from prove_training import imports, mistakes, proof
from prove_training.stages import Note
from prove_training.tensors import sampled
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


RESUMES = {"own_trainer": "--resume", "ddp_series": "", "accelerate_cv": "--resume_from_checkpoint checkpoints/epoch_0"}


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
        print(text)  # so that pytest shows the program if the test fails
        assert [entry.name for entry in folder.iterdir()] == [name]
        assert (folder / name).read_text() == text
        lines = out.splitlines()
        return Said(code, out, lines[-1], [line for line in lines if line.startswith("what to do: ")])

    return prove_it


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
    claimed = said.verdict.rpartition("the same ")[2]
    assert ("evaluations" in claimed) == (program not in ("nanogpt", "ddp_series", "hsdp"))
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
def test_a_mistake_between_the_replicas_of_hsdp_is_named(prove_it, old):
    new, words = BETWEEN_REPLICAS[old]
    mesh = "(2, 2)" if old.startswith("mesh") else "(world // 2, 2)"
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
    assert said.code == (3 if "not compared" in NOTED[name] else 0), said.text
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
    "coin_for_a_batch": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "batches_by_position": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "asks_for_its_group": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "replaces_its_streams": (2, "fails: on one process, replaces_its_streams.py:16: ValueError: no data"),
    "counts_integers_on_the_gpu": (0, "proven: the same samples, gradients, learning rates and weights on"),
    "gpu_with_a_launcher": (0, "proven: the same samples, gradients, learning rates and weights on"),
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
