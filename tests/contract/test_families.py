"""What holds for every registered family. A new family adds one entry to BATCHES and is covered."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tessera.config.pattern import matches, select
from tessera.config.reader import Section
from tessera.config.run_config import ModelSection, load_config
from tessera.core.batch import Batch, Segments
from tessera.core.spec import ModelSpec, Passes
from tessera.diffusion.family import GenerationSpec
from tessera.models import FAMILIES, family_of, resolve
from tessera.nn.codes import CODED, CODES, NEXT_CODES, code_output
from tessera.ops.loss import linear_cross_entropy
from tessera.training.setup import build_meta_model
from tests.errors import raises
from tests.quick import quick

# Families without presets run other people's classes; `test_third_party.py` is theirs.
# Those that generate images or videos have `test_generation_families.py`.
NAMES = [
    name
    for name in FAMILIES.names()
    if FAMILIES.get(name).presets and not isinstance(FAMILIES.get(name), GenerationSpec)
]
PRESETS = [(name, preset) for name in NAMES for preset in FAMILIES.get(name).presets]


def built(presets: list[tuple[str, str]]) -> Iterator[Any]:
    """The tiny models of every family, one of a published size and one with experts. Others of published sizes take
    long to build and are for `make test-all`."""
    seen: set[tuple[str, str]] = set()
    for name, preset in presets:
        tiny = "quickstart" in preset
        kind = (name, preset) if tiny else ("a published size", "experts" if "-a" in preset else "")
        yield pytest.param((name, preset), id=f"{name}-{preset}", marks=[pytest.mark.slow] if kind in seen else [])
        seen.add(kind)


BUILT = list(built(PRESETS))


@pytest.mark.parametrize("name", FAMILIES.names())
def test_worker_processes_can_receive_a_family(name: str) -> None:
    """Servers and data loaders would otherwise decode media in their own process, which a damaged file may end."""
    assert pickle.dumps(FAMILIES.get(name))


def language_batch(config: Any) -> Batch:
    """Two samples and a padding tail; pictures of two sizes."""
    merge, lengths, grids = config.vision.spatial_merge_size, [37, 50, 9], [(4, 6), (6, 6)]
    patches = sum(h * w for h, w in grids)
    tokens = torch.arange(sum(lengths)) % config.text.vocab_size
    return Batch(
        {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "positions": torch.arange(sum(lengths)).expand(3, -1),
            "pixels": torch.randn(patches, config.vision.patch_values),
            "patch_positions": torch.zeros(patches, 2, dtype=torch.int64),
            "media_slots": torch.arange(patches // merge**2) + 3,
        },
        {"text": Segments.of(lengths), "vision": Segments.of([h * w for h, w in grids])},
    )


def windowed_batch(config: Any) -> Batch:
    """The same pictures in windows: two to the first, four to the second."""
    batch = language_batch(config)
    return replace(batch, segments={**batch.segments, "vision.windows": Segments.of([12, 12, 16, 8, 8, 4])})


def bicubic_batch(config: Any) -> Batch:
    """The same pictures, whose patches read a table of positions between sixteen entries."""
    batch = language_batch(config)
    index = torch.arange(16 * len(batch["pixels"])).view(-1, 16) % 16
    return batch.with_tensors(patch_index=index, patch_weights=torch.full(index.shape, 1 / 16))


def table_batch(config: Any) -> Batch:
    """The same pictures, with positions between four entries of a learned table."""
    batch = language_batch(config)
    patches = batch["pixels"].shape[0]
    index = torch.arange(4 * patches).view(patches, 4) % config.vision.num_position_embeddings
    return replace(batch, seeds=(0,)).with_tensors(patch_index=index, patch_weights=torch.full((patches, 4), 0.25))


def text_batch(config: Any) -> Batch:
    lengths = [37, 50, 9]
    tokens = torch.arange(sum(lengths)) % config.text.vocab_size
    tensors = {"tokens": tokens, "labels": tokens.roll(-1), "positions": torch.arange(sum(lengths))}
    return Batch(tensors, {"text": Segments.of(lengths)}, seeds=(0,))


BATCHES: dict[str, Callable[[Any], Batch]] = {
    "csm": lambda config: FAMILIES.get("csm").example(config, 96),  # type: ignore[misc]
    "glm4v": bicubic_batch,
    "internvl": lambda config: FAMILIES.get("internvl").example(config, 96),  # type: ignore[misc]
    "llama": text_batch,
    "llava": lambda config: FAMILIES.get("llava").example(config, 96),  # type: ignore[misc]
    "qwen2": text_batch,
    "qwen2_audio": lambda config: FAMILIES.get("qwen2_audio").example(config, 96),  # type: ignore[misc]
    "qwen2_5_omni": lambda config: FAMILIES.get("qwen2_5_omni").example(config, 256),  # type: ignore[misc]
    "qwen2_5_vl": windowed_batch,
    "qwen2_vl": language_batch,
    "qwen3": text_batch,
    "qwen3_asr": lambda config: FAMILIES.get("qwen3_asr").example(config, 96),  # type: ignore[misc]
    "qwen3_omni": lambda config: FAMILIES.get("qwen3_omni").example(config, 256),  # type: ignore[misc]
    "qwen3_omni_talker": lambda config: FAMILIES.get("qwen3_omni_talker").example(config, 96),  # type: ignore[misc]
    "qwen3_vl": table_batch,
    "whisper": lambda config: FAMILIES.get("whisper").example(config, 96),  # type: ignore[misc]
}


def on_meta(name: str, preset: str, **changes: Any) -> tuple[ModelSpec, Section, nn.Module]:
    spec, config = resolve(ModelSection(family=name, preset=preset, config=changes))
    with torch.device("meta"):
        return spec, config, spec.main.build(config)


Built = tuple[ModelSpec, Any, nn.Module]


@pytest.fixture(scope="module")
def preset_on_meta(request: pytest.FixtureRequest) -> Built:
    """A preset, built once for the tests that only read it: pytest runs them one after another."""
    return on_meta(*request.param)


@pytest.mark.parametrize("preset_on_meta", BUILT, indirect=True)
def test_builds_on_meta_with_parameters_only(preset_on_meta: Built) -> None:
    _, _, model = preset_on_meta
    parameters = dict(model.named_parameters())
    assert parameters
    assert all(p.is_meta for p in parameters.values())
    assert not list(model.named_buffers())
    assert sorted(model.state_dict()) == sorted(parameters)


@pytest.mark.parametrize("preset_on_meta", BUILT, indirect=True)
def test_the_plan_covers_every_parameter_once_and_names_modules_that_exist(preset_on_meta: Built) -> None:
    spec, config, model = preset_on_meta
    plan = spec.main.plan(config)
    parameters = [path for path, _ in model.named_parameters()]
    select(list(plan.tensor), parameters, "tensor plan")  # raises for a pattern that matches nothing
    for path in parameters:
        assert sum(matches(pattern, path) for pattern in plan.tensor) == 1, path
    modules = [path for path, _ in model.named_modules() if path]
    encoders = [path for stream in plan.encoders.values() for path in (stream.module, stream.projector)]
    for patterns in (plan.blocks, encoders, [unit.pattern for unit in plan.units]):
        select(list(patterns), modules, "plan")
    owners = select([unit.pattern for unit in plan.units], modules, "units")
    for path in parameters:
        assert sum(path.startswith(owner + ".") for owner in owners) == 1, path


@pytest.mark.parametrize("preset_on_meta", BUILT, indirect=True)
def test_the_weight_map_names_every_parameter_and_no_foreign_tensor_twice(preset_on_meta: Built) -> None:
    spec, config, model = preset_on_meta
    if not spec.main.weights:
        pytest.skip("no Hugging Face form")
    table = spec.main.weight_map(config)
    seen: set[str] = set()
    parameters = dict(model.named_parameters())
    for group in dict.fromkeys(table.group_of(path) for path in parameters):
        theirs = table.to_foreign({path: parameters[path] for path in group})
        assert not seen.intersection(theirs), group
        seen.update(theirs)
        for path in group:
            rule, foreign = table.rule_for(path) or pytest.fail(path)
            assert set(foreign) == set(theirs), path
            assert rule.op.to_native([theirs[spelling] for spelling in foreign]).shape == parameters[path].shape
        assert all(table.canonical(spelling) == spelling and not table.skips(spelling) for spelling in theirs)


@pytest.mark.parametrize("name", NAMES)
def test_weights_round_trip(name: str) -> None:
    spec, config, model = materialized(name)
    if not spec.main.weights:
        pytest.skip("no Hugging Face form")
    table = spec.main.weight_map(config)
    theirs = table.to_foreign({path: parameter.detach() for path, parameter in model.named_parameters()})
    for path, parameter in model.named_parameters():
        rule, foreign = table.rule_for(path) or pytest.fail(path)
        assert torch.equal(rule.op.to_native([theirs[name].clone() for name in foreign]), parameter)


@pytest.mark.parametrize("preset", BUILT)
def test_configurations_survive_the_way_through_transformers(preset: tuple[str, str], tmp_path: Path) -> None:
    name, size = preset
    config: Any = resolve(ModelSection(family=name, preset=size))[1]
    assert type(config).from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    spec = FAMILIES.get(name)
    named = None if config.to_hf()["model_type"] in spec.hf_types else name  # one folder, two families: talkers
    assert resolve(ModelSection(path=tmp_path / "again", family=named))[1] == config


def materialized(name: str, **changes: Any) -> tuple[ModelSpec, Any, nn.Module]:
    spec, config, model = on_meta(name, "quickstart", **changes)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter, generator)  # type: ignore[operator]
    return spec, config, model


@pytest.mark.parametrize("name", NAMES)
def test_initialization_is_a_function_of_the_generator_and_gives_finite_gradients_to_all(name: str) -> None:
    _, config, model = materialized(name)
    again = materialized(name)[2]
    for (path, parameter), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(parameter, other), path
    loss_of(model, BATCHES[name](config)).backward()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, path
            assert parameter.grad.isfinite().all(), path
        else:  # a family keeps it for the folder alone, and computes nothing with it
            assert parameter.grad is None, path


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch)
    hidden, head = outputs["logits"]
    total, count = linear_cross_entropy(hidden, head.weight, batch["labels"], implementation="eager")
    if CODED not in batch:
        return total / count
    following = batch[NEXT_CODES].index_select(1, batch[CODED])
    for number, labels in enumerate(following[1:], 1):
        hidden, head = outputs[code_output(number)]
        total = total + linear_cross_entropy(hidden, head.weight, labels, implementation="eager")[0]
    return total / count


@pytest.mark.parametrize(
    "name", quick(NAMES, "csm", "internvl", "llama", "qwen2_audio", "qwen2_vl", "qwen3", "whisper")
)
def test_flops_agree_with_the_counter_of_torch(name: str) -> None:
    spec, config, model = materialized(name, attention="eager")
    assert spec.flops is not None
    batch = BATCHES[name](config)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        loss_of(model, batch).backward()
    counted = spec.flops(config, batch, {}) + squares(config, batch, Passes())
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def grouped_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """Of the products of experts, which torch's counter leaves out."""
    return 2 * x[0] * x[1] * weight[-1]


