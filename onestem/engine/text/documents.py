"""Documents of a chat: where its prompt has them, and which of its text is theirs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from onestem.checked import show
from onestem.errors import RequestError

_NONCE = secrets.token_hex(12)  # no user can guess a mark
_MARKED = re.compile(rf"mark{_NONCE}n([0-9]+)b(.*?)mark{_NONCE}n\1e", re.DOTALL)
_INSIDE = re.compile(rf"mark{_NONCE}n[0-9]+b")  # where a text begins behind its title
_TOLD = {"title", "text"}

Document = Mapping[str, Any]

# After what documents other than the first are stored where a caller says nothing: 300 tokens.
LEAD_IN: Document = {
    "title": "The harbour of Vell",
    "text": """\
The harbour of Vell lies in a long bay that opens to the south. For three hundred years ships \
have come here with salt, timber and cloth, and they have left again with fish and stone. The \
town was founded by four families, whose houses still stand around the square. Each of them had \
a colour of its own: the Arns painted their doors red, the Bolds chose blue, the Celers green, \
and the Dorns left the wood as it was. In 1742 a fire destroyed the eastern half of the town. \
It was rebuilt within eleven years, with wider streets and with walls of brick. A lighthouse \
was added in 1760 by the engineer Ida Holm, who had learnt her trade in the north. It is 38 \
metres high and can be seen from a distance of 25 kilometres. The bay freezes in about one \
winter of seven. Then boats are pulled onto the beach, and the fishermen mend their nets in the \
long sheds behind the market. The market itself is held on Tuesdays and Fridays. Farmers bring \
apples, onions and cheese from the valley of the Lune, which joins the sea two kilometres west \
of the harbour. There are 14 bridges over the river; the oldest one has five arches and is \
reserved for people on foot.""",
}
NO_LEAD_IN: Document = {}


def marked(documents: Sequence[Document], *, titles: bool = False) -> list[dict[str, Any]]:
    """The documents with marks around what they say, and before their `titles`. Blanks at its ends
    stay outside, where a template may drop them."""
    made = []
    for number, document in enumerate(documents):
        before, body, after = re.split(r"(\S.*\S|\S)", document["text"], maxsplit=1, flags=re.S)
        mark = f"mark{_NONCE}n{number}"
        one = {**document, "text": f"{before}{mark}b{body}{mark}e{after}"}
        if titles and document.get("title"):
            one["title"] = f"{mark}b{document['title']}"
        made.append(one)
    return made


def found_in(rendered: str) -> list[int]:
    """The numbers of marked documents in a text, in its order."""
    return [int(found[1]) for found in _MARKED.finditer(rendered)]


def split(rendered: str, count: int) -> list[str]:
    """The pieces of a text with `count` marked documents: what is before, between and after them,
    and, at odd places, they, from the title on where it is before what they say.

    Raises:
        RequestError: it does not have each once, in their order.
    """
    parts = _MARKED.split(rendered)
    if parts[1::3] != list(map(str, range(count))):
        raise RequestError(
            "the model's chat template does not write each of documents once, in their order: "
            "leave repair out"
        )
    del parts[1::3]
    return [_INSIDE.sub("", part) for part in parts]


def before_question(
    messages: Sequence[Mapping[str, Any]], documents: Sequence[Document]
) -> list[dict[str, Any]]:
    """The messages of a template that has no documents, with each document and its title before
    the last text of the user's.

    Raises:
        RequestError: there is none, or a document has more than a title and a text.
    """
    made = [dict(message) for message in messages]
    asked = [message for message in made if message["role"] == "user"]
    if not asked:
        raise RequestError(
            "documents stand before the last message of role user, and there is none: add one"
        )
    for number, document in enumerate(documents):
        odd = next(iter(document.keys() - _TOLD), None)
        if odd is not None:
            raise RequestError(
                f"documents[{number}] has {show(odd)}, and the model's chat template has no "
                "documents: give their title and text alone"
            )
    told = (
        f"Document: {one.get('title', '')}".rstrip() + f"\n{one['text']}\n\n" for one in documents
    )
    asked[-1]["content"] = "".join((*told, asked[-1]["content"]))
    return made
