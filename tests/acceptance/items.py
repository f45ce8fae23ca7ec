"""List what the seed documents tell a user to type or expect, and write the table of what became of each item.

An item is done when a test shows it: a function `test_NN_what` in `test_seed_SSS.py`, or a test elsewhere that
`shown_by` names, and the test does as the document types. `lacks` says what is still missing, `otherwise` what is there
under another name, `refused` why it is not. `python -m tests.acceptance.items` writes docs/reference/acceptance.md; a
test keeps the page in step.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "acceptance.md"
STATES = ("done", "partly", "otherwise", "later", "refused", "open")

SEEDS = {
    "000": "the migration guide of MindSpeed-MM",
    "001": "its guide to migration and tuning",
    "002": "the introduction to its framework",
    "003": "the guide to its MindSpore back end",
    "004": "a first training script on MindSpeed and Megatron",
}

MSRUN_TEST = "acceptance/test_seed_003.py::test_12_to_16_numbers_and_addresses_reach_msrun"
NO_ASCEND = "no Ascend hardware has run it: runs, operators and collectives are tested on a stand-in for torch_npu"


@dataclass(frozen=True)
class Item:
    """One thing that a seed names."""

    seed: str
    number: int
    text: str
    shown_by: tuple[str, ...] = ()  # tests outside of this folder: "unit/test_x.py::test_y"
    lacks: str = ""  # what is missing, and where it will come
    otherwise: str = ""  # the name that it has here
    refused: str = ""  # why it is not there

    @property
    def tests(self) -> tuple[str, ...]:
        tests = [name for name in acceptance_tests(self.seed) if name.startswith(f"test_{self.number:02d}_")]
        return (*(f"acceptance/test_seed_{self.seed}.py::{name}" for name in tests), *self.shown_by)

    @property
    def state(self) -> str:
        if self.refused:
            return "refused"
        if self.otherwise:
            return "otherwise"
        if self.tests:
            return "partly" if self.lacks else "done"
        return "later" if self.lacks else "open"


@functools.cache
def acceptance_tests(seed: str) -> tuple[str, ...]:
    """Return the names of the tests of a seed's file."""
    path = Path(__file__).parent / f"test_seed_{seed}.py"
    if not path.exists():
        return ()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return tuple(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def _seed(seed: str, rows: Sequence[tuple[str, dict[str, str | tuple[str, ...]]]]) -> list[Item]:
    return [Item(seed, number, text, **known) for number, (text, known) in enumerate(rows, 1)]  # type: ignore[arg-type]


def _by(*tests: str) -> dict[str, str | tuple[str, ...]]:
    return {"shown_by": tests}


def _lacks(what: str, *tests: str) -> dict[str, str | tuple[str, ...]]:
    return {"lacks": what, "shown_by": tests}


def _otherwise(name: str, *tests: str) -> dict[str, str | tuple[str, ...]]:
    return {"otherwise": name, "shown_by": tests}


# Items of the guide to MindSpore that `framework: mindspore` of a recipe does.
ON_MINDSPORE = {
    1: _by("mindspore/test_mindspore_runs.py::test_each_resumes_the_checkpoint_of_the_other"),
    2: {"refused": "it puts a package named torch before torch; models are written on plain operators of MindSpore"},
    3: _by("mindspore/test_mindspore_numerics.py::test_loss_and_gradients"),
    4: {"refused": "custom operators need an Ascend compiler and hardware; plain operators of MindSpore suffice here"},
    5: _by("unit/test_docs_languages.py::"),
    6: {"refused": "MindSpore 2.10 and Python 3.11 or 3.12 are needed; `framework: mindspore` names them otherwise"},
    7: _by("unit/test_framework.py::test_a_missing_or_untested_mindspore_is_refused"),
    11: _by(
        "acceptance/test_seed_003.py::test_11_ai_framework_is_added_once",
        "compat/test_mindspore_launch.py::test_an_msrun_job_becomes_a_recipe_for_the_framework_that_it_names",
    ),
    23: _by("unit/test_framework.py::test_several_features_are_named_together_and_switched_off_with_a_report"),
    25: _by("mindspore/test_mindspore_jobs.py::test_a_job_that_names_mindspore_trains_on_it"),
}
OPEN: dict[str, str | tuple[str, ...]] = {}


def _launched(number: int) -> dict[str, str | tuple[str, ...]]:
    """Return the state of an item of seed 003 that the launch side does."""
    return _by(MSRUN_TEST) if 13 <= number <= 16 else OPEN


ITEMS: list[Item] = [
    *_seed(
        "000",
        [
            (
                "`pretrain_xxx.py` entries started by scripts under `examples/`",
                _by(
                    "acceptance/test_jobs.py::test_the_seeds_script_runs",
                    "acceptance/test_jobs.py::test_a_workspace_has_the_names_that_users_type",
                ),
            ),
            ("`model_provider`", OPEN),
            ("`get_batch(data_iterator[, args])`", OPEN),
            ("`loss_func(output)`", OPEN),
            ("`forward_step` that returns output and loss function", OPEN),
            ("`train_valid_test_datasets_provider`: three data sets", OPEN),
            ("the call sequence: model, data, loop, backward, update, learning rate", OPEN),
            ("`get_args()`, `args.mm.model`, `params_dtype`", OPEN),
            ("`move_to_device(batch, dtype)`", OPEN),
            (
                "the software stack of the guide: Python 3.10, torch 2.7.1",
                {"refused": "Python 3.11-3.14 and torch 2.11-2.15 are needed; a page says so to people who come"},
            ),
            (
                "the user's own `Dataset` unchanged",
                _by("compat/test_compat_pretrain.py::test_loaders_iterators_and_data_sets_give_the_same_batches"),
            ),
            (
                "the user's own `DataLoader` unchanged",
                _by("compat/test_compat_pretrain.py::test_loaders_iterators_and_data_sets_give_the_same_batches"),
            ),
            (
                "a provider that returns three DataLoaders",
                _by("compat/test_compat_ranks.py::test_the_job_of_the_migration_guide_trains_as_a_recipe_does"),
            ),
            (
                "`build_mm_dataset`, `build_mm_dataloader`",
                _by(
                    "compat/test_compat_data.py::test_samples_are_what_the_reference_processor_makes",
                    "compat/test_compat_data.py::test_loader_pads_and_begins_again",
                ),
            ),
            ("`data.json`", _by("acceptance/test_jobs.py::test_keys_of_json_files_are_checked")),
            (
                "any user model under FSDP2 without a change",
                _by("dist/test_user_models.py::test_two_ranks_train_as_one_and_resume"),
            ),
            ("`MultiModalModule`", OPEN),
            ("`FSDP2Mixin`", OPEN),
            ("`WeightInitMixin`", OPEN),
            (
                "a third-party class adapted by subclassing (InternVL-3.5)",
                _by(
                    "compat/test_compat_classes.py::test_paths_of_the_file_are_those_of_the_class",
                    "compat/test_megatron_surface.py::test_files_of_the_user_below_mindspeed_mm_are_found",
                ),
            ),
            (
                "`ModelHub.MODEL_MAPPINGS = {'internvl': Class}`",
                _by(
                    "compat/test_megatron_surface.py::test_files_of_the_user_below_mindspeed_mm_are_found",
                    "compat/test_compat_classes.py::test_the_hub_chooses_by_id_then_architecture_then_type",
                ),
            ),
            (
                "`TransformersModel(vlm_config)` as the model",
                _by(
                    "compat/test_compat_classes.py::test_the_loss_is_that_of_the_class_and_has_the_other_forms",
                ),
            ),
            ("`pretrain_transformers.py` with `deepcopy(args.mm.model)`", OPEN),
            ("`sharding_size` (`auto`, a number, default 1)", OPEN),
            ("`param_dtype` bf16, fp16, fp32", OPEN),
            ("`reduce_dtype`", OPEN),
            ("`output_dtype`", OPEN),
            ("`cast_forward_inputs`", OPEN),
            (
                "`sub_modules_to_wrap`",
                _by("compat/test_parallel_fsdp2_file.py", "dist/test_layouts.py"),
            ),
            ("`ignored_modules`", OPEN),
            ("`recompute_modules`", OPEN),
            ("`use_reentrant`", OPEN),
            ("`reshard_after_forward`", OPEN),
            ("`offload_to_cpu`", OPEN),
            ("`pin_memory`", OPEN),
            ("`num_to_forward_prefetch`", OPEN),
            ("`num_to_backward_prefetch`", OPEN),
            ("patterns `{*}`, `{0-23}`, `{1,3,5}`", OPEN),
            (
                "the example `fsdp2_config.yaml` as printed",
                _by(
                    "compat/test_compat_fsdp2.py::test_the_printed_file_is_the_native_recipe_on_qwen2_vl",
                    "compat/test_compat_fsdp2.py::test_the_printed_file_trains_qwen2_vl_like_the_native_recipe",
                ),
            ),
            (
                "own `_fully_shard(fsdp2_kwargs, fsdp2_config)`",
                _by(
                    "compat/test_compat_fsdp2.py::test_the_migrated_model_trains_like_the_same_model_without_mixins",
                ),
            ),
            (
                "`set_recompute_modules_to_wrap`, `set_fullyshard_modules_to_wrap`, `set_modules_to_prefetch`",
                _by("compat/test_compat_fsdp2.py::test_the_migrated_model_trains_like_the_same_model_without_mixins"),
            ),
            ('`getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)`', OPEN),
            (
                "`export CUDA_DEVICE_MAX_CONNECTIONS=2`",
                _by("compat/test_foreign_environment.py::test_every_variable_of_a_script_is_explained_in_one_line"),
            ),
            ("`--use-torch-fsdp2`", _by("acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide")),
            ("`--fsdp2-config-path`", _by("acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide")),
            (
                "`--ckpt-format torch_dcp`",
                _otherwise(
                    "accepted; checkpoints are safetensors, which every layout reads, and mm-convert writes DCP",
                    "acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide",
                ),
            ),
            (
                "`--untie-embeddings-and-output-weights`",
                _by("acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide"),
            ),
            (
                "`--distributed-backend npu:hccl,cpu:gloo`",
                _by("acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide"),
            ),
        ],
    ),
    *_seed(
        "001",
        [
            (
                "one suite for understanding and generation",
                _by(
                    "acceptance/test_jobs.py::test_the_seeds_script_runs",
                    "acceptance/test_generation_jobs.py::test_a_job_trains_and_samples",
                ),
            ),
            (
                "preset mainstream models",
                _by("unit/test_presets_published.py::test_parameters_are_as_many_as_published"),
            ),
            ("data engineering", _by("unit/test_data_rows.py::test_a_batch_says_what_it_holds")),
            (
                "distributed training and acceleration",
                _by("dist/test_layouts.py::test_a_layout_trains_like_one_process_and_holds_what_its_plan_says"),
            ),
            (
                "pretraining and fine-tuning",
                _by("unit/test_two_faces.py::test_a_run_starts_from_a_run_and_from_a_folder"),
            ),
            (
                "online inference",
                _by(
                    "unit/test_two_faces.py::test_generate_streams_from_the_shell",
                    "unit/test_batch_inference.py::test_answers_have_the_order_of_the_rows_and_bad_rows_have_their_reason",
                    "unit/test_server_live.py::test_the_official_client_reads_answers_streams_and_errors",
                ),
            ),
            (
                "Ascend NPU",
                _lacks(NO_ASCEND, "dist/test_npu.py::test_a_run_trains_saves_and_resumes_as_on_a_cpu"),
            ),
            ("analysis of `DataParallel`", OPEN),
            ("analysis of Apex `FusedAdam`", OPEN),
            ("analysis of bmtrain", OPEN),
            (
                "NF4 for QLoRA",
                _by("unit/test_lora_nf4.py::test_the_numbers_are_those_of_bitsandbytes"),
            ),
            ("analysis of Colossal-AI `HybridAdam`", OPEN),
            ("analysis of xFormers", OPEN),
            ("analysis of `grouped_gemm`", OPEN),
            ("analysis of composer", OPEN),
            (
                "`transfer_to_npu`: one import migrates a script",
                _by("dist/test_npu.py::test_transfer_sends_a_script_for_cuda_to_the_accelerator"),
            ),
            (
                "migration of DeepSpeed and FSDP scripts",
                _by("compat/test_trainer_files.py::test_deepspeed_json"),
            ),
            ("the step of environment variables and launch scripts", OPEN),
            (
                "debugging from a single module to the whole flow",
                _by(
                    "contract/test_parity_beside.py::test_a_planted_fault_is_named_first",
                    "contract/test_compare.py::test_every_family_is_compared_through_their_own_processor",
                ),
            ),
            (
                "NaN and overflow found",
                _by("unit/test_guard_runs.py::test_a_bad_picture_is_named_and_its_step_skipped"),
            ),
            (
                "a spike of the loss, an anomaly of the gradient norm",
                _by("unit/test_guard_runs.py::test_absurd_labels_are_a_spike_of_the_loss"),
            ),
            (
                "another learning rate or batch size, then go on",
                _by("acceptance/test_jobs.py::test_a_job_goes_on_with_another_rate_and_batch"),
            ),
            (
                "bad training data are skipped",
                _by("unit/test_guard_runs.py::test_after_a_rollback_the_sample_leaves_a_hole"),
            ),
            ("resume from a checkpoint", _by("dist/test_trainer_layouts.py::test_two_ranks_resume_bitwise")),
            (
                "failed hardware: find it, take it out, restart",
                _lacks(
                    "the rank and its machine are named and ranks start again; to take a machine out needs several "
                    "machines, which were not there",
                    "dist/test_launch.py::test_a_killed_rank_is_started_again_and_the_run_goes_on",
                ),
            ),
            (
                "settings of mixed precision",
                _by("unit/test_precision.py::test_modules_of_a_pattern_compute_in_their_own_type"),
            ),
            (
                "monitoring of inner states",
                _by("unit/test_records.py"),
            ),
            (
                "the score of a trained model against community figures",
                _lacks(
                    "prompts, extraction and metrics of the benchmarks are tested; to reach published figures needs a "
                    "GPU or NPU with published weights and data, which was not there",
                    "unit/test_task_files.py::test_published_columns_prompts_and_metrics",
                    "unit/test_two_faces.py::test_evaluate_writes_answers_and_the_report_shows_them",
                ),
            ),
            ("`TASK_QUEUE_ENABLE`", OPEN),
            ("`CPU_AFFINITY_CONF`, modes 0, 1 and 2", OPEN),
            ("`npu0:0-2`: ranges and partial lists", OPEN),
            ("binding to NUMA nodes", OPEN),
            ("fused RMSNorm", _by("unit/test_ops_pointwise.py::test_norms_equal_eager")),
            ("fused SwiGLU", _by("gpu/test_gpu_kernels.py::test_fused_swiglu_is_as_near_to_float64_as_eager")),
            (
                "fused rotary embedding",
                _by("gpu/test_gpu_kernels.py::test_fused_rotation_is_as_near_to_float64_as_eager"),
            ),
            ("flash attention", _by("unit/test_ops_attention.py::test_fused_equals_eager")),
            (
                "recompute of activation functions",
                _by("unit/test_parallel_memory.py::test_recompute_computes_again_what_it_does_not_keep"),
            ),
            (
                "swap-attention",
                _by(
                    "unit/test_parallel_memory.py::test_activation_offload_frees_activations_and_gives_them_back_exactly"
                ),
            ),
            (
                "recompute of norms",
                _by(
                    "unit/test_parallel_memory.py::test_recompute_computes_again_what_it_does_not_keep",
                    "acceptance/test_jobs.py::test_all_flags_that_save_memory_go_together",
                ),
            ),
            (
                "weights gathered while computing (async-ddp-param-gather)",
                _by("unit/test_parallel_memory.py::test_prefetch_reaches_the_engine"),
            ),
            (
                "weights downloaded from the hub",
                _by("unit/test_hub.py::test_a_model_is_downloaded_pinned_and_verified"),
            ),
            (
                "`mm-convert Qwen2VLConverter hf_to_mm`",
                _by("compat/test_mm_convert.py::test_the_lines_of_the_guide_and_back"),
            ),
            (
                "`mm-convert Qwen2VLConverter mm_to_hf`",
                _by("compat/test_mm_convert.py::test_the_lines_of_the_guide_and_back"),
            ),
            (
                "`mm-convert`: pipeline stages split anew",
                _by("compat/test_mm_convert.py::test_the_lines_of_the_guide_and_back"),
            ),
            (
                "`LOAD_PATH` of converted weights",
                _by(
                    "acceptance/test_jobs.py::test_the_seeds_script_runs",
                    "acceptance/test_weights_there_and_back.py",
                    "acceptance/test_jobs.py::test_inference_json_is_answered",
                ),
            ),
            ("layers by tower and pipeline stage", OPEN),
            (
                "`pipeline_num_layers` of `model.json`",
                _by(
                    "acceptance/test_jobs.py::test_the_recipe_says_what_the_script_says",
                    "acceptance/test_jobs.py::test_one_stage_has_all_layers_whatever_the_lists_say",
                ),
            ),
            ("COCO2017 and LLaVA-Instruct-150K converted", OPEN),
            ("several data sets joined by commas", OPEN),
            ("`max_samples`", OPEN),
            (
                "`dataset_param->basic_parameters->...`",
                _by("acceptance/test_jobs.py::test_keys_of_json_files_are_checked"),
            ),
            (
                "`inference_qwen2vl_7b.json` and `.sh`: `from_pretrained`, `image_processer_path`",
                _by(
                    "acceptance/test_jobs.py::test_inference_json_is_answered",
                    "acceptance/test_migrate_scripts.py::test_an_inference_script_becomes_a_command_for_each_question",
                ),
            ),
            ("`finetune_qwen2vl_7b.sh`", _by("acceptance/test_jobs.py::test_the_seeds_script_runs")),
            (
                "`NPUS_PER_NODE MASTER_ADDR MASTER_PORT NNODES NODE_RANK`",
                _by("acceptance/test_jobs.py::test_the_seeds_script_runs"),
            ),
            (
                "one machine with many devices",
                _by("dist/test_trainer_layouts.py::test_any_split_gives_the_same_gradients_and_losses"),
            ),
            ("many machines", _by("dist/test_launch.py::test_two_machines_with_fixed_numbers_train_one_run")),
            ("Qwen2-VL 2B, 7B and 72B", OPEN),
        ],
    ),
    *_seed(
        "002",
        [
            (
                "CANN and HCCL, PyTorch and TorchNPU",
                _lacks(NO_ASCEND, "dist/test_npu.py::test_two_ranks_train_as_one", "unit/test_npu_obstacles.py"),
            ),
            (
                "more than 20 models out of the box",
                _by("unit/test_presets_published.py::test_the_page_lists_every_published_size_and_no_other"),
            ),
            (
                "Wan",
                _by(
                    "contract/test_generation_families.py::test_predictions_loss_and_gradients_are_those_of_diffusers",
                    "contract/test_wan_folders.py",
                    "contract/test_wan_parallel.py",
                ),
            ),
            (
                "HunyuanVideo",
                _by("acceptance/test_generation_jobs.py::test_hunyuanvideo_and_cogvideox_train_and_sample"),
            ),
            ("QwenVL", _by("contract/test_vision_language_folders.py::test_we_read_what_transformers_saves")),
            ("InternVL", _by("contract/test_vision_language_folders.py::test_we_read_what_transformers_saves")),
            (
                "Qwen-Omni",
                _lacks(
                    "the thinkers and the talker of Qwen3-Omni are trained, alone or together; the talker of "
                    "Qwen2.5-Omni is not, because the tokenizer of its speech was not published",
                    "contract/test_vision_language_folders.py::test_transformers_reads_what_we_write",
                    "contract/test_omni_parallel.py::test_layouts_train_like_one_process",
                    "contract/test_omni_parallel.py::test_micro_batches_of_one_kind_train_like_one_process",
                    "compat/test_omni_jobs.py::test_a_job_of_qwen2_5_omni_trains_from_its_shards",
                    "compat/test_omni_jobs.py::test_a_job_of_qwen3_omni_trains_by_flags_and_by_yaml",
                    "contract/test_talker_numerics.py::test_logits_losses_and_gradients_are_those_of_transformers",
                    "contract/test_talker_answers.py::test_answers_to_questions_with_media_are_spoken_as_by_transformers",
                    "contract/test_omni_joint_numerics.py::test_logits_losses_and_gradients_are_those_of_transformers",
                ),
            ),
            (
                "start scripts for pretraining, tuning, evaluation and inference of each model",
                _lacks(
                    "recipes, and no scripts, for Flux, Qwen-Image, SD3, LTX and HunyuanVideo 1.5; three for inference "
                    "and one for evaluation",
                    "acceptance/test_jobs.py::test_every_example_is_planned",
                ),
            ),
            (
                "`SoRAModel`",
                _by("acceptance/test_sora_model.py::test_videos_ids_and_features_have_one_loss"),
            ),
            (
                "`VLModel`",
                _by(
                    "compat/test_compat_vl_model.py::test_the_loss_is_that_of_transformers",
                ),
            ),
            (
                "`TransformersModel`",
                _by(
                    "compat/test_compat_classes.py::test_the_loss_is_that_of_the_class_and_has_the_other_forms",
                ),
            ),
            (
                "building blocks: text decoder and vision",
                _otherwise(
                    "tessera.nn; mindspeed_mm.models.text_decoder and .vision say so",
                    "contract/test_families.py::test_the_plan_covers_every_parameter_once_and_names_modules_that_exist",
                ),
            ),
            (
                "building blocks: audio",
                _otherwise("tessera.nn.audio", "contract/test_audio_numerics.py::test_packed_batches"),
            ),
            (
                "building blocks: dit",
                _otherwise(
                    "tessera.nn.dit; mindspeed_mm.models.predictor says so",
                    "unit/test_nn_dit.py",
                    "contract/test_generation_families.py",
                ),
            ),
            (
                "common norm, rope and embedding",
                _otherwise(
                    "tessera.nn and tessera.ops; mindspeed_mm.models.common says so",
                    "unit/test_ops_pointwise.py::test_eager_norms_follow_their_definition",
                    "unit/test_ops_rope.py",
                ),
            ),
            (
                "common spec: layers put together by a specification",
                _by(
                    "acceptance/test_seed_004.py::test_07_the_local_spec_names_the_modules",
                ),
            ),
            (
                "data preprocessing and engineering",
                _by(
                    "unit/test_data_rows.py::test_a_batch_says_what_it_holds",
                    "acceptance/test_generation_jobs.py::test_features_of_the_entry_point_train",
                ),
            ),
            (
                "large-scale pretraining",
                _by("unit/test_parallel_plan.py::test_a_plan_of_72b_on_a_thousand_ranks_is_made_on_a_laptop"),
            ),
            (
                "instruction tuning and domain adaptation",
                _by(
                    "unit/test_lora.py::test_adapters_are_trained_and_nothing_else",
                    "unit/test_preference.py::test_any_split_gives_the_same_gradient_and_it_learns",
                ),
            ),
            (
                "weight conversion",
                _by(
                    "contract/test_vision_language_folders.py::test_transformers_reads_what_we_write",
                    "contract/test_megatron_forms.py::test_through_shards_of_two_layouts_and_back",
                ),
            ),
            (
                "fast online inference",
                _by(
                    "unit/test_infer_generate.py::test_greedy_equals_transformers",
                    "contract/test_engine_families.py::test_requests_at_random_times_get_the_tokens_of_transformers",
                ),
            ),
            (
                "broad automatic evaluation",
                _by(
                    "unit/test_task_files.py::test_published_columns_prompts_and_metrics",
                    "unit/test_two_faces.py::test_evaluate_writes_answers_and_the_report_shows_them",
                    "acceptance/test_generation_jobs.py::test_evaluate_gen_writes_the_videos_of_vbench",
                    "contract/test_generation_suite.py::test_vbench_finds_the_videos",
                ),
            ),
            (
                "pipeline of heterogeneous data",
                _by("unit/test_data_sources_forms.py::test_the_forms_of_conversations"),
            ),
            (
                "parallel algorithms",
                _by(
                    "dist/test_tensor.py::test_layers_computed_together_train_like_one_process",
                    "dist/test_pipeline.py::test_a_pipeline_trains_like_one_process",
                    "dist/test_experts.py::test_experts_train_like_one_process",
                ),
            ),
            (
                "overlap of computation and communication",
                _lacks(
                    "prefetch is there and tested; to time its gain needs several GPUs or NPUs, which were not there",
                    "unit/test_parallel_memory.py::test_prefetch_lists_are_in_order_of_execution",
                ),
            ),
            (
                "multimodal load balance",
                _by("unit/test_data_order_balance.py::test_sixty_four_ranks_have_equal_work"),
            ),
            (
                "dynamic memory: recompute and tiers of storage",
                _by("unit/test_parallel_memory.py::test_recompute_computes_again_what_it_does_not_keep"),
            ),
            ("long sequences", _by("dist/test_context.py::test_a_shared_row_trains_as_a_whole_one")),
            ("backend PTD (Megatron)", _by("dist/test_pipeline.py::test_a_pipeline_trains_like_one_process")),
            (
                "backend FSDP2",
                _by("dist/test_layouts.py::test_a_layout_trains_like_one_process_and_holds_what_its_plan_says"),
            ),
            (
                "FSDP2 for Qwen3-VL",
                _by(
                    "acceptance/test_weights_there_and_back.py",
                    "contract/test_qwen3_vl_parallel.py",
                    "acceptance/test_migrate_scripts.py::test_the_switches_that_came_in_2026",
                ),
            ),
            (
                "FSDP2 for Wan2.2",
                _by(
                    "contract/test_wan_parallel.py",
                    "acceptance/test_migrate_scripts.py::test_a_container_of_wan_trains_its_transformer",
                ),
            ),
            ("`--use-torch-fsdp2`", _by("acceptance/test_jobs.py::test_launch_flags_of_the_migration_guide")),
            ("`GPT_ARGS`, `MM_ARGS`, `OUTPUT_ARGS`", _by("acceptance/test_jobs.py::test_the_seeds_script_runs")),
            (
                "`examples/xxx_model/pretrain_xxx.sh` with `model.json` and `data.json`",
                _by("acceptance/test_jobs.py::test_every_example_is_planned"),
            ),
            (
                "`pretrain_vlm.py`, `pretrain_sora.py`, `pretrain_transformers.py`",
                _by(
                    "acceptance/test_jobs.py::test_a_workspace_has_the_names_that_users_type",
                    "acceptance/test_generation_jobs.py::test_a_job_trains_and_samples",
                ),
            ),
            (
                "`mindspeed_mm/training.py`: `pretrain`, `train`, `train_step`",
                _by("compat/test_compat_pretrain.py::test_a_job_trains_logs_evaluates_and_saves"),
            ),
            (
                "the flow by name, from `initialize_megatron` to `evaluate_and_print_results`",
                _by(
                    "compat/test_compat_pretrain.py::test_the_flow_by_name",
                    "acceptance/test_jobs.py::test_an_edited_entry_file_trains",
                ),
            ),
            (
                "`mindspeed.megatron_adaptor`, `apply_patches_from_config`",
                _by(
                    "compat/test_compat_ranks.py::test_the_job_of_the_migration_guide_trains_as_a_recipe_does",
                    "compat/test_compat_pretrain.py::test_patches_of_model_json_are_checked",
                ),
            ),
            (
                "process groups, optimizer, logs, saving and loading",
                _by(
                    "unit/test_two_faces.py::test_the_run_folder_holds_everything",
                    "compat/test_compat_pretrain.py::test_a_run_goes_on_with_the_flags_of_its_new_start",
                ),
            ),
        ],
    ),
    *_seed(
        "003",
        [
            (text, ON_MINDSPORE.get(number) or _launched(number))
            for number, text in enumerate(
                (
                    "MindSpore as a second framework",
                    "MSAdapter",
                    "functional gradients: `grad`, `value_and_grad`",
                    "custom operators: `CustomOpBuilder`",
                    "the table of API differences",
                    "the version table: core_r0.8.0, CANN 8.1.RC1, MindSpore 2.7.0, Python 3.9 and 3.10",
                    "the list of software to install",
                    "`source auto_convert_mm.sh`",
                    "its forms `llm`, `mm`, `rl`",
                    "`torchrun` becomes `msrun`",
                    "`--ai-framework mindspore`",
                    "`--local_worker_num`",
                    "`--worker_num`",
                    "`--master_addr`",
                    "`--master_port`",
                    "`--node_rank`",
                    "`--log_dir`",
                    "`--join`",
                    "`--cluster_time_out`",
                    "`--bind_core`",
                    "`LOCAL_WORLD_SIZE`",
                    "`DISTRIBUTED_ARGS` rewritten",
                    "features that the back end lacks are found and switched off",
                    "the rest of the command: `$GPT_ARGS ... --distributed-backend nccl`, `tee`",
                    "the job itself",
                ),
                1,
            )
        ],
    ),
    *_seed(
        "004",
        [
            ("`import mindspeed.megatron_adaptor`", OPEN),
            ("`parallel_state.destroy_model_parallel`", OPEN),
            ("initialization from `LOCAL_RANK`, `WORLD_SIZE`, device and process group", OPEN),
            ("`initialize_model_parallel(tp, pp)`", OPEN),
            ("`TransformerConfig` with the seven fields named", OPEN),
            ("`GPTModel(config, spec, vocab_size, max_sequence_length)`", OPEN),
            ("`get_gpt_layer_local_spec`", OPEN),
            ("the structure as printed", OPEN),
            ("29 tensors and 6960 numbers with one tensor-parallel rank, names and order as printed", OPEN),
            ("shapes with two tensor-parallel ranks, 3948 numbers", OPEN),
            ("fp16 parameters beside fp32 norms and positions", OPEN),
            ("the summary: types, devices, total", OPEN),
            ("`get_model(provider, model_type, wrap_with_ddp)`", OPEN),
            ("`ModelType.encoder_or_decoder`", OPEN),
            ("`Float16Module`: the first and the last stage cast", OPEN),
            ("`get_forward_backward_func()` and its eight arguments", OPEN),
            ("`losses_reduced`", OPEN),
            ("the user's own `Adam` and loop", OPEN),
            ("`forward_step_func` that returns output and `partial(loss_func, loss_mask)`", OPEN),
            ("a masked mean, `{'lm loss': loss}`", OPEN),
            ("`labels=` gives the loss of each token; without it logits", OPEN),
            ("a batch of tokens, labels, loss_mask, attention_mask, position_ids", OPEN),
            ("`is_pipeline_first_stage`, `is_pipeline_last_stage`", OPEN),
            ("micro-batches, sequence length, forward only", OPEN),
            (
                "`setup_debugpy`: port 22333 + rank, waits",
                _by("compat/test_debug.py::test_a_real_debugger_attaches"),
            ),
            (
                "`.vscode/launch.json` with one entry per worker",
                _by("compat/test_debug.py::test_vscode_gets_an_entry_for_each_rank"),
            ),
            ("`torchrun --nproc-per-node 4 script.py`", OPEN),  # in a folder of `tessera migrate workspace`
            ("the rest of the linked script: mock GPT data, RNG tracker, `dist_checkpointing`", OPEN),
        ],
    ),
]


def page() -> str:
    """Return docs/reference/acceptance.md."""
    lines = [
        "# The seed documents, item by item",
        "",
        "Written by `python -m tests.acceptance.items`; do not edit. Of what the documents name (features, keys,",
        "flags, functions, files, commands, environment variables), **done** has a test that types or calls it,",
        "**partly** has one and lacks something, **otherwise** is there under the name that is given, **later** will",
        "come with the issue that is named, **refused** is answered with the reason; **open** has no test yet.",
        "",
        "| document | items | " + " | ".join(STATES) + " |",
        "|---" * (2 + len(STATES)) + "|",
    ]
    for seed in (*SEEDS, "all"):
        chosen = [item for item in ITEMS if seed in (item.seed, "all")]
        counts = Counter(item.state for item in chosen)
        what = f"{seed}: {SEEDS[seed]}" if seed in SEEDS else "all"
        lines.append(f"| {what} | {len(chosen)} | " + " | ".join(str(counts[state]) for state in STATES) + " |")
    for seed, what in SEEDS.items():
        lines += ["", f"## {seed}: {what}", "", "| # | item | state | shown by, or why not |", "|---|---|---|---|"]
        for item in ITEMS:
            if item.seed == seed:
                told = [f"`{test}`" for test in item.tests]
                told += [item.refused or item.otherwise or item.lacks] if item.state not in ("done", "open") else []
                lines.append(f"| {item.number} | {item.text} | {item.state} | {'; '.join(told)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
