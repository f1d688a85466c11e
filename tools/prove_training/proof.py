"""Proves a script that has a loop of its own, or says what is wrong in it, or why it cannot tell.

The script runs for two passes over a few samples on one process, the reference, and then with the same samples per step
on two and three processes. `same_work.py` makes them the same, `recording` records, and `stages.py` compares.
"""

import contextlib
import json
import linecache
import sys
import tempfile
from pathlib import Path

from .mistakes import advice
from .resuming import compare
from .runs import Outcome, Runs
from .same_work import items_of_epoch, micro_batch
from .sandbox import TooLarge
from .stages import Finding, note, trained_on
from .stages.evaluations import Evaluations
from .stages.several import Several, uneven_call
from .stages.single import Single
from .text import and_join, plural, show

PROVEN, WRONG, FAILS, CANNOT_TELL = 0, 1, 2, 3
CHANGES = (
    "accelerator = Accelerator(), then model, optimizer, loader = accelerator.prepare(model, optimizer, loader), and "
    "accelerator.backward(loss) in place of loss.backward()"
)


class Report:
    """Prints what is found, and keeps it for --json."""

    def __init__(self, args):
        self.script, self.as_json = args.script, args.json
        self.findings, self.notes, self.lines = [], [], []
        self.verdict, self.code = None, None
        self.picture, self.compared_runs = args.picture, []

    def say(self, text: str, colour: str = "") -> None:
        self.lines.append(text)
        if not self.as_json:
            show(text, colour)

    def line(self, name: str, text: str, colour: str = "") -> None:
        self.say(f"  {name:<14}{text}", colour)

    def add(self, findings: list[Finding]) -> list[Finding]:
        """Note findings, each kind once. Returns those that are new and wrong."""
        new = []
        for finding in findings:
            if finding.is_note:
                if (finding.stage, finding.what) not in [(each.stage, each.what) for each in self.notes]:
                    self.notes.append(finding)
            elif finding.kind not in [each.kind for each in self.findings]:
                self.findings.append(finding)
                new.append(finding)
        return new

    def wrong(self, name: str, findings: list[Finding]) -> None:
        for finding in findings:
            self.line(name, f"WRONG in {finding.place}: {finding.what}", "red")
            if source := self.source(finding.line):
                self.line("", f"  {finding.line}  {source}")

    def source(self, line: str) -> str:
        """The text of a line of the script's folder."""
        file, _, number = line.rpartition(":")
        for folder in (Path.cwd(), self.script.resolve().parent):
            if number.isdigit() and (text := linecache.getline(str(folder / file), int(number)).strip()):
                return text
        return ""

    def end(self, code: int, verdict: str) -> int:
        for finding in self.notes:
            place = f" ({finding.line})" if finding.line else ""
            self.say(f"note: {finding.stage}: {finding.what}{place}", "yellow")
        for finding in self.findings:
            self.say(f"what to do: {advice(finding.kind)}")
        self.verdict, self.code = verdict, code
        self.say(verdict, {PROVEN: "green", CANNOT_TELL: "yellow"}.get(code, "red"))
        if self.as_json:
            print(json.dumps(self.as_dict(), indent=2))
        if self.picture:
            from .picture import save

            save(self.picture, self.compared_runs, verdict)
        return code

    def as_dict(self) -> dict:
        def entry(finding: Finding) -> dict:
            return finding._asdict() | {"advice": "" if finding.is_note else advice(finding.kind)}

        found, notes = [list(map(entry, each)) for each in (self.findings, self.notes)]
        return {"code": self.code, "verdict": self.verdict, "findings": found, "notes": notes, "lines": self.lines}


def prove(args) -> int:
    """Run the script on one and several processes, and report. Returns the exit code.

    Args:
        args: of the command line: script, flags, processes, resume_flags, timeout_s, json, keep.
    """
    import torch
    import torch._dynamo  # which every optimizer imports: once for all processes

    with contextlib.suppress(ImportError):  # a script in plain PyTorch does not need it
        import accelerate.local_sgd  # noqa: F401  and all that `recording` asks of it, also once

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that has started threads must not be forked
    try:
        with tempfile.TemporaryDirectory(prefix="prove_", ignore_cleanup_errors=True) as folder:
            top, scratch = Path(args.keep or folder, "runs"), Path(folder, "t")
            for each in (top, scratch):
                each.mkdir(parents=True, exist_ok=True)
            runs, report = Runs(args.script, args.flags, top, scratch, args.timeout_s), Report(args)
            try:
                return Proof(args, runs, report).result()
            finally:
                who = "another program has changed" if runs.is_mounted else "CHANGED while prove ran:"
                for path in runs.changed(except_for=args.picture):
                    show(f"{who} {path}", "yellow" if runs.is_mounted else "red", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)


