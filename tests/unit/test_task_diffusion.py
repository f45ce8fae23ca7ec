"""The objective of generation models: noise levels are diffusers', randomness is the row's, any split trains alike."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.config.reader import build
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, Stream
from tessera.core.outputs import LATENTS, Outputs
from tessera.core.spec import Component, ModelSpec
from tessera.diffusion.captions import Captions
from tessera.diffusion.family import GenerationFamily, GenerationSpec
from tessera.diffusion.given_images import FirstFrameChannels, MarkedFrameChannels, MaskedVideoChannels, ReplacedFrames
from tessera.diffusion.noise_levels import Betas, NoiseLevels, ShiftByTokens, TimeOptions
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.parallel.engine import SimpleEngine
from tessera.parallel.sequence_sharding import BatchSharding, SequenceSharding, shard_batch
from tests.errors import raises

CROSS = GenerationFamily(channels=3, patch=(1, 2, 1), captions=(Captions(length=4),))
JOINT = replace(CROSS, joint=True)
TEXT = 5
MAIN = Stream(("sample_index", "positions"), "latents", dim=-1, index="token_index")
JOINT_MAIN = replace(MAIN, positions=("text_index", "latent_index"))


def options(**values: Any) -> TimeOptions:
    return build(TimeOptions, values, "train.task_options")


# ---------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_flow_levels_are_those_of_the_published_scheduler(shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=50, shift=shift)
    levels = NoiseLevels(options(steps=50, shift=shift), "flow")
    drawn = [levels.at((number + 0.5) / 50, 1) for number in range(50)]
    assert torch.allclose(torch.tensor([one.noise_share for one in drawn]), scheduler.sigmas, atol=1e-6)
    assert torch.allclose(torch.tensor([one.time for one in drawn]), scheduler.timesteps * 20, atol=1e-3)
    assert all(one.clean_share == 1 - one.noise_share for one in drawn)


@pytest.mark.parametrize("law", ["exponential", "linear"])
def test_larger_samples_get_more_noise_as_in_flux(law: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=law)
    levels = NoiseLevels(options(steps=20, shift_by_tokens={"law": law}), "flow")
    for tokens in (256, 1000, 4096):
        scheduler.set_timesteps(sigmas=torch.linspace(1, 0.05, 20).tolist(), mu=calculate_shift(tokens))
        shares = torch.tensor([levels.at((number + 0.5) / 20, tokens).noise_share for number in range(20)])
        assert torch.allclose(shares, scheduler.sigmas[:-1], atol=1e-5)
    assert ShiftByTokens().shift(4096) > ShiftByTokens().shift(256)


def test_ddpm_levels_are_those_of_the_published_schedulers() -> None:
    from diffusers import CogVideoXDDIMScheduler, DDPMScheduler

    for schedule in ("linear", "scaled_linear"):
        ddpm = DDPMScheduler(beta_start=0.001, beta_end=0.02, beta_schedule=schedule)
        ours = Betas(schedule=schedule, start=0.001, end=0.02).signal_shares(1000)  # type: ignore[arg-type]
        assert torch.allclose(ours.float(), ddpm.alphas_cumprod, atol=1e-5)
    for shift, zero in ((3.0, True), (1.0, True), (3.0, False)):
        ddim = CogVideoXDDIMScheduler(snr_shift_scale=shift, rescale_betas_zero_snr=zero)
        shares = Betas(snr_shift=shift, zero_snr=zero).signal_shares(1000)
        assert torch.allclose(shares, ddim.alphas_cumprod.double(), atol=1e-9)


@pytest.mark.parametrize("objective", ["epsilon", "v"])
def test_noisy_latents_and_targets_are_those_of_the_published_scheduler(objective: Any) -> None:
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    task = bound(CROSS, objective=objective)
    batch = row_batch(CROSS, [[6, 4]], [3])
    inputs = task.inputs(batch)
    times = inputs["timesteps"].long()[inputs["sample_index"]]
    noise = task.prepare(batch)["noise"]
    clean, trained = batch["clean"], inputs["trained_here"]
    noisy = scheduler.add_noise(clean, noise, times)
    wanted = noise if objective == "epsilon" else scheduler.get_velocity(clean, noise, times)
    assert torch.allclose(inputs["latents"][trained], noisy[trained], atol=1e-5)
    assert torch.allclose(inputs["target"][trained], wanted[trained], atol=1e-5)


def test_weights_are_the_published_ones() -> None:
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

    places = [(number + 0.5) / 100 for number in range(100)]
    for weighting in ("none", "sigma_sqrt", "cosmap"):
        drawn = [NoiseLevels(options(steps=100, weighting=weighting), "flow").at(u, 1) for u in places]
        sigmas = torch.tensor([one.noise_share for one in drawn], dtype=torch.float64)
        wanted = compute_loss_weighting_for_sd3(weighting, sigmas).double()
        assert torch.allclose(torch.tensor([one.weight for one in drawn], dtype=torch.float64), wanted, rtol=1e-6)
    snr = compute_snr(
        DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"), torch.arange(1000)
    )
    for objective in ("epsilon", "v"):
        levels = NoiseLevels(options(weighting="min_snr"), objective)  # type: ignore[arg-type]
        weights = torch.tensor([levels.at(1 - (t + 0.5) / 1000, 1).weight for t in range(1000)])
        wanted = snr.clamp(max=5.0) / (snr if objective == "epsilon" else snr + 1)
        assert torch.allclose(weights, wanted, rtol=1e-3)


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_gaussian_weights_are_those_of_the_trainers_of_wan(shift: float) -> None:
    """Written out from their definition: a bell over the schedule's times, moved to 0 and scaled to a mean of 1."""
    levels = NoiseLevels(options(weighting="gaussian", shift=shift), "flow")
    weights = torch.tensor([levels.at((n + 0.5) / 1000, 1).weight for n in range(1000)], dtype=torch.float64)
    base = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    times = shift * base / (1 + (shift - 1) * base) * 1000
    bell = torch.exp(-2 * ((times - 500) / 1000) ** 2)
    wanted = (bell - bell.min()) * (1000 / (bell - bell.min()).sum())
    assert torch.allclose(weights, wanted, rtol=1e-9, atol=1e-12)
    assert weights[0] == 0


