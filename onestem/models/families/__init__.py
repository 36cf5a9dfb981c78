"""The families of models: what each reads from `config.json` and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onestem.models.description import Description, TensorNames
from onestem.models.families import (
    falcon,
    gemma,
    glm,
    gpt2,
    granite,
    llama,
    ministral3,
    mpt,
    olmo,
    phi,
    phi3,
    smollm3,
)
from onestem.models.fields import Fields

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """`read` takes the fields of `config.json` and raises `ConfigError` or, for what this decoder
    does not compute, `UnsupportedError`."""

    read: Callable[[Fields, str], Description]
    names: Callable[[Description], TensorNames]


# CodeLlama and Yi are `LlamaForCausalLM` with other numbers; `MPTForCausalLM` is how the makers of
# MPT write it.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read, llama.names),
    "MistralForCausalLM": Family(llama.read, llama.names),
    "MinistralForCausalLM": Family(llama.read, llama.names),
    "Ministral3ForCausalLM": Family(ministral3.read, ministral3.names),
    "Mistral3ForConditionalGeneration": Family(ministral3.read_image_model, ministral3.names),
    "Qwen2ForCausalLM": Family(llama.read, llama.names),
    "Qwen3ForCausalLM": Family(llama.read, llama.names),
    "Gemma2ForCausalLM": Family(gemma.read_gemma2, gemma.names),
    "Gemma3ForCausalLM": Family(gemma.read_gemma3, gemma.names),
    "Gemma3ForConditionalGeneration": Family(gemma.read_gemma3, gemma.names),
    "Phi3ForCausalLM": Family(phi3.read, phi3.names),
    "Olmo2ForCausalLM": Family(olmo.read_olmo2, olmo.names),
    "Olmo3ForCausalLM": Family(olmo.read_olmo3, olmo.names),
    "SmolLM3ForCausalLM": Family(smollm3.read, llama.names),
    "GraniteForCausalLM": Family(granite.read, llama.names),
    "GlmForCausalLM": Family(glm.read, glm.names),
    "Glm4ForCausalLM": Family(glm.read, glm.names),
    "FalconForCausalLM": Family(falcon.read, falcon.names),
    "MptForCausalLM": Family(mpt.read, mpt.names),
    "MPTForCausalLM": Family(mpt.read, mpt.names),
    "PhiForCausalLM": Family(phi.read, phi.names),
    "GPT2LMHeadModel": Family(gpt2.read, gpt2.names),
}
