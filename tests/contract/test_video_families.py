"""What video families have beyond the others: positions in frames, stored positions, captions in templates."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from generation import GenerationFamily, grid_positions, samples_of
from ltx_generation import LTXVideo
from parity import from_foreign, randomize
from video_generation import CogVideoX, HunyuanVideo, HunyuanVideo15

from tessera.diffusion.encoders import SampleConditions
from tessera.diffusion.sampling.denoise import packed
from tessera.nn.joint_transformer import JointTransformer
from tests.close import assert_within_rounding, rounding, with_moved_weights
from tests.errors import raises


def test_positions_of_ltx_video_may_be_those_of_the_first_frame_in_each_latent() -> None:
    family = LTXVideo()
    config = family.config("plain")
    reference = family.reference(config)
    randomize(reference, seed=2)
    chosen = config.model_copy(update={"coordinates": "frames", "frame_rate": 30.0})
    model = from_foreign(family.spec, chosen, reference.state_dict())
    batch = family.batch(config, torch.Generator().manual_seed(1))
    predictions = model(batch)["latents"].split([*batch.segments["latents"].lengths])
    for at, grid in enumerate(family.grids):
        places = (grid_positions(grid) * torch.tensor([[8], [32], [32]])).float()
        places[0] = (places[0] - 7).clamp(min=0) * (1.0 / 30.0)
        text = samples_of(batch, "text")[at][None]
        exact = reference(
            samples_of(batch, "latents")[at][None],
            text,
            batch["timesteps"][at : at + 1],
            torch.ones(text.shape[:2]),
            video_coords=places[None],
            return_dict=False,
        )[0][0]
        limit = rounding(64, k=64) * float(exact.detach().abs().max())
        torch.testing.assert_close(predictions[at], exact, rtol=0, atol=limit)
    assert not torch.allclose(
        from_foreign(family.spec, config, reference.state_dict())(batch)["latents"][:12], predictions[0]
    )


def test_a_video_of_another_size_than_stored_positions_is_refused() -> None:
    family = CogVideoX()
    config = family.config("stored positions")
    batch = family.batch(config, torch.Generator().manual_seed(1))
    batch.shapes["latents"] = ((1, 3, 3), (2, 4, 3))
    with raises("generation.size-has-no-positions") as caught:
        family.spec.main.build(config)(batch)
    assert "5 frames" in str(caught.value.fix)


def test_templates_of_captions_are_those_of_the_published_pipelines() -> None:
    (captions, pooled) = HunyuanVideo().config("plain").generation().captions
    assert captions.template == DEFAULT_PROMPT_TEMPLATE["template"]
    assert captions.skip == DEFAULT_PROMPT_TEMPLATE["crop_start"]
    assert pooled.pooled
    (captions,) = HunyuanVideo15().config("image").generation().captions
    published = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    assert f"<|im_start|>system\n{published['system_message'].default}<|im_end|>" in captions.template
    assert captions.skip == published["crop_start"].default
    assert captions.length == published["tokenizer_max_length"].default
    assert captions.layer == -(published["num_hidden_layers_to_skip"].default + 1)


def test_a_first_frame_in_place_is_sampled_at_the_times_of_samples_alone() -> None:
    """HunyuanVideo gives first frames the time 0 by itself: a further time would belong to no sample."""
    family = HunyuanVideo()
    config = family.config("first frame in place")
    model, generation = family.spec.main.build(config), config.generation()
    randomize(model, seed=2)
    chance = torch.Generator().manual_seed(1)
    text, pooled, first = (
        torch.randn(*size, generator=chance) for size in ((5, 12), (6,), (4, generation.patch_values))
    )
    inputs = packed([SampleConditions(text, pooled, first=first)] * 2, generation, (3, 2, 2), 6.0, torch.float32)
    assert "time_index" not in inputs.batch
    assert inputs.generated.tolist() == [*range(4, 12), *range(16, 24)]
    assert model(inputs.batch.with_tensors(timesteps=torch.tensor([500.0, 500.0])))["latents"].shape == (24, 16)


def test_settings_that_cannot_be_computed_are_named() -> None:
    kind = HunyuanVideo.spec.config
    with pytest.raises(ValueError, match="add up to attention_head_dim 12"):
        kind(attention_head_dim=12, num_attention_heads=2)
    with pytest.raises(ValueError, match="num_attention_heads"):
        kind(attention_head_dim=12, num_attention_heads=5, rope_axes_dim=(4, 4, 4), mlp_ratio=1.1)
    with pytest.raises(ValueError, match="cross_attention_dim 7"):
        LTXVideo.spec.config(cross_attention_dim=7)
    with pytest.raises(ValueError, match="needs use_rotary_positional_embeddings"):
        CogVideoX.spec.config(use_learned_positional_embeddings=True)
    with pytest.raises(ValueError, match="attention_head_dim 24 must be a multiple of 16"):
        CogVideoX.spec.config(use_rotary_positional_embeddings=True, attention_head_dim=24)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        (LTXVideo(), "patches"),
        (CogVideoX(), "sines"),
        (HunyuanVideo(), "first frame in place"),
        (HunyuanVideo15(), "image"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.spec.name,
)
def test_stages_of_a_pipeline_predict_what_the_whole_model_does(family: GenerationFamily, case: str) -> None:
    family.grids = ((3, 4, 4), (1, 3, 2))  # tokens enough that conditions fit beside them
    config = family.config(case).model_copy(update={"num_layers": 2})
    whole = family.spec.main.build(config)
    randomize(whole, seed=4)
    batch = family.batch(config, torch.Generator().manual_seed(1))
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    first.head, second.embed = None, None
    first.blocks[1], second.blocks[0] = None, None
    if isinstance(first, JointTransformer):
        first.single_blocks = torch.nn.ModuleList()
    weights = list(whole.parameters())
    plain, *moved = with_moved_weights(weights, lambda: {"latents": whole(batch)["latents"]})
    with torch.no_grad():
        staged = {"latents": second(batch, carry=first(batch))["latents"]}
    assert_within_rounding(staged, plain, *moved)
