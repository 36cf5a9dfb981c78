"""Whether a request can be answered at all, before anything is computed for it."""

from __future__ import annotations

import numpy as np

from onestem.engine.grammar import GrammarCompiler
from onestem.engine.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError
from onestem.request import Request

__all__ = ["check_request", "choice_ids"]


def check_request(
    request: Request,
    *,
    max_model_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    grammars: GrammarCompiler | None,
) -> None:
    """Raise `RequestError` for a request that can never be answered."""
    _check_prompt(request, max_model_len, vocab_size)
    _check_ids(request, vocab_size)
    _check_text(request, tokenizer)
    if request.params.choices and tokenizer is not None:
        _check_choices(request, max_model_len, tokenizer)
    if request.params.response_format and grammars is not None:
        try:
            grammars.compile(request.params.response_format)
        except UnsupportedError as error:
            raise RequestError(str(error)) from error


def choice_ids(request: Request, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a request's choices, as they follow its prompt."""
    return [
        tokenizer.encode(text, add_special_tokens=False) for text in request.params.choices or ()
    ]


def _check_prompt(request: Request, max_model_len: int, vocab_size: int) -> None:
    ids = np.asarray(request.prompt_token_ids)
    if len(ids) == 0:
        raise RequestError("prompt is empty: expected at least one token")
    if len(ids) + 1 > max_model_len:
        raise RequestError(
            f"prompt has {len(ids)} tokens, limit is {max_model_len - 1} (and one to answer): "
            "shorten the prompt or raise max_model_len or kv_memory"
        )
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise RequestError(
            f"prompt has token id {int(bad[0])}, expected ids from 0 to {vocab_size - 1}"
        )


def _check_ids(request: Request, vocab_size: int) -> None:
    for name in ("stop_token_ids", "logit_bias"):
        highest = max(getattr(request.params, name) or (0,))
        if highest >= vocab_size:
            raise RequestError(f"{name} has token id {highest}, expected ids below {vocab_size}")


def _check_text(request: Request, tokenizer: Tokenizer | None) -> None:
    for name in ("stop", "choices", "response_format"):
        if tokenizer is None and getattr(request.params, name):
            raise RequestError(f"{name} needs a tokenizer, and this model directory has none")


def _check_choices(request: Request, max_model_len: int, tokenizer: Tokenizer) -> None:
    longest = max(len(ids) for ids in choice_ids(request, tokenizer))
    total = len(request.prompt_token_ids) + longest
    if total > max_model_len:
        raise RequestError(
            f"prompt and choice have {total} tokens, limit is {max_model_len}: "
            "shorten them or raise max_model_len"
        )
