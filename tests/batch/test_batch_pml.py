"""Lines of a job whose prompts are in PML."""

from __future__ import annotations

import json

import pytest

from onestem import LLM, SamplingParams
from onestem.errors import JobError
from onestem.jobs import plan_file, run_file
from onestem.options import EngineOptions
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

SCHEMA = """<schema name="people">
  <user>
    <module name="anna">Anna lives in Ostby. <parameter name="more" length="6" default=""/></module>
    <module name="ben">Ben lives in Westby.</module>
  </user>
</schema>"""
PROMPT = '<prompt schema="people"><anna/><ben/>Who lives in Ostby?</prompt>'


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", kv_memory="32MiB")


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "people.xml"
    path.write_text(SCHEMA)
    return path


def line(custom_id: str, body: dict, url: str = "/v1/completions") -> str:
    body = {"max_tokens": 5, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(llm, folder, lines, schemas):
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines))
    summary = run_file(llm, source, output, schemas=schemas)
    return summary, [json.loads(text) for text in output.read_text().splitlines()]


def test_beside_other_lines(llm, schema, tmp_path):
    lines = [
        line("a", {"pml": PROMPT}),
        line("b", {"prompt": "Hello"}),
        line("c", {"pml": PROMPT}, "/v1/chat/completions"),
        line("d", {"pml": PROMPT, "isolation": "isolated", "n": 2}),
        line("e", {"pml": PROMPT.replace("<ben/>", "")}),
    ]
    summary, results = run(llm, tmp_path, lines, [schema])
    assert summary.failed == 0
    texts = [result["response"]["body"]["choices"] for result in results]
    want = llm.generate_pml(PROMPT, SamplingParams(max_tokens=5, temperature=0))[0]
    assert texts[0][0]["text"] == want.outputs[0].text
    assert texts[2][0]["message"]["content"] == want.outputs[0].text
    assert len(texts[3]) == 2
    usage = results[0]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == len(want.prompt_token_ids)


BAD = {
    "unknown module": ({"pml": PROMPT.replace("anna", "nobody")}, "nobody"),
    "unknown schema": ({"pml": PROMPT.replace("people", "places")}, "places"),
    "malformed": ({"pml": "<prompt"}, "<text>:1"),
    "too long": ({"pml": PROMPT.replace("<anna/>", '<anna more="x y z x y z x y z x y z"/>')}, "6"),
    "no text": ({"pml": 3}, "pml is 3, expected text"),
    "two prompts": ({"pml": PROMPT, "prompt": "x"}, "pml and prompt"),
    "isolation": ({"pml": PROMPT, "isolation": "far"}, "anchored, isolated or off"),
    "isolation alone": ({"prompt": "x", "isolation": "off"}, "isolation needs pml"),
    "scores": ({"pml": PROMPT, "prompt_logprobs": 1}, "not available for prompts in PML"),
    "a schema": ({"pml": SCHEMA}, "schema"),
}


def test_a_bad_prompt_is_a_line_with_an_error(llm, schema, tmp_path):
    lines = [line(name, body) for name, (body, _) in BAD.items()]
    summary, results = run(llm, tmp_path, [*lines, line("good", {"pml": PROMPT})], [schema])
    assert summary.failed == len(BAD)
    for result, (_, message) in zip(results, BAD.values(), strict=False):
        assert message in result["error"]["message"], result
    assert results[-1]["error"] is None


def test_without_schemas(tmp_path):
    llm = LLM(dtype="float32", kv_memory="32MiB")
    _, results = run(llm, tmp_path, [line("a", {"pml": PROMPT}), line("b", {"prompt": "x"})], [])
    assert "schema" in results[0]["error"]["message"]
    assert results[1]["error"] is None


def test_another_schema_is_another_job(schema, tmp_path):
    llm = LLM(dtype="float32", kv_memory="32MiB")
    run(llm, tmp_path, [line("a", {"pml": PROMPT})], [schema])
    schema.write_text(SCHEMA.replace("Ostby", "Nordby"))
    other = LLM(dtype="float32", kv_memory="32MiB")
    with pytest.raises(JobError, match=r"out\.jsonl"):
        run_file(other, tmp_path / "in.jsonl", tmp_path / "out.jsonl", schemas=[schema])


def test_a_plan_reads_them_too(schema, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line(name, {"pml": PROMPT}) for name in "ab"))
    engine = EngineOptions(kv_memory="32MiB")
    options = {"options": engine, "keep_going": True}
    for number, (schemas, failed) in enumerate([([schema], 0), ([], 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = plan_file(source, folder, schemas=schemas, **options)
        assert (report["failed_lines"], report["requests"]) == (failed, 2 - failed)


def test_a_plan_refuses_what_its_model_does(schema, tmp_path):
    model = make_tiny("qwen3_5", tmp_path / "qwen3_5")
    make_byte_level_tokenizer(model, vocab_size=VOCAB_SIZE)
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line(name, {"pml": PROMPT}) for name in "ab"))
    asked = {"options": EngineOptions(model=model, kv_memory="32MiB"), "predicts": False}
    report = plan_file(source, tmp_path, schemas=[schema], keep_going=True, **asked)
    assert (report["failed_lines"], report["requests"]) == (2, 0)
