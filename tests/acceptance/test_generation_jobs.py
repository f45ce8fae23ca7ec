"""Generation jobs of MindSpeed-MM: translated, refused where they must be, and run at tiny sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import (
    COG,
    WAN,
    example,
    put,
    tiny_parts,
    tiny_predictor,
    tiny_videos,
    write_cogvideox,
    write_hunyuan,
    write_videos,
    write_wan,
)
from safetensors.torch import load_file

import tessera
from tessera.diffusion.noise_levels import NoiseLevels, TimeOptions
from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.convert import run as mm_convert
from tessera_compat.mindspeed_mm.entry_points import evaluate_gen, extract_features, inference_sora, pretrain
from tessera_compat.mindspeed_mm.evaluation_gen_json import read_benchmark
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.migrate import lay_out, migrate
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.state import destroy
from tests.errors import raises

MODEL_22 = "wan2.2/A14B/t2v/pretrain_model_high.json"
DATA_22 = "wan2.2/A14B/t2v/data.json"
FLAGS = "--lr 1e-3 --train-iters 2 --micro-batch-size 1 --global-batch-size 2 --num-workers 0 --log-interval 1"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generation")
    lay_out(root)
    write_videos(root)
    write_wan(root / "ckpt/wan")
    return root


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(workspace)
    return workspace


def job_of(
    change_model: Callable[[dict[str, Any]], object] = lambda model: None,
    change_data: Callable[[dict[str, Any]], object] = lambda data: None,
    *more: str,
    world: int = 8,
) -> tuple[dict[str, Any], JobReport]:
    model, data = example(MODEL_22), example(DATA_22)
    change_model(model)
    change_data(data)
    files = ["--mm-model", put(Path("m.json"), model), "--mm-data", put(Path("d.json"), data)]
    words = ["--lr", "1e-5", "--train-iters", "9", *files, *more]
    return recipe_of(parse_args(words, world_size=world, allow_refused=True))


# ---------------------------------------------------------------------------------------------- translation


def test_the_recipe_says_what_the_files_say(here: Path) -> None:
    recipe, report = job_of()
    assert report.refused == []
    assert recipe["model"]["family"] == "wan"
    assert recipe["model"]["config"]["attention_head_dim"] == 128
    assert recipe["model"]["tokenizer"] == "ckpt/hf_path/Wan2.2-T2V-A14B-Diffusers"
    section = recipe["data"]
    assert section["length"] == 32760, "21 latent frames of 30 x 52 tokens"
    assert section["train"] == [{"path": "./data/videos/data.json", "root": "./data/videos"}]
    assert section["processor"] == {"num_frames": 81, "min_frames": 1, "height": 480, "width": 832}
    options = recipe["train"]["task_options"]
    assert options["encoders"]["folder"] == "ckpt/hf_path/Wan2.2-T2V-A14B-Diffusers"
    assert options["encoders"]["vae"] == {"dtype": "bfloat16", "tiling": False, "residence": "offloaded"}
    low, high = options["boundaries"]
    assert (round(low, 3), high) == (0.875, 1.0)
    assert (options["shift"], options["weighting"], options["steps"]) == (5.0, "gaussian", 1000)
    assert [entry.note for entry in report.entries if entry.key == "predictor.pipeline_num_layers"] == [
        "this job needs no parallel.layers.latents"
    ]
    assert {entry.outcome for entry in report.entries if entry.source == "behaviour"} == {"differs"}


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.417), (0.417, 1.0), (0.358, 1.0), (0.25, 0.75)])
def test_boundaries_of_experts_are_the_steps_that_the_job_draws(here: Path, first: float, last: float) -> None:
    """There, a step is drawn from int(1000 min) to int(1000 max), and its noise is that of the shifted schedule."""
    boundaries = {"min_timestep_boundary": first, "max_timestep_boundary": last}
    options = job_of(lambda model: model["diffusion"].update(boundaries))[0]["train"]["task_options"]
    levels = NoiseLevels(TimeOptions(**{key: options[key] for key in ("shift", "steps", "boundaries")}), "flow")
    steps = range(round(1000 * first), round(1000 * last))
    wanted = [5 * (1 - n / 1000) / (1 + 4 * (1 - n / 1000)) for n in steps]
    shares = [levels.at((n + 0.5) / len(steps), 1).noise_share for n in range(len(steps))]
    assert len(shares) == len(wanted)
    assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(shares, wanted, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["predictor"].update(model_id="wandi"), "job.unknown-predictor"),
        (lambda m: m["predictor"].update(model_id="vace"), "job.unknown-predictor"),
        (lambda m: m["predictor"].update(num_heads=7), "job.width-not-multiple num_heads"),
        (lambda m: m["diffusion"].update(model_id="OpenSoraPlan"), "job.diffusion-class"),
        (lambda m: m["diffusion"].update(min_timestep_boundary=0.5), "job.timestep-boundary <="),
        (lambda m: m.update(load_text_features=True), "job.features-differ"),
        (lambda m: m.update(load_text_features=True, load_video_features=True), "job.features-differ"),
        (lambda m: m["ae"].update(from_pretrained="3d-vae.pt"), "job.encoder-folder"),
        (lambda m: m["text_encoder"].update(from_pretrained="other/text_encoder"), "job.encoder-folder"),
        (lambda m: m.update(task="v2v"), "job.generation-task v2v"),
        (lambda m: m.update(ae=5), "job.section-type"),
        (lambda m: m.update(text_encoder=["x"]), "job.section-type text_encoder.0"),
        (lambda m: m["text_encoder"].update(ucg_rate=0.1), None),
    ],
)
def test_wrong_values_of_model_json_are_named(
    here: Path, change: Callable[[dict[str, Any]], object], said: str | None
) -> None:
    if said is None:
        recipe, report = job_of(change)
        assert recipe["train"]["task_options"]["caption_dropout"] == 0.1
        assert report.refused == []
    else:
        with raises(said):
            job_of(change)


def test_keys_that_cannot_be_honoured_are_refused_by_name(here: Path) -> None:
    def refused(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> list[str]:
        def change(part: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
            def put_in(tree: dict[str, Any]) -> None:
                for dotted, value in part.items():
                    *path, last = dotted.split(".")
                    at = tree
                    for name in path:
                        at = at[name]
                    at[last] = value

            return put_in

        return [entry.key for entry in job_of(change(model or {}), change(data or {}))[1].refused]

    assert refused({"predictor.FPDT": True, "predictor.num_layer": 3}) == ["predictor.FPDT", "predictor.num_layer"]
    assert refused({"predictor.FPDT": False, "predictor.FPDT_chunk_number": 4}) == []
    assert refused({"diffusion.sigma_min": 0.003}) == ["diffusion.sigma_min"]
    assert refused({"patch.muon_optimizer": True, "use_dynamic_dpcp": True}) == [
        "use_dynamic_dpcp",
        "patch.muon_optimizer",
    ]
    assert refused({"ae.do_sample": True, "ae.dtype": "int8"}) == ["ae.dtype", "ae.do_sample"]
    at = "dataset_param.preprocess_parameters."
    assert refused(data={f"{at}frame_interval": 2, f"{at}truncate_t_by_sp": True}) == [
        f"{at}truncate_t_by_sp",
        f"{at}frame_interval",
    ]
    assert refused(data={f"{at}numframes": 3, f"{at}drop_short_ratio": 0.5}) == [
        f"{at}numframes",
        f"{at}drop_short_ratio",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["dataset_param"].update(dataset_type="t2vv"), "did you mean: t2v"),
        (lambda d: d["dataset_param"]["basic_parameters"].update(data_path=""), "job.data-file-missing"),
        (lambda d: d["dataset_param"]["basic_parameters"].update(data_path="none.txt"), "none.txt"),
        (lambda d: d["dataset_param"]["basic_parameters"].update(data_path="wrong.txt"), "wrong.txt:1"),
        (lambda d: d["dataset_param"]["basic_parameters"].update(data_storage_mode="standart"), "standard"),
        (lambda d: d["dataset_param"]["preprocess_parameters"].pop("num_frames"), "job.video-size"),
        (lambda d: d["dataset_param"]["preprocess_parameters"].update(max_height="tall"), "job.video-size"),
        (lambda d: d.pop("dataset_param"), "job.data-section-missing"),
    ],
)
def test_wrong_values_of_data_json_are_named(here: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    Path("wrong.txt").write_text("a,b,c\n")
    with pytest.raises(TesseraError) as caught:
        job_of(lambda model: None, change)
    assert said in str(caught.value)


def test_flags_make_layouts_adapters_and_recomputation(here: Path) -> None:
    words = "--pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method block"
    recipe, _ = job_of(lambda m: None, lambda d: None, *f"{words} --recompute-num-layers 2".split())
    assert recipe["parallel"]["layers"] == {"latents": [10, 10, 10, 10]}
    assert recipe["parallel"]["recompute"] == [f"blocks.{{{n}-{n + 1}}}" for n in (0, 10, 20, 30)]
    skip = "--recompute-num-layers 0 --recompute-skip-core-attention --recompute-num-layers-skip-core-attention 40"
    alone = f"--recompute-granularity full --recompute-method block {skip}".split()
    assert job_of(lambda m: None, lambda d: None, *alone)[0]["parallel"]["recompute"] == [
        {"modules": "blocks.{0-39}", "keep": "attention"}
    ]
    lora = ["--lora-target-modules", "ffn.2", "ffn.0", "self_attn.proj_q", "--lora-r", "4"]
    targets = job_of(lambda m: None, lambda d: None, *lora)[0]["model"]["lora"]["targets"]
    assert targets == ["blocks.{*}.mlp.down", "blocks.{*}.mlp.up", "blocks.{*}.attn.qkv.q", "blocks.{*}.cross.q"]
    for more, said in (
        (["--lora-target-modules", "proj_z"], "job.adapter-layer proj_z"),
        (["--lora-r", "4"], "job.adapter-flags --lora-target-modules"),
        (["--dpo-beta", "1"], "job.no-meaning-for-video"),
        (["--pipeline-model-parallel-size", "2"], "job.layer-counts"),
        (["--load", "ckpt/wan/transformer"], "job.model-size-differs ckpt/wan/transformer/config.json"),
    ):
        with raises(said):
            job_of(lambda m: None, lambda d: None, *more)


# ---------------------------------------------------------------------------------------------- jobs that run


def tiny_wan(root: Path, model: str, *, channels: int = 4, folder: str = "ckpt/wan") -> dict[str, Any]:
    return tiny_parts(tiny_predictor(example(model), **WAN, in_dim=channels, out_dim=4), root / folder)


def train(root: Path, name: str, model: dict[str, Any], data: dict[str, Any], load: str, *more: str) -> Path:
    """Train two steps in this process and return the folder of the run."""
    files = [put(root / f"{name}-{kind}.json", content) for kind, content in (("model", model), ("data", data))]
    words = ["--mm-model", files[0], "--mm-data", files[1], "--load", load, "--save", str(root / name)]
    try:
        pretrain([*FLAGS.split(), *words, "--save-interval", "2", *more])
    finally:
        destroy()
    assert (root / name / "latest_checkpointed_iteration.txt").read_text() == "2"
    return root / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint of a run."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((run / "checkpoints").glob("step-*2*/**/*.safetensors")):
        tensors |= load_file(path)
    assert tensors
    return tensors


def test_a_job_trains_and_samples(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As pretrain_sora.py and inference_sora.py do, with an expert's part of the noise levels."""
    data = tiny_videos(example(DATA_22), here / "ckpt/wan")
    model = tiny_wan(here, MODEL_22)
    train(here, "online", model, data, "ckpt/wan/transformer")
    printed = capsys.readouterr().out
    assert printed.count("elapsed time per iteration (ms): ") == 2
    assert "frames of a long video: from the first frame on" in printed
    job = tiny_parts(tiny_predictor(example("wan2.1/1.3b/t2v/inference_model.json"), **WAN), here / "ckpt/wan")
    job["pipeline_config"]["input_size"] = [5, 32, 48]
    job["diffusion"]["num_inference_steps"] = 1
    job |= {"prompt": ["a red kite", "the dog"], "dtype": "fp32"}
    inference_sora(["--mm-model", put(here / "asked.json", job), "--load", "online", "--seed", "3"])
    told = capsys.readouterr().out
    assert "wrote samples/wan2.1/video_1.mp4" in told
    described = json.loads(Path("samples/wan2.1/video_1.json").read_text())
    # Converted weights: the JSON names the diffusers folder that they are of.
    back = ["--cfg.source_path", "ckpt/wan/transformer", "--cfg.target_path", "ckpt/asked"]
    mm_convert(["WanConverter", "hf_to_mm", *back])
    digests = []
    for load in ("ckpt/wan/transformer", "ckpt/asked"):
        job |= {"prompt": ["the dog"], "save_path": f"samples/{Path(load).name}"}
        inference_sora(["--mm-model", put(here / "asked.json", job), "--load", load])
        digests.append(json.loads(Path(job["save_path"], "video_0.json").read_text())["samples"])
    assert digests[0] == digests[1]
    assert described["request"]["seed"] == 4
    assert (described["request"]["shift"], described["request"]["guidance"]) == (3.0, 5.0)


