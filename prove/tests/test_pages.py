"""What the pages of this project link to is there."""

import re

import pytest
from conftest import ROOT

FILES = [*ROOT.glob("*.md"), *(ROOT / "prove_training").glob("*.md"), *(ROOT / "silent_bugs").rglob("*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(FILES)}


def anchors(text: str) -> list[str]:
    """The names of the headings of a page, as links have them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES)
def test_links_are_there_and_stay_in_this_project(page):
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if not link.startswith("https://"):
            path, _, heading = link.partition("#")
            target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            assert target.exists(), link
            assert target.is_relative_to(ROOT), link
            assert not heading or heading in anchors(target.read_text()), link
