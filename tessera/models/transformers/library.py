"""The processor that transformers itself makes from a folder: tokenizer, image preprocessor, chat template."""

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
from tessera.models.files.side_files import copy_side_files
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.runtime.files import read_json_mapping

ImageBackend = Literal["pil", "torchvision"]  # as the library names what its image preprocessors compute with
CONFIG = "config.json"
_CODE_FILES = (CONFIG, "processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_INSTALL_TORCHVISION = "pip install torchvision, in the release that belongs to the installed torch"
_KEPT_SIZES = 4096  # sizes of images whose preprocessed form is known: many samples have images of one size
_SMALL = 4096  # elements of a tensor that is kept with its values


def load_processor(folder: Path, config: Mapping[str, Any] | None = None, image_backend: ImageBackend = "pil") -> Any:
    """Return the processor of a folder: with images, or the tokenizer of a class that reads text alone.

    `config`: the content of config.json, for a folder without one. Code that lies in the folder is never run.

    `image_backend`: what the image preprocessor computes with. Where torchvision is installed the library prefers it,
    and its resized pixels differ from those of Pillow: what is trained must not depend on what is installed.

    The video part of a processor needs torchvision. Without it the library refuses the whole processor, and the class
    is made here from its other parts.
    """
    if config is not None and not (folder / CONFIG).is_file():
        with tempfile.TemporaryDirectory() as name:
            copy_side_files(folder, Path(name))
            (Path(name) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            return load_processor(Path(name), image_backend=image_backend)
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ImportError, ValueError):  # without a file for videos it is ValueError
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
    """Return the `AutoImageProcessor` of the folder that computes with this backend, whatever else is installed."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True, trust_remote_code=False)


def _without_video(folder: Path, image_backend: ImageBackend) -> Any:
    """Return the folder's processor without a part for videos; None where that is not what is missing."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    kind: Any = PROCESSOR_MAPPING.get(type(settings), None)
    if kind is None or "video_processor" not in kind.get_attributes():
        return None

    class WithoutVideo(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {
        "image_processor": lambda: load_image_processor(folder, image_backend),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True),
        "video_processor": lambda: None,
    }
    fields, _ = kind.get_processor_dict(folder)
    return WithoutVideo.from_args_and_dict([parts[name]() for name in kind.get_attributes()], fields)  # type: ignore[no-untyped-call]


def checked_processor(folder: Path | None, config: Mapping[str, Any], image_backend: ImageBackend = "pil") -> Any:
    """Return the processor of a folder, or raise what is missing and how to mend it."""
    if image_backend == "torchvision" and importlib.util.find_spec("torchvision") is None:
        raise TesseraError(
            "torchvision is not installed",  # the library would fall back to Pillow
            where="data.processor.image_backend",
            allowed=["pil"],
            fix=_INSTALL_TORCHVISION,
            code="environment.torchvision-missing",
        )
    if folder is None or not any(folder.glob("tokenizer*")):
        raise TesseraError(
            "there is no tokenizer to write conversations with" + ("" if folder is None else f" in {folder}"),
            where="model.path or model.tokenizer",
            fix="put the tokenizer and processor files of the model beside its weights, or name their folder as "
            "model.tokenizer; a data kind of your own (data.kind) makes batches without them",
            code="tokenizer.files-missing",
        )
    if (folder / "tokenizer.json").is_file():
        load_tokenizer(folder)  # refuses files that no one can have meant
    try:
        return load_processor(folder, config, image_backend)
    except ImportError as error:
        needs_torchvision = "torchvision" in str(error).lower()
        raise TesseraError(
            f"the processor of this folder needs a package that is missing: {first_line(error)}",
            where=str(folder),
            fix=_INSTALL_TORCHVISION if needs_torchvision else "install it, or name another folder as model.tokenizer",
            code="environment.processor-needs-package",
        ) from None
    except Exception as error:  # whatever a file that is not as expected leads to
        code = _code_in(folder)
        if code is not None:
            raise TesseraError(
                f"the processor of this folder is code that lies in it ({code}), which is never run",
                where=str(folder),
                fix="use a folder in the form of transformers' own class (often published with -hf in its name), "
                "or a data kind of your own (data.kind)",
                code="tokenizer.code-in-folder",
            ) from None
        raise TesseraError(
            f"transformers cannot load the processor of this folder: {first_line(error)}",
            where=str(folder),
            fix="compare its files with those that the model's makers publish: tokenizer.json, "
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
    """Return the chat template of a processor; the one called default where it has several."""
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) and template.strip() else None


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise whatever the code of a processor or a template raises as an error about the sample at hand."""
    try:
        yield
    except TesseraError:
        raise
    except Exception as error:
        raise TesseraError(f"{what}: {first_line(error)}", code="data.processor-refuses") from None


def with_parts(processor: Any, **parts: Any) -> Any:
    """Return a copy of a processor with other parts; the processor itself stays as it is."""
    changed = copy.copy(processor)
    for name, part in parts.items():
        setattr(changed, name, part)
    return changed


class SizedImages:
    """Stand in for an image preprocessor where only sizes matter: it is called once for images of the same sizes."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._outputs: OrderedDict[Any, Any] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        key = (_sizes(images), repr(args), repr(sorted(options.items(), key=lambda one: one[0])))
        if key not in self._outputs:
            outputs = self._real(images, *args, **options)
            for name, value in outputs.items():
                outputs[name] = _shape_of(value)
            self._outputs[key] = outputs
            if len(self._outputs) > _KEPT_SIZES:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(key)
        return copy.copy(self._outputs[key])  # a processor takes out of it what is not for the model


def _shape_of(value: Any) -> Any:
    """Return a tensor of the same shape that takes no memory, for one that can only hold pixels."""
    if isinstance(value, list):
        return [_shape_of(one) for one in value]
    large = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > _SMALL
    return value.new_zeros(()).expand(value.shape) if large else value


def _sizes(images: Any) -> Any:
    if isinstance(images, Sequence):
        return tuple(_sizes(one) for one in images)
    return images.size
