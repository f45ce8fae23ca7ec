"""What a recipe for MindSpore may set is known without MindSpore: refused, switched off, or set for torch's part."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from tessera.config.framework import LIMITS, check_framework, without_unsupported
from tessera.config.run_config import LoraSection, RunConfig, load_config
from tessera.errors import TesseraError
from tessera.mindspore import limits
from tessera.runtime.launcher import is_scheduler, read_msrun
from tessera.training.run import train
from tessera.training.setup import build_meta_model

RECIPE: dict[str, Any] = {
    "framework": "mindspore",
    "model": {"family": "qwen2", "preset": "0.5b", "lora": {}},
    "train": {"steps": 1},
}


def refusal(changes: dict[str, Any]) -> TesseraError:
    with pytest.raises(TesseraError) as refused:
        load_config(RECIPE, changes)
    return refused.value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tp", 2),
        ("parallel.shard", 2),
        ("parallel.recompute", ["text.layers.{*}"]),
        ("precision.compute", "bfloat16"),
        ("model.lora.dora", True),
        ("train.task", "dpo"),
        ("optim.name", "muon"),
        ("train.ema", {}),
        ("evaluation.tasks", ["mmmu"]),
        ("guard.coverage", "stop"),
        ("parallel.accumulate", "local"),
        ("parallel.backend", "megatron"),
        ("precision.loss_scale.start", 1024.0),
    ],
)
def test_a_feature_that_mindspore_lacks_is_refused_by_its_key(key: str, value: Any) -> None:
    error = refusal({key: value})
    assert error.code == "framework.feature-not-available"
    assert error.where is not None
    assert key.startswith(error.where)
    assert load_config({**RECIPE, "framework": "torch"}, {key: value}).framework == "torch"


def test_every_limit_names_a_key_and_allows_its_default() -> None:
    defaults = load_config(RECIPE).model_dump()
    for limit in LIMITS:
        section: Any = defaults
        for part in limit.key.split("."):
            section = section[part]
        assert section in limit.values, limit.key


# Keys of these sections that have an effect on MindSpore, too. Data, optimizer settings, checkpoints and logs belong to
# the host or to both frameworks.
EFFECTIVE = {
    "model": "family preset path hub_id weights tokenizer config freeze lora.targets lora.rank lora.alpha lora.rslora "
    "lora.modules_to_save lora.path lora.forms lora.merge",
    "parallel": "timeout_s join_timeout_s watch silence_s stall_s",
    "precision": "",
    "train": "steps epochs global_batch samples_per_step micro_batch seed eval_every eval_rows early_stop",
    "evaluation": "",
    "guard": "policy limit loss_spike grad_spike window warmup",
    "profile": "",
}
# Keys that have an effect only beside another one, which is refused.
DEPENDENT = {
    *("train.generate_samples", "train.generate_tokens", "profile.memory", "profile.ranks"),
    *("evaluation.every", "evaluation.data", "evaluation.max_samples", "evaluation.max_new_tokens"),
    *("evaluation.metric", "evaluation.functions"),
}


def test_every_key_has_an_effect_on_mindspore_or_is_refused() -> None:
    effective = {f"{section}.{key}" for section, keys in EFFECTIVE.items() for key in keys.split()}
    keys = {
        f"{section}.{key}" for section in EFFECTIVE for key in RunConfig.model_fields[section].annotation.model_fields
    }  # type: ignore[union-attr]
    keys |= {f"model.lora.{key}" for key in LoraSection.model_fields}
    keys.remove("model.lora")
    assert keys == effective | DEPENDENT | {limit.key for limit in LIMITS if limit.key.split(".")[0] in EFFECTIVE}


def test_several_features_are_named_together_and_switched_off_with_a_report() -> None:
    values = {**RECIPE, "parallel": {"tp": 2, "offload": True}, "optim": {"name": "lion", "lr": 1e-4}}
    error = refusal({"parallel.tp": 2, "parallel.offload": True})
    assert "parallel.offload" in error.what
    recipe, switched_off = without_unsupported(values)
    assert [(limit.key, value) for limit, value in switched_off] == [("parallel.tp", 2), ("parallel.offload", True)]
    assert recipe["parallel"] == {"tp": 1, "offload": False}
    assert values["parallel"]["tp"] == 2, "the caller's recipe is left as it was"
    with pytest.raises(TesseraError, match=r"optim\.name"):  # another optimizer would be another training
        check_framework(recipe)


def test_the_plan_is_that_of_unsharded_ranks_on_the_host() -> None:
    setup = build_meta_model(load_config(RECIPE), 2)
    assert not setup.plan.layout.sharding.active
    assert setup.plan.layout.axes.world == 2
    assert load_config(RECIPE).on_host().train.device == "cpu"


@pytest.mark.parametrize("family", ["glm4v", "qwen3_vl"])
def test_other_families_are_refused(family: str) -> None:
    with pytest.raises(TesseraError) as refused:
        limits.check_model(family, None, [])
    assert refused.value.code == "framework.model-not-available"


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        ({}, "framework.not-installed"),
        ({"mindspore": "2.7.1", "numpy": "1.26.4"}, "framework.untested-version"),
        ({"mindspore": "2.11.0", "numpy": "1.26.4"}, "framework.untested-version"),
        ({"mindspore": "2.10.0", "numpy": "2.4.6"}, "framework.numpy-too-new"),
        ({"mindspore": "2.10.0", "numpy": "1.26.4"}, None),
    ],
)
def test_a_missing_or_untested_mindspore_is_refused(
    versions: dict[str, str], code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(limits.metadata, "version", version)
    if code is None:
        limits.check_installed()
        return
    with pytest.raises(TesseraError) as refused:
        limits.check_installed()
    assert refused.value.code == code


def test_ranks_of_msrun_are_not_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    with pytest.raises(TesseraError) as refused:
        train({**RECIPE, "framework": "torch"})
    assert refused.value.code == "framework.started-by-msrun"


def test_variables_of_msrun_are_read_as_those_of_torchrun() -> None:
    rank = {"MS_ROLE": "MS_WORKER", "RANK_ID": "1", "RANK_SIZE": "2", "DEVICE_ID": "1", "MS_SCHED_HOST": "10.0.0.1"}
    rank |= {"MS_SCHED_PORT": "8118"}
    read_msrun(rank)
    assert [rank[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        *("1", "2", "1"),
        *("10.0.0.1", "8119"),
    ]
    for chosen, used in (("8118", "8119"), ("8200", "8200")):
        exported = {name: rank[name] for name in ("MS_ROLE", "RANK_ID", "RANK_SIZE", "MS_SCHED_PORT")}
        exported["MASTER_PORT"] = chosen  # by a script, which passes it to msrun, too
        read_msrun(exported)
        assert exported["MASTER_PORT"] == used
    scheduler = {"MS_ROLE": "MS_SCHED", "RANK_ID": "0", "RANK_SIZE": "2", "MS_SCHED_PORT": "8118"}
    read_msrun(scheduler)
    assert "RANK" not in scheduler
    assert is_scheduler(scheduler)
    assert not is_scheduler(rank)
