"""LoRA files that people exchange: what we write diffusers loads, what others write we read, what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils as theirs_names
from safetensors.torch import load_file, save_file
from torch import Tensor

import tessera
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import LoraSection, ModelSection
from tessera.diffusion.family import GenerationSpec
from tessera.lora.exchange import FILES, open_adapters
from tessera.lora.export import save_adapters
from tessera.lora.factors import Factors
from tessera.lora.load import read_adapters
from tessera.lora.modules import find_adapters
from tessera.lora.select import Adapter, factor_names
from tessera.models import FAMILIES, resolve
from tests.errors import raises

EXACT = 1e-6  # relative: a product of two factors, whose scale is in one of them or beside both
FAMILY_NAMES = [name for name in FAMILIES.names() if isinstance(FAMILIES.get(name), GenerationSpec)]
WITH_MAKERS = [name for name in FAMILY_NAMES if "original" in FAMILIES.get(name).main.weights]
FORMS = {name: ("peft", "diffusers", *(("comfyui", "kohya") if name in WITH_MAKERS else ())) for name in FAMILY_NAMES}


# Wan is the plain one; Flux has layers that are joined in the files of its makers, also of unequal sizes.
SOME = [name if name in ("wan", "flux") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES]


class Case:
    """Hold a tiny model of a family with drawn adapters for all layers that can have some."""

    def __init__(self, family: str, changes: Mapping[str, Any] | None = None, rslora: bool = False) -> None:
        section = ModelSection(family=family, preset="quickstart", config=dict(changes or {}))
        self.spec, self.config = resolve(section)
        self.table = self.spec.main.weight_map(self.config)
        with torch.device("meta"):
            self.module = self.spec.main.build(self.config)
        self.tensors = dict(model_tensors(self.module))
        self.paths = [name.removesuffix(".weight") for name in self.tensors if name.endswith(".weight")]
        lora = LoraSection(rank=4, alpha=6, rslora=rslora)
        self.adapters = dict(find_adapters(lora, self.module, self.spec.main.plan(self.config)))
        first = next(iter(self.adapters))
        self.adapters[first] = Adapter(6, 3, rslora)
        chance = torch.Generator().manual_seed(5)
        for path, adapter in self.adapters.items():
            outputs, inputs = self.tensors[f"{path}.weight"].shape
            a, b = factor_names(path)
            self.tensors[a] = torch.randn(adapter.rank, inputs, generator=chance)
            self.tensors[b] = torch.randn(outputs, adapter.rank, generator=chance)

    def write(self, folder: Path, *forms: Any) -> Path:
        save_adapters(folder, self.tensors, self.adapters, self.table, forms=forms, language=False)
        return folder

    def read(self, path: Path, **options: Any) -> dict[str, Factors]:
        return read_adapters(path, [f"{layer}.weight" for layer in self.paths], self.table, **options)

    def product(self, path: str) -> Tensor:
        a, b = factor_names(path)
        return self.adapters[path].scale * self.tensors[b] @ self.tensors[a]

    def check(self, read_back: Mapping[str, Factors]) -> None:
        assert set(read_back) == set(self.adapters)
        for path, factors in read_back.items():
            near(factors.adapter.scale * factors.b.float() @ factors.a.float(), self.product(path), path)


def near(value: Tensor, other: Tensor, what: str) -> None:
    assert float((value - other).detach().abs().max()) <= EXACT * float(other.detach().abs().max()), what


@pytest.mark.parametrize("family", SOME)
def test_every_form_is_read_back_as_it_was_written(family: str, tmp_path: Path) -> None:
    case = Case(family)
    for form in FORMS[family]:
        case.write(tmp_path / form, form)
        read_back = case.read(tmp_path / form)
        case.check(read_back)
        # Layers that lie side by side in a file come apart with the ranks that they had.
        assert all(factors.adapter.rank == case.adapters[path].rank for path, factors in read_back.items()), form
        if form != "peft":
            case.check(case.read(tmp_path / form / FILES[form]))


def test_the_forms_of_a_run_share_a_folder_and_the_scale_of_the_run_is_kept(tmp_path: Path) -> None:
    case = Case("flux", rslora=True)
    case.write(tmp_path / "all", "peft", "diffusers", "comfyui", "kohya")
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        "adapter_config.json",
        "tessera_export.json",
        *FILES.values(),
    }
    for name in FILES.values():
        if name != FILES["peft"]:
            case.check(case.read(tmp_path / "all" / name))
    case.check(case.read(tmp_path / "all"))


@pytest.mark.parametrize("family", ["cogvideox", "hunyuan_video_1_5"])
def test_a_family_whose_makers_names_are_not_known_says_so(family: str, tmp_path: Path) -> None:
    with raises("adapter.no-original-names"):
        Case(family).write(tmp_path / "out", "kohya")


# ---------------------------------------------------------------------------------------------- diffusers


def transformer(case: Case) -> Any:
    torch.manual_seed(0)
    fields = case.config.to_hf()
    return getattr(diffusers, fields["_class_name"]).from_config(fields).eval()


@pytest.mark.parametrize("rslora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SOME)
def test_diffusers_loads_what_we_write(family: str, rslora: bool, tmp_path: Path) -> None:
    """Its merged weights are ours: so are its outputs, which the same weights give."""
    case = Case(family, rslora=rslora)
    case.write(tmp_path / "lora", "diffusers")
    model = transformer(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_lora_adapter(tmp_path / "lora", prefix="transformer", weight_name=FILES["diffusers"])
    model.fuse_lora()
    model.unload_lora()
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    wanted: set[str] = set()
    for path in case.adapters:
        rule, (name,) = case.table.rule_for(f"{path}.weight")
        wanted.add(name)
        expected = before[name] + rule.op.to_foreign(case.product(path))[0]
        assert float((after[name] - expected).abs().max()) <= 4 * EXACT * float(expected.abs().max()), name
    assert moved == wanted


Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
CONVERTERS: list[Any] = [
    ("wan", "comfyui", theirs_names._convert_non_diffusers_wan_lora_to_diffusers),
    ("wan", "kohya", theirs_names._convert_musubi_wan_lora_to_diffusers),
    pytest.param("flux", "kohya", theirs_names._convert_kohya_flux_lora_to_diffusers, marks=pytest.mark.slow),
    ("qwen_image", "comfyui", theirs_names._convert_non_diffusers_qwen_lora_to_diffusers),
    ("qwen_image", "kohya", theirs_names._convert_non_diffusers_qwen_lora_to_diffusers),
]
# Their converter divides the joined layers of Flux by the width of the published model.
WIDE = {
    "flux": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 1,
        "num_single_layers": 1,
        "axes_dims_rope": (16, 56, 56),
    }
}


@pytest.mark.parametrize(
    ("family", "form", "convert"), CONVERTERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_converters_of_diffusers_understand_our_names(
    family: str, form: str, convert: Convert, tmp_path: Path
) -> None:
    case = Case(family, WIDE.get(family))
    if form == "kohya" and family == "wan":  # theirs knows the layers of blocks, all of them
        case.adapters = {path: one for path, one in case.adapters.items() if path.startswith("blocks.")}
    case.write(tmp_path / "lora", form)
    converted = convert(load_file(tmp_path / "lora" / FILES[form]))
    for path in case.adapters:
        rule, (name,) = case.table.rule_for(f"{path}.weight")
        layer = f"transformer.{name.removesuffix('.weight')}"
        product = converted.pop(f"{layer}.lora_B.weight").float() @ converted.pop(f"{layer}.lora_A.weight").float()
        near(product, rule.op.to_foreign(case.product(path))[0], name)
    assert not converted


def test_hunyuan_names_are_those_that_diffusers_converts(tmp_path: Path) -> None:
    """Their converter knows no alpha, and divides joined layers by the width of the published model."""
    case = Case("hunyuan_video", {"num_single_layers": 0})
    case.adapters = {path: Adapter(one.rank, one.rank) for path, one in case.adapters.items()}
    case.write(tmp_path / "lora", "comfyui")
    stored = {
        key: tensor for key, tensor in load_file(tmp_path / "lora" / FILES["comfyui"]).items() if "alpha" not in key
    }
    stored = {key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): t for key, t in stored.items()}
    converted = theirs_names._convert_hunyuan_video_lora_to_diffusers(stored)
    for path in case.adapters:
        rule, (name,) = case.table.rule_for(f"{path}.weight")
        layer = f"transformer.{name.removesuffix('.weight')}"
        product = converted[f"{layer}.lora_B.weight"] @ converted[f"{layer}.lora_A.weight"]
        near(product, rule.op.to_foreign(case.product(path))[0], name)


@pytest.mark.parametrize("family", ["sd3", "ltx_video"])
def test_makers_names_are_those_that_diffusers_converts(family: str) -> None:
    """A whole file of weights in the makers' form, converted by diffusers, is ours in the form of diffusers."""
    from diffusers.loaders import single_file_utils

    case = Case(family)
    chance = torch.Generator().manual_seed(3)
    native = {name: torch.randn(t.shape, generator=chance) for name, t in model_tensors(case.module).items()}
    original = case.table.others["original"].to_foreign(native)
    convert = {
        "sd3": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
        "ltx_video": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    }[family]
    converted, expected = convert(dict(original)), case.table.to_foreign(native)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------------------------------- files of others


