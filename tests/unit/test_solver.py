"""Solvers: their trajectories are those of diffusers' schedulers, step by step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tessera.diffusion.family import EvenLevels, GenerationFamily
from tessera.diffusion.qwen_image.config import QwenImageFamily
from tessera.diffusion.sampling.denoise import dynamic_scale
from tessera.diffusion.sampling.solver import EULER, make_solver, scheduler_config, with_shift, with_solver
from tests.errors import raises

TOKENS = 300
DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "euler, shift": ({"_class_name": EULER, "shift": 5.0}, False),
    "euler, even": ({"_class_name": EULER, "shift": 3.0}, True),
    "euler, by size (flux)": ({"_class_name": EULER, "shift": 3.0, **DYNAMIC}, True),
    "euler, terminal (qwen)": ({"_class_name": EULER, "shift_terminal": 0.02, **DYNAMIC}, True),
    "euler, linear by size": ({"_class_name": EULER, "time_shift_type": "linear", **DYNAMIC}, True),
    "euler, karras": ({"_class_name": EULER, "use_karras_sigmas": True, "shift": 2.0}, True),
    "unipc (wan)": ({"_class_name": "UniPCMultistepScheduler", **FLOW}, False),
    "dpm++": ({"_class_name": "DPMSolverMultistepScheduler", **FLOW}, False),
    "unipc, by size": ({"_class_name": "UniPCMultistepScheduler", **FLOW, **DYNAMIC}, True),
    "cogvideox ddim": ({"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}, False),
    "cogvideox dpm": ({"_class_name": "CogVideoXDPMScheduler", "prediction_type": "v_prediction"}, False),
}


def velocity(latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Return what a model might predict: it depends on latents and time, and is not linear in either."""
    return torch.sin(3 * latents) + latents * (time / 1000) ** 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("steps", [1, 7])
def test_trajectories_are_those_of_diffusers_step_by_step(name: str, steps: int) -> None:
    config, even = CASES[name]
    if steps == 1 and "shift_terminal" in config:
        pytest.skip("diffusers divides zero by zero there")
    reference = getattr(diffusers, config["_class_name"]).from_config(config)
    flow = config["_class_name"] == EULER
    options: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)} if even and flow else {}
    if config.get("use_dynamic_shifting"):
        slope = (1.15 - 0.5) / (4096 - 256)
        options["mu"] = TOKENS * slope + 0.5 - slope * 256
    reference.set_timesteps(steps, **options)
    solver = make_solver(
        config,
        steps,
        TOKENS,
        sigmas=EvenLevels().sigmas(steps) if even else None,
        generator=torch.Generator().manual_seed(3),
    )
    noise = torch.Generator().manual_seed(3)
    assert torch.allclose(solver.timesteps, reference.timesteps.float(), rtol=2e-7, atol=0)
    ours = theirs = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    old = None
    for number, time in enumerate(reference.timesteps):
        ours = solver.step(number, velocity(ours, solver.timesteps[number]), ours)
        predicted = velocity(theirs, time.float())
        if "DPMScheduler" in config["_class_name"]:
            before = reference.timesteps[number - 1] if number else None
            theirs, old = reference.step(predicted, old, time, before, theirs, generator=noise, return_dict=False)
        else:
            theirs = reference.step(predicted, time, theirs, return_dict=False)[0]
        # One rounding of a time moves what follows by as much; everything else is the same arithmetic.
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), number


def test_another_solver_keeps_the_noise_levels_of_the_model() -> None:
    wan = {"_class_name": "UniPCMultistepScheduler", **FLOW}
    euler = with_solver(wan, "euler")
    assert (euler["_class_name"], euler["shift"]) == (EULER, 3.0)
    assert with_solver(wan, "unipc") == wan
    flux = {"_class_name": EULER, **DYNAMIC}
    for name in ("unipc", "dpm++"):
        times = make_solver(with_solver(flux, name), 8, 4096, sigmas=EvenLevels().sigmas(8)).timesteps
        first = make_solver(flux, 8, 4096, sigmas=EvenLevels().sigmas(8)).timesteps
        assert (times - first).abs().max() < 130  # both are shifted by exp(1.15), and spaced in their own ways
        assert times[0] > 990
        assert (times.diff() < 0).all()


