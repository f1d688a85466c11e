"""The bookkeeping of a run, in scripts as users write them."""

import argparse
import contextlib
import functools
import itertools
import math
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import run_many
import torch
from run_reader import lines, summary, weights
from torch import nn
from torch.utils.data import TensorDataset

from utils import launch, progress
from utils.best import Best
from utils.failures.signals import EXIT_REQUEUE
from utils.loader import GlobalLoader
from utils.parallel import same_state
from utils.run import Run


def arguments(folder, **changes):
    given = {"output_dir": str(folder), "batch_size": 10, "seed": 0, "log_every": 2}
    return argparse.Namespace(**{**given, **changes})


def data(length, seed=0):
    inputs = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Script:
    """A user's script, with 4 steps per epoch. What a test changes:

    Args:
        results: by step, what the test finds beside loss and bias.
        stop_at: (step, "step" or "test"): a signal there.
        leave_at: a `break` after so many micro-batches.
        accumulates: whether it says `accelerator.accumulate`.
        logs: whether it says `run.log_train`.
        rates: one Adam, or with two of them an SGD each for the weight and the bias of a single layer.
        gradient_scale: of the weight; the gradients are clipped.
        norm: a layer of the model.
    """

    epochs, has_test, results, stop_at, leave_at, accumulates, logs = 6, True, {}, None, None, True, True
    rates, gradient_scale, norm = (0.01,), None, nn.Identity

    def __init__(self, **changes):
        vars(self).update(changes)

    def begin(self, args):
        accelerator = launch.make_accelerator(args, cpu_threads=1)
        self.run = Run(accelerator, args)
        return accelerator, self.run, GlobalLoader(data(36), args.batch_size, accelerator, seed=args.seed)

    def build(self, accelerator):
        if len(self.rates) == 1:
            model = nn.Sequential(nn.Linear(3, 4), self.norm(4), nn.Dropout(0.1), nn.Linear(4, 1))
            optimizers = [torch.optim.Adam(model.parameters(), self.rates[0], fused=True)]
        else:
            model = nn.Linear(3, 1)
            optimizers = [
                torch.optim.SGD([each], rate) for each, rate in zip(model.parameters(), self.rates, strict=True)
            ]
        if self.gradient_scale:
            model[0].weight.register_hook(lambda gradient: gradient * self.gradient_scale)
        return accelerator.prepare(model, *optimizers)

    def __call__(self, args):
        accelerator, run, train_loader = self.begin(args)
        test_loader = GlobalLoader(data(7, seed=1), 3, accelerator) if self.has_test else None
        model, *optimizers = self.build(accelerator)
        named = dict(zip(("optimizer", "bias_optimizer"), optimizers, strict=False))
        run.start(train_loader, test_loader, self.epochs * 4, checkpoint={"model": model, **named})
        taken = 0
        for epoch in run.epochs():
            model.train()
            for batch in run.batches(train_loader, epoch):
                inputs, targets = batch.data
                with accelerator.accumulate(model) if self.accumulates else contextlib.nullcontext():
                    losses = (model(inputs) - targets).square().squeeze(1)
                    accelerator.backward(batch.mean_loss(losses))
                    if self.gradient_scale:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                if self.logs:
                    run.log_train(batch, loss=losses)
                self.stop_if(run.step + 1, "step")
                taken += 1
                if taken == self.leave_at:
                    break
            if self.has_test:
                self.test(model, test_loader)
        run.summary["parameters"] = 4
        run.finish()

    def test(self, model, test_loader):
        model.eval()
        metrics = self.run.new_metrics()
        for batch in self.run.test_batches(test_loader):
            inputs, targets = batch.data
            with torch.no_grad():
                error = (model(inputs) - targets).squeeze(1)
            metrics.add(batch, loss=error.square(), bias=-error.abs())
            self.stop_if(self.run.step, "test")
        self.run.log_test({**metrics.reduce(), **self.results.get(self.run.step, {})})

    def stop_if(self, *place):
        if self.stop_at == place:
            self.run.stop_signal.received = 15
            self.stop_at = None


Small = functools.partial(Script, epochs=1, has_test=False, logs=False)


