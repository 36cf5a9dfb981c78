"""docs/pml.md: its examples work."""

from __future__ import annotations

import re
from pathlib import Path

from onestem.batch.format import BatchLine, parse_line
from onestem.pml import compile_prompt, lay_out, parse_prompt, parse_schema
from tests.pml.characters import Characters

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_markup():
    schema, prompt = blocks("xml")
    compiled = compile_prompt(lay_out(parse_schema(schema), Characters()), parse_prompt(prompt))
    assert {s.origin for s in compiled.segments if s.kind == "cached"} == {
        "the schema's text",
        "module trip-plan",
        "module miami",
    }


def test_python():
    code = blocks("python")[0]
    names: dict = {}
    exec(code, names)
    compiled = compile_prompt(lay_out(names["schema"], Characters()), names["prompt"])
    assert compiled.num_computed_tokens == len("3 days") + len("Surf?")


def test_what_runs_them_is_python():
    for code in blocks("python"):
        compile(code, "docs/pml.md", "exec")


def test_a_line_of_a_job():
    (line,) = blocks("json")
    request = parse_line(BatchLine(line.encode()))
    assert parse_prompt(request.prompt.pml or "").schema == "cities"
