"""Adapters and PEFT: what we write it loads, what it writes we load, and both make the same model of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
import transformers
from packaging.version import Version
from parity import reference_model
from qwen2_vl_cases import Qwen2VL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vision_language import Pair

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import LoraSection, ModelSection
from tessera.diffusion.family import GenerationSpec
from tessera.inference.export import export_folder
from tessera.inference.weight_source import fill_from
from tessera.lora.export import save_adapters
from tessera.lora.factors import merge_adapter
from tessera.lora.load import fill_adapters, read_adapters, settled
from tessera.lora.modules import add_adapters, find_adapters, without_adapters
from tessera.lora.select import is_factor
from tessera.models import FAMILIES, resolve
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.weights.map import WeightMap
from tests.errors import raises
from tests.quick import quick
from tests.toys.adapters import adapters_of
from tests.toys.chat_set import SPECIAL

TOLERANCE = 1e-5
QUICK = ("qwen2_5_vl", "qwen3_vl", "internvl", "flux")  # together, they have every kind of layer
# transformers 5.21 moved the modules of thinkers into `model`, and adapters have the names from there.
OLD = pytest.mark.skipif(Version(transformers.__version__) < Version("5.21"), reason="other names of modules")
MARKS = {"qwen2_5_omni": [OLD], "qwen3_omni": [OLD]}
OWN = [
    name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, *MARKS.get(name, ())])
    for name in FAMILIES.names()
    if "quickstart" in FAMILIES.get(name).presets
]


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def foreign(config: Any, seed: int = 0) -> Any:
    hf = config.to_hf()
    torch.manual_seed(seed)
    if "_class_name" in hf:  # of a family that generates images or videos
        return getattr(diffusers, hf["_class_name"]).from_config(hf).eval()
    kind = getattr(transformers, hf["architectures"][0])
    model = kind._from_config(transformers.AutoConfig.for_model(**hf), dtype=torch.float32)
    return model.eval()


def all_layers(module: nn.Module, spec: Any, config: Any) -> list[str]:
    """Every plain linear layer but the head, which the loss reads."""
    parts = module.named_modules()
    plain = [name for name, part in parts if type(part) is nn.Linear and part.weight.requires_grad]
    table = spec.main.weight_map(config)
    return [p for p in plain if p != "head" and "Conv" not in type(table.rule_for(p + ".weight")[0].op).__name__]


def layers_of_peft(module: nn.Module, spec: Any, config: Any, model: nn.Module) -> list[str]:
    """The layers that PEFT adapts in `model`. It takes the MLPs of Qwen3-Omni's talker for experts (0.21)."""
    table, modules = spec.main.weight_map(config), dict(model.named_modules())
    layers = [
        path for path in all_layers(module, spec, config) if spec.name != "qwen3_omni_talker" or ".mlp." not in path
    ]
    names = {path: table.rule_for(f"{path}.weight")[1] for path in layers}
    plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    stored = {path: [table.in_memory(name).removesuffix(".weight") for name in names[path]] for path in layers}
    return [path for path in layers if all(isinstance(modules[name], plain) for name in stored[path])]


def ours(spec: Any, config: Any, folder: Path, section: LoraSection | None) -> nn.Module:
    """With the weights of a folder; adapters are there and not filled."""
    module = spec.main.build(config)
    with torch.no_grad():
        load_folder(folder, model_tensors(module), spec.main.weight_map(config))
    if section is not None:
        add_adapters(module, find_adapters(section, module, spec.main.plan(config)))
    return module.eval()


def draw(module: nn.Module, seed: int = 1, size: float = 0.05) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_factor(name):
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * size)


def merged_as_theirs(module: nn.Module, spec: Any, config: Any) -> dict[str, Tensor]:
    tensors, adapters = model_tensors(module), adapters_of(module)
    plain = {n: merge_adapter(n, t.detach(), tensors, adapters) for n, t in tensors.items() if not is_factor(n)}
    return dict(spec.main.weight_map(config).to_foreign(plain))


