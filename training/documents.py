"""Invented documents, questions about them, and the prompts they stand in.

Everything is drawn from a `random.Random`, so the same seed gives the same text. Names and values
belong to the training or to the test split by a checksum of their own text: no test name, number,
date or code is ever the answer in training. Standard library only.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import facts as tables
from facts import Attribute

SPLITS = ("train", "test")
TEST_SHARE = 8  # one text in eight belongs to the test split

BOS, END, PAD, UNK = "<|bos|>", "<|end|>", "<|pad|>", "<|unk|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, UNK, SYSTEM, USER, ASSISTANT)

FORMS = ("user", "system", "turns", "examples", "raw", "none")
MASKS = ("causal", "anchored", "isolated")

_ONSET_TEXT = (
    "b br c ch cl cr d dr dv f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl st str t th "
    "tr v vr w y z zh"
)
_VOWEL_TEXT = "a e i o u a e i o u ai au ea ei ie oa ou"
_CODA_TEXT = "b ck d f g k l ld lm ll m mp n nd ng nt p r rd rk rn rt s sk ss st t th v x z"
_ONSETS, _VOWELS, _CODAS = (t.split() for t in (_ONSET_TEXT, _VOWEL_TEXT, _CODA_TEXT))


def split_of(text: str) -> str:
    """The split that a name or value belongs to, from a checksum of its text."""
    return "test" if zlib.crc32(text.encode()) % TEST_SHARE == 0 else "train"


def in_split(rng: random.Random, split: str, make: Callable[[random.Random], str]) -> str:
    """Draw from `make` until the text belongs to `split`."""
    while True:
        text = make(rng)
        if split_of(text) == split:
            return text


# --- names ------------------------------------------------------------------------------------


def invented_word(rng: random.Random) -> str:
    """A pronounceable capitalised word of two or three syllables."""
    syllables = 2 if rng.random() < 0.7 else 3
    parts = []
    for index in range(syllables):
        parts.append(rng.choice(_ONSETS) if index or rng.random() < 0.85 else "")
        parts.append(rng.choice(_VOWELS))
        if (index == syllables - 1 and rng.random() < 0.8) or rng.random() < 0.2:
            parts.append(rng.choice(_CODAS))
    return "".join(parts).capitalize()


def _device_name(rng: random.Random) -> str:
    return f"{invented_word(rng)} {rng.randint(2, 99)}"


def _company_name(rng: random.Random) -> str:
    return f"{invented_word(rng)} {rng.choice(tables.COMPANY_WORDS)}"


NAME_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "town": invented_word,
    "river": lambda rng: f"{invented_word(rng)} River",
    "bridge": lambda rng: f"{invented_word(rng)} Bridge",
    "mountain": lambda rng: f"Mount {invented_word(rng)}",
    "museum": lambda rng: f"{invented_word(rng)} Museum",
    "person": lambda rng: f"{invented_word(rng)} {invented_word(rng)}",
    "device": _device_name,
    "company": _company_name,
    "ship": invented_word,
    "book": lambda rng: rng.choice(tables.BOOK_FORMS).format(invented_word(rng)),
    "festival": lambda rng: f"{invented_word(rng)} Festival",
    "lake": lambda rng: f"Lake {invented_word(rng)}",
    "pet": invented_word,
}


# --- values -----------------------------------------------------------------------------------


def _quantity(rng: random.Random, digits: Sequence[int]) -> str:
    """A number with one of the given numbers of digits, thousands separated by commas."""
    count = rng.choice(digits)
    return f"{rng.randint(10 ** (count - 1), 10**count - 1):,}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(tables.MONTHS)} {rng.randint(1700, 2020)}"


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.choice((2, 3))))
    return f"{letters}-{rng.randint(100, 9999)}"


VALUE_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "count": lambda rng: _quantity(rng, (3, 4, 5, 6)),
    "year": lambda rng: str(rng.randint(1400, 2020)),
    "metres": lambda rng: f"{_quantity(rng, (3, 4))} metres",
    "kilometres": lambda rng: f"{_quantity(rng, (3, 4))} kilometres",
    "centimetres": lambda rng: f"{rng.randint(140, 209)}.{rng.randint(1, 9)} centimetres",
    "grams": lambda rng: f"{_quantity(rng, (3, 4))} grams",
    "tonnes": lambda rng: f"{_quantity(rng, (3, 4, 5))} tonnes",
    "minutes": lambda rng: f"{_quantity(rng, (3, 4))} minutes",
    "pages": lambda rng: f"{_quantity(rng, (3, 4))} pages",
    "money": lambda rng: f"{_quantity(rng, (3, 4, 5))} {rng.choice(tables.CURRENCIES)}",
    "date": _date,
    "day": lambda rng: f"{rng.randint(1, 28)} {rng.choice(tables.MONTHS)}",
    "code": _code,
    "phone": lambda rng: f"0{rng.randint(100, 999)} {rng.randint(100, 999)} {rng.randint(10, 99)}",
    "colour": lambda rng: f"{rng.choice(tables.SHADES)} {rng.choice(tables.COLOURS)}",
}


class Namer:
    """Draws names of one split that were not drawn before."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.used: set[str] = set()

    def name(self, kind: str) -> str:
        """A new name for a thing of `kind`."""
        while True:
            name = in_split(self.rng, self.split, NAME_MAKERS[kind])
            if name not in self.used:
                self.used.add(name)
                return name

    def namesake(self, person: str) -> str:
        """A new person who shares the first or the last name of `person`."""
        first, last = person.split(" ")
        while True:
            word = invented_word(self.rng)
            name = f"{first} {word}" if self.rng.random() < 0.5 else f"{word} {last}"
            if split_of(name) == self.split and name not in self.used:
                self.used.add(name)
                return name