@pytest.mark.parametrize("scheme", ["uniform", "logit_normal", "mode"])
def test_times_are_distributed_as_published(scheme: Any) -> None:
    from diffusers.training_utils import compute_density_for_timestep_sampling

    levels = NoiseLevels(options(time=scheme, steps=None, logit_mean=0.5), "flow")
    chance = Random(1)
    ours = torch.tensor([levels.draw(chance, 1).noise_share for _ in range(2000)]).sort().values
    other = torch.Generator().manual_seed(2)
    theirs = compute_density_for_timestep_sampling(scheme, 20_000, 0.5, 1.0, 1.29, generator=other).sort().values
    # Kolmogorov-Smirnov: a distance of 0.06 has a chance below 1e-5 with so many draws.
    shares = torch.searchsorted((1 - theirs).flip(0).contiguous(), ours) / len(theirs)
    assert float((shares - torch.arange(2000) / 2000).abs().max()) < 0.06


@pytest.mark.parametrize("objective", ["flow", "v"])
@pytest.mark.parametrize("bounds", [(0.0, 0.875), (0.875, 1.0)])
def test_an_expert_is_trained_between_its_boundaries(objective: Any, bounds: tuple[float, float]) -> None:
    shift = 5.0 if objective == "flow" else 1.0
    levels = NoiseLevels(options(boundaries=bounds, shift=shift, steps=200), objective)
    times = [levels.at(number / 1000, 1).time for number in range(1001)]
    assert min(times) >= bounds[0] * 1000 - 1e-6
    assert max(times) <= bounds[1] * 1000 + 1e-6
    every = NoiseLevels(options(shift=shift, steps=200), objective)
    all_times = {round(every.at(number / 2000, 1).time, 6) for number in range(2001)}
    inside = {t for t in all_times if bounds[0] * 1000 < t < bounds[1] * 1000}
    assert inside <= {round(t, 6) for t in times}


# ---------------------------------------------------------------------------------------------- batches


def spec_of(family: GenerationFamily | None) -> ModelSpec:
    plan = ModelPlan((), {}, streams={"latents": MAIN if family is None or not family.joint else JOINT_MAIN})
    component = Component(lambda config: nn.Linear(1, 1), lambda config: plan)
    parts: dict[str, Any] = {"name": "toy", "config": type(options()), "main": component}
    return ModelSpec(**parts) if family is None else GenerationSpec(**parts, generation=lambda config: family)


def bound(family: GenerationFamily, **values: Any) -> DiffusionTask:
    task = DiffusionTask(**values)
    task.bind(spec_of(family), None)
    return task


