"""A figure of a page that names a benchmark is one that this benchmark measured."""

import json
import re
from fractions import Fraction

import pytest
from conftest import ROOT
from pages import TEXTS

from benchmarks import run

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?"
VERSIONS = r"(?:Python|torch|accelerate|PyTorch) \d+\.\d+"


def cited(text: str) -> list[tuple[str, str]]:
    """The paragraphs that name a benchmark or a section of RESULTS.md, with the table that follows; and its name."""
    headings = {run.anchor(name): name for name in [*run.BENCHMARKS, "gpus"]}
    blocks, found = re.split(r"\n\s*\n", text), []
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        names = {headings[title] for title in re.findall(r"RESULTS\.md#([\w-]+)", block)}
        names |= {name for name in re.findall(r"benchmarks/(\w+)\.py", block) if name in run.BENCHMARKS}
        table = following if following.startswith("|") and block.rstrip().endswith(":") else ""
        found += [(f"{block}\n{table}", name) for name in names]
    return found


def figures_that_are_not_in(section: str, text: str) -> list[str]:
    """Of prose, the numbers with a decimal point or an exponent; of tables, all; as rounded as they are written."""
    text = re.sub(VERSIONS, "", re.sub(r"\]\([^)]*\)|`[^`]*`|https://\S+", "", text))
    measured = [float(number.replace(",", "")) for number in re.findall(NUMBER, section)]
    missing = []
    for line in text.splitlines():
        for figure in re.findall(NUMBER, line):
            mantissa, _, exponent = figure.replace(",", "").partition("e")
            digits = len(mantissa.partition(".")[2])
            half = Fraction(1, 2) / 10**digits * Fraction(10) ** int(exponent or 0) * Fraction(1001, 1000)
            is_figure = line.startswith("|") or "." in figure or exponent
            if is_figure and all(abs(float(figure.replace(",", "")) - number) > half for number in measured):
                missing.append(figure)
    return missing


SCRIPTS = {str(path.relative_to(ROOT)): path.read_text().split('"""')[1] for path in (ROOT / "scripts").glob("*.py")}
CITED = [
    (page, text, name)
    for page, page_text in (TEXTS | SCRIPTS).items()
    if not page.startswith("benchmarks/")
    for text, name in cited(page_text)
    if name in RESULTS
]


@pytest.mark.parametrize(("page", "text", "name"), CITED, ids=[f"{page}, {name}" for page, _, name in CITED])
def test_figures_of_a_page_that_names_a_benchmark_are_what_it_measured(page, text, name):
    assert not figures_that_are_not_in(run.section(name, RESULTS[name]), text)


def test_a_figure_may_be_rounded_and_not_more():
    prose = "1.2 times as fast as 3 of torch 2.15; 1.3 times, or 1.17, or 1.18; a loss of 5.8e-07, not 5.9e-07"
    missing = figures_that_are_not_in("4 and 1.172, 1069 and 5.83e-07", f"{prose}\n| 4 | 1,069 | 7 |")
    assert missing == ["1.3", "1.18", "5.9e-07", "7"]
