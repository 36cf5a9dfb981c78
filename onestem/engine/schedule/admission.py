"""Whether a request can be answered at all, before anything is computed for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onestem.engine.modules.prompt import PmlPrompt
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from onestem.models.config import ModelConfig
from onestem.pml import CompiledPrompt
from onestem.request import Request, show

__all__ = ["MAX_CHOICE_TOKENS", "check_pml", "check_request", "choice_ids", "longest_choice"]

# Of all of a request's choices together: as much work as a long prompt, for which others wait.
MAX_CHOICE_TOKENS = 8192


def check_request(
    request: Request,
    *,
    max_model_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    token_ids: NDArray[np.integer] | None = None,
) -> None:
    """Raise `RequestError` for a request that can never be answered; `response_format` is left to
    the compiler of grammars. `token_ids`: those of the prompt, where an array of them is there."""
    _check_prompt(request, max_model_len, vocab_size, token_ids)
    if request.pml is not None and (
        request.score_from is not None or request.params.prompt_logprobs is not None
    ):
        raise RequestError(
            "prompt_logprobs and score_from are not available for prompts in PML: their modules "
            "are not computed for each prompt"
        )
    if request.score_from is not None and not isinstance(request.score_from, int):
        raise RequestError(f"score_from is {request.score_from!r}, expected a token's index")
    if not 0 <= request.common_prefix_tokens <= len(request.prompt_token_ids):
        raise RequestError(
            f"common_prefix_tokens is {request.common_prefix_tokens}, expected 0 to "
            f"{len(request.prompt_token_ids)} (the prompt's tokens)"
        )
    _check_ids(request, vocab_size)
    _check_text(request, tokenizer)
    if request.params.choices and tokenizer is not None:
        _check_choices(request, max_model_len, tokenizer)


def check_pml(
    compiled: CompiledPrompt,
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    answer_tokens: int = 1,
) -> None:
    """Raise `RequestError` for a prompt in PML that, with the least of an answer, the model's
    positions or the KV memory have no room for.

    Args:
        num_pages: pages that it could have.
    """
    prompt = PmlPrompt(compiled, "", "")
    positions = config.max_position_embeddings
    if compiled.next_position + answer_tokens > positions:
        raise RequestError(
            f"the answer would begin at position {compiled.next_position}, and the model has "
            f"{positions}: shorten the prompt, or import less"
        )
    room = prompt.most_tokens(max_positions=positions, num_pages=num_pages, page_size=page_size)
    if room < len(prompt.tokens) + answer_tokens:
        raise RequestError(
            f"the prompt and what it imports take {prompt.num_pages(page_size)} pages of "
            f"{page_size} tokens, and its answer at least one token; KV memory has {num_pages} "
            "pages for them: raise kv_memory, or import less"
        )


def choice_ids(request: Request, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a request's choices, as they follow its prompt."""
    return [
        tokenizer.encode(text, add_special_tokens=False) for text in request.params.choices or ()
    ]


def longest_choice(request: Request, tokenizer: Tokenizer | None) -> int:
    """Tokens of the longest of a request's choices; 0: it has none."""
    if not request.params.choices or tokenizer is None:
        return 0
    return max(map(len, choice_ids(request, tokenizer)))


def _check_prompt(
    request: Request, max_model_len: int, vocab_size: int, token_ids: NDArray[np.integer] | None
) -> None:
    try:
        ids = np.asarray(request.prompt_token_ids if token_ids is None else token_ids)
    except ValueError:  # nested, of uneven lengths
        ids = np.zeros((0, 0))
    if ids.ndim == 1 and len(ids) == 0:
        raise RequestError("prompt is empty: expected at least one token")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and not _are_ints(ids)):
        raise RequestError("prompt is neither text nor a list of token ids (integers)")
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


def _are_ints(ids: np.ndarray) -> bool:
    """Integers too large for an array's own type come as objects."""
    return ids.dtype == object and all(isinstance(i, int) for i in ids)


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
    encoded = choice_ids(request, tokenizer)
    for text, ids in zip(request.params.choices or (), encoded, strict=True):
        if not ids:
            raise RequestError(f"choices has {show(text)}, which has no tokens in this model")
    together = sum(map(len, encoded))
    if together > MAX_CHOICE_TOKENS:
        raise RequestError(
            f"choices have {together} tokens together, limit is {MAX_CHOICE_TOKENS}: "
            "pick among fewer, then among the winners"
        )
    total = len(request.prompt_token_ids) + max(map(len, encoded))
    if total > max_model_len:
        raise RequestError(
            f"prompt and choice have {total} tokens, limit is {max_model_len}: "
            "shorten them or raise max_model_len"
        )
