"""Translate `--hetero-parallel`: the decoder and each encoder are split over ranks by the sizes in their sections of
`model.json`, and the sizes on the command line are 1."""

from __future__ import annotations

from typing import Any

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.model_json import ModelFile
from tessera_compat.mindspeed_mm.report import JobReport, part_of

_FLAGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
_ENCODERS = {"image_encoder": "vision", "audio_encoder": "audio"}


def set_decoder_sizes(args: Any) -> None:
    """Set the parallel sizes of the command line from the section of the decoder."""
    sizes = _sizes(args, "text_decoder") if args.hetero_parallel else {}
    for key, size in sizes.items():
        flag = getattr(args, _FLAGS[key])
        if flag not in (1, size):
            raise TesseraError(
                f"text_decoder.{key} is {size}, but --{_FLAGS[key].replace('_', '-')} is {flag}",
                where=args.mm_model or "section model",
                fix="leave out the flag: with --hetero-parallel the sizes are in model.json",
                code="job.parallel-size-differs",
            )
        setattr(args, _FLAGS[key], size)


def set_encoder_layouts(args: Any, model: ModelFile, report: JobReport) -> dict[str, dict[str, int]]:
    """Return `parallel.encoders` of the recipe. An encoder without pipeline parallelism is on the first stage only."""
    encoders: dict[str, dict[str, int]] = {}
    if not args.hetero_parallel:
        return encoders
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    for key in _sizes(args, "text_decoder"):
        report.change(f"text_decoder.{key}", f"parallel.{key}", "mapped")
    for name, part in _ENCODERS.items():
        sizes = _sizes(args, name)
        if sizes.get("pp", 1) not in (1, args.pipeline_model_parallel_size):
            note = f"1 or {args.pipeline_model_parallel_size}, the pipeline stages of the decoder"
            report.change(f"{name}.pp", note, "not supported")
        if sizes.get("pp", 1) == 1 and len(model.layers.get(part, ())) == 1:
            model.layers[part] += [0] * (stages - 1)  # the other stages have no layers of this encoder
        split = {key: sizes.get(key, getattr(args, _FLAGS[key])) for key in ("tp", "cp")}
        if any(size != getattr(args, _FLAGS[key]) for key, size in split.items()):
            encoders[part] = split
            for key in ("tp", "cp"):
                report.change(f"{name}.{key}", f"parallel.encoders.{part}.{key}", "mapped")
    return encoders


def _sizes(args: Any, name: str) -> dict[str, int]:
    """Return the parallel sizes in a section of model.json."""
    where = args.mm_model or "section model"
    section = part_of(args.mm.model.to_dict(), name, where)
    sizes = {key: section[key] for key in _FLAGS if section.get(key) is not None}
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise TesseraError(
                f"{name}.{key} must be a number of ranks, not {size!r}",
                where=where,
                fix=f'"{key}": 1',
                code="job.parallel-size",
            )
    return sizes
