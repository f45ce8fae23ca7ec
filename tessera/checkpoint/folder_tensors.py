"""Read tensors of a published model's folder: names, shapes and dtypes from headers, and slices of tensors.

Quantized weights (`checkpoint.quantized`) appear under their usual names in the dtype of config.json, or in bfloat16 if
it names neither float32 nor float16. Each is dequantized when it is read. The last dequantized tensor is cached, for
further slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import CODES, DTYPES, box_slices, data_positions, open_safetensors, stored_shape
from tessera.checkpoint.quantized import QuantizedWeight, find_quantized
from tessera.errors import TesseraError, few_names
from tessera.weights.file_plan import map_elements
from tessera.weights.layouts import CONFIG_FILE, ROOT, folder_layout

_STATE_BYTES = 1 << 16


class FolderTensors:
    """Read the tensors of a folder. It is a context manager, which keeps the files open.

    For a diffusers folder, these are the tensors of its transformer.
    """

    def __init__(self, folder: Path) -> None:
        layout = folder_layout(folder)
        home = layout.component_folder(ROOT)
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}  # tensor name -> dtype, as safetensors spells it
        self.files: dict[str, str] = {}  # tensor name -> file name
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int, str, tuple[int, ...]]] = {}  # file, byte position, dtype, shape
        self._quantized: dict[str, QuantizedWeight] = {}
        self._last: tuple[str, Tensor] | None = None
        with ExitStack() as opening:
            for path in layout.weight_files():
                file = opening.enter_context(open_safetensors(path))
                positions = data_positions(path)
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in self._files:
                        raise TesseraError(
                            f"{name} is stored in two files", where=str(path), code="weights.duplicate-tensor"
                        )
                    self._files[name] = file
                    self.shapes[name], self.kinds[name] = stored_shape(file, name), file.get_slice(name).get_dtype()
                    self.files[name] = path.name
                    self._places[name] = path, positions[name], self.kinds[name], self.shapes[name]
            if lost := [name for name in layout.indexed_tensors() if name not in self._files]:
                raise TesseraError(
                    f"the index lists tensors that no file contains: {few_names(lost)}",
                    where=str(home / layout.index_file(ROOT)),
                    fix="download or copy the folder again; if the tensors were removed on purpose, delete the index",
                    code="weights.index-mismatch",
                )
            config = layout.config() if (home / CONFIG_FILE).is_file() else {}
            self._find_quantized(config)
            self._stack = opening.pop_all()

    def __enter__(self) -> FolderTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or a box (offsets and sizes) of it. A quantized tensor is read in full, unless cached."""
        shape, all_soon = self.shapes[name], sizes is None
        offsets, sizes = offsets or [0] * len(shape), shape if sizes is None else sizes
        weight, last = self._quantized.get(name), self._last
        if weight is None:
            return self._mapped(name, all_soon)[box_slices(offsets, sizes)]
        if last is None or last[0] != name:  # `last` is local: another thread may replace the cache
            last = name, weight.dequantize([self._mapped(part) for part in weight.parts]).to(self._dtype)
            self._last = last
        return last[1][box_slices(offsets, sizes)]

    def _mapped(self, name: str, all_soon: bool = False) -> Tensor:
        """Return a stored tensor in a memory map of its own, which is unmapped when the tensor is freed."""
        path, position, kind, shape = self._places[name]
        if kind not in DTYPES:
            tensor: Tensor = self._files[name].get_tensor(name)
            return tensor
        return map_elements(path, position, prod(shape), DTYPES[kind], all_soon=all_soon).view(shape)

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
        quantized, used = find_quantized(
            self.shapes, self.kinds, states, settings if isinstance(settings, dict) else {}, self.where
        )
        for name in used:
            self.shapes.pop(name, None)
            self.kinds.pop(name, None)
        for name, weight in quantized.items():
            self._quantized[name] = weight
            self.shapes[name], self.kinds[name] = weight.shape, CODES[self._dtype]
