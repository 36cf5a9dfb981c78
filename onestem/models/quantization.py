"""What a `config.json` says of quantised weights: values, no torch.

The weights' files show which modules are quantised: a module with a 16-bit `weight` was left out
(`ignore`, `modules_to_not_convert`, ...), whatever the list is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onestem.models.fields import Fields, is_integer
from onestem.options import Quantize

Storage = Literal["float8", "int8", "packed", "gptq", "awq", "blocks"]

BITS = (4, 8)

SMALL_MODEL = 1e9
"""Parameters. What rounding costs was measured on a model far below it (lab/notes/models.md)."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How some modules' weights are stored.

    Attributes:
        storage: names and layouts of tensors (`onestem.models.formats.stored`).
        bits: of a weight.
        rows, columns: size of the part of a weight that has a scale of its own; None: all.
        symmetric: no zero points.
        rounds_rows: products round their input to the weights' type, each row by its own maximum.
        zero_offset: added to stored zero points.
        kind: of blocks of a GGUF file.
    """

    storage: Storage
    bits: int = 8
    rows: int | None = 1
    columns: int | None = None
    symmetric: bool = True
    rounds_rows: bool = False
    zero_offset: int = 0
    kind: str = ""

    @property
    def nearest(self) -> Quantize | None:
        """The format for rounding whose products take as long as these; None: there is none."""
        if self.bits == 4:
            return "int4"
        if not self.rounds_rows or self.columns is not None:
            return None
        return "fp8" if self.storage == "float8" else "int8"


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint.

    Attributes:
        method: its name in `config.json`, or the types of blocks.
        schemes: each with its modules: names, `re:` and a pattern of names, or `Linear` for all.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]

    @property
    def nearest(self) -> Quantize | None:
        """The format for rounding (`Quantize`) whose products take as long as these; None: there is
        none, or there are several."""
        kinds = {scheme.nearest for _, scheme in self.schemes}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def converts(self) -> bool:
        """Whether the weights are read as numbers where another format is asked for."""
        return all(scheme.storage == "blocks" for _, scheme in self.schemes)

    def scheme(self, module: str) -> Scheme | None:
        """The first scheme that names a module, else the first that is for all."""
        for targets, scheme in self.schemes:
            if any(_names(target, module) for target in targets):
                return scheme
        return next((scheme for targets, scheme in self.schemes if "Linear" in targets), None)


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def read_quantization(config: Fields) -> Quantization | None:
    """The quantisation in a whole `config.json`; None: weights are not quantised.

    Raises:
        UnsupportedError: names the field, its value and what is supported.
    """
    fields = config.within("quantization_config")
    if not fields.values:
        return None
    method = str(fields.values.get("quant_method"))
    if method not in _METHODS:
        raise fields.unsupported("quant_method", ", ".join(_METHODS))
    if fields.values.get("kv_cache_scheme") is not None:
        raise fields.unsupported("kv_cache_scheme", "null: keys and values are not quantised")
    return Quantization(method, _METHODS[method](fields))


Schemes = tuple[tuple[tuple[str, ...], Scheme], ...]


def _for_all(scheme: Scheme) -> Schemes:
    return ((("Linear",), scheme),)


def _float8(fields: Fields) -> Schemes:
    """Schemes of float8 as models' authors publish it: blocks, or a scale per tensor."""
    fields.one_of("activation_scheme", "dynamic", "static")
    fields.refuse_others(fmt="e4m3")
    fields.one_of("scale_fmt", "float", "ue8m0")
    block = fields.values.get("weight_block_size")
    if block is None:
        return _for_all(Scheme(storage="float8", rows=None, rounds_rows=True))
    rows, columns = _block(fields, "weight_block_size")
    return _for_all(Scheme(storage="float8", rows=rows, columns=columns, rounds_rows=True))


def _gptq(fields: Fields) -> Schemes:
    fields.one_of("checkpoint_format", "gptq", "gptq_v2")
    fields.refuse_others(is_marlin_format=False)
    if fields.values.get("dynamic"):
        raise fields.unsupported("dynamic", "one number of bits for all modules")
    offset = 0 if fields.values.get("checkpoint_format") == "gptq_v2" else 1
    bits, group = _bits(fields, "bits"), _group(fields, "group_size")
    return _for_all(
        Scheme(storage="gptq", bits=bits, columns=group, symmetric=False, zero_offset=offset)
    )


