"""Answers about documents with everything computed, and with modules moved and repaired.

The head (system and the beginning of the user's turn) and the first document are an ordinary
prefix. The way of choosing is one of `ways.WAYS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from onestem_lab.modules.forward import KV, Llama, cut, join
from onestem_lab.modules.questions import SYSTEM, Document, Question, document
from onestem_lab.modules.ways import WAYS, Moved

HEAD = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
TAIL = "{text}<|im_end|>\n<|im_start|>assistant\n{start}"
END = "<|im_end|>"
ANSWER_TOKENS = 8
ALIKE = f"Zoe\n{document(random.Random('alike'), 'Zoe', 250).text}\n\n"


class Answer(NamedTuple):
    """`logprob` is that of the whole prompt's answer, a token's mean."""

    text: str
    right: bool
    equal: bool
    logprob: float
    computed: int  # tokens of moved modules
    moved: int


class Prompt(NamedTuple):
    """Ids of head, documents and question; first places of the documents and the question."""

    ids: list[int]
    places: list[int]


class Research:
    """Answers of a model in a folder. `copies` says how modules are computed that are not the
    first: `anchored` after the head, `isolated` alone, `neighbour` after another document, `own`
    after itself, `alike` after one that no question is about."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32):
        self.model = Llama(folder, device, dtype)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        (self.end,) = self.encode(END)
        self.head = self.encode(HEAD)
        self.documents: tuple[Document, ...] | None = None
        self.copies: dict[str, KV] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=self.model.device)

    def prompt(self, question: Question) -> Prompt:
        ids, places = list(self.head), []
        for one in question.documents:
            places.append(len(ids))
            ids += self.encode(f"{one.title}\n{one.text}\n\n")
        places.append(len(ids))
        ids += self.encode(TAIL.format(text=question.text, start=question.start))
        return Prompt(ids, places)

    def compute(self, ids: list[int]) -> KV:
        kv = self.model.empty(len(ids))
        self.model.run(self.ids(ids), torch.arange(len(ids), device=self.model.device), kv, 1)
        return kv

    def base(self, prompt: Prompt, documents: tuple[Document, ...], copies: str) -> KV:
        """Keys and values of head and documents; kept while the documents stay the same."""
        if documents != self.documents:
            self.documents, self.copies = documents, {}
        if copies not in self.copies:
            self.copies[copies] = self._base(prompt, copies)
        return self.copies[copies]

    def _base(self, prompt: Prompt, copies: str) -> KV:
        texts = [prompt.ids[a:b] for a, b in zip(prompt.places, prompt.places[1:])]
        if copies == "whole":
            return self.compute(prompt.ids[: prompt.places[-1]])
        before: list[list[int]] = {
            "anchored": [self.head] * len(texts),
            "isolated": [list[int]()] * len(texts),
            "neighbour": [self.head + text for text in [*texts[1:], texts[0]]],
            "own": [self.head + text for text in texts],
            "alike": [self.head + self.encode(ALIKE)] * len(texts),
        }[copies]
        parts = [self.compute(self.head + texts[0])]
        for text, front in list(zip(texts, before))[1:]:
            parts.append(cut(self.compute(front + text), len(front)))
        return join(parts)

    def whole(self, question: Question) -> tuple[Answer, list[int]]:
        """The whole prompt's answer, and its ids."""
        prompt = self.prompt(question)
        kv = self.padded(self.base(prompt, question.documents, "whole"), prompt)
        own = torch.arange(prompt.places[-1], len(prompt.ids), device=self.model.device)
        logits = self.model.run(self.ids(prompt.ids), own, cut(kv, 0, len(prompt.ids)), 1)[-1]
        ids = self.decode(prompt.ids, logits, kv)
        text = self.tokenizer.decode(ids)
        full = ids if len(ids) == ANSWER_TOKENS else [*ids, self.end]
        scores = self.teach(prompt, full, kv, own[:0])
        answer = Answer(text, question.judge(text), True, _logprob(scores, full), 0, 0)
        return answer, full

    def repaired(
        self, question: Question, way: str, share: float, copies: str, full: list[int]
    ) -> Answer:
        """The answer with moved modules repaired; `full` are the whole answer's ids."""
        prompt = self.prompt(question)
        base = self.base(prompt, question.documents, copies)
        kv = self.padded(base, prompt)
        own = torch.arange(prompt.places[-1], len(prompt.ids), device=self.model.device)
        modules = list(zip(prompt.places[1:], prompt.places[2:]))
        here = Moved(self.model, self.ids(prompt.ids), cut(kv, 0, len(prompt.ids)), modules, own)
        rows = WAYS[way](here, share).to(own) if share else own[:0]
        scores = self.teach(prompt, full, kv, rows)
        found = scores.argmax(-1).tolist()
        if found == full:
            ids = full
        else:
            at = next(i for i, (a, b) in enumerate(zip(found, full)) if a != b)
            ids = full[:at]
            ids += self.decode(
                prompt.ids + ids,
                scores[at],
                kv,
                lambda new: question.judge(self.tokenizer.decode(ids + new)),
            )
        text = self.tokenizer.decode([one for one in ids if one != self.end])
        logprob = _logprob(scores, full)
        return Answer(text, question.judge(text), found == full, logprob, len(rows), here.tokens)

    def padded(self, base: KV, prompt: Prompt) -> KV:
        """A copy with room for the question and its answer."""
        tail = len(prompt.ids) - prompt.places[-1] + ANSWER_TOKENS
        return join([base, self.model.empty(tail)])

    def teach(self, prompt: Prompt, full: list[int], kv: KV, rows: Tensor) -> Tensor:
        """Logits of each token of `full`, after `rows` were computed with the question."""
        ids = self.ids(prompt.ids + full[:-1])
        own = torch.arange(prompt.places[-1], len(ids), device=ids.device)
        return self.model.run(ids, torch.cat((rows, own)), cut(kv, 0, len(ids)), len(full))

    def decode(
        self,
        ids: list[int],
        logits: Tensor,
        kv: KV,
        enough: Callable[[list[int]], bool] = lambda _new: False,
    ) -> list[int]:
        """Greedy tokens after `ids`, until the turn ends, enough is said, or there is no room."""
        new: list[int] = []
        while True:
            token = int(logits.argmax())
            if token == self.end:
                return new
            new.append(token)
            if len(ids) + len(new) == len(kv[0][0]) or enough(new):
                return new
            row = torch.tensor([len(ids) + len(new) - 1], device=self.model.device)
            seen = self.ids(ids + new)
            logits = self.model.run(seen, row, cut(kv, 0, len(seen)), 1)[-1]


def _logprob(logits: Tensor, ids: list[int]) -> float:
    found = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    return float(found.mean())
