"""Configurations of generation transformers, with the fields of config.json in diffusers folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import Batch
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.given_images import Grid, patchify
from tessera.errors import TesseraError, nearest
from tessera.models.text.hf import Check, check_supported
from tessera.ops.attention import AttentionBackend

# Key of config.json for fields that only Tessera reads. diffusers ignores keys that begin with an underscore.
NATIVE = "_tessera"
WRITTEN_AS = "0.35.0"  # the diffusers release whose config.json format is written


class DiffusersConfig(Section):
    """Read and write a diffusers config.json. Fields have the names that they have in the file.

    Defaults are those of the diffusers class, because a config.json may lack fields.
    """

    class_name: ClassVar[str]  # `_class_name` in config.json
    # Fields of config.json with few supported values. The first value is the default and is written to exports.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    native: ClassVar[tuple[str, ...]] = ("attention",)  # fields of Tessera, which the diffusers class does not have

    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        where = f"config.json ({cls.class_name})"
        checks: list[Check] = [("_class_name", data.get("_class_name", cls.class_name), (cls.class_name,))]
        checks += [(name, data.get(name, values[0]), values) for name, values in cls.fixed.items()]
        check_supported(checks, where)
        names = [name for name in cls.model_fields if name not in cls.native]
        for name, value in data.items():
            # An unknown field that is None or False has no effect. Any other unknown field is refused.
            if name not in names and name not in cls.fixed and not name.startswith("_") and value not in (None, False):
                raise TesseraError(
                    f"{name} is not a field of {cls.class_name}",
                    where=where,
                    nearest=nearest(name, names),
                    code="model.unknown-config-field",
                )
        native = data.get(NATIVE) or {}
        if not isinstance(native, Mapping) or not set(native) <= set(cls.native) - {"attention"}:
            raise TesseraError(
                f"{NATIVE} of {cls.class_name} has unexpected content: {native}",
                where=where,
                code="model.bad-native-config",
            )
        return build(cls, {**{name: data[name] for name in names if name in data}, **native}, where)

    def generation(self) -> GenerationFamily:
        """Return how the model reads latents and captions, and how samples are generated."""
        raise NotImplementedError

    def proof_grid(self) -> Grid:
        """Return the size in tokens (frames, rows, columns) of a small sample for the comparison with diffusers."""
        return (1 if self.generation().sampling.frames == 1 else 2, 2, 3)

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        """Return the arguments of the diffusers class for a batch of one sample, for the comparison of predictions.
        `latents`: [channels, frames, rows, columns]."""
        raise NotImplementedError

    def diffusers_tokens(self, prediction: Tensor) -> Tensor:
        """Return the prediction of the diffusers class for one sample as tokens. `prediction`: tokens, an image [C, H,
        W] or a video [C, F, H, W]."""
        if prediction.ndim == 2:
            return prediction
        video = prediction[:, None] if prediction.ndim == 3 else prediction
        return patchify(video, self.generation().patch)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json for diffusers."""
        changed = self.model_dump(mode="json", include=set(self.native) - {"attention"}, exclude_defaults=True)
        return {
            "_class_name": self.class_name,
            "_diffusers_version": WRITTEN_AS,
            **self.model_dump(mode="json", exclude=set(self.native)),
            **{name: values[0] for name, values in self.fixed.items()},
            **({NATIVE: changed} if changed else {}),
        }
