"""Load the frozen components of a diffusers folder: VAE, text encoders and image encoder.

Components are classes of diffusers and transformers, or a family's own VAE. Only listed classes are imported, whatever
model_index.json names. Weights are read only from safetensors files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tessera.diffusion.autoencoders import VAE, VAES, Autoencoder, VaeForm, read_vae_form, vae_class
from tessera.diffusion.captions import TEXT_ENCODERS, Captions, TextEncoder
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, IMAGE_ENCODERS, FrameEncoder, read_frame_form
from tessera.errors import TesseraError, first_line, foreign_values, nearest
from tessera.runtime.log import without_bars
from tessera.weights.layouts import DiffusersFolder


@dataclass(frozen=True)
class PipelineFolder:
    """Load components of a diffusers folder. `vaes`: wrappers of VAEs that the family supports, by class name."""

    folder: Path
    vaes: Mapping[str, type[Autoencoder]] = field(default_factory=lambda: VAES)

    @property
    def layout(self) -> DiffusersFolder:
        if not DiffusersFolder.detect(self.folder):
            raise TesseraError(
                f"{self.folder} has no {DiffusersFolder.marker}, so it is not a diffusers folder with VAE "
                "and text encoders",
                where="train.task_options.encoders.folder",
                fix="set this key to the folder of a diffusers pipeline, or write features first and train on them: "
                "tessera data features",
                code="generation.not-a-pipeline-folder",
            )
        return DiffusersFolder(self.folder)

    def vae_form(self) -> VaeForm:
        """Return strides and scaling of the VAE's latents."""
        return read_vae_form(self.vaes, self.layout.config(VAE), str(self.layout.component_folder(VAE)))

    def autoencoder(
        self, *, dtype: torch.dtype = torch.float32, tiling: bool = False, slicing: bool = False, meta: bool = False
    ) -> Autoencoder:
        """Return the VAE on the host. `tiling`, `slicing`: save memory by overlapping tiles of frames, and by one video
        at a time. `meta`: create the module on the meta device, without weights."""
        layout = self.layout
        wrapper = vae_class(self.vaes, layout.index[VAE][1], str(self.folder / layout.marker))
        with torch.device("meta"):
            module = wrapper.build(layout.config(VAE))
        if module is None:
            module = self._component(VAE, "diffusers", list(self.vaes), dtype, meta)
        else:
            module = self._filled(module.to(dtype), meta)
        vae = wrapper(module, self.vae_form())
        vae.spare_memory(tiling=tiling, slicing=slicing)
        return vae

    def text_encoder(
        self, captions: Captions, *, dtype: torch.dtype = torch.float32, meta: bool = False
    ) -> TextEncoder:
        """Return a text encoder on the host, or on the meta device."""
        encoder = self._component(captions.encoder, "transformers", TEXT_ENCODERS, dtype, meta)
        pad = captions.pad if captions.pad is not None else self.layout.config(captions.encoder).get("pad_token_id")
        return captions.module(encoder, self.folder, pad if isinstance(pad, int) else 0)

    def frame_encoder(self, *, dtype: torch.dtype = torch.float32, meta: bool = False) -> FrameEncoder:
        """Return the encoder of conditioning frames on the host, or on the meta device."""
        encoder = self._component(IMAGE_ENCODER, "transformers", IMAGE_ENCODERS, dtype, meta)
        return FrameEncoder(encoder, read_frame_form(self.folder, type(encoder).__name__, encoder.config))

    def image_processor(self, name: str) -> Any:
        """Return the image processor of transformers from the folder of the component `name`."""
        folder = self.layout.component_folder(name)
        try:
            from transformers import AutoImageProcessor

            with foreign_values(str(folder)):
                return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (ImportError, OSError) as error:
            raise TesseraError(
                f"transformers cannot read {name}: {first_line(error)}",
                where=str(folder),
                fix="pip install tessera-mm[hf], or download this folder again",
                code="generation.unreadable-preprocessor",
            ) from None

    def _filled(self, module: nn.Module, meta: bool) -> nn.Module:
        """Return a family's own VAE, filled with the weights of the folder."""
        if meta:
            return module
        files = self.layout.weight_files(VAE)  # raises for pickles and for files outside of the folder
        try:
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
            cast = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
            module.load_state_dict(cast, assign=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise TesseraError(
                f"cannot read the weights of {VAE}: {first_line(error)}",
                where=str(self.folder / VAE),
                code="generation.unreadable-vae",
            ) from error
        return module

    def _component(self, name: str, library: str, allowed: Sequence[str], dtype: torch.dtype, meta: bool) -> nn.Module:
        layout = self.layout
        folder, named = layout.component_folder(name), layout.index[name][1]
        if named not in allowed:
            raise TesseraError(
                f"this family does not support the class {named!r} of {name}",
                where=str(self.folder / layout.marker),
                allowed=allowed,
                nearest=nearest(named, allowed),
                code="generation.unknown-component-class",
            )
        try:
            component_class = getattr(_library(library), named)
        except (ImportError, AttributeError) as error:
            raise TesseraError(
                f"{name} of {self.folder} needs the class {named} of {library}, which is missing or too old: "
                f"{first_line(error)}",
                where=name,
                fix="pip install tessera-mm[hf]",
                code="environment.component-library-missing",
            ) from None
        with foreign_values(str(folder)):
            if meta:
                return _on_meta(component_class, library, folder, dtype)
            layout.weight_files(name)  # raises for pickles and for files outside of the folder
            word = "torch_dtype" if library == "diffusers" else "dtype"
            try:
                with without_bars(_library(library)):
                    module: nn.Module = component_class.from_pretrained(
                        folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **{word: dtype}
                    )
            except (OSError, RuntimeError, SafetensorError) as error:  # truncated files, tensors with wrong shapes
                message = f"{library} cannot read the weights of {name}: {first_line(error)}"
                raise TesseraError(
                    message,
                    where=str(folder),
                    fix="download or copy this folder again",
                    code="generation.incomplete-pipeline-folder",
                ) from error
            return module


def _library(name: str) -> Any:
    """Import diffusers or transformers. The import is slow, so it happens only when needed."""
    if name == "diffusers":
        import diffusers

        return diffusers
    import transformers

    return transformers


def _on_meta(component_class: Any, library: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return a component on the meta device, in the data type that `from_pretrained` would give it."""
    with torch.device("meta"):
        if library == "diffusers":
            module: nn.Module = component_class.from_config(component_class.load_config(folder))
        else:
            config = component_class.config_class.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            module = component_class(config)
    return nn.Module.to(module, dtype)  # `to` of diffusers' classes logs a warning for every cast