def test_a_given_shift_takes_the_place_of_the_folders() -> None:
    wan, flux = {"_class_name": "UniPCMultistepScheduler", **FLOW}, {"_class_name": EULER, **DYNAMIC}
    for config in (wan, flux, {}):
        times = make_solver(with_shift(config, 7.0), 5, TOKENS, sigmas=EvenLevels().sigmas(5)).timesteps
        plain = make_solver(with_shift(config, 1.0), 5, TOKENS, sigmas=EvenLevels().sigmas(5)).timesteps
        share = plain[1:] / 1000
        assert torch.allclose(times[1:], 1000 * 7 * share / (1 + 6 * share), atol=2.0), "times may be whole numbers"
    with raises("generation.levels-not-shifted"):
        with_shift({"_class_name": "CogVideoXDDIMScheduler"}, 3.0)


def test_a_large_image_gets_more_noise() -> None:
    config = {"_class_name": EULER, **DYNAMIC}
    small, large = (make_solver(config, 4, n, sigmas=EvenLevels().sigmas(4)).timesteps for n in (256, 4096))
    assert (large[1:] > small[1:]).all()
    assert math.isclose(float(large[1]), 1000 * math.exp(1.15) / (math.exp(1.15) + 1 / 0.75 - 1), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"_class_name": "HeunDiscreteScheduler"}, "generation.unsupported-scheduler HeunDiscreteScheduler"),
        ({"_class_name": "os.system"}, "generation.unsupported-scheduler os.system"),
        ({"num_train_timesteps": 10**12}, "generation.bad-scheduler-settings num_train_timesteps"),
        ({"num_train_timesteps": "many"}, "generation.bad-scheduler-settings num_train_timesteps"),
        ({"shift": [1]}, "generation.bad-scheduler-settings"),
        ({"use_dynamic_shifting": True, "time_shift_type": "odd"}, "generation.bad-scheduler-settings time_shift_type"),
        ({"_class_name": "UniPCMultistepScheduler", "solver_type": "odd"}, "generation.bad-scheduler-settings"),
    ],
)
def test_odd_settings_of_a_folder_are_refused(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": EULER, **change}))
    config = scheduler_config(tmp_path)
    assert config is not None
    with raises(error):
        make_solver(config, 4, TOKENS)


def test_solvers_and_steps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert scheduler_config(tmp_path) is None
    with raises("generation.unknown-solver") as error:
        with_solver({}, "eulr")
    assert error.value.nearest == "euler"
    with raises("generation.solver-needs-velocity"):
        with_solver({"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}, "euler")
    with raises("generation.bad-step-count"):
        make_solver({}, 0, TOKENS)


def test_guidance_leads_away_from_the_prediction_without_the_prompt() -> None:
    with_prompt, without = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    plain = GenerationFamily(4, (1, 2, 2)).guide(with_prompt, without, 4.0)
    assert torch.allclose(plain, 4 * with_prompt - 3 * without, atol=1e-5)
    scaled = QwenImageFamily(4, (1, 2, 2)).guide(with_prompt, without, 4.0)
    assert torch.allclose(scaled.norm(dim=-1), with_prompt.norm(dim=-1), atol=1e-5)
    assert torch.allclose(torch.cosine_similarity(scaled, plain), torch.ones(5), atol=1e-5)


def test_dynamic_guidance_follows_the_law_of_cogvideox() -> None:
    scales = [dynamic_scale(6.0, time, 50) for time in (49.0, 25.0, 0.0)]
    expected = [1 + 6 * (1 - math.cos(math.pi * ((50 - time) / 50) ** 5)) / 2 for time in (49.0, 25.0, 0.0)]
    assert scales == pytest.approx(expected)
    assert scales[-1] == 7.0
