"""Lines that ask for scores: those of `LLM.score`, whatever happens to the job."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onestem import LLM, Score
from onestem.batch import JobInterrupted
from onestem.jobs import run_file
from tests.batch.fakes import completion, results, run_fake, write_lines
from tests.models.tiny import VOCAB_SIZE
from tests.test_scores import OPTIONS, SAME, exam

TEXTS = ["A header of all.\nFirst.", "A header of all.\nSecond, which is longer."]


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as made:
        yield made


def pair(custom_id, prompt, completions, **fields) -> dict:
    return {"custom_id": custom_id, "prompt": prompt, "completions": completions, **fields}


def job(path, num: int = 20):
    """An exam, texts and token ids, in the short form and in that of a batch."""
    prompts, completions = exam(num)
    lines = [pair(f"q{i}", *both) for i, both in enumerate(zip(prompts, completions, strict=True))]
    lines += [{"custom_id": f"t{i}", "text": text} for i, text in enumerate(TEXTS)]
    lines.append(pair("ids", [5, 6, 7], [[8], [8, 9]]))
    body = {"text": [5, 6, 7]}
    lines.append({"custom_id": "long", "method": "POST", "url": "/v1/score", "body": body})
    return write_lines(path, lines)


def wanted(llm: LLM, num: int = 20) -> list[list[Score]]:
    """The same by `LLM.score`."""
    texts = [[score] for score in llm.score(TEXTS)]
    ids, whole = llm.score([[5, 6, 7]], [[[8], [8, 9]]]), [llm.score([[5, 6, 7]])]
    return [*llm.score(*exam(num)), *texts, *ids, *whole]


def same(lines: list[dict], expected: list[list[Score]]) -> None:
    for line, scores in zip(lines, expected, strict=True):
        assert line["error"] is None
        (data,) = line["response"]["body"]["data"]
        for found, score in zip(data["scores"], scores, strict=True):
            assert tuple(found["token_ids"]) == score.token_ids
            assert found["is_greedy"] == score.is_greedy
            np.testing.assert_allclose(found["token_logprobs"], score.token_logprobs, **SAME)
            assert found["logprob"] == sum(found["token_logprobs"])


def test_a_job_has_the_scores_of_the_library(llm, tmp_path):
    expected = wanted(llm)
    summary = run_file(llm, job(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert (summary.failed, len(summary.plan.order)) == (0, 24)
    lines = results(tmp_path / "out.jsonl")
    same(lines, expected)
    body = lines[0]["response"]["body"]
    tokens = len(llm.tokenizer.encode(exam()[0][0])) + 4
    assert body["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens
    }  # fmt: skip
    assert (body["object"], body["model"], body["created"]) == ("score", llm.name, 0)


def test_shared_beginnings_are_computed_once(model, tmp_path):
    prompts, _ = exam(48)
    with LLM(model, **OPTIONS) as fresh:
        ids = [tuple(fresh.tokenizer.encode(prompt.rstrip())) for prompt in prompts]
        distinct = {one[:i] for one in ids for i in range(1, len(one) + 1)}
        lines = [pair(str(i), prompt, ["A", "B"]) for i, prompt in enumerate(prompts)]
        run_file(fresh, write_lines(tmp_path / "in", lines), tmp_path / "out")
        # A prompt that is there twice has its last row computed twice; one with a space before its
        # options computes that row too.
        most = len(distinct) + 2 * len(prompts)
        assert len(distinct) <= fresh.engine.stats.processed_prompt_tokens <= most


def test_an_interrupted_job_goes_on(llm, tmp_path):
    source, output = job(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"

    def stop(progress):
        if progress.stage == "run" and progress.done == 9:
            raise KeyboardInterrupt

    with pytest.raises(JobInterrupted, match="9 of 24 lines are done"):
        run_file(llm, source, output, on_progress=stop)
    kept = output.with_name("out.jsonl.partial").read_bytes().splitlines()
    assert run_file(llm, source, output).resumed == 9
    assert set(kept) <= set(output.read_bytes().splitlines())
    same(results(output), wanted(llm))
    llm.engine.check()


BAD = [
    (pair("a", "x", []), "completions of a prompt are []"),
    (pair("a", "x", "y"), "completions of a prompt are 'y'"),
    (pair("a", "x", [""]), "completion '' has no tokens of its own"),
    (pair("a", "x", [[5]]), "text and ids mixed"),
    (pair("a", "x", ["a", [5]]), "among others of another type"),
    (pair("a", ["x", "y"], [["a"], ["b"]]), "prompt is a list of 2 prompts"),
    (pair("a", [5], [[VOCAB_SIZE]]), f"token id {VOCAB_SIZE}"),
    (pair("a", [5] * 200, [[6] * 200]), "prompt and completion have 399 tokens"),
    (pair("a", [5], [[6]], temperature=0), "temperature"),
    ({"custom_id": "a", "text": ""}, "text is empty"),
    ({"custom_id": "a", "text": [5] * 400}, "prompt has 400 tokens, limit is 256"),
    ({"custom_id": "a", "text": "x", "prompt": "y"}, "not exactly one of prompt and text"),
    ({"custom_id": "a", "text": "x", "completions": ["y"]}, "go together"),
    ({"custom_id": "a", "text": "x", "timeout": 5}, "not supported in a batch line"),
]


def test_a_bad_line_says_what_is_wrong(model, tmp_path):
    good = pair("good", "a prompt", [" A", " B"])
    lines = [line | {"custom_id": str(i)} for i, (line, _) in enumerate(BAD)]
    source, output = write_lines(tmp_path / "in.jsonl", [*lines, good]), tmp_path / "out.jsonl"
    with LLM(model, **OPTIONS, max_model_len=256) as small:
        assert run_file(small, source, output).failed == len(BAD)
        *bad, last = results(output)
        for line, (_, message) in zip(bad, BAD, strict=True):
            assert message in line["error"]["message"], line
        same([last], small.score(["a prompt"], [[" A", " B"]]))


def test_scores_beside_answers(tmp_path):
    """Of one file: each kind of line is what it is alone."""
    lines = [completion("a"), pair("b", "which?", [" A", " B"]), {"custom_id": "c", "text": "hi"}]
    run_fake(write_lines(tmp_path / "all", lines), tmp_path / "all.out")
    found = [line["response"]["body"] for line in results(tmp_path / "all.out")]
    assert [body["object"] for body in found] == ["text_completion", "score", "score"]
    assert [len(body["data"][0]["scores"]) for body in found[1:]] == [2, 1]


def test_a_job_resumed_with_fewer_sequences_goes_on_with_what_they_allow(model, tmp_path):
    def line(i):
        body = {"prompt": "a", "max_tokens": 2, "n": 3 if i == 6 else 1}
        return {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}

    source = write_lines(tmp_path / "in.jsonl", [line(i) for i in range(8)])
    output = tmp_path / "out.jsonl"

    def stop(progress):
        if progress.stage == "run" and progress.done == 2:
            raise KeyboardInterrupt

    with LLM(model, **OPTIONS, levels="none") as llm, pytest.raises(JobInterrupted):
        run_file(llm, source, output, on_progress=stop)
    with LLM(model, **OPTIONS, levels="none", max_num_seqs=2) as llm:
        summary = run_file(llm, source, output)
    assert (summary.resumed, summary.failed) == (2, 1)
    found = {one["custom_id"]: one for one in map(json.loads, output.read_text().splitlines())}
    assert len(found) == 8
    assert found["6"]["error"]["message"].startswith("n is 3, and at most 2 sequences run at once")