@pytest.fixture
def start(tmp_path):
    """Runs a script in tmp_path/<folder>; returns its exit code."""

    def start(script, folder="run", **changes):
        try:
            script(arguments(tmp_path / folder, **changes))
            return None
        except SystemExit as stopped:
            return stopped.code
        finally:
            if hasattr(script, "run"):
                script.run.folder.lock.close()
                script.run.stop_signal.received = None  # a process that a signal stops has no further run
            for thread in threading.enumerate():
                if thread.name == "checkpoint":  # the end of a process waits for it
                    thread.join()
            run_many.reset_accelerate()

    return start


# Best at step 8; three tests without a better one after it: at 12, 16 and 20.
SCORES = {4: 0.5, 8: 0.9, 12: 0.2, 16: 0.8, 20: 0.9, 24: 1.0}
RESULTS = {step: {"score": score, "f1": score, "confusion": [[1]]} for step, score in SCORES.items()}


# --- the best result, and patience ------------------------------------------------------------


def test_the_best_model_is_kept_beside_the_last(start, tmp_path):
    """Its patience ends in its last test, so it did not stop early."""
    assert start(Script(results=RESULTS, epochs=5), save_best="max:score", patience=3) is None
    assert start(Script(results=RESULTS, epochs=2), "short") is None
    run = tmp_path / "run"
    best, last, at_step_8 = weights(run, "model_best"), weights(run), weights(tmp_path / "short")
    assert all(torch.equal(best[name], tensor) for name, tensor in at_step_8.items())
    assert not all(torch.equal(best[name], tensor) for name, tensor in last.items())
    found = summary(run)
    assert (found["best_score"], found["best_step"], found["test_score"]) == (0.9, 8, 0.9)
    assert (found["step"], found["stopped_early"]) == (20, False)
    assert not (tmp_path / "short" / "model_best.safetensors").exists()


def test_patience_ends_the_run_with_all_that_a_run_leaves(start, tmp_path, capsys):
    flags = {"save_best": "max:score", "patience": 3, "checkpoint_every": 3}
    assert start(Script(results=RESULTS), **flags) is None
    assert "stopped early: 3 tests in a row without a better score" in capsys.readouterr().out
    found = summary(tmp_path / "run")
    assert (found["step"], found["stopped_early"], found["best_step"]) == (20, True, 8)
    assert (found["test_f1"], found["test_confusion"], "best_f1" in found) == (0.9, [[1]], False)
    tests = [(line["step"], line["epoch"]) for line in lines(tmp_path / "run", "test")]
    assert tests == [(4, 1), (8, 2), (12, 3), (16, 4), (20, 5)]
    # Resumed, it knows that it is complete: its last step was saved, whatever --checkpoint_every says.
    assert start(Script(results=RESULTS), **flags, resume=True) is None
    assert "the run stopped early, after 20 steps: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stop_at", "checkpoint_every"), [((3, "step"), 0), ((8, "test"), 3), ((10, "step"), 3), ((20, "test"), 0)]
)
def test_resumed_in_the_middle_it_keeps_the_same_best_and_stops_at_the_same_step(
    start, tmp_path, stop_at, checkpoint_every
):
    flags = {"save_best": "max:score", "patience": 3, "checkpoint_every": checkpoint_every}
    assert start(Script(results=RESULTS), "whole", **flags) is None
    assert start(Script(results=RESULTS, stop_at=stop_at), **flags) == EXIT_REQUEUE
    assert start(Script(results=RESULTS), resume=True, **flags) is None
    whole, run = tmp_path / "whole", tmp_path / "run"
    for name in ("model.safetensors", "model_best.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    assert (run / "metrics.jsonl").exists()
    for split in ("train", "test"):
        assert lines(run, split) == lines(whole, split)
    for name in ("step", "best_step", "best_score", "stopped_early", "test_loss"):
        assert summary(run)[name] == summary(whole)[name]


def test_killed_between_the_last_test_and_the_end_nothing_counts_twice(start, tmp_path, monkeypatch):
    flags = {"save_best": "max:score", "patience": 3, "checkpoint_every": 3}
    assert start(Script(results=RESULTS), "whole", **flags) is None
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", lambda run: (run.checkpoints.wait(), sys.exit(9)))
        assert start(Script(results=RESULTS), **flags) == 9
    assert start(Script(results=RESULTS), resume=True, **flags) is None
    for split in ("train", "test"):
        assert lines(tmp_path / "run", split) == lines(tmp_path / "whole", split)
    assert summary(tmp_path / "run")["step"] == 20


def test_a_flag_of_the_script_must_be_the_same_when_resuming_unless_it_may_change(start, capsys):
    assert start(Script(stop_at=(6, "step")), noise=0.1, prompt="a", may_change=["prompt"]) == EXIT_REQUEUE
    assert start(Script(), resume=True, noise=0.2, prompt="b", may_change=["prompt"]) == 2
    assert "with different arguments: noise was 0.1 and is 0.2\n" in capsys.readouterr().err
    options = {"noise": 0.1, "prompt": "b", "may_change": ["prompt"], "log_every": 3, "num_workers": 1}
    assert start(Script(), resume=True, **options) is None


def test_an_unknown_metric_is_named_beside_those_of_the_test(start, capsys):
    assert start(Script(), save_best="max:recall") == 2
    assert "--save_best recall needs the metric recall, but the test has loss, bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("save_best", "values", "expected"),
    [
        (None, [2.0, 1.0, 3.0], {"best_loss": 1.0, "best_step": 1}),
        ("dice_loss", [2.0, 1.0, 1.0], {"best_dice_loss": 1.0, "best_step": 1}),
        ("min:r2", [0.0, -1.0], {"best_r2": -1.0, "best_step": 1}),
        ("max:recall@5", [0.5, 0.9, 0.9], {"best_recall@5": 0.9, "best_step": 1}),
        ("max:bias", [-2.0, -1.0, -3.0], {"best_bias": -1.0, "best_step": 1}),
        ("max:loss", [math.nan, 0.5, math.nan], {"best_loss": 0.5, "best_step": 1}),
        ("max:score", [math.nan, math.nan], {}),
    ],
)
def test_the_best_value_is_the_first_of_the_smallest_or_the_largest_and_never_nan(save_best, values, expected):
    best = Best(save_best, patience=2)
    for step, value in enumerate(values):
        best.add({best.monitor: value}, step)
    assert best.summary() == expected
    assert best.is_stuck(shows=False) is (len(values) - expected.get("best_step", -1) > 2)


