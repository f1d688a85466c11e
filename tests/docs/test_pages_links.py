"""What the pages name is there: links, headings, tests, scripts, configs, guides, and the lines of the glossary."""

import re

import pytest
from conftest import ROOT
from pages import GUIDES, PAGES, README, TEXTS, guide


def anchors(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_tests_that_it_names_are_there(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        assert not path or (folder / path).exists(), link
        if heading:
            assert heading in anchors((folder / path if path else ROOT / page).read_text()), link
    for name, file in re.findall(r"`(test_\w+)` in \[\w+\]\(([^)]+)\)", TEXTS[page]):
        assert f"def {name}(" in (folder / file).read_text(), name


def test_every_script_config_and_guide_can_be_found_from_an_index():
    index = TEXTS["scripts/README.md"]
    for path in (ROOT / "scripts").rglob("*.py"):
        helper = path.parent.name == "from_scratch" and "def main(" not in path.read_text()
        assert helper or f"({path.relative_to(ROOT / 'scripts')})" in index, path
    for path in GUIDES.glob("*.md"):
        assert f"(../guides/{path.name})" in index, path
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({path.relative_to(ROOT)})" in README, path


def test_each_common_mistake_has_its_test():
    rows = [row for row in README.splitlines() if re.search(r"^\|.*`test_", row)]
    assert len(rows) >= 13
    for row in rows:
        assert re.fullmatch(r"\| [^|]+ \| `test_\w+` in \[\w+\]\(tests/\w+/\w+\.py\) \|", row), row


def test_each_word_of_the_glossary_has_its_line():
    """One line of the named file, and of code: the line alone could stand in a comment."""
    words = set()
    for row in re.findall(r"^\|.+\|$", guide("words"), re.M):
        if row.startswith(("| word |", "| --- |")):
            continue
        word, line, file = re.fullmatch(r"\| ([^|]+) \|[^|]+\| `([^`]+)` in \[[\w.]+\]\(([^)]+)\) \|", row).groups()
        words.update(word.split(", "))
        lines = (GUIDES / file).read_text().splitlines()
        assert any(line in text.partition("#")[0] for text in lines), row
    assert words >= WORDS, WORDS - words


# What posts about DataParallel and DistributedDataParallel explain.
WORDS = {
    *("process group", "rank", "local rank", "world size", "master", "replica", "bucket"),
    *("collective", "point to point", "broadcast", "reduce", "all-reduce", "gather", "scatter"),
    *("vertical scaling", "horizontal scaling", "data parallelism", "model parallelism"),
    *("computational graph", "synchronous step", "asynchronous step", "GIL"),
}
