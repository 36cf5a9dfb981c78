"""What a model directory says about itself: `config.json` and `generation_config.json`.

The files are read as plain JSON, so that no version of another library decides what a field means.
Whatever the decoder does not compute exactly is refused by name; nothing is approximated. A field
that is absent has the value that its family's own configuration gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onestem.errors import ConfigError, UnsupportedError

__all__ = ["ARCHITECTURES", "GenerationDefaults", "ModelConfig", "RopeScaling"]

# CodeLlama and Yi are `LlamaForCausalLM` with other numbers.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched for long contexts, independent of the prompt's length.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is longer
    than `original_max_position_embeddings / low_freq_factor`, keeps those shorter than
    `original_max_position_embeddings / high_freq_factor` and interpolates between the two.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        sliding_windows: per layer, how many positions back a row sees, itself included
            (0 <= p_row - p_key < window); `None`: all.
        qk_norm: RMSNorm over `head_dim` of every query and key head, before RoPE.
        initializer_range: standard deviation of random weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    hidden_act: str
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _check_numbers(self)

    @staticmethod
    def from_directory(path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, where there) of a model directory."""
        directory = Path(path)
        fields = _Fields(_read_json(directory / "config.json"), directory / "config.json")
        architecture = _architecture(fields)
        _refuse_what_changes_the_model(fields)
        hidden_size = fields.positive("hidden_size")
        num_q_heads = fields.positive("num_attention_heads")
        num_layers = fields.positive("num_hidden_layers")
        max_position_embeddings = fields.positive("max_position_embeddings")
        rope_theta, rope_scaling = _rope(fields, max_position_embeddings)
        generation = _generation_fields(directory)
        attention_bias, o_bias = _attention_biases(fields, architecture)
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_q_heads),
            head_dim=_head_dim(fields, architecture, hidden_size, num_q_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias,
            o_bias=o_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            max_position_embeddings=max_position_embeddings,
            sliding_windows=_sliding_windows(fields, architecture, num_layers),
            hidden_act=_hidden_act(fields),
            torch_dtype=_dtype(fields),
            bos_token_id=_bos_token_id(fields, generation),
            eos_token_ids=_eos_token_ids(fields, generation),
            initializer_range=fields.number("initializer_range", 0.02),
        )


@dataclass(frozen=True)
class GenerationDefaults:
    """How the model's makers want it sampled; `None` where they do not say.

    `do_sample` is read by no one: a directory that gives a temperature means it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def from_directory(path: str | Path) -> GenerationDefaults:
        """Read `generation_config.json`; end-of-sequence ids fall back to `config.json`."""
        directory = Path(path)
        generation = _generation_fields(directory)
        config = _Fields(_read_json(directory / "config.json"), directory / "config.json")
        return GenerationDefaults(
            temperature=generation.optional_number("temperature"),
            top_k=generation.optional_integer("top_k"),
            top_p=generation.optional_number("top_p"),
            min_p=generation.optional_number("min_p"),
            repetition_penalty=generation.optional_number("repetition_penalty"),
            eos_token_ids=_eos_token_ids(config, generation),
        )


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose errors name the file, the field, its value and what is expected."""

    values: Mapping[str, Any]
    source: Path | str

    def wrong(self, name: str, expected: str) -> ConfigError:
        given = repr(self.values[name]) if name in self.values else "missing"
        return ConfigError(f"{self.source}: {name} is {given}, expected {expected}")

    def unsupported(self, name: str, supported: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.source}: {name} is {self.values.get(name)!r}, supported: {supported}"
        )

    def optional_integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None or _is_integer(value):
            return value
        raise self.wrong(name, "an integer")

    def optional_number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if _is_integer(value) or isinstance(value, float):
            return float(value)
        raise self.wrong(name, "a number")

    def positive(self, name: str, default: int | None = None) -> int:
        value: Any = self.values.get(name)
        value = default if value is None else value
        if not _is_integer(value) or value <= 0:
            raise self.wrong(name, "a positive integer")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None or value <= 0:
            raise self.wrong(name, "a positive number")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.wrong(name, "an object or null")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist: expected a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {type(value).__name__}, expected a JSON object")
    return value


