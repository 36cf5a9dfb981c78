"""Architectures of GGUF files: the fields of `config.json` that theirs stand for, and names of
tensors.

architectures.toml has the tables. Facts are those of llama.cpp's converter and loader: what files
leave out (windows by layer, the scale of scores in the largest Gemmas) is what that loader takes.
"""

from __future__ import annotations

import difflib
import logging
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.families.shared import windowed_kinds
from onestem.models.fields import Fields
from onestem.models.gguf.file import GgufFile, open_gguf
from onestem.models.gguf.header import List
from onestem.models.names import Role
from onestem.models.quantization import SMALL_MODEL

log = logging.getLogger(__name__)
# Once of a file: its fields are read several times as it is loaded.
_leave_out = cache(partial(log.warning, "%s: %s: not known here, and left out"))

MOST_FACTORS = 1 << 16  # of RoPE

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        model: its name in `config.json`.
        fields: field of the file, without the architecture -> field of `config.json`.
        others: fields of `config.json` that follow from the file otherwise.
        names: of tensors, where they differ from `NAMES`.
        turned: rows of q and k are ordered for pairs of neighbours in RoPE.
        tiled: value heads of delta rules are ordered by their place at a key head first.
        partial: a part of each head turns in RoPE, as the file says.
    """

    model: str
    fields: Mapping[str, str]
    others: Callable[[GgufFile, Values], Values]
    names: Mapping[Role, str]
    turned: bool = False
    tiled: bool = False
    partial: bool = False


# What is read elsewhere, says nothing of how the model computes, or has one value in all files.
_KNOWN = (
    "attention.value_length", "attention.sliding_window_pattern", "feed_forward_length",
    "full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers",
    "pooling_type", "rope.dimension_count", "rope.dimension_sections", "rope.freq_base_swa",
    "rope.scaling.", "rope.scale_linear", "ssm.inner_size",
    "tensor_data_layout", "vocab_size",
)  # fmt: skip
_FLOATS = ("epsilon", "scale", "softcapping", "freq_base", "freq_base_swa", "factor", "beta_fast",
           "beta_slow", "scale_linear")  # fmt: skip
_COUNTS = ("block_count", "context_length", "embedding_length", "attention.head_count")
_REQUIRED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
)  # fmt: skip


def _value(file: GgufFile, name: str) -> bool | int | float | str | List | None:
    """A field of the file's architecture; None: it has none."""
    fields = file.header.fields
    return fields.get(f"{fields['general.architecture']}.{name}")


def _number(file: GgufFile, name: str) -> Any:
    """A number of the file's architecture: an integer where `_FLOATS` does not name it."""
    value = _value(file, name)
    is_float = name.endswith(_FLOATS)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if is_float and isinstance(value, float):
        return value
    shown = f"a list of {value.size}" if isinstance(value, List) else repr(value)
    expected = "a number" if is_float else "an integer"
    of = file.header.fields["general.architecture"]
    raise ConfigError(f"{file.header.file}: {of}.{name} is {shown}, expected {expected}")


def _head_dim(values: Values) -> int:
    """Size of a head. GPT-2 has other names, and nothing that needs it."""
    given: int = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return max(1, given)


def _layer_types(file: GgufFile, values: Values, every: int) -> list[str]:
    """Kinds of layers: the file's list, or each `every`-th sees all."""
    layers: int = values["num_hidden_layers"]
    pattern = _value(file, "attention.sliding_window_pattern")
    if not isinstance(pattern, List):
        given = _number(file, "attention.sliding_window_pattern")
        return windowed_kinds(layers, max(1, every if given is None else given))
    name = f"{file.header.fields['general.architecture']}.attention.sliding_window_pattern"
    if pattern.size != layers:
        told = f"{name} has {pattern.size} layers, expected {layers}"
        raise ConfigError(f"{file.header.file}: {told}")
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool(windowed)] for windowed in file.header.numbers(name)]


def _llama(file: GgufFile, values: Values) -> Values:
    return {
        "architectures": ["MixtralForCausalLM" if values.get("num_experts") else _LLAMA],
        "num_local_experts": values.get("num_experts"),
        "attention_bias": _has(file, "blk.0.attn_q.bias"),
        "mlp_bias": _has(file, "blk.0.ffn_gate.bias"),
    }


def _granite(file: GgufFile, values: Values) -> Values:
    given = values.get("attention_multiplier") or _head_dim(values) ** -0.5
    return {
        "attention_multiplier": given,
        "attention_bias": _has(file, "blk.0.attn_q.bias"),
        "mlp_bias": _has(file, "blk.0.ffn_gate.bias"),
    }


def _gemma(every: int, layers_of_27b: int) -> Callable[[GgufFile, Values], Values]:
    """Gemma 2 and 3. Only the models of 27 billion scale scores by another size than a head's."""

    def others(file: GgufFile, values: Values) -> Values:
        largest = values["num_hidden_layers"] == layers_of_27b
        width, heads = values["hidden_size"], values["num_attention_heads"]
        local = _number(file, "rope.freq_base_swa")
        types = _layer_types(file, values, every)
        if values.get("sliding_window") is None:
            types = ["full_attention"] * len(types)
        return {
            "query_pre_attn_scalar": width // heads if largest else _head_dim(values),
            "layer_types": types,
            **({} if local is None else {"rope_local_base_freq": local}),
        }

    return others