# --- documents --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One attribute of one thing. `wording` is a sentence template, or empty in a sheet line."""

    attribute: Attribute
    name: str
    value: str
    wording: str
    noun: str

    def text(self) -> str:
        """The fact as it stands in the document."""
        if self.wording:
            sentence = self.wording.replace("{v}", self.value).replace("{n}", self.name)
            return sentence[0].upper() + sentence[1:]
        return f"{self.noun[0].upper()}{self.noun[1:]}: {self.value}"


@dataclass(frozen=True)
class Document:
    """Facts and the layout they stand in: literal text, or the index of a fact."""

    facts: tuple[Fact, ...]
    layout: tuple[str | int, ...]
    split: str
    names: tuple[tuple[str, str], ...] = field(default=())  # (kind, name) of each thing

    @property
    def text(self) -> str:
        """The document; it ends with a line break."""
        facts = self.facts
        return "".join(p if isinstance(p, str) else facts[p].text() for p in self.layout)

    def swapped(self, rng: random.Random) -> Document:
        """The same things, attributes, wordings and layout with other values."""
        namer = Namer(rng, self.split)
        namer.used.update(name for _, name in self.names)
        facts = tuple(replace(f, value=_other_value(rng, namer, f)) for f in self.facts)
        return replace(self, facts=facts)


def _other_value(rng: random.Random, namer: Namer, fact: Fact) -> str:
    while True:
        value = _value(rng, namer, fact.attribute.value, ())
        if value != fact.value:
            return value


def _value(rng: random.Random, namer: Namer, maker: str, known: Sequence[str]) -> str:
    """A value; now and then the name of a thing the document already speaks of."""
    if maker in VALUE_MAKERS:
        return in_split(rng, namer.split, VALUE_MAKERS[maker])
    if known and rng.random() < 0.25:
        return rng.choice(known)
    return namer.name(maker)


