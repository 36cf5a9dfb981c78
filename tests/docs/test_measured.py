"""Figures of README and docs are those of the result files, and all of them."""

from __future__ import annotations

import json
import re

import pytest

from onestem.jobs import plan_file
from onestem.options import EngineOptions
from onestem_lab import measured, readme
from onestem_lab.blocks import replaced


def test_figures_of_the_readme_are_those_of_the_results():
    for path, text in readme.pages().items():
        assert path.read_text() == text, f"{path.name}: run scripts/docs"


def test_the_table_has_all_results_as_they_are():
    page = measured.page()
    assert measured.PAGE.read_text() == page, "run scripts/docs"
    listed = re.findall(r"^\| `(\S+\.json)` \|", page, re.M)
    assert sorted(listed) == sorted(
        str(path.relative_to(measured.RESULTS)) for path in measured.RESULTS.rglob("*.json")
    )


def test_every_case_beside_vllm_is_shown():
    """The worst as well as the best."""
    picture = (readme.ROOT / "docs" / "beside-vllm-light.svg").read_text()
    cases = [json.loads(path.read_text()) for path in readme.RESULTS.glob("peers-*-amx.json")]
    assert len(cases) == 9
    for case in cases:
        times = case["onestem_against"]["vllm"]
        shown = f"({times['median']:.1f}x; {times['min']:.1f} to {times['max']:.1f})"
        assert f"{case['median_seconds']['onestem']:.1f}  {shown}<" in picture
    page = (readme.ROOT / "README.md").read_text()
    for path in readme.RESULTS.glob("peers-*-second.json"):
        again = json.loads(path.read_text())
        assert f", {again['onestem_against']['vllm']['median']:.2f} times (" in page
    for result in readme.RESULTS.glob("*.json"):
        found = json.loads(result.read_text())
        for work in found.get("works", []) if isinstance(found, dict) else []:
            if isinstance(work, dict) and "vllm" in work.get("against", ()):
                ours = next(iter(work["engines"].values()))["median"]
                peer = max(run["rate"] for run in work["vllm"]["runs"])
                figure = re.escape(readme.figure(peer))
                assert re.search(rf"\| {figure} \(.* {ours / peer:.1f}x", page)


def test_the_demo_shares_what_the_readme_says(tmp_path):
    source = readme.ROOT / "examples" / "facts.jsonl"
    plan = plan_file(source, tmp_path, options=EngineOptions("embedded"), predicts=False)
    page = (readme.ROOT / "README.md").read_text()
    assert f"asks {plan['requests']} questions about {plan['groups']} documents" in page
    assert (
        f"computes {plan['processed_tokens']:,} of {plan['logical_prompt_tokens']:,} prompt tokens"
    ) in page


def test_a_page_without_the_block_is_an_error():
    page = "a\n<!-- made by x -->\nold\n<!-- end of x -->\nb\n"
    assert replaced(page, "x", "new") == page.replace("old", "new")
    for wrong in ("a", "<!-- made by x -->\n", "<!-- end of x --><!-- made by x -->\n"):
        with pytest.raises(ValueError, match="the page has no block"):
            replaced(wrong, "x", "new")
