"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from onestem.batch.first_pass import NO_TOKENIZER
from onestem.checked import check, without_nulls
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.errors import RequestError
from onestem.openai.read import read_conversation
from onestem.openai.schema import DetokenizeBody, TokenizeBody
from onestem.rawtext import RawText
from onestem.server.served_model import ServedModel

TOKENIZED_LENGTHS = 4  # times the model's: by how much a text is too long can be asked


def counting(model: ServedModel) -> BoundedTokenizer:
    """The tokenizer of texts that are counted, and may be too long for the model."""
    if model.tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    return BoundedTokenizer(model.tokenizer, TOKENIZED_LENGTHS * model.facts.max_model_len)


def tokenize(model: ServedModel, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    asked = check(TokenizeBody, without_nulls(body))
    model.check_name(asked.model)
    tokenizer = counting(model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("body has not exactly one of prompt and messages")
    if asked.prompt is None and asked.parse_special:
        raise RequestError("parse_special and messages: messages are characters, leave it out")
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        raw = RawText.of(asked.prompt, asked.parse_special is not False)
        ids = tokenizer.encode_batch([raw], add_special_tokens=special)[0]
    else:
        prompt = read_conversation(asked)
        assert prompt.messages is not None
        ids = tokenizer.chat(prompt.messages, **asdict(prompt.template)).ids
    made = {"count": len(ids), "max_model_len": model.facts.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        made["token_strs"] = [
            tokenizer.token_bytes(token).decode(errors="replace") for token in ids
        ]
    return made


def detokenize(model: ServedModel, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""
    asked = check(DetokenizeBody, without_nulls(body))
    model.check_name(asked.model)
    tokenizer, vocab_size = model.tokenizer, model.facts.vocab_size
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    unknown = [token for token in asked.tokens if token >= vocab_size]
    if unknown:
        raise RequestError(
            f"tokens has token id {unknown[0]}, expected ids from 0 to {vocab_size - 1}"
        )
    return {"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False)}
