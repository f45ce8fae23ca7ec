"""Make the callbacks that a recipe names by import path."""

from __future__ import annotations

from tessera.config.registry import Maker, check_arguments, import_object
from tessera.config.run_config import CallbackSection, TrainSection
from tessera.core.callback import Callback
from tessera.errors import TesseraError

_CALLBACK = Maker("callback", bases=(Callback,))


def named_callbacks(section: TrainSection) -> list[Callback]:
    """Return new callbacks, in the order of `train.callbacks`."""
    found: list[Callback] = []
    for number, one in enumerate(section.callbacks):
        given = one if isinstance(one, CallbackSection) else CallbackSection(name=one)
        where = f"train.callbacks.{number}"
        make = import_object(given.name, where)
        _CALLBACK.check(make, given.name, where)
        check_arguments(make, given.options, given.name, f"{where}.options")
        callback = make(**given.options)
        if not isinstance(callback, Callback):
            raise TesseraError(
                f"{given.name} returned a {type(callback).__name__}, which is no callback",
                where=where,
                fix="derive the class from tessera.core.callback.Callback",
            )
        found.append(callback)
    return found