@pytest.mark.parametrize("metric", ["ppl", "accuracy", "error", "loss_2", "lossless", "mean:x", "min:", "max:"])
def test_a_metric_that_does_not_say_which_value_is_best_is_refused_before_there_is_a_folder(
    start, tmp_path, capsys, metric
):
    assert start(Script(), save_best=metric, patience=1) == 2
    assert f"min:{metric} or max:{metric}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_result_of_rank_0_decides_on_every_rank(start, tmp_path, monkeypatch):
    """Here: on a rank whose own scores, which differ by rounding, would stop the run at step 12."""
    scores = iter([0.5, 0.50000002, 0.4, 0.3])
    monkeypatch.setattr("utils.run.same_result", lambda mine: {**mine, "score": next(scores)})
    own = {step: {"score": score} for step, score in ((4, 0.5), (8, 0.5), (12, 0.4), (16, 0.3))}
    assert start(Script(results=own), save_best="max:score", patience=2) is None
    found = summary(tmp_path / "run")
    assert (found["step"], found["best_step"], found["best_score"]) == (16, 8, 0.50000002)


def test_what_a_checkpoint_gets_of_the_best_results_is_not_changed_by_later_ones():
    best = Best("max:score")
    best.add({"score": 1.0}, 4)
    state = best.state()
    best.add({"score": 2.0}, 8)
    assert state == {"best": [1.0, 4], "tests_since_best": 0}


# --- the smallest runs ------------------------------------------------------------------------


