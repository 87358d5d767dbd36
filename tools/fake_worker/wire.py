"""Bodies in, replies out."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from workers.api.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)


def parse(kind: type[M], body: dict[str, Any]) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"id": "fake", "object": "chat.completion.chunk"} | data) + b"\n\n"


def json_reply(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