def _awq(fields: Fields) -> Schemes:
    for name in ("version", "format"):
        version = fields.values.get(name)
        if version is not None and str(version).lower() != "gemm":
            raise fields.unsupported(name, "gemm")
    bits = "bits" if "bits" in fields.values else "w_bit"
    if fields.positive(bits) != 4:
        raise fields.unsupported(bits, "4")
    group = _group(fields, "group_size" if "group_size" in fields.values else "q_group_size")
    return _for_all(Scheme(storage="awq", bits=4, columns=group, symmetric=False))


def _compressed_tensors(fields: Fields) -> Schemes:
    sparsity = fields.mapping("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise fields.unsupported("sparsity_config", "none")
    if fields.mapping("transform_config"):
        raise fields.unsupported("transform_config", "none")
    groups = fields.within("config_groups")
    if not groups.values:
        raise fields.wrong("config_groups", "an object of groups")
    schemes = []
    for name in groups.values:
        group = groups.within(name)
        targets = group.values.get("targets")
        if not isinstance(targets, list) or not targets or not all(map(_is_target, targets)):
            raise group.wrong("targets", "a list of names, or of re: and a regular expression")
        stored = group if group.values.get("format") is not None else fields
        schemes.append((tuple(map(str, targets)), _group_scheme(group, stored)))
    return tuple(schemes)


def _is_target(target: object) -> bool:
    try:
        re.compile(str(target).removeprefix("re:"))
    except re.error:
        return not str(target).startswith("re:")
    return True


FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def _group_scheme(group: Fields, stored: Fields) -> Scheme:
    """Scheme of one of `config_groups`; `stored` has its `format`."""
    name = stored.values.get("format")
    if name not in FORMATS:
        raise stored.unsupported("format", ", ".join(FORMATS))
    weights = group.within("weights")
    weights.one_of("type", "int", "float")
    packed, floats = name == "pack-quantized", weights.values.get("type") == "float"
    bits = _bits(weights, "num_bits", BITS if packed else (8,))
    if floats and packed:
        raise weights.unsupported("type", "int where the format is pack-quantized")
    symmetric = weights.boolean("symmetric", True)
    if not symmetric and not packed:
        raise weights.unsupported("symmetric", "true")
    rows, columns = _strategy(weights)
    return Scheme(
        storage="packed" if packed else "float8" if floats else "int8",
        bits=bits,
        rows=rows,
        columns=columns,
        symmetric=symmetric,
        rounds_rows=_rounds_rows(group, packed, floats),
    )


def _strategy(weights: Fields) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale."""
    strategy = weights.values.get("strategy")
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, weights.positive("group_size")
    if strategy == "block":
        return _block(weights, "block_structure")
    raise weights.unsupported("strategy", "tensor, channel, group, block")


def _rounds_rows(group: Fields, packed: bool, floats: bool) -> bool:
    group.refuse_others(output_activations=None)
    given = group.values.get("input_activations")
    if given is None:
        return False
    if packed:
        raise group.unsupported("input_activations", "null where the format is pack-quantized")
    inputs = group.within("input_activations")
    _bits(inputs, "num_bits", (8,))
    if (inputs.values.get("type") == "float") != floats:
        raise inputs.unsupported("type", "that of the weights")
    inputs.refuse_others(symmetric=True)
    return True


def _bits(fields: Fields, name: str, known: tuple[int, ...] = BITS) -> int:
    bits = fields.positive(name)
    if bits not in known:
        raise fields.unsupported(name, " or ".join(map(str, known)))
    return bits


def _group(fields: Fields, name: str) -> int | None:
    return None if fields.values.get(name) == -1 else fields.positive(name)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value: Any = fields.values.get(name)
    if not (isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))):
        raise fields.wrong(name, "two positive integers, rows and columns")
    return value[0], value[1]


def _is_size(value: object) -> bool:
    return is_integer(value) and value > 0  # type: ignore[operator]


_METHODS: Mapping[str, Callable[[Fields], Schemes]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _float8,
    "gptq": _gptq,
    "awq": _awq,
}