@pytest.mark.slow
def test_the_recipe_of_a_job_is_its_run(here: Path) -> None:
    data = tiny_videos(example(DATA_22), here / "ckpt/wan")
    run = train(here, "job", tiny_wan(here, MODEL_22), data, "ckpt/wan/transformer")
    words = ["--mm-model", "job-model.json", "--mm-data", "job-data.json", "--load", "ckpt/wan/transformer"]
    recipe, _ = recipe_of(parse_args([*FLAGS.split(), *words, "--save", "again", "--save-interval", "2"]))
    again = tessera.train(recipe)
    first, second = (weights(one) for one in (run, again.folder))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.slow
def test_shards_of_mm_convert_are_loaded(here: Path) -> None:
    """They say neither model nor sizes: the diffusers folder of the encoders does."""
    words = ["--cfg.source_path", "ckpt/wan/transformer", "--cfg.target_path", "ckpt/mm"]
    mm_convert(["WanConverter", "hf_to_mm", *words, "--cfg.target_parallel_config.pp_layers", "[1,1]"])
    data = tiny_videos(example(DATA_22), here / "ckpt/wan")
    both = [
        weights(train(here, f"from-{name}", tiny_wan(here, MODEL_22), data, load))
        for name, load in (("folder", "ckpt/wan/transformer"), ("shards", "ckpt/mm"))
    ]
    assert all(both[0][name].equal(both[1][name]) for name in both[0])


