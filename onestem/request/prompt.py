"""A prompt, tokenised, and how to continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onestem.pml import CompiledPrompt, Documents, with_documents
from onestem.request.params import SamplingParams
from onestem.scores import ScorePath

Priority = Literal["interactive", "job"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, tokenised, and how to continue it.

    Attributes:
        request_id: unique among the requests an engine holds.
        prompt_token_ids: at least one id, BOS included where the model wants it.
        params: see `SamplingParams`; `seed` is set where the request is made.
        prompt_array: `prompt_token_ids` as an integer array, if there is one: this saves time.
        prompt: the text, if there was one (only handed back).
        pml: the prompt as segments, if it imports modules; `prompt_token_ids` are its tokens in use
            in the order of their positions.
        documents: those of it that are found where they were computed, at any place; they make its
            `pml`.
        stream: also return unfinished outputs from each step that sampled for it.
        score_from: if set, log-probabilities of the prompt's tokens from this index on are
            computed (and what lies before may come from the cache up to `score_from - 1`).
        paths: given tokens that are scored instead of sampling (`onestem.scores`): a sequence each,
            which shares what others compute but for the rows that it scores.
        cache_salt: prompts of different salts never match each other's cached tokens; "" is the
            common one.
        common_prefix_tokens: number of the prompt's first tokens without salt: a prefix for all.
        common_modules: the modules that a prompt in PML imports have no salt: a schema for all.
        priority: a `job`'s request runs in what `interactive` ones leave free.
        in_conversation: its caller says that it begins or continues a conversation.
        prefilled_tokens: number of the prompt's last tokens that a chat template writes before an
            answer but not before the same answer in a later prompt (an empty `<think></think>`).
        system_tokens: number of its first tokens that a chat template writes for the system's
            message and for tools; 0: none, or it is not known.
        group: the planned group it belongs to; its first `group_prefix_tokens` tokens stay in the
            cache until the group's last member has finished.
        branches: where planned requests part from it, as numbers of its first tokens, ascending;
            more of them are to come to the first `awaited_branches`. None: it is not planned.
        group_only: it shares these tokens alone, and only with its group (for measuring what a plan
            saves; its modules are shared nevertheless).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_array: NDArray[np.integer] | None = field(default=None, compare=False, repr=False)
    prompt: str | None = None
    pml: CompiledPrompt | None = None
    documents: Documents | None = None
    stream: bool = False
    score_from: int | None = None
    paths: tuple[ScorePath, ...] = ()
    cache_salt: str = ""
    common_prefix_tokens: int = 0
    common_modules: bool = False
    priority: Priority = "interactive"
    in_conversation: bool = False
    prefilled_tokens: int = 0
    system_tokens: int = 0
    group: int | None = None
    group_prefix_tokens: int = 0
    branches: tuple[int, ...] | None = None
    awaited_branches: int = 0
    group_only: bool = False

    def __post_init__(self) -> None:
        if self.documents is not None and self.pml is None:
            ids = self.prompt_token_ids if self.prompt_array is None else self.prompt_array
            object.__setattr__(self, "pml", with_documents(ids, self.documents))

    @property
    def module_salt(self) -> str:
        """Cache salt of the modules that it imports."""
        return "" if self.common_modules else self.cache_salt