def squares(config: Any, batch: Batch, passes: Passes) -> float:
    """What torch's counter counts beyond us: of causal attention all of the square, and not half."""
    text = config.text
    pairs = sum(length**2 for length in batch.segments["text"].lengths)
    total = passes.attention * 2 * text.num_hidden_layers * text.num_attention_heads * text.head_size * pairs
    if CODED not in batch:
        return total
    depth, pairs = config.depth, batch[CODED].shape[0] * len(batch[CODES]) ** 2
    return total + passes.attention * 2 * depth.num_hidden_layers * depth.num_attention_heads * depth.head_size * pairs


LAYERS = 12  # enough that one layer more or less is little
PARTLY: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("qwen2_vl", {}),
    "frozen encoder": ("qwen2_vl", {"freeze": ["vision"]}),
    "text alone": ("qwen2_vl", {"freeze": ["vision", "projector"]}),
    "projector alone": ("qwen2_vl", {"freeze": ["vision", "text", "head"]}),
    "lora": ("qwen2_vl", {"lora": {"rank": 4}}),
    "lora, language": ("llama", {"lora": {"rank": 4}}),
    "upper layers": ("llama", {"freeze": ["text.embed", "text.layers.{0-7}"]}),
    "lora, qwen3": ("qwen3", {"lora": {"rank": 4}}),
}
# Another test, another case or another family counts the same.
REPEATED = ("all", "frozen encoder", "text alone", "projector alone", "lora, language", "lora, qwen3")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in REPEATED else []) for case in PARTLY]
)
def test_gradients_that_nobody_asks_for_are_not_counted(case: str) -> None:
    """Against torch's counter, which sees what is computed: LoRA and frozen parts compute less than three passes."""
    family, told = PARTLY[case]
    model = {
        "family": family,
        "preset": "quickstart",
        "config": {"text": {"num_hidden_layers": LAYERS}, "tie_word_embeddings": False, "attention": "eager"},
        **told,
    }
    setup = build_meta_model(load_config({"model": model, "train": {"steps": 1}}), 1)
    module, spec, config = setup.module.to_empty(device="cpu"), setup.spec, setup.config
    trained = {piece.name for piece in setup.plan.param_shards if piece.trained}
    training = setup.training
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(0, 0.05)
            parameter.requires_grad_(name in trained)
    batch = language_batch(config) if family == "qwen2_vl" else text_batch(config)
    with FlopCounterMode(display=False) as counter:
        loss_of(module, batch).backward()
    assert spec.flops is not None
    counted = spec.flops(config, batch, training) + squares(config, batch, training["text"])
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.06)
    whole = spec.flops(config, batch, {})
    assert (spec.flops(config, batch, training) == pytest.approx(whole)) == (case == "all")


def test_a_family_is_found_by_its_model_type() -> None:
    for name in FAMILIES.names():
        for model_type in FAMILIES.get(name).hf_types:
            assert family_of(model_type).name == name
    with raises("model.unknown-model-type") as caught:
        family_of("qwen2_vll")
    assert caught.value.nearest == "qwen2_vl"


def test_an_unknown_preset_names_the_nearest() -> None:
    with raises("model.unknown-preset") as caught:
        resolve(ModelSection(family="qwen2_vl", preset="quickstar"))
    assert caught.value.nearest == "quickstart"