@pytest.mark.slow
def test_features_of_the_entry_point_train(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_parts(example("wan2.1/feature_extract/model_t2v.json"), here / "ckpt/wan")
    data = tiny_videos(example("wan2.1/feature_extract/data.json"), here / "ckpt/wan")
    files = ["--mm-model", put(here / "f-m.json", model), "--mm-data", put(here / "f-d.json", data)]
    extract_features([*files, "--mm-tool", "mindspeed_mm/tools/tools.json", "--num-workers", "0"])
    assert "3 samples written" in capsys.readouterr().out
    extract_features([*files, "--num-workers", "0"])
    assert "0 samples written; 3 were there before" in capsys.readouterr().out
    trained = tiny_videos(example("wan2.1/1.3b/t2v/feature_data.json"), here / "ckpt/wan")
    job = tiny_predictor(example("wan2.1/1.3b/t2v/pretrain_model.json"), **WAN, in_dim=4, out_dim=4)
    train(here, "features", job, trained, "ckpt/wan/transformer", "--recompute-granularity", "full")
    lora = ["--lora-target-modules", "proj_q,ffn.0", "--lora-r", "2", "--lora-alpha", "2"]
    train(here, "adapters", job, trained, "ckpt/wan/transformer", *lora)
    other = tiny_videos(example("wan2.1/1.3b/t2v/feature_data.json"), here / "ckpt/wan")
    other["dataset_param"]["basic_parameters"] = {"data_path": "./data/videos/data.jsonl", "data_folder": "data/videos"}
    with raises("job.feature-manifest", "features.json"):
        train(here, "none", job, other, "ckpt/wan/transformer")


@pytest.mark.slow
def test_hunyuanvideo_and_cogvideox_train_and_sample(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hunyuan(here / "ckpt/hunyuan")
    write_cogvideox(here / "ckpt/cog")
    sizes = {"in_channels": 4, "out_channels": 4, "num_heads": 2, "head_dim": 16, "text_states_dim": [16, 16]}
    sizes |= {"mm_double_blocks_depth": 1, "mm_single_blocks_depth": 1, "rope_dim_list": [4, 6, 6]}
    sizes |= {"double_stream_full_recompute_layers": 1, "single_stream_full_recompute_layers": 1}
    hunyuan = tiny_predictor(example("hunyuanvideo/t2v/model_hunyuanvideo.json"), **sizes)
    hunyuan |= {"load_video_features": False, "load_text_features": False}
    data = tiny_videos(example("hunyuanvideo/t2v/feature_data.json"), here / "ckpt/hunyuan")
    data["dataset_param"] |= {"dataset_type": "t2v", "basic_parameters": {"data_path": "examples/wan2.2/data.txt"}}
    train(here, "hunyuan", tiny_parts(hunyuan, here / "ckpt/hunyuan"), data, "ckpt/hunyuan/transformer")
    sizes = {**COG, "in_channels": 4, "out_channels": 4, "input_size": [2, 4, 6], "use_rope": False}
    cog = tiny_predictor(example("cogvideox/t2v_1.0/model_cogvideox_t2v.json"), **sizes)
    videos = tiny_videos(example("cogvideox/data.json"), here / "ckpt/cog")
    train(here, "cog", tiny_parts(cog, here / "ckpt/cog"), videos, "ckpt/cog/transformer")
    job = tiny_parts(tiny_predictor(example("hunyuanvideo/t2v/inference_model.json")), here / "ckpt/hunyuan")
    job["pipeline_config"]["input_size"] = [5, 32, 48]
    job["diffusion"]["num_inference_timesteps"] = 1
    job |= {"prompt": ["a red kite"], "dtype": "fp32", "save_path": "samples/hunyuan"}
    inference_sora(["--mm-model", put(here / "h.json", job), "--load", "ckpt/hunyuan/transformer"])
    request = json.loads(Path("samples/hunyuan/video_0.json").read_text())["request"]
    assert (request["guidance"], request["true_guidance"], request["solver"]) == (6.0, None, "euler")


def test_migrate_writes_the_recipes_of_both_experts(here: Path) -> None:
    for name, low, high in (("high", 0.875, 1.0), ("low", 0.0, 0.875)):
        job = migrate(Path(f"examples/wan2.2/A14B/t2v/pretrain_{name}.sh"))
        assert job.report.refused == []
        boundaries = job.recipe["train"]["task_options"]["boundaries"]
        assert [round(end, 3) for end in boundaries] == [low, high]
        part = "transformer" if name == "high" else "transformer_2"
        assert job.recipe["model"]["path"] == f"ckpt/hf_path/Wan2.2-T2V-A14B-Diffusers/{part}"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"pipeline_class": "WanPipelin"}, "job.pipeline-class WanPipeline"),
        ({"prompt": ""}, "job.prompts-missing"),
        ({"prompt": "nowhere.txt"}, "environment.cannot-open nowhere.txt"),
        ({"save_path": None}, "job.save-path-missing save_path"),
        ({"pipeline_config": {"input_size": [5, 32]}}, "job.video-size"),
        ({"pipeline_config": {"strength": 0.5}}, "job.refused-settings"),
        ({"video": "v.txt"}, "job.refused-settings"),
        ({"image": ["a.png", "b.png"]}, "job.image-lines"),
        ({"image": ["a.png"]}, "job.image-missing"),
        ({"low_noise_predictor": "elsewhere/transformer_2"}, "job.second-expert transformer_2"),
    ],
)
def test_wrong_values_of_an_inference_json_are_named(here: Path, change: dict[str, Any], error: str) -> None:
    job = tiny_parts(example("wan2.1/1.3b/t2v/inference_model.json"), here / "ckpt/wan")
    job |= {"prompt": ["a red kite"], **change}
    with raises(error):
        inference_sora(["--mm-model", put(here / "wrong.json", job), "--load", "ckpt/wan/transformer"])


