"""The tensors of a model directory's safetensors files, checked by name and shape."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onestem.errors import UnsupportedError, WeightsError
from onestem.models.config import ModelConfig
from onestem.models.cuts import Cut
from onestem.models.formats.held import Weight, dense
from onestem.models.formats.stored import (
    FLOATS,
    SCALED_BY,
    Expected,
    main_tensor,
    stored_tensors,
    stored_weight,
    wrong_values,
)
from onestem.models.gguf_tensors import GgufTensor, gguf_tensors
from onestem.models.names import Role, listed
from onestem.models.quantization import Scheme
from onestem.models.shards import opened, tensor_files
from onestem.models.tensors import Kind, Tensors, TensorSpec
from onestem.native import native

# Name of a weight of all experts -> the tensors that files hold instead (`Tensors.singles`).
Singles = Mapping[str, Sequence[Sequence[TensorSpec]]]

# How the modules are stored that are quantised, each with its weight.
Schemes = Mapping[str, tuple[Scheme, TensorSpec]]

# Whether a scheme's weights stay as they are stored.
Keeps = Callable[[Scheme], bool]

log = logging.getLogger(__name__)

BYTES = ("U8",)  # dtypes of tensors of mxfp4

COMPARED_ROWS = 1024  # at a time, of head and embedding

STAGING_BYTES = 64 << 20  # of each buffer

NOT_A_POWER = 255  # among scales of mxfp4

DAMAGED = "the file is damaged, or of another model: get it again"


class Source(Protocol):
    """Where a decoder's tensors come from. Of a tensor that has a `cut` only the part is read."""

    def __call__(self, spec: TensorSpec, as_dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the decoder's device, in `as_dtype`; None: in the decoder's dtype."""
        ...

    def weight(self, spec: TensorSpec) -> Weight:
        """The weight of a module on the decoder's device, quantised as stored or in the decoder's
        dtype."""
        ...

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether a weight is given as the blocks of a GGUF file, also that of a table or head."""
        ...

    def singles(self, spec: TensorSpec) -> Sequence[Sequence[TensorSpec]] | None:
        """For each expert the matrices that are there in place of its part of a weight of all
        experts (`Tensors.singles`); None: the weight itself is there."""
        ...


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a tensor, known before it is read; dtypes of files as safetensors names
    them."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileTensor(TensorHeader):
    """A tensor in a file, and its name there."""

    file: Path
    name: str


class Checkpoint:
    """The `Source` of a directory, or of a GGUF file.

    Attributes:
        schemes: how each quantised module is stored, and its weight.
    """

    def __init__(
        self,
        held: Mapping[str, FileTensor | GgufTensor],
        schemes: Schemes,
        singles: Singles,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._held = held
        self.schemes = schemes
        self._singles = singles
        # One file is open at a time, so that the pages of a finished shard can be dropped.
        self._opened = functools.lru_cache(maxsize=1)(opened)
        self._dtype = dtype
        self._device = device
        self._copy = Staging(device) if device.type == "cuda" else None

    def __call__(self, spec: TensorSpec, as_dtype: torch.dtype | None = None) -> Tensor:
        dtype = as_dtype or self._dtype
        if spec.module in self.schemes and not self.keeps(spec):
            # A table or a head: they are used dense.
            whole = dense(self.weight(spec), dtype)
            return whole if spec.cut is None else spec.cut.filled(whole)
        stored = self._stored(spec.name, spec.cut, dtype)
        if self._copy is not None:
            return self._copy(stored).to(dtype)
        return stored.to(device=self._device, dtype=dtype, copy=True)

    def weight(self, spec: TensorSpec) -> Weight:
        """See `Source`."""
        module = spec.module
        if module is None or module not in self.schemes:
            return self(spec)

        def get(name: str, cut: Cut | None = None) -> Tensor | None:
            at = f"{module}.{name}"
            if at not in self._held:
                return None
            stored = self._stored(at, cut)
            return stored.to(self._device) if self._copy is None else self._copy(stored)

        held = self._held.get(spec.name)
        if isinstance(held, GgufTensor):
            return held.groups(spec.cut).to(self._device)
        weight = stored_weight(self.schemes[module][0], get, *_size(spec), spec.cut)
        return weight.to(self._dtype) if isinstance(weight, Tensor) else weight

    def keeps(self, spec: TensorSpec) -> bool:
        """See `Source`."""
        return spec.module in self.schemes and isinstance(self._held.get(spec.name), GgufTensor)

    def singles(self, spec: TensorSpec) -> Sequence[Sequence[TensorSpec]] | None:
        """See `Source`."""
        return self._singles.get(spec.name)

    def check_values(self, specs: Iterable[TensorSpec]) -> None:
        """Raise `WeightsError` for numbers that make no sense in what says how weights are stored,
        such as scales that are not finite. Scales that are 0, as of weights that are all 0, are
        named in a warning."""
        for spec in specs:
            if spec.kind is Kind.POWERS:
                held = self._held[spec.name]
                if int(self._stored(spec.name, None).max()) == NOT_A_POWER:
                    raise WeightsError(f"{held.file}: {held.name} has NaN: {DAMAGED}")
        zero: list[str] = []
        for module, (scheme, spec) in self.schemes.items():

            def get(name: str, module: str = module) -> Tensor | None:
                at = f"{module}.{name}"
                if at not in self._held:
                    return None
                stored = self._stored(at, None)
                if name in SCALED_BY and not stored.float().all():
                    zero.append(self._held[at].name)
                return stored

            wrong = wrong_values(scheme, *_size(spec), get)
            if wrong is not None:
                held = self._held[f"{module}.{wrong[0]}"]
                raise WeightsError(f"{held.file}: {held.name} {wrong[1]}: {DAMAGED}")
        if zero:
            log.warning("scales that are 0, whose weights are 0 then: %s", listed(zero))

    def _stored(self, name: str, cut: Cut | None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor as its file has it; numbers of a GGUF file's blocks in `dtype`."""
        held = self._held[name]
        if isinstance(held, GgufTensor):
            return held.read(cut, dtype or self._dtype)
        file = self._opened(held.file)
        tensor: Tensor
        with native(f"{held.file}: {held.name} cannot be read", WeightsError):
            tensor = (
                file.get_tensor(held.name) if cut is None else cut.of(file.get_slice(held.name))
            )
        return tensor


def _size(spec: TensorSpec) -> tuple[int, int]:
    """out_features and in_features of a whole module that is stored by rows."""
    out, size = spec.shape
    return out, size


class Staging:
    """Copies tensors to a GPU through two pinned buffers: one is filled while the other is on its
    way. A copy from a mapped file's pages alone takes four times as long."""

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)
        ]
        self._sent = [torch.cuda.Event() for _ in self._buffers] if is_gpu else []
        self._turn = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the device. Later work on its current stream finds it there."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if not tensor.numel():
            return there
        source, target = (one.reshape(-1).view(torch.uint8) for one in (tensor, there))
        size = len(self._buffers[0])
        for first in range(0, len(source), size):
            part, into = source[first : first + size], target[first : first + size]
            self._turn = 1 - self._turn
            buffer = self._buffers[self._turn][: len(part)]
            if self._sent:
                self._sent[self._turn].synchronize()
            into.copy_(buffer.copy_(part), non_blocking=True)
            if self._sent:
                self._sent[self._turn].record(torch.cuda.current_stream(self._device))
        return there


def open_checkpoint(
    directory: str | Path,
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    keeps: Keeps = lambda scheme: False,
) -> Checkpoint:
    """Source of a directory, or of a GGUF file, that holds all of `tensors` and no others.

    A weight of all experts may be held as tensors of single ones. A quantised module has the
    tensors of its format instead of its `weight`.

    Args:
        keeps: whether weights of a GGUF file are given as the blocks that they are stored in;
            others are de-quantised.

    Raises:
        UnsupportedError: quantised modules of this family are not supported.
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    config, directory = tensors.config, Path(directory)
    if directory.is_file():
        schemes, singles = _blocks(tensors, keeps)
        return Checkpoint(gguf_tensors(directory, tensors), schemes, singles, dtype, device)
    held = _headers(config, tensor_files(directory))
    specs = {spec.name: spec for spec in tensors}
    singles = _singles_in_files(tensors, held)
    for name, experts in singles.items():
        del specs[name]
        specs |= {one.name: one for expert in experts for one in expert}
    schemes = _schemes(config, specs.values(), held)
    if schemes and config.tensor_names.transposed:
        raise UnsupportedError(f"{directory}: quantised weights of {config.architecture}")
    expected = _expected(specs.values(), schemes, held)
    needed = {name for name, one in expected.items() if not one.optional}
    missing = sorted(needed - set(held))
    if missing:
        raise WeightsError(
            f"{directory} lacks tensors that {config.architecture} needs: {listed(missing)}"
        )
    check_unknown(directory, config, expected, held)
    check_shapes(directory, config, expected, held)
    checkpoint = Checkpoint(held, schemes, singles, dtype, device)
    checkpoint.check_values(specs.values())
    return checkpoint


def _blocks(tensors: Tensors, keeps: Keeps) -> tuple[Schemes, Singles]:
    """Schemes of the modules of a GGUF file that stay in their blocks, and the experts that do."""
    stored = tensors.config.quantization
    found: dict[str, tuple[Scheme, TensorSpec]] = {}
    singles: dict[str, Sequence[Sequence[TensorSpec]]] = {}
    if stored is None:
        return found, singles

    def note(alike: Sequence[TensorSpec]) -> bool:
        """Whether modules stay that are stored alike."""
        scheme = None if alike[0].module is None else stored.scheme(alike[0].module)
        if scheme is None or not keeps(scheme):
            return False
        found.update({str(one.module): (scheme, one) for one in alike})
        return True

    for spec in tensors:
        note([spec])
    for whole in tensors.of_experts:
        experts = tensors.singles(whole)
        kept = [note(alike) for alike in zip(*experts, strict=True)]
        if any(kept):
            singles[whole.name] = experts
    return found, singles


def _singles_in_files(tensors: Tensors, held: Collection[str]) -> Singles:
    """Tensors of single experts, where files hold some of them and not the whole."""
    found: dict[str, list[tuple[TensorSpec, ...]]] = {}
    if tensors.alternates:
        return found
    modules = {name.rpartition(".")[0] for name in held}
    for whole in tensors.of_experts:
        if whole.name not in held:
            singles = tensors.singles(whole)
            if any(one.module in modules for expert in singles for one in expert):
                found[whole.name] = singles
    return found


def _schemes(
    config: ModelConfig, specs: Iterable[TensorSpec], held: Mapping[str, FileTensor]
) -> dict[str, tuple[Scheme, TensorSpec]]:
    """Schemes of the modules that are quantised in the files."""
    found: dict[str, tuple[Scheme, TensorSpec]] = {}
    if config.quantization is None:
        return found
    for spec in specs:
        scheme = None if spec.module is None else config.quantization.scheme(spec.module)
        if spec.module is None or scheme is None:
            continue
        main = held.get(f"{spec.module}.{main_tensor(scheme)}")
        if main is not None and main.dtype not in FLOATS:
            found[spec.module] = (scheme, spec)
    return found


def _expected(
    specs: Iterable[TensorSpec], schemes: Schemes, held: Iterable[str]
) -> dict[str, Expected]:
    """What files hold: of a quantised module the tensors of its format."""
    expected = {
        spec.name: Expected(spec.shape, BYTES if spec.kind in (Kind.CODES, Kind.POWERS) else FLOATS)
        for spec in specs
        if spec.module not in schemes
    }
    names: dict[str, list[str]] = {module: [] for module in schemes}
    for name in held:
        module, _, part = name.rpartition(".")
        if module in names:
            names[module].append(part)
    for module, (scheme, spec) in schemes.items():
        stored = stored_tensors(scheme, *_size(spec), names[module])
        expected |= {f"{module}.{part}": one for part, one in stored.items()}
    return expected


def with_own_head(directory: str | Path, config: ModelConfig) -> ModelConfig:
    """The configuration of a directory's weights: with a head if they have one (`has_own_head`)."""
    tied = config.tie_embeddings and not has_own_head(Path(directory), config)
    return replace(config, tie_embeddings=tied)


def has_own_head(directory: Path, config: ModelConfig) -> bool:
    """Whether the directory holds a head that differs from the embedding but has its shape.

    Mistral Small's files do, though their `config.json` ties the two. As in transformers, the
    head in the files is used.
    """
    if directory.is_file():  # a GGUF file's configuration follows from its tensors
        return False
    stored = tensor_files(directory)
    names = _names(config, stored)
    pair = [f"{config.tensor_names[role]}.weight" for role in (Role.HEAD, Role.EMBEDDING)]
    if not all(name in names for name in pair):
        return False
    with ExitStack() as files:
        head, embedding = (
            files.enter_context(opened(stored[names[name]])).get_slice(names[name]) for name in pair
        )
        shape = head.get_shape()
        if shape != embedding.get_shape() or len(shape) != 2:
            return False
        if head.get_dtype() not in FLOATS or embedding.get_dtype() not in FLOATS:
            return True
        # A different head differs in its first rows; the tensors are compared in blocks.
        starts = range(0, shape[0], COMPARED_ROWS)
        blocks = (slice(start, start + COMPARED_ROWS) for start in starts)
        return any(not torch.equal(head[block], embedding[block]) for block in blocks)


def _names(config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
    """Name of each tensor of the decoder -> what the directory calls it."""
    names = config.tensor_names
    found: dict[str, str] = {}
    for name in stored:
        ours = names.ours(name)
        if ours is None:
            continue
        if ours in found:
            raise WeightsError(f"{found[ours]} and {name} are one tensor: leave one out")
        found[ours] = name
    # A file of the model without its head leaves the prefix out of all names.
    if f"{names[Role.EMBEDDING]}.weight".removeprefix(names.prefix) in found:
        return {names.prefix + name: at for name, at in found.items()}
    return found


def _headers(config: ModelConfig, files: Mapping[str, Path]) -> dict[str, FileTensor]:
    """Headers of all tensors of the decoder."""
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, at in _names(config, files).items():
        by_file.setdefault(files[at], []).append((name, at))
    held = {}
    for file, pairs in by_file.items():
        with opened(file) as handle:
            for name, at in pairs:
                part = handle.get_slice(at)
                held[name] = FileTensor(tuple(part.get_shape()), part.get_dtype(), file, at)
    return held


def check_unknown(
    holder: object, config: ModelConfig, expected: Mapping[str, Expected], held: Iterable[str]
) -> None:
    """Raise `WeightsError` for names that the model has no place for. A tied model may have a head
    in its files."""
    names = config.tensor_names
    unknown = sorted(
        name
        for name in set(held) - set(expected)
        if not name.endswith(names.ignored) and name != f"{names[Role.HEAD]}.weight"
    )
    if unknown:
        raise WeightsError(
            f"{holder} holds tensors that {config.architecture} has no place for: {listed(unknown)}"
        )


def check_shapes(
    holder: object,
    config: ModelConfig,
    expected: Mapping[str, Expected],
    held: Mapping[str, TensorHeader],
) -> None:
    """Raise `WeightsError` for tensors of other shapes or dtypes. The unused head of a tied model
    is checked too: another shape means another model."""
    names = config.tensor_names
    head = expected.get(f"{names[Role.EMBEDDING]}.weight")
    expected = expected if head is None else {f"{names[Role.HEAD]}.weight": head, **expected}
    there = {name: (held[name], one) for name, one in sorted(expected.items()) if name in held}
    wrong = [
        f"{name} is {list(one.shape)}, expected {list(wanted.shape)}"
        for name, (one, wanted) in there.items()
        if wanted.shape is not None and one.shape not in (wanted.shape, *wanted.shorter)
    ]
    if wrong:
        raise WeightsError(f"{holder} holds tensors of other shapes: {listed(wrong)}")
    for name, (one, wanted) in there.items():
        if one.dtype not in wanted.dtypes:
            plain = config.quantization is None
            why = ": config.json says nothing of quantised weights" if plain else ""
            expects = f"expected {', '.join(wanted.dtypes)}{why}"
            raise WeightsError(f"{holder}: {name} is {one.dtype}, {expects}")
