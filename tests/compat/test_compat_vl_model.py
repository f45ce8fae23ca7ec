"""`VLModel` of MindSpeed-MM: one of our families from a model.json, called with the tensors of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import tessera
from tessera.config.run_config import ParallelSection, load_config
from tessera.core.callback import Callback
from tessera.parallel.make_plan import make_plan
from tessera.runtime.modules import clean_name
from tessera_compat.mindspeed_mm.vl_model import VLModel
from tests.close import rounding
from tests.compat.test_parallel_fsdp2_file import EXAMPLE
from tests.errors import raises

IMAGE, VIDEO, START = 60, 61, 62
TEXT = {
    "model_id": "qwen2lm",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 64,
    "mrope_section": [1, 1, 2],
    "max_position_embeddings": 128,
    "untie_embeddings_and_output_weights": True,
}
VISION = {
    "model_id": "qwen2vit",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "patch_size": 4,
    "freeze": True,
}
MODEL: dict[str, Any] = {
    "model_id": "qwen2vl",
    "img_context_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "image_encoder": {"vision_encoder": VISION, "vision_projector": {"model_id": "lnmlp", "freeze": True}},
    "text_decoder": TEXT,
}
WINDOWS = {"model_id": "qwen2_5_vit", "window_attn_size": 16, "fullatt_block_indexes": [1]}


def model_json(**vision: Any) -> dict[str, Any]:
    data = copy.deepcopy(MODEL)
    data["image_encoder"]["vision_encoder"].update(vision)
    return data


def row(seed: int, grids: list[tuple[int, int, int]], length: int = 20) -> dict[str, Tensor]:
    """A question with images, as transformers' processor gives it; padded on the left."""
    chance = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for t, h, w in grids:
        tokens += [START, *[IMAGE] * (t * h * w // 4), 63]
    tokens += torch.randint(50, (length - len(tokens) - seed,), generator=chance).tolist()
    ids = torch.tensor([0] * seed + tokens)
    labels = torch.where(ids >= 50, -100, ids)
    labels[: seed + 1] = -100  # nothing comes before the first token, not even padding
    mask = (torch.arange(length) >= seed).long()
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 16, generator=chance)
    grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


def together(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined = ("pixel_values", "image_grid_thw")
    return {
        key: torch.cat([one[key] for one in rows]) if key in joined else torch.stack([one[key] for one in rows])
        for key in rows[0]
    }


@pytest.mark.parametrize("vision", [{}, WINDOWS], ids=["qwen2_vl", "qwen2_5_vl"])
def test_the_loss_is_that_of_transformers(vision: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    hf = VLModel(model_json(**vision)).family_config.to_hf()
    torch.manual_seed(0)
    theirs = getattr(transformers, hf["architectures"][0])(transformers.AutoConfig.for_model(**hf)).eval()
    theirs.save_pretrained(tmp_path)
    ours = VLModel({"init_from_hf_path": str(tmp_path)})
    batch = together([row(0, [(1, 4, 4)]), row(2, [(1, 2, 6), (1, 4, 2)]), row(3, [])])
    kinds = (batch["input_ids"] == IMAGE).long()  # newer releases ask which tokens are whose
    expected = theirs(**batch, mm_token_type_ids=kinds)
    outputs = ours(**batch)
    # Sums over 64 features in four layers, in another order.
    torch.testing.assert_close(outputs["loss"], expected.loss, rtol=rounding(4 * 64), atol=0)
    logits = ours(**{**batch, "labels": None})
    is_token = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[is_token], expected.logits[is_token], rtol=1e-3, atol=rounding(4 * 64, k=64))


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return row(number % 4, [(1, 4, 4)])


class Weights(Callback):
    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}

    def on_start(self, trainer: Any) -> None:
        self.first = {clean_name(name): p.full_tensor().clone() for name, p in sharded(trainer)}

    def on_end(self, trainer: Any) -> None:
        self.last = {clean_name(name): p.full_tensor().clone() for name, p in sharded(trainer)}


def sharded(trainer: Any) -> Any:
    return [(name, p) for name, p in trainer.module.named_parameters() if p.requires_grad]


def test_it_trains_by_the_printed_file_from_its_own_weights(tmp_path: Path) -> None:
    (tmp_path / "fsdp2_config.yaml").write_text(EXAMPLE)
    torch.manual_seed(1)
    model, seen = VLModel(model_json()), Weights()
    tessera.train(
        {
            "name": "vl",
            "out": str(tmp_path),
            "model": {"family": "module"},
            "data": {"kind": "custom", "options": {"collate_fn": f"{__name__}:together"}, "workers": 0},
            "parallel": {"fsdp2_config": str(tmp_path / "fsdp2_config.yaml")},
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
            "checkpoint": {"at_end": False},
        },
        model=model,
        dataset=Rows(),
        callbacks=[seen],
    )
    parameters = dict(model.named_parameters())
    assert seen.first.keys() == {name for name, p in parameters.items() if p.requires_grad}
    assert not any(name.startswith(("vision", "projector")) for name in seen.first)
    assert [name for name, tensor in seen.first.items() if not torch.equal(tensor, parameters[name])] == []
    assert not torch.equal(seen.first["head.weight"], seen.last["head.weight"])


MEGATRON = "megatron.core.transformer.transformer_layer.TransformerLayer"
HUB = "transformers.models.qwen2_vl.modeling_qwen2_vl."
VISION_MODEL = "mindspeed_mm.models.vision.vision_model.VisionModel"


@pytest.mark.parametrize(
    ("text", "blocks", "ignored", "recomputed"),
    [
        (
            f"sub_modules_to_wrap: [{MEGATRON}]\nignored_modules: [{VISION_MODEL}]\nrecompute_modules: [{MEGATRON}]\n",
            ["text.layers.0", "text.layers.1"],
            ["vision", "projector"],
            ["text.layers.0", "text.layers.1", "vision.blocks.0", "vision.blocks.1"],
        ),
        (
            f"sub_modules_to_wrap: [{HUB}Qwen2VLVisionBlock, {HUB}Qwen2VLDecoderLayer, my_models.moe.Layer]\n",
            ["text.layers.0", "text.layers.1", "vision.blocks.0", "vision.blocks.1"],
            [],
            [],
        ),
    ],
    ids=["megatron", "transformers"],
)
def test_a_file_may_name_classes(
    text: str, blocks: list[str], ignored: list[str], recomputed: list[str], tmp_path: Path
) -> None:
    """As published files do: classes of other systems, some of them not in the model, some in what is ignored."""
    (tmp_path / "fsdp2_config.yaml").write_text(text)
    section = load_config(
        {
            "model": {"family": "module"},
            "parallel": {"fsdp2_config": str(tmp_path / "fsdp2_config.yaml")},
            "train": {"steps": 1},
        }
    ).parallel
    with torch.device("meta"):
        model = VLModel(model_json())
    plan = make_plan(section, model.model_plan(), model, 4)
    assert plan.layout.axes.size("fsdp") == 4
    assert sorted(plan.layout.modules.blocks) == blocks
    assert list(plan.layout.modules.ignored) == ignored
    assert sorted(one.path for one in plan.layout.modules.recompute) == recomputed


def test_classes_of_which_none_is_there_are_refused(tmp_path: Path) -> None:
    model = VLModel(model_json())
    section = ParallelSection(wrap=["my_models.moe.Layer", "my_models.dense.Layer"])
    with raises("recipe.pattern-matches-nothing", "my_models.moe.Layer"):
        make_plan(section, model.model_plan(), model, 2)


def test_what_is_not_here_is_refused() -> None:
    with raises("job.vision-encoder"):
        VLModel(model_json(model_id="SigLip"))
    model = VLModel(model_json())
    batch = together([row(0, [(1, 4, 4)])])
    with raises("job.media-count", "image_grid_thw"):
        model(**{**batch, "image_grid_thw": torch.zeros(0, 3, dtype=torch.long)})
    with raises("job.media-tokens"):
        model(**{**batch, "image_grid_thw": torch.tensor([[1, 2, 4]])})
    with raises("job.unknown-input", "pixel_value"):
        model(**batch, pixel_value=batch["pixel_values"])
