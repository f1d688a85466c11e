"""What the pages name is there: links, headings, tests, scripts, configs and guides."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from pages import GUIDES, PAGES, README, TEXTS, guide


def anchors(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def is_elsewhere(link: str, folder: Path) -> bool:
    """On the web, or in prove/, which a copy of the scripts may leave out."""
    left_out = not (ROOT / "prove").exists() and (folder / link).resolve().is_relative_to(ROOT / "prove")
    return link.startswith("https://") or left_out


@pytest.mark.parametrize("page", PAGES)
def test_links_and_tests_that_it_names_are_there(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if is_elsewhere(link, folder):
            continue
        path, _, heading = link.partition("#")
        assert not path or (folder / path).exists(), link
        if heading:
            assert heading in anchors((folder / path if path else ROOT / page).read_text()), link
    for name, file in re.findall(r"`(test_\w+)` in \[\w+\]\(([^)]+)\)", TEXTS[page]):
        assert f"def {name}(" in (folder / file).read_text(), name


def test_every_script_config_and_guide_can_be_found_from_an_index():
    index = guide("README")
    for path in (ROOT / "scripts" / "from_scratch").glob("*.py"):
        assert "def main(" not in path.read_text() or f"(../scripts/from_scratch/{path.name})" in index, path
    for path in GUIDES.rglob("*.md"):
        assert path.name == "README.md" or f"({path.relative_to(GUIDES)})" in index, path
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({path.relative_to(ROOT)})" in README, path
