"""Blocks over text and latents: where elements lie does not matter, stages of a pipeline make the same, unused weights
are frozen."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch, Segments
from tessera.lora.factors import Factors, join_to_native, to_foreign
from tessera.lora.load import read_adapters
from tessera.lora.select import Adapter
from tessera.models import resolve
from tessera.nn.joint_attention import JointShape, segments_by_kind
from tessera.nn.joint_transformer import JointTransformer, TransformerShape
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import ColumnsByHead
from tests.close import rounding
from tests.errors import raises

BLOCK = JointShape(hidden=16, heads=2, intermediate=32)


def model_of(**options: Any) -> JointTransformer:
    shape = TransformerShape(
        BLOCK, **{"double": 2, "single": 1, **options}, latent_values=6, out_values=4, text_width=5
    )
    model = JointTransformer(shape).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model


def batch_of(samples: list[tuple[int, int]], text_first: bool = True, seed: int = 1) -> Batch:
    """`samples`: text tokens and latent tokens of each. Every sample has its own numbers, wherever it lies."""
    parts: dict[str, list[Tensor]] = {"text": [], "latents": [], "positions": []}
    kinds = []
    for number, (texts, latents) in enumerate(samples):
        generator = torch.Generator().manual_seed(seed + number)
        parts["text"].append(torch.randn(texts, 5, generator=generator, dtype=torch.float64))
        parts["latents"].append(torch.randn(latents, 6, generator=generator, dtype=torch.float64))
        places = [torch.zeros(3, texts, dtype=torch.int64), torch.arange(3 * latents).view(3, -1) % 4]
        marks = [torch.ones(texts), torch.zeros(latents)]
        parts["positions"] += places if text_first else places[::-1]
        kinds += marks if text_first else marks[::-1]
    is_text = torch.cat(kinds).bool()
    lengths = torch.tensor([sum(sample) for sample in samples])
    tensors = {
        "text": torch.cat(parts["text"]),
        "latents": torch.cat(parts["latents"]),
        "positions": torch.cat(parts["positions"], dim=1),
        "sample_index": torch.arange(len(samples)).repeat_interleave(lengths),
        "text_index": is_text.nonzero().flatten(),
        "latent_index": (~is_text).nonzero().flatten(),
        "timesteps": 100.0 * torch.arange(1, len(samples) + 1),
    }
    segments = {"latents": Segments.of(lengths.tolist()), "text": Segments.of([text for text, _ in samples])}
    return Batch(tensors, segments)


@pytest.mark.parametrize("options", [{"rope_axes": (2, 2, 4)}, {"single": 0}], ids=["rotated", "double alone"])
def test_a_sample_alone_is_predicted_as_among_others_and_with_its_text_behind_it(options: dict[str, Any]) -> None:
    model, samples = model_of(**options), [(3, 7), (0, 4), (5, 2)]
    together = model(batch_of(samples))["latents"]
    behind = model(batch_of(samples, text_first=False))["latents"]
    assert torch.allclose(behind, together, atol=1e-12)
    alone = [
        model(batch_of([sample], seed=1 + number).with_tensors(timesteps=torch.tensor([100.0 * (number + 1)])))[
            "latents"
        ]
        for number, sample in enumerate(samples)
    ]
    assert torch.allclose(torch.cat(alone), together, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"single": 0, "dual_blocks": (0,)}, {"single": 0, "reference_time": True}])
@pytest.mark.parametrize("cut", [1, 2])
def test_stages_of_a_pipeline_predict_what_the_whole_model_does(options: dict[str, Any], cut: int) -> None:
    whole, batch = model_of(**{"double": 3, **options}), batch_of([(3, 7), (5, 2)])
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    first.head, second.embed = None, None
    for at in range(3):
        (second if at < cut else first).blocks[at] = None  # type: ignore[assignment]
    for at in range(len(whole.single_blocks)):
        first.single_blocks[at] = None  # type: ignore[assignment]
    carry = first(batch)
    assert carry.shape == (2 * 17, BLOCK.hidden)
    assert torch.allclose(second(batch, carry=carry)["latents"], whole(batch)["latents"], atol=1e-12)


def test_more_samples_than_tokens_do_not_fit_between_stages() -> None:
    model = model_of(reference_time=True, single=0)
    model.head = None
    with raises("layout.carry-overflow"):
        model(batch_of([(0, 1), (0, 1), (1, 0)]))


def test_weights_behind_the_last_text_are_frozen_and_have_no_effect() -> None:
    model, batch = model_of(single=0), batch_of([(3, 7)])
    before = model(batch)["latents"]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name.rpartition(".")[0] for name in frozen} == {
        *("blocks.1.attn.text_out", "blocks.1.text_mlp.up", "blocks.1.text_mlp.down")
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.fill_(7)
    assert torch.equal(model(batch)["latents"], before)
    assert all(parameter.requires_grad for parameter in model_of(single=1).parameters())


def test_latents_alone_attend_inside_their_own_sample() -> None:
    kinds = segments_by_kind(Segments.of([10, 4, 7]), Segments.of([3, 0, 5]))
    assert kinds.bounds.tolist() == [0, 3, 10, 10, 14, 19, 21]
    assert kinds.lengths == (3, 7, 0, 4, 5, 2)
    assert kinds.longest == 7


def test_a_table_of_positions_is_frozen_and_begins_with_sines() -> None:
    model = model_of(single=0, table=5, table_base=10)
    table = torch.empty(25, BLOCK.hidden)
    model.initialize("embed.table.weight", table, torch.Generator())
    # Row 1, column 3 of a table for images twice as large: the second of four frequencies, of columns and of rows.
    assert table[8, [1, 9]].tolist() == pytest.approx([math.sin(6 / 10), math.sin(2 / 10)], abs=rounding())
    assert not model.get_parameter("embed.table.weight").requires_grad


def test_columns_are_grouped_by_head_and_back() -> None:
    op = ColumnsByHead(2, (4, 6))
    foreign = torch.arange(10).expand(3, -1)
    native = op.to_native([foreign])
    assert native[0].tolist() == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]
    assert torch.equal(op.to_foreign(native)[0], foreign)


def test_an_adapter_of_such_columns_is_the_same_in_its_published_form_and_back() -> None:
    op = ColumnsByHead(2, (4, 6))
    table = WeightMap((Rule("out.weight", "proj_out.weight", op),))
    a, b = torch.randn(3, 10), torch.randn(5, 3)
    published = to_foreign({"out": Factors(Adapter(3, 6.0), a, b)}, table, "here")["proj_out"]
    assert torch.allclose(published.b @ published.a, op.to_foreign(b @ a)[0], atol=1e-5)
    again = join_to_native(op, [published])
    assert torch.equal(again.a, a)
    assert torch.equal(again.b, b)


def test_published_adapters_for_layers_that_nobody_reads_are_passed_over(tmp_path: Path) -> None:
    """Adapters of Qwen-Image are trained for every block, also for text behind the last attention."""
    spec, config = resolve(ModelSection(family="qwen_image", preset="quickstart"))
    model = spec.main.build(config)
    paths = [name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(".weight")]
    layers = [f"transformer_blocks.{n}.{name}" for n in (2, 3) for name in ("attn.to_add_out", "txt_mlp.net.2")]
    sides = {f"base_model.model.{one}.lora_A.weight": torch.ones(2, 512 if "mlp" in one else 128) for one in layers}
    sides |= {f"base_model.model.{one}.lora_B.weight": torch.ones(128, 2) for one in layers}
    save_file(sides, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": layers}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    adapters = read_adapters(tmp_path, [f"{path}.weight" for path in paths], spec.main.weight_map(config))
    assert sorted(adapters) == ["blocks.2.attn.text_out", "blocks.2.text_mlp.down"]
    frozen = {name.rpartition(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert set(spec.main.weight_map(config).idle) == frozen  # type: ignore[union-attr]
