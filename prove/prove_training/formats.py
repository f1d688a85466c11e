"""The report for other programs: JSON, annotations of GitHub, and SARIF."""

import json
import os

from .mistakes import advice, id_of

FORMATS = ("text", "json", "github", "sarif")


def entries(report, kind: str) -> list[dict]:
    """Findings ("error") or notes ("notice") with their file, line, title and message."""
    found = []
    for each in report.findings if kind == "error" else report.notes:
        file, _, number = each.line.rpartition(":")
        what = f"{each.message}: {advice(each.kind, report.framework)}" if each.kind else each.message
        found.append({"file": file, "line": int(number or 1), "id": id_of(each.kind or "note"), "message": what})
    return found


def escaped(text: str, more: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + more else letter for letter in text)


def as_json(report, code: int, verdict: str) -> str:
    def entry(each) -> dict:
        return {"kind": each.kind, "stage": each.stage, "what": each.message, "step": each.step, "line": each.line}

    findings = [entry(each) | {"advice": advice(each.kind, report.framework)} for each in report.findings]
    found = {"findings": findings, "notes": list(map(entry, report.notes)), "lines": report.lines}
    return json.dumps({"code": code, "verdict": verdict, **found}, indent=2)


def as_github(report, code: int, verdict: str) -> str:
    """Annotations of lines in a pull request; the report goes into the summary of the job."""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write(f"### {verdict}\n\n```\n" + "\n".join(report.lines) + "\n```\n")
    lines = []
    for kind in ("error", "notice"):
        for each in entries(report, kind):
            place = f"file={escaped(each['file'], ':,')},line={each['line']}," * bool(each["file"])
            lines.append(f"::{kind} {place}title=prove {each['id']}::{escaped(each['message'])}")
    if code and not report.findings:
        lines.append(f"::error title=prove::{escaped(verdict)}")
    return "\n".join(lines)


def as_sarif(report, code: int, verdict: str) -> str:
    results = []
    for kind, level in (("error", "error"), ("notice", "note")):
        for each in entries(report, kind):
            place = {"artifactLocation": {"uri": each["file"] or str(report.script)}}
            place["region"] = {"startLine": each["line"]}
            result = {"ruleId": each["id"], "level": level, "message": {"text": each["message"]}}
            results.append(result | {"locations": [{"physicalLocation": place}]})
    rules = [{"id": name} for name in sorted({result["ruleId"] for result in results})]
    driver = {"name": "prove-training", "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "properties": {"code": code, "verdict": verdict}}
    return json.dumps({"version": "2.1.0", "runs": [run]}, indent=2)
