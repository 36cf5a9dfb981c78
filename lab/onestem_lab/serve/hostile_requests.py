"""What clients do, good and hostile; each is drawn, done and noted in one call."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx2

from onestem.errors import ConfigError
from onestem_lab.serve.hostile_answers import Reply, reply_of
from onestem_lab.serve.hostile_batches import ENDED, line_of, reply_of_line
from onestem_lab.serve.hostile_hand import Hand, asked, dumped, varied
from onestem_lab.serve.hostile_pool import (
    APP,
    COMPLETIONS,
    OWN,
    PREFIXES,
    SCHEMAS,
    Case,
    text,
)
from onestem_lab.serve.hostile_refused import REFUSED
from onestem_lab.serve.hostile_wire import Connection, head_of, post, received

__all__ = ["ACTIONS", "make_own", "tidy"]

Json = dict[str, Any]

# ----------------------------------------------------------------------------- good clients


async def ask(hand: Hand) -> None:
    """A good request, as a good client sends it."""
    case = hand.case()
    body = varied(case, hand.rng)
    began = time.monotonic()
    outcome = hand.judge(case, await asked(hand.http, case.path, body), body)
    if outcome == "right" and case.kind == "short" and not case.names:
        hand.tally.short_seconds.append(time.monotonic() - began)


async def late(hand: Hand) -> None:
    """A good request with little time."""
    case = hand.case()
    body = {**varied(case, hand.rng), "timeout": hand.rng.choice([0.001, 0.05, 0.3, 1.0, 3.0])}
    hand.judge(case, await asked(hand.http, case.path, body), body)


# ----------------------------------------------------------------------------- odd clients


def _raw(hand: Hand) -> tuple[Case, Json, bytes]:
    """A good request by hand, the last of its connection."""
    case = hand.case()
    body = varied(case, hand.rng)
    return case, body, post(case.path, hand.secret, body)


async def _judge_rest(hand: Hand, case: Case, body: Json, raw: bytes) -> None:
    """Judge the only answer of a connection."""
    (answer,) = received(raw)
    hand.judge(case, reply_of(answer.status, answer.body), body)


async def slow_writer(hand: Hand) -> None:
    case, body, request = _raw(hand)
    if hand.rng.random() < 0.5:
        request = _chunked(hand, case, body)
    async with Connection(hand.site.url) as connection:
        await connection.send_slowly(request, hand.rng)
        await _judge_rest(hand, case, body, await connection.rest())


def _chunked(hand: Hand, case: Case, body: Json) -> bytes:
    """The request with a body of chunks."""
    raw = dumped(body)
    head = post(case.path, hand.secret, b"", content_length=None, transfer_encoding="chunked")
    cuts = sorted(hand.rng.sample(range(1, len(raw)), min(3, len(raw) - 1)))
    parts = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return head + b"".join(chunks) + b"0\r\n\r\n"


async def half_close(hand: Hand) -> None:
    """Who has sent all may say so, and still reads."""
    case, body, request = _raw(hand)
    async with Connection(hand.site.url) as connection:
        await connection.send(request)
        connection.half_close()
        await _judge_rest(hand, case, body, await connection.rest())


async def slow_reader(hand: Hand) -> None:
    """A byte at a time at first."""
    case, body, request = _raw(hand)
    async with Connection(hand.site.url, small=True) as connection:
        await connection.send(request)
        first = []
        for _ in range(hand.rng.randint(20, 300)):
            first.append(await connection.read(1))
            await hand.pause(0.002)
        await _judge_rest(hand, case, body, b"".join(first) + await connection.rest())


async def stalled_reader(hand: Hand) -> None:
    """Stops reading for a while, and then goes on or leaves."""
    case, body, request = _raw(hand)
    async with Connection(hand.site.url, small=True) as connection:
        await connection.send(request)
        first = await connection.read(hand.rng.randint(1, 400))
        await hand.pause(hand.rng.uniform(0.2, 2.0))
        if hand.rng.random() < 0.5:
            await _judge_rest(hand, case, body, first + await connection.rest())
        else:
            hand.note("left")


async def pipelined(hand: Hand) -> None:
    """Two requests at once on one connection."""
    first, second = hand.case(), hand.case()
    requests = [
        post(first.path, hand.secret, first.body, connection="keep-alive"),
        post(second.path, hand.secret, second.body),
    ]
    async with Connection(hand.site.url) as connection:
        await connection.send(b"".join(requests))
        answers = received(await connection.rest())
    for case, answer in zip([first, second], answers, strict=True):
        hand.judge(case, reply_of(answer.status, answer.body))


async def leave_before(hand: Hand) -> None:
    """Gone before the answer comes, some of them before the request is whole."""
    _, _, request = _raw(hand)
    cut = len(request) if hand.rng.random() < 0.7 else hand.rng.randrange(len(request))
    async with Connection(hand.site.url) as connection:
        await connection.send(request[:cut])
        await hand.pause(hand.rng.choice([0, 0, 0.01, 0.1, 0.5]))
        _leave(hand, connection)


async def leave_midway(hand: Hand) -> None:
    """Gone in the middle of a stream."""
    case = hand.case()
    body = {**varied(case, hand.rng), "stream": True}
    async with Connection(hand.site.url) as connection:
        await connection.send(post(case.path, hand.secret, body))
        left = hand.rng.randint(1, 3000)
        while left > 0 and (part := await connection.read(left)):
            left -= len(part)
        _leave(hand, connection)


def _leave(hand: Hand, connection: Connection) -> None:
    """By closing, or in a ruder way."""
    way = hand.rng.random()
    if way < 0.3:
        connection.reset()
    elif way < 0.5:
        connection.half_close()
    hand.note("left")


async def refused(hand: Hand) -> None:
    """What must be refused, with an error that says why."""
    kind = hand.rng.choice(list(REFUSED))
    statuses, make = REFUSED[kind]
    one = dataclasses.replace(hand, kind=f"refused: {kind}")
    request = make(one)
    no_http = kind == "no HTTP"
    reply = await _only_reply(hand, request)
    # What is no HTTP gets no JSON, and may find the connection closed before it is all sent.
    told = no_http or (reply.fault is None and reply.error)
    if (reply.status in statuses and told) or (no_http and reply.status == 0):
        one.note(str(reply.status) if reply.status else "closed")
        return
    bad = "engine down" if reply.code == "engine_down" else "error"
    one.note(bad, sent=request[:2000].decode("latin-1"), found=reply.plain())


async def _only_reply(hand: Hand, request: bytes) -> Reply:
    """What comes for the only request of a connection; without status: nothing good."""
    try:
        async with Connection(hand.site.url) as connection:
            await connection.send(request)
            (answer,) = received(await connection.rest())
    except (OSError, ValueError) as error:
        return Reply(status=0, fault=f"{type(error).__name__}: {error}")
    return reply_of(answer.status, answer.body)


async def silent(hand: Hand) -> None:
    """A connection on which nothing, or half a head, is ever sent."""
    async with Connection(hand.site.url) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost:"[: hand.rng.randrange(40)])
        await hand.pause(hand.rng.uniform(0, 1))
        _leave(hand, connection)


# ----------------------------------------------------------------------------- objects


async def make_own(http: httpx2.AsyncClient) -> None:
    """The prefix and the schema that cases name and that each key has."""
    for path, body in (
        (f"/v1/prefixes/{OWN}", {"text": PREFIXES[OWN]}),
        (f"/v1/schemas/{OWN}", {"pml": SCHEMAS[OWN]}),
    ):
        answer = await http.put(path, json=body)
        if answer.status_code != 200:
            raise ConfigError(f"{path} cannot be made: {answer.text}")


async def tidy(http: httpx2.AsyncClient) -> None:
    """Delete the key's other prefixes and schemas, which those left who were cut."""
    for path in ("/v1/prefixes", "/v1/schemas"):
        for one in (await http.get(path)).json()["data"]:
            if one["name"] not in (APP, OWN):
                await http.delete(f"{path}/{one['name']}")


