"""The tensors of a published folder: names, shapes and types from headers, and any box of any tensor.

Weights that the folder keeps in fewer bits (`checkpoint.quantized`) appear under their usual names in the type that
config.json names; each is computed when it is read, and the last one is kept for the next box of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import CODES, box_slices, open_safetensors, read_box, stored_shape
from tessera.checkpoint.quantized import QuantizedWeight, find_quantized
from tessera.core.errors import TesseraError
from tessera.core.layouts import CONFIG_FILE, ROOT, folder_layout

_STATE_BYTES = 1 << 16


class FolderTensors:
    """Read the tensors of one component of a folder. Use it as a context: files stay open inside."""

    def __init__(self, folder: Path, component: str = ROOT) -> None:
        layout = folder_layout(folder)
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}  # types as safetensors spell them
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._quantized: dict[str, QuantizedWeight] = {}
        self._last: tuple[str, Tensor] | None = None
        with ExitStack() as opening:
            for path in layout.weight_files(component):
                file = opening.enter_context(open_safetensors(path))
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in self._files:
                        raise TesseraError(f"{name} is stored in two files", where=str(path))
                    self._files[name] = file
                    self.shapes[name], self.kinds[name] = stored_shape(file, name), file.get_slice(name).get_dtype()
            config = layout.config(component) if (layout.component_folder(component) / CONFIG_FILE).is_file() else {}
            self._find_quantized(config)
            self._stack = opening.pop_all()

    def __enter__(self) -> FolderTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or a box of it, reading no more than that where it is stored as it is."""
        shape = self.shapes[name]
        offsets, sizes = offsets or [0] * len(shape), shape if sizes is None else sizes
        weight = self._quantized.get(name)
        if weight is None:
            return read_box(self._files[name], name, offsets, sizes)
        if self._last is None or self._last[0] != name:
            parts = [self._files[part].get_tensor(part) for part in weight.parts]
            self._last = name, weight.dequantize(parts).to(self._dtype)
        return self._last[1][box_slices(offsets, sizes)]

    def _find_quantized(self, config: dict[str, Any]) -> None:
        settings = config.get("quantization_config")
        text = config.get("text_config")
        named = (
            config.get("dtype") or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else "")
        )
        self._dtype = {"float32": torch.float32, "float16": torch.float16}.get(str(named), torch.bfloat16)
        states = {
            name: self._files[name].get_tensor(name)
            for name, shape in self.shapes.items()
            if ".quant_state." in name and len(shape) == 1 and shape[0] <= _STATE_BYTES
        }
        found, used = find_quantized(
            self.shapes, self.kinds, states, settings if isinstance(settings, dict) else {}, self.where
        )
        for name in used:
            self.shapes.pop(name, None)
            self.kinds.pop(name, None)
        for name, weight in found.items():
            self._quantized[name] = weight
            self.shapes[name], self.kinds[name] = weight.shape, CODES[self._dtype]
