"""What a sequence ends with that its own request lets no token follow."""

from __future__ import annotations

from onestem.request import SamplingParams

__all__ = ["is_masked", "masking_fields", "why_masked"]

_FORBIDDEN = "no token may follow: "


def masking_fields(params: SamplingParams) -> list[str]:
    """Fields of a request that forbid tokens, the one most to blame first."""
    early = params.min_tokens > 0
    present = {
        "response_format": params.response_format is not None,
        "stop_token_ids": early and bool(params.stop_token_ids),
        "min_tokens": early,
    }
    return [name for name, is_there in present.items() if is_there]


def why_masked(params: SamplingParams) -> str | None:
    """The `stop_reason` of such a sequence: the fields at fault, and the way out. None: it has no
    such fields, and the logits are to blame."""
    fields = masking_fields(params)
    if not fields:
        return None
    *others, last = fields
    if not others:
        return f"{_FORBIDDEN}{last} forbids all of them: loosen it"
    names = f"{', '.join(others)} and {last}"
    return f"{_FORBIDDEN}{names} together forbid all of them: loosen one of them"


def is_masked(reason: int | str | None) -> bool:
    """Whether the caller's own fields are why a sequence ended with an error."""
    return isinstance(reason, str) and reason.startswith(_FORBIDDEN)