LAYER = "blocks.0.self_attn.q"


def wan_file(path: Path, layer: str = LAYER, prefix: str = "diffusion_model.", **more: Tensor) -> Path:
    names = {
        f"{prefix}{layer}.lora_down.weight": torch.ones(2, 128),
        f"{prefix}{layer}.lora_up.weight": torch.ones(128, 2),
    }
    save_file({**names, **more}, path)
    return path


def test_a_file_without_alpha_is_taken_as_it_is_and_with_one_it_is_scaled(tmp_path: Path) -> None:
    case = Case("wan")
    plain = case.read(wan_file(tmp_path / "a.safetensors"))
    assert {path: factors.adapter.scale for path, factors in plain.items()} == {"blocks.0.attn.qkv.q": 1.0}
    scaled = case.read(wan_file(tmp_path / "b.safetensors", **{f"diffusion_model.{LAYER}.alpha": torch.tensor(1.0)}))
    assert scaled["blocks.0.attn.qkv.q"].adapter.scale == 0.5
    old = {
        f"transformer.blocks.0.attn1.to_q.lora.{side}.weight": t
        for side, t in (("down", torch.ones(2, 128)), ("up", torch.ones(128, 2)))
    }
    save_file(old, tmp_path / "c.safetensors")
    assert list(case.read(tmp_path / "c.safetensors")) == ["blocks.0.attn.qkv.q"]


