"""Engines over tiny models, and transformers as the oracle of what they must answer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import transformers

from onestem.engine.engine import Engine
from onestem.engine.sequence import Sequence
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.models.weights import load_decoder
from onestem.options import EngineOptions
from onestem.request import Request, RequestOutput, SamplingParams
from tests.models.tiny import load_oracle

NO_DEFAULTS = GenerationDefaults()
TOLERANCE = 1e-4  # of log-probabilities in float32; hiding one key moves them by more than 1e-2


@lru_cache(maxsize=32)
def oracle_model(path: Path) -> torch.nn.Module:
    model = load_oracle(path)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end of sequence
    return model


@torch.inference_mode()
def oracle_logprobs(path: Path, ids: Seq[int]) -> torch.Tensor:
    """float32 `[len(ids), vocab]`: log-probabilities of what follows each token."""
    logits = oracle_model(path)(torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.float(), -1)


@torch.inference_mode()
def oracle_greedy(path: Path, prompt: Seq[int], count: int) -> list[int]:
    """Greedy tokens by transformers' own `generate`."""
    ids = torch.tensor([list(prompt)])
    out = oracle_model(path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def make_engine(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_pages: int = 4096,
    num_states: int = 64,
    quantization: str | None = None,
    **options,
) -> Engine:
    decoder = load_decoder(path, dtype=dtype, device=device, quantization=quantization)
    return engine_with(decoder, num_pages=num_pages, num_states=num_states, **options)


def engine_with(
    decoder: Decoder, *, num_pages: int = 4096, num_states: int = 64, team: object = None, **options
) -> Engine:
    """An engine without a tokenizer."""
    chosen = EngineOptions(**{"max_step_tokens": 512, **options})
    sizes = {"num_pages": num_pages, "num_states": num_states}
    return Engine(decoder, None, NO_DEFAULTS, chosen, **sizes, team=team)


def engine_on(device: str, path: Path, **options) -> Engine:
    """A small engine, to be made on a GPU and on a CPU."""
    return make_engine(path, device=device, **{"num_pages": 512, **options})


def record_logprobs(engine: Engine) -> dict[tuple[str, int, int], torch.Tensor]:
    """Watch an engine: (request, sequence, index of the last token seen) -> log-probabilities
    over the whole vocabulary, for every row that it samples from or scores."""
    seen: dict[tuple[str, int, int], torch.Tensor] = {}

    def note(sequence: Sequence, index: int, values: torch.Tensor) -> None:
        seen[sequence.state.request.request_id, sequence.index, index] = values

    watch_logits(engine, note)
    return seen


def watch_logits(engine: Engine, note: Callable[[Sequence, int, torch.Tensor], None]) -> None:
    """Have each row told that is sampled from or scored: its sequence, the index of the last token
    that it sees, and log-probabilities over the whole vocabulary."""
    sample = engine.launcher.sample

    def watched(batch_rows, changes, logits):
        table, scores = batch_rows.table, batch_rows.inputs.scores
        rows = [
            (table.sequences[sid], table.num_launched(sid) - 1)
            for sid in batch_rows.sampled.tolist()
        ]
        for span in scores:
            wanted = span.sequence.scoring.rows[span.first : span.end]
            rows += [(span.sequence, index) for index in np.unique(wanted).tolist()]
        logits = replace(logits, samples=list(logits.samples), scored=list(logits.scored))
        blocks = [*logits.samples, *logits.scored]
        values = torch.log_softmax(torch.cat(blocks), -1).clone() if blocks else []
        for (sequence, index), one in zip(rows, values, strict=True):
            if sequence is not None:
                note(sequence, index, one)
        return sample(batch_rows, changes, logits)

    engine.launcher.sample = watched


def requests_for(prompts: Seq[Seq[int]], *, max_tokens: int = 6, **params) -> list[Request]:
    params.setdefault("temperature", 0)
    params.setdefault("ignore_eos", True)
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=list(ids),
            params=SamplingParams(max_tokens=max_tokens, **params),
        )
        for i, ids in enumerate(prompts)
    ]


def answer(engine: Engine, requests: Seq[Request]) -> dict[str, RequestOutput]:
    """Run requests to the end; KV memory must balance at each step, and be free at the end."""
    for request in requests:
        engine.add_request(request)
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finished
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        engine.check()
    assert_idle(engine)
    assert len(outputs) == len(requests)
    return outputs


def assert_idle(engine: Engine) -> None:
    """Nothing is held, and free + cached == total."""
    engine.check()
    pool = engine.cache.pool
    assert pool.num_held == 0
    cached = {page for run in engine.cache.runs() for page in run.pages}
    assert pool.num_free + len(cached) == pool.num_pages
    assert all(run.pins == 0 for run in engine.cache.runs())


def shared_prompts(seed: int = 0, vocab: int = 270) -> list[list[int]]:
    """A tree of prompts: two documents, questions below, two levels, an equal pair, one that is a
    prefix of another, one alone, and one of a single token."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.integers(3, vocab, count)]

    head = draw(21)
    first, second = head + draw(33), head + draw(18)
    prompts = [first + draw(n) for n in (3, 11, 1)] + [second + draw(n) for n in (7, 16)]
    prompts.append(list(prompts[0]))
    prompts.append(prompts[1][:-4])
    prompts.append(draw(40))
    prompts.append(draw(1))
    return prompts


def check(path, expected, *, order=None, alone=False, **options):
    """Answers and log-probabilities of the shared prompts against the oracle's."""
    tokens, logprobs = expected
    requests = requests_for(shared_prompts(), max_tokens=len(tokens[0]))
    if order is not None:
        requests = [requests[i] for i in order]
    engine = make_engine(path, **options)
    seen = record_logprobs(engine)
    if alone:
        outputs = {}
        for request in requests:
            outputs |= answer(engine, [request])
    else:
        outputs = answer(engine, requests)
    for request in requests:
        number = int(request.request_id)
        output = outputs[request.request_id]
        assert output.outputs[0].token_ids == tokens[number]
        assert output.outputs[0].finish_reason == "length"
        last = len(request.prompt_token_ids) - 1
        for step in range(len(tokens[number])):
            got = seen[request.request_id, 0, last + step]
            assert (got - logprobs[number][last + step]).abs().max() < TOLERANCE
    return engine
