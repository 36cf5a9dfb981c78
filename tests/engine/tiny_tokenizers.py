"""Makers of small tokenizers, saved as Hugging Face directories with chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world! Hello there, how are you today? I am fine.",
    'A JSON object: {"name": "Ada", "age": 36, "tags": ["x", "y"]}',
    "The name of the place is Oakham, and its height is 1250 metres.",
    "你好世界 naïve café — “quotes” 😀",
    "  indented\n\tlines\n\nand more lines",
] * 4

LLAMA_3_TEMPLATE = (
    "{% for message in messages %}"
    "{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{{ bos_token + text if loop.first else text }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant may speak') }}{% endif %}{% endfor %}"
)


def make_byte_level_tokenizer(
    path: str | Path,
    vocab_size: int = 512,
    *,
    template: str | None = LLAMA_3_TEMPLATE,
    more_names: Sequence[str] = (),
) -> Path:
    """Byte-level BPE as GPT-2 and Llama 3 have it: any bytes, BOS from the post-processor.

    `vocab_size` is the most; the corpus is small. `more_names`: further control tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", *more_names,
    ]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(names),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    _begin_with(tokenizer, names[0])
    return _save(
        tokenizer, path, template, bos_token=names[0], eos_token=names[1],
        additional_special_tokens=names[2:],
    )  # fmt: skip


def make_byte_fallback_tokenizer(
    path: str | Path,
    vocab_size: int = 420,
    *,
    legacy: bool = True,
    template: str | None = LLAMA_2_TEMPLATE,
) -> Path:
    """SentencePiece-like BPE with byte fallback, as Llama 2 has it.

    `legacy` puts the leading space with a normaliser, in front of every part between control
    tokens; otherwise a Metaspace pre-tokenizer puts it in front of the text only.
    """
    space: Any = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.normalizer = space
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]*"), behavior="isolated")
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learner.train_from_iterator(
        [text for text in CORPUS if text.isascii()],
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(special) - len(byte_tokens), show_progress=False
        ),
    )
    # Trained byte tokens would be control tokens; they belong in the vocabulary.
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocabulary = {name: place for place, name in enumerate([*special, *byte_tokens, *pieces])}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        tokenizer.normalizer = space
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    _begin_with(tokenizer, "<s>")
    return _save(tokenizer, path, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _save(tokenizer: Tokenizer, path: str | Path, template: str | None, **names: Any) -> Path:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if template is not None:
        wrapped.chat_template = template
    wrapped.save_pretrained(str(path))
    return Path(path)
