"""The thinker and the talker of Qwen3-Omni as one trained model: folders, samples, costs, training and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from talker_cases import SHAPES, config_with_words, reference_of
from test_families import grouped_flops
from test_omni_joint_numerics import joint
from test_talker_folders import tensors_in
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3OmniMoeForConditionalGeneration

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.pattern import matches
from tessera.config.run_config import ModelSection, load_config
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera.models.processing.streams import media_size
from tessera.models.qwen3_omni_talker import SPEC
from tessera.models.qwen3_omni_talker.processor import OmniTrainingProcessor, TalkerProcessor
from tessera.models.qwen3_omni_talker.thinker import HEARD, HEARD_FROM
from tessera.models.speech.family import CODED_FRAMES
from tessera.nn.codes import CODED, TEXT_LABELS, TEXT_TRAINED
from tessera.tasks.speech import SpeechTask
from tessera.training.passes import training_of
from tessera.training.setup import build_meta_model


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_an_export_is_a_full_folder_bitwise(number: int, tmp_path: Path) -> None:
    reference = reference_of(joint(number), 3, torch.bfloat16)
    reference.save_pretrained(tmp_path / "full")
    section = ModelSection(path=tmp_path / "full", family="qwen3_omni_talker", config={"trains_thinker": True})
    spec, config = resolve(section)
    assert config == joint(number)
    module = spec.main.build(config).to(torch.bfloat16)
    load_folder(tmp_path / "full", model_tensors(module), SPEC.main.weight_map(config))
    export_folder(module, spec, config, None, tmp_path / "out", base=tmp_path / "full", files=tmp_path / "full")
    before, after = tensors_in(tmp_path / "full"), tensors_in(tmp_path / "out")
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    for parameter in module.parameters():
        parameter.data.fill_(0.5)
    export_folder(module, spec, config, None, tmp_path / "half", base=tmp_path / "full", files=tmp_path / "full")
    for name, tensor in tensors_in(tmp_path / "half").items():
        frozen = name.startswith("code2wav.")
        assert torch.equal(tensor, before[name]) if frozen else bool((tensor == 0.5).all()), name


def test_conversations_with_and_without_speech_share_a_row(tmp_path: Path) -> None:
    config = config_with_words(tmp_path, ("red", "blue"), joint=True)
    processor = TalkerProcessor.load(config, tmp_path, min_pixels=64, max_pixels=1024).training_on(["assistant"])
    assert isinstance(processor, OmniTrainingProcessor)
    image, sound = Image.new("RGB", (30, 20), (200, 30, 30)), np.linspace(-0.5, 0.5, 20_000, dtype=np.float32)
    codes = np.arange(3 * config.num_code_groups).reshape(3, -1)
    question = Message("user", (Part("audio", sound), Part("text", "red"), Part("image", image)))
    samples = [
        Sample("spoken", (question, Message("assistant", (Part("text", "red"), Part("codes", codes))))),
        Sample("silent", (question, Message("assistant", (Part("text", "blue blue"),)))),
        Sample("text", (Message("user", (Part("text", "red"),)), Message("assistant", (Part("text", "blue"),)))),
    ]
    items = []
    for sample in samples:
        media = [part.value for part in sample.media()]
        sizes = [MediaSize(0, 0, 3) if each is codes else media_size(each) for each in media]
        items.append(processor.encode(sample, media, sizes))
        assert processor.measure(sample, sizes)["tokens"] == items[-1].length
    speech = [CODED_FRAMES, "talker.tokens", "talker.trained"]
    measured = processor.measure(samples[2], [])
    assert [measured[name] for name in speech] == [0, 0, 0]
    assert measured["trained"] == measured["thinker.trained"] > 0
    length = sum(item.length for item in items)
    batch = processor.collate([[items[1], items[0]], [items[2]]], length)
    assert batch["tokens"].shape == (2 * length,)
    assert batch["thinker.tokens"].shape[0] % 64 == 0
    assert batch.segments["text"].lengths == (len(items[0].tokens), length - len(items[0].tokens), length)
    marks = torch.tensor([config.thinker.image_token_id, config.thinker.audio_token_id])
    assert torch.isin(batch["tokens"][batch[HEARD]], marks).all()
    assert torch.equal(batch["tokens"][batch[HEARD]], batch["thinker.tokens"][batch[HEARD_FROM]])
    assert int(batch[HEARD_FROM].min()) > len(items[1].question.tokens)  # type: ignore[attr-defined]
    assert batch[CODED].shape == (3,)
    texts = processor.decode(batch[TEXT_LABELS][batch[TEXT_TRAINED]].tolist())
    assert [texts.count(word) for word in ("red", "blue")] == [1, 3]
    assert batch.counts["images"] == 2
    counts = SpeechTask().counts(batch)
    assert counts == {"labels": 4, "frames": 3, "text_tokens": batch[TEXT_TRAINED].shape[0]}
    silent = processor.collate([[items[1]]], length)
    assert (silent[CODED].numel(), silent[HEARD].numel()) == (0, 0)


def joint_model(**changes: Any) -> tuple[Any, Any, nn.Module]:
    spec, config = resolve(
        ModelSection(family="qwen3_omni_talker", preset="quickstart", config={"trains_thinker": True, **changes})
    )
    with torch.device("meta"):
        return spec, config, spec.main.build(config)


def test_layers_have_their_names_in_the_published_class() -> None:
    module, table = SPEC.main.build(joint(0)), SPEC.main.weight_map(joint(0))
    modules = {name for name, _ in reference_of(joint(0), 3).named_modules()}
    layers = [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    assert {path.partition(".")[0] for path in layers} >= {"thinker", "text", "depth"}
    for path in layers:
        for name in table.rule_for(f"{path}.weight")[1]:  # type: ignore[index]
            assert table.in_memory(name).removesuffix(".weight") in modules, path


def test_examples_may_be_shorter_than_a_recording() -> None:
    for length in range(1, 9):
        assert SPEC.example(joint(0), length)["tokens"].shape[0] == length


def test_the_plan_covers_every_parameter_once() -> None:
    spec, config, model = joint_model()
    plan = spec.main.plan(config)
    owners = [path for path, _ in model.named_modules() if any(matches(unit.pattern, path) for unit in plan.units)]
    for name, _ in model.named_parameters():
        assert sum(matches(pattern, name) for pattern in plan.tensor) == 1, name
        assert sum(name.startswith(owner + ".") for owner in owners) == 1, name


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [[], ["thinker.vision", "thinker.audio"], ["thinker"]])
def test_flops_agree_with_the_counter_of_torch(freeze: list[str]) -> None:
    spec, config, model = joint_model(attention="eager", thinker={"attention": "eager"})
    model, generator = model.to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.initialize(name, parameter, generator)  # type: ignore[operator]
        parameter.requires_grad_(not any(name.startswith(f"{path}.") for path in freeze))
    batch = spec.example(config, 512)  # type: ignore[misc]
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        losses = SpeechTask().losses(model(batch), batch)
        sum(term.sum for term in losses.terms).backward()  # type: ignore[union-attr]
    training = training_of(model, spec.main.plan(config), [n for n, p in model.named_parameters() if p.requires_grad])
    squares = 0.0
    for text, part, pairs in (
        (config.text, "text", 512**2),
        (config.thinker.text, "thinker.text", 256**2),
        (config.depth, "depth", batch[CODED].shape[0] * config.num_code_groups**2),
    ):  # torch's counter counts all of the square of causal attention
        width = text.num_attention_heads * text.head_size
        squares += training[part].attention * 2 * text.num_hidden_layers * width * pairs
    counted = spec.flops(config, batch, training) + squares  # type: ignore[misc]
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def rows_of(path: Path, sentences: list[str], codebooks: int, codes: int) -> Path:
    chance = np.random.default_rng(0)
    rows = []
    for number, sentence in enumerate(sentences):
        frames = chance.integers(0, codes, (len(sentence.split()) + 3, codebooks)).tolist()
        rows.append({"instruction": f"number {number}", "text": sentence, "audio_codes": frames})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


SENTENCES = [
    f"{first} {second} {first}" for first in ("red", "blue") for second in ("tall", "small", "old", "new", "wet")
]


def recipe_of(folder: Path, **more: Any) -> dict[str, Any]:
    """Ten sentences, and a full folder of transformers to start from."""
    words = ("number", *"0123456789", "red", "blue", "tall", "small", "old", "new", "wet")
    config = config_with_words(folder / "full", words, joint=True)
    if not (folder / "full" / "model.safetensors").exists():
        reference_of(config, 3).save_pretrained(folder / "full")
    data = rows_of(folder / "rows.jsonl", SENTENCES, config.num_code_groups, config.depth.vocab_size)
    return {
        "name": "joint",
        "out": str(folder / "runs"),
        "model": {
            "family": "qwen3_omni_talker",
            "path": str(folder / "full"),
            "config": {"trains_thinker": True},
            "freeze": ["thinker.vision", "thinker.audio", "thinker.projector", "thinker.audio_projector"],
        },
        "data": {"train": str(data), "length": 96, "workers": 0},
        "train": {"steps": 4, "global_batch": 2, "device": "cpu"},
        "optim": {"lr": 3e-3, "schedule": {"kind": "constant"}},
        "checkpoint": {"export": True},
        **more,
    }


def metrics_of(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_ten_sentences_are_learned_and_the_export_is_the_model(tmp_path: Path) -> None:
    run = tessera.train(recipe_of(tmp_path), {"train.steps": 110})
    rows = metrics_of(run)
    for name in ("text_loss", "code_loss", "depth_loss"):
        assert rows[-1][name] < 0.15 * rows[0][name], (name, rows[0][name], rows[-1][name])
    exported = Qwen3OmniMoeForConditionalGeneration.from_pretrained(Path(run.folder) / "hf")
    before = tensors_in(tmp_path / "full")
    changed = {
        name.split(".")[0] for name, t in tensors_in(Path(run.folder) / "hf").items() if (t != before[name]).any()
    }
    assert changed == {"thinker", "talker"}
    assert exported.has_talker


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = tessera.train(recipe_of(tmp_path), {"train.steps": 4, "name": "whole"})
    tessera.train(recipe_of(tmp_path), {"train.steps": 2, "name": "half"})
    half = tessera.resume(tmp_path / "runs" / "half", {"train.steps": 4})
    assert [row["loss"] for row in metrics_of(half)] == [row["loss"] for row in metrics_of(whole)]
    first, second = (tensors_in(Path(run.folder) / "hf") for run in (whole, half))
    assert len(first) == len(second) > 100
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model.config": {"trains_thinker": True, "reads_media": True}}, "recipe.wrong-value"),
        (
            {
                "model.config": {
                    "trains_thinker": True,
                    "thinker": {"text": {"experts": {"output_router_logits": True}}},
                }
            },
            "recipe.wrong-value",
        ),
        ({"model.config": {"trains_thinker": True, "accept_hidden_layer": 2}}, "recipe.wrong-value"),
        ({"parallel.tp": 2, "parallel.sequence_parallel": True}, "layout.sequence-parallel-decoders"),
        ({"train.task_options": {"neftune_alpha": 5.0}}, "task.no-embedding-noise"),
        ({"model.config": {}, "train.task_options": {"text_weight": 2.0}}, "task.no-text-loss"),
        ({"parallel.pp": 2, "parallel.layers": {"text": [1, 1]}}, "layout.stream-not-listed"),
        ({"parallel.encoders": {"thinker": {"tp": 1}}}, "layout.unknown-encoder"),
        ({"parallel.tp": 3}, "layout.tp-not-divisor"),
        ({"parallel.ep": 3}, "layout.experts-not-divisible"),
        ({"train.generate_every": 5}, "model.no-generated-answers"),
        ({"model.freeze": ["thinkr.vision"]}, "recipe.pattern-matches-nothing"),
        ({"model.lora": {"targets": ["thinker.text.layers.{*}.atn"]}}, "recipe.pattern-matches-nothing"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], code: str) -> None:
    recipe = {
        "name": "joint",
        "model": {"family": "qwen3_omni_talker", "preset": "quickstart", "config": {"trains_thinker": True}},
        "data": {"train": "rows.jsonl", "length": 96},
        "train": {"steps": 4, "global_batch": 6, "device": "cpu"},
    }
    world = 3 if 3 in changes.values() else 2
    with pytest.raises(TesseraError) as caught:
        build_meta_model(load_config(recipe, changes), world)
    assert caught.value.code == code
