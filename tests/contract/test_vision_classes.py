"""Vision-language classes of transformers that have no family here, on chat data: losses and gradients are those of the
class itself, samples of one row are kept apart, what is exported the library loads. Two classes here, ten with the slow
tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

import tessera
from tessera.config.run_config import ModelSection, SourceSection
from tessera.core.batch import IGNORE, Batch
from tessera.data.kinds.chat import PadsSamples
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, probe, read_media
from tessera.data.sources.source import Source, open_source
from tessera.inference.load import load
from tessera.inference.reference import StockModel
from tessera.models import resolve
from tessera.models.transformers import ClassProcessor
from tessera.tasks.transformers import TransformersTask
from tests.close import assert_as_close, queries_for_keys
from tests.task_parts import sum_and_count
from tests.toys.vision_classes import CLASSES, LLAMA, SIGHT, write_chats, write_class

QUICK = ("gemma3", "idefics3")
NO_ENDS = ("llava_next", "vipllava")
TEN = [name for name in CLASSES if name != "got_ocr2"]  # its images have 256 tokens
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TEN]
ONE = [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in TEN]
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def class_case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("classes")

    @cache
    def make(name: str) -> tuple[Path, Path]:
        return write_class(name, base / name), write_chats(name, base / f"{name}-chats")

    return make


def processor_of(folder: Path, **options: Any) -> ClassProcessor:
    spec, config = resolve(ModelSection(path=folder))
    assert spec.name == "transformers"
    assert spec.processor is not None
    processor = spec.processor(config, folder, **options)
    assert isinstance(processor, ClassProcessor)
    assert isinstance(processor, ChatProcessor)
    assert isinstance(processor, PadsSamples)
    return processor.training_on(("assistant",))


def encoded(processor: ClassProcessor, source: Source) -> list[Any]:
    items = []
    for _, sample in source.scan(range(len(source))):
        assert not isinstance(sample, Exception)
        headers = [probe(part, source.root, Limits(), processor.sampling) for part in sample.media()]
        media, sizes = read_media(sample, source.root, Limits(), processor)
        items.append(processor.encode(sample, media, sizes))
        assert processor.measure(sample, headers) == items[-1].counts  # from headers alone
    return items


def their_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return getattr(transformers, CLASSES[name].model).from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def their_gradients(model: Any, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return loss and gradients of the class itself, which gets the labels."""
    inputs = {key: one.to(dtype) if one.is_floating_point() else one for key, one in batch.tensors.items()}
    loss = model.train()(**inputs, use_cache=False).loss
    loss.backward()
    gradients = {path: one.grad for path, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **gradients}


