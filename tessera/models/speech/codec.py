"""Neural codecs: turn recordings into codes, and codes into recordings.

A codec is a frozen module of transformers: Mimi, which encodes and decodes, and the decoder of Qwen3-Omni. It is loaded
from a folder of its own, or from the folder of a model that contains it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tessera.errors import TesseraError, first_line, foreign_values
from tessera.runtime.log import errors_only, without_bars
from tessera.weights.layouts import FolderLayout

T = TypeVar("T")
_LONGEST = 2000  # maximum frames of one call, or twice the context if that is more; 160 s at 12.5 Hz
_FIRST_CHUNK, _LARGEST_CHUNK = 5, 50  # frames of the first and of the largest chunk of streamed sound: 0.4 s and 4 s
_MOST_PARTS = 4096  # limit of numbers such as that of layers or codebooks
_MARGIN = 8  # frames before a chunk that the convolutions of a codec read at most


class Codec(nn.Module, ABC):
    """Encode mono sound at `rate` samples per second to codes, and decode them. `stride`: samples per frame.

    Long recordings are computed in chunks that also read the `context` frames before them, and the `ahead` frames after
    them. The result is that of one call, except for rounding.
    """

    encodes = True
    ahead = 0  # number of following frames that the sound of a frame depends on

    def __init__(self, module: nn.Module, *, rate: int, stride: int, codebooks: int, size: int, context: int) -> None:
        super().__init__()
        self.module = module
        self.rate, self.stride = rate, stride
        self.codebooks, self.size = codebooks, size  # number of codebooks, and of codes in each of them
        self.context = context
        self.longest = max(_LONGEST, 2 * context)  # maximum frames of one call, with the `context` frames before them

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @torch.no_grad()
    def encode(self, sound: Tensor, codebooks: int | None = None) -> Tensor:
        """Return codes [frames, codebooks] of a recording [samples]. The last frame may be incomplete."""
        if not self.encodes:
            raise TesseraError(
                "this codec turns codes into sound, but not sound into codes",
                where="codec",
                fix="name the folder of a codec that encodes: --codec hf://kyutai/mimi",
                code="media.codec-only-decodes",
            )
        wanted = self.codebooks if codebooks is None else codebooks
        if not 0 < wanted <= self.codebooks:
            raise TesseraError(
                f"the codec has {self.codebooks} codebooks, and {wanted} are needed",
                where="codec",
                fix="use the codec that the model was trained with",
                code="media.codec-codebooks",
            )
        frames = math.ceil(len(sound) / self.stride)
        parts = []
        for first, start, end in self._chunks(frames):
            values = sound[first * self.stride : end * self.stride].to(self.device, self.dtype)
            parts.append(self._encode(values, wanted)[start - first :])
        return torch.cat(parts) if parts else torch.empty(0, wanted, dtype=torch.int64)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return the sound [samples] of codes [frames, codebooks], on the host."""
        check_codes(codes, self.codebooks, self.size)
        chunks = [(start, end) for _, start, end in self._chunks(len(codes))]
        parts = [self.decode_chunk(codes, start, end, last=end == len(codes)) for start, end in chunks]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def decode_chunk(self, codes: Tensor, start: int, end: int, *, last: bool) -> Tensor:
        """Return the sound [samples] of frames `start` to `end`, on the host.

        `codes`: [frames, codebooks] from the first frame of the speech to at least `ahead` frames after `end`, or to
        its last frame. `last`: whether the sound ends with this chunk.
        """
        first = max(0, start - self.context)
        sound = self._decode(codes[first : end + self.ahead].to(self.device))
        return sound[(start - first) * self.stride : None if last else (end - first) * self.stride].cpu()

    def _chunks(self, frames: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first frame that is read, and the bounds of the frames whose result is used."""
        start, end = 0, min(frames, self.longest)
        while start < frames:
            yield max(0, start - self.context), start, end
            start, end = end, min(frames, end + self.longest - self.context)

    @abstractmethod
    def _encode(self, sound: Tensor, codebooks: int) -> Tensor: ...

    @abstractmethod
    def _decode(self, codes: Tensor) -> Tensor: ...


class SoundStream:
    """Decode speech in chunks while its codes are generated. Together the chunks are the sound of `Codec.decode`.

    After the first ones, a chunk is at most half as long as the sound before it: a model that generates 1.5 times as
    fast as its sound plays never lets a player wait.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._frames: list[Tensor] = []
        self._decoded = 0  # number of frames

    def add(self, codes: Tensor) -> Tensor | None:
        """Add a frame [codebooks], and return the next chunk [samples], or None while there are too few frames."""
        self._frames.append(codes)
        ready = len(self._frames) - self._codec.ahead
        if ready - self._decoded < min(max(_FIRST_CHUNK, self._decoded // 2), _LARGEST_CHUNK):
            return None
        return self._next(ready, last=False)

    def close(self) -> Tensor:
        """Return the last chunk, which may be empty."""
        if self._decoded == len(self._frames):
            return torch.empty(0)
        return self._next(len(self._frames), last=True)

    def _next(self, end: int, *, last: bool) -> Tensor:
        start, self._decoded = self._decoded, end
        before = max(0, start - self._codec.context)
        codes = torch.stack(self._frames[before:])
        check_codes(codes, self._codec.codebooks, self._codec.size)
        return self._codec.decode_chunk(codes, start - before, end - before, last=last)


def check_codes(codes: Tensor, codebooks: int, size: int) -> None:
    """Raise unless the codes [frames, K] are codes of the first K of the codebooks."""
    if codes.ndim != 2 or not 0 < codes.shape[1] <= codebooks:
        raise TesseraError(
            f"codes must be [frames, codebooks] with at most {codebooks} codebooks, not {tuple(codes.shape)}",
            fix="use the codec that made the codes",
            code="media.codes-shape",
        )
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < size:
        raise TesseraError(
            f"codes must be between 0 and {size - 1}, and these are between {int(codes.min())} and {int(codes.max())}",
            fix="use the codec that made the codes",
            code="media.codes-range",
        )


class MimiCodec(Codec):
    """Use Mimi, whose decoder also accepts the first codebooks alone."""

    def __init__(self, module: Any) -> None:
        config = module.config
        window = config.num_hidden_layers * config.sliding_window  # positions that attention reads
        positions = int(config.encodec_frame_rate / config.frame_rate)  # number of positions of each frame
        super().__init__(
            module,
            rate=config.sampling_rate,
            stride=config.frame_size,
            codebooks=config.num_quantizers,
            size=config.codebook_size,
            context=math.ceil(window / positions) + _MARGIN,
        )

    def _encode(self, sound: Tensor, codebooks: int) -> Tensor:
        codes: Tensor = self.module.encode(sound[None, None], num_quantizers=codebooks).audio_codes  # type: ignore[operator]
        return codes[0].T

    def _decode(self, codes: Tensor) -> Tensor:
        sound: Tensor = self.module.decode(codes.T[None]).audio_values  # type: ignore[operator]
        return sound[0, 0]


class WaveDecoder(Codec):
    """Use the decoder of Qwen3-Omni. It needs the codes of all its codebooks.

    Its transposed convolutions drop the end of the sound, so n frames give less than n times `stride` samples.
    """

    encodes = False
    ahead = 4

    def __init__(self, module: Any) -> None:
        config = module.config
        super().__init__(
            module,
            rate=24_000,
            stride=int(module.total_upsample),
            codebooks=config.num_quantizers,
            size=config.codebook_size,
            context=config.num_hidden_layers * config.sliding_window + _MARGIN,
        )

    def _encode(self, sound: Tensor, codebooks: int) -> Tensor:
        raise NotImplementedError

    def _decode(self, codes: Tensor) -> Tensor:
        sound: Tensor = self.module(codes.T[None])
        return sound[0, 0]


# ---------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True)
class CodecSource:
    """Describe where a codec is stored in a folder: its key in config.json, and the prefix of its tensors."""

    codec: Callable[[nn.Module], Codec]
    classes: tuple[str, str]  # class of the configuration and of the module in transformers
    key: str = ""  # "": the folder has nothing but the codec
    prefix: str = ""


_MIMI = ("MimiConfig", "MimiModel")
_WAVE_CLASSES = ("Qwen3OmniMoeCode2WavConfig", "Qwen3OmniMoeCode2Wav")
# `model_type` of a folder's config.json -> how to load the codec from this folder.
SOURCES: Mapping[str, CodecSource] = {
    "mimi": CodecSource(MimiCodec, _MIMI),
    "csm": CodecSource(MimiCodec, _MIMI, "codec_config", "codec_model."),
    "qwen3_omni_moe": CodecSource(WaveDecoder, _WAVE_CLASSES, "code2wav_config", "code2wav."),
}


def has_codec(folder: Path) -> bool:
    """Return whether config.json of a folder describes a codec."""
    if not FolderLayout.detect(folder):
        return False
    config = FolderLayout(folder).config()
    source = SOURCES.get(str(config.get("model_type")))
    return source is not None and (not source.key or isinstance(config.get(source.key), dict))


def load_codec(folder: Path) -> Codec:
    """Return the codec of a folder, with its weights in float32, on the host."""
    if not has_codec(folder):
        raise TesseraError(
            "the folder contains no codec",
            where=str(folder),
            allowed=list(SOURCES),
            fix="name the folder of a codec, such as hf://kyutai/mimi, or of a model that contains its codec",
            code="media.no-codec",
        )
    layout = FolderLayout(folder)
    config = layout.config()
    source = SOURCES[config["model_type"]]
    try:
        config_class, module_class = _classes(source.classes)
    except (ImportError, AttributeError) as error:
        raise TesseraError(
            f"the codec needs {source.classes[1]} of transformers: {first_line(error)}",
            where=str(folder),
            fix="pip install tessera-mm[hf]",
            code="environment.component-library-missing",
        ) from None
    with foreign_values(str(folder)):
        settings = _settings(config_class, config[source.key] if source.key else config)
        shapes = _stored(layout, source.prefix, lambda file, name: tuple(file.get_slice(name).get_shape()))
        _check_shapes(module_class, settings, shapes, folder)
        tensors = _stored(layout, source.prefix, lambda file, name: file.get_tensor(name))
        module = _filled(module_class, settings, tensors, folder)
        return source.codec(module).requires_grad_(False).eval()


def _classes(names: tuple[str, str]) -> tuple[Any, Any]:
    import transformers

    if names == _WAVE_CLASSES:  # transformers does not export these classes at the top level
        from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

        return getattr(configuration_qwen3_omni_moe, names[0]), getattr(modeling_qwen3_omni_moe, names[1])
    return getattr(transformers, names[0]), getattr(transformers, names[1])


def _settings(config_class: Any, values: Mapping[str, Any]) -> Any:
    """Return the configuration of a codec. Raise ValueError for values that transformers refuses, or would build
    modules from for hours."""
    from huggingface_hub.errors import StrictDataclassError

    for name, value in values.items():
        if name.startswith("num_") and isinstance(value, (int, float)) and not 0 <= value <= _MOST_PARTS:
            raise ValueError(f"{name} = {value!r:.40} is not between 0 and {_MOST_PARTS}")
    try:
        return config_class.from_dict(dict(values))
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _stored(layout: FolderLayout, prefix: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """Return what `read(file, name)` returns for each tensor whose name begins with `prefix`, by name without it."""
    values: dict[str, T] = {}
    for path in layout.weight_files():
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
                values |= {name.removeprefix(prefix): read(file, name) for name in names}
        except (SafetensorError, OSError) as error:
            raise _incomplete(path, first_line(error)) from error
    return values


def _check_shapes(module_class: Any, config: Any, stored: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise if config.json implies tensors of shapes that the files do not have, before their memory is allocated.

    Names are not compared, because transformers renames tensors when it reads and writes them.
    """
    try:
        with torch.device("meta"):
            tensors = module_class(config).state_dict()
    except RuntimeError as error:
        raise _incomplete(folder, first_line(error)) from error
    rest, lacking = Counter(stored.values()), list[str]()
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        rest[shape] -= 1
        if rest[shape] < 0:
            lacking.append(f"{name} {list(shape)}")
    if lacking:
        reason = f"the files lack {len(lacking)} tensors that config.json implies, such as {lacking[0]}"
        raise _incomplete(folder, reason)


def _filled(module_class: Any, config: Any, tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    """Return the module with its weights. `from_pretrained` also renames tensors that were stored by older versions."""
    import transformers

    try:
        with without_bars(transformers), errors_only(transformers):
            module, report = module_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
                local_files_only=True,
            )
    except (RuntimeError, OSError) as error:
        raise _incomplete(folder, first_line(error)) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise _incomplete(folder, f"{len(lacking)} tensors are missing or have another shape, such as {lacking[0]}")
    filled: nn.Module = module
    return filled


def _incomplete(path: Path, reason: str) -> TesseraError:
    return TesseraError(
        f"cannot read the weights of the codec: {reason}",
        where=str(path),
        fix="download or copy this folder again",
        code="media.codec-unreadable",
    )
