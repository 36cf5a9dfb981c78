"""New values for the weights of a decoder, written where the old ones are."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onestem.checked import show
from onestem.errors import WeightsError
from onestem.models.checkpoint import TensorHeader, check_shapes, check_unknown
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.formats.stored import Expected
from onestem.models.names import listed
from onestem.models.tensors import Tensors, TensorSpec

WHERE = "update_weights"

FLOATING = ("bfloat16", "float16", "float32", "float64")


def checked_tensors(
    config: ModelConfig,
    named_tensors: Iterable[tuple[str, Tensor]],
    quantised: str | None = None,
) -> dict[str, Tensor]:
    """Check some or all of a decoder's tensors; returns them by the names of `Decoder.places`.

    Tensors of single experts are views of those of all experts.

    Args:
        quantised: see `quantised_as`.

    Raises:
        WeightsError: names what is unknown, given twice, of another shape or no floating point; or
            the weights are quantised.
    """
    if quantised is not None:
        raise WeightsError(
            f"{WHERE}: the weights are {quantised}, which cannot be written again: load the model "
            "in 16 bits"
        )
    known = _expected(config)
    given: dict[str, Tensor] = {}
    for theirs, tensor in _pairs(named_tensors):
        name = config.tensor_names.ours(theirs)
        if name is None:
            continue
        with_prefix = config.tensor_names.prefix + name
        name = with_prefix if name not in known and with_prefix in known else name
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"{WHERE}: {name} is {type(tensor).__name__}, expected a tensor")
        if name in given:
            raise WeightsError(f"{WHERE}: {name} is given twice")
        given[name] = tensor.detach()
    check_unknown(WHERE, config, known, given)
    headers = {
        name: TensorHeader(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in given.items()
    }
    check_shapes(WHERE, config, known, headers)
    of_meta = [name for name, tensor in given.items() if tensor.is_meta]
    if of_meta:
        raise WeightsError(f"{WHERE}: tensors without values (meta device): {listed(of_meta)}")
    return _by_expert(config, {name: given[name] for name in given if name in known})


def _pairs(named_tensors: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    given: Any = named_tensors
    if isinstance(named_tensors, Iterable) and not isinstance(named_tensors, (str, Mapping)):
        for given in named_tensors:
            is_pair = isinstance(given, (tuple, list)) and len(given) == 2
            if not is_pair or not isinstance(given[0], str):
                break
            yield given[0], given[1]
        else:
            return
    raise WeightsError(
        f"{WHERE} got {show(given)}, expected pairs of a name and a tensor, such as "
        "model.named_parameters()"
    )


@functools.cache
def _tensors(config: ModelConfig) -> Tensors:
    return Tensors(config)


@functools.cache
def _expected(config: ModelConfig) -> Mapping[str, Expected]:
    """Tensors that can be given: of all experts, and of single ones."""
    tensors = _tensors(config)
    specs = list(tensors)
    for whole in tensors.of_experts:
        singles = (one for expert in tensors.singles(whole) for one in expert)
        specs += [spec for one in singles for spec in one.with_others()]
    return {spec.name: Expected(spec.shape, FLOATING) for spec in specs}


def _by_expert(config: ModelConfig, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """`given`, with tensors of all experts replaced by views of single experts."""
    tensors, found = _tensors(config), dict(given)
    for whole in tensors.of_experts:
        singles = tensors.singles(whole)
        for spec in whole.with_others():
            if spec.name not in found:
                continue
            tensor = spec.rows_first(found.pop(spec.name))
            pieces = [tensor] if len(singles[0]) == 1 else tensors.halves(tensor)
            for expert, *theirs in zip(singles, *pieces, strict=True):
                for one, piece in zip(expert, theirs, strict=True):
                    beside = one if spec is whole else one.bias
                    assert beside is not None
                    if beside.name in found:
                        raise WeightsError(f"{WHERE}: {beside.name} is given twice")
                    found[beside.name] = piece
    return found


@torch.no_grad()
def write_tensors(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite a decoder's tensors in place with tensors that were checked: whole ones, of which a
    rank writes its part."""

    def given(spec: TensorSpec, as_dtype: torch.dtype | None) -> Tensor | None:
        if spec.name not in tensors:
            return None
        whole = tensors[spec.name]
        tensor = whole if spec.cut is None else spec.cut.of(whole)
        return tensor.to(decoder.device, as_dtype or decoder.dtype)

    for place in dict.fromkeys(place for name in tensors for place in decoder.places[name]):
        place.write(given)
