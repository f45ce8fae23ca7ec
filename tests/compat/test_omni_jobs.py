"""Jobs of MindSpeed-MM that train the thinkers of Qwen2.5-Omni and Qwen3-Omni, and their weights."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_folders import small_folder

import tessera
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.convert import run as mm_convert
from tessera_compat.mindspeed_mm.entry_points import pretrain, pretrain_fsdp2
from tessera_compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.report import JobReport
from tests.errors import raises
from tests.toys.media_zoo import clip

EXAMPLES = Path(__file__).parents[2] / "tessera_compat" / "mindspeed_mm" / "examples"
OMNI, OMNI3 = EXAMPLES / "qwen2.5omni", EXAMPLES / "qwen3omni"
Change = Callable[[dict[str, Any]], object]


def full_folder(case: str, root: Path, others: tuple[str, ...]) -> Path:
    """Write a folder of a full model: the small thinker, and a tensor of each other part."""
    folder = small_folder(case, root)
    fields = json.loads((folder / "config.json").read_text())
    full = {"model_type": fields["model_type"].removesuffix("_thinker"), "thinker_config": fields, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(full))
    tensors = load_file(folder / "model.safetensors")
    numbers = torch.Generator().manual_seed(0)
    parts = {f"{part}.proj.weight": torch.randn(3, 2, generator=numbers) for part in others}
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()} | parts, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_folder("qwen2_5_omni", tmp_path_factory.mktemp("omni"), ("talker", "token2wav"))


@pytest.fixture(scope="module")
def omni3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_folder("qwen3_omni", tmp_path_factory.mktemp("omni3"), ("talker", "code2wav"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recordings, a video with sound, and conversations about them."""
    sound = np.random.default_rng(0).integers(-9000, 9000, 8000).astype("<i2")
    (tmp_path / "data" / "media").mkdir(parents=True)
    for number in range(3):
        with wave.open(str(tmp_path / f"data/media/{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(sound[: 8000 - 1000 * number].tobytes())
    (tmp_path / "data/media/0.mp4").write_bytes(clip("mpeg4.mp4", 30, width=32, height=24, sound_seconds=1.0))
    rows: list[dict[str, Any]] = [
        {"messages": conversation("<audio>Say red."), "audios": [f"media/{number}.wav"]} for number in range(3)
    ]
    rows += [
        {"messages": conversation("<video><audio>Say red."), "videos": ["media/0.mp4"], "audios": ["media/0.wav"]},
        {"messages": conversation("Say blue.")},
    ]
    (tmp_path / "data" / "rows.json").write_text(json.dumps(rows))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "red blue"}]


def sized(data: dict[str, Any]) -> None:
    """Give the example of Qwen2.5-Omni the sizes of the small model, on one stage."""
    seen = {"num_layers": 3, "hidden_size": 96, "ffn_hidden_size": 256, "num_attention_heads": 4, "patch_size": 7}
    data["image_encoder"]["vision_encoder"].update(seen, window_attn_size=28, fullatt_block_indexes=[1])
    heard = {"num_layers": 3, "hidden_size": 96, "d_model": 96, "ffn_hidden_size": 384, "num_attention_heads": 4}
    data["audio_encoder"]["audio_encoder"].update(heard, num_mel_bins=80, n_window=50, output_dim=128)
    text = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4}
    more = {"num_query_groups": 2, "vocab_size": 512, "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    data["text_decoder"].update(text, **more)
    for section in (
        data["image_encoder"]["vision_encoder"],
        data["audio_encoder"]["audio_encoder"],
        data["text_decoder"],
    ):
        del section["pipeline_num_layers"]


def read_by(folder: Path) -> Change:
    """Name the processor and the rows of a test in a data.json."""

    def change(data: dict[str, Any]) -> None:
        param = data["dataset_param"]
        param["preprocess_parameters"] |= {"model_name_or_path": str(folder), "video_max_pixels": 4096}
        param["basic_parameters"] |= {"dataset": "data/rows.json", "dataset_dir": "./data"}

    return change


def edited(source: Path, *changes: Change) -> str:
    """Return the name of a JSON file that differs from an example."""
    data = json.loads(source.read_text())
    for change in changes:
        change(data)
    Path(source.name).write_text(json.dumps(data))
    return source.name


FLAGS = "--micro-batch-size 1 --global-batch-size 2 --seq-length 256 --lr 1e-4 --train-iters 2 --num-workers 0"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_job_of_qwen2_5_omni_trains_from_its_shards(omni: Path, place: Path) -> None:
    """From mm-convert to the full folder, as the guide of the example goes."""
    lists = [f"--cfg.parallel_config.{part}_pp_layers" for part in ("llm", "vit", "audio")]
    shards, folder = ["--cfg.mm_dir", "shards"], ["--cfg.hf_config.hf_dir", str(omni)]
    nested = [word for pair in zip(lists, ("[[4]]", "[[3]]", "[[3]]"), strict=True) for word in pair]
    mm_convert(["Qwen2_5_OmniConverter", "hf_to_mm", *shards, *folder, *nested])
    model, data = edited(OMNI / "model_7b.json", sized), edited(OMNI / "data_7b.json", read_by(omni))
    files = ["--mm-model", model, "--mm-data", data, "--load", "shards", "--save", "saved"]
    pretrain([*FLAGS.split(), *files])
    assert len(losses(Path("saved"))) == 2
    flat = [word.replace("[[", "[").replace("]]", "]") for word in nested]
    words = ["--cfg.mm_dir", "saved", "--cfg.save_hf_dir", "back", *folder, *flat]
    mm_convert(["Qwen2_5_OmniConverter", "mm_to_hf", *words])
    before, after = (load_file(one / "model.safetensors") for one in (omni, Path("back")))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed  # the decoder alone: both encoders, their projectors, talker and vocoder are frozen or not trained
    assert all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in changed)
    assert json.loads(Path("back/config.json").read_text())["model_type"] == "qwen2_5_omni"


