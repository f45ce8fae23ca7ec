"""CSM: the decoder of Llama over text and the codes of Mimi, and a smaller one over the codebooks of each frame.

Folders contain the codec, too. It is not part of the model: an export has the codec of the folder that it began from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from tessera.config.reader import Section
from tessera.core.batch import IGNORE, Batch
from tessera.core.spec import ModelSpec
from tessera.models.csm.config import CSMConfig
from tessera.models.speech.family import SpeechFamily, SpeechShape, depth_rules
from tessera.models.text.decoder import language_weights
from tessera.nn.codes import CODES
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import TransposedMatrix

_CODES = "backbone_model.embed_tokens.embed_audio_tokens.weight"
_DEPTH_CODES = "depth_decoder.model.embed_tokens.weight"
CODEC = "codec_model."  # prefix of the codec's tensors, which are frozen


def _in_backbone(config: CSMConfig) -> WeightMap:
    """Return the weight map of folders that store a shared table of codes in the backbone, maybe in both parts."""
    mark = _CODES if config.tie_codebooks_embeddings else ""  # "" never matches: no tensor has an empty name
    return _weights(config, [Rule("codes.weight", _CODES)], _DEPTH_CODES, mark)


class CSM(SpeechFamily):
    name: ClassVar[str] = "csm"
    config: ClassVar[type[Section]] = CSMConfig
    processor: ClassVar[str] = "CSMProcessor"
    other_weights: ClassVar[Mapping[str, Callable[[Any], WeightMap]]] = {"codes-in-backbone": _in_backbone}

    def shape(self, config: CSMConfig) -> SpeechShape:
        return SpeechShape(
            text=config.text,
            depth=config.depth,
            sizes=(config.codebook_size,) * config.num_codebooks,
            head=config.codebook_size,
            projected=True,
            replaces=True,
            attention=config.attention,
            shared_codes=config.tie_codebooks_embeddings,
        )

    def spec(self, presets: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
        return replace(super().spec(presets), stock_inputs=stock_inputs)

    def weights(self, config: CSMConfig) -> WeightMap:
        """Return the weight map. A shared table of codes is stored as transformers 5 does, in the depth decoder."""
        if not config.tie_codebooks_embeddings:
            return _weights(config, [Rule("codes.weight", _CODES), Rule("depth.codes.weight", _DEPTH_CODES)])
        return _weights(config, [Rule("codes.weight", _DEPTH_CODES)], _CODES)


def stock_inputs(batch: Batch, model: Any) -> dict[str, Tensor]:
    """Return `inputs_embeds` of transformers' class for a batch of one sample: embeddings of text tokens and codes."""
    codes = batch[CODES]
    spoken = (codes != IGNORE).all(0)
    embeddings = model.embed_text_tokens(batch["tokens"])
    embeddings[spoken] = model.backbone_model.embed_tokens(codes.T[None, spoken])[0]
    return {"inputs_embeds": embeddings[None]}


def _weights(config: CSMConfig, codes: list[Rule], copy: str = "", mark: str = "") -> WeightMap:
    heads = config.num_codebooks - 1
    rules = [
        *codes,
        Rule("text.embed.weight", "embed_text_tokens.weight"),
        Rule("depth.proj.weight", "depth_decoder.model.inputs_embeds_projector.weight"),
        *(
            Rule(
                f"depth.heads.{number}.weight",
                "depth_decoder.codebooks_head.weight",
                TransposedMatrix(number, heads),
            )
            for number in range(heads)
        ),
        *depth_rules(config.depth, "depth_decoder.model."),
    ]
    table = language_weights(config.text, False, rules, prefix="backbone_model.")
    table = replace(table, other_parts=(CODEC,))
    if not copy:
        return table
    return replace(table, skip=(*table.skip, copy), copies=((copy, "codes.weight"),), mark=mark)