def weights_of(model: nn.Module, spec: Any, config: Any) -> dict[str, Tensor]:
    """By the names of folders. What lies otherwise in memory, as experts do, has names that no folder has."""
    table = spec.main.weight_map(config)
    return {table.canonical(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}


def compare_weights(module: nn.Module, spec: Any, config: Any, model: nn.Module, base: dict[str, Tensor]) -> int:
    """Merged weights on both sides, all of them; how many are no longer what they were."""
    mine, theirs = merged_as_theirs(module, spec, config), weights_of(model, spec, config)
    moved = 0
    for name in mine.keys() & theirs.keys():
        assert relative(mine[name], theirs[name]) < TOLERANCE, name
        moved += not torch.equal(theirs[name], base[name])
    return moved


# ---------------------------------------------------------------------------------------------- every family


@pytest.mark.parametrize("family", OWN)
def test_modules_have_their_names_in_the_published_class(family: str) -> None:
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    with torch.device("meta"):
        module, model = spec.main.build(config), foreign(config)
    table = spec.main.weight_map(config)
    modules = {name for name, _ in model.named_modules()}
    for path in all_layers(module, spec, config):
        for name in table.rule_for(f"{path}.weight")[1]:  # type: ignore[index]
            assert table.in_memory(name).removesuffix(".weight") in modules, path


@pytest.mark.parametrize("rslora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", quick(OWN, "flux"))
def test_what_we_write_peft_loads(family: str, rslora: bool, tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    model = foreign(config)
    base = weights_of(model, spec, config)
    model.save_pretrained(tmp_path / "base")
    layers = layers_of_peft(ours(spec, config, tmp_path / "base", None), spec, config, model)
    wide = {"modules": layers[0], "rank": 7, "alpha": 3}
    section = LoraSection.model_validate({"targets": [*layers[1:], wide], "rank": 4, "alpha": 8, "rslora": rslora})
    module = ours(spec, config, tmp_path / "base", section)
    draw(module)
    table = spec.main.weight_map(config)  # type: ignore[misc]
    save_adapters(
        tmp_path / "adapter",
        model_tensors(module),
        adapters_of(module),
        table,
        base=str(tmp_path / "base"),
        language=not isinstance(spec, GenerationSpec),
    )
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    there = {name for name, part in loaded.named_modules() if hasattr(part, "lora_A")}
    assert len(there) == len(
        {key.rsplit(".lora_", 1)[0] for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    )
    assert compare_weights(module, spec, config, loaded.merge_and_unload(), base) == len(there)

    # And back to us, as it was.
    adapters = read_adapters(tmp_path / "adapter", [f"{layer}.weight" for layer in layers], table)
    mine = adapters_of(module)
    assert set(adapters) == set(mine)
    for path, factors in adapters.items():
        a, b = (module.get_parameter(f"{path}.{side}.weight") for side in ("lora_a", "lora_b"))
        assert relative(factors.adapter.scale * factors.b @ factors.a, mine[path].scale * b @ a) < TOLERANCE


@pytest.mark.parametrize("family", quick(OWN, "qwen3_vl"))
def test_what_peft_writes_we_load(family: str, tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    model = foreign(config)
    base = weights_of(model, spec, config)
    model.save_pretrained(tmp_path / "base")
    plain = ours(spec, config, tmp_path / "base", None)
    table = spec.main.weight_map(config)  # type: ignore[misc]
    targets = {
        table.in_memory(name).removesuffix(".weight")
        for path in layers_of_peft(plain, spec, config, model)
        for name in table.rule_for(f"{path}.weight")[1]  # type: ignore[index]
    }
    # Some are left out: of a layer that is several of theirs, perhaps one alone.
    chosen = sorted(targets)[::2] + sorted(targets)[1::4]
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=chosen, rank_pattern={chosen[0]: 6}, alpha_pattern={chosen[1]: 9}
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    # PEFT takes a name for the end of others, too: `norm_out.linear` is in blocks of HunyuanVideo as well.
    count = sum(name.endswith("lora_A.default.weight") for name, _ in adapted.named_parameters())
    assert count >= len(chosen)
    adapted.save_pretrained(tmp_path / "adapter")
    section = settled(LoraSection(path=tmp_path / "adapter"), [n for n, _ in plain.named_parameters()], table)
    module = ours(spec, config, tmp_path / "base", section)
    names = [n for n, _ in plain.named_parameters()]
    fill_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), names, table)
    assert compare_weights(module, spec, config, adapted.merge_and_unload(), base) == count


# ---------------------------------------------------------------------------------------------- logits


TARGETS = ["text.layers.{*}", {"modules": "vision.blocks.{*}", "rank": 5}, "projector.{up,down}"]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any, Path]:
    config = Qwen2VL().config(0, attention="eager")
    model = reference_model(config, 0).eval()
    model.save_pretrained(tmp_path / "base")
    return config, model, tmp_path


def logits_of_both(config: Any, model: Any, adapted: Any, module: nn.Module) -> tuple[Tensor, Tensor]:
    family, both = Qwen2VL(), Pair(config, model, module)
    cases = [family.case(both, [("image", (1, 4, 6)), ("video", (2, 4, 4))], 3), family.case(both, [], 4)]
    with torch.no_grad():
        theirs = torch.cat([adapted(**family.inputs(both, case)).logits[0] for case in cases])
        return module(family.pack(config, cases), logits=True)["logits"], theirs


def test_logits_are_those_of_peft_and_of_the_merged_folder(pair: tuple[Any, Any, Path]) -> None:
    config, model, folder = pair
    spec = FAMILIES.get("qwen2_vl")
    section = LoraSection.model_validate({"targets": TARGETS, "rank": 3, "alpha": 4})
    module = ours(spec, config, folder / "base", section)
    draw(module, size=0.2)
    save_adapters(
        folder / "adapter",
        model_tensors(module),
        adapters_of(module),
        spec.main.weight_map(config),
        base=str(folder / "base"),  # type: ignore[misc]
    )
    adapted = peft.PeftModel.from_pretrained(model, folder / "adapter")
    mine, theirs = logits_of_both(config, adapted.base_model.model, adapted, module)
    assert relative(mine, theirs) < TOLERANCE
    with without_adapters(module), adapted.disable_adapter():
        before, theirs_before = logits_of_both(config, adapted.base_model.model, adapted, module)
    assert relative(before, theirs_before) < TOLERANCE
    assert relative(mine, before) > 0.01

    # Merged, it is a plain folder that gives the same.
    export_folder(module, spec, config, None, folder / "merged", adapters=adapters_of(module), prove="never")
    plain = type(model).from_pretrained(folder / "merged", attn_implementation="eager", dtype=torch.float32).eval()
    _, of_merged = logits_of_both(config, plain, plain, module)
    assert relative(of_merged, mine) < TOLERANCE


def test_a_folder_of_adapters_is_a_model_by_itself(tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart"))
    foreign(config).save_pretrained(tmp_path / "base")
    write_tokenizer_for(tmp_path / "base")
    # Adapters that outweigh their layers amplify rounding: merged and unmerged agree to 1e-13 in fp64 at any size.
    module = ours(spec, config, tmp_path / "base", LoraSection(rank=3, alpha=4))
    draw(module, size=0.1)
    table = spec.main.weight_map(config)  # type: ignore[misc]
    save_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), table, base=str(tmp_path / "base"))
    loaded, processor = tessera.load(tmp_path / "adapter", device="cpu")
    batch = processor([{"role": "user", "content": "red blue"}])
    with torch.no_grad():
        expected = module(batch, logits=True)["logits"]
        assert relative(loaded(batch)["logits"], expected) < TOLERANCE
        tessera.convert(tmp_path / "adapter", tmp_path / "merged")
        assert relative(tessera.load(tmp_path / "merged", device="cpu")[0](batch)["logits"], expected) < TOLERANCE
        with without_adapters(module):
            assert relative(module(batch, logits=True)["logits"], expected) > 0.01
    tessera.convert(tmp_path / "adapter", tmp_path / "again", adapters=True)
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with raises("adapter.none-in-model"):
        tessera.convert(tmp_path / "base", tmp_path / "none", adapters=True)