# ---------------------------------------------------------------------------------------------- benchmarks


def evaluation_job(here: Path, **evaluation: Any) -> dict[str, Any]:
    """Return an evaluation JSON with the keys of the published ones, for a tiny Wan and two prompts."""
    job = tiny_parts(tiny_predictor(example("wan2.1/1.3b/t2v/inference_model.json"), **WAN), here / "ckpt/wan")
    job["pipeline_config"]["input_size"] = [5, 32, 48]
    job["diffusion"]["num_inference_steps"] = 1
    entries = [
        {"prompt_en": "a red kite", "dimension": ["scene", "color"], "auxiliary_info": {"scene": {"scene": "beach"}}},
        {"prompt_en": "the dog", "dimension": ["human_action"]},
    ]
    (here / "VBench_full_info.json").write_text(json.dumps(entries))
    dataset = {
        "type": "vbench_eval",
        "basic_param": {
            "data_path": "VBench_full_info.json",
            "data_folder": "vbench/prompts",
            "return_type": "list",
            "data_storage_mode": "standard",
        },
        "extra_param": {
            "augment": False,
            "prompt_file": "all_dimension.txt",
            "augmented_prompt_file": "augmented_prompts/gpt_enhanced_prompts/all_dimension_longer.txt",
            "ratio": "16-9",
        },
    }
    loader = {"dataloader_mode": "sampler", "sampler_type": "SequentialSampler", "shuffle": True, "drop_last": False}
    loader |= {"pin_memory": True, "group_frame": False, "group_resolution": False, "prefetch_factor": 4}
    job["eval_config"] = {
        "dataset": dataset,
        "dataloader_param": {**loader, "collate_param": {}},
        "evaluation_model": "cogvideox-1.5",
        "evaluation_impl": "vbench_eval",
        "eval_type": "t2v",
        "long_eval_config": "path_to_long_eval_configs",
        "load_ckpt_from_local": True,
        "need_inference": True,
        "dimensions": ["scene"],
        "eval_result_path": "./eval_result",
        **evaluation,
    }
    return {**job, "dtype": "fp32", "save_path": "samples/vbench"}