@pytest.mark.slow  # the job of Qwen2.5-Omni goes the same way
def test_a_job_of_qwen3_omni_trains_by_flags_and_by_yaml(omni3: Path, place: Path) -> None:
    """The weights are those of ExpertMergeDcpConverter, whose output the job of the FSDP2 trainer loads."""
    expected = load_file(omni3 / "model.safetensors")
    mm_convert(["ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", str(omni3), "--save_dir", "dcp"])
    back = ["ExpertMergeDcpConverter", "dcp_to_hf", "--hf_dir", str(omni3)]
    mm_convert([*back, "--dcp_dir", "dcp/release", "--save_dir", "same"])
    same = load_file("same/model.safetensors")
    assert same.keys() == expected.keys()
    assert all(torch.equal(same[name], expected[name]) for name in expected)

    model = edited(OMNI3 / "model.json", lambda data: data.update(init_from_hf_path=str(omni3)))
    data = edited(
        OMNI3 / "data.json", read_by(omni3), lambda data: data["dataset_param"]["attr"].update(videos="videos")
    )
    pretrain([*FLAGS.split(), "--mm-model", model, "--mm-data", data, "--save", "flags", "--use-torch-fsdp2"])
    job = yaml.safe_load((OMNI3 / "qwen3omni_v1.yaml").read_text())
    read_by(omni3)(job["data"])
    job["data"]["dataset_param"]["preprocess_parameters"] |= {
        "video_min_pixels": 256,
        "video_fps": 2.0,
        "video_maxlen": 128,
    }
    job["data"]["dataset_param"]["attr"]["videos"] = "videos"
    job["data"]["dataset_param"]["basic_parameters"]["cutoff_len"] = 256
    job["data"]["dataloader_param"]["num_workers"] = 0
    job["model"]["model_name_or_path"] = str(omni3)
    job["parallel"]["fsdp_plan"]["param_dtype"] = "fp32"
    job["training"] |= {"load": "dcp", "load_format": "dcp", "save": "yaml", "train_iters": 2, "lr": 1e-4}
    job["training"] |= {"gradient_accumulation_steps": 2, "seed": 1234}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    pretrain_fsdp2(["job.yaml"])
    # The same weights, rows and steps; the schedules differ after the first.
    assert losses(Path("flags"))[0] == pytest.approx(losses(Path("yaml"))[0], rel=1e-5)
    mm_convert([*back, "--dcp_dir", "yaml", "--save_dir", "trained"])
    trained = load_file("trained/model.safetensors")
    assert trained.keys() == expected.keys()
    changed = {name for name in expected if not torch.equal(trained[name], expected[name])}
    assert changed
    assert all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in changed)