def test_differences_of_zero_change_nothing_and_others_are_refused(tmp_path: Path) -> None:
    case, name = Case("wan"), "diffusion_model.blocks.0.norm3.diff_b"
    assert case.read(wan_file(tmp_path / "a.safetensors", **{name: torch.zeros(128)}))
    with raises("adapter.not-plain-lora"):
        case.read(wan_file(tmp_path / "b.safetensors", **{name: torch.ones(128)}))


def test_a_shared_matrix_of_joined_layers_stays_shared(tmp_path: Path) -> None:
    case = Case("flux")
    layer, hidden = "lora_unet_double_blocks_0_img_attn_qkv", 128
    stored = {
        f"{layer}.lora_down.weight": torch.randn(4, hidden),
        f"{layer}.lora_up.weight": torch.randn(3 * hidden, 4),
        f"{layer}.alpha": torch.tensor(2.0),
    }
    save_file(stored, tmp_path / "a.safetensors")
    read_back = case.read(tmp_path / "a.safetensors")
    assert sorted(read_back) == [f"blocks.0.attn.latent.{name}" for name in "kqv"]
    assert {factors.adapter for factors in read_back.values()} == {Adapter(4, 2.0)}
    case.adapters = {path: factors.adapter for path, factors in read_back.items()}
    for path, factors in read_back.items():
        case.tensors |= dict(zip(factor_names(path), (factors.a, factors.b), strict=True))
    written = load_file(case.write(tmp_path / "again", "kohya") / FILES["kohya"])
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_a_file_of_both_experts_gives_each_its_own(tmp_path: Path) -> None:
    case = Case("wan")
    stored = {
        f"{part}.blocks.0.attn1.to_q.lora_{side}.weight": torch.full(shape, value)
        for part, value in (("transformer", 1.0), ("transformer_2", 2.0))
        for side, shape in (("A", (2, 128)), ("B", (128, 2)))
    }
    save_file(stored, tmp_path / "a.safetensors")
    for part, value in (("transformer", 1.0), ("transformer_2", 2.0)):
        assert float(case.read(tmp_path / "a.safetensors", part=part)["blocks.0.attn.qkv.q"].a[0, 0]) == value
    save_file({key: tensor for key, tensor in stored.items() if "_2." in key}, tmp_path / "b.safetensors")
    with raises("adapter.other-expert"):
        case.read(tmp_path / "b.safetensors")


