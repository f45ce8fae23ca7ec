"""Names and splits of Qwen2.5-Omni's thinker in the rank files of MindSpeed-MM jobs: an audio encoder beside the parts
of Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tessera.models.audio.config import AudioConfig
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupedRows, Reshape
from tessera.weights.rows import TensorRows
from tessera_compat.shards.form import COLUMNS, ROWS, MegatronForm, PipelinePart, TensorSplit
from tessera_compat.shards.vision import grid_form

_ENCODER = "audio_encoder.encoder."
_LAYERS = _ENCODER + "blocks.layers."
_BLOCK = _LAYERS + "{i}."
_PAIRS = (
    ("audio.convs.first.bias", _ENCODER + "conv1.bias"),
    ("audio.convs.second.bias", _ENCODER + "conv2.bias"),
    ("audio.blocks.{i}.attn_norm.{kind}", _BLOCK + "input_layernorm.{kind}"),
    ("audio.blocks.{i}.attn.proj.{kind}", _BLOCK + "self_attention.linear_proj.{kind}"),
    ("audio.blocks.{i}.mlp_norm.{kind}", _BLOCK + "pre_mlp_layernorm.{kind}"),
    ("audio.blocks.{i}.mlp.up.{kind}", _BLOCK + "mlp.linear_fc1.{kind}"),
    ("audio.blocks.{i}.mlp.down.{kind}", _BLOCK + "mlp.linear_fc2.{kind}"),
    ("audio_projector.norm.{kind}", _ENCODER + "ln_post.{kind}"),
    ("audio_projector.proj.{kind}", _ENCODER + "proj.{kind}"),
    ("audio_projector.ends", _ENCODER + "audio_bos_eos_token.weight"),
)
_LAYER = r"audio_encoder\.encoder\.blocks\.layers\.\d+\."
_SPLITS: tuple[tuple[str, TensorSplit], ...] = (
    (_LAYER + r"self_attention\.linear_qkv\.(weight|bias)", ROWS),
    (_LAYER + r"self_attention\.linear_proj\.weight", COLUMNS),
    (_LAYER + r"mlp\.linear_fc1\.(weight|bias)", ROWS),
    (_LAYER + r"mlp\.linear_fc2\.weight", COLUMNS),
)


@dataclass(frozen=True)
class BiasWithoutKeys(GroupedRows):
    """Take the bias of queries (0) or values (2) from a fused bias. The bias of keys is written as zeros.

    A bias of keys is not read, even if a job has changed it: it adds the same number to all scores of a query, so the
    softmax does not change.
    """

    def join_rows(self, chunks: Sequence[TensorRows]) -> list[TensorRows]:
        queries, values = chunks
        head = self.rows[0]
        zeros = TensorRows.of(torch.zeros_like(queries.rows(0, head).whole()))
        groups = range(0, queries.shape[0], head)
        return [
            TensorRows.joined(
                rows for start in groups for rows in (queries.rows(start, head), zeros, values.rows(start, head))
            )
        ]


def _audio_rules(audio: AudioConfig) -> list[Rule]:
    """Return the name rules of the audio encoder and its projector."""
    rules = [Rule(native, foreign) for native, foreign in _PAIRS]
    for ours, theirs, before in (("first", "conv1", audio.num_mel_bins), ("second", "conv2", audio.d_model)):
        as_convolution = Reshape((audio.d_model, 3 * before), (audio.d_model, before, 3))
        rules.append(Rule(f"audio.convs.{ours}.weight", f"{_ENCODER}{theirs}.weight", as_convolution))
    rows = (audio.d_model // audio.encoder_attention_heads,) * 3
    native, fused = "audio.blocks.{i}.attn.", _BLOCK + "self_attention.linear_qkv."
    for number, kind in enumerate("qkv"):
        rules.append(Rule(f"{native}{kind}.weight", fused + "weight", GroupedRows(number, 3, rows=rows)))
    for number, kind in ((0, "q"), (2, "v")):
        rules.append(Rule(f"{native}{kind}.bias", fused + "bias", BiasWithoutKeys(number, 3, rows=rows)))
    return rules


def qwen2_5_omni(config: Qwen25OmniConfig) -> MegatronForm:
    """Describe the rank files of Qwen2.5-Omni. They contain only the thinker."""
    form, audio = grid_form(config, config.vision.hidden_size, gated=True), config.audio
    first, last = (_ENCODER + "conv", _ENCODER + "audio_bos_eos_token."), (_ENCODER + "proj.", _ENCODER + "ln_post.")
    part = PipelinePart("audio", _LAYERS, first, last, audio.encoder_layers)
    return replace(
        form,
        weights=WeightMap((*form.weights.rules, *_audio_rules(audio))),
        splits=(*_SPLITS, *form.splits),
        parts=(*form.parts, part),
    )
