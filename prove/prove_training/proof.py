"""Proves that a script trains the same on any number of processes, or says what is wrong, or why it cannot tell.

The script runs for two passes over a few samples on one process, the reference, and then with the same samples per step
on two and three processes. `recording` makes them the same and records, and `stages` compares.
"""

import linecache
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from . import formats, resuming
from .mistakes import advice, correction, id_of
from .recording.same_work import items_of_epoch, micro_batch
from .records import Facts, Pass, Plan, Record
from .runs import Outcome, Runs
from .stages import Comparison, Finding, Note, evaluations, ranks_differ, several, single, steps, trained_on
from .stages.unfinished import explain
from .text import CannotTell, and_join, plural, show

MOST_ITEMS = 1000  # of data that are not cut where the script fails otherwise
MANY = 8  # devices of a machine for a script that does not train with one
LAST_LINES = 12  # of what a process printed
ACCUMULATION = ["--gradient_accumulation_steps", "2"]  # of a script of this project
OF_TRAINING = ("initial weights", "gradient", "loss weights", "clipping", "learning rate", "weights")
OF_GPUS = r"\b(?:lib)?cuda|nvidia|\bgpus?\b|\btriton\b|\baccelerator device\b"
OF_DEVICES = r"(?i)\bcpu\b|_cpu\b|\bdevices?\b|ZeroDivision|Finished|SimpleNamespace"  # perhaps of a pretended GPU
NO_GROUP = r"(?i)(not|n't|must|be|needs?|requires?|before)\b.{0,40}\binitiali[sz]|init_process_group|is_initialized"
OF_LAUNCH = "--local_rank"  # a flag that torchrun does not add
MISSING_VARIABLE = r"KeyError: '([A-Z_]*(?:RANK|PROC|LOCALID|TASK|SIZE|GPU|NODE)[A-Z_]*)'"  # of a launcher
PROVEN, WRONG, FAILS, CANNOT_TELL = 0, 1, 2, 3
CHANGES = (
    "accelerator = Accelerator(), then model, optimizer, loader = accelerator.prepare(model, optimizer, loader), and "
    "accelerator.backward(loss) in place of loss.backward()"
)


class Report:
    """Prints what is found, and keeps it for --json."""

    def __init__(self, args):
        self.script, self.format, self.framework = args.script, args.format, ""
        self.findings, self.notes, self.lines = [], [], []

    def say(self, text: str, colour: str = "") -> None:
        self.lines.append(text)
        if self.format in ("text", "github"):
            show(text, colour)

    def line(self, name: str, text: str, colour: str = "") -> None:
        self.say(f"  {name:<13} {text}", colour)

    def add(self, name: str, findings: Iterable[Finding | Note]) -> list[Finding]:
        """Print findings, each kind once, and keep notes for the end. Returns the new findings."""
        new = []
        for finding in findings:
            if finding.kind and f"prove: ignore[{id_of(finding.kind)}]" in self.source(finding.line):
                finding = Note(finding.stage, f"{finding.message} [{id_of(finding.kind)}, ignored]", None, finding.line)
            if isinstance(finding, Note):
                if without_numbers(finding) not in map(without_numbers, self.notes):
                    self.notes.append(finding)
            elif finding.kind not in [each.kind for each in self.findings]:
                self.findings.append(finding)
                new.append(finding)
                self.line(name, f"WRONG in {finding.place}: {finding.message} [{id_of(finding.kind)}]", "red")
                if source := self.source(finding.line):
                    self.line("", f"  {finding.line}  {source}")
        return new

    def log(self, outcome: Outcome) -> None:
        """Print the end of what a process printed that failed."""
        for text in outcome.log[-LAST_LINES:]:
            self.line("", f"| {text}")

    def source(self, line: str) -> str:
        """The source text of a line such as "train.py:64"."""
        file, _, number = line.rpartition(":")
        for folder in (Path.cwd(), self.script.resolve().parent):
            if number.isdigit() and (text := linecache.getline(str(folder / file), int(number)).strip()):
                return text
        return ""

    def end(self, code: int, verdict: str) -> int:
        for note in self.notes:
            place = f" ({note.line})" if note.line else ""
            self.say(f"note: {note.stage}: {note.message}{place}", "yellow")
        for finding in self.findings:
            self.say(f"what to do: {advice(finding.kind, self.framework)}")
            has_own = advice(finding.kind, self.framework) != advice(finding.kind)  # which the example does not show
            for line in correction(finding.kind) if self.framework in ("", "By hand") and not has_own else ():
                self.say(f"  {line}")
        self.say(verdict, {PROVEN: "green", CANNOT_TELL: "yellow"}.get(code, "red"))
        if self.format != "text":
            print(getattr(formats, f"as_{self.format}")(self, code, verdict))
        return code


