"""Prompts to rows of token ids: what each token sees, where it stands, what it must predict.

A row holds several prompts. Each prompt's questions stand behind one copy of its header and
documents and do not see each other, so one pass over a document teaches many answers. The `code`
of a token says what it sees, see `visible`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import documents
import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

MAX_POSITIONS = 8192
SAMPLE_SHIFT = 10  # a code is (prompt number << 10) + segment
TRUNK = 0  # seen by all later tokens of its prompt
FIRST_QUESTION = 512  # segments 1..511 are modules, from here on questions
IGNORE = -100


def visible(query_code: torch.Tensor, key_code: torch.Tensor) -> torch.Tensor:
    """Whether a query may see a key that stands before it, by their codes (broadcasting).

    The same prompt, and: the same segment, or a key in the trunk, or a query in a question and a
    key outside all questions.
    """
    same_prompt = (query_code >> SAMPLE_SHIFT) == (key_code >> SAMPLE_SHIFT)
    low = (1 << SAMPLE_SHIFT) - 1
    query, key = query_code & low, key_code & low
    asks = (query >= FIRST_QUESTION) & (key < FIRST_QUESTION)
    return same_prompt & ((query == key) | (key == TRUNK) | asks)


def dense_mask(code: torch.Tensor) -> torch.Tensor:
    """code `[rows, length]` -> bool `[rows, 1, length, length]`, True where seen."""
    length = code.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=code.device).tril()
    return (visible(code[:, :, None], code[:, None, :]) & causal)[:, None]


@dataclass(eq=False)
class Encoded:
    """One prompt's tokens; all arrays `[length]`.

    `question` is -1 and `weight` (of the loss) is 0 where no answer is to be predicted.
    """

    ids: np.ndarray
    position: np.ndarray
    segment: np.ndarray
    label: np.ndarray
    question: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


def module_starts(rng: random.Random, lengths: list[int], header: int, free: int) -> list[int]:
    """Position of each module's first token: in order, now and then with gaps between them."""
    gaps = [0] * len(lengths)
    if rng.random() < 0.5:
        budget = min(free, 1200)
        for index in range(len(gaps)):
            gaps[index] = rng.randint(0, max(0, budget // (2 * len(gaps))))
    starts, position = [], header
    for gap, length in zip(gaps, lengths, strict=True):
        starts.append(position + gap)
        position += gap + length
    return starts


def _positions(rng: random.Random, start: int, length: int, hole: int) -> list[int]:
    """Consecutive positions, but for one hole (where a parameter would stand)."""
    cut = rng.randint(1, length) if hole else length
    return [*range(start, start + cut), *range(start + cut + hole, start + length + hole)]


def _trunk_modules(rng: random.Random, prompt: documents.Prompt, vary: bool) -> int:
    """How many of the first documents belong to the always-included text."""
    if prompt.mask == "causal":
        return len(prompt.modules)
    if vary and prompt.mask == "anchored" and rng.random() < 0.2:
        return rng.randrange(len(prompt.modules))
    return 0


def encode(
    tokenizer: Tokenizer, prompt: documents.Prompt, rng: random.Random, vary: bool = True
) -> Encoded:
    """Tokens of one prompt. `vary` shifts it to a random place and leaves gaps between modules."""
    texts = [prompt.header, *prompt.modules]
    for question, answer in prompt.asked:
        texts += (question, answer)
    pieces = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    num_modules = len(prompt.modules)
    header, modules = pieces[0], pieces[1 : 1 + num_modules]
    asked = list(zip(pieces[1 + num_modules :: 2], pieces[2 + num_modules :: 2], strict=True))
    longest = max(len(q) + len(a) for q, a in asked)
    total = len(header) + sum(map(len, modules)) + longest
    free = MAX_POSITIONS - total
    gapped = vary and prompt.mask != "causal"
    holes = [rng.randint(1, 24) if gapped and rng.random() < 0.1 else 0 for _ in modules]
    spans = [len(module) + hole for module, hole in zip(modules, holes, strict=True)]
    starts = module_starts(rng, spans, len(header), free - sum(holes) if gapped else 0)
    end = starts[-1] + spans[-1] if modules else len(header)
    if gapped and rng.random() < 0.2:
        end += rng.randint(0, min(100, max(0, MAX_POSITIONS - end - longest)))
    room = MAX_POSITIONS - end - longest
    offset = rng.randint(0, room) if vary and room > 0 and rng.random() < 0.5 else 0
    num_trunk = _trunk_modules(rng, prompt, vary)
    header_segment = 1 if prompt.mask == "isolated" else TRUNK

    ids, position, segment = list(header), list(range(len(header))), [header_segment] * len(header)
    question_of = [-1] * len(header)
    lengths = np.asarray([max(1, len(answer)) for _, answer in asked])
    for index, (tokens, start) in enumerate(zip(modules, starts, strict=True)):
        ids += tokens
        position += _positions(rng, start, len(tokens), holes[index])
        own = TRUNK if index < num_trunk else 2 + index
        segment += [own] * len(tokens)
        question_of += [-1] * len(tokens)
    for index, (question, answer) in enumerate(asked):
        length = len(question) + len(answer)
        ids += question + answer
        position += range(end, end + length)
        segment += [FIRST_QUESTION + index] * length
        question_of += [-1] * (len(question) - 1) + [index] * len(answer) + [-1]

    segments = np.asarray(segment)
    label = np.full(len(ids), IGNORE)
    label[:-1] = np.asarray(ids[1:])
    label[:-1][segments[:-1] != segments[1:]] = IGNORE
    questions = np.asarray(question_of)
    weight = np.where(questions >= 0, lengths[questions] ** -0.5, 0.0)
    label[(segments >= FIRST_QUESTION) & (questions < 0)] = IGNORE
    return Encoded(
        np.asarray(ids), np.asarray(position) + offset, segments, label, questions, weight
    )


@dataclass
class Rows:
    """A batch; every tensor `[rows, length]`. `question` numbers the answers of a row, else -1.

    `weight` is that of an answer's token in the loss: short answers count nearly as much as long.
    """

    ids: torch.Tensor
    position: torch.Tensor
    code: torch.Tensor
    label: torch.Tensor
    question: torch.Tensor
    weight: torch.Tensor

    def to(self, device: str) -> Rows:
        """The same rows on a device."""
        return Rows(*(t.to(device, non_blocking=True) for t in vars(self).values()))

    def pin_memory(self) -> Rows:
        """The same rows in page-locked memory."""
        return Rows(*(t.pin_memory() for t in vars(self).values()))


def empty_row(length: int, pad: int) -> dict[str, np.ndarray]:
    """A row of padding; no prompt uses the code of padding."""
    fill = {"ids": pad, "position": 0, "code": -1, "label": IGNORE, "question": -1}
    row = {name: np.full(length, value, dtype=np.int32) for name, value in fill.items()}
    return {**row, "weight": np.zeros(length, dtype=np.float32)}


def pack(encoded: list[Encoded], length: int, pad: int) -> dict[str, np.ndarray]:
    """Put prompts behind each other into one row."""
    row = empty_row(length, pad)
    start, asked = 0, 0
    for number, one in enumerate(encoded):
        part = slice(start, start + len(one))
        row["ids"][part] = one.ids
        row["position"][part] = one.position
        row["code"][part] = one.segment + (number << SAMPLE_SHIFT)
        row["label"][part] = one.label
        row["weight"][part] = one.weight
        row["question"][part] = np.where(one.question >= 0, one.question + asked, -1)
        asked += int(one.question.max()) + 1
        start += len(one)
    return row


def stack(rows: list[dict[str, np.ndarray]]) -> Rows:
    """Rows of one length to one batch."""
    return Rows(**{k: torch.from_numpy(np.stack([r[k] for r in rows])) for k in rows[0]})


class TrainingRows(IterableDataset):
    """Endless batches of training rows; `max_facts` is shared memory that the trainer raises."""

    def __init__(self, tokenizer: Path, seed: int, rows: int, length: int, max_facts) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.rows = rows
        self.length = length
        self.max_facts = max_facts

    def _encoded(self, tokenizer: Tokenizer, rng: random.Random) -> Encoded:
        while True:
            facts = int(self.max_facts.value)
            questions = rng.randint(10, 28)
            prompt = documents.training_prompt(rng, "train", facts, questions)
            try:
                one = encode(tokenizer, prompt, rng)
            except ValueError:  # longer than the positions
                continue
            if len(one) <= self.length and int(one.position.max()) < MAX_POSITIONS:
                return one

    def _row(self, tokenizer: Tokenizer, rng: random.Random, waiting: list[Encoded]) -> dict:
        """Fill a row from the waiting prompts, largest first, then with what still fits."""
        while sum(map(len, waiting)) < 2 * self.length:
            waiting.append(self._encoded(tokenizer, rng))
        chosen, free = [], self.length
        for one in list(waiting):
            if len(one) <= free:
                chosen.append(one)
                waiting.remove(one)
                free -= len(one)
        return pack(chosen, self.length, tokenizer.token_to_id(documents.PAD))

    def __iter__(self) -> Iterator[Rows]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        torch.set_num_threads(1)
        rng = random.Random(f"train {self.seed} {worker}")
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        waiting: list[Encoded] = []
        while True:
            yield stack([self._row(tokenizer, rng, waiting) for _ in range(self.rows)])


# --- held-out rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Exam:
    """One category of held-out questions."""

    form: str = "user"
    mask: str = "causal"
    modules: int = 1
    facts: int = 50
    style: str = "seen"


EXAMS = {
    "short": Exam(facts=24),
    "long": Exam(facts=64),
    "held-out": Exam(style="held-out"),
    "raw": Exam(form="raw"),
    "system": Exam(form="system"),
    "few-shot turns": Exam(form="turns"),
    "few-shot header": Exam(form="examples"),
    "anchored": Exam(mask="anchored", modules=3, facts=66),
    "isolated": Exam(mask="isolated", modules=3, facts=66),
    "3,000 tokens": Exam(facts=140),
    "6,000 tokens": Exam(facts=280),
    "yes or no": Exam(style="yes or no"),
    "json": Exam(style="json"),
    "not stated": Exam(style="not stated"),
}


def exam_prompt(exam: Exam, seed: str, questions: int = 16) -> documents.Prompt:
    """A test prompt: documents of together about `exam.facts` facts, and questions about them."""
    rng = random.Random(f"test {seed}")
    namer = documents.Namer(rng, "test")
    each = max(3, exam.facts // exam.modules)
    docs = [documents.make_document(namer, each) for _ in range(exam.modules)]
    stated = [fact for document in docs for fact in document.facts]
    chosen = rng.sample(stated, min(len(stated), questions))
    asked = [documents.ask_for(namer, exam.style, fact, docs) for fact in chosen]
    return documents.make_prompt(namer, docs, asked, exam.form, exam.mask, plain=True)


def exam_rows(tokenizer: Tokenizer, name: str, count: int, length: int) -> Rows:
    """`count` rows of one category, filled with as many prompts as fit."""
    pad = tokenizer.token_to_id(documents.PAD)
    rows: list[dict[str, np.ndarray]] = []
    chosen: list[Encoded] = []
    number = 0
    while len(rows) < count:
        prompt = exam_prompt(EXAMS[name], f"{name} {number}")
        one = encode(tokenizer, prompt, random.Random(number), vary=False)
        if sum(map(len, chosen)) + len(one) > length:
            rows.append(pack(chosen, length, pad))
            chosen = []
        chosen.append(one)
        number += 1
    return stack(rows)
