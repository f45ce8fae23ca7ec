"""What LLaVA does with the blocks that nobody reads; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

import torch
from llava_cases import Llava

from tessera.config.run_config import LoraSection
from tessera.lora.modules import find_adapters
from tessera.models.llava import SPEC
from tests.errors import raises


def test_what_is_not_read_is_there_and_frozen() -> None:
    pair = Llava().pair(0, 0)
    config, model = pair.config, pair.model
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert config.blocks_read == 2
    assert {name.split(".")[1] for name in frozen} == {"blocks", "norm_after"}
    assert {name.split(".")[2] for name in frozen if name.startswith("vision.blocks")} == {"2"}
    changed = {name: p + 1 for name, p in model.named_parameters() if name in frozen}
    tokens = torch.arange(20)
    example = SPEC.example(config, 20).with_tensors(tokens=tokens)  # type: ignore[misc]
    with torch.no_grad():
        before = model(example, logits=True)["logits"]
        for name, parameter in model.named_parameters():
            if name in changed:
                parameter.copy_(changed[name])
        assert torch.equal(model(example, logits=True)["logits"], before)


def test_what_is_not_read_gets_no_adapter() -> None:
    pair = Llava().pair(0, 0)
    config, model = pair.config, pair.model
    section = LoraSection.model_validate({"rank": 2, "targets": ["vision.blocks.{*}.attn.qkv"]})
    assert list(find_adapters(section, model, SPEC.main.plan(config))) == [
        f"vision.blocks.{n}.attn.qkv" for n in (0, 1)
    ]
    section = LoraSection.model_validate({"rank": 2, "targets": ["vision.blocks.2.mlp.up"]})
    with raises("adapter.unsupported-layer"):
        find_adapters(section, model, SPEC.main.plan(config))
