"""Answer mistakes of a client with a status and a JSON body in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from tessera.errors import TesseraError, nearest

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


# Errors of the engine that are not mistakes of a client.
_STATUS = {
    "environment.workers-killed": 503,
    "generation.engine-closed": 503,
    "generation.engine-failed": 500,
    "generation.output-not-finite": 500,
    "generation.queue-full": 429,
    "generation.request-failed": 500,
}


# Messages for clients in place of errors that contain paths or addresses of this server's network.
_MESSAGES = {
    "media.outside-root": "the file is outside of the folder of --allow-files",
    "media.private-address": "the host of the URL has an address that is not public",
}


# Fixes for clients, for errors whose own `fix` is about data sets.
_CURES = {"media.outside-root": "name a file below the folder of --allow-files (tessera generate: of --root)"}


class ApiError(Exception):
    """Report a request that the server refuses. `param`: the wrong field; `code`: a stable error code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_tessera(error: TesseraError) -> ApiError:
    """Convert a `TesseraError` to an `ApiError`. Paths of this machine (`where`) are left out."""
    status = _STATUS.get(error.code or "", 400)
    if error.code in _MESSAGES:
        return ApiError(status, _MESSAGES[error.code], code=error.code)
    message = error.what
    if error.allowed:
        message += f"; allowed: {', '.join(error.allowed)}"
    if error.nearest:
        message += f"; did you mean {error.nearest}?"
    if cure := _CURES.get(error.code or "", error.fix):
        message += f"; {cure}"
    return ApiError(status, message, code=error.code)


def of_validation(error: ValidationError, refused: Mapping[str, str], fields: Iterable[str]) -> ApiError:
    """Convert a validation error of pydantic to an `ApiError`.

    `refused`: known fields that are not supported, with the reason. `fields`: names of the supported fields.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Pydantic adds the names of the alternatives of a union to the path; clients see only keys and list indices.
    path = [key for key in first["loc"] if isinstance(key, int) or not key.startswith(("<", "function-"))]
    param = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")[:200]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        reason = refused.get(name)
        if reason is None:
            near = nearest(name, fields) if len(path) == 1 else None
            hint = f"; did you mean {near}?" if near else ""
            return ApiError(400, f"unknown field {param or name[:200]!r}{hint}", param=param, code="unknown_parameter")
        return unsupported(param, reason)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None, code="invalid_value")


def unsupported(param: str, reason: str) -> ApiError:
    return ApiError(400, f"the field {param!r} is not supported: {reason}", param=param, code="unsupported_parameter")
