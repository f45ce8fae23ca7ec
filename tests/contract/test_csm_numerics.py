"""CSM against transformers: logits, losses and all gradients, theirs sample by sample from recordings, ours packed from
codes; float64 as the judge."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from csm_cases import SHAPES, Theirs, config_of, packed, pair, spoken, theirs
from parity import from_foreign, relative, to_foreign
from torch import Tensor

from tessera.config.run_config import RunConfig, load_config
from tessera.core.batch import Batch
from tessera.models.speech.family import CODED_FRAMES
from tessera.nn.codes import CODED, CODES, code_output
from tessera.tasks.speech import CODE_LOSS, DEPTH_LOSS, FRAMES, SpeechTask
from tessera.tools.dry_run import run_role
from tessera.training.setup import ModelSetup, build_meta_model
from tests.close import assert_as_close

NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 1)) for number in range(len(SHAPES))]
BACKBONE_CODES = "backbone_model.embed_tokens.embed_audio_tokens.weight"
DEPTH_CODES = "depth_decoder.model.embed_tokens.weight"


def computed(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Our logits of all positions, those of the other codebooks by frame, and the sums of both losses."""
    outputs = model(batch)
    terms = {term.name: term.sum for term in SpeechTask().losses(outputs, batch).terms}
    hidden, head = outputs["logits"]
    others = [outputs[code_output(number)] for number in range(1, len(model.codes.starts))]
    return {"logits": head(hidden), "others": torch.stack([head(x) for x, head in others], dim=1), **terms}


def joined(results: list[Theirs]) -> dict[str, Tensor]:
    return {
        "logits": torch.cat([result.logits for result in results]),
        "others": torch.cat([result.others for result in results]),
        CODE_LOSS: torch.stack([result.loss for result in results]).sum(),
        DEPTH_LOSS: torch.stack([result.other_loss for result in results]).sum(),
    }


def in_double(reference: Any) -> Any:
    """A copy in float64, whose codec stays in float32, so that the codes are the same."""
    exact = copy.deepcopy(reference).double()
    exact.codec_model = reference.codec_model
    return exact


def gradients_of(reference: Any) -> dict[str, Tensor]:
    """Their gradients, without those of the codec; a shared table has its name in the depth decoder."""
    names = {name: p for name, p in reference.named_parameters() if not name.startswith("codec_model.")}
    assert all(p.grad is not None for p in names.values())
    return {
        DEPTH_CODES if name == BACKBONE_CODES and DEPTH_CODES not in names else name: p.grad
        for name, p in names.items()
    }


@pytest.mark.parametrize("number", NUMBERS)
def test_no_further_from_float64_than_transformers(number: int) -> None:
    spec, config, reference, model = pair(number, 20 + number)
    exact = in_double(reference)
    cases = [spoken(config, reference, clips, 30 + at) for at, clips in enumerate((2, 0, 1))]
    mine = computed(model, packed(config, cases, padding=3))
    peer, judge = (joined([theirs(m, case) for case in cases]) for m in (reference, exact))
    assert len(peer["others"])
    mine["logits"] = mine["logits"][: len(peer["logits"])]
    for values in (mine, peer, judge):
        (values[CODE_LOSS] + 0.5 * values[DEPTH_LOSS]).backward()
    for name, value in mine.items():
        assert_as_close(value, peer[name], judge[name], k=4, what=name, roundings=4)
    gradients = to_foreign(spec, config, {name: p.grad for name, p in model.named_parameters()})
    theirs_, exactly = gradients_of(reference), gradients_of(exact)
    assert sorted(gradients) == sorted(theirs_)
    for name, grad in gradients.items():
        # Gradients of scores are small differences of terms as large as those of values.
        terms = exactly[re.sub(r"\.[qk]_proj\.", ".v_proj.", name)]
        assert_as_close(grad, theirs_[name], exactly[name], k=4, what=name, roundings=8, terms=terms)


