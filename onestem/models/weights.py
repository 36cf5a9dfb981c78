"""From a model directory, or a configuration and a seed, to a `Decoder`."""

from __future__ import annotations

import logging
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.garbage import give_holes_back
from onestem.models.builder import Builder
from onestem.models.checkpoint import open_checkpoint, with_own_head
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.names import Role
from onestem.models.quantization import SMALL_MODEL, Scheme
from onestem.models.ranks import ALONE, Ranks
from onestem.models.sizes import kept_by, target_of
from onestem.models.tensors import Kind, Tensors, TensorSpec
from onestem.ops.cpu.huge import in_huge_pages
from onestem.options import Quantize

log = logging.getLogger(__name__)

ZEROS = (Role.CORRECTION, Role.DELTA_DECAY, Role.DELTA_STEP)  # in random weights


@in_huge_pages()
def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
    quantization: Quantize | None = None,
    deterministic: bool = False,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Read a Hugging Face model directory; with `random_weights`, only its `config.json`.

    Where several `ranks` hold the model together, only this rank's part is read. Random weights are
    normal with the configuration's `initializer_range`, biases 0 and norms 1. Each tensor depends
    on (seed, its name, device) alone. With `quantization` weights of layers are rounded to a format
    (see `onestem.models.formats.held`). `deterministic`: as of `EngineOptions`, on a CPU, of
    weights that are not quantised.

    Raises:
        ConfigError: `quantization` of weights that are quantised already; or the model does not
            divide over the ranks.
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    config = ModelConfig.from_directory(path)
    target = torch.device(device)
    if random_weights:
        return random_decoder(
            config,
            dtype=dtype,
            device=target,
            seed=seed,
            quantization=quantization,
            deterministic=deterministic,
            ranks=ranks,
        )
    refuse_rounding_twice(path, config, quantization)
    tensors = Tensors(with_own_head(path, config), ranks)
    if quantization == "int4" and tensors.num_parameters < SMALL_MODEL and ranks.rank == 0:
        log.warning(
            "int4 costs small models many right answers: 111 of 201 of one with 135 million "
            "parameters (this has %.0f million); int8 and fp8 cost few",
            tensors.num_parameters / 1e6,
        )
    products = target_of(tensors, dtype, target, deterministic=deterministic)
    source = open_checkpoint(path, tensors, dtype, target, kept_by(products, quantization))
    decoder = Builder(tensors, source, products, quantization).decoder()
    give_holes_back()  # of what lay between a file's form and the kept one
    return decoder


def random_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    quantization: Quantize | None = None,
    deterministic: bool = False,
    ranks: Ranks = ALONE,
) -> Decoder:
    """A decoder with random weights (see `load_decoder`). A rank's part is cut from the tensors of
    the whole model."""
    tensors, source = Tensors(config, ranks), _RandomSource(config, dtype, device, seed)
    target = target_of(tensors, dtype, device, deterministic=deterministic)
    return Builder(tensors, source, target, quantization).decoder()


def refuse_rounding_twice(
    path: str | Path, config: ModelConfig, quantization: Quantize | None
) -> None:
    """Raise `ConfigError` if weights that are quantised are to be rounded. Blocks of GGUF files
    can be: their numbers are."""
    stored = config.quantization
    if quantization is not None and stored is not None and not stored.converts:
        raise ConfigError(
            f"quantization is {quantization}, and the weights of {path} are quantised "
            f"({stored.method}): leave it out"
        )


def checked_config(path: str | Path) -> tuple[ModelConfig, dict[str, Scheme]]:
    """The configuration of a directory that holds the model's tensors, by names and shapes, and how
    its quantised modules are stored.

    Raises:
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    config = with_own_head(path, ModelConfig.from_directory(path))
    keeps = lambda scheme: True  # noqa: E731
    source = open_checkpoint(path, Tensors(config), torch.float32, torch.device("cpu"), keeps)
    return config, {module: scheme for module, (scheme, _) in source.schemes.items()}


class _RandomSource:
    """A `Source` of random tensors."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.spread, self.norm = config.initializer_range, 1 - config.norm_offset
        self.dtype, self.device, self.seed = dtype, device, seed

    def __call__(self, spec: TensorSpec, as_dtype: torch.dtype | None = None) -> Tensor:
        whole = torch.empty(spec.shape, dtype=as_dtype or self.dtype, device=self.device)
        self._fill(whole, spec)
        if spec.cut is None:
            return whole
        part = spec.cut.of(whole)  # a view would hold all of it
        return part.clone(memory_format=torch.contiguous_format)

    def weight(self, spec: TensorSpec) -> Tensor:
        return self(spec)

    def keeps(self, spec: TensorSpec) -> bool:
        return False

    def singles(self, spec: TensorSpec) -> None:
        return None

    def _fill(self, tensor: Tensor, spec: TensorSpec) -> None:
        # 32 bits: the CPU's generator ignores higher ones.
        seed = zlib.crc32(f"{self.seed} {spec.name}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        if spec.kind is Kind.POWERS:
            # The root mean square of the values of random bits is 2.9.
            tensor.fill_(127 + round(math.log2(self.spread / 2.9)))
        elif spec.kind is Kind.CODES:
            tensor.random_(0, 256, generator=generator)
        elif spec.kind is Kind.BIAS or spec.role in ZEROS:
            tensor.zero_()
        elif spec.kind is Kind.NORM:
            tensor.fill_(self.norm)
        elif spec.kind in (Kind.VECTOR, Kind.SCALAR):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, self.spread, generator=generator)