def test_a_run_without_metrics_and_without_a_test(start, tmp_path, capsys):
    assert start(Small(), batch_size=5, log_every=3) is None  # ends in the middle of an epoch
    assert "done: 4 steps in " in capsys.readouterr().out
    assert (summary(tmp_path / "run")["step"], summary(tmp_path / "run")["parameters"]) == (4, 4)
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [3, 4]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_logged_loss_that_is_not_finite_gets_into_no_checkpoint(start, tmp_path, monkeypatch, capsys):
    """The weights stay finite, and the next log line comes after the checkpoint."""
    log_train = Run.log_train
    monkeypatch.setattr(
        Run, "log_train", lambda run, batch, loss: log_train(run, batch, loss=loss, x_loss=loss * math.nan)
    )
    assert start(Small(logs=True), log_every=4, checkpoint_every=1) == 2
    assert "the x_loss is not finite in step 1" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("flags", [{}, {"log_every": 4, "checkpoint_every": 2}])
def test_gradients_that_are_not_finite_end_the_run_at_its_next_line_or_checkpoint(start, tmp_path, capsys, flags):
    """The losses are finite: a fused step leaves the weights as they are."""
    assert start(Small(gradient_scale=math.inf, logs=True), **flags) == 2
    assert "the norm of the gradients is not finite in step 1: " in capsys.readouterr().err
    assert lines(tmp_path / "run", "train") == []
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_states_are_compared_in_the_first_step_of_a_launch_alone(start, monkeypatch):
    """With one micro-batch per step never: each comparison would wait for a GPU."""
    compared = []
    monkeypatch.setattr(same_state, "sum_bits", lambda _, tensors: compared.append(tensors) or {})
    assert start(Small()) is None
    assert len(compared) == 1  # of objects, when the run starts
    assert start(Small(), folder="other", gradient_accumulation_steps=2) is None
    assert len(compared) == 1 + 1 + 4 * 2  # as each begins and ends, before and after its backward pass


@pytest.mark.parametrize(("leave_at", "code"), [(1, 2), (2, None)])
def test_a_run_that_ends_before_its_last_step_says_so(start, tmp_path, capsys, leave_at, code):
    """An own `break` after a test is as good as --patience, but a loop over the loader itself makes no steps."""
    assert start(Small(leave_at=leave_at)) == code
    captured = capsys.readouterr()
    assert f"the run ends at step {leave_at - 1} of 4: " in captured.out + captured.err
    assert (tmp_path / "run" / "model.safetensors").exists() == (code is None)


# --- resuming, and what a loop draws ----------------------------------------------------------


def test_a_run_that_the_launcher_restarted_resumes(start, monkeypatch):
    assert start(Small(stop_at=(1, "step"))) == EXIT_REQUEUE
    assert start(Small()) == 2  # the folder holds a run
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(Small()) is None


def test_the_watchdog_counts_the_micro_batches_of_training_and_tests_and_nothing_after_the_run(start, monkeypatch):
    counted, seed_model = [], Run._seed_model

    def count(run, *args, **kwargs):
        seed_model(run, *args, **kwargs)
        counted.append(run.accelerator.micro_batches)

    monkeypatch.setattr(Run, "_seed_model", count)
    script = Script(epochs=2)
    assert start(script) is None
    assert counted == [*range(1, 2 * (4 + 3) + 1)]  # 4 steps and 3 batches of the test per epoch
    assert script.run.accelerator.micro_batches == 0


def test_a_learning_rate_for_each_optimizer(start, tmp_path):
    assert start(Small(rates=(0.01, 0.02), logs=True)) is None
    for line in lines(tmp_path / "run", "train"):
        assert (line["optimizer_lr"], line["bias_optimizer_lr"]) == (0.01, 0.02)
        assert "lr" not in line
    assert start(Small(logs=True), "one") is None
    assert lines(tmp_path / "one", "train")[0]["lr"] == 0.01


