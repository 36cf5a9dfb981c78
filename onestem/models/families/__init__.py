"""The families of models: what each reads from `config.json` and what its tensors are called."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from onestem.models.description import Description
from onestem.models.families import delta, experts, gemma, layer_norm, llama
from onestem.models.fields import Fields


@dataclass(frozen=True)
class Family:
    """`read` takes the fields of `config.json` and raises `ConfigError` or, for what this decoder
    does not compute, `UnsupportedError`. `names`: a table of names.toml (`naming.tensor_names`).
    `models`: common names of its models."""

    read: Callable[[Fields, str], Description]
    names: str
    models: str


_DELTA = (delta.read, "delta")
_DELTA_EXPERTS = (delta.read, "delta-experts")
_GEMMA4 = (gemma.read_gemma4, "gemma4")

# CodeLlama and Yi are `LlamaForCausalLM` with other sizes. MPT's makers write `MPTForCausalLM`.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read, "llama", "Llama 2 and 3.x, CodeLlama, Yi"),
    "MistralForCausalLM": Family(llama.read, "llama", "Mistral, Mistral Small 3"),
    "MinistralForCausalLM": Family(llama.read, "llama", "Ministral 8B"),
    "Ministral3ForCausalLM": Family(llama.read_ministral3, "llama", "Ministral 3"),
    "Mistral3ForConditionalGeneration": Family(
        llama.read_image_model,
        "llama-image",
        "Mistral Small 3.1 on, for text",
    ),
    "Qwen2ForCausalLM": Family(llama.read, "llama", "Qwen2, Qwen2.5"),
    "Qwen3ForCausalLM": Family(llama.read, "llama", "Qwen3"),
    "MixtralForCausalLM": Family(experts.read_mixtral, "mixtral", "Mixtral"),
    "Qwen2MoeForCausalLM": Family(
        experts.read_qwen, "shared-expert", "Qwen1.5-MoE, Qwen2-57B-A14B"
    ),
    "Qwen3MoeForCausalLM": Family(experts.read_qwen, "experts", "Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "Qwen3NextForCausalLM": Family(delta.read, "qwen3-next", "Qwen3-Next"),
    "Qwen3_5ForCausalLM": Family(*_DELTA, "Qwen3.5, the text part alone"),
    "Qwen3_5MoeForCausalLM": Family(
        *_DELTA_EXPERTS, "Qwen3.5 and 3.6 with experts, the text part alone"
    ),
    "Qwen3_5ForConditionalGeneration": Family(*_DELTA, "Qwen3.5 0.8B to 27B, for text"),
    "Qwen3_5MoeForConditionalGeneration": Family(
        *_DELTA_EXPERTS, "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, for text"
    ),
    "OlmoeForCausalLM": Family(experts.read_olmoe, "experts", "OLMoE"),
    "GptOssForCausalLM": Family(experts.read_gpt_oss, "gpt-oss", "gpt-oss 20B and 120B"),
    "Glm4MoeForCausalLM": Family(experts.read_glm4, "glm4-moe", "GLM-4.5, GLM-4.5-Air, GLM-4.6"),
    "Gemma2ForCausalLM": Family(gemma.read_gemma2, "gemma", "Gemma 2"),
    "Gemma3ForCausalLM": Family(gemma.read_gemma3, "gemma", "Gemma 3 270M and 1B"),
    "Gemma3ForConditionalGeneration": Family(
        gemma.read_gemma3, "gemma-image", "Gemma 3 4B on, for text"
    ),
    "Gemma4ForCausalLM": Family(*_GEMMA4, "Gemma 4, the text part alone"),
    "Gemma4ForConditionalGeneration": Family(
        *_GEMMA4, "Gemma 4 E2B, E4B, 26B-A4B and 31B, for text"
    ),
    "Gemma4UnifiedForCausalLM": Family(*_GEMMA4, "Gemma 4 12B, the text part"),
    "Gemma4UnifiedForConditionalGeneration": Family(*_GEMMA4, "Gemma 4 12B, for text"),
    "Phi3ForCausalLM": Family(llama.read_phi3, "phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Olmo2ForCausalLM": Family(llama.read_olmo2, "olmo", "OLMo 2"),
    "Olmo3ForCausalLM": Family(llama.read_olmo3, "olmo", "OLMo 3"),
    "SmolLM3ForCausalLM": Family(llama.read_smollm3, "llama", "SmolLM3"),
    "GraniteForCausalLM": Family(llama.read_granite, "llama", "Granite 3 and 4 without experts"),
    "GlmForCausalLM": Family(llama.read_glm, "glm", "GLM-4 9B of 2024"),
    "Glm4ForCausalLM": Family(llama.read_glm, "glm4", "GLM-4 9B and 32B of 2025"),
    "FalconForCausalLM": Family(
        layer_norm.read_falcon, "falcon-{block}", "Falcon 7B, 40B, 11B, RW"
    ),
    "MptForCausalLM": Family(layer_norm.read_mpt, "mpt", "MPT 7B and 30B"),
    "MPTForCausalLM": Family(layer_norm.read_mpt, "mpt", "the same, in its makers' files"),
    "PhiForCausalLM": Family(layer_norm.read_phi, "phi", "Phi-1, 1.5, 2"),
    "GPT2LMHeadModel": Family(layer_norm.read_gpt2, "gpt2", "GPT-2"),
}

# What unsupported models have that no family here has, by a part of their name.
_REASONS = {
    "Gemma3n": "embeddings for each layer, and several residual streams",
    "Deepseek": "experts and latent attention",
    "Kimi": "experts and latent attention",
    "Llama4": "experts",
    "Moe": "experts",
    "Mamba": "recurrent layers",
    "Jamba": "recurrent layers",
    "Recurrent": "recurrent layers",
    "Rwkv": "recurrent layers",
    "T5": "an encoder",
    "ConditionalGeneration": "an encoder",
}
_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def refusal(architecture: str) -> str:
    """Why a name that is not in `FAMILIES` is refused, and the nearest family."""
    reason = next((has for part, has in _REASONS.items() if part in architecture), None)
    why = f"it has {reason}" if reason else "no family here computes its layers"
    stems = {_stem(name): name for name in reversed(FAMILIES)}
    near = difflib.get_close_matches(_stem(architecture), stems, n=1)
    nearest = stems[near[0]] if near else "LlamaForCausalLM"
    return f"{why}; the nearest family that works is {nearest} (onestem models lists all)"


def _stem(architecture: str) -> str:
    for suffix in _SUFFIXES:
        architecture = architecture.removesuffix(suffix)
    return architecture.lower()
