"""Write facts.jsonl and facts.answers.json: a job for the embedded model, and its right answers.

Questions about invented documents of the test split, in shuffled order as a user would send them:
first documents that each share nothing but themselves, then few-shot turns that all requests of
the second part share, each followed by one of several documents (two levels of sharing).
`python examples/make_facts.py` writes the same files every time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "training"))

import documents  # noqa: E402

PLAIN_DOCUMENTS = 12
FEW_SHOT_DOCUMENTS = 6
QUESTIONS_EACH = 16
HELD_OUT_SHARE = 0.25
MAX_TOKENS = 40
SYSTEM = "You answer questions about a document. Answer with the value only."

Message = dict[str, str]


def requests_about(
    namer: documents.Namer, name: str, before: list[Message], facts: int
) -> list[tuple[str, list[Message], str]]:
    """`QUESTIONS_EACH` requests about one new document: (custom_id, messages, answer)."""
    rng = namer.rng
    document = documents.make_document(namer, facts)
    requests = []
    for number, fact in enumerate(rng.sample(document.facts, QUESTIONS_EACH)):
        question = documents.ask(rng, fact, held=rng.random() < HELD_OUT_SHARE)
        content = f"{document.text}\nQuestion: {question.text}"
        messages = [*before, {"role": "user", "content": content}]
        requests.append((f"{name}-q{number:02}", messages, question.answer))
    return requests


def few_shot(namer: documents.Namer) -> list[Message]:
    """A system prompt and worked examples."""
    messages = [{"role": "system", "content": SYSTEM}]
    for text, question in documents.examples(namer, 4):
        content = f"{text}\nQuestion: {question.text}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": question.answer})
    return messages


def job(seed: int) -> tuple[list[dict], dict[str, str]]:
    """The lines of the job, shuffled, and the right answer of each custom_id."""
    rng = random.Random(f"test facts {seed}")
    namer = documents.Namer(rng, "test")
    requests = []
    for number in range(PLAIN_DOCUMENTS):
        requests += requests_about(namer, f"doc{number:02}", [], rng.randint(30, 62))
    before = few_shot(namer)
    for number in range(FEW_SHOT_DOCUMENTS):
        requests += requests_about(namer, f"shots{number:02}", before, rng.randint(30, 50))
    rng.shuffle(requests)
    lines = [
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "embedded",
                "messages": messages,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            },
        }
        for custom_id, messages, _ in requests
    ]
    return lines, {custom_id: answer for custom_id, _, answer in sorted(requests)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines, answers = job(args.seed)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (args.out / "facts.jsonl").write_text(text)
    (args.out / "facts.answers.json").write_text(json.dumps(answers, indent=1) + "\n")
    print(f"{len(lines)} requests")


if __name__ == "__main__":
    main()
