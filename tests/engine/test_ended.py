"""Nothing of a request that has ended is alive, without Python's collector of cycles: that comes
late, and log-probabilities of many sequences are large."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from onestem.engine.engine import Engine
from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.sequence import Chunk, RequestState, ScoreSpan, Scoring, Sequence, StepChanges
from onestem.engine.step.launch import InFlightStep
from onestem.engine.step.sequence_table import SequenceTable
from onestem.llm import LLM
from onestem.request import (
    CompletionOutput,
    RankedLogprobs,
    Request,
    RequestOutput,
    SamplingParams,
)
from onestem.scores import ScorePath
from tests.engine.harness import make_engine
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

OF_A_REQUEST = (
    Request, RequestState, Sequence, SamplingRow, SamplingParams, Scoring,
    ScoreSpan, Chunk, StepChanges, StepDraft, InFlightStep, RequestOutput,
    CompletionOutput, RankedLogprobs,
)  # fmt: skip
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}


@contextmanager
def no_collector() -> Iterator[None]:
    """What exists now is left alone too: it is neither looked at nor listed."""
    was = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        if was:
            gc.enable()


def alive() -> Counter[str]:
    """Objects of requests that the collector knows."""
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST)


def unreachable() -> Counter[str]:
    """Objects of Onestem's types, and functions of its modules, that only the collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(
        f"{type(one).__name__} {getattr(one, '__qualname__', '')}"
        for one in gc.garbage
        if (getattr(one, "__module__", None) or "").startswith("onestem")
    )
    gc.set_debug(0)
    gc.garbage.clear()
    return found


def leaves(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """What is alive, beside what was before, and what is unreachable after `run`."""
    run()  # what is made once, such as caches of regular expressions, is made here
    with no_collector():
        run()
        return alive(), unreachable()


def drain(engine: Engine, until: int | None = None) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished() and (until is None or len(outputs) < until):
        outputs += engine.step()
    return outputs


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("ended") / "tiny")
    make_byte_level_tokenizer(path, VOCAB_SIZE)
    with LLM(str(path), kv_memory="64MiB", device="cpu", dtype="float32") as llm:
        yield llm


KINDS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "n": {"n": 5},
    "logprobs": {"n": 3, "logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "penalties": {"n": 3, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 2},
    "stop": {"stop": ["q"], "stop_token_ids": [7]},
    "grammar": {"response_format": SCHEMA, "n": 2},
    "allowed": {"allowed_token_ids": [40, 41], "bad_words": ["x"]},
    "choices": {"choices": ["ab", "abc", "x"], "logprobs": 2},
}


def request(name: str, stream: bool = False, **fields) -> Request:
    fields.setdefault("max_tokens", 6)
    ids = [3, 4, 5, 6, 7, 8]
    params = SamplingParams(**fields)
    return Request(request_id=name, prompt_token_ids=ids, params=params, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers(llm, kind, stream):
    def run() -> None:
        llm.engine.add_request(request(kind, stream, **KINDS[kind]))
        outputs = drain(llm.engine)
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason != "error"

    assert leaves(run) == (Counter(), Counter())


def test_scores(llm):
    def run() -> None:
        paths = tuple(
            ScorePath(np.arange(3, 3 + n), np.arange(n + 1), np.arange(4, 5 + n)) for n in (2, 4)
        )
        llm.engine.add_request(Request(request_id="s", prompt_token_ids=[3, 4, 5], paths=paths))
        (output,) = drain(llm.engine)
        assert output.scores is not None

    assert leaves(run) == (Counter(), Counter())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["n", "logprobs", "prompt_logprobs", "grammar", "choices"])
def test_aborted(llm, kind, begun):
    def run() -> None:
        llm.engine.add_request(request("a", **{**KINDS[kind], "max_tokens": 200}))
        for _ in range(3 * begun):
            llm.engine.step()
        llm.engine.abort("a")
        drain(llm.engine)

    assert leaves(run) == (Counter(), Counter())


