"""Ministral 3, and the text part of Mistral Small 3.1 and Ministral 3 that read images too."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, QueryGrowth
from onestem.models.families import llama
from onestem.models.families.shared import IMAGE_MODEL, text_fields
from onestem.models.fields import Fields
from onestem.models.names import TensorNames

__all__ = ["names", "read", "read_image_model"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of Ministral 3: queries grow with their position where the file says so."""
    fields.refuse_others(sliding_window=None)
    rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    if not rope:
        raise fields.wrong("rope_parameters", "an object")
    common = llama.plain(fields, architecture, head_dim=128, norm_eps=1e-5)
    rope_fields = Fields(rope, f"{fields.source}: rope_parameters")
    beta = rope_fields.optional_number("llama_4_scaling_beta")
    if beta is None:
        return common
    positions = rope_fields.positive("original_max_position_embeddings")
    return replace(common, query_growth=QueryGrowth(beta, positions))


def read_image_model(fields: Fields, architecture: str) -> Description:
    """Description of the text part of a model that reads images: of Ministral 3, or of Mistral."""
    text = text_fields(fields)
    kind = text.values.get("model_type")
    if kind not in ("mistral", "ministral3"):
        raise text.unsupported("model_type", "mistral, ministral3")
    family = read if kind == "ministral3" else llama.read
    found = family(text, "Ministral3ForCausalLM" if kind == "ministral3" else "MistralForCausalLM")
    # The outer fields decide, but a checkpoint with its own head overrides them.
    tied = fields.boolean("tie_word_embeddings", True)
    return replace(found, architecture=architecture, tie_embeddings=tied)


def names(description: Description) -> TensorNames:
    """As in `llama`; models that read images have some names in two ways."""
    of_llama = llama.names(description)
    if description.architecture == "Mistral3ForConditionalGeneration":
        return replace(of_llama, **IMAGE_MODEL)
    return of_llama
