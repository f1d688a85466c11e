"""The pages, and what tests look for in them."""

import re

from conftest import ROOT

GUIDES = ROOT / "guides"
PAGES = ["README.md", "CONTRIBUTING.md", "accelerate_configs/README.md", "benchmarks/RESULTS.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted(GUIDES.rglob("*.md"))]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
README = TEXTS["README.md"]


def guide(name: str) -> str:
    return TEXTS[f"guides/{name}.md"]


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level, up to the next one."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text: str) -> list[str]:
    """The lines of all bash blocks, each command in one line."""
    found = []
    for block in blocks(text, "bash"):
        block = re.sub(r"\\\n\s*", "", block)
        found += re.sub(r"&&\n\s*", "&& ", block).strip().splitlines()
    return found
