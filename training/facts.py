"""What the invented documents talk about: kinds of things, their attributes, and the wordings.

A line of `facts.txt` holds everything about one attribute: the nouns it goes by, the maker of its
values, sentences that state it, questions that ask for it, and one question that training never
sees. Data only: `documents.py` draws from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attribute:
    """One attribute of one kind. In wordings `{n}` is the thing's name and `{v}` the value."""

    kind: str
    nouns: tuple[str, ...]
    value: str
    facts: tuple[str, ...]
    asks: tuple[str, ...]
    held: str

    @property
    def key(self) -> str:
        """Unique name of the attribute, such as `town.population`."""
        return f"{self.kind}.{self.nouns[0]}"


def _parse(table: str) -> tuple[Attribute, ...]:
    """One attribute per line; fields are separated by `;`, alternatives by `|` or `,` (nouns)."""
    attributes = []
    for line in table.strip().splitlines():
        if line.startswith("#"):
            continue
        kind, nouns, value, facts, asks, held = (field.strip() for field in line.split(";"))
        attributes.append(
            Attribute(
                kind=kind,
                nouns=tuple(noun.strip() for noun in nouns.split(",")),
                value=value,
                facts=tuple(fact.strip() for fact in facts.split("|")),
                asks=tuple(ask.strip() for ask in asks.split("|")),
                held=held,
            )
        )
    return tuple(attributes)


ATTRIBUTES = _parse(Path(__file__).with_name("facts.txt").read_text())
KINDS = tuple(dict.fromkeys(attribute.kind for attribute in ATTRIBUTES))
BY_KIND = {kind: tuple(a for a in ATTRIBUTES if a.kind == kind) for kind in KINDS}

# Questions that work for every attribute: {a} is one of its nouns, {t} the name with its article.
FRAMES = (
    "What is the {a} of {t}?",
    "Tell me the {a} of {t}.",
    "Give the {a} of {t}.",
    "{n}: {a}?",
    "State the {a} of {t}.",
    "What is {n}'s {a}?",
    "What does the document give as the {a} of {t}?",
    "I need the {a} of {t}.",
    "Which {a} is given for {t}?",
    "Please name the {a} of {t}.",
    "For {t}, what is the {a}?",
    "Find {n}'s {a}.",
    "What {a} is stated for {t}?",
    "Do you know the {a} of {t}?",
    "Could you look up the {a} of {t}?",
    "The {a} of {t}?",
    "{a}, {n}?",
    "{n} {a}",
    "Show the {a} of {t}.",
    "I would like to know {n}'s {a}.",
    "Look for the {a} of {t}.",
    "Can you give me {n}'s {a}?",
    "Under {n}, what stands for the {a}?",
)

# Kinds whose names take an article inside a sentence.
WITH_ARTICLE = frozenset({"river", "museum", "device", "ship", "festival"})

_COLOURS_TEXT = (
    "red green blue yellow brown white black grey orange violet purple pink golden silver copper "
    "turquoise crimson ivory olive amber scarlet indigo"
)
COLOURS = _COLOURS_TEXT.split()
_SHADES_TEXT = (
    "dark light pale deep bright dull soft warm cold dusty smoky faded rich muted glossy misty"
)
SHADES = _SHADES_TEXT.split()
_MONTHS_TEXT = (
    "January February March April May June July August September October November December"
)
MONTHS = _MONTHS_TEXT.split()
CURRENCIES = ("crowns", "marks", "dollars", "euros", "pounds")
COMPANY_WORDS = ("Works", "Company", "Brothers", "Industries", "Group", "Trading", "Systems")
BOOK_FORMS = ("The Road to {}", "The Book of {}", "Letters from {}", "The House of {}")
TITLES = (
    "Fact sheet: {}",
    "Notes on {}",
    "{}: facts and figures",
    "About {}",
    "Report: {}",
    "Document: {}",
    "Facts about {}",
    "{} in brief",
)
INSTRUCTIONS = (
    "You answer questions about a document.",
    "Answer briefly.",
    "Answer with the value only.",
    "Use only what the document says.",
    "You are a careful assistant.",
    "You are a helpful assistant.",
    "Read the document and answer the question.",
    "Give short answers.",
    "Do not explain your answer.",
    "If the document does not say it, answer: not stated.",
    "Copy names, numbers and dates as they are written.",
    "Be exact.",
    "The text below holds all that you need.",
    "Here are some facts.",
    "You read fact sheets and look things up.",
    "Reply with a few words.",
)
OPENINGS = (
    "According to the document: ",
    "Hello! ",
    "One more question: ",
    "Please look this up. ",
)
FRAMINGS = (  # around the documents: before the first, after the last
    ("Document:\n", ""),
    ("Text:\n", ""),
    ("<document>\n", "</document>\n"),
    ("Here is the document.\n\n", ""),
    ("---\n", "---\n"),
)
VERIFYING = (
    "Is {v} the {a} of {t}? Answer yes or no.",
    "Is it right that the {a} of {t} is {v}? Answer yes or no.",
    "Yes or no: the {a} of {t} is {v}.",
    "Does the document give {v} as the {a} of {t}? Answer yes or no.",
)
JSON_REQUESTS = (
    "Answer as JSON with the key {}.",
    "Reply with a JSON object with the key {}.",
    "Give the answer in JSON under the key {}.",
)
JSON_KEYS = ("answer", "value", "result")
SUFFIXES = ("Answer briefly.", "Reply with the value only.", "Use the document.", "Be exact.")
LEADS = ("Question: ", "Q: ", "")
_WORDS_TEXT = (
    "the a of to and in is it that for on with as was at by an be this from or have are not but "
    "they which you one we all there their has more if will when who so no out up about what time "
    "some into only other new then two these may over also like any after first such our even most "
    "way well because through old many where must before good each those people long work life day "
    "part year water under house world great small large city road field stone wood light night "
    "morning evening summer winter market garden window table letter paper story music voice "
    "hand head heart friend child mother father teacher doctor worker farmer sailor hour week "
    "month early late often never always sometimes usually quickly slowly carefully please write "
    "read answer question assistant helpful polite language text list number order customer "
    "service support team product account email policy return code data file model system user "
    "example rule style tone format short clear simple keep make give take find help think know "
    "see look come go put use ask tell show try leave call need want seem mean begin end open "
    "close should could would can cannot does do did been being were had his her its my your"
)
WORDS = _WORDS_TEXT.split()
NOT_STATED = "not stated"
