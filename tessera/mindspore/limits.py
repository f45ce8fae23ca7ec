"""Check what a run on MindSpore needs: a tested version, and a model that is written for it. Imports no MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tessera.config.framework import FAMILIES
from tessera.errors import TesseraError

TESTED = ("2.10",)  # versions whose operators were compared with torch's, by their first two numbers


def check_installed() -> None:
    """Raise if MindSpore is missing, of an untested version, or beside a NumPy that it was not built for."""
    installed = _version("mindspore")
    if installed is None:
        raise TesseraError(
            "MindSpore is not installed",
            where="framework=mindspore",
            fix="pip install 'tessera-mm[mindspore]', or leave framework out to train on torch",
            code="framework.not-installed",
        )
    if ".".join(installed.split(".")[:2]) not in TESTED:
        raise TesseraError(
            f"MindSpore {installed} was not tested: operators of other versions lack kernels or gradients",
            where="framework=mindspore",
            allowed=[f"{version}.x" for version in TESTED],
            fix=f"pip install 'mindspore=={TESTED[-1]}.*'",
            code="framework.untested-version",
        )
    numpy = _version("numpy")
    if numpy is not None and int(numpy.split(".")[0]) >= 2:
        raise TesseraError(
            f"NumPy {numpy} is installed, and MindSpore {installed} is built for NumPy 1",
            where="framework=mindspore",
            fix="pip install 'numpy<2'",
            code="framework.numpy-too-new",
        )


def check_model(family: str, config: Any, objects: Sequence[str]) -> None:
    """Raise if a model, or a part of the run that the caller passed as an object, is not available on MindSpore.

    `config`: configuration of the model. `objects`: names of the arguments that are objects.
    """
    reason = None
    if unsupported := sorted({"model", "task", "optimizer"} & set(objects)):
        reason = f"{unsupported[0]}=... is an object of torch"
    elif family not in FAMILIES:
        reason = f"{family} models are not written for MindSpore"
    elif config.text.experts is not None:
        reason = "mixtures of experts are not written for MindSpore"
    if reason is not None:
        raise TesseraError(
            reason,
            where="framework=mindspore",
            allowed=FAMILIES,
            fix="leave framework out to train on torch",
            code="framework.model-not-available",
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
