"""The page about families: its language model and its decoder work as printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_docs_commands import ROOT, blocks
from torch import nn

from tessera.core.batch import Segments
from tessera.nn.decoder import TextDecoder
from tests.errors import raises

PAGES = ["add-a-model-family.md", "add-a-model-family.zh.md"]


def defined(page: str, text: str, **names: Any) -> dict[str, Any]:
    """Run the block of a page that contains a text, and return what it defines."""
    (block,) = [block for block in blocks(ROOT / "docs" / "how-to" / page, "python") if text in block]
    values: dict[str, Any] = {"__name__": "mistral", **names}
    exec(compile(block, page, "exec"), values)
    return values


@pytest.mark.parametrize("page", PAGES)
def test_the_language_family_reads_and_writes_folders_of_transformers(page: str) -> None:
    from transformers import MistralConfig

    from tessera.config.reader import build

    values = defined(page, "language_family(")
    spec, config_class = values["SPEC"], values["MistralConfig"]
    config = build(config_class, spec.presets["quickstart"], "model.config")
    written = config.to_hf()
    assert config_class.from_hf(written) == config
    stock = MistralConfig(**written).to_dict()
    assert {name: stock[name] for name in written if name in stock and name != "architectures"} == {
        name: value for name, value in written.items() if name in stock and name != "architectures"
    }
    defaults = MistralConfig().to_dict()
    assert {name: defaults[name] for name in values["DEFAULTS"] if name in defaults} == {
        name: value for name, value in values["DEFAULTS"].items() if name in defaults
    }
    with raises("model.unsupported-value"):
        config_class.from_hf({**written, "sliding_window": 4096})
    logits = spec.main.build(config)(spec.example(config, 16))["logits"]
    assert logits.head.bias is None


@pytest.mark.parametrize("page", PAGES)
def test_the_skeleton_of_a_decoder_computes_what_the_decoder_computes(page: str) -> None:
    skeleton = defined(page, "class Decoder(nn.Module)", nn=nn, torch=torch)["Decoder"]
    spec = defined(page, "language_family(")["SPEC"]
    from tessera.config.reader import build

    model = spec.main.build(build(spec.config, spec.presets["quickstart"], "model.config"))
    decoder = model.text
    assert isinstance(decoder, TextDecoder)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, positions, segments = torch.randn(9, decoder.shape.hidden), torch.arange(9), Segments.of([5, 4])
    expected = decoder(x, positions, segments, returned=(0,))
    decoder.rope = decoder.shape.rope
    assert torch.equal(skeleton.forward(decoder, x, positions, segments, returned=(0,)), expected)
