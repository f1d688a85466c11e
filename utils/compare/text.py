"""What the command prints: tables of the results of the comparisons."""

import json
from pathlib import Path

from ..console import plural, printable


def as_text(value) -> str:
    """A value for a table, on one line and shortened."""
    if value is None:
        return "none"
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= 60 else text[:57] + "..."


def both_texts(first: float, second: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see that they differ, at least six."""
    for digits in range(6, 18):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def difference_text(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


def table(rows: list[list[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines of aligned columns. right: the columns that are aligned at their right end."""
    rows = [[printable(" ".join(cell.split())) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def short_names(folders: list[Path]) -> list[str]:
    """A name for each folder: as many of the last parts of its path as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    # A folder that is compared with itself gets a number.
    return [f"{name} ({place + 1})" if name in names[:place] else name for place, name in enumerate(names)]


def progress_text(far: dict) -> str:
    text = f"step {far['step']}"
    if far["total_steps"]:
        text += f" of {far['total_steps']}"
    if far["finished"]:
        return text + (", stopped early" if far["stopped_early"] else ", finished")
    text += ", not finished: it goes on, or was stopped"
    if far["checkpoint"] is not None:
        text += f"; newest checkpoint at step {far['checkpoint']}"
    return text


def facts_lines(facts: dict, names: list[str], commit: str | None) -> list[str]:
    """The tables of `compare_facts`' result. commit: of the reference."""
    lines = []
    for section, differ in facts.items():
        rows = [["", *names]]
        for name, values in differ.items():
            if name == "git_commit":
                values = [value and value[:10] + "+" * value.endswith("+") for value in values]
            rows.append([name, *map(as_text, values)])
        if differ:
            lines += [section.capitalize(), *table(rows)]
    same = [section for section, differ in facts.items() if not differ]
    if same:
        lines.append(f"No difference in {', '.join(same)}")
    if not facts["code"] and commit and commit.endswith("+"):
        lines.append("  both runs had changes that were not committed: the code can still differ")
    return lines


def metrics_lines(metrics: dict, names: list[str], tolerance: float) -> list[str]:
    """The table of `compare_metrics`' result, and what was not compared."""
    lines = [f"Metrics: {plural(metrics['lines'], 'line')} up to step {metrics['last_step']}, relative differences"]
    heads = [f"first beyond {tolerance:g}", *(f"in {name}" for name in names)]
    rows = [["split", "metric", "lines", "largest", "", *heads]]
    for entry in metrics["metrics"]:
        largest_step = f"at step {entry['largest_step']}" if entry["largest"] else ""
        first = ["none", "", ""]
        if entry["first"]:
            first = [f"step {entry['first']['step']}", *both_texts(*entry["first"]["values"])]
        row = [entry["split"], entry["metric"], str(entry["lines"])]
        rows.append([*row, difference_text(entry["largest"]), largest_step, *first])
    if not any(entry["first"] for entry in metrics["metrics"]):
        rows = [row[:5] for row in rows]
    if metrics["metrics"]:
        lines += table(rows, right=(2, 3, 6, 7))
    for entry in metrics["metrics"]:
        if entry["other_samples"]:
            samples = plural(entry["other_samples"], "sample")
            lines.append(f"  {entry['split']} {entry['metric']}: at most {samples} of a line counted differently")
    for name, only, count in zip(names, metrics["only"], metrics["lines_only"], strict=True):
        if only:
            lines.append(f"  only in {name}: {', '.join(only)}")
        if count:
            lines.append(f"  {plural(count, 'line')} only in {name}")
    if metrics["other_means"]:
        count = plural(metrics["other_means"], "train line")
        lines.append(f"  {count} not compared: means over different steps, see log_every")
    return lines


def tensors_lines(tensors: dict, names: list[str], limit: int | None) -> list[str]:
    """The table of `compare_tensors`' result. limit: how many tensors are shown; None: all."""
    if tensors["source"] is None:
        return [f"Tensors: none compared, {tensors['why']}"]
    entries = tensors["tensors"]
    lines = [f"Tensors of {tensors['source']}, largest difference / largest entry of {names[0]}'s tensor"]
    for part in dict.fromkeys(entry["part"] for entry in entries):
        own = [entry for entry in entries if entry["part"] == part]
        equal = sum(entry["bitwise"] for entry in own)
        kind = "" if own[0]["kind"] in (part, "other") else f" ({own[0]['kind']})"
        lines.append(f"  {part}{kind}: {equal} of {plural(len(own), 'tensor')} bitwise equal")
    shown = sorted(entries, key=lambda entry: (entry["bitwise"], -entry["difference"]))
    if limit is not None:
        shown = [entry for entry in shown if not entry["bitwise"]]
    rows = [["part", "tensor", "shape", "difference"]]
    for entry in shown[:limit]:
        shape = "x".join(map(str, entry["shape"])) or "scalar"
        difference = "equal" if entry["bitwise"] else difference_text(entry["difference"])
        rows.append([entry["part"], entry["name"], shape, difference])
    if len(rows) > 1:
        lines += table(rows, right=(3,))
    if more := len(shown) - len(shown[:limit]):
        lines.append(f"  and {more} more with smaller differences: --all shows them")
    for sentence in tensors["mismatches"]:
        sentence = sentence.replace("only in the reference", f"only in {names[0]}")
        lines.append("  " + sentence.replace("only in the other run", f"only in {names[1]}"))
    if tensors["state"]:
        rows = [["not a tensor", *names, "difference"]]
        for entry in tensors["state"]:
            rows.append([entry["name"], *map(as_text, entry["values"]), difference_text(entry["difference"])])
        lines += table(rows, right=(3,))
    return lines