# ---------------------------------------------------------------------------------------------- what is refused


def test_wrong_names_are_told_with_the_nearest_and_adapters_of_another_family_are_refused(tmp_path: Path) -> None:
    case = Case("wan")
    with raises("adapter.unknown-layers", "blocks.0.self_attn.qq", "blocks.0.self_attn.q"):
        case.read(wan_file(tmp_path / "a.safetensors", "blocks.0.self_attn.qq"))
    with raises("adapter.unknown-layers"):
        case.read(wan_file(tmp_path / "b.safetensors", "blocks.77.self_attn.q"))
    for family in WITH_MAKERS:
        if family != "wan":
            file = Case(family).write(tmp_path / family, "kohya")
            with raises("adapter.unknown-layers"):
                case.read(file)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"diffusion_model.blocks.0.self_attn.k.lora_down.weight": torch.ones(2, 128)}, "adapter.damaged-file lora_A"),
        ({f"diffusion_model.{LAYER}.lora_up.weight": torch.ones(128, 3)}, "adapter.damaged-file lora_B"),
        ({f"diffusion_model.{LAYER}.lora_up.weight": torch.full((128, 2), float("nan"))}, "adapter.damaged-file"),
        ({f"diffusion_model.{LAYER}.lora_up.weight": torch.ones(128, 2, dtype=torch.int8)}, "adapter.not-linear"),
        ({f"diffusion_model.{LAYER}.lora_up.weight": torch.ones(128, 2, 3, 3)}, "adapter.not-linear"),
        ({f"diffusion_model.{LAYER}.dora_scale": torch.ones(128)}, "adapter.not-plain-lora"),
        ({f"diffusion_model.{LAYER}.alpha": torch.ones(3)}, "adapter.damaged-file"),
        ({f"diffusion_model.{LAYER}.alpha": torch.tensor(2j)}, "adapter.damaged-file"),
        ({f"diffusion_model.{LAYER}.alpha": torch.tensor(float("inf"))}, "adapter.no-scale"),
        ({f"diffusion_model.{LAYER}.lora_A.weight": torch.ones(2, 128)}, "adapter.damaged-file lora_A"),
        ({"diffusion_model.blocks.0.ffn.0.alpha": torch.tensor(2.0)}, "adapter.damaged-file"),
        ({"transformer.blocks.0.attn1.to_k.lora_A.weight": torch.ones(2, 128)}, "adapter.damaged-file"),
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(2.0)}, "adapter.text-encoder"),
        ({"lokr_w1": torch.ones(2)}, "adapter.not-plain-lora lokr_w1"),
    ],
)
def test_damaged_and_foreign_files_are_refused(more: dict[str, Tensor], error: str, tmp_path: Path) -> None:
    with raises(error):
        Case("wan").read(wan_file(tmp_path / "a.safetensors", **more))


