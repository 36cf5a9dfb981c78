"""What a model says about itself: `config.json` and `generation_config.json` of a directory, or the
fields of a GGUF file.

The files are read as plain JSON, so that no version of another library decides what a field means.
Whatever the decoder does not compute exactly is refused by name; nothing is approximated. A field
that is absent has the value that its family's own configuration gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError, RequestError, UnsupportedError
from onestem.models.description import Description, Yarn
from onestem.models.families import FAMILIES, refusal
from onestem.models.families.naming import tensor_names
from onestem.models.fields import Fields, is_integer, read_json
from onestem.models.gguf.architectures import config_fields as gguf_fields
from onestem.models.gguf.schemes import blocks_of
from onestem.models.names import TensorNames
from onestem.models.quantization import Quantization, read_quantization
from onestem.request import SamplingParams

# Layers and experts, by the names that families give them.
COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
)
MAX_COUNT = 4096


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Description):
    """A decoder, the dtype of its weights, and its special tokens.

    Attributes:
        architecture: one of `FAMILIES`.
        quantization: how the checkpoint's linear layers are stored; None: in 16 or 32 bits.
    """

    torch_dtype: str
    quantization: Quantization | None = None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_directory(path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, where there) of a model directory, or a
        GGUF file."""
        fields = _config_fields(Path(path))
        architecture, common = _architecture(fields), _with_text_fields(fields)
        common.refuse_others(is_causal=True)  # of any family, in transformers
        _check_counts(fields)
        description = FAMILIES[architecture].read(fields, architecture)
        four_bits = description.experts is not None and description.experts.mxfp4
        generation = _generation_fields(Path(path))
        config = ModelConfig(
            **{**vars(description), "max_position_embeddings": _max_positions(description)},
            torch_dtype=common.one_of(
                "torch_dtype" if common.values.get("dtype") is None else "dtype",
                *("bfloat16", "float16", "float32"),
                default="float32",
            ),
            quantization=None if four_bits else read_quantization(fields),
            bos_token_id=_bos_token_id(common, generation),
            eos_token_ids=_eos_token_ids(common, generation),
        )
        if not Path(path).is_file():
            return config
        return replace(config, quantization=blocks_of(Path(path), config.tensor_names))

    @cached_property
    def tensor_names(self) -> TensorNames:
        """Names of tensors in the family's checkpoints."""
        return tensor_names(FAMILIES[self.architecture].names, self)


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of the model's makers; `None` where they do not say.

    `do_sample` is not read: a temperature in the file is used.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def from_directory(path: str | Path) -> GenerationDefaults:
        """Read `generation_config.json`; end-of-sequence ids are those of `config.json` too.

        Raises:
            ConfigError: a value that no request may have. End-of-sequence ids that are no tokens of
                the model are left out with a warning.
        """
        generation, config = _generation_fields(Path(path)), _config_fields(Path(path))
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty")
        values: dict[str, Any] = {name: generation.optional_number(name) for name in numbers}
        values["top_k"] = generation.optional_integer("top_k")
        ends = _known_eos(_with_text_fields(config), generation)
        try:
            SamplingParams(**values)
        except RequestError as error:
            raise ConfigError(f"{generation.source}: {error}") from error
        return GenerationDefaults(**values, eos_token_ids=ends)

    def ends(self, tokenizer_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
        """Ids that end an answer: these, and the tokenizer's (`Tokenizer.end_ids`) that the model
        has."""
        of_model = (token for token in tokenizer_ids if token < vocab_size)
        return tuple(dict.fromkeys((*self.eos_token_ids, *of_model)))


def _config_fields(path: Path) -> Fields:
    if path.is_file():
        return gguf_fields(path)
    return Fields(read_json(path / "config.json"), path / "config.json")


def _generation_fields(directory: Path) -> Fields:
    file = directory / "generation_config.json"
    return Fields(read_json(file) if file.exists() else {}, file)


def _check_counts(fields: Fields) -> None:
    """Refuse numbers of layers and experts that no model has: to describe them would take minutes
    and all memory."""
    for part in (fields, fields.within("text_config")):
        for name in COUNTS:
            value = part.values.get(name)
            if isinstance(value, int) and value > MAX_COUNT:
                raise ConfigError(f"{part.source}: {name} is {value}, limit is {MAX_COUNT}")


def _max_positions(description: Description) -> int:
    """The model's positions: files with YaRN may give the number before scaling."""
    scalings = [rotary.scaling for rotary in description.rotaries if rotary is not None]
    stretched = [
        int(yarn.factor * yarn.original_max_position_embeddings)
        for yarn in scalings
        if isinstance(yarn, Yarn)
    ]
    return max(description.max_position_embeddings, *stretched, 0)


def _with_text_fields(fields: Fields) -> Fields:
    """Fields of a model that also reads images, with those of its text part where needed."""
    given = {name: value for name, value in fields.values.items() if value is not None}
    return Fields({**fields.mapping("text_config"), **given}, fields.source)


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise fields.wrong("architectures", f"a list of one of {', '.join(FAMILIES)}")
    name = str(names[0])
    if name not in FAMILIES:
        raise UnsupportedError(f"{fields.source}: {name} is not supported: {refusal(name)}")
    return name


def _bos_token_id(fields: Fields, generation: Fields) -> int | None:
    value = generation.optional_integer("bos_token_id")
    return fields.optional_integer("bos_token_id") if value is None else value


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """Ids that either file names: chat models made of base models may have theirs in one."""
    return tuple(dict.fromkeys((*_ends_in(generation), *_ends_in(fields))))


def _ends_in(source: Fields) -> list[int]:
    value = source.values.get("eos_token_id")
    named = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(token) for token in named):
        raise source.wrong("eos_token_id", "a token id or a list of token ids")
    return named


def _known_eos(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """End-of-sequence ids that are tokens of the model."""
    size = fields.values.get("vocab_size")
    if size is None or not is_integer(size):  # it is read, and refused, elsewhere
        return _eos_token_ids(fields, generation)
    for source in (generation, fields):
        unknown = ", ".join(str(token) for token in _ends_in(source) if not 0 <= token < size)
        if unknown:
            line = "%s: eos_token_id has %s, and the model has %d tokens: left out"
            log.warning(line, source.source, unknown, size)
    return tuple(token for token in _eos_token_ids(fields, generation) if 0 <= token < size)
