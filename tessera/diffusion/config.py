"""The configuration of a generation transformer, whose fields are those of its config.json in diffusers folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import Batch
from tessera.diffusion.forms import GenerationForm, Grid
from tessera.errors import TesseraError, nearest
from tessera.models.text.hf import Check, check_supported
from tessera.ops.attention import AttentionBackend

# Fields of ours that are not as by default, in a config.json. diffusers passes over names that begin so.
OWN = "_tessera"
WRITTEN_AS = "0.35.0"  # the release of diffusers whose form of config.json is written


class DiffusersConfig(Section):
    """Read and write the fields of a diffusers config.json under their own names.

    A field that a file leaves out has the default of the diffusers class, so defaults here are those.
    """

    class_name: ClassVar[str]  # `_class_name` in config.json
    # Fields of a file that no field here holds -> the values that can be computed; the first is the default and is
    # what is written.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    own: ClassVar[tuple[str, ...]] = ("attention",)  # fields that no file of diffusers has

    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        where = f"config.json ({cls.class_name})"
        checks: list[Check] = [("_class_name", data.get("_class_name", cls.class_name), (cls.class_name,))]
        checks += [(name, data.get(name, values[0]), values) for name, values in cls.fixed.items()]
        check_supported(checks, where)
        known = [name for name in cls.model_fields if name not in cls.own]
        for name, value in data.items():
            # A field without effect may be left out of the class; one that says something may not be passed over.
            if name not in known and name not in cls.fixed and not name.startswith("_") and value not in (None, False):
                raise TesseraError(f"{name} is no field of {cls.class_name}", where=where, nearest=nearest(name, known))
        own = data.get(OWN) or {}
        if not isinstance(own, Mapping) or not set(own) <= set(cls.own) - {"attention"}:
            raise TesseraError(f"{OWN} is not what an export of {cls.class_name} writes: {own}", where=where)
        return build(cls, {**{name: data[name] for name in known if name in data}, **own}, where)

    def generation(self) -> GenerationForm:
        """Return how latents and captions are read."""
        raise NotImplementedError

    def proof_grid(self) -> Grid:
        """Return the size of a small sample that the model can be compared with diffusers on."""
        return (1 if self.generation().sampling.frames == 1 else 2, 2, 3)

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        """Return the arguments by which diffusers' class computes what the model here predicts for a batch of one
        sample. `latents`: those of the batch as a video, [channels, frames, rows, columns]."""
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that diffusers reads."""
        changed = self.model_dump(mode="json", include=set(self.own) - {"attention"}, exclude_defaults=True)
        return {
            "_class_name": self.class_name,
            "_diffusers_version": WRITTEN_AS,
            **self.model_dump(mode="json", exclude=set(self.own)),
            **{name: values[0] for name, values in self.fixed.items()},
            **({OWN: changed} if changed else {}),
        }