def test_a_scale_that_is_stated_twice_and_a_header_that_is_no_mapping_are_refused(tmp_path: Path) -> None:
    case, layer = Case("wan"), "transformer.blocks.0.attn1.to_q"
    sides = {f"{layer}.lora_A.weight": torch.ones(2, 128), f"{layer}.lora_B.weight": torch.ones(128, 2)}
    header = {"transformer.r": 2, "transformer.lora_alpha": 4}
    for tensors, text, told in [
        ({**sides, f"{layer}.alpha": torch.tensor(2.0)}, json.dumps(header), "adapter.damaged-file"),
        (sides, "[]", "adapter.unreadable-config"),
        (sides, "{", "adapter.unreadable-config"),
        (sides, json.dumps({**header, "transformer.r": 3}), "adapter.damaged-file"),
        (sides, json.dumps({**header, "transformer.r": "2"}), "adapter.bad-config-value"),
        (sides, json.dumps({**header, "transformer.lora_alpha": 10**400}), "adapter.bad-config-value lora_alpha 1000"),
        (sides, json.dumps({**header, "transformer.use_dora": True}), "adapter.damaged-file use_dora"),
    ]:
        save_file(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": text})
        with raises(told):
            case.read(tmp_path / "a.safetensors")
    save_file(sides, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(header)})
    assert case.read(tmp_path / "a.safetensors")["blocks.0.attn.qkv.q"].adapter.scale == 2.0


def test_a_folder_whose_file_holds_no_adapters_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"]}
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "peft" / FILES["peft"])
    for name, tensors in (("empty", {}), ("zeros", {"transformer.blocks.0.attn1.to_q.diff": torch.zeros(2)})):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / FILES["diffusers"])
    for name in ("peft", "empty", "zeros"):
        with raises("adapter.none-in-file"):
            open_adapters(tmp_path / name)


# ---------------------------------------------------------------------------------------------- verbs


@pytest.fixture
def base(tmp_path: Path) -> tuple[Case, Path]:
    case = Case("wan")
    transformer(case).save_pretrained(tmp_path / "base")
    return case, tmp_path / "base"


def test_load_merges_files_with_their_strength_and_convert_goes_between_forms(
    base: tuple[Case, Path], tmp_path: Path
) -> None:
    case, folder = base
    file = case.write(tmp_path / "lora", "comfyui") / FILES["comfyui"]
    plain, _ = tessera.load(folder, device="cpu")
    half, _ = tessera.load(folder, device="cpu", adapters={file: 0.5})
    before, after = model_tensors(plain.module), model_tensors(half.module)
    for path in case.adapters:
        expected = before[f"{path}.weight"] + 0.5 * case.product(path)
        near(after[f"{path}.weight"], expected, path)
    for form in FORMS["wan"]:
        written = tessera.convert(file, tmp_path / f"as-{form}", to=form, like=folder, adapters=True)
        case.check(case.read(written))
        file = written
    merged = tessera.convert(file, tmp_path / "merged", like=folder, prove="never")
    whole = model_tensors(tessera.load(merged, device="cpu")[0].module)
    for path in case.adapters:
        near(whole[f"{path}.weight"], before[f"{path}.weight"] + case.product(path), path)


def test_a_file_that_names_no_model_and_options_in_vain_are_refused(base: tuple[Case, Path], tmp_path: Path) -> None:
    case, folder = base
    file = case.write(tmp_path / "lora", "kohya") / FILES["kohya"]
    with raises("adapter.base-unnamed"):
        tessera.load(file)
    with raises("adapter.base-unnamed"):
        tessera.convert(file, tmp_path / "out", adapters=True)
    with raises("adapter.folder-is-a-model"):
        tessera.load(folder, adapters=folder)
    with raises("weights.folder-missing"):
        tessera.load(folder, adapters=tmp_path / "lora" / "kohya_lora.safetensor")
    with raises("adapter.bad-strength"):
        tessera.load(folder, adapters={file: float("nan")})
    with raises("adapter.form-of-adapters", "--adapters", "--to"):
        tessera.convert(file, tmp_path / "out", to="kohya", like=folder)
    with raises("output.unknown-adapter-form"):
        tessera.convert(file, tmp_path / "out", to="kohia", like=folder, adapters=True)  # type: ignore[arg-type]
    wide = wan_file(tmp_path / "wide.safetensors", **{f"diffusion_model.{LAYER}.lora_down.weight": torch.ones(2, 64)})
    with raises("adapter.shape-mismatch", "64", "128"):
        tessera.load(folder, adapters=wide)
