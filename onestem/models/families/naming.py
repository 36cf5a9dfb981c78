"""What checkpoints of a family call their tensors: names.toml, for one model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from onestem.models.description import Description
from onestem.models.names import Role, TensorNames

_TOLD = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
_FIELDS = [field.name for field in fields(TensorNames) if field.name != "names"]


def tensor_names(table: str, description: Description) -> TensorNames:
    """The names of a model's tensors.

    Args:
        table: of names.toml; `{block}` in it is the description's.
    """
    told = _told(table.format(block=description.block))
    names = {Role[name]: called for name, called in told.items() if name.isupper() and called}
    if not (description.qk_norm or description.qk_norm_of_all):
        names = {role: names[role] for role in names if role not in (Role.Q_NORM, Role.K_NORM)}
    layers = [told["layer"].format(layer) for layer in range(description.num_layers)]
    renamed = [(theirs, ours) for theirs, ours in told.get("renamed", ())]
    for theirs, ours in told.get("renamed_in_layers", ()):
        renamed += [(f"{at}{theirs}", f"{at}{ours}") for at in layers]
    beside = [one.format(num_layers=len(layers)) for one in told.get("beside", ())]
    # Files also hold key and value weights of layers that read another layer's: these are unused.
    beside += [
        f"{stem}layers.{layer}.self_attn.{part}"
        for layer, heads in enumerate(description.heads)
        if heads.kv_layer is not None
        for stem in ("model.", "model.language_model.", "language_model.model.", "")
        for part in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]
    more: dict[str, Any] = {name: told[name] for name in _FIELDS if name in told}
    if "ignored" in more:
        more["ignored"] = tuple(more["ignored"])
    return TensorNames(names, **more | {"renamed": tuple(renamed), "beside": tuple(beside)})


def _told(table: str) -> Mapping[str, Any]:
    """A table, with what it has from those that it is like."""
    found: dict[str, Any] = {}
    for other in _TOLD[table].get("like", ()):
        found |= _told(other)
    return found | _TOLD[table]