def _phi3(file: GgufFile, values: Values) -> Values:
    scaling = None
    if _has(file, "rope_factors_long.weight"):
        scaling = {
            "rope_type": "longrope",
            "long_factor": _vector(file, "rope_factors_long.weight"),
            "short_factor": _vector(file, "rope_factors_short.weight"),
            "attention_factor": _number(file, "rope.scaling.attn_factor"),
        }
    turned = _number(file, "rope.dimension_count") or _head_dim(values)
    return {
        "rope_scaling": scaling,
        "original_max_position_embeddings": _number(file, "rope.scaling.original_context_length"),
        "partial_rotary_factor": turned / _head_dim(values),
        "sliding_window": values.get("sliding_window") or None,
    }


def _gpt_oss(file: GgufFile, values: Values) -> Values:
    scaling = values.get("rope_scaling") or {}
    # Its corrections of YaRN end between pairs; the file does not say it.
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, **scaling, "truncate": False}
    return {
        "num_local_experts": values.get("num_experts"),
        "intermediate_size": values.get("moe_intermediate_size"),
        "layer_types": _layer_types(file, values, 2),
        "rope_scaling": yarn if scaling else None,
    }


def _delta(file: GgufFile, values: Values) -> Values:
    """Layers after the last one predict tokens after the next one, which is not computed."""
    layers = values["num_hidden_layers"] - (_number(file, "nextn_predict_layers") or 0)
    name = f"{file.header.fields['general.architecture']}.attention.recurrent_layers"
    types = None
    if isinstance(_value(file, "attention.recurrent_layers"), List):
        kinds = ("full_attention", "linear_attention")
        types = [kinds[bool(one)] for one in file.header.numbers(name)][:layers]
    inner, heads = _number(file, "ssm.inner_size"), values.get("linear_num_value_heads")
    turned = _number(file, "rope.dimension_count")
    return {
        "num_hidden_layers": layers,
        "layer_types": types,
        "full_attention_interval": _number(file, "full_attention_interval"),
        "linear_value_head_dim": inner // heads if inner and heads else None,
        "partial_rotary_factor": None if turned is None else turned / _head_dim(values),
    }


def _olmo2(file: GgufFile, values: Values) -> Values:
    """OLMo 3 is written as OLMo 2 with windows."""
    bias = {"attention_bias": _has(file, "blk.0.attn_q.bias")}
    if not values.get("sliding_window"):
        return bias
    types = _layer_types(file, values, 4)
    return {**bias, "architectures": ["Olmo3ForCausalLM"], "layer_types": types}


def _falcon(file: GgufFile, values: Values) -> Values:
    two_norms, kv = _has(file, "blk.0.attn_norm_2.weight"), values.get("num_kv_heads")
    return {
        "multi_query": kv == 1,
        "new_decoder_architecture": two_norms or kv != 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "bias": _has(file, "blk.0.attn_qkv.bias"),
    }


_LLAMA = "LlamaForCausalLM"

_OTHERS: dict[str, Callable[[GgufFile, Values], Values]] = {
    "llama": _llama,
    "qwen3moe": lambda file, values: {"norm_topk_prob": True},
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _delta),
    "gemma2": _gemma(every=2, layers_of_27b=46),
    "gemma3": _gemma(every=6, layers_of_27b=62),
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "falcon": _falcon,
    "olmo2": _olmo2,
    "granite": _granite,
}

_TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_FIELDS = _TOLD["fields"]
_NAMES = {
    table: {Role[role]: name for role, name in names.items()}
    for table, names in _TOLD["names"].items()
}
NAMES = _NAMES["common"]


def _architecture(name: str, told: Mapping[str, Any]) -> Architecture:
    """An architecture of the file: `fields` and `names` are the tables that it has, `without`
    fields of these that it has not."""
    fields = {theirs: ours for one in told["fields"] for theirs, ours in _FIELDS[one].items()}
    names = {role: its for one in told.get("names", ()) for role, its in _NAMES[one].items()}
    return Architecture(
        told["model"],
        {one: fields[one] for one in fields if one not in told.get("without", ())},
        _OTHERS.get(name, lambda file, values: {}),
        names,
        **{flag: True for flag in ("turned", "tiled", "partial") if flag in told},
    )


ARCHITECTURES = {name: _architecture(name, told) for name, told in _TOLD["architectures"].items()}

# Ids of tokens that end an answer or a turn.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file. Raises `UnsupportedError` for others than those here."""
    name = file.header.fields.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=1, cutoff=0.5)
        nearest = f"; the nearest is {near[0]}" if near else ""
        raise UnsupportedError(
            f"{file.header.file}: general.architecture is {name!r}, supported: "
            f"{', '.join(ARCHITECTURES)}{nearest}"
        )
    return known