def row_batch(
    family: GenerationFamily, rows: list[list[int]], seeds: list[int], length: int = 16, text: int = 2
) -> Batch:
    """Rows of samples with so many frames of 1 x 1 latent tokens, `text` tokens of text each, and padding."""
    generator = torch.Generator().manual_seed(11)
    lengths, texts, shapes, trained, is_text = [], [], [], [], []
    at = 0
    for row in rows:
        used = 0
        for frames in row:
            words = text if family.joint else 0
            lengths.append(frames + words)
            texts.append(text)
            shapes.append((frames, 1, 1))
            trained += range(at, at + frames)
            is_text += [True] * words + [False] * frames
            at += frames
            used += frames + words
        lengths.append(length - used)
        texts.append(0)
        shapes.append((1, 1, length - used))
        is_text += [False] * (length - used)
        at += length - used
    kinds = torch.tensor(is_text)
    tensors = {
        "clean": torch.randn(at, family.patch_values, generator=generator),
        "text": torch.randn(sum(texts), TEXT, generator=generator),
        "sample_index": torch.repeat_interleave(torch.tensor(lengths)),
        "positions": torch.zeros(3, sum(lengths), dtype=torch.int64),
        "trained": torch.tensor(trained),
    }
    if family.joint:
        tensors |= {"text_index": kinds.nonzero().flatten(), "latent_index": (~kinds).nonzero().flatten()}
    return Batch(
        tensors,
        {"latents": Segments.of(lengths), "text": Segments.of(texts)},
        shapes={"latents": tuple(shapes)},
        seeds=tuple(seeds),
    )


class Toy(nn.Module):
    """Mix a token with its time and the mean of its sample's text."""

    def __init__(self, family: GenerationFamily, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.family = family
        self.latents = nn.Linear(family.patch_values + extra, family.patch_values)
        self.text = nn.Linear(TEXT, family.patch_values)

    def forward(self, batch: Batch) -> Outputs:
        samples = batch["sample_index"]
        if self.family.joint:
            samples = samples[batch["latent_index"]]
        dtype = self.latents.weight.dtype
        texts = torch.segment_reduce(
            self.text(batch["text"].to(dtype)), "sum", lengths=torch.tensor(batch.segments["text"].lengths)
        )
        times = (batch["timesteps"] / 1000).to(dtype)[samples]
        return {LATENTS: (self.latents(batch["latents"].to(dtype)) + texts[samples]) * (1 + times[:, None])}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"time": "logit_normal", "shift": 3.0, "weighting": "cosmap", "caption_dropout": 0.5},
    {"objective": "v", "weighting": "min_snr"},
]


@pytest.mark.parametrize("values", SETTINGS)
@pytest.mark.parametrize("family", [CROSS, JOINT], ids=["cross", "joint"])
def test_any_split_of_a_batch_gives_the_gradient_of_a_float64_reference(
    family: GenerationFamily, values: dict[str, Any]
) -> None:
    rows, seeds = [[3, 5], [7], [2, 2, 2], [6]], [10, 11, 12, 13]
    task = bound(family, **values)
    reference = Toy(family).double()
    whole = task.inputs(row_batch(family, rows, seeds))
    error = (reference(whole)["latents"] - whole["target"].double()).square()[whole["trained_here"]]
    weights = whole["token_weights"].double()[whole["trained_here"]]
    assert len(weights) == 3 + 5 + 7 + 6 + 6
    ((error * weights[:, None]).sum() / error.numel()).backward()
    pieces = row_batch(family, rows, seeds)
    one_by_one = [_row(pieces, number, 4) for number in range(4)]
    for split in ([pieces], one_by_one):
        model = Toy(family)
        totals = SimpleEngine(model).step(task, split)
        assert float(totals.counts["latents"]) == error.numel()
        bands = [float(totals.counts[f"latents_{band}"]) for band in ("low", "middle", "high")]
        assert sum(bands) == error.numel()
        for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None
            assert wanted.grad is not None
            assert torch.allclose(parameter.grad.double(), wanted.grad, rtol=1e-4, atol=1e-6)


