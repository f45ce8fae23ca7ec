"""What a family here refuses names the library's own class where that computes it exactly: the advice is followed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import tessera
from tessera.config.run_config import ModelSection, SourceSection
from tessera.core.batch import IGNORE
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.evaluation.answers import read_answers
from tessera.models import resolve
from tessera.models.transformers import ClassProcessor
from tessera.tasks.transformers import TransformersTask
from tests.close import assert_as_close, queries_for_keys
from tests.errors import raises
from tests.task_parts import sum_and_count
from tests.toys.text_classes import SIZES, tokenizer, write_text_chats, write_text_class
from tests.toys.vision_classes import CLIP, LLAMA

transformers.utils.logging.disable_progress_bar()
SHORT = 40  # tokens up to which longrope has its short factors; samples are on both sides
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": SHORT,
    "factor": 4.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# What no family here computes: the class and its fields.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "attention_bias": ("LlamaForCausalLM", {"attention_bias": True}),
    "attention_bias of Qwen 3": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "mlp_bias": ("LlamaForCausalLM", {"mlp_bias": True}),
    "partial rotary": ("LlamaForCausalLM", {"rope_parameters": PARTIAL}),
    "longrope": ("LlamaForCausalLM", {"rope_parameters": LONGROPE}),
}


def write_llava(folder: Path) -> Path:
    """Write a LLaVA whose decoder is a Mistral, as LLaVA 1.6 has one."""
    text, words = {**LLAMA, "model_type": "mistral", "sliding_window": None}, tokenizer()
    image = words.convert_tokens_to_ids("<image>")
    fields = {"text_config": text, "vision_config": CLIP, "image_token_index": image, "image_seq_length": 16}
    write_text_class("LlavaForConditionalGeneration", fields, folder)
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        words,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    ).save_pretrained(folder)
    return folder


def advised(error: TesseraError) -> dict[str, str]:
    """Return the keys that the fix of an error names."""
    return dict(re.findall(r"(model[.\w]*)=(\w+)", error.fix or ""))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    gradient_of = {path: one.grad for path, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **gradient_of}


def alone_in_the_library(kind: str, folder: Path, items: list[Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return loss and gradients of the class itself, one sample after the other and none padded."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for item in items:
        logits = model(input_ids=item.tokens[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, item.labels[1:], ignore_index=IGNORE, reduction="sum")
    return gradients(model, total)


QUICK = ("sliding window", "attention_bias", "longrope")  # masks, weights and positions of other kinds


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_the_class_that_a_refusal_names_computes_alone_padded_and_packed_alike(name: str, tmp_path: Path) -> None:
    kind, fields = REFUSED[name]
    folder = write_text_class(kind, {**SIZES, **fields}, tmp_path / "folder")
    with pytest.raises(TesseraError) as caught:
        resolve(ModelSection(path=folder))
    assert advised(caught.value) == {"model.family": "transformers"}

    spec, config = resolve(ModelSection(path=folder, family="transformers"))
    assert spec.processor is not None
    processor = spec.processor(config, folder)
    assert isinstance(processor, ClassProcessor)
    processor = processor.training_on(("assistant",))
    source = open_source(SourceSection(path=write_text_chats(tmp_path / "chats.jsonl", 4)))
    items = [processor.encode(sample, []) for _, sample in source.scan(range(len(source)))]  # type: ignore[arg-type]
    assert min(len(item.tokens) for item in items) <= SHORT < max(len(item.tokens) for item in items)
    exact, peer = (alone_in_the_library(kind, folder, items, dtype) for dtype in (torch.float64, torch.float32))
    assert processor.packs
    for rows in ([[item] for item in items], [items[:3], items[3:]]):
        module: Any = spec.main.build(config)
        module.load_state_dict(getattr(transformers, kind).from_pretrained(folder).state_dict(), assign=True)
        task = TransformersTask()
        batch = task.inputs(processor.collate(rows, 0))
        ours = gradients(module.train(), sum_and_count(task, module(batch), batch)[0])
        for path, value in ours.items():
            assert_as_close(value, peer[path], exact[path], what=path, terms=exact[queries_for_keys(path)])


def train(folder: Path, out: Path, **model: str) -> Any:
    return tessera.train(
        {
            "name": "advice",
            "out": str(out),
            "model": {"path": str(folder)},
            "data": {"train": str(write_text_chats(out / "chats.jsonl")), "length": 256, "workers": 0},
            "train": {"steps": 1, "global_batch": 2, "device": "cpu"},
            "checkpoint": {"export": True, "prove": "always"},
        },
        model,
    )


@pytest.mark.slow
def test_a_llava_with_another_decoder_is_trained_and_exported_as_the_refusal_says(tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "folder")
    with raises("model.unsupported-value") as caught:
        train(folder, tmp_path)
    keys = advised(caught.value)
    assert keys == {"model.family": "transformers"}
    assert (train(folder, tmp_path, **keys).folder / "hf" / "config.json").is_file()


def test_a_class_without_sdpa_is_trained_and_exported_as_the_refusal_says(tmp_path: Path) -> None:
    fields = {**SIZES, "query_pre_attn_scalar": 8, "sliding_window": 8, "attn_logit_softcapping": 0.5}
    folder = write_text_class("Gemma2ForCausalLM", fields, tmp_path / "folder")
    if transformers.Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this version of transformers has sdpa for Gemma 2")
    with raises("model.no-sdpa-attention") as caught:
        train(folder, tmp_path)
    keys = advised(caught.value)
    assert keys == {"model.config.attention": "eager"}
    assert (train(folder, tmp_path, **keys).folder / "hf" / "config.json").is_file()


def test_a_qwen3_that_no_folder_can_hold_is_refused_before_it_is_trained() -> None:
    with raises("recipe.wrong-value", "model.family=transformers"):
        resolve(ModelSection(family="qwen3", preset="quickstart", config={"text": {"attention_bias": True}}))


def test_a_class_answers_by_its_own_method_and_commands_for_many_requests_refuse_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the server needs it")
    from tessera.server.settings import Settings
    from tessera.server.start import ModelOptions, start_service

    folder = write_text_class("MistralForCausalLM", {**SIZES, "sliding_window": None}, tmp_path / "class")
    data = write_text_chats(tmp_path / "chats.jsonl")
    with raises("generation.model-generates-itself", "family transformers"):
        tessera.generate_answers(folder, data, tmp_path / "answers.jsonl", device="cpu")
    with raises("generation.model-generates-itself", "family transformers"):
        start_service(ModelOptions(folder, "cpu"), Settings("class", max_length=0))
    score = tessera.evaluate(folder, data=data, max_new_tokens=4, batch=4, device="cpu", out=tmp_path / "eval")
    model, processor = tessera.load(folder, device="cpu")
    alone = [model.generate(processor(json.loads(line)["messages"][:1]), 4) for line in data.read_text().splitlines()]
    assert [row["answer"] for row in read_answers(score.results[0].answers)] == alone
    assert score.results[0].protocol["processing"]["batch"] == 4
