"""Solve the equation that turns noise into latents, step by step.

A folder's `scheduler/scheduler_config.json` names the solver, a scheduler class of diffusers. Every sample has a solver
of its own: noise levels may depend on its size, and multistep solvers remember earlier steps.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.errors import TesseraError, first_line, nearest
from tessera.runtime.files import read_json_mapping

SCHEDULER_FILE = "scheduler/scheduler_config.json"
EULER = "FlowMatchEulerDiscreteScheduler"
_COGVIDEOX_DPM = "CogVideoXDPMScheduler"
# Only these classes are imported: a file must not choose.
_LIBRARY = (
    EULER,
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "CogVideoXDDIMScheduler",
    _COGVIDEOX_DPM,
)
SOLVERS: Mapping[str, str] = {"euler": EULER, "unipc": _LIBRARY[1], "dpm++": _LIBRARY[2]}
_MOST_STEPS = 10_000


class Solver:
    """Take the steps of one sample with a scheduler of diffusers. It is used once."""

    def __init__(self, scheduler: Any, generator: torch.Generator | None = None) -> None:
        """`generator`: for schedulers that add noise in between."""
        self._scheduler = scheduler
        self._generator = generator
        self._clean: Tensor | None = None  # of the step before, for CogVideoX's solver

    @property
    def timesteps(self) -> Tensor:
        """Return the time of each step, [steps] float32 on the host, from noise (1000) to data (0)."""
        return self._scheduler.timesteps.float()  # type: ignore[no-any-return]

    def step(self, number: int, prediction: Tensor, latents: Tensor) -> Tensor:
        """Return the latents after step `number`, given the prediction from those before it."""
        times = self._scheduler.timesteps
        if type(self._scheduler).__name__ != _COGVIDEOX_DPM:
            stepped = self._scheduler.step(prediction, times[number], latents, return_dict=False)
            return stepped[0]  # type: ignore[no-any-return]
        before = times[number - 1] if number else None
        stepped, self._clean = self._scheduler.step(
            prediction, self._clean, times[number], before, latents, generator=self._generator, return_dict=False
        )
        return stepped  # type: ignore[no-any-return]


def scheduler_config(folder: Path) -> dict[str, Any] | None:
    """Return the scheduler's configuration of a diffusers folder; None if it has none."""
    path = folder / SCHEDULER_FILE
    return read_json_mapping(path, 1 << 20) if path.is_file() else None


def make_solver(
    config: Mapping[str, Any],
    steps: int,
    tokens: int,
    *,
    sigmas: np.ndarray | None = None,
    generator: torch.Generator | None = None,
) -> Solver:
    """Return a solver for one sample of this many latent tokens. `sigmas`: noise levels before they are shifted; None:
    the scheduler spaces them."""
    if not 1 <= steps <= _MOST_STEPS:
        raise TesseraError(
            f"{steps} steps", where="--steps", allowed=[f"1 to {_MOST_STEPS}"], code="generation.bad-step-count"
        )
    name = str(config.get("_class_name", EULER))
    if name not in _LIBRARY:
        raise TesseraError(
            f"the folder's scheduler is {name}",
            where=SCHEDULER_FILE,
            allowed=_LIBRARY,
            nearest=nearest(name, _LIBRARY),
            code="generation.unsupported-scheduler",
        )
    _number(config, "num_train_timesteps", 1000)
    if steps == 1:  # a single step has no end to stretch
        config = {**config, "shift_terminal": None}
    scheduler_class = _library_class(name)
    taken = inspect.signature(scheduler_class.__init__).parameters  # other keys raise a warning per sample
    options: dict[str, Any] = {"sigmas": sigmas} if sigmas is not None and name == EULER else {}
    try:
        scheduler = scheduler_class.from_config({key: value for key, value in config.items() if key in taken})
        if (name == EULER or config.get("use_flow_sigmas")) and config.get("use_dynamic_shifting"):
            options["mu"] = size_shift(config, tokens)
        scheduler.set_timesteps(**({"num_inference_steps": steps} | options))
    except (NotImplementedError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise TesseraError(
            f"{name} refuses its settings: {first_line(error)}",
            where=SCHEDULER_FILE,
            code="generation.bad-scheduler-settings",
        ) from error
    return Solver(scheduler, generator)


def with_solver(config: Mapping[str, Any], solver: str) -> dict[str, Any]:
    """Return the configuration of another solver for the same noise levels."""
    if solver not in SOLVERS:
        raise TesseraError(
            f"unknown solver {solver!r}",
            where="--solver",
            allowed=SOLVERS,
            nearest=nearest(solver, SOLVERS),
            code="generation.unknown-solver",
        )
    name = str(config.get("_class_name", EULER))
    if SOLVERS[solver] == name:
        return dict(config)
    if name != EULER and config.get("prediction_type") != "flow_prediction":
        raise TesseraError(
            f"this model does not predict a velocity: {solver} does not solve it",
            where="--solver",
            allowed=["default"],
            code="generation.solver-needs-velocity",
        )
    shared = ("num_train_timesteps", "use_dynamic_shifting", "time_shift_type", "shift_terminal")
    sizes = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
    levels = {key: config[key] for key in (*shared, *sizes) if config.get(key) is not None}
    shift = config.get("shift", config.get("flow_shift", 1.0))
    if SOLVERS[solver] == EULER:
        return {**levels, "_class_name": EULER, "shift": shift}
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    return {**levels, **flow, "_class_name": SOLVERS[solver]}


def with_shift(config: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """Return the configuration with noise levels that are shifted by a constant."""
    euler = config.get("_class_name", EULER) == EULER
    if not euler and not config.get("use_flow_sigmas"):
        raise TesseraError(
            "the noise levels of this model's scheduler are not shifted",
            where="--shift",
            code="generation.levels-not-shifted",
        )
    return {**config, "shift" if euler else "flow_shift": shift, "use_dynamic_shifting": False}


def size_shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return the logarithm of the shift for an image of this many tokens: large images need more noise."""
    first, last = _number(config, "base_image_seq_len", 256), _number(config, "max_image_seq_len", 4096)
    low, high = float(config.get("base_shift", 0.5)), float(config.get("max_shift", 1.15))
    slope = (high - low) / (last - first)
    return tokens * slope + low - slope * first


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e6:
        raise TesseraError(
            f"{key} is {value!r}",
            where=SCHEDULER_FILE,
            allowed=["a number above 0, up to 1000000"],
            code="generation.bad-scheduler-settings",
        )
    return value


def _library_class(name: str) -> Any:
    try:
        return getattr(importlib.import_module("diffusers"), name)
    except (ImportError, AttributeError):
        raise TesseraError(
            f"the solver {name} is a class of diffusers, which is not installed or too old",
            where=SCHEDULER_FILE,
            fix="pip install tessera-mm[hf]",
            code="environment.diffusers-missing",
        ) from None
