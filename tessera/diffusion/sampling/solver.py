"""Turn noise into latents step by step, with the schedulers of diffusers.

`scheduler/scheduler_config.json` of a folder names the scheduler class. Every sample has its own solver, because noise
levels may depend on the sample's size, and multistep solvers keep earlier steps.
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
# A folder may name only these classes; others are never imported.
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
    """Denoise one sample with a scheduler of diffusers. A solver is used once."""

    def __init__(self, scheduler: Any, generator: torch.Generator | None = None) -> None:
        """Wrap a scheduler. `generator`: random generator for schedulers that add noise in every step."""
        self._scheduler = scheduler
        self._generator = generator
        self._clean: Tensor | None = None  # predicted clean latents of the previous step, for `CogVideoXDPMScheduler`

    @property
    def timesteps(self) -> Tensor:
        """Return the timestep of each step, [steps] float32 on the host, from noise (1000) to data (0)."""
        return self._scheduler.timesteps.float()

    def step(self, number: int, prediction: Tensor, latents: Tensor) -> Tensor:
        """Return the latents after step `number`. `prediction`: the output of the model for `latents`."""
        times = self._scheduler.timesteps
        if type(self._scheduler).__name__ != _COGVIDEOX_DPM:
            stepped = self._scheduler.step(prediction, times[number], latents, return_dict=False)
            return stepped[0]
        before = times[number - 1] if number else None
        stepped, self._clean = self._scheduler.step(
            prediction, self._clean, times[number], before, latents, generator=self._generator, return_dict=False
        )
        return stepped


def scheduler_config(folder: Path) -> dict[str, Any] | None:
    """Return the scheduler configuration of a diffusers folder; None if there is none."""
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
    """Return a solver for one sample with `tokens` latent tokens. `sigmas`: noise levels before the shift for the Euler
    scheduler; None, and for other schedulers: chosen by the scheduler."""
    if not 1 <= steps <= _MOST_STEPS:
        raise TesseraError(
            f"{steps} denoising steps are not supported",
            where="--steps",
            allowed=[f"1 to {_MOST_STEPS}"],
            code="generation.bad-step-count",
        )
    name = str(config.get("_class_name", EULER))
    if name not in _LIBRARY:
        raise TesseraError(
            f"the scheduler class {name} is not supported",
            where=SCHEDULER_FILE,
            allowed=_LIBRARY,
            nearest=nearest(name, _LIBRARY),
            code="generation.unsupported-scheduler",
        )
    _number(config, "num_train_timesteps", 1000)
    if steps == 1:  # with `shift_terminal`, diffusers would divide by zero for a single step
        config = {**config, "shift_terminal": None}
    scheduler_class = _library_class(name)
    # pass supported keys only: for others diffusers would log a warning for each sample
    taken = inspect.signature(scheduler_class.__init__).parameters
    options: dict[str, Any] = {"sigmas": sigmas} if sigmas is not None and name == EULER else {}
    try:
        scheduler = scheduler_class.from_config({key: value for key, value in config.items() if key in taken})
        if (name == EULER or config.get("use_flow_sigmas")) and config.get("use_dynamic_shifting"):
            options["mu"] = size_shift(config, tokens)
        scheduler.set_timesteps(**({"num_inference_steps": steps} | options))
    except (NotImplementedError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise TesseraError(
            f"{name} does not accept the settings in this file: {first_line(error)}",
            where=SCHEDULER_FILE,
            code="generation.bad-scheduler-settings",
        ) from error
    return Solver(scheduler, generator)


def with_solver(config: Mapping[str, Any], solver: str) -> dict[str, Any]:
    """Return the configuration of the scheduler class `solver`, with the noise levels of `config`."""
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
            f"the solver {solver} needs a model that predicts a velocity",
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
    """Return the configuration with a constant shift of the noise levels."""
    euler = config.get("_class_name", EULER) == EULER
    if not euler and not config.get("use_flow_sigmas"):
        raise TesseraError(
            "the scheduler of this model does not support a shift of noise levels",
            where="--shift",
            code="generation.levels-not-shifted",
        )
    return {**config, "shift" if euler else "flow_shift": shift, "use_dynamic_shifting": False}


def size_shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return the logarithm of the noise-level shift for an image with `tokens` tokens. Large images need more noise."""
    first, last = _number(config, "base_image_seq_len", 256), _number(config, "max_image_seq_len", 4096)
    low, high = float(config.get("base_shift", 0.5)), float(config.get("max_shift", 1.15))
    slope = (high - low) / (last - first)
    return tokens * slope + low - slope * first


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e6:
        raise TesseraError(
            f"the value {value!r} of {key} is not supported",
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
            f"diffusers, which has the scheduler {name}, is not installed or too old",
            where=SCHEDULER_FILE,
            fix="pip install tessera-mm[hf]",
            code="environment.diffusers-missing",
        ) from None
