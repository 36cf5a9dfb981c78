"""Requests to this engine alone and cold, and the same ones where more is going on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from onestem.errors import ConfigError, OnestemError
from onestem.evals.bits.pairs import Kind, Reply
from onestem.evals.bits.texts import FAMILY, SHARED, texts
from onestem.evals.bits.watch import first_change, watch_logits, watch_operations
from onestem.llm import LLM
from onestem.options import EngineOptions
from onestem.planner import RunningOrder, planned
from onestem.request import ONE_TOKEN, Request, RequestOutput, SamplingParams

CHARACTERS = 10  # of a token, at most on average
TOP = 20  # log-probabilities kept of each token; of whole rows there are digests
SEVERAL = 4  # answers, where a request asks for several
STEP_TOKENS = 24  # of small steps: no multiple of a page
PREEMPT_STEPS = range(5, 45, 5)  # after which all that run are preempted; not on and on

Ask = tuple[list[int], SamplingParams]
# (request, first token of the answer that is asked for, reply)
Changed = Iterator[tuple[int, int, Reply]]


class _Session:
    """An engine, and the requests to it.

    Attributes:
        asks: each even one greedy, each odd one sampled with a seed.
        alone: the reply to each, alone and cold.
    """

    def __init__(self, llm: LLM, asks: Sequence[Ask], alone: Sequence[Reply] = ()) -> None:
        self.llm, self.asks, self.alone = llm, asks, alone
        self.forget = llm.reset_prefix_cache
        self._rows, self._count = watch_logits(llm.engine), 0

    def ask(
        self, asks: Sequence[Ask], gap: int = 0, preempt_steps: Collection[int] = ()
    ) -> list[list[Reply]]:
        """The replies to requests of a planned job, or that come `gap` steps one after the other.
        All that run are preempted after the steps of `preempt_steps`, counted from 1."""
        engine, self._count = self.llm.engine, self._count + 1
        outputs: list[RequestOutput] = []
        requests = [
            Request(request_id=f"{self._count}-{i}", prompt_token_ids=ids, params=params)
            for i, (ids, params) in enumerate(asks)
        ]
        if not gap:
            prompts, params = [np.array(ids) for ids, _ in asks], [one for _, one in asks]
            order = RunningOrder(self.llm.plan(prompts, params))
            outputs += engine.run(planned(requests, order))
        waiting, steps = requests[::-1] if gap else [], 0
        while waiting or engine.has_unfinished():
            if waiting and steps % gap == 0:
                engine.add_request(waiting.pop())
            outputs += engine.step()
            steps += 1
            if steps in preempt_steps:
                engine.reset_prefix_cache(reset_running_requests=True)
        found = {output.request_id: output for output in outputs}
        return [self._replies(found[request.request_id]) for request in requests]

    def _replies(self, output: RequestOutput) -> list[Reply]:
        """A request's answers. What it has cost counts once."""
        replies: list[Reply] = []
        for one in output.outputs:
            if one.finish_reason == "error":
                raise OnestemError(f"a request was not answered: {one.stop_reason}")
            digests, once = self._rows[output.request_id, one.index], int(not replies)
            replies.append(
                Reply(
                    one.token_ids,
                    one.logprobs or (),
                    [digests[at] for at in range(len(one.token_ids))],
                    cached=once * output.metrics.num_cached_tokens,
                    preempted=once * output.metrics.num_preempted,
                )
            )
        return replies


