"""The OpenAPI document: FastAPI's, with the bodies that routes read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from onestem import __version__
from onestem.adapters.messages_write import MessageError
from onestem.openai.schema import ErrorAnswer

REF = "#/components/schemas/{model}"
# Those that the document describes.
MODELS: dict[type[BaseModel], None] = {ErrorAnswer: None, MessageError: None}


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
    return {
        "4XX": {"description": "What is wrong with the request.", "content": content},
        "5XX": {"description": "What is wrong with the server.", "content": content},
    }


ERRORS, MESSAGE_ERRORS = _errors(ErrorAnswer), _errors(MessageError)


def answers(*types: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is of these media types."""
    return {200: {"description": "The answer.", "content": {name: {} for name in types}}}


def body_of(model: type[BaseModel], media_type: str = "application/json") -> dict[str, Any]:
    """`openapi_extra` of a route that reads such a body, which the document describes."""
    MODELS[model] = None
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """The document of all routes; `keys`: whether a key is needed."""
    made = get_openapi(
        title="Onestem",
        version=__version__,
        description="OpenAI's API, and Anthropic's messages, for prompts that share text.",
        routes=app.routes,
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in MODELS], ref_template=REF
    )
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path in made["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    if keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        made["security"] = [{"key": []}, {"header": []}]  # either
    return made
