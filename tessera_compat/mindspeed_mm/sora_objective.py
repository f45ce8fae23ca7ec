"""Translate the section `diffusion` of a generation job: noise levels and weights to `train.task_options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera_compat.mindspeed_mm.report import JobReport, KeyRule, all_of, fixed, part_of, refused, sets, translate
from tessera_compat.mindspeed_mm.report import unneeded as _unneeded

_SAMPLING = _unneeded("it only affects sampling")
SECTION = "train.task_options."
WAN_LEVELS: dict[str, KeyRule] = {
    "num_train_timesteps": sets("steps"),
    "shift": sets("shift", float),
    "sigma_min": fixed(0, 0.0),
    "sigma_max": fixed(1, 1.0),
    "extra_one_step": fixed(True),
    **all_of(fixed(False), "inverse_timesteps reverse_sigmas"),
    **all_of(_SAMPLING, "guidance_scale num_inference_timesteps num_inference_steps"),
}
DISCRETE_LEVELS: dict[str, KeyRule] = {
    "num_train_timesteps": sets("steps"),
    "shift": _unneeded("it only shifts the noise levels of sampling"),
    "reverse": fixed(True),
    "solver": fixed("euler"),
    "logit_mean": sets("logit_mean", float),
    "logit_std": sets("logit_std", float),
    "precondition_outputs": refused("the model predicts the velocity"),
    **all_of(_SAMPLING, "n_tokens num_inference_timesteps num_inference_steps"),
}
_BOUNDARIES = ("min_timestep_boundary", "max_timestep_boundary")
_DENSITIES = {"logit_normal": "logit_normal", "mode": "mode", "none": "uniform", "uniform": "uniform"}


def read_objective(options: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Translate a `diffusion` section to options of the task."""
    name = str(section.get("model_id"))
    if name not in OBJECTIVES:
        raise TesseraError(
            f"the training objective diffusion.model_id {name!r} is not supported",
            where=source,
            allowed=OBJECTIVES,
            nearest=nearest(name, OBJECTIVES),
            code="job.diffusion-class",
        )
    report.add(source, "diffusion.model_id", name, "mapped", f"{SECTION}time" if name != "cogvideo_diffusion" else "v")
    OBJECTIVES[name](options, section, source, report)


def _wan(options: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> None:
    at = "diffusion."
    levels = translate(section, WAN_LEVELS, source, report, at, {"model_id", *_BOUNDARIES}, SECTION)
    for key, plain in (("sigma_min", "0.003 / 1.002"), ("extra_one_step", "false")):
        if key not in section:
            report.add(source, at + key, "(not set)", "not supported", f"the default is {plain}; set Wan's value")
    options |= {"time": "uniform", "shift": 3.0, **levels, "weighting": "gaussian"}
    if any(key in section for key in _BOUNDARIES):
        options["boundaries"] = wan_boundaries(section, float(options["shift"]), source)
        for key in _BOUNDARIES:
            if key in section:
                report.add(source, at + key, section[key], "mapped", f"{SECTION}boundaries: levels after the shift")


def wan_boundaries(section: Mapping[str, Any], shift: float, source: str) -> list[float]:
    """Return the range of noise levels that an expert is trained on.

    The job sets positions in the schedule, from 0 (pure noise) to 1, before the shift is applied. With shift 5,
    positions 0 to 0.417 are noise levels from 1 to 0.875: the range of the first expert of Wan 2.2.
    """
    first, last = (section.get(key, plain) for key, plain in zip(_BOUNDARIES, (0.0, 1.0), strict=True))
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in (first, last)) or not (
        0 <= first < last <= 1
    ):
        raise TesseraError(
            f"min_timestep_boundary {first!r} and max_timestep_boundary {last!r} are no valid range",
            where=source,
            allowed=["0 <= min < max <= 1"],
            code="job.timestep-boundary",
        )
    return [shift * (1 - end) / (1 + (shift - 1) * (1 - end)) for end in (last, first)]


def _discrete(options: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> None:
    levels = translate(section, DISCRETE_LEVELS, source, report, "diffusion.", {"model_id", "sample_method"}, SECTION)
    density = str(section.get("sample_method", "logit_normal"))
    if density not in _DENSITIES:
        near = nearest(density, _DENSITIES)
        raise TesseraError(
            f"diffusion.sample_method {density!r}",
            where=source,
            allowed=_DENSITIES,
            nearest=near,
            code="job.sample-method",
        )
    if "sample_method" in section:
        report.add(source, "diffusion.sample_method", density, "mapped", f"{SECTION}time")
    options |= {**levels, "time": _DENSITIES[density]}


def _cogvideo(options: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> None:
    parts = ("sigma_sampler_config", "denoiser_config")
    ignored = dict.fromkeys((key for key in section if key not in (*parts, "model_id")), _SAMPLING)
    translate(section, ignored, source, report, "diffusion.", {"model_id", *parts})
    rules = {
        "num_idx": sets("steps"),
        "uniform_sampling": fixed(True),
        "quantize_c_noise": fixed(False),
    }
    scales = set()
    for name in parts:
        part, at = part_of(section, name, source), f"diffusion.{name}."
        options |= translate(part, rules, source, report, at, {"discretization_config"}, SECTION)
        curve = part_of(part, "discretization_config", source)
        shift = translate(
            curve,
            {"shift_scale": sets("betas.snr_shift", float)},
            source,
            report,
            f"{at}discretization_config.",
            section=SECTION,
        )
        scales |= set(shift.values())
    if len(scales) > 1:
        raise TesseraError(
            f"the section diffusion has two values of shift_scale: {sorted(scales)}",
            where=source,
            fix="remove one of them",
            code="job.shift-scale",
        )
    options |= {"time": "uniform", "betas": {"snr_shift": scales.pop() if scales else 3.0, "zero_snr": True}}


OBJECTIVES: dict[str, Callable[[dict[str, Any], Mapping[str, Any], str, JobReport], None]] = {
    "wan_flow_match_scheduler": _wan,
    "flow_match_discrete_scheduler": _discrete,
    "hunyuanvideo_i2v_diffusion": _discrete,
    "cogvideo_diffusion": _cogvideo,
}
