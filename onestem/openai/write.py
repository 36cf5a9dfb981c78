"""Answers in OpenAI's shapes: bodies of calls and batch lines, and a stream's chunks."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from onestem.openai.forms import AnswerReader, Mode, ReadAnswer, Reading
from onestem.openai.schema import Kind
from onestem.request import CompletionOutput, RequestOutput, TokenLogprobs
from onestem.scores import PathScores, Score, ScoreTask
from onestem.utf8 import Places, decoded, last_bytes

CREATED = 0
LEAST_LOGPROB = -9999.0  # JSON has no -infinity; this is what OpenAI writes

# token id -> the bytes it stands for; None where there is no tokenizer.
TokenBytes = Callable[[int], bytes] | None

# Characters above ASCII are escaped: no reader can take one for a line end.
compact_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """How a result is written: what its request asked for besides the text.

    `token_bytes` is None where there is no tokenizer; tokens are then called `token_id:<id>`.
    `first_token_bytes`: of one that begins a text, if it differs. `reading`: how calls and
    reasoning are read in the text; None: it has none. `special_ids` are left out of it if
    `skips_special`. Where the prompt precedes the answer, `echo_offsets` are the places of its
    tokens in its text, and `echoed_characters` is the length of that.
    """

    kind: Kind
    model: str
    logprobs: int | None
    return_token_ids: bool
    token_bytes: TokenBytes
    first_token_bytes: TokenBytes = None
    reading: Reading | None = None
    special_ids: Collection[int] = frozenset()
    skips_special: bool = True
    echo_offsets: Sequence[int] = ()
    echoed_characters: int = 0


class Dialect(Protocol):
    """How another API than OpenAI's chat writes the one answer to a chat.

    Attributes:
        id_prefix: what names of its answers begin with.
    """

    id_prefix: str

    def writer(
        self,
        name: str,
        created: int,
        form: ResponseFormat,
        usage: Callable[[], Mapping[str, Any]],
    ) -> DialectWriter:
        """The writer of one answer.

        Args:
            name, created: its id, and when it was asked for in unix seconds.
            usage: what it has cost so far, once it has begun.
        """
        ...


class DialectWriter(Protocol):
    """Writes one answer, either whole or as events. `events`, `token` and `usage` are as those of
    `Chunks`, but there is always a usage.

    Attributes:
        ping: an event for a stream that waits; b"": there is none.
    """

    ping: bytes

    def whole(self, piece: CompletionOutput, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the whole answer."""
        ...

    def events(self, pieces: Mapping[tuple[int, int], CompletionOutput]) -> bytes:
        """The events for what has come."""
        ...

    def token(self, token_id: int, text: str) -> bytes:
        """The events for one further token."""
        ...

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last events."""
        ...

    def failed(self, status: int, message: str) -> bytes:
        """The last events of a stream that fails; `status` is that of its error."""
        ...


def answer_body(name: str, output: RequestOutput, form: ResponseFormat) -> dict[str, Any]:
    """The answer to a request as OpenAI's API gives it; `created` is 0."""
    is_chat = form.kind == "chat"
    num_prompt_tokens = len(output.prompt_token_ids)
    num_output_tokens = output.metrics.num_output_tokens
    ordered = sorted(output.outputs, key=lambda sequence: sequence.index)
    choices = [_choice(name, sequence, output, form) for sequence in ordered]
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": CREATED,
        "model": form.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        },
    }
    if is_chat:
        said = ((one.token_ids, one.text) for one in ordered)
        thought = reasoning_tokens(form, output.prompt_token_ids, said)
        body["usage"]["completion_tokens_details"] = {"reasoning_tokens": thought}
    if form.return_token_ids:
        body["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
    if output.prompt_logprobs is not None:
        of_prompt = _prompt_logprobs(output.prompt_logprobs, form.token_bytes)
        for place in [body] if is_chat else choices:
            place["prompt_logprobs"] = of_prompt
    return body


def _choice(
    name: str, sequence: CompletionOutput, output: RequestOutput, form: ResponseFormat
) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if form.kind == "chat":
        logprobs = _chat_logprobs(sequence, form)
        said = message_of(name, sequence, form.reading)
    else:
        if form.logprobs is not None:  # else nobody asks where tokens begin
            offsets = _TextOffsets(form, output.prompt_token_ids)
            logprobs = _completion_logprobs(sequence, form, offsets)
        said = {"text": sequence.text}
    choice: dict[str, Any] = {
        "index": sequence.index,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason,
    }
    if sequence.choice is not None:
        choice["choice"] = sequence.choice
    if form.return_token_ids:
        choice["token_ids"] = [int(token) for token in sequence.token_ids]
    return choice | said


def scores_body(
    name: str, model: str, answered: Iterable[tuple[ScoreTask, Sequence[PathScores] | None]]
) -> dict[str, Any]:
    """The answer to score tasks, each given with the scores of its request's paths; `created` is 0.
    Log-probabilities are natural logarithms.

    Raises:
        NotANumberError: one of them is not a number, or is missing.
    """
    data: list[dict[str, Any]] = []
    num_tokens = 0
    for task, of_paths in answered:
        scores = list(map(_score, scores_of(task, of_paths)))
        data.append({"index": len(data), "scores": scores})
        num_tokens += task.num_tokens
    return {
        "id": f"score-{name}",
        "object": "score",
        "created": CREATED,
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
    }


def scores_of(task: ScoreTask, of_paths: Sequence[PathScores] | None) -> list[Score]:
    """A task's scores, from those of its request's paths; raises `NotANumberError` where they are
    missing."""
    if of_paths is None:
        raise NotANumberError("the engine gave no scores")
    return task.scores(of_paths)


def _score(score: Score) -> dict[str, Any]:
    logprobs = list(map(_logprob, score.token_logprobs))
    return {
        "logprob": sum(logprobs),
        "token_ids": score.token_ids,
        "token_logprobs": logprobs,
        "is_greedy": score.is_greedy,
    }


def message_of(name: str, sequence: CompletionOutput, reading: Reading | None) -> dict[str, Any]:
    """The answer as a message; one with tool calls has its finish reason too. `name`: the
    request's."""
    message: dict[str, Any] = {"role": "assistant", "content": sequence.text}
    if reading is None:
        return {"message": message}
    found = ReadAnswer.of(sequence.text, reading)
    message["content"] = found.text or (None if found.calls else "")
    if found.reasoning:
        message |= _thought(found.reasoning)
    if not found.calls:
        return {"message": message}
    form = reading.form
    message["tool_calls"] = [
        _call(own or form.call_id(name, sequence.index, index), called, arguments)
        for index, ((called, arguments), own) in enumerate(zip(found.calls, found.ids, strict=True))
    ]
    ended: str | None = sequence.finish_reason
    if ended == "stop" and not found.is_cut:
        ended = "tool_calls"
    return {"message": message, "finish_reason": ended}


def _thought(text: str) -> dict[str, str]:
    """Reasoning, by both of the names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


class NotANumberError(ValueError):
    """A log-probability that cannot be written."""


def _logprob(value: float) -> float:
    if math.isnan(value):
        raise NotANumberError("the model gave a log-probability that is not a number")
    return LEAST_LOGPROB if value < LEAST_LOGPROB else float(value)


def _token_text(token: int, token_bytes: TokenBytes) -> str:
    """A token as text; OpenAI's `bytes:\\x..` form where it is no text by itself."""
    if token_bytes is None:
        return f"token_id:{token}"
    spelled = token_bytes(token)
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _chat_logprobs(sequence: CompletionOutput, form: ResponseFormat) -> dict[str, Any] | None:
    """OpenAI's list of tokens with their bytes and alternatives; None if not asked for."""
    if form.logprobs is None or sequence.logprobs is None:
        return None
    content = []
    for token, logprobs in zip(sequence.token_ids, sequence.logprobs, strict=True):
        entry = _chat_token(token, logprobs[token], form.token_bytes)
        entry["top_logprobs"] = [
            _chat_token(other, logprob, form.token_bytes)
            for other, logprob in _top(logprobs, form.logprobs)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    return {
        "token": _token_text(token, token_bytes),
        "logprob": _logprob(logprob),
        "bytes": None if token_bytes is None else list(token_bytes(token)),
    }


def _top(logprobs: TokenLogprobs, count: int | None = None) -> Sequence[tuple[int, float]]:
    """The `count` most likely tokens, or all; equal ones are ordered by id."""
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


class _TextOffsets:
    """Where an answer's tokens begin in its text."""

    def __init__(self, form: ResponseFormat, prompt: Sequence[int]) -> None:
        self._form = form
        before = last_bytes(map(self._bytes, reversed(prompt)))
        # Of the next token, while nothing precedes it.
        self._first = None if before else form.first_token_bytes
        self._places = Places(form.echoed_characters, decoded(b"", before)[1])

    def next(self, token: int) -> int:
        """The offset of the next token."""
        spelled = self._bytes(token)
        if self._first is not None and spelled:
            spelled, self._first = self._first(token), None
        return self._places.next(spelled)

    def _bytes(self, token: int) -> bytes:
        """What a token adds to the text after others."""
        form = self._form
        if form.token_bytes is None or (form.skips_special and token in form.special_ids):
            return b""
        return form.token_bytes(token)


def reasoning_tokens(
    form: ResponseFormat, prompt: Sequence[int], answers: Iterable[tuple[Sequence[int], str]]
) -> int:
    """Number of tokens that reasoning and its marks have, or share, in answers to a prompt, each
    given by its token ids and its text."""
    reading = form.reading
    if reading is None or not reading.form.has_reasoning:
        return 0
    return sum(
        _num_thought(form, prompt, token_ids, ReadAnswer.of(text, reading).thoughts)
        for token_ids, text in answers
    )


def _num_thought(
    form: ResponseFormat, prompt: Sequence[int], token_ids: Sequence[int], places: Sequence[int]
) -> int:
    """Number of an answer's tokens between the places where reasoning begins and ends."""
    offsets, starts = _TextOffsets(form, prompt), list[int]()
    is_ended = len(places) % 2 == 0
    for token in token_ids if places else ():
        starts.append(offsets.next(token))
        if is_ended and starts[-1] >= places[-1]:
            break
    total = counted = 0
    for begin, end in zip_longest(places[::2], places[1::2]):
        first = bisect_left(starts, begin)
        if first == len(starts) or starts[first] > begin:  # it begins within a token
            first -= 1
        last = len(starts) if end is None else bisect_left(starts, end)
        total += max(0, last - max(first, counted))
        counted = last
    return total


def _completion_logprobs(
    sequence: CompletionOutput, form: ResponseFormat, offsets: _TextOffsets
) -> dict[str, Any] | None:
    """OpenAI's four lists. Text offsets count characters from the start of the text that is given
    back; `offsets` has read what came before."""
    if sequence.logprobs is None:
        return None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    starts: list[int] = []
    for place, (token, logprobs) in enumerate(
        zip(sequence.token_ids, sequence.logprobs, strict=True)
    ):
        tokens.append(_token_text(token, form.token_bytes))
        # A prompt's first token has none.
        token_logprobs.append(_logprob(logprobs[token]) if logprobs else None)
        top_logprobs.append(_completion_top(token, logprobs, form) if logprobs else None)
        is_echoed = place < len(form.echo_offsets)
        starts.append(form.echo_offsets[place] if is_echoed else offsets.next(token))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": starts,
    }


def _completion_top(token: int, logprobs: TokenLogprobs, form: ResponseFormat) -> dict[str, float]:
    """OpenAI's map from text to log-probability; it always has the sampled token.

    Of two tokens with the same text the more likely one is kept: the shape has room for one.
    """
    top: dict[str, float] = {}
    shown = dict(_top(logprobs, form.logprobs)) | {token: logprobs[token]}
    for other, logprob in shown.items():
        top.setdefault(_token_text(other, form.token_bytes), _logprob(logprob))
    return top


def _prompt_logprobs(
    prompt_logprobs: Sequence[TokenLogprobs | None], token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token (the first has none) token id -> log-probability."""
    return [
        None
        if logprobs is None
        else {
            str(token): {
                "logprob": _logprob(logprob),
                "decoded_token": _token_text(token, token_bytes),
            }
            for token, logprob in _top(logprobs)
        }
        for logprobs in prompt_logprobs
    ]


@dataclass(slots=True)
class _Said:
    """What is new in an answer; `calls` as JSON."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""

    @property
    def any(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Chunks:
    """Writes the events of one call's stream.

    What all events have in common is formatted once: a stream has an event for each token.

    Args:
        name: the call's id.
        created: unix seconds.
        prompts: token ids of each, for the first event of each sequence if ids are returned.
        n: sequences of each of its prompts.
        include_usage: the last event has the usage, all others have null.
    """

    ping = b""  # see `DialectWriter`

    def __init__(
        self,
        name: str,
        created: int,
        form: ResponseFormat,
        *,
        prompts: Sequence[Sequence[int]],
        n: int,
        include_usage: bool,
    ) -> None:
        self._form = form
        self._prompts = prompts
        self._n = n
        self._name = name
        self._readers: dict[int, AnswerReader] = {}
        self._offsets: dict[int, _TextOffsets] = {}
        self._begun: set[int] = set()
        # What is around a text, or reasoning, in the event of a token.
        self._around: dict[Mode, list[str]] = {}
        self._is_chat = form.kind == "chat"
        head = {
            "id": name,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": form.model,
        }
        self._head = f'data: {compact_json(head)[:-1]},"choices":['
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def events(self, pieces: Mapping[tuple[int, int], CompletionOutput]) -> bytes:
        """One event for each (prompt, sequence) that has something to show.

        Raises:
            NotANumberError: a log-probability cannot be written.
        """
        return "".join([self._event(part, piece) for (part, _), piece in pieces.items()]).encode()

    def token(self, token_id: int, text: str) -> bytes:
        """The event of one further token of a call's only sequence. Only what it says is formatted,
        where that is text or reasoning. Empty: there is nothing to show."""
        form = self._form
        if form.return_token_ids:
            return self.events({(0, 0): CompletionOutput(index=0, text=text, token_ids=[token_id])})
        mode: Mode = "text"
        told: str | None = text
        if form.reading is not None:
            reader = self._reader(form.reading, 0)
            mode, told = reader.mode, reader.plain(text)
            if told is None:
                said = self._read(form.reading, 0, text, False)
                if said.calls or (said.text and said.reasoning):
                    empty = CompletionOutput(index=0, text="", token_ids=[])
                    return self._written(0, empty, said).encode()
                told, mode = said.text or said.reasoning, "thought" if said.reasoning else "text"
        if not told:
            return b""
        around = self._around.get(mode)
        if around is None:
            mark = "\0"
            like = _Said(reasoning=mark) if mode == "thought" else _Said(mark)
            empty = CompletionOutput(index=0, text="", token_ids=[0])
            around = self._around[mode] = self._written(0, empty, like).split(compact_json(mark))
        return compact_json(told).join(around).encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last event, with the usage, if it was asked for."""
        return f'{self._head}],"usage":{compact_json(usage)}}}\n\n'.encode()

    def _event(self, part: int, piece: CompletionOutput) -> str:
        reading, said = self._form.reading, _Said(piece.text)
        if reading is not None:
            index = part * self._n + piece.index
            said = self._read(reading, index, piece.text, bool(piece.finish_reason))
        return self._written(part, piece, said)

    def _written(self, part: int, piece: CompletionOutput, said: _Said) -> str:
        """The event of a piece, of which `said` is what was read; "": there is nothing to show."""
        index = part * self._n + piece.index
        first = index not in self._begun
        form = self._form
        silent = not said.any and form.logprobs is None and not form.return_token_ids
        if silent and not first and not piece.finish_reason:
            return ""
        self._begun.add(index)
        if self._is_chat:
            news = self._chat(piece, first, said)
        else:
            news = self._completion(piece, index, said.text)
        ended: str | None = piece.finish_reason
        if ended == "stop" and form.reading is not None and self._readers[index].has_called:
            ended = "tool_calls"
        reason = f'"{ended}"' if ended else "null"
        choice = f'"choice":{piece.choice},' if piece.choice is not None else ""
        ids = of_chat = ""
        if form.return_token_ids:
            ids = f',"token_ids":[{",".join(map(str, piece.token_ids))}]'
            prompt = f',"prompt_token_ids":{compact_json([*self._prompts[part]])}' if first else ""
            ids, of_chat = (ids, prompt) if self._is_chat else (ids + prompt, "")
        return (
            f'{self._head}{{"index":{index},{choice}{news},"finish_reason":{reason}{ids}}}]'
            f"{of_chat}{self._end}"
        )

    def _reader(self, reading: Reading, index: int) -> AnswerReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = AnswerReader(reading)
        return reader

    def _read(self, reading: Reading, index: int, text: str, is_last: bool) -> _Said:
        """What is new in a sequence's answer."""
        reader = self._reader(reading, index)
        if not is_last and (told := reader.plain(text)) is not None:
            return _Said(reasoning=told) if reader.mode == "thought" else _Said(told)
        said = _Said()
        calls: dict[int, dict[str, Any]] = {}
        for event in (*reader.feed(text), *(reader.finish() if is_last else ())):
            if event.name:
                name = event.id or reading.form.call_id(self._name, index, event.index)
                calls[event.index] = {"index": event.index} | _call(name, event.name, "")
            elif event.arguments:
                call = calls.setdefault(
                    event.index, {"index": event.index, "function": {"arguments": ""}}
                )
                call["function"]["arguments"] += event.arguments
            said.text += event.text
            said.reasoning += event.reasoning
        said.calls = compact_json(list(calls.values())) if calls else ""
        return said

    def _chat(self, piece: CompletionOutput, first: bool, said: _Said) -> str:
        fields = ['"role":"assistant"'] if first else []
        if said.reasoning:
            thought = compact_json(said.reasoning)
            fields.append(f'"reasoning_content":{thought},"reasoning":{thought}')
        if said.text or (first and not said.calls and not said.reasoning):
            fields.append(f'"content":{compact_json(said.text)}')
        elif said.calls:
            fields.append('"content":null')
        if said.calls:
            fields.append(f'"tool_calls":{said.calls}')
        logprobs = "null"
        if self._form.logprobs is not None:
            logprobs = compact_json(_chat_logprobs(piece, self._form))
        return f'"delta":{{{",".join(fields)}}},"logprobs":{logprobs}'

    def _completion(self, piece: CompletionOutput, index: int, text: str) -> str:
        logprobs = "null"
        if self._form.logprobs is not None:
            if index not in self._offsets:
                self._offsets[index] = _TextOffsets(self._form, self._prompts[index // self._n])
            offsets = self._offsets[index]
            logprobs = compact_json(_completion_logprobs(piece, self._form, offsets))
        return f'"text":{compact_json(text)},"logprobs":{logprobs}'
