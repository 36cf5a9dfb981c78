"""Exact-match accuracy of the embedded model on unseen documents, by greedy decoding.

`python training/evaluate.py` writes training/evaluation.json. The model runs in `transformers`
with explicit attention masks and positions; documents, names and values come from the test split.
One category goes through the chat template and `generate`, with nothing of this project between.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import documents
import packing
import torch
from documents import Prompt
from packing import Exam
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "onestem" / "embedded" / "model"
LONGEST_ANSWER = 40
QUESTIONS_EACH = 16


@dataclass(frozen=True)
class Paper:
    """One prompt of a category and the answers that count as right."""

    prompt: Prompt
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Category:
    """How to make the papers of one category, and what share must be right (percent)."""

    make: Callable[[str], Paper]
    at_least: float | None = None
    at_most: float | None = None
    shifted: bool = False  # gaps between modules, prompts at random positions


def exam(facts: tuple[int, int] = (20, 48), **settings: object) -> Callable[[str], Paper]:
    """Papers of one `packing.Exam`, their documents of so many facts (least, most) together."""

    def make(seed: str) -> Paper:
        number = random.Random(f"facts {seed}").randint(*facts)
        prompt = packing.exam_prompt(Exam(facts=number, **settings), seed, QUESTIONS_EACH)
        return Paper(prompt, tuple(question.answer for question in prompt.questions))

    return make


def _namer(seed: str) -> documents.Namer:
    return documents.Namer(random.Random(f"test {seed}"), "test")


def without_document(seed: str) -> Paper:
    """Questions about a document that is not in the prompt; right would be its answers."""
    namer = _namer(seed)
    facts = namer.rng.sample(documents.make_document(namer, 40).facts, QUESTIONS_EACH)
    questions = [documents.ask(namer.rng, fact) for fact in facts]
    prompt = documents.make_prompt(namer, (), questions, "user", plain=True)
    return Paper(prompt, tuple(question.answer for question in questions))


def swapped(seed: str, original: bool = False) -> Paper:
    """The document with other values; right are the new ones (`original`: the old ones)."""
    namer = _namer(seed)
    first = documents.make_document(namer, 45)
    second = first.swapped(namer.rng)
    chosen = namer.rng.sample(range(len(first.facts)), QUESTIONS_EACH)
    questions = [documents.ask(namer.rng, first.facts[index]) for index in chosen]
    prompt = documents.make_prompt(namer, (second,), questions, "user", plain=True)
    facts = first.facts if original else second.facts
    return Paper(prompt, tuple(facts[index].value for index in chosen))


def original_of_swapped(seed: str) -> Paper:
    """The swapped document's prompts, counted by the answers of the document they replaced."""
    return swapped(seed, original=True)


def _modules(mask: str, style: str, number: int) -> Callable[[str], Paper]:
    return exam(mask=mask, style=style, modules=number, facts=(72, 86))


CATEGORIES = {
    "document up to 1,500 tokens": Category(exam(facts=(20, 70)), at_least=95),
    "document up to 1,500 tokens, held-out phrasings": Category(
        exam(facts=(20, 70), style="held-out"), at_least=95
    ),
    "few-shot turns, document, question": Category(exam(form="turns"), at_least=95),
    "few-shot turns, held-out phrasings": Category(
        exam(form="turns", style="held-out"), at_least=95
    ),
    "few-shot system prompt, document, question": Category(exam(form="examples"), at_least=95),
    "document in the system prompt": Category(exam(form="system"), at_least=95),
    "plain text without chat template": Category(exam(form="raw"), at_least=95),
    "2 modules, anchored": Category(_modules("anchored", "seen", 2), at_least=95, shifted=True),
    "2 modules, isolated": Category(_modules("isolated", "seen", 2), at_least=95, shifted=True),
    "4 modules, anchored": Category(_modules("anchored", "seen", 4), at_least=95, shifted=True),
    "4 modules, isolated": Category(_modules("isolated", "seen", 4), at_least=95, shifted=True),
    "3 modules, anchored, held-out phrasings": Category(
        _modules("anchored", "held-out", 3), at_least=95, shifted=True
    ),
    "3 modules, isolated, held-out phrasings": Category(
        _modules("isolated", "held-out", 3), at_least=95, shifted=True
    ),
    "3 documents, causal": Category(_modules("causal", "seen", 3), at_least=95),
    "without the document": Category(without_document, at_most=5),
    "swapped document, its own answer": Category(swapped, at_least=95),
    "swapped document, the replaced answer": Category(original_of_swapped, at_most=5),
    "document of about 3,000 tokens": Category(exam(facts=(130, 150))),
    "document of about 6,000 tokens": Category(exam(facts=(270, 290))),
    "yes or no": Category(exam(style="yes or no")),
    "answer as JSON": Category(exam(style="json")),
    "not stated in the document": Category(exam(style="not stated")),
}