def write_tokenizer_for(folder: Path) -> None:
    tokenizer = train_tokenizer(["red blue tall small old Say"], 400, [f"<|{word}|>" for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))


# ---------------------------------------------------------------------------------------------- what is refused


def folder_with(tmp_path: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    tmp_path.mkdir(exist_ok=True)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"use_dora": True}, "adapter.damaged-file use_dora"),
        ({"peft_type": "IA3"}, "adapter.unsupported-option peft_type"),
        ({"bias": "all"}, "adapter.unsupported-option"),
        ({"modules_to_save": ["lm_head"]}, "adapter.damaged-file modules_to_save"),
    ],
)
def test_what_is_not_plain_lora_is_refused(change: dict[str, Any], error: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {f"{Q}.lora_A.weight": torch.zeros(2, 4)}, **change)
    with raises(error):
        read_adapters(folder, ["text.layers.0.attn.q.weight"], WeightMap(()))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({f"{Q}.lora_A.weight": torch.zeros(2, 4)}, "adapter.damaged-file lora_A"),
        ({f"{Q}.lora_A.weight": torch.zeros(2, 4), f"{Q}.lora_B.weight": torch.zeros(4, 3)}, "adapter.damaged-file"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(4)}, "adapter.not-plain-lora"),
        (
            {f"{Q}x.lora_A.weight": torch.zeros(2, 4), f"{Q}x.lora_B.weight": torch.zeros(4, 2)},
            "adapter.unknown-layers",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tensors: dict[str, Tensor], error: str, tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart"))
    with raises(error):
        read_adapters(folder_with(tmp_path, tensors), ["text.layers.0.attn.q.weight"], spec.main.weight_map(config))  # type: ignore[misc]


def test_adapters_in_a_pickle_and_adapters_to_compare_are_told_the_way(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02}.")
    with raises("adapter.weights-missing", "save_pretrained"):
        tessera.load(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    save_file({"base_model.model.a.lora_A.weight": torch.ones(1, 1)}, tmp_path / "adapter_model.safetensors")
    with raises("adapter.compare-unmerged") as refused:
        tessera.compare(tmp_path)
    assert "tessera convert" in str(refused.value.fix)


def test_adapters_alone_are_no_model_to_start_from(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {f"{Q}.lora_A.weight": torch.zeros(2, 4)}, base_model_name_or_path="some/where")
    with raises("adapter.folder-is-adapters"):
        fill_from(folder, {}, None)
    with raises("adapter.base-missing"):
        tessera.load(folder)
