"""Greedy answers of a GGUF file beside those of `transformers`, which reads the same file.

    python -m onestem_lab.gguf_chats FILE.gguf [--chats 30] [--tokens 48]

Both compute in float32 on the CPU. Ids of the rendered chats are compared too. Exit code 1 where a
chat differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from onestem import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?", "Write a haiku about rain.", "What is 17 plus 25?",
    "Explain photosynthesis in one sentence.", "¿Cuál es la capital de España?",
    "Wie spät ist es in Tokio, wenn es in Berlin Mittag ist?", "Write a Python function that adds.",
    "List three fruits.", "Translate 'good morning' into French.", "Who wrote Hamlet?",
    'Answer in JSON: {"name": ..., "age": ...} for Ada, 36.', "Why is the sky blue?",
    "Say hello 😀 with two emoji.", "What comes after Tuesday?", "Summarise: cats sleep a lot.",
    "Give a synonym of 'fast'.", "今日は何曜日ですか。", "Plan a day in Rome.", "What is an atom?",
    "Count from one to ten.", "Fix the typo: 'teh cat'.", "Is 91 a prime number?", "Привет!",
    "Name a planet with rings.", "Write SQL that counts rows of a table t.", "Tell me a joke.",
    "What does HTTP stand for?", "How do I boil an egg?", "Reverse the word 'stem'.", "Goodbye.",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--chats", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    chats = [[{"role": "user", "content": one}] for one in QUESTIONS[: options.chats]]
    params = SamplingParams(max_tokens=options.tokens, temperature=0)
    with LLM(options.file, dtype="float32", device="cpu") as llm:
        ours = [
            (answer.prompt_token_ids, answer.outputs[0].token_ids)
            for answer in llm.chat(chats, params)
        ]
    place = {"gguf_file": options.file.name}
    tokenizer = AutoTokenizer.from_pretrained(options.file.parent, **place)
    model = AutoModelForCausalLM.from_pretrained(options.file.parent, dtype=torch.float32, **place)
    wrong = 0
    for chat, found in zip(chats, ours, strict=True):
        truth = answer_of(model, tokenizer, chat, options.tokens)
        if truth != found:
            wrong += 1
            print(chat[0]["content"], *map(tokenizer.decode, (truth[1], found[1])), sep="\n  ")
    print(f"{options.file.name}: {len(chats)} chats, {wrong} differ from transformers'")
    sys.exit(1 if wrong else 0)


@torch.inference_mode()
def answer_of(model: Any, tokenizer: Any, chat: Any, tokens: int) -> tuple[list[int], list[int]]:
    """Ids of the rendered chat, and of the greedy answer."""
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    whole = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return ids, whole[0, len(ids) :].tolist()


if __name__ == "__main__":
    main()
