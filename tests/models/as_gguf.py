"""Tiny models as GGUF files, in the form that llama.cpp's converter writes.

`python -m onestem_lab.gguf_converter` compares what is read here with that converter's own files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

__all__ = ["CHANGES", "HALVES", "random_blocks", "vocabulary", "write_file", "write_gguf"]

_HEAD = {"query_pre_attn_scalar": 32}  # of Gemma's head
_DEEP = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
}
_FALCON = {"ffn_hidden_size": 256, "bias": False}
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 2.0 * i for i in range(6)],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}

_AS_THEY_ARE = (
    "llama", "llama_mha_tied", "llama_llama3_rope", "llama_linear_rope", "llama_biases",
    "llama_head_dim", "mistral_no_window", "qwen2", "qwen2_yarn", "qwen3", "qwen2_moe", "phi3",
    "gpt2", "olmo2", "olmo3", "granite",
)  # fmt: skip
# Families of `tiny` -> what their files cannot say otherwise.
CHANGES: dict[str, dict[str, Any]] = {
    **{family: {} for family in _AS_THEY_ARE},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": _HEAD,
    "gemma3": {**_HEAD, **_DEEP},
    "phi4_mini": {"rope_parameters": _FACTORS, "original_max_position_embeddings": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_next": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "falcon": {**_FALCON, "num_kv_heads": 1},
    "falcon_40b": _FALCON,
    "falcon_11b": {**_FALCON, **_THETA},
}

_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt-oss",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}

# Fields of `config.json` (the first that is there) -> those of a file.
_FIELDS: dict[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
}

# Where float16 scales are in a block, and how large they make weights of a hundredth.
HALVES = {
    "Q4_0": {0: 2e-3}, "Q4_1": {0: 2e-3, 2: -1.5e-2}, "Q5_0": {0: 1e-3},
    "Q5_1": {0: 1e-3, 2: -1.5e-2}, "Q8_0": {0: 1.5e-4}, "Q4_K": {0: 5e-5, 2: 4e-4},
    "Q5_K": {0: 2.5e-5, 2: 4e-4}, "Q6_K": {208: 1e-5}, "MXFP4": {},
}  # fmt: skip

Changed = Callable[[dict[str, Any]], None]


def write_gguf(
    source: Path,
    target: Path,
    *,
    kind: str | Callable[[str], str] = "F32",
    change: Changed = lambda fields: None,
    tensors: Changed = lambda tensors: None,
    split: int = 0,
) -> Path:
    """Write the model of a directory into a file, and return it, or its first part.

    Args:
        kind: type of matrices whose rows are made of whole blocks, for all or by name; others are
            F32. Blocks are random where no writer is known.
        change, tensors: change the fields, or the arrays, before they are written.
        split: tensors of each part; 0: there is one.
    """
    config = json.loads((source / "config.json").read_text())
    (architecture,) = config["architectures"]
    name = _NAMES[architecture]
    held = {}
    for file in sorted(source.glob("*.safetensors")):
        held |= load_file(file)
    fields = {"tokenizer.ggml.model": "no_vocab", **_fields(config, name)}
    arrays = _tensors(config, name, held)
    change(fields)
    tensors(arrays)
    return write_file(target, fields, arrays, kind=kind, split=split)


def write_file(
    target: Path,
    fields: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    kind: str | Callable[[str], str] = "F32",
    split: int = 0,
) -> Path:
    """Write fields and arrays; arguments and result as those of `write_gguf`."""
    writer = gguf.GGUFWriter(target, fields["general.architecture"], split_max_tensors=split)
    for key, value in fields.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for number, (key, array) in enumerate(arrays.items()):
        one = kind if isinstance(kind, str) else kind(key)
        wanted = gguf.GGMLQuantizationType[one]
        block, _ = gguf.GGML_QUANT_SIZES[wanted]
        whole = array.ndim > 1 and array.shape[-1] % block == 0 and one != "F32"
        raw = array
        if whole and one.endswith("_K"):
            raw = random_blocks(one, array.shape, number)
        elif whole:
            raw = gguf.quants.quantize(array, wanted)
        writer.add_tensor(key, raw, raw_dtype=wanted if whole else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))), target)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Blocks of random codes, uint8 `[..., row_bytes]`, of weights of about a hundredth."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for at, scale in HALVES[kind].items():
        scales = (random.random(blocks.shape[:-1]) + 0.5) * scale
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def vocabulary(whole: Mapping[str, Any], pre: str) -> dict[str, Any]:
    """Fields for the vocabulary of a `tokenizer.json`. Pieces (`pre` is `default`) get scores by
    the place of their first merge."""
    model, pieces = whole["model"], pre == "default"
    added = {one["id"]: one for one in whole["added_tokens"]}
    texts = {id: text for text, id in model["vocab"].items()}
    texts |= {id: one["content"] for id, one in added.items()}
    kinds = {id: 3 if one["special"] else 4 for id, one in added.items()}
    size = max(texts) + 1
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(id, f"[PAD{id}]") for id in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(id, 1 if id in texts else 5) for id in range(size)],
    }
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if pieces:
        scores: dict[str, float] = {}
        for place, merge in enumerate(merges):
            scores.setdefault(merge.replace(" ", ""), -float(place))
        ordered = [scores.get(texts.get(id, ""), 0.0) for id in range(size)]
        found["tokenizer.ggml.scores"] = ordered
    else:
        found["tokenizer.ggml.merges"] = merges
    processor = whole.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    first = next((p["single"][0] for p in parts if p.get("type") == "TemplateProcessing"), {})
    begins = first.get("SpecialToken", {}).get("id")
    found["tokenizer.ggml.add_bos_token"] = begins is not None
    if begins is not None:
        token = next(id for id, text in texts.items() if text == begins)
        found["tokenizer.ggml.bos_token_id"] = token
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def _fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = {"general.architecture": name}
    for theirs, ours in _FIELDS.items():
        value = next((config[one] for one in ours if config.get(one) is not None), None)
        if value is not None:
            found[f"{name}.{theirs}"] = value
    found |= {f"{name}.{key}": value for key, value in _rope(config, name).items()}
    if name == "gpt-oss":
        found["gpt-oss.expert_feed_forward_length"] = config["intermediate_size"]
    if name in ("falcon", "gpt2"):
        found.setdefault(f"{name}.feed_forward_length", 4 * found[f"{name}.embedding_length"])
    if name == "olmo2" and "sliding_window" in config:
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["olmo2.attention.sliding_window_pattern"] = windows
    if name in _DELTA:
        kinds = config["layer_types"]
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        turned = config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]
        found[f"{name}.ssm.inner_size"] = inner
        found[f"{name}.rope.dimension_count"] = int(turned)
        found[f"{name}.attention.recurrent_layers"] = [one == "linear_attention" for one in kinds]
    ends = config.get("eos_token_id")
    return found | ({"tokenizer.ggml.eos_token_id": ends} if isinstance(ends, int) else {})


def _rope(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention", {}).get("rope_theta")
    rope = rope.get("full_attention", rope)
    if not rope or name == "falcon":
        return {}
    found: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if local is not None and name == "gemma3":
        found["rope.freq_base_swa"] = float(local)
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        trained = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = trained
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                found[f"rope.scaling.yarn_{key}"] = float(rope[key])
    if name == "phi3":
        trained = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        found["rope.scaling.original_context_length"] = trained
        turned = rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]
        found["rope.dimension_count"] = int(turned) // config["num_attention_heads"]
        if rope["rope_type"] == "longrope":
            scale = config["max_position_embeddings"] / trained
            factor = float(np.sqrt(1 + np.log(scale) / np.log(trained)))
            found["rope.scaling.attn_factor"] = factor
    return found


def _tensors(
    config: Mapping[str, Any], name: str, held: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays by their names in a file, in its order of rows."""
    (kind,) = (arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(kind, layers)
    heads = config.get("num_attention_heads") or config["n_head"]
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    found: dict[str, np.ndarray] = {}
    for key, array in _stacked(held).items():
        for part, value in _parts(name, key, array):
            if name in ("llama", "granite"):
                count = {"q_proj": heads, "k_proj": kv_heads}.get(part.split(".")[-2], 0)
                value = _neighbours(value, count) if count else value
            if name == "falcon" and "query_key_value" in part:
                value = _by_kind(value, heads, kv_heads)
            if name in ("gemma2", "gemma3") and part.endswith("norm.weight"):
                value = value + 1
            if name in _DELTA:
                value = _of_delta(config, name, part, value)
            given = names.get_name(part, try_suffixes=(".weight", ".bias"))
            given = given or names.get_name(part.replace(".dt_bias", ".dt_proj.bias"), (".bias",))
            assert given is not None, part
            found[given] = np.ascontiguousarray(value, np.float32)
    return found | _factors(config, name)


def _stacked(held: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With matrices of single experts in one array."""
    found: dict[str, Any] = {}
    for key, array in held.items():
        single = re.fullmatch(r"model\.(layers\.\d+)\.(.*)\.experts\.(\d+)\.(.+)", key)
        if single is None:
            found[key] = array
            continue
        layer, block, index, rest = single.groups()
        path = f"{layer}.feed_forward" if rest.startswith("w") else f"model.{layer}.{block}"
        found.setdefault(f"{path}.experts.{rest}", {})[int(index)] = array
    return {
        key: np.stack([one[i] for i in range(len(one))]) if isinstance(one, dict) else one
        for key, one in found.items()
    }


def _parts(name: str, key: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor, or the two that a file has for it, by the converter's names."""
    if name == "gpt2" and key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return [(key, array.T)]
    if key.endswith("in_proj_qkvz.weight"):
        return [(key.replace("qkvz", one), array) for one in ("qkv", "z")]
    if key.endswith(".sinks"):
        return [(f"{key}.weight", array)]
    if key.endswith("shared_expert_gate.weight"):
        return [(key, array[0])]
    if ".experts." not in key:
        return [(key, array)]
    if key.endswith(".weight"):  # stacked, as below
        return [(key, array)]
    bias = key.endswith("_bias")
    base, end = key.removesuffix("_bias"), "bias" if bias else "weight"
    turned = name == "gpt-oss" and not bias
    array = array.swapaxes(1, 2) if turned else array
    if "gate_up_proj" not in base:
        return [(f"{base}.{end}", array)]
    alternate = name == "gpt-oss"
    halves = (array[:, 0::2], array[:, 1::2]) if alternate else np.split(array, 2, axis=1)
    sides = ("gate_proj", "up_proj")
    return [
        (f"{base.replace('gate_up_proj', side)}.{end}", half)
        for side, half in zip(sides, halves, strict=True)
    ]


_DELTA = ("qwen3next", "qwen35", "qwen35moe")


def _of_delta(config: Mapping[str, Any], name: str, part: str, value: np.ndarray) -> np.ndarray:
    """Rates below 0; the older model's rows by kind; the others' value heads by their place."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if part.endswith("norm.weight") and not part.endswith("linear_attn.norm.weight"):
        return value + 1
    value = value[:, 0] if "conv1d" in part else -np.exp(value) if "A_log" in part else value
    if name == "qwen3next" and ("in_proj_qkv" in part or "in_proj_z" in part):
        rows = value.reshape(keys, -1, value.shape[-1])
        inner = values // keys * size
        cuts = np.split(rows, np.cumsum([key, key, inner]), axis=1)
        kinds = cuts[3:] if "in_proj_z" in part else cuts[:3]
        return np.concatenate([one.reshape(-1, value.shape[-1]) for one in kinds])
    if name == "qwen3next" or "linear_attn." not in part or "linear_attn.norm" in part:
        return value

    def tiled(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(keys, values // keys, -1)
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if "out_proj" in part:
        return tiled(np.ascontiguousarray(value.T)).T
    before = 2 * keys * key if "qkv" in part or "conv1d" in part else 0
    return np.concatenate([value[:before], tiled(value[before:])])


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Pairs (i, i + half) of each head side by side."""
    size = len(rows) // heads
    order = [
        head * size + i + half * size // 2
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def _by_kind(rows: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """All q, all k, all v, of rows by KV head."""
    size, group = len(rows) // (heads + 2 * kv_heads), heads // kv_heads
    blocks = rows.reshape(kv_heads, group + 2, size, *rows.shape[1:])
    parts = (blocks[:, :group], blocks[:, group], blocks[:, group + 1])
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def _factors(config: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    """Factors of RoPE's frequencies, of Llama 3 and Phi-3."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return {"rope_freqs.weight": factors.astype(np.float32)}
