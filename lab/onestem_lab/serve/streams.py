"""500 streams at a time: every one ends once, in order, with its own tokens.

    python -m onestem_lab.serve.streams [--streams 500] [--scenes all,leave,slow,kill] [--short]

Scenes, each against a server of its own with the embedded model:
  all    all streams at once;
  leave  the same, and two of five go away at random moments;
  slow   half of the readers wait between reads; the others must not wait for them;
  kill   kill -9 of the engine under load, with a job posted: each stream gets its answer or an
         error, the job's output is complete and without doubles.
Token ids are compared with those of the same prompts answered offline. Prompts where the two best
tokens of some step are nearer than 2e-4 in log-probability are not asked (about one in a hundred):
which one is greater is for rounding to say, and that changes with the batch. After each scene KV
memory must be free + cached == total. Ends with code 1 where something is not so. Written to
lab/results/serve-streams.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem_lab.load.client import Target, open_client
from onestem_lab.load.run import model_name
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.stream import Answer
from onestem_lab.load.workload import Ask, Workload
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.serve.service import at_rest, engine_pid, finished_job, job_output, post_job, state

SCENES = ("all", "leave", "slow", "kill")
# Twice what the engine's log-probabilities may differ from those of transformers.
CLEAR = 2e-4
# No byte for this long is a hang.
HANG_SECONDS = 300.0


@dataclass
class Stream:
    """One request, what it must answer, and how it ended: whole, left, told or lost.

    `told`: an error came, and what was streamed before it was right. `lost`: anything else.
    """

    ask: Ask
    expected: list[int]
    leave_after: int | None = None
    pause: float = 0.0
    end: str = "lost"
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--scale", type=float, default=0.1, help="of question and answer lengths")
    parser.add_argument("--job", type=int, default=200, help="lines of the job of `kill`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="60 streams, 30 lines, no result file")
    options = parser.parse_args()
    if options.short:
        options.streams, options.job = 60, 30
    wanted = options.scenes.split(",")
    if set(wanted) - set(SCENES):
        parser.error(f"scenes are {options.scenes!r}, expected some of {','.join(SCENES)}")
    load = Workload(
        seed=options.seed, apps=5, system_tokens=128, scale=options.scale, vocab_size=2560
    )
    count = max(options.streams, options.job)
    answered = answer_offline([load.ask(i) for i in range(count + count // 10 + 10)])[:count]
    asks, offline = [ask for ask, *_ in answered], [(ids, text) for _, ids, text in answered]
    result: dict[str, Any] = {
        "command": "python -m onestem_lab.serve.streams " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "scenes": {},
    }
    for name in wanted:
        result["scenes"][name] = outcome = run_scene(name, asks, offline, options)
        print(name, json.dumps(outcome), flush=True)
    if not options.short:
        path = RESULTS / "serve-streams.json"
        write(path, result)
    sys.exit(not all(scene["good"] for scene in result["scenes"].values()))


def answer_offline(asks: Sequence[Ask]) -> list[tuple[Ask, list[int], str]]:
    """Requests with token ids and text, answered in this process without a server; those whose
    every token is clear."""
    from onestem.llm import LLM
    from onestem.request import SamplingParams

    params = [
        SamplingParams(max_tokens=ask.output_tokens, temperature=0, ignore_eos=True, logprobs=2)
        for ask in asks
    ]
    outputs = LLM("embedded", seed=0).generate([ask.prompt for ask in asks], params)
    answers = [output.outputs[0] for output in outputs]
    return [
        (ask, list(answer.token_ids), answer.text)
        for ask, answer in zip(asks, answers)
        if all(_margin(step) >= CLEAR for step in answer.logprobs or ())
    ]


def _margin(logprobs: Mapping[int, float]) -> float:
    best, second = sorted(logprobs.values(), reverse=True)[:2]
    return best - second


def run_scene(
    name: str,
    asks: Sequence[Ask],
    offline: Sequence[tuple[list[int], str]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    rng = random.Random(options.seed)
    streams = [Stream(ask, ids) for ask, (ids, _) in zip(asks[: options.streams], offline)]
    if name == "leave":
        for stream in rng.sample(streams, len(streams) * 2 // 5):
            stream.leave_after = rng.randrange(0, stream.ask.output_tokens + 1)
    if name == "slow":
        for stream in streams[::2]:
            stream.pause = rng.uniform(0.05, 0.3)
    port = free_port()
    with TemporaryDirectory() as folder:
        command = onestem_command(port, Path(folder), ["--model=embedded", "--kv-memory=256MiB"])
        with serving(command, port) as url:
            job = [(f"line-{i}", asks[i], offline[i][1]) for i in range(options.job)]
            scene = _killed(url, streams, job) if name == "kill" else _together(url, streams)
            return asyncio.run(scene)


async def _together(url: str, streams: Sequence[Stream]) -> dict[str, Any]:
    target = Target(model_name(url))
    async with open_client(url, None, HANG_SECONDS) as client:
        seconds = await _run_all(client, target, streams)
        rest = await at_rest(client)
    return _verdict(streams, seconds, rest, good=not _count(streams)["told"])


async def _killed(
    url: str, streams: Sequence[Stream], job: Sequence[tuple[str, Ask, str]]
) -> dict[str, Any]:
    """The engine is killed once a third of all tokens has come."""
    target = Target(model_name(url))
    async with open_client(url, None, HANG_SECONDS) as client:
        job_id = await post_job(client, [_line(target, name, ask) for name, ask, _ in job])
        pid = await engine_pid(client)
        left = sum(len(stream.expected) for stream in streams) // 3

        def one_more() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(pid, signal.SIGKILL)

        seconds = await _run_all(client, target, streams, one_more)
        batch = await finished_job(client, job_id)
        again = [Stream(stream.ask, stream.expected) for stream in streams[:20]]
        await _run_all(client, target, again)
        found = {
            "restarts": (await state(client))["engine"]["restarts"],
            "after": _count(again),
            "job": await _job_verdict(client, batch, job),
        }
        rest = await at_rest(client)
    good = found["restarts"] == 1 and found["after"]["whole"] == len(again) and found["job"]["good"]
    return _verdict(streams, seconds, rest, good=good) | found


async def _run_all(
    client: httpx2.AsyncClient,
    target: Target,
    streams: Sequence[Stream],
    on_chunk: Callable[[], None] = lambda: None,
) -> float:
    began = time.monotonic()
    await asyncio.gather(*(_run(client, target, stream, on_chunk) for stream in streams))
    return time.monotonic() - began


async def _run(
    client: httpx2.AsyncClient, target: Target, stream: Stream, on_chunk: Callable[[], None]
) -> None:
    began = time.monotonic()
    answer = Answer(stream.ask.output_tokens, stream.expected)
    failure = None
    try:
        await _read(client, target, stream, answer, on_chunk)
    except (httpx2.HTTPError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    stream.seconds = time.monotonic() - began
    if stream.end != "left":
        answer.end()
        stream.faults = [failure] if failure else answer.faults
        stream.end = _end(answer, stream, failure)
        if stream.end == "told":
            # What else is wrong with a stream that an error has cut short is the error's doing.
            stream.faults = [fault for fault in stream.faults if "error: " in fault or failure]


async def _read(
    client: httpx2.AsyncClient,
    target: Target,
    stream: Stream,
    answer: Answer,
    on_chunk: Callable[[], None],
) -> None:
    body = target.body(stream.ask)
    async with client.stream("POST", target.path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise httpx2.HTTPError(f"status {response.status_code}: {text[:200]}")
        async for received in response.aiter_raw():
            before = len(answer.token_times)
            answer.feed(received, 0.0)
            for _ in range(len(answer.token_times) - before):
                on_chunk()
            if stream.leave_after is not None and len(answer.token_ids) >= stream.leave_after:
                stream.end = "left"
                return
            await asyncio.sleep(stream.pause)


def _end(answer: Answer, stream: Stream, failure: str | None) -> str:
    if failure is not None:
        return "told" if failure.startswith("HTTPError: status 503") else "lost"
    if not answer.faults:
        return "whole"
    told = any(fault.startswith("error: ") for fault in answer.faults)
    right = answer.token_ids == stream.expected[: len(answer.token_ids)]
    return "told" if told and right else "lost"


def _count(streams: Sequence[Stream]) -> dict[str, int]:
    ends = Counter(stream.end for stream in streams)
    return {end: ends[end] for end in ("whole", "left", "told", "lost")}


def _verdict(
    streams: Sequence[Stream], seconds: float, rest: dict[str, Any], *, good: bool
) -> dict[str, Any]:
    counts = _count(streams)
    problems = Counter(fault for stream in streams for fault in stream.faults)
    fast = [stream.seconds for stream in streams if not stream.pause and stream.end == "whole"]
    slow = [stream.seconds for stream in streams if stream.pause]
    return {
        "streams": len(streams),
        **counts,
        "good": bool(good and not counts["lost"] and rest["balanced"] and rest["idle"]),
        "problems": dict(problems.most_common(8)),
        "seconds": round(seconds, 2),
        "last_fast_reader_s": round(max(fast, default=0.0), 2),
        "last_slow_reader_s": round(max(slow, default=0.0), 2),
        "memory_at_rest": rest,
    }


def _line(target: Target, name: str, ask: Ask) -> dict[str, Any]:
    body = target.body(ask)
    for streamed in ("stream", "stream_options", "return_token_ids"):
        body.pop(streamed, None)
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


async def _job_verdict(
    client: httpx2.AsyncClient, batch: dict[str, Any], job: Sequence[tuple[str, Ask, str]]
) -> dict[str, Any]:
    answered: dict[str, str] = {}
    lines = 0
    with suppress(KeyError, httpx2.HTTPError):
        for line in await job_output(client, batch):
            lines += 1
            answered[line["custom_id"]] = line["response"]["body"]["choices"][0]["text"]
    right = sum(answered.get(name) == text for name, _, text in job)
    return {
        "status": batch["status"],
        "lines": lines,
        "right": right,
        "of": len(job),
        "good": batch["status"] == "completed" and lines == right == len(job),
    }


if __name__ == "__main__":
    main()