def our_gradients(folder: Path, batch: Batch) -> dict[str, Tensor]:
    module = load(folder)[0].module.train()
    task = TransformersTask()
    inputs = task.inputs(batch)
    total, count = sum_and_count(task, module(inputs), inputs)
    (total / count).backward()
    gradients = {path: one.grad for path, one in module.named_parameters() if one.grad is not None}
    return {"loss": (total / count).detach(), **gradients}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_class(name: str, class_case: Any) -> None:
    folder, data = class_case(name)
    processor = processor_of(folder)
    batch = processor.collate([[item] for item in encoded(processor, open_source(SourceSection(path=data)))], 0)
    exact = their_gradients(their_model(name, folder, torch.float64), batch, torch.float64)
    peer = their_gradients(their_model(name, folder), batch, torch.float32)
    ours = our_gradients(folder, batch)
    assert ours.keys() == peer.keys()
    for path, gradient in ours.items():
        assert_as_close(gradient, peer[path], exact[path], what=path, terms=exact[queries_for_keys(path)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_what_is_trained_on_is_what_the_assistant_says(name: str, class_case: Any) -> None:
    folder, data = class_case(name)
    processor = processor_of(folder)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    stop = processor.spell(processor.stop_tokens[:1])
    last = processor.training_on(("assistant",), last_only=True)
    once = iter(encoded(last, open_source(SourceSection(path=data))))
    for row, item in zip(rows, encoded(processor, open_source(SourceSection(path=data))), strict=True):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        trained = processor.spell([label for label in item.labels.tolist() if label != IGNORE])
        ends = stop if name not in NO_ENDS else ""  # their turns have no end but the last
        assert _words(trained) == _words(ends.join(said) + stop)
        spoken = last.spell([label for label in next(once).labels.tolist() if label != IGNORE])
        assert _words(spoken) == _words(said[-1] + stop)


def _words(text: str) -> str:
    """White space between a header and an answer may be part of the answer's first token."""
    return "".join(text.split())


@pytest.mark.parametrize("name", ONE)
def test_samples_that_share_a_row_do_not_see_each_other(name: str, class_case: Any) -> None:
    folder, data = class_case(name)
    processor = processor_of(folder)
    if name != "gemma3":  # its rows are packed or not, as the library's masks allow
        assert processor.packs == (name != "paligemma"), "its prompts are read in both directions"
    items = encoded(processor, open_source(SourceSection(path=data)))
    texts = [item for item in items if not item.images]
    model = their_model(name, folder, torch.float64).train()

    def total(rows: list[list[Any]]) -> float:
        batch = processor.collate(rows, 0)
        inputs = {key: one.double() if one.is_floating_point() else one for key, one in batch.tensors.items()}
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[:, :-1]
        return float(
            F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")
        )

    alone = total([[item] for item in items])
    limit = 1e4 * torch.finfo(torch.float64).eps * alone  # sums of thousands of terms; what another sees is 1e-4 of it
    assert abs(sum(total([[item]]) for item in items) - alone) <= limit
    assert (abs(total([items[:3], items[3:5], items[5:]]) - alone) <= limit) == processor.packs
    if texts and processor.packs:  # a blank sample joins them, in the first row
        assert abs(total([texts]) - sum(total([[item]]) for item in texts)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
def test_a_batch_of_text_has_a_blank_image_and_its_gradients_are_zero(name: str, class_case: Any) -> None:
    folder, data = class_case(name)
    processor = processor_of(folder)
    items = encoded(processor, open_source(SourceSection(path=data)))
    texts = [item for item in items if not item.images]
    if not CLASSES[name].text_only:
        assert not texts
        return
    batch = processor.collate([[item] for item in texts], 0)
    assert len(batch["input_ids"]) == len(texts) + 1
    assert (batch["labels"][-1] == IGNORE).all()
    assert batch.counts["samples"] == len(texts)
    assert batch.counts["images"] == 0
    with_image = our_gradients(folder, processor.collate([[items[0]]], 0))
    blank = our_gradients(folder, batch)
    assert blank.keys() == with_image.keys()  # the same parts are used, and gathered
    seeing = [path for path in blank if "vision" in path and blank[path].abs().max() == 0]
    assert len(seeing) > 10


def test_the_proof_computes_with_pixels_in_bfloat16(tmp_path: Path) -> None:
    """The preprocessor of Llama 4 gives such pixels, and its class does not cast them to the type of its weights."""
    text = {**LLAMA, "intermediate_size_mlp": 48, "num_local_experts": 2, "model_type": "llama4_text"}
    sight = {**SIGHT, "intermediate_size": 96, "pixel_shuffle_ratio": 0.5}
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=text, vision_config={**sight, **sizes}, image_token_index=7)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    stock = StockModel(tmp_path)
    pixels = torch.rand(1, 3, 16, 16).bfloat16()
    tokens = torch.tensor([[3, *[7] * 4, 9]])  # 4 x 4 patches, of which the projector joins 2 x 2
    logits = stock.logits({"input_ids": tokens, "pixel_values": pixels})
    assert torch.equal(logits, stock.logits({"input_ids": tokens, "pixel_values": pixels.float()}))


def recipe(folder: Path, data: Path, out: Path, **model: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "out": str(out),
        "model": {"path": str(folder), **model},
        "data": {"train": str(data), "eval": str(data), "length": 512, "workers": 0},
        "train": {"steps": 2, "global_batch": 2, "micro_batch": 1, "device": "cpu"},
        "checkpoint": {"export": True},
        "optim": {"lr": 1e-2},
        "log": {"every": 1},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_an_export_loads_back_and_answers_as_in_the_library(name: str, class_case: Any, tmp_path: Path) -> None:
    folder, data = class_case(name)
    run = tessera.train(recipe(folder, data, tmp_path))
    assert len({row["loss"] for row in run.metrics if row["kind"] == "train"}) == 2
    exported = run.folder / "hf"
    agreement = tessera.compare(exported, data, max_new_tokens=4)
    assert agreement.complete, agreement.lines()
    assert any("the same logits" in line and "with an image" in line for line in agreement.lines())
    assert len(agreement.answers) == 8
    before, after = load_file(folder / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[key], after[key]) for key in before) > 20
    assert type(transformers.AutoProcessor.from_pretrained(exported)).__name__ == CLASSES[name].processor
    assert tessera.evaluate(run.folder, max_new_tokens=2).results[0].questions == 8  # from the run's own files


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_adapters_are_of_the_text_decoder_and_load_in_peft(name: str, class_case: Any, tmp_path: Path) -> None:
    folder, data = class_case(name)
    run = tessera.train(recipe(folder, data, tmp_path, lora={"rank": 2}))
    model, processor = load(run.folder / "adapter")
    assert model.adapters
    assert not any("vision" in path for path in model.adapters)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    batch = processor(rows[0]["messages"][:-1], root=data.parent)
    base = their_model(name, folder).eval()
    with torch.no_grad():
        plain = base(**batch.tensors).logits
        theirs = peft.PeftModel.from_pretrained(base, run.folder / "adapter").eval()(**batch.tensors).logits
        ours = model(batch).logits
        exact = their_model(name, folder, torch.float64)
        merged = peft.PeftModel.from_pretrained(exact, run.folder / "adapter").eval()
        inputs = {key: one.double() if one.is_floating_point() else one for key, one in batch.tensors.items()}
        assert_as_close(ours, theirs, merged(**inputs).logits)
    assert float((theirs - plain).abs().max()) > 1e-3