class Drawing(Script):
    """Draws at the start of each epoch, in its micro-batches, in its test and after it; a normal number, too, which is
    drawn in pairs.

    Args:
        before: how many numbers it draws after each of these, for the next ones to differ.
        in_steps: the loop takes all micro-batches of a step at once.
    """

    before, in_steps = 0, False

    def draw(self, *place):
        on_gpus = [torch.rand((), generator=generator).item() for generator in self.run.devices]
        self.drawn[place] = torch.rand(()).item(), random.gauss(0, 1), np.random.randn(), *on_gpus
        for _ in range(self.before):
            torch.rand(()), random.random(), np.random.random()

    def __call__(self, args):
        self.drawn = {}
        accelerator, run, train_loader = self.begin(args)
        test_loader = GlobalLoader(data(7), 3, accelerator)
        run.start(
            train_loader, test_loader, self.epochs * 4, checkpoint={"model": accelerator.prepare(nn.Linear(3, 1))}
        )
        for epoch in run.epochs():
            self.draw("start", epoch)
            steps = map(run.seeded, run.steps(train_loader, epoch))
            for batches in steps if self.in_steps else zip(run.batches(train_loader, epoch)):
                for batch in batches:
                    with accelerator.accumulate(nn.Identity()):
                        self.draw("step", run.step, batch.micro_step)
                    self.stop_if(run.step + 1, "step")
            for number, _ in enumerate(run.test_batches(test_loader)):
                self.draw("test", epoch, number)
            self.draw("end", epoch)
            run.log_test({})
        run.finish()


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, 18), ({"gradient_accumulation_steps": 2}, 26), ({"virtual_processes": 3}, 46)]
)
def test_what_a_loop_draws_depends_on_its_place_in_the_run_and_not_on_what_was_drawn_before(start, flags, expected):
    first, second, steps = (Drawing(epochs=2, **each) for each in ({}, {"before": 3}, {"before": 3, "in_steps": True}))
    assert start(first, "first", **flags) is start(second, "second", **flags) is start(steps, "steps", **flags) is None
    assert first.drawn == second.drawn == steps.drawn
    # Start, 4 steps, 3 batches of a test and end of each of 2 epochs; each micro-batch draws numbers of its own.
    assert [len(set(numbers)) for numbers in zip(*first.drawn.values(), strict=True)] == [expected] * 3


@pytest.mark.parametrize("dropout", [0.5, 0])
@pytest.mark.parametrize("phases", [[True], [True, True], [False], [True, False]])
def test_a_phase_that_draws_and_is_not_seeded_is_a_warning(start, capsys, phases, dropout):
    def main(args):
        accelerator = launch.make_accelerator(args, cpu_threads=1)
        run = Run(accelerator, args)
        loader = GlobalLoader(data(36), args.batch_size, accelerator, seed=args.seed)
        model = accelerator.prepare(nn.Sequential(nn.Dropout(dropout), nn.Linear(3, 1)))
        run.start(loader, None, 4, checkpoint={"model": model})
        for epoch in run.epochs():
            for batches in run.steps(loader, epoch):
                for is_seeded in phases:
                    for batch in run.seeded(batches) if is_seeded else batches:
                        with accelerator.accumulate(model):
                            accelerator.backward(batch.mean_loss(model(batch.data[0]).squeeze(1)))
        run.finish()

    assert start(main, gradient_accumulation_steps=2) is None
    is_said = "are drawn outside of run.seeded(batches)" in capsys.readouterr().out
    assert is_said is (dropout > 0 and not all(phases))


@pytest.mark.parametrize(("step", "in_steps"), [(2, False), (4, False), (7, False), (12, False), (2, True)])
def test_what_a_script_draws_is_the_same_when_resumed(start, monkeypatch, step, in_steps):
    gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr("utils.run.device_generators", lambda accelerator: gpus)
    whole, stopped, resumed = (Drawing(epochs=3, in_steps=in_steps) for _ in range(3))
    assert start(whole, "whole") is None
    stopped.stop_at = step, "step"
    assert start(stopped) == EXIT_REQUEUE
    for generator in (torch.default_generator, *gpus):
        generator.manual_seed(1)
    assert start(resumed, resume=True) is None
    assert resumed.run.step == 12
    assert resumed.drawn == {place: whole.drawn[place] for place in resumed.drawn}
    assert len(resumed.drawn) >= 2
    assert [len(set(numbers)) for numbers in zip(*whole.drawn.values(), strict=True)] == [12 + 3 * 5] * 5


# --- mistakes of a loop -----------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 5])
def test_accumulate_that_was_forgotten_is_an_error(start, accumulation):
    with pytest.raises(RuntimeError, match="gradient accumulation is out of step"):
        start(Small(accumulates=False), gradient_accumulation_steps=accumulation)