async def same_again(hand: Hand) -> None:
    """The next version of what all use, which says the same."""
    path, body = hand.rng.choice(
        [
            (f"/v1/prefixes/{OWN}", {"text": PREFIXES[OWN]}),
            (f"/v1/schemas/{OWN}", {"pml": SCHEMAS[OWN]}),
        ]
    )
    # KV memory may have no room for two versions of it.
    hand.expect(await hand.http.put(path, json=body), 200, 400)


async def operators_names(hand: Hand) -> None:
    """What belongs to the operator stays."""
    path, body = hand.rng.choice(
        [(f"/v1/prefixes/{APP}", {"text": "x"}), (f"/v1/schemas/{APP}", {"pml": SCHEMAS[APP]})]
    )
    put = hand.rng.random() < 0.5
    answer = await (hand.http.put(path, json=body) if put else hand.http.delete(path))
    hand.expect(answer, 409 if put else 403)


async def prefix(hand: Hand) -> None:
    """Made of a prompt's beginning, used by the rest of that prompt, and deleted, maybe at once."""
    case = hand.rng.choice([case for case in hand.pool if _can_be_cut(case)])
    ids, path = case.body["prompt"], f"/v1/prefixes/p{hand.place['client']}"
    cut = hand.rng.randrange(1, min(len(ids), 60))
    if not hand.expect(await hand.http.put(path, json={"token_ids": ids[:cut]}), 200, 400):
        return
    body = {**varied(case, hand.rng), "prompt": ids[cut:], "prefix": path.rpartition("/")[2]}
    await _use_and_delete(hand, case, body, path)