def _row(batch: Batch, number: int, rows: int) -> Batch:
    """Return one row of a batch as a batch of its own."""
    lengths, texts = batch.segments["latents"].lengths, batch.segments["text"].lengths
    length = sum(lengths) // rows
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    chosen = [n for n, end in enumerate(ends) if number * length < end <= (number + 1) * length]
    elements = torch.isin(batch["sample_index"], torch.tensor(chosen))
    in_text = torch.isin(torch.repeat_interleave(torch.tensor(texts)), torch.tensor(chosen))
    of_latents = elements[batch["latent_index"]] if "latent_index" in batch else elements
    first = int(of_latents.nonzero()[0])
    trained = batch["trained"][of_latents[batch["trained"]]] - first
    tensors = {
        "clean": batch["clean"][of_latents],
        "text": batch["text"][in_text],
        "sample_index": batch["sample_index"][elements] - chosen[0],
        "positions": batch["positions"][:, elements],
        "trained": trained,
    }
    for name in ("text_index", "latent_index"):
        if name in batch:
            index = batch[name]
            tensors[name] = index[elements[index]] - number * length
    segments = {
        "latents": Segments.of([lengths[n] for n in chosen]),
        "text": Segments.of([texts[n] for n in chosen]),
    }
    shapes = {"latents": tuple(batch.shapes["latents"][n] for n in chosen)}
    return Batch(tensors, segments, shapes=shapes, seeds=(batch.seeds[number],))


@pytest.mark.parametrize(
    ("family", "local_trained"), [(CROSS, False), (CROSS, True), (JOINT, False)], ids=["cross", "own", "joint"]
)
def test_ranks_that_share_a_sequence_have_the_numbers_of_the_whole(
    family: GenerationFamily, local_trained: bool
) -> None:
    task = bound(family, time="logit_normal", caption_dropout=0.5)
    whole = row_batch(family, [[3, 5], [9]], [1, 2])
    wanted = task.inputs(whole)
    main = JOINT_MAIN if family.joint else MAIN
    rows: dict[str, list[Tensor]] = {"latents": [], "target": [], "own": []}
    counted = 0.0
    if local_trained:  # as streams of other families give positions that are trained on
        main = replace(main, positions=("trained",))
    for rank in range(4):
        part = shard_batch(whole, BatchSharding(main, SequenceSharding(2, 2)), rank, {})
        inputs = task.inputs(part)
        rows["own"].append(part["latent_index.sources"] if family.joint else part["token_index"])
        for name in ("latents", "target"):
            rows[name].append(inputs[name])
        counted += float(task.counts(part)["latents"])
        if family.joint:
            assert torch.equal(inputs["text"], wanted["text"][part["text_index.sources"]])
        assert torch.equal(inputs["timesteps"], wanted["timesteps"])
    order = torch.cat(rows["own"]).argsort()
    for name in ("latents", "target"):
        assert torch.equal(torch.cat(rows[name])[order], wanted[name])
    assert counted == float(task.counts(whole)["latents"])


def test_randomness_is_that_of_the_row_and_the_place_there() -> None:
    task = bound(CROSS)
    first, again, other = (task.inputs(row_batch(CROSS, [[3, 5]], [seed])) for seed in (4, 4, 5))
    assert torch.equal(first["latents"], again["latents"])
    assert not torch.equal(first["target"], other["target"])
    times = first["timesteps"].tolist()
    assert times[0] != times[1]
    moved = task.inputs(row_batch(CROSS, [[3, 4]], [4]))  # a neighbour changes neither noise nor time
    assert torch.equal(moved["target"][:3] + moved["clean"][:3], first["target"][:3] + first["clean"][:3])


def test_dropped_captions_of_features_are_zeros() -> None:
    batch = row_batch(CROSS, [[1] * 8 for _ in range(50)], list(range(50)))
    texts = bound(CROSS, caption_dropout=0.25).inputs(batch)["text"].view(-1, 2, TEXT)
    dropped = (texts == 0).all(-1).all(-1)
    assert torch.equal(texts[~dropped], batch["text"].view(-1, 2, TEXT)[~dropped])
    assert 0.25 - 4 * math.sqrt(0.25 * 0.75 / 400) < float(dropped.float().mean()) < 0.25 + 4 * 0.0217
    assert torch.equal(bound(CROSS).inputs(batch)["text"], batch["text"])


def test_a_given_first_frame_takes_the_place_of_noise() -> None:
    family = replace(CROSS, images=ReplacedFrames(), token_times=True)
    batch = row_batch(family, [[4, 1]], [8])  # the second is an image, which is learned whole
    inputs = bound(family, given="first").inputs(batch)
    assert torch.equal(inputs["latents"][0], batch["clean"][0])
    assert not torch.equal(inputs["latents"][1], batch["clean"][1])
    assert inputs["trained_here"].tolist()[:5] == [False, True, True, True, True]
    assert inputs["token_weights"][0] == 0
    assert inputs["timesteps"][inputs["time_index"]][:2].tolist() == [0.0, float(inputs["timesteps"][0])]
    assert float(bound(family, given="first").counts(batch)["latents"]) == 4 * family.patch_values


