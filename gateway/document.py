"""The OpenAPI document of the gateway, at `/openapi.json`: what it takes, and how it answers what it does not."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas import ChatCompletionRequest, HandoffRequest, PrefixRequest, TextCompletionRequest

REFERENCE = "#/components/schemas/{model}"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": TextCompletionRequest,
    "/v1/cascade/explain": ChatCompletionRequest,
    "/v1/prefix/prefill": PrefixRequest,
    "/v1/cache/transfer": HandoffRequest,
}
OPEN = ("/livez", "/readyz", "/health", "/metrics")
TEXT = {"type": "string"}
TOLD = {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": TEXT}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(TOLD), "properties": TOLD}},
}


def document(app: FastAPI) -> dict[str, Any]:
    """Of the routes that the application has; requests are described by the models that read them."""
    described = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas, defined = models_json_schema([(model, "validation") for model in BODIES.values()], ref_template=REFERENCE)
    described["components"] = {
        "schemas": defined["$defs"] | {"Error": ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    for path, operations in described["paths"].items():
        for operation in operations.values():
            _describe(operation, path, schemas)
    return described


def _describe(operation: dict[str, Any], path: str, schemas: dict[Any, dict[str, Any]]) -> None:
    operation["responses"].pop("422", None)  # FastAPI's; ours is a 400
    if path in OPEN:
        return
    operation["security"] = [{"key": []}]
    operation["responses"]["default"] = {"description": "An error", "content": _json(REFERENCE.format(model="Error"))}
    model = BODIES.get(path)
    if model is not None:
        schema = schemas[model, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}


def _json(reference: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": reference}}}