def test_packed_samples_are_computed_as_alone() -> None:
    _, config, reference, model = pair(0, 3)
    cases = [spoken(config, reference, clips, 40 + at) for at, clips in enumerate((1, 2))]
    together = computed(model, packed(config, cases, padding=5))
    alone = [computed(model, packed(config, [case])) for case in cases]
    for name in ("logits", "others"):
        apart = torch.cat([values[name] for values in alone])
        assert relative(together[name][: len(apart)], apart) < 3e-5, name
    for name in (CODE_LOSS, DEPTH_LOSS):
        assert relative(together[name], torch.stack([values[name] for values in alone]).sum()) < 3e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    spec, config, reference, model = pair(0, 4)
    batch = packed(config, [spoken(config, reference, 2, 1)], 3)
    other = from_foreign(spec, config_of(0, attention=implementation), dict(reference.state_dict()))
    first, second = computed(model, batch), computed(other, batch)
    assert all(relative(first[name], second[name]) < 3e-5 for name in first)


def test_a_row_without_speech_gives_zero_gradients_to_the_parts_of_speech() -> None:
    _, config, reference, model = pair(0, 5)
    batch = packed(config, [spoken(config, reference, 0, 1)])
    values = computed(model, batch)
    assert SpeechTask().counts(replace(batch, counts={"trained": 0}))[FRAMES] == 0
    (values[CODE_LOSS] + values[DEPTH_LOSS]).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.depth.parameters())
    assert not model.codes.weight.grad.any()
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(values["logits"], model.head(plain))


def test_a_share_of_the_frames_trains_the_other_codebooks() -> None:
    """`depth_frames` chooses frames by the seed of their row; the loss of the first codes is the same."""
    _, config, reference, model = pair(0, 6)
    batch = replace(packed(config, [spoken(config, reference, 2, 1)]), seeds=(5,))
    task = SpeechTask(depth_frames=0.5)
    prepared = task.prepare(batch)
    assert 0 < prepared[CODED].shape[0] < batch[CODED].shape[0]
    assert torch.equal(task.prepare(batch)[CODED], prepared[CODED])
    whole, part = computed(model, batch), computed(model, prepared)
    chosen = torch.isin(batch[CODED], prepared[CODED])
    assert torch.equal(whole[CODE_LOSS], part[CODE_LOSS])
    assert relative(part["others"], whole["others"][chosen]) < 3e-5
    assert CODES in prepared


def recipe_with_share(share: float, stages: int) -> RunConfig:
    train = {"steps": 1, "global_batch": 2, "task_options": {"depth_frames": share}}
    model, parallel = {"family": "csm", "preset": "quickstart"}, {"pp": stages}
    return load_config({"model": model, "data": {"length": 64}, "train": train, "parallel": parallel})


def test_costs_count_the_share_of_the_frames() -> None:
    """Balance, FLOPs of steps, and the cut of a pipeline."""
    whole, part = (build_meta_model(recipe_with_share(share, 2), 2) for share in (1.0, 0.25))
    measures = {"tokens": np.array([8, 8]), "trained": np.array([4, 4]), "token_pairs": np.array([64, 64])}
    measures[CODED_FRAMES] = np.array([0, 4])

    def of_frames(setup: ModelSetup) -> float:
        assert setup.spec.work is not None
        return float(np.diff(setup.spec.work(setup.config, measures, setup.training)["text"])[0])

    assert of_frames(part) == pytest.approx(0.25 * of_frames(whole))
    last, smaller = (setup.plan.layout.pipeline.stages[-1].cost for setup in (whole, part))
    assert smaller < last


@pytest.mark.slow
def test_a_dry_run_counts_the_memory_of_a_share_of_the_frames() -> None:
    whole, part = (run_role(recipe_with_share(share, 1), 1, 0).activations for share in (1.0, 0.25))
    assert part < whole