def config_fields(path: Path) -> Fields:
    """The fields of `config.json` that a GGUF file stands for.

    Raises:
        ConfigError: a field is missing, or no such value.
        UnsupportedError: another architecture, or a value that is not computed.
        WeightsError: the file is damaged, or a part of it is missing.
    """
    file = open_gguf(path)
    one = architecture_of(file)
    name = file.header.fields["general.architecture"]
    values: Values = {"architectures": [one.model]}
    for theirs, ours in one.fields.items():
        value = _number(file, theirs)
        if value is None and theirs in _REQUIRED:
            raise ConfigError(f"{path}: {name}.{theirs} is missing, and {name} needs it")
        if theirs in _COUNTS and value is not None and value < 1:
            raise ConfigError(f"{path}: {name}.{theirs} is {value}, expected 1 or more")
        values[ours] = value
    # What a file leaves out has one value in all architectures, whatever a family's default is.
    heads = values.get("num_attention_heads")
    for ours, default in {
        "num_key_value_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(values) if heads else None,
        "rope_theta": 10000.0,
    }.items():
        if ours in values and values[ours] is None:
            values[ours] = default
    _check(path, file, values)
    values["rope_scaling"] = _rope_scaling(path, file)
    values |= one.others(file, values)
    values["tie_word_embeddings"] = not _has(file, "output.weight")
    values["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    values["torch_dtype"] = _dtype(file)
    tokens = [file.header.fields.get(f"tokenizer.ggml.{end}") for end in _ENDS]
    values["eos_token_id"] = list(dict.fromkeys(t for t in tokens if t is not None))
    values["bos_token_id"] = file.header.fields.get("tokenizer.ggml.bos_token_id")
    return Fields({k: v for k, v in values.items() if v is not None}, path)


def _check(path: Path, file: GgufFile, values: Values) -> None:
    """Refuse what the families cannot say, and name in a warning what nobody reads here."""
    name = file.header.fields["general.architecture"]
    layers = _number(file, "block_count")
    if layers > len(file.tensors):
        told = f"{name}.block_count is {layers}, and it has {len(file.tensors)} tensors"
        raise ConfigError(f"{path}: {told}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{path} has no matrix token_embd.weight: it is no whole model")
    size, keys = _number(file, "attention.value_length"), values.get("head_dim")
    if None not in (size, keys) and size != keys:
        raise UnsupportedError(
            f"{path}: {name}.attention.value_length is {size}, supported: that of keys ({keys})"
        )
    turned = _number(file, "rope.dimension_count")
    partial = ARCHITECTURES[str(name)].partial
    if turned is not None and not partial and turned != _head_dim(values):
        raise UnsupportedError(
            f"{path}: {name}.rope.dimension_count is {turned}, supported: that of a head "
            f"({_head_dim(values)})"
        )
    known = tuple(f"{name}.{field}" for field in (*ARCHITECTURES[str(name)].fields, *_KNOWN))
    fields = (field for field in file.header.fields if field.startswith(f"{name}."))
    if unknown := ", ".join(field for field in fields if not field.startswith(known)):
        _leave_out(path, unknown)


def _rope_scaling(path: Path, file: GgufFile) -> Values | None:
    """`rope_scaling`: a list of factors where a tensor has one (Llama 3), else by the fields."""
    if _has(file, "rope_freqs.weight"):
        factors = _vector(file, "rope_freqs.weight")
        lists = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", "attention_factor": 1.0, **lists}
    kind, factor = _value(file, "rope.scaling.type"), _number(file, "rope.scaling.factor")
    linear = _number(file, "rope.scale_linear")
    if kind is None and linear not in (None, 1.0):
        kind, factor = "linear", linear
    if kind in (None, "none", "longrope"):  # longrope has its lists in tensors
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": _number(
                file, "rope.scaling.original_context_length"
            ),
            "attention_factor": _number(file, "rope.scaling.yarn_attn_factor"),
            "beta_fast": _number(file, "rope.scaling.yarn_beta_fast"),
            "beta_slow": _number(file, "rope.scaling.yarn_beta_slow"),
        }
    return {name: value for name, value in scaling.items() if value is not None}


def _dtype(file: GgufFile) -> str:
    """What most bytes are: 16 bits stay so. Blocks stay in bfloat16, but those of a small model,
    which bears rounding least and needs little memory, become float32."""
    sizes: dict[str, int] = {}
    for one in file.tensors.values():
        sizes[one.kind] = sizes.get(one.kind, 0) + one.num_bytes
    most = max(sizes, key=lambda kind: sizes[kind])
    is_small = sum(math.prod(one.shape) for one in file.tensors.values()) < SMALL_MODEL
    return {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(
        most, "float32" if is_small else "bfloat16"
    )


def _has(file: GgufFile, tensor: str) -> bool:
    return tensor in file.tensors


def _vector(file: GgufFile, name: str) -> list[float]:
    raw = file.tensors.get(name)
    if raw is None or raw.kind != "F32" or len(raw.shape) != 1 or raw.shape[0] > MOST_FACTORS:
        raise ConfigError(f"{file.header.file}: {name} is missing, or no short vector of F32")
    numbers: list[float] = raw.blocks().view("<f4")[0].tolist()
    return numbers
