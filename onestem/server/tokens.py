"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onestem.batch.spool import NO_TOKENIZER
from onestem.checked import check, without_nulls
from onestem.errors import RequestError
from onestem.openai.read import read_conversation
from onestem.openai.schema import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from onestem.server.service import Service

__all__ = ["detokenize", "tokenize"]


def tokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    asked = check(TokenizeBody, without_nulls(body))
    service.check_model(asked.model)
    tokenizer, facts = service.bounded_tokenizer, service.client.facts
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("body has not exactly one of prompt and messages")
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        ids = tokenizer.encode_batch([asked.prompt], add_special_tokens=special)[0]
    else:
        prompt = read_conversation(asked)
        assert prompt.messages is not None
        ids = tokenizer.apply_chat_template(prompt.messages, **asdict(prompt.template))
    assert facts is not None
    made = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        made["token_strs"] = [
            tokenizer.token_bytes(token).decode(errors="replace") for token in ids
        ]
    return made


def detokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""
    asked = check(DetokenizeBody, without_nulls(body))
    service.check_model(asked.model)
    if service.tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    return {"prompt": service.tokenizer.decode(asked.tokens, skip_special_tokens=False)}
