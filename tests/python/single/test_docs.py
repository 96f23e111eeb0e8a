"""What the documentation shows is what runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_algorithms_that_are_shown_are_those_that_run():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "08_your_own_algorithm.py").read_text()
    assert len(shown) == 2
    assert all(each in example for each in shown)


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert len(pages) > 10
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} points to {target}"
