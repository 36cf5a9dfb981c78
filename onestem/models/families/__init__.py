"""The families of models: what each reads from `config.json` and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onestem.models.description import Description, TensorNames
from onestem.models.families import experts, falcon, gemma, gpt2, llama, mpt, phi
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
    "Qwen2ForCausalLM": Family(llama.read, llama.names),
    "Qwen3ForCausalLM": Family(llama.read, llama.names),
    "MixtralForCausalLM": Family(experts.read_mixtral, experts.names),
    "Qwen2MoeForCausalLM": Family(experts.read_qwen, experts.names),
    "Qwen3MoeForCausalLM": Family(experts.read_qwen, experts.names),
    "OlmoeForCausalLM": Family(experts.read_olmoe, experts.names),
    "GptOssForCausalLM": Family(experts.read_gpt_oss, experts.names),
    "Glm4MoeForCausalLM": Family(experts.read_glm4, experts.names),
    "Gemma2ForCausalLM": Family(gemma.read_gemma2, gemma.names),
    "Gemma3ForCausalLM": Family(gemma.read_gemma3, gemma.names),
    "Gemma3ForConditionalGeneration": Family(gemma.read_gemma3, gemma.names),
    "FalconForCausalLM": Family(falcon.read, falcon.names),
    "MptForCausalLM": Family(mpt.read, mpt.names),
    "MPTForCausalLM": Family(mpt.read, mpt.names),
    "PhiForCausalLM": Family(phi.read, phi.names),
    "GPT2LMHeadModel": Family(gpt2.read, gpt2.names),
}