def _can_be_cut(case: Case) -> bool:
    prompt = case.body.get("prompt")
    single = isinstance(prompt, list) and isinstance(prompt[0], int) and len(prompt) > 1
    return single and "prefix" not in case.body


async def _use_and_delete(hand: Hand, case: Case, body: Json, path: str) -> None:
    asking = asyncio.create_task(asked(hand.http, case.path, body))
    try:
        if hand.rng.random() < 0.7:
            await asyncio.wait({asking})
        else:
            await hand.pause(hand.rng.choice([0, 0.01, 0.1]))
        _expect_deleted(hand, await hand.http.delete(path))
        reply = await asking
    finally:
        asking.cancel()  # where the deletion was cut, nobody else hears how it ends
        await asyncio.gather(asking, return_exceptions=True)
    if reply.status == 404 and str(reply.code).endswith("not_found"):
        hand.note("deleted before")
    else:
        hand.judge(case, reply, body)


def _expect_deleted(hand: Hand, answer: httpx2.Response) -> None:
    """After an outage all such objects are deleted (`tidy`), also those of who was not cut."""
    if answer.status_code == 404 and hand.site.outages.was_on(hand.began):
        hand.note("cut")
    else:
        hand.expect(answer, 200)


async def schema(hand: Hand) -> None:
    """A schema under another name, whose prompts are answered as those of the other."""
    case = hand.rng.choice([case for case in hand.pool if case.kind == "pml"])
    of = OWN if f'schema="{OWN}"' in case.body["pml"] else APP
    name = f"s{hand.place['client']}"
    markup = SCHEMAS[of].replace(f'name="{of}"', f'name="{name}"', 1)
    if not hand.expect(await hand.http.put(f"/v1/schemas/{name}", json={"pml": markup}), 200):
        return
    pml = case.body["pml"].replace(f'schema="{of}"', f'schema="{name}"')
    body = {**varied(case, hand.rng), "pml": pml}
    await _use_and_delete(hand, case, body, f"/v1/schemas/{name}")


async def bad_object(hand: Hand) -> None:
    """Prefixes, schemas and batches that cannot be."""
    rng = hand.rng
    path, body = rng.choice(
        [
            (
                "/v1/prefixes/bad",
                rng.choice([{}, {"text": ""}, {"text": 1}, {"token_ids": [9999]}]),
            ),
            ("/v1/prefixes/bad", {"text": "corn " * rng.choice([3000, 30000])}),
            ("/v1/prefixes/-", {"text": "x"}),
            ("/v1/schemas/bad", rng.choice([{}, {"pml": 1}, {"pml": "x"}, {"pml": SCHEMAS[OWN]}])),
            (
                "/v1/schemas/bad",
                {"pml": f'<schema name="bad">{"<module>" * rng.choice([1, 5000])}'},
            ),
        ]
    )
    hand.expect(await hand.http.put(path, json=body), 400)


# ----------------------------------------------------------------------------- batches


async def bad_file(hand: Hand) -> None:
    """Uploads and batches that cannot be."""
    way = hand.rng.randrange(4)
    if way == 0:
        answer = await hand.http.post("/v1/files", content=hand.rng.randbytes(200))
        hand.expect(answer, 415)
    elif way == 1:
        boundary = {"content-type": "multipart/form-data; boundary=x"}
        content = hand.rng.choice([b"", b"--x\r\n", b"--x--", hand.rng.randbytes(999)])
        hand.expect(await hand.http.post("/v1/files", content=content, headers=boundary), 400)
    elif way == 2:
        hand.expect(await _upload(hand, b"{}", purpose="fine-tune"), 400)
    else:
        body = {"input_file_id": "file-none", "endpoint": COMPLETIONS, "completion_window": "24h"}
        body |= hand.rng.choice([{}, {"endpoint": "/v1/x"}, {"completion_window": "1h"}, {"a": 1}])
        hand.expect(await hand.http.post("/v1/batches", json=body), 400, 404)


async def _upload(hand: Hand, raw: bytes, purpose: str = "batch") -> httpx2.Response:
    files = {"file": ("in.jsonl", raw)}
    return await hand.http.post("/v1/files", files=files, data={"purpose": purpose})


