"""Record one pass of a folder's model: as Tessera computes it, and as transformers, diffusers or a user's class do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.config.registry import import_object
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, LOGITS
from tessera.core.spec import ModelSpec
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.given_images import from_tokens
from tessera.errors import TesseraError
from tessera.evaluation.parity.recorder import THE_MODEL, Budget, record_call
from tessera.evaluation.parity.recording import RankRecord, Recording
from tessera.inference.proof import OurModel, generation_batch, other_prompt, proof_messages, tokens_of
from tessera.inference.reference import DiffusersModel, StockModel, TransformersReference, in_float32
from tessera.models import resolve
from tessera.weights.map import WeightMap
from tessera.weights.operations import Identity

LIBRARIES = ("transformers", "diffusers")


def record_beside(folder: Path, other: str, family: str | None, budget: Budget) -> tuple[Recording, Recording]:
    """Record the model of a folder, and another implementation of it, on the same small input in float32.

    `other`: transformers, diffusers, or `package.module:function`, which is called with the folder and returns a module
    that takes the inputs of the class of transformers or diffusers.
    """
    spec, config = resolve(ModelSection(path=folder, family=family))
    ours = OurModel(folder, spec, config)
    diffuses = isinstance(spec, GenerationSpec)
    if (other == "diffusers") != diffuses and other in LIBRARIES:
        raise TesseraError(
            f"{other} is not the library that implements the family {spec.name} of {folder}",
            where="the second argument of `tessera compare`",
            allowed=["diffusers" if diffuses else "transformers", "package.module:function"],
            code="parity.wrong-library",
        )
    batch, stock, inputs = (_generation_inputs if diffuses else _language_inputs)(folder, spec, config, ours)
    module = stock.model if other in LIBRARIES else _own_module(other, folder)
    assert ours.module is not None
    ours.module.eval()
    calls: list[tuple[str, nn.Module, Callable[[nn.Module], Any]]] = [
        ("Tessera", ours.module, lambda model: _scalar(_ours(model, batch, diffuses))),
        (other, module, lambda model: _scalar(_theirs(model, inputs, diffuses))),
    ]
    pairs = module_pairs(spec.main.weight_map(config), ours.module, module)
    records: list[RankRecord] = []
    for name, model, call in calls:
        model.requires_grad_(True)
        with torch.enable_grad():
            records.append(record_call(model, call, budget, rounding=2 if name == "Tessera" else 0))
    first, second = (Recording(f"{folder} by {name}", [r]) for (name, *_), r in zip(calls, records, strict=True))
    first.pairs = pairs
    return first, second


def _language_inputs(folder: Path, spec: ModelSpec, config: Any, ours: OurModel) -> tuple[Batch, Any, dict[str, Any]]:
    if ours.processor is None:
        batch = ours.example()
        return batch, StockModel(folder), {"input_ids": tokens_of(batch)[None]}
    media = ours.media()
    batch, stock = ours.prompt(proof_messages(media)), TransformersReference(folder)
    inputs = stock.inputs(proof_messages(media), [part.value for part in media])
    if other_prompt(inputs["input_ids"][0].tolist(), tokens_of(batch).tolist()) is None:
        return batch, stock, in_float32(inputs)
    # the chat templates give different tokens: give both models Tessera's tokens
    batch = ours.prompt(proof_messages([]))
    return batch, stock, {"input_ids": tokens_of(batch)[None]}


def _generation_inputs(folder: Path, spec: Any, config: Any, ours: OurModel) -> tuple[Batch, Any, dict[str, Any]]:
    family = config.generation()
    batch = generation_batch(spec, config, family)
    latents = from_tokens(batch["latents"], family.patch, config.proof_grid())
    return batch, DiffusersModel(folder), config.diffusers_inputs(batch, latents)


def _own_module(path: str, folder: Path) -> nn.Module:
    module = import_object(path, "B")(folder)
    if not isinstance(module, nn.Module):
        raise TesseraError(
            f"{path} returned a {type(module).__name__}, which is not an nn.Module",
            where="B",
            fix="return the module with its weights loaded from the folder that it is called with",
            code="parity.not-a-module",
        )
    return module.eval()


def _ours(model: nn.Module, batch: Batch, diffuses: bool) -> Tensor:
    if diffuses:
        latents: Tensor = model(batch)[LATENTS]
        return latents
    logits: Tensor = model(batch)[LOGITS] if "input_ids" in batch else model(batch, logits=True)[LOGITS]
    return logits


def _theirs(model: nn.Module, inputs: Mapping[str, Any], diffuses: bool) -> Tensor:
    out = model(**inputs, return_dict=False) if diffuses else model(**inputs)
    result = out if isinstance(out, Tensor) else out["logits"] if isinstance(out, Mapping) else out[0]
    assert isinstance(result, Tensor)
    return result


def _scalar(result: Tensor) -> Tensor:
    """Return the mean square of the outputs. Its backward reaches every output, and needs no labels."""
    return result.float().square().mean()


def module_pairs(weights: WeightMap | None, ours: nn.Module, theirs: nn.Module) -> dict[str, str]:
    """Map names of modules and parameters of `ours` to those of `theirs`.

    Parameters are paired if the weight map only renames them. Then the modules that contain them are paired, too, if
    each has exactly one partner.
    """
    there = dict(theirs.named_parameters())
    pairs, around = {THE_MODEL: THE_MODEL}, dict[str, set[str]]()
    for name, parameter in ours.named_parameters():
        match = None if weights is None else weights.rule_for(name)
        rule, foreign = (None, (name,)) if match is None else match
        here, plain = name.rpartition(".")[0], rule is None or (len(foreign) == 1 and isinstance(rule.op, Identity))
        for other in foreign:
            spellings = [other] if weights is None else [weights.in_memory(other), other, name]
            partner = next((n for n in spellings if n in there), None)
            if partner is None:
                continue
            if plain and there[partner].shape == parameter.shape:
                pairs[name] = partner
            else:  # the modules of these parameters are no pair: their outputs differ, such as in the order of features
                around.setdefault(here, set()).add("")
            inner, outer = here, partner.rpartition(".")[0]
            while inner:
                around.setdefault(inner, set()).add(outer)
                inner, outer = inner.rpartition(".")[0], outer.rpartition(".")[0]
    back: dict[str, set[str]] = {}
    for here, partners in around.items():
        for partner in partners:
            back.setdefault(partner, set()).add(here)
    for here, partners in around.items():
        partner = next(iter(partners))
        if partner and len(partners) == 1 and len(back[partner]) == 1:
            pairs[here] = partner
    return pairs