def test_accumulate_once_per_step_instead_of_once_per_micro_batch_is_an_error(start):
    def main(args):
        accelerator, run, loader = Script().begin(args)
        run.start(loader, None, 4, checkpoint={})
        for _ in run.steps(loader, epoch=0):
            with accelerator.accumulate(nn.Identity()):
                pass

    with pytest.raises(RuntimeError, match="gradient accumulation is out of step"):
        start(main, gradient_accumulation_steps=2)


def test_without_accumulation_steps_accumulate_may_be_left_out(start):
    assert start(Small(accumulates=False)) is None


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 2), (2, 1)])
def test_what_goes_on_with_other_numbers_when_resuming_is_a_warning(start, monkeypatch, capsys, before, now):
    """Dropout and BatchNorm depend on the micro-batches of a step, and all numbers on the code."""
    code = {"train.py": "a", "utils/loader.py": "b", "utils/old.py": "c"}
    monkeypatch.setattr("utils.run.code_digests", lambda: code)
    assert start(Script(stop_at=(6, "step")), gradient_accumulation_steps=before) == EXIT_REQUEUE
    assert "warning" not in capsys.readouterr().out
    if now != before:
        code = {"train.py": "d", "utils/loader.py": "b", "utils/new.py": "e"}
    assert start(Script(), resume=True, gradient_accumulation_steps=now) is None
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    if now == before:
        assert warnings == []
    else:
        had = f"{before} micro-batch{'es' * (before > 1)}"
        assert warnings[0].startswith(f"warning: a step had {had} and now has {now}: random numbers in the model")
        assert warnings[1:] == ["warning: changed since the checkpoint was saved: train.py, utils/new.py, utils/old.py"]


# --- data that changed ------------------------------------------------------------------------


class TwoLoaders(Script):
    """Reads a second loader in each step."""

    count, batch_size, late, order = 50, 20, False, staticmethod(torch.randperm)

    def __call__(self, args):
        accelerator, run, loader = self.begin(args)
        options = {"seed": args.seed, "name": "other", "order": lambda epoch: self.order(self.count)}
        make = functools.partial(GlobalLoader, data(self.count), self.batch_size, accelerator, **options)
        other = None if self.late else make()
        run.start(loader, None, 8, checkpoint={"model": accelerator.prepare(nn.Linear(3, 1))})
        others = (other or make()).from_step(run.step)
        self.read = {}
        for epoch in run.epochs():
            for _ in run.batches(loader, epoch):
                self.read[run.step] = next(others).indices.tolist()
                self.stop_if(run.step + 1, "step")
        run.finish()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"count": 51}, "data.other was 50 and is 51"),
        ({"batch_size": 25}, "other_loader.batch_size was 20 and is 25"),
        ({"order": torch.arange}, "data.other_order was"),
        ({"late": True}, "make it before run.start"),
    ],
)
def test_a_second_loader_is_part_of_the_run(start, capsys, changed, said):
    whole, first, resumed = TwoLoaders(), TwoLoaders(stop_at=(2, "step")), TwoLoaders(**changed)
    assert start(first) == EXIT_REQUEUE
    options = {"folder": "late"} if resumed.late else {"resume": True}
    assert start(resumed, **options) == (2 if said else None)
    assert said in capsys.readouterr().err
    if not said:
        assert start(whole, "whole") is None
        assert first.read | resumed.read == whole.read
        assert len(set(itertools.chain(*list(whole.read.values())[:3]))) == 50  # an epoch of the second loader


# --- numbers of steps, and complete runs ------------------------------------------------------


def test_batch_norm_needs_micro_batches_of_one_size(start, capsys):
    script = Small(norm=nn.BatchNorm1d)
    assert start(script, "even", gradient_accumulation_steps=2) is None
    assert start(script, "odd", gradient_accumulation_steps=2, batch_size=9) == 2
    assert "--batch_size 9 is not divisible by 2 micro-batches, and the model has BatchNorm" in capsys.readouterr().err


@pytest.mark.parametrize("epochs", [0, -1, 0.625, math.inf])
def test_a_number_of_steps_at_which_no_step_would_be_the_last_is_refused(start, tmp_path, epochs):
    with pytest.raises(ValueError, match="total_steps must be a positive int, got "):
        start(Script(epochs=epochs))
    assert not (tmp_path / "run" / "run.json").exists()