def test_evaluate_gen_writes_the_videos_of_vbench(here: Path, capsys: Any) -> None:
    words = ["--mm-model", put(here / "eval.json", evaluation_job(here)), "--load", "ckpt/wan/transformer"]
    evaluate_gen([*words, "--seed", "3"])
    said = capsys.readouterr().out
    names = sorted(path.name for path in Path("samples/vbench/samples").iterdir())
    assert names == [f"a red kite-{index}.mp4" for index in range(5)], "the prompts of its dimensions"
    command = "vbench evaluate --videos_path samples/vbench/samples --dimension scene "
    assert f"{command}--full_json_dir VBench_full_info.json --output_path ./eval_result" in said
    info = json.loads(Path("samples/vbench/full_info.json").read_text())
    assert info[0]["auxiliary_info"] == {"scene": {"scene": "beach"}}
    protocol = json.loads(Path("samples/vbench/protocol.json").read_text())
    assert (protocol["sampling"]["seed"], protocol["sampling"]["frames"]) == (3, 5)
    evaluate_gen([*words, "--seed", "3"])
    assert "5 of them earlier" in capsys.readouterr().out
    evaluate_gen(["--mm-model", put(here / "eval.json", evaluation_job(here, need_inference=False))])
    assert "5 samples are in samples/vbench/samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"eval_type": "i2v"}, "job.refused-settings eval_config.eval_type"),
        ({"evaluation_impl": "other"}, "job.refused-settings eval_config.evaluation_impl"),
        ({"image_path": "crop"}, "job.refused-settings eval_config.image_path"),
        ({"dataset": {"type": "vbench_i2v", "basic_param": {"data_path": "x"}}}, "job.refused-settings dataset.type"),
        ({"dataset": {"type": "vbench_eval"}}, "job.prompts-missing data_path"),
        ({"dimensions": ["scen"]}, "job.vbench-dimension scene"),
        ({"dimensions": "scene"}, "job.vbench-dimension"),
        ({"dimensions": ["object_class"]}, "job.prompts-missing object_class"),
        ({"dataloader_param": {"drop_last": True}}, "job.refused-settings drop_last"),
        ({"eval_typ": "t2v"}, "job.refused-settings eval_type"),
    ],
)
def test_keys_of_an_evaluation_that_cannot_be_honoured_are_named(
    here: Path, change: dict[str, Any], error: str
) -> None:
    with raises(error):
        evaluate_gen(["--mm-model", put(here / "wrong.json", evaluation_job(here, **change))])