def test_untrained_tokens_stay_clean() -> None:
    batch = row_batch(JOINT, [[6]], [9])
    batch = batch.with_tensors(trained=torch.arange(4))  # the last two are of an image to edit
    inputs = bound(JOINT).inputs(batch)
    assert torch.equal(inputs["latents"][4:], batch["clean"][4:])
    model = Toy(JOINT)
    bound(JOINT).losses(model(inputs), inputs).terms[0].sum.backward()
    changed = inputs.with_tensors(target=inputs["target"].index_fill(0, torch.tensor([4, 5]), 7.0))
    again = Toy(JOINT)
    bound(JOINT).losses(again(changed), changed).terms[0].sum.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), again.parameters(), strict=True))  # type: ignore[arg-type]


def test_conditions_lie_beside_the_noisy_latents() -> None:
    family = replace(CROSS, images=FirstFrameChannels(required=True))
    batch = row_batch(family, [[3, 5]], [2])
    condition = torch.randn(16, 4)
    inputs = bound(family, given="first").inputs(batch.with_tensors(condition=condition))
    assert inputs["latents"].shape == (16, family.patch_values + 4)
    assert torch.equal(inputs["latents"][:, family.patch_values :], condition)


def test_a_mask_may_say_that_no_frame_is_given() -> None:
    family = replace(CROSS, images=MarkedFrameChannels())
    inputs = bound(family).inputs(row_batch(family, [[3, 5]], [2]))
    assert inputs["latents"].shape == (16, 2 * family.patch_values + family.patch_values // family.channels)
    assert not inputs["latents"][:, family.patch_values :].any()


def test_text_that_a_model_reads_whole_stays_whole_where_ranks_share_a_sequence() -> None:
    family = replace(JOINT, whole_text=True)
    whole = row_batch(family, [[3, 5]], [1])
    main = Stream(("sample_index",), "latents", positions=("text_index", "latent_index"), index="token_index")
    part = shard_batch(whole, BatchSharding(main, SequenceSharding(2, 1)), 1, {})
    assert torch.equal(bound(family).inputs(part)["text"], whole["text"])


def test_guidance_of_a_distilled_model_is_read() -> None:
    family = replace(JOINT, guidance_input=True)
    assert bound(family, guidance=3.5).inputs(row_batch(family, [[3]], [1]))["guidance"].tolist() == [3.5, 3.5]


@pytest.mark.parametrize(
    ("family", "values", "error"),
    [
        (CROSS, {"weighting": "min_snr"}, "generation.weighting-without-levels"),
        (CROSS, {"objective": "v", "weighting": "cosmap"}, "generation.weighting-without-levels"),
        (CROSS, {"objective": "epsilon", "shift": 3.0}, "generation.levels-fixed-by-betas"),
        (CROSS, {"given": "first"}, "generation.given-frames-mismatch"),
        (replace(CROSS, images=MaskedVideoChannels(required=True)), {}, "generation.given-frames-mismatch"),
        (
            replace(CROSS, images=ReplacedFrames(required=True)),
            {"given": "first_last"},
            "generation.given-frames-mismatch",
        ),
        (replace(CROSS, images=ReplacedFrames(required=True)), {}, "generation.given-frames-mismatch"),
        (replace(CROSS, images=MarkedFrameChannels()), {"given": "first_last"}, "generation.given-frames-mismatch"),
        (CROSS, {"boundaries": [0.9, 0.1]}, "recipe.wrong-value"),
        (CROSS, {"shfit": 3.0}, "recipe.unknown-key"),
        (CROSS, {"shift_by_tokens": {"base_tokens": 256, "max_tokens": 256}}, "recipe.wrong-value base_tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(family: GenerationFamily, values: dict[str, Any], error: str) -> None:
    with raises(error):
        bound(family, **values)


def test_a_family_that_generates_nothing_and_data_that_do_not_fit_are_refused() -> None:
    with raises("generation.not-a-generation-model"):
        DiffusionTask().bind(spec_of(None), None)
    batch = row_batch(CROSS, [[3]], [1])
    with raises("generation.batch-without-latents"):
        bound(CROSS).inputs(replace(batch, tensors={k: v for k, v in batch.tensors.items() if k != "clean"}))
    with raises("generation.latent-channels-mismatch"):
        bound(CROSS).inputs(batch.with_tensors(clean=torch.zeros(16, 3)))