class Proof:
    def __init__(self, args, runs: Runs, report: Report):
        self.args, self.runs, self.report = args, runs, report
        self.plan = {"limit": items_of_epoch()}
        self.refused = []  # numbers of processes on which the script does not want to run

    def result(self) -> int:
        try:
            outcome = self._reference()
        except TooLarge as large:
            return self._cannot_tell(f"{large} is too large to be copied, and cannot be mounted: move it elsewhere")
        if not outcome.records or outcome.error or outcome.waits:
            return self._failed(outcome)
        reference = outcome.records[0]
        single = Single(reference)
        if reason := single.cannot_judge():
            return self._cannot_tell(reason)
        self._begin(reference)
        self.report.line("1 process", f"{plural(len(reference['steps']), 'step')}, the reference")
        self.report.wrong("", self.report.add(list(single.findings())))
        repeat = {"orders": reference.pop("orders"), "weights": reference["weights"]}
        compared, not_compared = set(), {}
        for processes in self.args.processes:
            several = self._several(processes, reference, repeat)
            if several is None:
                break
            if isinstance(several, int):
                return several
            compared |= set(several.compared)
            not_compared |= several.not_compared
        if not self.report.findings:
            if reference["facts"]["run"]:
                words = ["--output_dir", "resumed_by_prove", "--checkpoint_every", "3"]
                self._resume(words, [*words, "--resume", *(self.args.resume_flags or "").split()])
            elif self.args.resume_flags is not None:
                self._resume([], self.args.resume_flags.split())
        return self._verdict(compared, not_compared)

    def _reference(self) -> Outcome:
        outcome = self.runs(1, self.plan)
        if outcome.error and any(word in outcome.error for word in ("CUDA", "NVIDIA", "cuda")):
            self.plan["without_gpu"] = True
            outcome = self.runs(1, self.plan)
        given = [loader["given"] for each in outcome.records for loader in each["facts"]["loaders"].values()]
        sizes = [size for size in given if size]
        if outcome.error and sizes:  # a model may be made for one batch size
            own = {"own_batch_size": True, "limit": items_of_epoch(max(sizes))}
            again = self.runs(1, self.plan | own)
            if not again.error:
                self.plan |= own
                return again
        return outcome

    def _begin(self, reference: dict) -> None:
        facts = reference["facts"]
        training = trained_on(reference)
        loaders = [loader for key, loader in facts["loaders"].items() if key in training and loader["given"]]
        words = f"{self.args.script} on the CPU"
        if loaders:
            size = loaders[0]["given"] if self.plan.get("own_batch_size") else micro_batch(loaders[0]["given"])
            words += f": {size} samples per batch over all processes"
            length = loaders[0]["length"]
            words += f", {min(length, self.plan['limit'])} of {length} training samples" if length else ""
        self.report.say(words)
        if self.plan.get("without_gpu"):
            self.report.notes.append(note("comparison", "what the script puts on a GPU stays on the CPU"))
        if off := facts["switched_off"]:
            self.report.notes.append(note("comparison", f"{' and '.join(off)} switched off, which must differ"))

    def _several(self, processes: int, reference: dict, repeat: dict) -> Several | int | None:
        """Compare a run on several processes; None: something is wrong; an exit code: it ends here."""
        name, more = plural(processes, "process"), self._more_flags(processes, reference)
        outcome = self.runs(processes, self.plan | repeat, more)
        label = name
        if more:
            self.report.line(name, f"with {' '.join(more)}:")
            label = ""
        if len(outcome.records) == processes and not outcome.error:
            self.report.compared_runs.append((reference, outcome.records))
            several = Several(reference, outcome.records)
            if several.is_plain():
                what = "the script trains on one process only: neither Accelerate nor torch.distributed is used"
                return self._cannot_tell(f"{what}. To change first: {CHANGES}")
            found = self.report.add(list(several.findings()))
            samples_are_wrong = any(finding.stage == "samples" for finding in found)
            if not samples_are_wrong:
                found += self.report.add(self._evaluations(reference, outcome.records, processes))
            if found:
                self.report.wrong(label, found)
                return None
            if Evaluations(reference, outcome.records).are_compared():
                several.compared.append("evaluations")
            same = {*several.compared} - ({"averaged gradients"} if "gradients" in several.compared else set())
            self.report.line(label, f"the same {in_words(same) or 'course'}")
            return several
        if any(record["facts"].get("refuses") for record in outcome.records):
            if processes == self.args.processes[0]:
                return self._cannot_tell(f"it refuses {name}: {outcome.error}")
            self.report.line(name, f"not compared, it refuses them: {outcome.error}")
            self.refused.append(processes)
            return Several(reference, outcome.records)
        kind, what, line = "fails", outcome.error, ""
        if outcome.waits:
            kind, what = "hangs", f"it waits for ever, {', '.join(outcome.waits)}"
        if (uneven := uneven_call(outcome.calls)) and (outcome.waits or "onnection" in what):
            kind, (what, line) = "hangs", uneven
        self.report.wrong(label, self.report.add([Finding(kind, f"the run on {name}", what, None, line)]))
        return None

    def _more_flags(self, processes: int, reference: dict) -> list[str]:
        """What must change nothing in a script that trains through Run: in the last comparison also other flags."""
        facts, more = reference["facts"], []
        if not facts["run"] or processes != self.args.processes[-1]:
            return []
        if not facts["virtual_processes"]:  # which decide the accumulation
            more.append("--gradient_accumulation_steps 2")
        more.append("--num_workers 1")
        return [word for flag in more for word in flag.split() if flag.split()[0] in facts["flags"]]

    def _evaluations(self, reference: dict, ranks: list[dict], processes: int) -> list[Finding]:
        tests = Evaluations(reference, ranks)
        if reference["facts"]["run"]:  # which says what the results are
            return list(tests.differing_results())
        suspects = tests.suspects()
        if not suspects:
            share = tests.share()
            return [share] if share else []
        # A number that is the result of an evaluation is the same each time, and another one of fewer samples.
        again = self.runs(1, self.plan)
        if not again.records:
            return []
        noise = {suspect[:2] for suspect in Evaluations(reference, again.records).suspects()}
        keys = [key for test in reference["evaluations"] for key in test["samples"] if key not in tests.trained]
        fewer = self.runs(1, self.plan | {"shorter": keys})
        results = {suspect[:2] for suspect in Evaluations(reference, fewer.records).suspects()} if fewer.records else {}
        found = []
        for after, template, number, other in suspects:
            if (after, template) in noise:
                continue
            if (after, template) in results:
                return [tests.finding(after, template, number, other)]
            words = template.strip("#").strip()[-40:]
            what = f"{words} {other} instead of {number}: of what rank 0 alone has trained on"
            found.append(note("output", what))
        return found[:1]

    def _resume(self, flags_before: list[str], flags: list[str]) -> None:
        first = self.runs(1, self.plan | {"stop_after_save": True, "is_resumed": False}, flags_before)
        if not first.records or not first.records[0]["facts"]["has_saved"]:
            why = first.error or "it saved nothing after its first step"
            self.report.notes.append(note("resume", f"not compared: {why}"))
            return
        done = len(first.records[0]["steps"])
        second = self.runs(1, self.plan | {"is_resumed": True}, flags, first.changes)
        if second.error or not second.records:
            self.report.wrong("resumed", self.report.add([Finding("fails", "the run that resumes", str(second.error))]))
            return
        whole = self.runs(1, self.plan | {"is_resumed": False})
        found = self.report.add(list(compare(whole.records[0], second.records[0], done)))
        self.report.wrong("resumed", found)
        if not found:
            self.report.line("resumed", f"the same after step {done}")

    def _verdict(self, compared: set, not_compared: dict) -> int:
        if self.report.findings:
            first = self.report.findings[0]
            return self.report.end(WRONG, f"wrong: {first.what} ({first.place})")
        for what, why in not_compared.items():
            self.report.notes.append(note("not compared", f"{what}: {why}"))
        counts = and_join([1, *(count for count in self.args.processes if count not in self.refused)])
        if "gradients" in compared:
            compared.discard("averaged gradients")
        if not compared & {"gradients", "averaged gradients"}:
            reasons = "; ".join(f"{what}: {why}" for what, why in not_compared.items())
            same = f" (the same: {in_words(compared)})" if compared else ""
            return self._cannot_tell(f"{reasons or 'no gradient could be compared'}{same}")
        return self.report.end(PROVEN, f"proven: the same {in_words(compared)} on {counts} processes")

    def _failed(self, outcome: Outcome) -> int:
        if outcome.waits or "did not end" in outcome.error:
            stands = f", and stands at {outcome.waits[0].partition(' at ')[2]}" if outcome.waits else ""
            seconds = f"{self.args.timeout_s:g} s"
            return self._cannot_tell(
                f"on one process it did not end in {seconds}{stands} (--timeout_s sets a longer time)"
            )
        return self.report.end(FAILS, f"fails: on one process, {outcome.error}")

    def _cannot_tell(self, reason: str) -> int:
        return self.report.end(CANNOT_TELL, f"cannot tell: {reason}")


def in_words(compared) -> str:
    order = ("samples", "gradients", "averaged gradients", "learning rates", "weights", "evaluations")
    return and_join([name for name in order if name in compared])
