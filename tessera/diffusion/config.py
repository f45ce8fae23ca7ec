"""The configuration of a generation transformer, whose fields are those of its config.json in diffusers folders."""

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

# The key of a config.json with fields that diffusers does not have. diffusers ignores names with this first letter.
NATIVE = "_tessera"
WRITTEN_AS = "0.35.0"  # the release of diffusers whose form of config.json is written


class DiffusersConfig(Section):
    """Read and write the fields of a diffusers config.json under their own names.

    A field that a file leaves out has the default of the diffusers class, so defaults here are those.
    """

    class_name: ClassVar[str]  # `_class_name` in config.json
    # Fields of a file that no field here holds -> the values that can be computed; the first is the default and is
    # what is written.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    native: ClassVar[tuple[str, ...]] = ("attention",)  # fields that files of diffusers do not have

    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        where = f"config.json ({cls.class_name})"
        checks: list[Check] = [("_class_name", data.get("_class_name", cls.class_name), (cls.class_name,))]
        checks += [(name, data.get(name, values[0]), values) for name, values in cls.fixed.items()]
        check_supported(checks, where)
        names = [name for name in cls.model_fields if name not in cls.native]
        for name, value in data.items():
            # A field without effect may be missing from the class; one with a value may not be ignored.
            if name not in names and name not in cls.fixed and not name.startswith("_") and value not in (None, False):
                raise TesseraError(
                    f"{name} is no field of {cls.class_name}",
                    where=where,
                    nearest=nearest(name, names),
                    code="model.unknown-config-field",
                )
        native = data.get(NATIVE) or {}
        if not isinstance(native, Mapping) or not set(native) <= set(cls.native) - {"attention"}:
            raise TesseraError(
                f"{NATIVE} is not as an export of {cls.class_name} writes it: {native}",
                where=where,
                code="model.bad-native-config",
            )
        return build(cls, {**{name: data[name] for name in names if name in data}, **native}, where)

    def generation(self) -> GenerationFamily:
        """Return how latents and captions are read, and how samples are drawn."""
        raise NotImplementedError

    def proof_grid(self) -> Grid:
        """Return the size of a small sample that the model can be compared with diffusers on."""
        return (1 if self.generation().sampling.frames == 1 else 2, 2, 3)

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        """Return the arguments by which diffusers' class computes what the model here predicts for a batch of one
        sample. `latents`: those of the batch as a video, [channels, frames, rows, columns]."""
        raise NotImplementedError

    def diffusers_tokens(self, prediction: Tensor) -> Tensor:
        """Return the prediction of diffusers' class for one sample as tokens: it is of tokens, of an image [C, H, W]
        or of a video [C, F, H, W]."""
        if prediction.ndim == 2:
            return prediction
        video = prediction[:, None] if prediction.ndim == 3 else prediction
        return patchify(video, self.generation().patch)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that diffusers reads."""
        changed = self.model_dump(mode="json", include=set(self.native) - {"attention"}, exclude_defaults=True)
        return {
            "_class_name": self.class_name,
            "_diffusers_version": WRITTEN_AS,
            **self.model_dump(mode="json", exclude=set(self.native)),
            **{name: values[0] for name, values in self.fixed.items()},
            **({NATIVE: changed} if changed else {}),
        }