@pytest.mark.parametrize(
    ("tp", "llm", "vit", "audio"),
    [
        pytest.param(1, "[[1,3]]", "[[3,0]]", "[[2,1]]", marks=pytest.mark.slow),
        (2, "[[1,1],[1,1]]", "[[3,0],[0,0]]", "[[1,1],[1,0]]"),
    ],
)
def test_a_full_folder_goes_through_shards_and_back(
    tp: int, llm: str, vit: str, audio: str, omni: Path, tmp_path: Path
) -> None:
    where = f"--cfg.mm_dir {tmp_path}/mm --cfg.hf_config.hf_dir {omni} --cfg.parallel_config.tp_size {tp}"
    lists = {"llm": llm, "vit": vit, "audio": audio}
    words = [f"--cfg.parallel_config.{part}_pp_layers={layers}" for part, layers in lists.items()]
    mm_convert(["Qwen2_5_OmniConverter", "hf_to_mm", *where.split(), *words])
    if tp == 1:
        flat = [word.replace("[[", "[").replace("]]", "]") for word in words]
        back = ["--cfg.save_hf_dir", str(tmp_path / "back"), *where.split(), *flat]
        mm_convert(["Qwen2_5_OmniConverter", "mm_to_hf", *back])
        actual, expected = (load_file(one / "model.safetensors") for one in (tmp_path / "back", omni))
    else:  # mm_to_hf takes no lists of virtual stages
        tessera.convert(tmp_path / "mm", tmp_path / "back", like=omni, prove="never")
        actual, expected = (load_file(one / "model.safetensors") for one in (tmp_path / "back", omni))
        expected = {name: tensor for name, tensor in expected.items() if name.startswith("thinker.")}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_names_and_orders_of_the_audio_encoder_are_those_of_the_other_system(omni: Path, tmp_path: Path) -> None:
    tessera.convert(omni, tmp_path / "mm", to="mm", layout={})
    model = torch.load(tmp_path / "mm/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    hub = load_file(omni / "model.safetensors")
    layer, block = "thinker.audio_tower.layers.1.", "audio_encoder.encoder.blocks.layers.1."
    heads = json.loads((omni / "config.json").read_text())["thinker_config"]["audio_config"]["encoder_attention_heads"]
    for kind in ("weight", "bias"):
        q, v = (hub[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qv")
        k = hub[f"{layer}self_attn.k_proj.weight"] if kind == "weight" else torch.zeros_like(q)
        expected = torch.cat(
            [part for head in zip(*(one.chunk(heads) for one in (q, k, v)), strict=True) for part in head]
        )
        assert torch.equal(model[f"{block}self_attention.linear_qkv.{kind}"], expected)
    for theirs, name in (
        (block + "mlp.linear_fc1.bias", layer + "fc1.bias"),
        (block + "pre_mlp_layernorm.weight", layer + "final_layer_norm.weight"),
        (block + "input_layernorm.bias", layer + "self_attn_layer_norm.bias"),
        *(
            (f"audio_encoder.encoder.{name}", f"thinker.audio_tower.{name}")
            for name in ("conv1.weight", "conv2.bias", "ln_post.weight", "proj.bias", "audio_bos_eos_token.weight")
        ),
    ):
        assert torch.equal(model[theirs], hub[name]), theirs
    assert not any(name.startswith(("talker", "token2wav")) for name in model)


def translated(place: Path, *words: str, world: int = 1, **changes: Change) -> tuple[dict[str, Any], JobReport]:
    """Translate the example of Qwen2.5-Omni with changes of its two files."""
    nothing: Change = lambda data: None  # noqa: E731
    model = edited(OMNI / "model_7b.json", changes.get("model", nothing))
    data = edited(OMNI / "data_7b.json", changes.get("data", nothing))
    flags = ["--lr", "1e-5", "--train-iters", "9", "--mm-model", model, "--mm-data", data]
    return recipe_of(parse_args([*flags, *words], world_size=world, allow_refused=True))


def refused(place: Path, **changes: Change) -> list[str]:
    return [f"{entry.key}: {entry.note}" for entry in translated(place, **changes)[1].refused]


def test_keys_of_sound_are_checked(place: Path) -> None:
    def audio(**keys: Any) -> Change:
        return lambda data: data["audio_encoder"]["audio_encoder"].update(keys)

    def preprocess(data: dict[str, Any]) -> None:
        data["dataset_param"]["preprocess_parameters"]["use_audio_in_video"] = True

    assert refused(place) == []
    name = "audio_encoder.audio_encoder."
    assert refused(place, model=audio(num_mel_bin=80)) == [
        f"{name}num_mel_bin: unknown key; did you mean num_mel_bins?"
    ]
    assert refused(place, model=audio(scale_embedding=True)) == [f"{name}scale_embedding: always False in Tessera"]
    assert refused(place, model=audio(d_model=64)) == [f"{name}d_model: {name}hidden_size sets 1280"]
    wrong = refused(place, model=lambda data: data["audio_encoder"].update(audio_encode={}))
    assert wrong == ["audio_encoder.audio_encode: unknown key; did you mean audio_encoder?"]
    assert [line.partition(":")[0] for line in refused(place, data=preprocess)] == ["dataset_param.attr.audios"]

    def without_audios(data: dict[str, Any]) -> None:
        preprocess(data)
        data["dataset_param"]["attr"]["audios"] = None

    recipe, report = translated(place, data=without_audios)
    assert (report.refused, recipe["data"]["processor"]["use_audio_in_video"]) == ([], True)
    with raises("job.audio-encoder", "qwen_omni"):
        translated(place, model=audio(model_id="qwen_omn"))
    with raises("job.audio-encoder", "qwen2_5_vit"):
        translated(place, model=lambda data: data["image_encoder"]["vision_encoder"].update(model_id="InternViT"))
    with raises("job.section-type", "audio_encoder"):
        translated(place, model=lambda data: data.update(audio_encoder=[1]))
    with raises("job.unified-model"):
        translated(place, model=lambda data: data.update(mllm={}, ae={}))


def test_sizes_stages_and_frozen_parts_of_the_audio_encoder_are_in_the_recipe(place: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["audio_encoder"]["audio_encoder"] |= {"freeze": False, "recompute_granularity": "full"}
        data["audio_encoder"]["audio_encoder"]["recompute_method"] = "uniform"

    stages = ["--pipeline-model-parallel-size", "2"]
    recipe = translated(place, *stages, world=2, model=change)[0]
    assert recipe["parallel"]["layers"] == {"vision": [32, 0], "audio": [32, 0], "text": [11, 17]}
    assert recipe["parallel"]["recompute"] == ["audio.blocks.{*}"]
    assert recipe["model"]["freeze"] == ["vision", "projector"]
    assert recipe["model"]["family"] == "qwen2_5_omni"
    assert recipe["model"]["config"]["audio"] == {
        **{"encoder_layers": 32, "d_model": 1280, "encoder_ffn_dim": 5120, "encoder_attention_heads": 20},
        **{"activation_function": "gelu", "num_mel_bins": 128, "n_window": 100},
    }
    assert translated(place)[0]["model"]["freeze"] == ["vision", "projector", "audio", "audio_projector"]
    with raises("job.layer-counts", "audio"):
        translated(
            place,
            *stages,
            world=2,
            model=lambda data: data["audio_encoder"]["audio_encoder"].update(pipeline_num_layers=[30, 0]),
        )


def test_encoders_and_decoder_are_split_as_hetero_parallel_says(place: Path) -> None:
    def split(data: dict[str, Any]) -> None:
        data["text_decoder"].update(tp=4, pp=2, cp=1)
        for name, inner in (("image_encoder", "vision_encoder"), ("audio_encoder", "audio_encoder")):
            data[name][inner]["pipeline_num_layers"] = [32]
        data["audio_encoder"]["tp"] = 2

    recipe, report = translated(place, "--hetero-parallel", world=8, model=split)
    assert report.refused == []
    sizes = {key: recipe["parallel"][key] for key in ("tp", "pp", "encoders", "layers")}
    assert sizes == {
        "tp": 4,
        "pp": 2,
        "encoders": {"vision": {"tp": 1, "cp": 1}, "audio": {"tp": 2, "cp": 1}},
        "layers": {"vision": [32, 0], "audio": [32, 0], "text": [11, 17]},
    }
    assert tessera.plan(recipe, world=8).describe()
    notes = {entry.key: entry.note for entry in report.entries}
    assert notes["audio_encoder.tp"] == "parallel.encoders.audio.tp"
    with raises("job.parallel-size-differs", "text_decoder.tp"):
        translated(place, "--hetero-parallel", "--tensor-model-parallel-size", "2", world=8, model=split)
    with raises("job.parallel-size", "audio_encoder.tp"):
        translated(place, "--hetero-parallel", world=8, model=lambda data: data["audio_encoder"].update(tp="two"))
    # Without the flag the sizes in the file have no effect, as there.
    recipe = translated(place, world=8, model=lambda data: data["audio_encoder"].update(tp=2))[0]
    assert "encoders" not in recipe["parallel"]


def test_adapters_are_in_the_parts_that_a_job_names(place: Path) -> None:
    lora = ["--lora-target-modules", "linear_qkv", "linear_fc1", "--lora-apply-modules", "audio_encoder"]
    targets = translated(place, *lora)[0]["model"]["lora"]["targets"]
    assert targets == ["audio.blocks.{*}.attn.{q,k,v}", "audio.blocks.{*}.mlp.up"]
    assert translated(place, *lora[:3])[0]["model"]["lora"]["targets"] == [
        "text.layers.{*}.attn.{q,k,v}",
        "text.layers.{*}.mlp.{gate,up}",
    ]
    with raises("job.adapter-part", "audio_encoder"):
        translated(place, *lora[:4], "audio_encode")
    job = yaml.safe_load((OMNI3 / "qwen3omni_v1.yaml").read_text())
    job["training"]["lora"] = {"enable": True, "rank": 8, "alpha": 16, "target_modules": ["q_proj", "out_proj"]}
    recipe, report = recipe_of_yaml(job, "job.yaml", 8)
    assert report.refused == []
    assert recipe["model"]["lora"]["targets"] == [
        "text.layers.{*}.attn.q",
        "audio.blocks.{*}.attn.q",
        "audio.blocks.{*}.attn.proj",
    ]