class WithoutEpochs(Script):
    """Does not ask for the epochs that are left, tests at the end, and draws numbers after it."""

    def __call__(self, args):
        accelerator, run, loader = self.begin(args)
        model = accelerator.prepare(nn.Linear(3, 1))
        run.start(loader, None, 6, checkpoint={"model": model})
        self.steps = 0
        for epoch in range(2):
            for batch in run.batches(loader, epoch):
                run.log_train(batch, loss=model(batch.data[0]).squeeze(1))
                self.steps += 1
        run.log("own", 1, norm=1.0)
        run.log_test({"norm": model(torch.ones(1, 3)).item(), "drawn": torch.rand(()).item()})
        self.summary = run.finish()
        self.drawn = torch.rand(()).item(), random.random(), np.random.random()


def test_a_complete_run_is_left_as_it_is_and_the_program_goes_on(start, tmp_path, capsys):
    first, again = WithoutEpochs(), WithoutEpochs()
    assert start(first) is None
    assert (first.steps, first.summary) == (6, summary(tmp_path / "run"))
    assert "nothing to do" not in capsys.readouterr().out

    def times():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*") if path.name != ".lock"}

    before = times()
    assert start(again, resume=True) is None
    assert "the run is done, after 6 steps: nothing to do" in capsys.readouterr().out
    assert times() == before
    assert (again.steps, again.summary, again.drawn) == (0, first.summary, first.drawn)


# --- trackers ---------------------------------------------------------------------------------


class Tracked(Script):
    """Its tracker keeps what it gets."""

    def begin(self, args):
        self.logged, self.ends = [], []
        begun = super().begin(args)
        log = lambda values, step: self.logged.append((step, values))  # noqa: E731
        begun[0].trackers.append(SimpleNamespace(name="own", log=log, finish=lambda: self.ends.append(True)))
        return begun


def test_a_tracker_of_your_own_gets_every_number(start, tmp_path):
    script = Tracked(epochs=1)
    assert start(script) is None
    assert [step for step, _ in script.logged] == [2, 4, 4]
    (line,) = lines(tmp_path / "run", "test")
    assert script.logged[-1][1] == {f"test/{name}": line[name] for name in ("loss", "bias", "samples")}
    assert script.logged[0][1]["train/lr"] == 0.01
    assert script.ends == [True]


def test_a_finished_run_leaves_its_numbers_and_says_the_first_ones(start, tmp_path, capsys):
    script = Script(epochs=1)
    assert start(script, gradient_accumulation_steps=2) is None
    assert script.run.progress.samples == 36  # for the speed; the last step has 6 of them
    (test,) = lines(tmp_path / "run", "test")
    found = summary(tmp_path / "run")
    assert (found["step"], found["test_loss"], found["best_loss"]) == (4, test["loss"], test["loss"])
    peak = progress.own_peak_memory_gib(torch.device("cpu"))  # by now
    assert peak - 0.2 < found["peak_memory_gib"] <= peak + 0.001
    assert f"done: test loss {test['loss']:.4f}, test bias " in capsys.readouterr().out


class Logging(Script):
    """Writes a line of its own in each step."""

    def stop_if(self, *place):
        if place[1] == "step":
            self.run.log("own", 0, norm=torch.tensor(2.5), words="not a number")


def test_numbers_of_torch_and_numpy_are_logged_and_summarised(start, tmp_path):
    marker = object()
    result = {"f1": np.float32(0.5), "ema_loss": torch.tensor(0.25), "recall": torch.tensor([1.0, 0.5])}
    result |= {"shares": np.array([[1, 2]]), "marker": marker}
    assert start(Logging(results={4: result}, epochs=1)) is None
    (test,) = lines(tmp_path / "run", "test")
    assert (test["f1"], test["ema_loss"]) == (0.5, 0.25)
    assert not {"recall", "shares", "marker"} & test.keys()
    assert [line["norm"] for line in lines(tmp_path / "run", "own")] == [2.5] * 4
    found = summary(tmp_path / "run")
    assert (found["test_f1"], found["test_ema_loss"], found["test_recall"]) == (0.5, 0.25, [1.0, 0.5])
    assert (found["test_shares"], found["test_marker"]) == ([[1, 2]], str(marker))
