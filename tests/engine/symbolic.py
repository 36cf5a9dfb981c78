"""An engine whose model is symbolic: every KV slot says which token it holds behind which prefix.

A row must see each of its positions exactly once, each with the KV of its own prefix, or the step
fails; logits are a function of the whole prefix. So any wrong page, span, split or order shows at
once, at hundreds of steps a second.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from onestem.engine.engine import Engine
from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.step.runner import Logits
from onestem.models.config import GenerationDefaults
from onestem.ops.reference import visible
from onestem.options import EngineOptions
from onestem.request import CompletionOutput, Request, SamplingParams
from tests.ops.attend import check_plan

VOCAB = 8


class SymbolicRunner:
    """Stands in for `Runner`. `fail`: raised once, in place of a step."""

    def __init__(self, num_slots: int) -> None:
        self.scratch_slot = num_slots
        self.tokens = np.full(num_slots + 1, -1, np.int64)
        self.prefixes = np.full(num_slots + 1, -1, np.int64)
        self.windows = (None,)
        self.fail: BaseException | None = None
        self.depth = 1
        self.may_be_interrupted = True

    def prepare(self, inputs, new_pages):
        return {}

    def run(self, inputs, prepared, ids) -> Logits:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        token_ids = inputs.token_ids.copy()
        if ids is not None:
            token_ids[: len(ids)] = ids.numpy()
        return self.compute(inputs, token_ids)

    def abandon(self) -> None:
        pass

    def check(self) -> None:
        pass

    def on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    def compute(self, inputs, token_ids: np.ndarray) -> Logits:
        plan = inputs.plans[None]
        check_plan(plan)
        live = inputs.slots != self.scratch_slot
        used = inputs.slots[live]
        assert len(set(used.tolist())) == len(used), "two rows write one slot"
        self.tokens[used], self.prefixes[used] = token_ids[live], -1
        ends = np.zeros(len(inputs.slots), np.int64)
        for row in np.argsort(inputs.positions, kind="stable").tolist():
            ends[row] = self.row(plan, inputs, row) if live[row] else 0
        scored = [_stacked(ends[rows]) for rows in np.split(inputs.score_rows, [3])]
        samples = [_stacked(ends[rows]) for rows in np.split(inputs.logit_rows, [3])]
        return Logits(
            [block for block in samples if len(block)], [block for block in scored if len(block)]
        )

    def row(self, plan, inputs, row: int) -> int:
        slots, positions = visible(plan, row)
        position = int(inputs.positions[row])
        assert sorted(positions.tolist()) == list(range(position + 1)), "keys missing or doubled"
        slots = slots[np.argsort(positions)].tolist()
        assert slots[-1] == inputs.slots[row], "a row does not see itself"
        prefix = 0
        for index, slot in enumerate(slots):
            prefix = _behind(prefix, int(self.tokens[slot]))
            assert index == position or self.prefixes[slot] == prefix, "KV of another prefix"
        self.prefixes[slots[-1]] = prefix
        return prefix


def _behind(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token * 7919 + 12345) % (2**61 - 1)


def _stacked(prefixes: np.ndarray) -> torch.Tensor:
    logits = [_logits(prefix) for prefix in prefixes.tolist()]
    return torch.from_numpy(np.stack(logits) if logits else np.zeros((0, VOCAB), np.float32))


def _logits(prefix: int) -> np.ndarray:
    return np.random.default_rng(prefix).standard_normal(VOCAB).astype(np.float32) * 2


def alone(one: Request, limit: int) -> tuple[list[CompletionOutput], list | None]:
    """A request's answers and prompt_logprobs, one token after the other and without an engine.
    `limit`: max_model_len."""
    prefixes = [0]
    for token in one.prompt_token_ids:
        prefixes.append(_behind(prefixes[-1], token))
    outputs = [_completion(one, index, prefixes[-1], limit) for index in range(one.params.n)]
    return outputs, _prompt_logprobs(one, prefixes)


def _completion(one: Request, index: int, prefix: int, limit: int) -> CompletionOutput:
    params, sampler = one.params, Sampler(VOCAB)
    assert params.ignore_eos
    most = min(limit - len(one.prompt_token_ids), params.max_tokens or limit)
    output = CompletionOutput(index=index, text="", token_ids=[], finish_reason="length")
    if params.logprobs is not None:
        output.logprobs, output.cumulative_logprob = [], 0.0
    for token_index in range(most):
        row = SamplingRow(
            params, params.seed or 0, index, token_index, one.prompt_token_ids,
            lambda: output.token_ids, params.stop_token_ids,
        )  # fmt: skip
        sampled = sampler.sample(torch.from_numpy(_logits(prefix)[None].copy()), [row])
        token, entry = int(sampled.ids[0]), sampled.entries.get(0)
        output.token_ids.append(token)
        output.weight_versions.append(0)
        if entry is not None:
            output.logprobs.append(entry)
            output.cumulative_logprob += entry[token]
        prefix = _behind(prefix, token)
        if token in params.stop_token_ids and token_index >= params.min_tokens:
            output.finish_reason, output.stop_reason = "stop", token
            break
    return output


def _prompt_logprobs(one: Request, prefixes: list[int]) -> list | None:
    count = one.params.prompt_logprobs
    if count is None and one.score_from is None:
        return None
    first = 1 if count is not None else max(1, one.score_from or 0)
    sampler = Sampler(VOCAB)

    def entry(prefix: int, token: int) -> dict[int, float]:
        logits = torch.from_numpy(_logits(prefix)[None])
        scored = sampler.logprobs([logits], np.zeros(1, np.int64), np.array([token]), count)
        return scored.take().entries([token], [count or 0])[0]

    ids = one.prompt_token_ids
    return [None if i < first else entry(prefixes[i], token) for i, token in enumerate(ids)]


def make_symbolic(*, num_pages: int = 64, page_size: int = 4, **options) -> Engine:
    config = SimpleNamespace(
        head_shapes=((1, 1),), heads=(), kv_layers=(), sliding_windows=(None,),
        vocab_size=VOCAB, max_position_embeddings=100_000, delta=None,
    )  # fmt: skip
    decoder = SimpleNamespace(
        config=config,
        part=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_bytes_per_token=8,
    )
    options = EngineOptions(**{"max_step_tokens": 512, "page_size": page_size, **options})
    engine = Engine(decoder, None, GenerationDefaults(), options, num_pages=num_pages)
    engine.launcher.runner = SymbolicRunner(num_pages * page_size)
    return engine


def request(name: object, ids: list[int], **fields) -> Request:
    own = (
        "cache_salt", "common_prefix_tokens", "group", "group_prefix_tokens", "score_from", "stream"
    )  # fmt: skip
    extra = {key: fields.pop(key) for key in own if key in fields}
    fields.setdefault("ignore_eos", True)
    fields.setdefault("temperature", 0)
    return Request(
        request_id=str(name), prompt_token_ids=ids, params=SamplingParams(**fields), **extra
    )


def run_all(engine: Engine, requests, most_steps: int = 5000) -> dict:
    for one in requests:
        engine.add_request(one)
    return drain(engine, most_steps)


def drain(engine: Engine, most_steps: int = 5000, each_step=lambda outputs: None) -> dict:
    """Run to the end, checking the books at every step; outputs by request id."""
    outputs: dict = {}
    for _ in range(most_steps):
        if not engine.has_unfinished():
            return outputs
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs, "finished twice"
                outputs[output.request_id] = output
        engine.check()
        each_step(outputs)
    raise AssertionError(f"not done after {most_steps} steps")