def test_every_key_of_an_evaluation_is_reported(here: Path) -> None:
    job, report = evaluation_job(here), JobReport()
    read_benchmark(job, "eval.json", report)
    keys = {entry.key for entry in report.entries}
    section = job["eval_config"]
    expected = {f"eval_config.{key}" for key in section if key not in ("dataset", "dataloader_param")}
    expected |= {f"eval_config.dataloader_param.{key}" for key in section["dataloader_param"]}
    expected |= {
        f"eval_config.dataset.{part}.{key}"
        for part in ("basic_param", "extra_param")
        for key in section["dataset"][part]
    }
    assert expected - keys == set()
    assert report.refused == []


def test_migrate_writes_the_commands_of_an_evaluation(here: Path) -> None:
    put(here / "eval.json", evaluation_job(here))
    script = "torchrun --nproc_per_node 1 evaluate_gen.py --mm-model eval.json --load ckpt/wan/transformer\n"
    (here / "eval.sh").write_text(script)
    job = migrate(Path("eval.sh"))
    first, second = job.commands
    assert first.startswith("tessera generate ")
    assert "--vbench VBench_full_info.json --out samples/vbench" in first
    assert second.startswith("vbench evaluate")
    assert any(entry.key == "eval_config.dimensions" and entry.outcome == "differs" for entry in job.report.entries)