def _generation_fields(directory: Path) -> _Fields:
    file = directory / "generation_config.json"
    return _Fields(_read_json(file) if file.exists() else {}, file)


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise fields.wrong("architectures", f"a list of one of {', '.join(ARCHITECTURES)}")
    if names[0] not in ARCHITECTURES:
        raise fields.unsupported("architectures", ", ".join(ARCHITECTURES))
    return str(names[0])


def _refuse_what_changes_the_model(fields: _Fields) -> None:
    """Options of these families that would give other numbers if they were ignored."""
    if fields.values.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "weights in " + ", ".join(DTYPES))
    if fields.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.unsupported("partial_rotary_factor", "1.0")


def _head_dim(fields: _Fields, architecture: str, hidden_size: int, num_q_heads: int) -> int:
    if fields.values.get("head_dim") is not None:
        return fields.positive("head_dim")
    if architecture == "Qwen3ForCausalLM":
        return 128
    if hidden_size % num_q_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_q_heads})")
    return hidden_size // num_q_heads


def _attention_biases(fields: _Fields, architecture: str) -> tuple[bool, bool]:
    """(QKV has a bias, the output projection has a bias)."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = fields.boolean("attention_bias", False)
    return bias, bias


def _hidden_act(fields: _Fields) -> str:
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    return "silu"


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise fields.unsupported(name, ", ".join(DTYPES))
    return str(value)


def _rope(fields: _Fields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = _Fields(fields.mapping(name), f"{fields.source}: {name}")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.unsupported(name, "one kind of RoPE for all layers")
    if rope.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.unsupported("partial_rotary_factor", "1.0")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    trained = fields.optional_integer("original_max_position_embeddings")
    return theta, _rope_scaling(rope, trained or max_position_embeddings)


def _rope_scaling(rope: _Fields, trained_positions: int) -> RopeScaling | None:
    # `type` is the name that files older than Llama 3.1 give it.
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.values.get(name, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return _llama3_scaling(rope, trained_positions)
    raise rope.unsupported(name, "default, linear, llama3")


def _llama3_scaling(rope: _Fields, trained_positions: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.positive(
            "original_max_position_embeddings", trained_positions
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        low = scaling.low_freq_factor
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({low})")
    return scaling


def _sliding_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        windows: tuple[int | None, ...] = (None,) * num_layers
    elif architecture == "MistralForCausalLM":
        windows = (_window(fields),) * num_layers
    else:
        windows = _qwen_windows(fields, num_layers)
    _check_layer_types(fields, windows)
    return windows


def _window(fields: _Fields) -> int | None:
    """Mistral's own default is 4096; an explicit null means no window."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.positive("sliding_window", 4096)


def _qwen_windows(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows only with `use_sliding_window`: per `layer_types`, or from `max_window_layers` on."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = _window(fields)
    types = fields.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise fields.wrong("layer_types", "a list with an entry per layer")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.optional_integer("max_window_layers")
    first = 28 if first is None else first
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(fields: _Fields, windows: tuple[int | None, ...]) -> None:
    """`layer_types`, where given, must say what the windows say."""
    types = fields.values.get("layer_types")
    if types is None:
        return
    expected = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if types != expected:
        raise fields.unsupported("layer_types", f"{expected}, as the other fields say")


def _bos_token_id(fields: _Fields, generation: _Fields) -> int | None:
    value = generation.optional_integer("bos_token_id")
    return fields.optional_integer("bos_token_id") if value is None else value


def _eos_token_ids(fields: _Fields, generation: _Fields) -> tuple[int, ...]:
    source = fields if generation.values.get("eos_token_id") is None else generation
    value = source.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_integer(token) for token in ids):
        raise source.wrong("eos_token_id", "a token id or a list of token ids")
    return tuple(ids)


def _check_numbers(config: ModelConfig) -> None:
    if config.num_q_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {config.num_q_heads}, expected a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim is {config.head_dim}, expected an even number (RoPE pairs)")
    if len(config.sliding_windows) != config.num_layers:
        raise ConfigError(
            f"layer_types gives {len(config.sliding_windows)} layers, expected {config.num_layers}"
        )
