"""The processor that transformers loads from a model folder: tokenizer, image preprocessor, chat template."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from tessera.errors import TesseraError, first_line
from tessera.models.files.side_files import IMAGE_FILE, copy_side_files
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.runtime.files import read_json_mapping

ImageBackend = Literal["pil", "torchvision"]  # names of image preprocessor backends in transformers
CONFIG = "config.json"
_CODE_FILES = (CONFIG, "processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_INSTALL_TORCHVISION = "pip install torchvision, in the release that belongs to the installed torch"
_KEPT_SIZES = 4096  # maximum number of image sizes for which preprocessor outputs are cached
_SMALL = 4096  # tensors with at most this many elements keep their values in the cache


def load_processor(folder: Path, config: Mapping[str, Any] | None = None, image_backend: ImageBackend = "pil") -> Any:
    """Return transformers' processor of a model folder, or the tokenizer for text-only classes.

    `config`: content of config.json, for a folder without this file. Python code in the folder is never run.

    `image_backend`: library that resizes images. transformers prefers torchvision if it is installed, and its pixels
    differ from Pillow's, so the backend is set explicitly.

    Processors with a video part need torchvision. Without torchvision, the processor is built without its video part.
    """
    if config is not None and not (folder / CONFIG).is_file():
        with tempfile.TemporaryDirectory() as name:
            copy_side_files(folder, Path(name))
            (Path(name) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            return load_processor(Path(name), image_backend=image_backend)
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ImportError, ValueError):  # ValueError if the folder has no preprocessor file for videos
        if importlib.util.find_spec("torchvision") is not None:
            raise
        without = _without_video(folder, image_backend)
        if without is None:
            raise
        return without
    if getattr(processor, "image_processor", None) is not None:
        processor.image_processor = load_image_processor(folder, image_backend)
    return processor


def load_image_processor(folder: Path, backend: ImageBackend = "pil") -> Any:
    """Return the folder's image preprocessor with the given backend, whichever backends are installed."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True, trust_remote_code=False)


def _without_video(folder: Path, image_backend: ImageBackend) -> Any:
    """Return the folder's processor without its video part; None if the processor has no video part."""
    import transformers
    from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    kind: Any = PROCESSOR_MAPPING.get(type(settings), None)
    if kind is None:  # part of a larger model, such as a thinker: the preprocessor file names the class
        named = read_json_mapping(folder / IMAGE_FILE) if (folder / IMAGE_FILE).is_file() else {}
        kind = getattr(transformers, str(named.get("processor_class")), None)
    is_processor = isinstance(kind, type) and issubclass(kind, transformers.ProcessorMixin)
    if not is_processor or "video_processor" not in kind.get_attributes():
        return None
    images = load_image_processor(folder, image_backend)

    class WithoutVideo(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {
        "image_processor": lambda: images,
        "feature_extractor": lambda: AutoFeatureExtractor.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        ),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True),
        # Qwen2.5-Omni's processor reads the merge size from its video part, also for images.
        "video_processor": lambda: images if "feature_extractor" in kind.get_attributes() else None,
    }
    fields, _ = kind.get_processor_dict(folder)
    return WithoutVideo.from_args_and_dict([parts[name]() for name in kind.get_attributes()], fields)  # type: ignore[no-untyped-call]


def checked_processor(folder: Path | None, config: Mapping[str, Any], image_backend: ImageBackend = "pil") -> Any:
    """Return transformers' processor of a model folder. Failures are raised as `TesseraError` with a fix."""
    if image_backend == "torchvision" and importlib.util.find_spec("torchvision") is None:
        raise TesseraError(
            "torchvision is not installed",  # without this error transformers would use Pillow silently
            where="data.processor.image_backend",
            allowed=["pil"],
            fix=_INSTALL_TORCHVISION,
            code="environment.torchvision-missing",
        )
    if folder is None or not any(folder.glob("tokenizer*")):
        raise TesseraError(
            "there is no tokenizer for conversations" + ("" if folder is None else f" in {folder}"),
            where="model.path or model.tokenizer",
            fix="copy the model's tokenizer and processor files to its folder, or set their folder as "
            "model.tokenizer; your own data kind (data.kind) needs none",
            code="tokenizer.files-missing",
        )
    if (folder / "tokenizer.json").is_file():
        load_tokenizer(folder)  # raises an error if tokenizer.json is invalid, before transformers reads it
    try:
        return load_processor(folder, config, image_backend)
    except ImportError as error:
        needs_torchvision = "torchvision" in str(error).lower()
        raise TesseraError(
            f"the processor of this folder needs a missing package: {first_line(error)}",
            where=str(folder),
            fix=_INSTALL_TORCHVISION if needs_torchvision else "install it, or set another folder as model.tokenizer",
            code="environment.processor-needs-package",
        ) from None
    except Exception as error:  # damaged files raise errors of any kind
        code = _code_in(folder)
        if code is not None:
            raise TesseraError(
                f"the processor of this folder is Python code in the folder ({code}), which is never run",
                where=str(folder),
                fix="use a folder for a class of transformers (often published with -hf in its name), "
                "or your own data kind (data.kind)",
                code="tokenizer.code-in-folder",
            ) from None
        raise TesseraError(
            f"transformers cannot load the processor of this folder: {first_line(error)}",
            where=str(folder),
            fix="compare its files with the published ones: tokenizer.json, "
            "tokenizer_config.json, preprocessor_config.json or processor_config.json",
            code="tokenizer.processor-unreadable",
        ) from error


def _code_in(folder: Path) -> str | None:
    for name in _CODE_FILES:
        if (folder / name).is_file():
            with contextlib.suppress(TesseraError):
                if read_json_mapping(folder / name).get("auto_map"):
                    return f"auto_map in {name}"
    return None


def chat_template(processor: Any, tokenizer: Any) -> str | None:
    """Return the chat template of a processor. If it has several, return the one named "default"."""
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) and template.strip() else None


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any exception of the block into a `TesseraError` about the current sample."""
    try:
        yield
    except TesseraError:
        raise
    except Exception as error:
        raise TesseraError(f"{what}: {first_line(error)}", code="data.processor-refuses") from None


def with_parts(processor: Any, **parts: Any) -> Any:
    """Return a copy of a processor with some attributes replaced."""
    changed = copy.copy(processor)
    for name, part in parts.items():
        setattr(changed, name, part)
    return changed


class SizedImages:
    """Stand in for an image preprocessor where only image sizes matter. Its outputs are cached by image size."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._outputs: OrderedDict[Any, Any] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        key = (_sizes(images), repr(args), repr(sorted(options.items(), key=lambda option: option[0])))
        if key not in self._outputs:
            outputs = self._real(images, *args, **options)
            for name, value in outputs.items():
                outputs[name] = _shape_of(value)
            self._outputs[key] = outputs
            if len(self._outputs) > _KEPT_SIZES:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(key)
        return copy.copy(self._outputs[key])  # a copy, because the processor removes entries from it


def _shape_of(value: Any) -> Any:
    """Replace a large tensor of pixels by expanded zeros of the same shape, which take no memory; keep other values."""
    if isinstance(value, list):
        return [_shape_of(item) for item in value]
    large = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > _SMALL
    return value.new_zeros(()).expand(value.shape) if large else value


def _sizes(images: Any) -> Any:
    if isinstance(images, Sequence):
        return tuple(_sizes(image) for image in images)
    return images.size