def _things(rng: random.Random, namer: Namer, num_facts: int) -> list[tuple[str, str, list]]:
    """Things as (kind, name, attributes): every kind comes at least twice, as distractors."""
    kinds = rng.sample(tables.KINDS, min(rng.randint(2, 4), max(1, num_facts // 10)))
    pools = {}
    for kind in kinds:
        attributes = tables.BY_KIND[kind]
        pools[kind] = rng.sample(attributes, rng.randint(min(4, len(attributes)), len(attributes)))
    things: list[tuple[str, str, list]] = []
    missing = num_facts
    people: list[str] = []
    while missing > 0:
        kind = kinds[len(things) % len(kinds)]
        if kind == "person" and people and rng.random() < 0.15:
            name = namer.namesake(rng.choice(people))
        else:
            name = namer.name(kind)
        if kind == "person":
            people.append(name)
        attributes = [a for a in pools[kind] if rng.random() < 0.85][:missing] or pools[kind][:1]
        rng.shuffle(attributes)
        things.append((kind, name, attributes))
        missing -= len(attributes)
    return things


def filler(rng: random.Random, words: int) -> str:
    """A sentence of common words that states nothing."""
    sentence = " ".join(rng.choice(tables.WORDS) for _ in range(words))
    return sentence[0].upper() + sentence[1:] + "."


def _layout(rng: random.Random, style: str, facts: Sequence[Fact], title: str) -> list[str | int]:
    """Arrange facts (already in order) under a title; see `make_document` for the styles."""
    layout: list[str | int] = [f"{title}\n"] if title else []
    previous = None
    line = 0
    for index, fact in enumerate(facts):
        if style == "sheet" and not fact.wording:
            if fact.name != previous:
                layout.append(f"## {fact.name}\n")
            layout += [index, "\n"]
        elif style == "list":
            layout += ["- ", index, "\n"]
        else:
            broken = fact.name != previous if style == "prose" else line >= 4
            if previous is not None:
                layout.append("\n" if broken else " ")
            line = 0 if broken else line + 1
            layout.append(index)
            if rng.random() < 0.03:
                layout.append(" " + filler(rng, rng.randint(3, 12)))
            elif rng.random() < 0.004:
                layout.append(UNK * rng.randint(1, 8))
        previous = fact.name
    if layout[-1] != "\n":
        layout.append("\n")
    return layout


def make_document(namer: Namer, num_facts: int) -> Document:
    """A document of at least `num_facts` facts.

    Styles: `prose` (a paragraph a thing), `list` (a line a fact), `sheet` (a heading a thing and
    `noun: value` lines), `mixed` (all facts shuffled).
    """
    rng = namer.rng
    style = rng.choices(("prose", "list", "sheet", "mixed"), (35, 20, 20, 25))[0]
    things = _things(rng, namer, num_facts)
    known: dict[str, list[str]] = {}
    for kind, name, _ in things:
        known.setdefault(kind, []).append(name)
    facts = []
    for _, name, attributes in things:
        for attribute in attributes:
            others = [n for n in known.get(attribute.value, ()) if n != name]
            value = _value(rng, namer, attribute.value, others)
            wording = "" if style == "sheet" else rng.choice(attribute.facts)
            facts.append(Fact(attribute, name, value, wording, rng.choice(attribute.nouns)))
    if style == "mixed" or (style == "list" and rng.random() < 0.5):
        rng.shuffle(facts)
    title = rng.choice(tables.TITLES).format(things[0][1]) if rng.random() < 0.8 else ""
    return Document(
        facts=tuple(facts),
        layout=tuple(_layout(rng, style, facts, title)),
        split=namer.split,
        names=tuple((kind, name) for kind, name, _ in things),
    )


# --- questions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question, its answer, and where it came from."""

    text: str
    answer: str
    attribute: str
    held: bool


def phrasings(attribute: Attribute) -> tuple[tuple[str, ...], tuple[str, str]]:
    """The templates that training may use, and the two that it never sees."""
    own = tables.ATTRIBUTES.index(attribute) % len(tables.FRAMES)
    frames = tuple(f for i, f in enumerate(tables.FRAMES) if i != own)
    return attribute.asks + frames, (tables.FRAMES[own], attribute.held)


_PHRASINGS = {attribute.key: phrasings(attribute) for attribute in tables.ATTRIBUTES}


def _ask(rng: random.Random, attribute: Attribute, name: str, held: bool) -> str:
    seen, unseen = _PHRASINGS[attribute.key]
    if held:
        template = rng.choice(unseen)
    else:  # an attribute's own questions as often as the common frames
        own = len(attribute.asks)
        template = rng.choice(seen[:own] if rng.random() < 0.45 else seen[own:])
    article = f"the {name}" if attribute.kind in tables.WITH_ARTICLE else name
    text = template.replace("{a}", rng.choice(attribute.nouns))
    text = text.replace("{t}", article).replace("{n}", name)
    return text[0].upper() + text[1:]


def ask(rng: random.Random, fact: Fact, held: bool = False) -> Question:
    """A question about a fact, in a phrasing that training sees or (`held`) never sees."""
    text = _ask(rng, fact.attribute, fact.name, held)
    return Question(text, fact.value, fact.attribute.key, held)


def _names_it(rng: random.Random, template: str, fact: Fact, value: str) -> str:
    article = f"the {fact.name}" if fact.attribute.kind in tables.WITH_ARTICLE else fact.name
    text = template.replace("{a}", rng.choice(fact.attribute.nouns)).replace("{t}", article)
    return text.replace("{v}", value)


def ask_whether(namer: Namer, fact: Fact, stated: Sequence[Fact]) -> Question:
    """Whether the fact has some value: its own, or (answer no) one of a like fact or a new one."""
    rng = namer.rng
    value, answer = fact.value, "yes"
    if rng.random() < 0.5:
        maker = fact.attribute.value
        others = [f.value for f in stated if f.attribute.value == maker and f.value != value]
        near = others and rng.random() < 0.5
        answer = "no"
        value = rng.choice(others) if near else _other_value(rng, namer, fact)
    text = _names_it(rng, rng.choice(tables.VERIFYING), fact, value)
    return Question(text, answer, fact.attribute.key, False)


def ask_json(rng: random.Random, fact: Fact) -> Question:
    """A question whose answer is wanted as a JSON object."""
    question = ask(rng, fact)
    key = rng.choice(tables.JSON_KEYS)
    text = f"{question.text} {rng.choice(tables.JSON_REQUESTS).format(key)}"
    return replace(question, text=text, answer=f'{{"{key}": "{fact.value}"}}')


def ask_absent(namer: Namer, documents: Sequence[Document]) -> Question:
    """A question that the documents do not answer: unknown thing, or attribute not stated."""
    rng = namer.rng
    document = rng.choice(documents) if documents else None
    if document is not None and rng.random() < 0.5:
        kind, name = rng.choice(document.names)
        stated = {f.attribute for f in document.facts if f.name == name}
        missing = [a for a in tables.BY_KIND[kind] if a not in stated]
        if missing:
            attribute = rng.choice(missing)
            text = _ask(rng, attribute, name, False)
            return Question(text, tables.NOT_STATED, attribute.key, False)
    attribute = rng.choice(tables.ATTRIBUTES)
    if document is not None:  # of the document's kinds, so that the kind gives nothing away
        attribute = rng.choice(document.facts).attribute
    text = _ask(rng, attribute, namer.name(attribute.kind), False)
    return Question(text, tables.NOT_STATED, attribute.key, False)


QUESTIONS = ("seen", "held-out", "yes or no", "json", "not stated")


def ask_for(namer: Namer, style: str, fact: Fact, documents: Sequence[Document]) -> Question:
    """A question of one of the styles in `QUESTIONS` about (all but the last) the fact."""
    if style == "yes or no":
        return ask_whether(namer, fact, [f for d in documents for f in d.facts])
    if style == "json":
        return ask_json(namer.rng, fact)
    if style == "not stated":
        return ask_absent(namer, documents)
    return ask(namer.rng, fact, held=style == "held-out")


# --- prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One shared part and the questions asked about it.

    `header` stands first; `modules` are the documents; each of `asked` is the rest of one prompt
    with its answer (which ends with the end token). `mask` says what the modules see: `causal`
    everything before them, `anchored` the header and themselves, `isolated` themselves alone.
    """

    header: str
    modules: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]
    mask: str
    questions: tuple[Question, ...]


def instructions(rng: random.Random) -> str:
    """The text of a system prompt: a few instructions, now and then among other words."""
    lines = rng.sample(tables.INSTRUCTIONS, rng.randint(1, 4))
    if rng.random() < 0.25:
        lines += [filler(rng, rng.randint(4, 16)) for _ in range(rng.randint(1, 8))]
        rng.shuffle(lines)
    return " ".join(lines)


def examples(namer: Namer, count: int) -> list[tuple[str, Question]]:
    """Few-shot examples: a text of one to three sentences and a question about it."""
    rng = namer.rng
    made = []
    for _ in range(count):
        facts = make_document(namer, 3).facts[: rng.randint(1, 3)]
        wording = rng.randrange(3)
        text = " ".join(replace(f, wording=f.attribute.facts[wording]).text() for f in facts)
        made.append((text, ask(rng, rng.choice(facts))))
    return made


def _header(namer: Namer, form: str, lead: str) -> str:
    """The text before the documents."""
    rng = namer.rng
    system = instructions(rng) if form in ("system", "examples") or rng.random() < 0.6 else ""
    opened = f"{BOS}{SYSTEM}{system}{END}" if system else BOS
    if form == "user" or form == "none":
        return f"{opened}{USER}"
    if form == "system":
        return f"{BOS}{SYSTEM}{system}\n\n" if rng.random() < 0.6 else f"{BOS}{SYSTEM}"
    if form == "raw":
        return f"{BOS}{system}\n\n" if rng.random() < 0.4 else BOS
    shown = examples(namer, rng.randint(1, 4))
    if form == "turns":
        turns = "".join(
            f"{USER}{text}\n{lead}{question.text}{END}{ASSISTANT}{question.answer}{END}"
            for text, question in shown
        )
        return f"{opened}{turns}{USER}"
    lines = "".join(
        f"{text}\nQuestion: {question.text}\nAnswer: {question.answer}\n\n"
        for text, question in shown
    )
    return f"{BOS}{SYSTEM}{system}\n\nExamples:\n{lines}{END}{USER}"


def _rest(form: str, lead: str, question: str, before: str) -> str:
    """What follows the documents, up to the answer."""
    if form == "raw":
        return f"{before}{lead}{question}\nAnswer:"
    opening = f"{before}{END}{USER}" if form == "system" else before
    return f"{opening}{lead}{question}{END}{ASSISTANT}"


def _with_earlier_turn(text: str, earlier: tuple[str, str], form: str, before: str) -> str:
    """The same question as the second of a conversation."""
    asked, answer = earlier
    opening = f"{before}{END}{USER}" if form == "system" else before
    return f"{asked}{answer}{USER}{text.removeprefix(opening)}"


def _modules(rng: random.Random, documents: Sequence[Document]) -> tuple[str, tuple[str, ...], str]:
    """What stands before the documents, their texts, what separates them from the question."""
    if not documents:
        return "", (), ""
    opening, closing = rng.choice(tables.FRAMINGS) if rng.random() < 0.3 else ("", "")
    if closing or rng.random() < 0.75:
        texts = tuple(document.text for document in documents)
        return opening, texts, closing + rng.choice(("", "\n"))
    texts = tuple(document.text.rstrip("\n") for document in documents)
    texts = tuple(f"{text}\n" for text in texts[:-1]) + texts[-1:]
    return opening, texts, rng.choice(("\n", "\n\n"))


def _varied(rng: random.Random, text: str) -> str:
    """The question as a hasty or a polite person would put it; most of the time unchanged."""
    chance = rng.random()
    if chance < 0.05:
        return f"{rng.choice(tables.OPENINGS)}{text}"
    if chance < 0.1:
        return f"{text} {rng.choice(tables.SUFFIXES)}"
    if chance < 0.13:
        return text.rstrip("?.")
    if chance < 0.16 and text.split(" ", 1)[0] in ("What", "Which", "How", "Who", "When", "Tell"):
        return text[0].lower() + text[1:]
    return text


def make_prompt(
    namer: Namer,
    documents: Sequence[Document],
    questions: Sequence[Question],
    form: str = "user",
    mask: str = "causal",
    plain: bool = False,
) -> Prompt:
    """Put documents and questions into one form. `plain` leaves out what only varies training."""
    rng = namer.rng
    lead = rng.choice(tables.LEADS) if form != "raw" else rng.choice(tables.LEADS[:2])
    opening, modules, before = _modules(rng, documents)
    header = _header(namer, form, lead) + opening
    asked = []
    for question in questions:
        words = question.text if plain else _varied(rng, question.text)
        text, answer = _rest(form, lead, words, before), question.answer
        if not plain and form != "raw" and asked and rng.random() < 0.08:
            text = _with_earlier_turn(text, asked[0], form, before)
        asked.append((text, f" {answer}{END}" if form == "raw" else f"{answer}{END}"))
    return Prompt(header, modules, tuple(asked), mask, tuple(questions))


def _facts_in_all(rng: random.Random, most: int) -> int:
    """How many facts: mostly a page or two, one time in four up to `most`."""
    common = min(most, 90)
    if most > common and rng.random() < 0.25:
        return rng.randint(common, most)
    return rng.randint(max(3, common // 5), common)


def training_prompt(rng: random.Random, split: str, max_facts: int, num_questions: int) -> Prompt:
    """One training example: everything about it drawn at random.

    `max_facts` bounds the facts of all its documents together (the length curriculum).
    """
    namer = Namer(rng, split)
    form = rng.choices(FORMS, (40, 16, 12, 10, 19, 3))[0]
    if form == "none":
        questions = [ask_absent(namer, ()) for _ in range(4)]
        return make_prompt(namer, (), questions, form)
    mask = rng.choices(MASKS, (50, 25, 25))[0]
    facts_in_all = _facts_in_all(rng, max_facts)
    modules = 1 if rng.random() < (0.8 if mask == "causal" else 0.2) else rng.randint(2, 8)
    each = max(3, facts_in_all // modules)
    documents = [make_document(namer, each) for _ in range(modules)]
    facts = [fact for document in documents for fact in document.facts]
    chosen = rng.sample(facts, min(len(facts), num_questions))
    styles = rng.choices(QUESTIONS, (80, 0, 11, 4, 5), k=len(chosen))
    questions = [
        ask_for(namer, style, fact, documents) for style, fact in zip(styles, chosen, strict=True)
    ]
    return make_prompt(namer, documents, questions, form, mask)
