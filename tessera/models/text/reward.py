"""Reward models: language models with a head of one output, the reward, in place of the vocabulary head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import LOGITS, REWARDS
from tessera.core.spec import Component, ModelSpec, Passes, Training
from tessera.errors import TesseraError
from tessera.nn.causal_lm import CausalLMBase
from tessera.weights.map import Rule, WeightMap

HEAD = "head.weight"
SCORE = "score.weight"  # name of the reward head's weight in transformers
_LANGUAGE, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def with_reward_head(spec: ModelSpec) -> ModelSpec:
    """Return the family with a reward head in place of its vocabulary head: module, plan and weight map."""
    if spec.gives(REWARDS):
        return spec
    main = spec.main
    maps = {"hf": functools.partial(_weights, main.weights["hf"])} if "hf" in main.weights else {}
    return replace(
        spec,
        main=Component(functools.partial(_build, spec.name, main.build), functools.partial(_plan, main.plan), maps),
        flops=_without_vocabulary(spec.flops),
        work=_without_vocabulary(spec.work),
        task="reward",
        outputs=(REWARDS, *(name for name in spec.outputs or () if name != LOGITS)),
    )


def _build(family: str, build: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    module = build(config)
    if not isinstance(module, CausalLMBase) or module.text is None:
        raise TesseraError(
            f"models of the family {family} have no text decoder, which a reward model needs",
            where="train.task",
            fix="use a language or vision-language family",
            code="model.no-text-decoder",
        )
    module.head = nn.Linear(module.text.shape.hidden, 1, bias=False)
    module.heads = {REWARDS: "head"}
    return module


def _plan(plan: Callable[[Any], ModelPlan], config: Any) -> ModelPlan:
    base = plan(config)
    return replace(base, tensor={**base.tensor, HEAD: "replicate"}, tied={})


def _weights(weights: Callable[[Any], WeightMap], config: Any) -> WeightMap:
    """Return the weight map with the reward head as `score.weight`. The vocabulary head in weight files is not read."""
    base = weights(config)
    head = base.rule_for(HEAD)
    unread = () if head is None else head[1]
    rules = (*(rule for rule in base.rules if rule.native != HEAD), Rule(HEAD, SCORE))
    return replace(base, rules=rules, skip=(*base.skip, *unread), others={})


def _without_vocabulary(costs: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a FLOPs function without the vocabulary head. The FLOPs of the reward head are negligible."""
    return None if costs is None else functools.partial(_count_without_head, costs)


def _count_without_head(
    costs: Callable[..., Any], config: Any, counted: Batch | Mapping[str, Any], training: Training | None = None
) -> Any:
    """Call `costs` so that the head counts no FLOPs. It is a module-level function, so that workers can unpickle it."""
    return costs(config, counted, training={**(training or {}), "head": Passes(0.0, 0.0, 0.0)})


def _class_name(described: Mapping[str, Any]) -> str:
    """Return the first class in `architectures` of a config.json; "" if this is missing or not a list."""
    names = described.get("architectures")
    return str(names[0]) if names and isinstance(names, list) else ""


def classifier_obstacle(described: Mapping[str, Any]) -> str | None:
    """Return why transformers cannot load a reward model with this config.json; None if it can."""
    name = _class_name(described)
    if name.endswith(_CLASSIFIER):
        return None
    if not name.endswith(_LANGUAGE):
        return f"transformers has no sequence classifier for {name or 'this model'}"
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN
    except ImportError:
        return None  # without transformers the class cannot be checked
    wanted = name.removesuffix(_LANGUAGE) + _CLASSIFIER
    return None if wanted in KNOWN.values() else f"the installed transformers has no class {wanted}"


def as_classifier(described: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Return the config.json of a reward model from the config.json of its language model."""
    reason = classifier_obstacle(described)
    if reason is not None:
        raise TesseraError(
            f"this reward model cannot be exported as a Hugging Face folder: {reason}",
            where=where,
            fix="load it from the run folder (tessera.load), or export the adapters of a LoRA run (--adapters)",
            code="model.reward-not-exportable",
        )
    name = str(described["architectures"][0])
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**described, "architectures": [name.replace(_LANGUAGE, _CLASSIFIER)], **labels}


def number_of_classes(described: Mapping[str, Any]) -> int | None:
    """Return the number of outputs of a sequence classifier with this config.json; None for other models."""
    if not _class_name(described).endswith(_CLASSIFIER):
        return None
    labels = described.get("id2label")
    return described.get("num_labels") or (len(labels) if labels and isinstance(labels, Mapping) else 2)


def is_classifier(described: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a sequence classifier with one output; raise if it has several."""
    labels = number_of_classes(described)
    if labels is not None and labels != 1:
        raise TesseraError(
            f"this classifier has {labels} outputs, and a reward model has one",
            where="config.json (num_labels)",
            allowed=[1],
            fix="remove model.family and set train.task=returns_loss: then transformers' class is trained",
            code="model.several-classes",
        )
    return labels is not None
