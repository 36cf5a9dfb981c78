"""The rates of this device for a model, kept from one process to the next."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import onestem
from onestem.cost.measure import device_name, measure
from onestem.cost.rates import Rates
from onestem.cost.step import ModelShape
from onestem.errors import ConfigError
from onestem.files import write_whole
from onestem.models.config import ModelConfig
from onestem.options import Quantize


def rates_here(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None = None,
) -> Rates:
    """The rates of this device for a model: those kept, or newly measured and kept.

    Args:
        quantization: the format of the layers' weights.
    """
    rates = known_rates(config, dtype, device, quantization)
    if rates is None:
        rates = measure(config, dtype, device, quantization=quantization)
        keep_rates(config, dtype, device, rates, quantization)
    return rates


def keep_rates(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rates: Rates,
    quantization: Quantize | None = None,
) -> None:
    """Write rates where `known_rates` finds them: in XDG_CACHE_HOME, keyed by `_facts`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    facts = _facts(config, dtype, device, quantization)
    file = _file(facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(facts | {"rates": dataclasses.asdict(rates)}).encode())
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: set XDG_CACHE_HOME to a folder for measured "
            "rates, or give --no-predict"
        ) from error


def known_rates(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None = None,
) -> Rates | None:
    """The rates that were kept, or None."""
    try:
        kept = json.loads(_file(_facts(config, dtype, device, quantization)).read_text())
        return Rates.from_dict(kept["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: Quantize | None
) -> dict[str, Any]:
    """All that rates depend on."""
    form = {} if quantization is None else {"quantization": quantization}
    return form | {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "isa": os.environ.get("ONESTEM_CPU_ISA", ""),
        "versions": [onestem.__version__, torch.__version__],
        "shape": dataclasses.asdict(ModelShape.of(config, dtype.itemsize)),
    }


def _file(facts: Mapping[str, Any]) -> Path:
    text = json.dumps(facts, sort_keys=True)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(base) / "onestem" / "rates" / f"{name}.json"