def _prefix(session: _Session, chosen: Iterable[int]) -> Changed:
    for i in chosen:
        ids, params = session.asks[i]
        session.forget()
        session.ask([(ids[: max(1, len(ids) * (i % 4 + 1) // 4)], ONE_TOKEN)])
        yield i, 0, session.ask([(ids, params)])[0][0]


def _goes_on(session: _Session, chosen: Iterable[int], *, cached: bool) -> Changed:
    """The second half of a greedy answer, after the first half as part of the prompt."""
    for i in chosen:
        (ids, params), tokens = session.asks[i], session.alone[i].tokens
        if params.temperature:
            continue
        session.forget()
        if cached:
            session.ask([(ids, params)])
        half = len(tokens) // 2
        rest = params.replace(max_tokens=len(tokens) - half)
        yield i, half, session.ask([([*ids, *map(int, tokens[:half])], rest)])[0][0]


def _several(session: _Session, chosen: Iterable[int], n: int) -> Changed:
    """Greedy answers are all as the one alone; of sampled ones the first is."""
    for i in chosen:
        ids, params = session.asks[i]
        session.forget()
        replies = session.ask([(ids, params.replace(n=n))])[0]
        for reply in replies[:1] if params.temperature else replies:
            yield i, 0, reply


def _job(session: _Session, chosen: Iterable[int], times: int = 1) -> Changed:
    session.forget()
    for _ in range(times):
        replies = session.ask(session.asks)
    for i, (reply,) in enumerate(replies):
        yield i, 0, reply


def _arrivals(
    session: _Session, chosen: Iterable[int], preempt_steps: Collection[int] = ()
) -> Changed:
    session.forget()
    replies = session.ask(session.asks[::-1], 2, preempt_steps)
    for i, (reply,) in enumerate(reversed(replies)):
        yield i, 0, reply


class EngineBits:
    """Asks an engine of these options. Each change is compared with the same request alone in an
    engine that holds nothing.

    Args:
        prompts, tokens, sampled: how many prompts, of how many tokens, and how many to sample.

    Raises:
        OnestemError: the engine cannot be made, or does not answer, or keeps prefixes elsewhere.
    """

    def __init__(self, options: EngineOptions, *, prompts: int, tokens: int, sampled: int) -> None:
        for name in ("host_kv", "disk_kv"):
            if getattr(options, name):
                raise ConfigError(f"{name} keeps prefixes, and requests begin cold: leave it out")
        self.options = options
        with LLM.from_options(options) as llm:
            self._asks = _asks(llm, prompts, tokens, sampled)
            session = _Session(llm, self._asks)
            self._alone = [reply for _, _, reply in _several(session, range(prompts), n=1)]
            little = 2 * (tokens + sampled) * llm.decoder.kv_bytes_per_token
            share, state = options.state_share, llm.decoder.state_bytes
        if state:  # of two, and a snapshot
            little = math.ceil(max(little / (1 - share), 3 * state / share))
        other_pages = {"page_size": 32 if options.page_size != 32 else 16}
        most = {"kv_memory": little, "max_model_len": tokens + sampled}
        self._changes: list[tuple[Kind, Callable[..., Changed], Mapping[str, Any]]] = [
            (Kind("alone again"), partial(_several, n=1), {}),
            (Kind("cached prefix", "cached"), _prefix, {}),
            (Kind("goes on, cold"), partial(_goes_on, cached=False), {}),
            (Kind("goes on, cached", "cached"), partial(_goes_on, cached=True), {}),
            (Kind("neighbours"), _job, {}),
            (Kind("neighbours, cached", "cached"), partial(_job, times=2), {}),
            (Kind("order of arrival"), _arrivals, {}),
            (Kind("preempted", "preempted"), partial(_arrivals, preempt_steps=PREEMPT_STEPS), {}),
            (Kind(f"n = {SEVERAL}"), partial(_several, n=SEVERAL), {}),
            (Kind(f"steps of {STEP_TOKENS} tokens"), _job, {"max_step_tokens": STEP_TOKENS}),
            (Kind(f"pages of {other_pages['page_size']} tokens"), _job, other_pages),
            (Kind("KV memory for two"), _arrivals, most),
            *(
                (Kind(f"share {mode}"), _job, {"share": mode})
                for mode in ("full", "storage", "off")
                if mode != options.share
            ),
        ]

    def kinds(self) -> Iterator[Kind]:
        """Each change, tried."""
        for options, changes in groupby(self._changes, key=lambda change: change[2]):
            try:
                llm = LLM.from_options(self.options.replace(**options))
            except OnestemError as error:
                for kind, _, _ in changes:
                    kind.refused = str(error)
                    yield kind
                continue
            with llm:
                session = _Session(llm, self._asks, self._alone)
                for kind, change, _ in changes:
                    for i, first, reply in change(session, range(len(self._asks))):
                        kind.compare(i, _after(self._alone[i], first), reply)
                    yield kind

    def explain(self, kind: Kind) -> dict[str, Any] | None:
        """Where the first pair that differs parts: `request`, `position` of the token, and
        `operation`, the first whose result has other bits there. None: no row that was seen differs
        when it is tried again, step by step."""
        assert kind.first is not None
        change, options = next(one[1:] for one in self._changes if one[0] is kind)
        tokens = [*self._asks[kind.first][0], *map(int, self._alone[kind.first].tokens)]
        with LLM.from_options(self.options) as llm:
            alone = watch_operations(llm.engine, tokens)
            _Session(llm, self._asks).ask([self._asks[kind.first]])
        with LLM.from_options(self.options.replace(**options)) as llm:
            others = watch_operations(llm.engine, tokens)
            list(change(_Session(llm, self._asks, self._alone), [kind.first]))
        found = first_change(alone, others)
        if found is None:
            return None
        return {"request": kind.first, "operation": found[0], "position": found[1]}


def _after(reply: Reply, first: int) -> Reply:
    """An answer from a token on."""
    return Reply(reply.tokens[first:], reply.logprobs[first:], reply.rows[first:])


def _asks(llm: LLM, prompts: int, tokens: int, sampled: int) -> list[Ask]:
    """Requests over beginnings that some of them share."""
    asks = []
    for i, (beginning, end) in enumerate(texts(prompts, CHARACTERS * tokens)):
        shared = int(SHARED * tokens)
        if llm.tokenizer is None:
            drawn = [np.random.default_rng(seed) for seed in (i // FAMILY, prompts + i)]
            parts = [rng.integers(0, llm.config.vocab_size, tokens).tolist() for rng in drawn]
        else:
            own = llm.tokenizer.encode(end, add_special_tokens=False)
            parts = [[*llm.tokenize([beginning])[0]], own]
        ids = [*parts[0][:shared], *parts[1][: tokens - shared]]
        params = SamplingParams(
            max_tokens=sampled, temperature=i % 2, seed=i, logprobs=TOP, ignore_eos=True
        )
        asks.append((ids, params))
    return asks
