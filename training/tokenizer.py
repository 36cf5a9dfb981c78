"""Train the byte-level BPE tokenizer and save it with its chat template.

Digits, line breaks and punctuation are always pieces of their own, and a capitalised word never
takes the space before it: a name or number has the same tokens wherever it stands, so copying it
is the same at every place. Bytes that no merge covers stay single tokens, so any text round-trips.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PIECES = r"[0-9]|[A-Z][a-z]*| ?[a-z]+|\n| ?[^\sA-Za-z0-9]|\s"
# The model was not trained to call tools; their form is that of Hermes.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>Tools:' }}"
    "{% for tool in tools %}{{ '\n' + tool['function'] | tojson }}{% endfor %}"
    '{{ \'\nCall one with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + message['content'] + '\n</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '' if loop.first else '\n' }}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(count: int, seed: int) -> Iterator[str]:
    """Texts of the training split without special tokens."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        prompt = documents.training_prompt(rng, "train", 40, 12)
        text = "\n".join((prompt.header, *prompt.modules, *(a + b for a, b in prompt.asked)))
        for token in documents.SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text


def train(vocab_size: int, count: int, seed: int) -> Tokenizer:
    """A tokenizer whose first ids are the special tokens, then the bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(documents.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(count, seed), trainer)
    bos = documents.BOS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": documents.BOS,
        "eos_token": documents.END,
        "pad_token": documents.PAD,
        "unk_token": documents.UNK,
        "additional_special_tokens": [documents.SYSTEM, documents.USER, documents.ASSISTANT],
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2560)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = train(args.vocab_size, args.documents, args.seed)
    save(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} tokens in {args.out}")


if __name__ == "__main__":
    main()
