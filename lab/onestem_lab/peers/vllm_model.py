"""A model's folder as vLLM 0.24 reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["model_settings"]

# Text models that vLLM has as a part of another alone, which also sees pictures: their
# `model_type` -> that of the whole, and its class.
_PARTS = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
# As few weights as there can be: with `language_model_only` they are not even made.
_VISION = {"depth": 1, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2}


def model_settings(model: Path, folder: Path) -> dict[str, Any]:
    """Settings of `vllm.LLM` for a model's directory with a `config.json`.

    Args:
        folder: of files that live as long as the engine.
    """
    text = json.loads((model / "config.json").read_text())
    if text["model_type"] not in _PARTS:
        return {"model": str(model)}
    kind, architecture = _PARTS[text["model_type"]]
    # vLLM keeps states in the rows' type unless the checkpoint says what its own say.
    text["mamba_ssm_dtype"] = "float32"
    whole = {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": text,
        "vision_config": {**_VISION, "model_type": kind, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": text["torch_dtype"],
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return {"model": str(folder), "language_model_only": True}
