"""Documents judged by a causal model: how probable "yes" is beside "no" after a question.

A pair of query and document is two messages of these roles, as templates of rerankers know them.
To a template that does not, it is put as Qwen3-Reranker's question. What the documents of a query
have in common comes first there, so that it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onestem.errors import RequestError
from onestem.openai.schema import Judged, RerankBody, ScoreBody
from onestem.openai.write import NotANumberError
from onestem.scores import Score

JsonObject = dict[str, Any]

ANSWERS = ("no", "yes")
# As in Qwen3-Reranker's model card.
TASK = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


def pair(instruction: str | None, query: str, document: str) -> list[JsonObject]:
    """A document as messages; without an instruction the template has its own."""
    told = [("system", instruction)] if instruction else []
    return [
        {"role": role, "content": text}
        for role, text in (*told, ("query", query), ("document", document))
    ]


def question(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """The messages of `pair` for a chat template that knows no such roles."""
    said = {one["role"]: one["content"] for one in messages}
    task = said.get("system", TASK)
    asked = f"<Instruct>: {task}\n<Query>: {said['query']}\n<Document>: {said['document']}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The documents of a body, and how they are judged.

    Attributes:
        pairs: a query and a document each.
        instruction: what makes a document relevant; None: the template's own.
        fields: further variables of the chat template.
        answers: what the model says of documents that are not relevant, and of those that are.
        best: how many of the best are listed; None: all are scored, in their order.
        with_documents: list their texts too.
    """

    pairs: Sequence[tuple[str, str]]
    instruction: str | None
    fields: Mapping[str, Any]
    answers: tuple[str, str]
    best: int | None = None
    with_documents: bool = False

    @staticmethod
    def of_documents(fields: RerankBody) -> Ranking:
        """Those of /v1/rerank."""
        texts = [one if isinstance(one, str) else one.text for one in fields.documents]
        return Ranking(
            pairs=[(fields.query, text) for text in texts],
            best=fields.top_n or len(texts),
            with_documents=fields.return_documents is not False,
            **_how(fields),
        )

    @staticmethod
    def of_pairs(fields: ScoreBody) -> Ranking | None:
        """Those of /v1/score; None: it has none. Raises `RequestError`."""
        for names in (("queries", "documents"), ("text_1", "text_2")):
            queries, documents = (getattr(fields, name) for name in names)
            if queries is not None and documents is not None:
                break
            if queries is not None or documents is not None:
                raise RequestError(f"{' and '.join(names)} go together")
        else:
            return None
        queries = [queries] if isinstance(queries, str) else queries
        documents = [documents] if isinstance(documents, str) else documents
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"{names[0]} has {len(queries)} texts and {names[1]} has {len(documents)}: give "
                "one query, or one for each document"
            )
        return Ranking(pairs=list(zip(queries, documents, strict=True)), **_how(fields))

    def messages(self) -> Iterator[list[JsonObject]]:
        """Those of each document."""
        return (pair(self.instruction, *each) for each in self.pairs)

    def body(
        self,
        name: str,
        created: int,
        model: str,
        scores: Sequence[Sequence[Score]],
        usage: Mapping[str, Any],
    ) -> JsonObject:
        """The answer, from each document's scores of both `answers`."""
        values = [relevance(*each) for each in scores]
        head = {"id": name, "model": model, "usage": usage}
        if self.best is None:
            each = [{"index": i, "object": "score", "score": one} for i, one in enumerate(values)]
            return {**head, "object": "list", "created": created, "data": each}
        results: list[JsonObject] = []
        for index in sorted(range(len(values)), key=lambda i: -values[i])[: self.best]:
            results.append({"index": index, "relevance_score": values[index]})
            if self.with_documents:
                results[-1]["document"] = {"text": self.pairs[index][1]}
        return {**head, "results": results}


def _how(fields: Judged) -> dict[str, Any]:
    no, yes = fields.classifier_from_token or ANSWERS
    if no == yes:
        raise RequestError("classifier_from_token has one text twice, expected two that differ")
    thinks = {"enable_thinking": False}  # an answer follows at once
    variables = thinks | ({"instruction": fields.instruction} if fields.instruction else {})
    return {
        "instruction": fields.instruction,
        "fields": variables | (fields.chat_template_kwargs or {}),
        "answers": (no, yes),
    }


def relevance(no: Score, yes: Score) -> float:
    """p(yes) / (p(yes) + p(no)); raises `NotANumberError`."""
    gap = no.logprob - yes.logprob
    if math.isnan(gap):
        raise NotANumberError("the model gives both answers no probability that is a number")
    return 1 / (1 + math.exp(min(gap, 700.0)))