def prove(args) -> int:
    """Run the script on one and several processes, and report. Returns the exit code.

    Args:
        args: of the command line: script, flags, processes, resume_flags, timeout_s, json, keep.
    """
    import torch

    torch.set_num_threads(1)  # a process with threads must not be forked
    with tempfile.TemporaryDirectory(prefix="prove_", ignore_cleanup_errors=True) as folder:
        top, scratch = Path(args.keep or folder, "runs"), Path(folder, "t")
        for each in (top, scratch):
            each.mkdir(parents=True, exist_ok=True)
        runs, report = Runs(args.script, args.flags, top, scratch, args.timeout_s, args.module), Report(args)
        proof = Proof(args, runs, report)
        try:
            return report.end(*proof.verdict())
        except CannotTell as reason:
            if report.findings:  # on one process, which is enough
                report.add("", [Note("not compared", str(reason))])
                return report.end(*proof.wrong(report.findings))
            return report.end(CANNOT_TELL, f"cannot tell: {reason}")


class Proof:
    """The runs of a proof, and what they show.

    Args:
        args: of the command line.
    """

    def __init__(self, args, runs: Runs, report: Report):
        self.args, self.runs, self.report = args, runs, report
        # Of all runs, and of those that repeat the reference.
        self.plan, self.repeat = Plan(items_of_epoch()), {}
        self.processes, self.counts = args.processes or (2, 3), [1]  # to compare with, and those that were compared
        self.compared, self.not_compared = set(), {}
        self.pretends_gpu = False  # to a script that asks that there is an accelerator
        self.is_divided = False  # the state of the optimizer, over the processes
        self.script_spawns = False  # whether the script starts its processes itself, one for each GPU of a machine

    def verdict(self) -> tuple[int, str]:
        """The exit code and the verdict.

        Raises:
            CannotTell: with the reason.
        """
        outcome = self._first_run()
        if outcome.error or outcome.waits or not outcome.records or outcome.records[0].facts.cannot_tell:
            return self._failed(outcome)
        self.reference = reference = outcome.records[0]
        if version := reference.facts.other_version:
            self.report.add("", [Note("comparison", f"{version}: the script is judged as any other")])
        if reason := single.cannot_judge(reference):
            raise CannotTell(reason)
        if reference.facts.mesh and not self.args.processes:
            self.processes = (reference.facts.mesh,)
        self._begin(reference.facts)
        self.report.line("1 process", f"{plural(len(reference.steps), 'step')}, the reference")
        self.report.add("", single.findings(reference))
        if all(map(self._compare, self.processes)) and not self.report.findings:
            self._start_again(reference)
        return self.wrong(self.report.findings) if self.report.findings else self._right()

    def _failed(self, outcome: Outcome) -> tuple[int, str]:
        """The verdict where the script does not come to its end on one process."""
        if outcome.waits or (outcome.error or "").startswith("it did not end"):
            stands = "".join(f", and stands at {place.partition(' at ')[2]}" for place in outcome.waits)
            limit = f"{self.args.timeout_s:g} s{stands} (--timeout_s sets a longer time)"
            raise CannotTell(f"on one process it did not end in {limit}")
        if outcome.records and (reason := outcome.records[0].facts.cannot_tell):
            raise CannotTell(reason)
        if (found := unfinished(1, outcome)).kind != "fails":
            return self.wrong(self.report.add("1 process", [found]))
        error, pretends = outcome.error + self._hints(outcome), self.plan.without_gpu
        if refuses(outcome) and not pretends and has_run(self.runs(self.processes[0], self.plan)):
            raise CannotTell(f"it refuses one process, with which prove begins: {error}")
        self.report.log(outcome)
        reasons = {
            f"it needs a GPU: {outcome.error}": is_about_gpus(outcome.error),
            f"on a GPU that prove pretends, {error}": pretends and re.search(OF_DEVICES, outcome.error),
            f"it refuses one process with a pretended GPU: {error}": pretends and refuses(outcome),
        }
        for reason, applies in reasons.items():
            if applies:
                raise CannotTell(reason)
        return FAILS, f"fails: on one process, {error}"

    def _start_again(self, reference: Record) -> None:
        """Compare runs that resume, and runs with more micro-batches, of a script in which nothing is wrong so far."""
        if reference.facts.run:
            words = ["--output_dir", "resumed_by_prove", "--checkpoint_every", "3"]
            self._resume(words, [*words, "--resume", *(self.args.resume_flags or "").split()])
        elif self.args.resume_flags is not None:
            self._resume([], self.args.resume_flags.split())
        buffer = single.changing_buffer(reference) if reference.facts.run else ""
        if buffer and ACCUMULATION[0] not in self.args.flags:
            self._accumulate(buffer)

    def _right(self) -> tuple[int, str]:
        """The verdict where nothing is wrong."""
        reasons = [f"{subject}: {why}" for subject, why in self.not_compared.items()]
        if not self.compared & {"gradients", "averaged gradients"}:
            same = f" (the same: {join_compared(self.compared)})" if self.compared else ""
            raise CannotTell(f"{'; '.join(reasons) or 'no gradient could be compared'}{same}")
        self.report.add("", [Note("not compared", reason) for reason in reasons])
        same = f"the same {join_compared(self.compared)} on {and_join(self.counts)} processes"
        if "gradients" not in self.compared or self.not_compared.keys() & {"steps", "random numbers"}:
            code = CANNOT_TELL if self.args.strict else PROVEN
            return code, f"nothing wrong found; not compared: {and_join(list(self.not_compared))}; {same}"
        return PROVEN, f"proven: {same}"

    def _hints(self, outcome: Outcome) -> str:
        """What helps with an error on one process."""
        printed = [each.printed for each in outcome.records]
        if outcome.error.startswith("it ends with"):
            printed = [line.strip() for line in outcome.log[-1:]]
        hints, text = [f'it printed last: "{line}"' for line in printed if line], f"{outcome.error} {printed}"
        if variable := re.search(MISSING_VARIABLE, text):
            hints.append(f"to set it, {variable[1]}={{rank}} or ={{processes}} before the command of prove")
        takes = re.search(rf"{OF_LAUNCH}\b", self.runs.script.read_text("utf-8", "replace"))
        if takes and OF_LAUNCH not in " ".join(self.runs.flags) and (OF_LAUNCH in text or "None" in outcome.error):
            hints.append(f"torch.distributed.launch adds {OF_LAUNCH} {{rank}} to its flags, and prove does not")
        return "".join(f"; {hint}" for hint in hints)

    def wrong(self, findings: list[Finding]) -> tuple[int, str]:
        verdict = f"wrong: {findings[0].message} ({findings[0].place})"
        if self.compared and all(finding.stage == "evaluation" for finding in findings):
            verdict += f"; in training, the same {join_compared(self.compared)}"
        return WRONG, verdict

    def _first_run(self) -> Outcome:
        """Run on one process, and again with each change of the plan that the last run asks for, once."""
        outcome, tried = self.runs(1, self.plan), []
        while retry := next((each for each in self._retries(outcome) if each[0] not in tried), None):
            changes, is_better = retry
            tried.append(changes)
            again = self.runs(1, replace(self.plan, **changes))
            if is_better(again):
                self.pretends_gpu |= "without_gpu" in changes and not is_about_gpus(outcome.error)
                self.plan, outcome = replace(self.plan, **changes), again
        if self.plan.own_batch_size and not self.args.processes:
            sizes = given_sizes(outcome.records)
            fitting = [each for each in self.processes if not any(size % each for size in sizes)]
            self.processes = tuple(fitting) or self.processes
        return outcome

    def _retries(self, outcome: Outcome) -> Iterator[tuple[dict, Callable[[Outcome], bool]]]:
        """Changes of the plan that a first run asks for, and whether a run with them is better."""
        facts = outcome.records[0].facts if outcome.records else Facts()
        steps, sizes = outcome.records and outcome.records[0].steps, given_sizes(outcome.records)
        if is_about_gpus(outcome.error):
            yield {"without_gpu": True}, lambda again: True
        if outcome.error and re.search(NO_GROUP, " ".join([outcome.error, *outcome.log[-2:]])):
            # It makes a group on several processes only, or asks for that of torchrun.
            yield (
                {"makes_group": True},
                lambda again: not re.search("(?i)initiali[sz]|process group", again.error or ""),
            )
        if facts.asked > 1 and not self.plan.asked and self.runs.written(facts.asked):
            yield {"asked": facts.asked}, lambda again: True
        if facts.asks and not (facts.ddp or facts.accelerate):
            # It may train only where there is an accelerator, or with others only there.
            yield {"without_gpu": True}, lambda again: has_run(again) or (refuses(again) and not steps)
        if has_run(outcome) and not steps:  # as PyTorch's own examples ask for two devices
            yield {"devices": MANY}, lambda again: has_run(again) and bool(again.records[0].steps)
        if outcome.error and sizes and unfinished(1, outcome).kind == "fails":
            # A model may be made for one batch size, and a script may count its data.
            yield {"own_batch_size": True, "limit": items_of_epoch(max(sizes))}, lambda again: not again.error
            yield {"limit": MOST_ITEMS}, lambda again: not again.error

    def _repeat(self, facts: Facts) -> None:
        self.repeat = {"orders": self.reference.orders, "weights": self.reference.weights}
        self.repeat |= {"lengths": facts.lengths, "sizes": given_sizes([self.reference]), "places": [*facts.loaders]}
        training = trained_on(self.reference)
        self.repeat["tests"] = {key: each.given for key, each in facts.loaders.items() if key not in training}

    def _begin(self, facts: Facts) -> None:
        self._repeat(facts)
        self.report.framework, training = facts.framework, trained_on(self.reference)
        words = f"{self.args.script} on the CPU"
        for loader in [loader for key, loader in facts.loaders.items() if key in training and loader.given][:1]:
            size = loader.given if self.plan.own_batch_size else micro_batch(loader.given)
            words += f": {size} samples per batch over all processes"
            length = loader.length
            words += f", {min(length, self.plan.limit)} of {length} training samples" if length else ""
        self.report.say(words)
        if written := self.plan.asked and self.runs.written(self.plan.asked):
            message = f"the script's {written} is replaced by the number of processes of each run"
            self.report.add("", [Note("comparison", message)])
        if off := facts.switched_off:
            message = f"{and_join(sorted(off))} switched off: results would differ by design"
            self.report.add("", [Note("comparison", message)])

    def _compare(self, processes: int) -> bool:
        """Compare a run on several processes. Returns whether nothing is wrong."""
        name, (outcome, comparison, found) = plural(processes, "process"), self._run_several(processes)
        if self.plan.without_gpu:
            self.report.add("", [Note("comparison", "what the script puts on a GPU stays on the CPU")])
        if comparison is None and isinstance(found[0], Note):
            raise CannotTell(found[0].message)
        if any(finding.kind == "items" for finding in found) and self._seeds_items(processes, outcome.records[0]):
            return self._compare(processes)
        if is_about_gpus(outcome.error) and not self.plan.without_gpu:  # as model.to(rank) with a launcher only
            self._refer_again(without_gpu=True)
            return self._compare(processes)
        if self._is_refused(processes, outcome):
            return True
        if comparison is None:
            self.report.add(name, found)
            self.report.log(outcome)
            return False
        found = self.report.add(name, self._looked_into(comparison, found))
        if not any(finding.stage == "samples" for finding in found):
            found += self.report.add(name, self._evaluations(comparison))
        if found and any(finding.stage != "evaluation" for finding in found):
            return False
        if not found and "evaluations" not in comparison.not_compared and evaluations.are_compared(comparison):
            comparison.compared.add("evaluations")
        self.report.line("" if found else name, f"the same {join_compared(comparison.compared) or 'course'}")
        self.counts.append(processes)
        self.compared |= comparison.compared
        self.not_compared |= comparison.not_compared
        return not found

    def _run_several(self, processes: int) -> tuple[Outcome, Comparison | None, list]:
        """A run on several processes, and what it shows.

        In the last comparison, each process runs as if it had a machine of its own, with LOCAL_RANK 0. If a mistake
        appears only then, it depends on LOCAL_RANK: it is reported together with what one machine showed.
        """

        def run(one_per_machine: bool):
            outcome = self.runs(processes, replace(self.plan, **self.repeat, machines=one_per_machine))
            comparison, found = compare_records(self.reference, processes, outcome)
            problem = next((each for each in found if each.kind or comparison is None), None)
            return outcome, comparison, found, problem

        one_per_machine = processes != self.processes[0] and not self.script_spawns
        outcome, comparison, found, problem = run(one_per_machine)
        if outcome.records and not (outcome.records[0].facts.ddp or self.report.framework):
            self.report.framework = "By hand"
        made = zip(*(record.steps for record in outcome.records), strict=False)
        self.is_divided |= any(ranks_differ(of_ranks, "state_before") for of_ranks in made)
        self.script_spawns = self.script_spawns or any(record.facts.starts for record in outcome.records)
        if one_per_machine and problem:
            outcome_apart, (outcome, comparison, found, on_one_machine) = outcome, run(False)
            if on_one_machine is None:
                # Other than training, it may be for one machine alone, or the machines have different disks.
                is_local = problem.stage == "samples" or outcome_apart.records[0].facts.asked
                kind = "local_rank" if is_local else problem.kind if problem.stage in OF_TRAINING else ""
                message = f"{problem.message}, if each process has a machine of its own: LOCAL_RANK is 0 on each"
                others = problem.stage, message, problem.step, problem.line
                found.append(Finding(kind, *others) if kind else Note(*others))
        return outcome, comparison, found

    def _seeds_items(self, processes: int, record: Record) -> bool:
        """Whether items differ by random numbers that can be seeded, and will be from now on."""
        if not is_augmented(record):
            return False
        again = self.runs(processes, replace(self.plan, **self.repeat, same_share=True))
        first, *others = ([each.read for each in trained_passes(record)[:1]] for record in again.records)
        if first in others:
            return False
        if self.plan.seeds_own:
            raise CannotTell("the samples have random numbers that prove cannot repeat, different on each process")
        self._refer_again(seeds_own=True)
        return True

    def _refer_again(self, **changes) -> None:
        """Take another run on one process as the reference."""
        self.plan = replace(self.plan, **changes)
        outcome = self.runs(1, self.plan)
        if not has_run(outcome):
            why = outcome.error or outcome.records[0].facts.cannot_tell or "it did not end"
            raise CannotTell(f"on one process, in another run: {why}")
        self.reference = outcome.records[0]
        self._repeat(self.reference.facts)

    def _is_refused(self, processes: int, outcome: Outcome) -> bool:
        """Whether the script refuses this number of processes, and not the first one."""
        name = plural(processes, "process")
        if outcome.error and self.plan.own_batch_size and "shape" in outcome.error.lower():
            raise CannotTell(f"the model is made for one batch size, and prove divides it: {outcome.error}")
        if refuses(outcome):
            if processes == self.processes[0]:
                raise CannotTell(f"it refuses {name}: {outcome.error}")
            self.report.line(name, f"not compared, it refuses them: {outcome.error}")
            return True
        if outcome.error and self.pretends_gpu:
            raise CannotTell(f"it asks for an accelerator, and with a pretended one {name} fail: {outcome.error}")
        return False

    def _looked_into(self, comparison: Comparison, found: list) -> list:
        """Findings after further runs, which show the cause of one, or that it comes from what prove has changed."""
        kinds = [finding.kind for finding in found]
        if "schedule" in kinds and self._counts_its_batches(comparison.processes):
            found = [finding for finding in found if finding.kind != "schedule"]
            comparison.compared.discard("learning rates")
            why = "the script counts its steps by its batch size, which prove divides"
            comparison.not_compared["learning rates"] = why
        suspects = comparison.suspects[:1]
        if "gradient" in kinds or suspects:
            plan = replace(self.plan, **self.repeat, own_gradients=True)
            own = self.runs(comparison.processes, plan).records
            found = [steps.with_cause(self.reference, own, finding) for finding in [*found, *suspects]]
        return [finding for finding in found if finding not in suspects]

    def _counts_its_batches(self, processes: int) -> bool:
        """Whether the learning rates are those of one process if each process has batches as large.

        Then it has more data, or it makes fewer steps, which a script may count that does not divide its batches.
        """
        for limit, stride in ((self.plan.limit * processes, 1), (self.plan.limit, processes)):
            again = self.runs(processes, replace(self.plan, whole_batches=True, limit=limit)).records
            if not again or (stride > 1 and given_sizes(again) != given_sizes([self.reference])):
                continue
            expected = replace(self.reference, steps=self.reference.steps[::stride])
            if not any(finding.kind for finding in steps.learning_rates(Comparison(expected, again))):
                return True
        return False

    def _evaluations(self, comparison: Comparison) -> list[Finding]:
        if comparison.reference.facts.run:  # its results are known
            return list(evaluations.differing_results(comparison))
        suspects = evaluations.suspects(comparison)
        if not suspects:
            return list(evaluations.share(comparison))

        def differing(**changes) -> set | None:
            """The keys of what differs in another run on one process; None if the run failed."""
            records = self.runs(1, replace(self.plan, **changes)).records
            return {each.key for each in evaluations.suspects(Comparison(self.reference, records))} if records else None

        # The result of an evaluation repeats in a second run, whose clock is fast, and changes with fewer test samples.
        noise, trained = differing(clock=1000), trained_on(comparison.reference)
        if noise is None:
            return []
        tested = [key for test in comparison.reference.evaluations for key in test.samples if key not in trained]
        results, notes = differing(shorter=tested) or set(), []
        for suspect in suspects:
            if suspect.key in results - noise:
                return [evaluations.explained(comparison, suspect)]
            if suspect.key not in noise:
                why = "of rank 0 alone, or of samples without a DataLoader"
                notes.append(Note("output", f"{suspect.says}: {why}"))
                comparison.not_compared["evaluations"] = why
        return list(evaluations.share(comparison)) or notes[:1]

    def _resume(self, flags_before: list[str], flags: list[str]) -> None:
        """Interrupt the script after its first checkpoint, then after its next one; and go on with more processes."""
        first = self._interrupted(flags_before)
        if not first.records or not first.records[0].facts.has_saved:
            why = first.error or "it saved nothing after its first step"
            self.report.add("", [Note("resume", f"not compared: {why}")])
            return
        whole, done = self.runs(1, replace(self.plan, is_resumed=False)).records[0], len(first.records[0].steps)
        again = replace(self.plan, is_resumed=True)
        second = self.runs(1, replace(again, stop_after_save=True), flags, first.changes)
        if not self._goes_on(second, whole, done):
            return
        done_again = done + len(second.records[0].steps)
        if second.records[0].facts.has_saved and done_again < len(whole.steps):
            outcome = self.runs(1, again, flags, first.changes)
            if not self._goes_on(outcome, whole, done_again, ", resumed a second time"):
                return
        more = self.processes[0]
        # From a checkpoint made anew: the runs above have written into the folder of the first one.
        third = self.runs(more, again, flags, self._interrupted(flags_before).changes)
        name, problems = f"resumed on {plural(more, 'process')}", []
        found = resuming.differing_ranks(third.records, self.is_divided)
        noise = several.noise(Comparison(self.reference, third.records))  # by a random state that all have loaded
        if not third.error and self.report.add(name, [*found, *noise]):
            return
        if third.error or len(third.records) < more or third.waits:
            problems = [Note(name, third.error or "it did not end")]
        else:  # a note: somebody may always resume on as many processes
            found = resuming.compare(whole, resuming.merged(third.records), done, has_gradients=False)
            problems = [Note(name, *each[2:]) for each in found if each.kind]
        self.report.add("", problems)
        if not problems:
            self.report.line("", f"the same after step {done} on {plural(more, 'process')}")

    def _accumulate(self, buffer: str) -> None:
        """Compare a buffer that each forward pass changes, as spectral_norm does, with two micro-batches per step."""
        outcome = self.runs(1, replace(self.plan, **self.repeat), ACCUMULATION)
        step = outcome.records[0].steps[1] if has_run(outcome) and len(outcome.records[0].steps) > 1 else None
        if step and step.buffers.get(buffer) != self.reference.steps[1].buffers[buffer]:
            message = f"each forward pass changes the buffer {buffer}: with 2 micro-batches per step "
            finding = Finding("gradient", "gradient", f"{message}it has other values", 2, step.line)
            self.report.add("2 micro-batches", [finding])

    def _interrupted(self, flags: list[str]) -> Outcome:
        return self.runs(1, replace(self.plan, stop_after_save=True, is_resumed=False), flags)

    def _goes_on(self, outcome: Outcome, whole: Record, done: int, words: str = "") -> bool:
        """Whether a run that resumes is the one that was not interrupted."""
        if outcome.error or not outcome.records:
            self.report.add("resumed", [Finding("fails", "the run that resumes", str(outcome.error))])
            return False
        found = [*single.loaded(outcome.records[0]), *resuming.compare(whole, outcome.records[0], done)]
        if any(each.kind for each in found) and not outcome.records[0].facts.has_loaded:
            raise CannotTell("the run that resumes loads nothing: do its flags name a checkpoint?")
        found = self.report.add("resumed", found)
        if not found:
            self.report.line("resumed", f"the same after step {done}{words}")
        return not found


