"""A MindSpeed-MM fsdp2_config.yaml is read as it stands, and a mistake in it is named with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.config.reader import dump_yaml, read_mapping
from tessera.config.run_config import ModelSection, ParallelSection, PrecisionSection, RunConfig, load_config
from tessera.models import build_on_meta, resolve
from tessera.parallel.make_plan import make_plan
from tessera.parallel.plan import Plan
from tests.errors import raises

# As the published example has it, tabs at the ends of lines included.
EXAMPLE = """sharding_size: auto\t
sub_modules_to_wrap:\t
  - "text_decoder.output_layer"\t
  - "text_decoder.embedding"\t
  - "text_decoder.rotary_pos_emb"\t
  - "text_decoder.decoder.layers.{*}"\t
param_dtype: "bf16"\t
reduce_dtype: "fp32"\t
cast_forward_inputs: True\t
ignored_modules:\t
  - "image_encoder"\t
recompute_modules:\t
  - "text_decoder.decoder.layers.{*}"\t
num_to_forward_prefetch: 2\t
num_to_backward_prefetch: 2
offload_to_cpu: False
"""


def load(folder: Path, text: str, compute: str | None = None, **parallel: Any) -> RunConfig:
    path = folder / "fsdp2_config.yaml"
    path.write_text(text)
    recipe = {"model": {"family": "qwen2_vl"}, "train": {"steps": 1}}
    settings = {} if compute is None else {"precision": {"compute": compute}}
    return load_config({**recipe, **settings, "parallel": {"fsdp2_config": str(path), **parallel}})


def test_the_published_example(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    section, precision = config.parallel, config.precision
    assert section.wrap == [
        "text_decoder.output_layer",
        "text_decoder.embedding",
        "text_decoder.rotary_pos_emb",
        "text_decoder.decoder.layers.{*}",
    ]
    assert (section.shard, precision.compute, precision.reduce) == ("auto", "bfloat16", "float32")
    assert (section.ignore, section.recompute) == (["image_encoder"], ["text_decoder.decoder.layers.{*}"])
    assert (section.prefetch_forward, section.prefetch_backward) == (2, 2)
    assert precision.cast_inputs
    assert section.use_reentrant  # the file's own default
    assert not section.offload


def test_defaults_are_the_files_own(tmp_path: Path) -> None:
    config = load(tmp_path, "offload_to_cpu: true\n")
    assert config.parallel == ParallelSection(
        shard=1, offload=True, pin_memory=False, reshard_after_forward=True, prefetch_backward=1
    )
    assert config.precision == PrecisionSection(cast_inputs=True)


def test_fp16_is_computed_with_loss_scaling(tmp_path: Path) -> None:
    precision = load(tmp_path, "param_dtype: fp16\nreduce_dtype: fp16\noutput_dtype: fp16\n").precision
    assert (precision.compute, precision.reduce, precision.output) == ("float16",) * 3


def test_a_file_that_names_classes_has_the_defaults_of_its_form(tmp_path: Path) -> None:
    wrapped = "sub_modules_to_wrap:\n  - megatron.core.transformer.transformer_layer.TransformerLayer\n"
    section = load(tmp_path, wrapped + "offload_to_cpu: true\n").parallel
    assert (section.shard, section.pin_memory, section.prefetch_backward) == ("auto", True, 0)
    recomputed = wrapped + "recompute_modules:\n  - my_models.layers.Layer\n"
    section = load(tmp_path, recomputed).parallel
    assert (section.use_reentrant, section.prefetch_backward) == (False, 1)


def test_keys_about_experts_are_honoured_or_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "expert_parallel_size: 2\nmoe_modules:\n  - model.layers.{*}.mlp.experts\nalign_fsdp_param_groups: true\n"
    assert load(tmp_path, text).parallel.ep == 2
    assert "moe_modules has no effect in Tessera: the plan of a model" in caplog.text
    assert "align_fsdp_param_groups has no effect" in caplog.text
    caplog.clear()
    assert load(tmp_path, "reshard_local_experts: false\n").parallel.ep == 1
    assert caplog.text == ""


def test_a_saved_run_needs_the_file_no_more(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE, accumulate="local")
    (tmp_path / "fsdp2_config.yaml").unlink()
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(read_mapping(tmp_path / "config.yaml")) == config
    assert yaml.safe_load(dump_yaml(config))["parallel"]["fsdp2_config"] is None


def test_both_places_may_agree(tmp_path: Path) -> None:
    assert load(tmp_path, "sharding_size: 2\nparam_dtype: bf16\n", "bfloat16", shard=2).parallel.shard == 2
    assert load(tmp_path, "param_dtype: bf16\n", shard=4).parallel.shard == 4  # a default is no statement


@pytest.mark.parametrize(
    ("text", "settings", "error"),
    [
        ("sharding_sise: 2\n", {}, "recipe.unknown-key sharding_size"),
        ("param_dtype: bf61\n", {}, "recipe.wrong-value bf16 fp16 fp32"),
        ("expert_parallel_size: 2\nreshard_local_experts: false\n", {}, "job.local-experts"),
        ("moe_modulez: []\n", {}, "recipe.unknown-key moe_modules"),
        ("num_to_forward_prefetch: -1\n", {}, "recipe.wrong-value"),
        ("sub_modules_to_wrap: layers\n", {}, "recipe.wrong-value"),
        ("sharding_size: 2\n", {"shard": 4}, "job.fsdp2-conflict parallel.shard sharding_size"),
        ("param_dtype: bf16\n", {"compute": "float32"}, "job.fsdp2-conflict"),
        ("- 1\n", {}, "recipe.not-a-mapping"),
    ],
)
def test_mistakes_name_the_file(tmp_path: Path, text: str, settings: dict[str, Any], error: str) -> None:
    with raises(error) as caught:
        load(tmp_path, text, **settings)
    assert "fsdp2_config.yaml" in str(caught.value)


def test_fp16_without_loss_scaling_is_refused(tmp_path: Path) -> None:
    for key in ("reduce", "output"):
        with raises("recipe.wrong-value", str(key)):
            load(tmp_path, f"param_dtype: bf16\n{key}_dtype: fp16\n")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises("recipe.no-such-file"):
        load_config(
            {
                "model": {"family": "qwen2_vl"},
                "train": {"steps": 1},
                "parallel": {"fsdp2_config": str(tmp_path / "none.yaml")},
            }
        )


# ---------------------------------------------------------------------------------------------- names of other systems

REMOTE = "transformers_modules.InternVL3_5-30B-A3B-Instruct.modeling_intern_vit.InternVisionEncoderLayer"
LAYERS, BLOCKS = ["text.layers.0", "text.layers.1"], ["vision.blocks.0", "vision.blocks.1"]


def plan_of(family: str, **keys: list[str]) -> Plan:
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    freeze = keys.pop("freeze", [])
    section = ParallelSection.model_validate(keys)
    return make_plan(section, spec.main.plan(config), build_on_meta(spec, config), 2, freeze=freeze)


@pytest.mark.parametrize(
    ("family", "named", "blocks"),
    [
        ("internvl", "vision_model.encoder.layers.{*}", BLOCKS),  # as the published file has them
        ("internvl", "vision_model.embeddings", ["vision.patch_embed", "vision.table"]),
        ("internvl", "language_model.model.layers.{0-1}", LAYERS),
        ("internvl", "model.vision_tower.encoder.layer.{*}", BLOCKS),  # as transformers has them
        ("internvl", REMOTE, BLOCKS),
        ("internvl", "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer", LAYERS),
        ("internvl", "vision_model", ["vision"]),
        ("internvl", "vision_model.encoder", BLOCKS),
        ("internvl", "mlp1", ["projector"]),
        ("internvl", "language_model", LAYERS),  # the head and the embedding are the root's
        ("qwen2_vl", "model.language_model", LAYERS),
        ("qwen2_vl", "text", LAYERS),
        ("qwen2_vl", "text_decoder", LAYERS),
        ("qwen2_vl", "text_decoder.decoder", [*LAYERS, "text.norm"]),
        ("qwen2_vl", "image_encoder.encoder.blocks", BLOCKS),
        ("qwen2_vl", "visual", ["vision", "projector"]),
        ("llava", "vision_tower.vision_model.encoder.layers.{*}", BLOCKS),
        ("llava", "multi_modal_projector", ["projector"]),
        ("qwen3", "model", LAYERS),
        ("wan", "predictor", ["blocks.0", "blocks.1"]),
    ],
)
def test_modules_are_found_by_their_names_in_other_systems(family: str, named: str, blocks: list[str]) -> None:
    wrapped = plan_of(family, wrap=[named]).layout.modules.blocks
    assert [path for path in wrapped if not path.endswith(tuple("23456789"))] == blocks  # the first two layers


def test_containers_are_ignored_and_recomputed_by_their_names_in_other_systems() -> None:
    tower = ["vision", "projector"]
    plan = plan_of("internvl", ignore=["vision_model", "mlp1"], recompute=["language_model.model"], freeze=tower)
    assert plan.layout.modules.ignored == ("vision", "projector")
    assert [part.path for part in plan.layout.modules.recompute] == ["text"]


def test_a_name_that_nothing_has_is_said_as_it_was_written() -> None:
    with raises("recipe.pattern-matches-nothing", "vision_model.encoder.layer.{*}.moe"):
        plan_of("internvl", wrap=["vision_model.encoder.layer.{*}.moe"])
