"""Solve the equation that turns noise into latents, step by step.

A folder's `scheduler/scheduler_config.json` names the solver. Euler's method for flow matching is computed here and
needs no library; the others are scheduler classes of diffusers, so that trajectories are those of its pipelines. Every
sample has a solver of its own: noise levels may depend on its size, and multistep solvers remember earlier steps.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tessera.errors import TesseraError, first_line, foreign_values, nearest
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
# Options that `FlowEuler` does not compute: other spacings of noise levels, and noise that is added in between.
_LIBRARY_ONLY = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)
_MOST_STEPS = 10_000


class Solver(Protocol):
    """Describe a solver of one sample, which is used once."""

    @property
    def timesteps(self) -> Tensor:
        """Return the time of each step, [steps] float32 on the host, from noise (1000) to data (0)."""

    def step(self, number: int, prediction: Tensor, latents: Tensor) -> Tensor:
        """Return the latents after step `number`, given the prediction from those before it."""


class FlowEuler:
    """Follow a velocity by Euler's method: sigma is the share of noise, the velocity is noise minus data."""

    def __init__(self, config: Mapping[str, Any], steps: int, tokens: int, sigmas: np.ndarray | None) -> None:
        train = _number(config, "num_train_timesteps", 1000)
        shift = _number(config, "shift", 1.0)
        dynamic = bool(config.get("use_dynamic_shifting", False))
        if sigmas is not None:
            sigmas = sigmas.astype(np.float32)
        else:
            # The ends of the training schedule are shifted, too.
            ends = np.array([1.0, 1.0 / train], np.float32)
            ends = ends if dynamic else _shifted(ends, shift)
            sigmas = np.linspace(float(ends[0]) * train, float(ends[1]) * train, steps) / train
        if not dynamic:
            sigmas = _shifted(sigmas, shift)
        else:
            sigmas = _dynamic(sigmas, size_shift(config, tokens), str(config.get("time_shift_type", "exponential")))
        last = config.get("shift_terminal")
        if last and steps > 1:  # a single step has no end to stretch
            sigmas = 1 - (1 - sigmas) * (1 - float(last)) / (1 - sigmas[-1])
        self._sigmas = torch.cat([torch.from_numpy(np.asarray(sigmas, np.float32)), torch.zeros(1)])
        self._timesteps = self._sigmas[:-1] * train

    @property
    def timesteps(self) -> Tensor:
        return self._timesteps

    def step(self, number: int, prediction: Tensor, latents: Tensor) -> Tensor:
        change = self._sigmas[number + 1] - self._sigmas[number]
        return (latents.float() + change * prediction).to(prediction.dtype)


class LibrarySolver:
    """Take the steps with a scheduler of diffusers. `generator`: for solvers that add noise in between."""

    def __init__(self, scheduler: Any, generator: torch.Generator | None = None) -> None:
        self._scheduler = scheduler
        self._generator = generator
        self._clean: Tensor | None = None  # of the step before, for CogVideoX's solver

    @property
    def timesteps(self) -> Tensor:
        return self._scheduler.timesteps.float()  # type: ignore[no-any-return]

    def step(self, number: int, prediction: Tensor, latents: Tensor) -> Tensor:
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
    with foreign_values(SCHEDULER_FILE):
        _number(config, "num_train_timesteps", 1000)
        if name == EULER and not any(config.get(key) for key in _LIBRARY_ONLY):
            return FlowEuler(config, steps, tokens, sigmas)
        try:
            scheduler_class = _library_class(name)
            taken = inspect.signature(scheduler_class.__init__).parameters  # other keys raise a warning per sample
            scheduler = scheduler_class.from_config({key: value for key, value in config.items() if key in taken})
        except NotImplementedError as error:
            raise TesseraError(
                f"{name} refuses its settings: {first_line(error)}",
                where=SCHEDULER_FILE,
                code="generation.bad-scheduler-settings",
            ) from error
        flow = name == EULER or bool(config.get("use_flow_sigmas"))
        options: dict[str, Any] = {"sigmas": sigmas} if sigmas is not None and name == EULER else {}
        if flow and config.get("use_dynamic_shifting"):
            options["mu"] = size_shift(config, tokens)
        scheduler.set_timesteps(**({"num_inference_steps": steps} | options))
        return LibrarySolver(scheduler, generator)


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


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _dynamic(sigmas: np.ndarray, mu: float, kind: str) -> np.ndarray:
    laws: Mapping[str, Callable[[float], float]] = {"exponential": math.exp, "linear": float}
    if kind not in laws:
        raise TesseraError(
            f"unknown time_shift_type {kind!r}",
            where=SCHEDULER_FILE,
            allowed=laws,
            code="generation.bad-scheduler-settings",
        )
    shift = laws[kind](mu)
    return shift / (shift + (1 / sigmas - 1))


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
            fix="pip install tessera-mm[hf]; or --solver euler, for a model that predicts a velocity",
            code="environment.diffusers-missing",
        ) from None