def has_run(outcome: Outcome) -> bool:
    """Whether the script has come to its end."""
    return not (outcome.error or outcome.waits or outcome.records[0].facts.cannot_tell)


def refuses(outcome: Outcome) -> bool:
    """Whether the script itself ends, with this number of processes."""
    return any(record.facts.refuses for record in outcome.records)


def without_numbers(note: Note) -> tuple[str, str]:
    """What two notes have in common that differ in the number of processes."""
    return note.stage, re.sub(r"\d+", "", note.message)


def is_about_gpus(error: str | None) -> bool:
    """Whether an error, after the place that it comes from, is about GPUs."""
    return bool(re.search(OF_GPUS, re.sub(r"^\S+:\d+: ", "", error or ""), re.IGNORECASE))


def is_augmented(record: Record) -> bool:
    """Whether an item is another one each time that it is read, or no item of a pass is in the next one."""
    first, *others = ({digest for batch in each.read for digest in batch or ()} for each in trained_passes(record))
    return record.facts.draws_by_itself or any(map(first.isdisjoint, others[:1]))


def trained_passes(record: Record) -> list[Pass]:
    return [each for each in record.passes if each.in_training]


def given_sizes(records: list[Record]) -> set[int]:
    """The batch sizes that the script has passed to DataLoader."""
    loaders = [loader for record in records for loader in record.facts.loaders.values()]
    return {loader.given for loader in loaders if loader.given}


