"""Arguments that a recipe gives to something of which it knows only the name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tessera.core.errors import TesseraError, nearest


def check_arguments(called: Callable[..., Any], arguments: Mapping[str, Any], name: str, where: str) -> None:
    """That `called`, which errors call `name`, takes these and lacks none."""
    try:
        signature = inspect.signature(called)
    except ValueError:  # a class of C that does not tell
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = next((given for given in arguments if given not in known), None)
        raise TesseraError(
            f"{name} cannot be made: {error}",
            where=where,
            allowed=[str(parameter) for parameter in signature.parameters.values()],
            nearest=nearest(unknown, known) if unknown else None,
        ) from None