class Reader:
    """Answers all questions of a prompt at once, greedily, each seeing only what it may."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).to(device)
        self.device = device
        self.end = self.tokenizer.token_to_id(documents.END)

    def _forward(
        self, ids: list[int], position: list[int], mask: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """The next token after each of `ids`; mask `[len(ids), cached + len(ids)]`."""
        out = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([position], device=self.device),
            attention_mask=mask[None, None].to(self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits[0].argmax(-1).cpu()

    @torch.inference_mode()
    def answers(self, prompt: Prompt, rng: random.Random | None) -> list[str]:
        """One answer a question. With `rng` the prompt and its modules stand at random places."""
        asked = tuple((question, "") for question, _ in prompt.asked)
        one = packing.encode(
            self.tokenizer, replace(prompt, asked=asked), rng or random.Random(0), rng is not None
        )
        code = torch.from_numpy(one.segment)
        position = one.position.tolist()
        cache = DynamicCache()
        following = self._forward(
            one.ids.tolist(), position, packing.dense_mask(code[None])[0, 0], cache
        )
        last = [int((code == packing.FIRST_QUESTION + i).nonzero()[-1]) for i in range(len(asked))]
        tokens = [int(following[index]) for index in last]
        places = [position[index] + 1 for index in last]
        own = torch.arange(len(asked)) + packing.FIRST_QUESTION
        answers: list[list[int]] = [[] for _ in asked]
        done = [False] * len(asked)
        for _ in range(LONGEST_ANSWER):
            for index, token in enumerate(tokens):
                done[index] = done[index] or token == self.end
                if not done[index]:
                    answers[index].append(token)
            if all(done):
                break
            code = torch.cat((code, own))
            mask = packing.visible(own[:, None], code[None, :])
            tokens = self._forward(tokens, places, mask, cache).tolist()
            places = [place + 1 for place in places]
        return [self.tokenizer.decode(answer).strip() for answer in answers]

    @torch.inference_mode()
    def generated(self, folder: Path, paper: Paper) -> list[str]:
        """Answers through the chat template and `generate`, one question at a time."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        document = paper.prompt.modules[0]
        answers = []
        for question in paper.prompt.questions:
            content = f"{document}\nQuestion: {question.text}"
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            ).to(self.device)
            out = self.model.generate(**inputs, max_new_tokens=LONGEST_ANSWER)
            new = out[0, inputs["input_ids"].shape[1] :]
            answers.append(tokenizer.decode(new, skip_special_tokens=True).strip())
        return answers


def tally(name: str, right: int, asked: int, lengths: list[int], category: Category) -> dict:
    """The result of one category."""
    percent = round(100 * right / asked, 2)
    low, high = category.at_least, category.at_most
    result = {
        "questions": asked,
        "right": right,
        "percent": percent,
        "prompts": len(lengths),
        "shared_tokens": [min(lengths), max(lengths)],
    }
    if low is not None:
        result |= {"at_least": low, "reached": percent >= low}
    if high is not None:
        result |= {"at_most": high, "reached": percent <= high}
    print(f"{percent:6.2f}%  {right}/{asked}  {name}", flush=True)
    return result


def shared_tokens(reader: Reader, prompt: Prompt) -> int:
    """Tokens of header and documents."""
    text = prompt.header + "".join(prompt.modules)
    return len(reader.tokenizer.encode(text, add_special_tokens=False))


def evaluate(
    reader: Reader, folder: Path, prompts: int, generated: int, show: bool, only: str
) -> dict:
    """Categories whose name begins with `only`; `generated` prompts through `generate`."""
    results = {}
    for name, category in CATEGORIES.items():
        if not name.startswith(only):
            continue
        right = asked = 0
        lengths = []
        for index in range(prompts):
            paper = category.make(f"evaluation {name.split(',')[0]} {index}")
            rng = random.Random(f"places {index}") if category.shifted else None
            answers = reader.answers(paper.prompt, rng)
            lengths.append(shared_tokens(reader, paper.prompt))
            for question, answer, expected in zip(
                paper.prompt.questions, answers, paper.expected, strict=True
            ):
                asked += 1
                right += answer == expected
                if show and answer != expected:
                    print(f"    {question.text} | {answer} | {expected}", file=sys.stderr)
        results[name] = tally(name, right, asked, lengths, category)
    if generated:
        name = "chat template and generate()"
        category = Category(exam(), at_least=95)
        right = asked = 0
        lengths = []
        for index in range(generated):
            paper = category.make(f"generate {index}")
            answers = reader.generated(folder, paper)
            lengths.append(shared_tokens(reader, paper.prompt))
            asked += len(answers)
            right += sum(a == e for a, e in zip(answers, paper.expected, strict=True))
        results[name] = tally(name, right, asked, lengths, category)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--prompts", type=int, default=24, help="of each category")
    parser.add_argument("--generate", type=int, default=20, help="prompts through generate()")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", default="", help="beginning of a name: keep the other results")
    parser.add_argument("--show", action="store_true", help="print wrong answers to stderr")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = Reader(args.model, device, getattr(torch, args.dtype))
    results = evaluate(reader, args.model, args.prompts, args.generate, args.show, args.only)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{where}, {args.dtype}, torch {torch.__version__}"
    kept = json.loads(args.out.read_text())["categories"] if args.only else {}
    categories = kept | {name: {**result, "on": where} for name, result in results.items()}
    reached = all(result.get("reached", True) for result in categories.values())
    report = {
        "decoding": "greedy; right means the answer is the same text, character by character",
        "all_reached": reached,
        "categories": categories,
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'all' if reached else 'NOT all'} targets reached; written to {args.out.name}")


if __name__ == "__main__":
    main()