def compare_records(reference: Record, processes: int, outcome: Outcome) -> tuple[Comparison | None, list]:
    """What a run on several processes shows; without a comparison where it has not come to its end.

    Raises:
        CannotTell: where the processes do not train together.
    """
    for record in outcome.records:
        if reason := record.facts.cannot_tell:
            return None, [Note("process group", reason)]
    is_distributed = any(record.facts.accelerate or record.facts.group for record in outcome.records)
    if any(record.steps for record in outcome.records) and not is_distributed:
        message = "the script trains on one process only: neither Accelerate nor torch.distributed is used"
        changes = CHANGES
        if line := outcome.records[0].facts.data_parallel:
            message = f"nn.DataParallel ({line}) trains on one process with all its GPUs, and knows no others"
            changes = f"take nn.DataParallel out; {CHANGES}"
        raise CannotTell(f"{message}. To change first: {changes}")
    is_stuck = outcome.waits and len(outcome.records[0].steps) < len(reference.steps)
    if outcome.error or len(outcome.records) < processes or is_stuck:
        return None, [unfinished(processes, outcome)]
    joined = outcome.records[0].facts.join
    if joined and len({len(record.steps) for record in outcome.records}) > 1:
        raise CannotTell(f"with Join, its processes make different numbers of steps ({joined})")
    if len({frozenset(record.steps[0].before) for record in outcome.records if record.steps}) > 1:
        raise CannotTell("each process steps parameters of its own")
    comparison = Comparison(reference, outcome.records)
    return comparison, list(several.findings(comparison))


def unfinished(processes: int, outcome: Outcome) -> Finding:
    stage = f"the run on {plural(processes, 'process')}"
    return explain(stage, outcome.records, outcome.error, outcome.waits, outcome.calls)


def join_compared(compared: set) -> str:
    left_out = {"averaged gradients"} if "gradients" in compared else set()
    order = ("samples", "gradients", "averaged gradients", "learning rates", "weights", "evaluations")
    return and_join([name for name in order if name in compared - left_out])
