"""Requests and their outputs: plain values, no torch.

A *request* is what the user sent; a *sequence* is one continuation of it (a request with n = 4 has
four). Field names are those that users of vLLM and of OpenAI's API know.
"""

from onestem.pml import Documents
from onestem.request.formats import (
    MAX_DEPTH,
    WHITESPACE,
    ResponseFormat,
    StructuredOutputs,
    Text,
    Whitespace,
    is_deep,
    whitespace_of,
)
from onestem.request.outputs import (
    Answer,
    Completion,
    CompletionOutput,
    FinishReason,
    Logprob,
    Logprobs,
    RankedLogprobs,
    RequestMetrics,
    RequestOutput,
    Rerendered,
    Reuse,
    TokenLogprobs,
    Told,
)
from onestem.request.params import (
    MAX_TOKEN_ID,
    ONE_TOKEN,
    SamplingParams,
    TokenId,
    is_masked,
    masking_fields,
    why_masked,
)
from onestem.request.prompt import (
    Priority,
    Request,
)