async def batch(hand: Hand) -> None:
    """A few cases as a batch, among lines that are none; waited for, cancelled or left."""
    first = hand.rng.choice([case for case in hand.pool if case.fits_a_line])
    others = [case for case in hand.pool if case.fits_a_line and case.path == first.path]
    chosen = {
        one.number: one for one in [first, *hand.rng.choices(others, k=hand.rng.randint(0, 5))]
    }
    uploaded = await _upload(hand, _lines(hand, list(chosen.values())))
    if not hand.expect(uploaded, 200):
        return
    body = {"input_file_id": uploaded.json()["id"], "endpoint": first.path}
    posted = await hand.http.post("/v1/batches", json={**body, "completion_window": "24h"})
    if hand.expect(posted, 200):
        await _follow(hand, posted.json(), chosen)


def _lines(hand: Hand, chosen: Sequence[Case]) -> bytes:
    lines = [line_of(case).raw() for case in chosen]
    if hand.rng.random() < 0.4:
        lines.insert(
            0,
            hand.rng.choice([b"{}", b"no JSON", b"\xff", b'{"custom_id": "a"}', b"[" * 99]) + b"\n",
        )
    return b"".join(lines)


async def _follow(hand: Hand, record: Json, chosen: Mapping[int, Case]) -> None:
    path = f"/v1/batches/{record['id']}"
    if hand.rng.random() < 0.2:
        hand.note("left")
        return
    for _ in range(hand.rng.choice([0, 1, 10, 40, 100])):
        if record["status"] in ENDED:
            break
        await hand.pause(0.5)
        record = (await hand.http.get(path)).json()
    else:
        hand.expect(await hand.http.post(f"{path}/cancel"), 200, 409)
        record = await _ended(hand, path)
    await _judge_lines(hand, record, chosen)


async def _ended(hand: Hand, path: str) -> Json:
    while True:
        record: Json = (await hand.http.get(path)).json()
        if record["status"] in ENDED:
            return record
        await hand.pause(0.1)


async def _judge_lines(hand: Hand, record: Json, chosen: Mapping[int, Case]) -> None:
    if record["status"] == "failed":
        hand.note("error", batch=record)
        return
    files = {record[name] for name in ("output_file_id", "error_file_id")} - {None}
    lines = []
    if record["output_file_id"]:
        answer = await hand.http.get(f"/v1/files/{record['output_file_id']}/content")
        lines = [json.loads(line) for line in answer.text.splitlines()]
    mine = [line for line in lines if str(line["custom_id"]) in map(str, chosen)]
    for line in mine:
        hand.judge(chosen[int(line["custom_id"])], reply_of_line(line))
    whole = len(mine) == len(chosen) or record["status"] == "cancelled"
    twice = len({line["custom_id"] for line in mine}) < len(mine)
    hand.note(record["status"] if whole and not twice else "wrong", batch=record)
    for name in [*files, record["input_file_id"]]:
        hand.expect(await hand.http.delete(f"/v1/files/{name}"), 200)


# ----------------------------------------------------------------------------- onlookers

LOOKED_AT = """/ /health /metrics /internal/state /openapi.json /version /v1/models /v1/prefixes
/v1/models/embedded /v1/prefixes/app /v1/schemas /v1/schemas/app /v1/files?limit=5 /v1/batches"""


async def look(hand: Hand) -> None:
    hand.expect(await hand.site.operator.get(hand.rng.choice(LOOKED_AT.split())), 200)


async def watch(hand: Hand) -> None:
    """The page's events, for a while."""
    key = hand.site.keys["operator"]
    headers = {"host": "localhost", "authorization": f"Bearer {key}"}
    async with Connection(hand.site.url) as connection:
        await connection.send(head_of("GET", "/internal/events", headers))
        begun = await connection.read()
        await hand.pause(hand.rng.uniform(0, 2.5))
        if begun.startswith(b"HTTP/1.1 200 "):
            _leave(hand, connection)
        else:
            hand.note("error", answer=begun[:500].decode("latin-1"))


async def chat_of_words(hand: Hand) -> None:
    """A request that nobody knows the answer of: it must have one."""
    body = {"messages": [{"role": "user", "content": text(hand.rng, 1, 80)}], "max_tokens": 5}
    hand.expect(await hand.http.post("/v1/chat/completions", json=body), 200, 429)


# What is done, and how often.
ACTIONS: Mapping[Callable[[Hand], Awaitable[None]], int] = {
    ask: 500,
    late: 30,
    slow_writer: 25,
    half_close: 25,
    slow_reader: 20,
    stalled_reader: 15,
    pipelined: 15,
    leave_before: 50,
    leave_midway: 50,
    silent: 10,
    refused: 140,
    same_again: 6,
    operators_names: 4,
    prefix: 15,
    schema: 10,
    bad_object: 10,
    bad_file: 8,
    batch: 10,
    look: 30,
    watch: 10,
    chat_of_words: 20,
}
