"""JSON bodies of requests, checked; what is wrong is a RequestError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.fields import FieldError, describe, read_fields

S = TypeVar("S", bound=msgspec.Struct)
BOM = b"\xef\xbb\xbf"


class RequestError(Exception):
    """A request that is answered with a 4xx. ``param`` is the field at fault, where there is one."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.kind = message, param, status, kind


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, UTF-8 as the standard has it. Raises RequestError."""
    try:
        value = msgspec.json.decode(body.removeprefix(BOM))
    except (msgspec.MsgspecError, RecursionError) as error:
        hint = " (half of a surrogate pair is not valid Unicode)" if rb"\ud" in body.lower() else ""
        raise RequestError(f"The body is not valid JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {describe(value)}")
    return value


def read_body(body: Mapping[str, Any], kind: type[S]) -> S:
    """The fields of a body. ``null`` is the same as absent, as in OpenAI's API. Raises RequestError."""
    try:
        return read_fields({name: value for name, value in body.items() if value is not None}, kind)
    except FieldError as error:
        raise RequestError(str(error), error.path) from None