def test_jobs(llm):
    """Also one that is closed before its end."""

    def run() -> None:
        lines = (request(f"line-{i}", n=2, logprobs=2, seed=i) for i in range(6))
        llm.engine.requests.add_job("job", lines)
        assert len(drain(llm.engine)) == 6
        lines = (request(f"line-{i}", n=2, logprobs=2, seed=i) for i in range(6))
        llm.engine.requests.add_job("job", lines)
        llm.engine.step()
        llm.engine.requests.remove_job("job")
        drain(llm.engine)
        answers = llm.engine.run(request(f"{i}", max_tokens=i + 1) for i in range(3))
        next(answers)
        answers.close()

    assert leaves(run) == (Counter(), Counter())


def test_calls(llm):
    """`LLM.generate` and its relatives, whose answers the caller drops."""

    def run() -> None:
        llm.generate(["one", "one two"], SamplingParams(n=2, logprobs=2, max_tokens=3))
        llm.score(["one"], [["two"]])
        with pytest.raises(Exception, match="max_tokens"):
            llm.generate(["x"], SamplingParams(max_tokens=0))
        with pytest.raises(Exception, match="prompt is empty"):
            llm.generate([[]], SamplingParams())

    assert leaves(run) == (Counter(), Counter())


@pytest.mark.steps_fail
def test_errors(llm, monkeypatch, caplog, steps_that_fail):
    """A request that cannot be refused before, and one whose row fails."""

    def run() -> None:
        engine = llm.engine
        put = SequenceTable.put

        def failing(self, sequence, computed):
            if sequence.state.request.request_id == "bad":
                raise RuntimeError("cannot")
            return put(self, sequence, computed)

        with monkeypatch.context() as patched:
            patched.setattr(SequenceTable, "put", failing)
            engine.add_request(request("bad", n=2, logprobs=2))
            engine.add_request(request("good", n=2, logprobs=2))
            ends = {o.request_id: o.outputs[0].finish_reason for o in drain(engine)}
        assert ends == {"bad": "error", "good": "length"}
        steps_that_fail.clear()

    with caplog.at_level(logging.CRITICAL, logger="onestem"):  # pytest keeps what is logged
        assert leaves(run) == (Counter(), Counter())


def test_preempted(tiny):
    """Pages for few: the newest give theirs, and are computed again."""
    engine = make_engine(tiny("llama"), num_pages=40, page_size=4, max_model_len=160)

    def run() -> None:
        for i in range(6):
            ids = [3 + i, 4, 5, 6, 7]
            params = SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True)
            engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, params=params))
        assert len(drain(engine)) == 6

    assert leaves(run) == (Counter(), Counter())
    assert engine.stats.num_preempted > 0


@pytest.mark.parametrize("private", [False, True])
def test_modules(tiny, private):
    engine = make_engine(tiny("llama"), share="off" if private else "full")
    prompts = compiled_prompts("isolated")

    def run() -> None:
        for i, compiled in enumerate(prompts):
            engine.add_request(pml_request(i, compiled, n=2, logprobs=2))
        assert len(drain(engine)) == len(prompts)

    assert leaves(run) == (Counter(), Counter())


def test_pinned_prefixes(llm):
    def run() -> None:
        llm.engine.requests.pin_prefix("p", list(range(3, 60)))
        drain(llm.engine)
        llm.engine.requests.unpin_prefix("p")

    assert leaves(run) == (Counter(), Counter())


def test_what_the_sampler_knows_goes_with_the_request(llm):
    """Parameters may be as large as a body of HTTP."""
    sampler = llm.engine.launcher.sampler
    before = len(sampler._settings), len(sampler._prompts)
    for i in range(20):
        llm.engine.add_request(request(f"{i}", repetition_penalty=1.1, logit_bias={i: 1.0}))
    assert len(sampler._settings) == before[0] + 20
    drain(llm.engine)
    assert (len(sampler._settings), len(sampler._prompts)) == before
