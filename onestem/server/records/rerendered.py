"""Reports once for each application why its conversations miss their cached tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from onestem.request import Request, Rerendered
from onestem.server.logs import log
from onestem.server.records.call_record import CallRecord

SHOWN = 16  # tokens of a prompt from where it differs
MOST_TOLD = 1000  # maximum keys and applications that are remembered
# Markers that models write their reasoning between.
REASONING = re.compile(r"</?think|\[/?THINK\]|<\|channel\|>|<\|?(begin|end)_of_thought", re.I)

Decode = Callable[[Sequence[int]], str]


class RerenderedLog:
    """An `info` line for each key and application: where a conversation first differed from what
    was cached, and how. Texts are users': they are a `debug` line.

    Args:
        decode: the text of token ids, control tokens with their names.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._told: set[tuple[str, str]] = set()

    def note(self, call: CallRecord) -> None:
        """Report a call that has ended, where it is the first of its kind."""
        rerendered, who = call.rerendered, (call.tenant.name, call.app)
        if rerendered is None or who in self._told or len(self._told) >= MOST_TOLD:
            return
        self._told.add(who)
        request, at = call.requests[0], rerendered.at
        earlier = self._decode(rerendered.earlier)
        now = self._decode(request.prompt_token_ids[at : at + SHOWN])
        log.info(
            "rerendered",
            id=call.id,
            key=call.tenant.name or None,
            app=call.app or None,
            tokens=rerendered.num_tokens,
            at=at,
            offset=rerendered.offset,
            kind=kind_of(rerendered, request, earlier, now),
        )
        log.debug("rerendered_texts", id=call.id, earlier=earlier, now=now)


def kind_of(rerendered: Rerendered, request: Request, earlier: str, now: str) -> str:
    """What differs, as far as the first tokens tell: `generation_prompt` (what the template writes
    before an answer), `reasoning`, `tokens` (the same text in other tokens), `whitespace`, `text`.
    """
    if rerendered.offset < request.prefilled_tokens:
        return "generation_prompt"
    if REASONING.search(earlier) or REASONING.search(now):
        return "reasoning"
    if _agree(earlier, now):
        return "tokens"
    return "whitespace" if _agree("".join(earlier.split()), "".join(now.split())) else "text"


def _agree(a: str, b: str) -> bool:
    """Whether two texts agree as far as both go; the last character may be cut in two."""
    length = min(len(a), len(b))
    return length > 1 and a[: length - 1] == b[: length - 1]
