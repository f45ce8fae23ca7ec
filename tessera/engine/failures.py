"""Name the errors of requests that end in the engine."""

from __future__ import annotations

from tessera.errors import TesseraError, first_line


def call_failed(cause: Exception) -> TesseraError:
    """Return the error of all requests of a call that failed: it is unknown which of them is the cause."""
    error = TesseraError(
        f"the engine failed in this call: {first_line(cause)}",
        fix="send the request, or start the command, again; if memory is full, lower the number of rows or blocks",
        code="generation.engine-failed",
    )
    error.__cause__ = cause
    return error


def request_failed(cause: Exception) -> TesseraError:
    """Return the error of a single failed request. The engine goes on with the others."""
    if isinstance(cause, TesseraError):
        return cause
    error = TesseraError(
        f"the engine cannot answer this request: {first_line(cause)}",
        fix="check the media and the prompt of this request",
        code="generation.request-failed",
    )
    error.__cause__ = cause
    return error


def not_finite_error() -> TesseraError:
    """Return the error of a request whose logits are not finite."""
    return TesseraError(
        "the logits of the model are not finite",
        fix="the weights are damaged or training diverged: check the loss, or use an older checkpoint",
        code="generation.output-not-finite",
    )


def still_used_error(name: str) -> TesseraError:
    """Return the error for an adapter name that requests still use while it is unloaded."""
    return TesseraError(
        f"the adapter {name} is being unloaded, and requests still use it",
        fix="load it again when they are answered, or use another name",
        code="adapter.name-in-use",
    )
