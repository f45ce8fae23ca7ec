"""List the modules of Megatron and MindSpeed that scripts import, and the modules of Tessera that replace them.

`SERVED` maps the imported module to its sources. A source is a module of this package, which provides all its public
names, or `module:name,name`, which provides these names. A module without sources is empty: scripts import it only for
its side effects, which are not needed here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera.runtime.log import logger

_OURS = "tessera_compat."
TAKES_OVER = "from tessera_compat.run import take_over"  # line that marks a package as part of a workspace
ROOTS = ("megatron", "mindspeed", "mindspeed_mm")
USER_ROOT = "mindspeed_mm"  # a package to which users add files
# Modules with the table of model classes (`ModelHub.MODEL_MAPPINGS`), to which users add theirs.
REGISTRIES = ("mindspeed_mm.models.common.modelzoo", "mindspeed_mm.models.transformers.modelhub")
MODEL_USER = "mindspeed_mm.models.transformers_model"

SERVED: dict[str, tuple[str, ...]] = {
    "mindspeed.megatron_adaptor": ("mindspeed_mm.training:get_mindspeed_args",),
    "megatron.core": (
        "megatron.config:ModelParallelConfig",
        "megatron.module:ModelType",
        "megatron.distributed:DistributedDataParallel",
    ),
    "megatron.core.parallel_state": ("megatron.parallel_state",),
    "megatron.core.mpu": ("megatron.parallel_state",),
    "megatron.core.model_parallel_config": ("megatron.config:ModelParallelConfig",),
    "megatron.core.enums": ("megatron.module:ModelType",),
    "megatron.core.num_microbatches_calculator": ("mindspeed_mm.entry_names:get_num_microbatches",),
    "megatron.core.utils": (
        "megatron.module:get_attr_wrapped_model,get_model_config",
        "megatron.mappings:divide,ensure_divisibility",
        "megatron.config:init_method_normal,scaled_init_method_normal",
    ),
    "megatron.core.tensor_parallel": ("megatron.layers", "megatron.mappings", "megatron.random"),
    "megatron.core.tensor_parallel.layers": ("megatron.layers",),
    "megatron.core.tensor_parallel.mappings": ("megatron.mappings",),
    "megatron.core.tensor_parallel.data": ("megatron.mappings:broadcast_data",),
    "megatron.core.tensor_parallel.cross_entropy": ("megatron.mappings:vocab_parallel_cross_entropy",),
    "megatron.core.tensor_parallel.random": ("megatron.random",),
    "megatron.core.tensor_parallel.utils": ("megatron.mappings:VocabUtility,divide,ensure_divisibility",),
    "megatron.core.transformer": (
        "megatron.config:TransformerConfig",
        "megatron.module:MegatronModule,ModuleSpec,build_module",
        "megatron.transformer:TransformerLayer,TransformerLayerSubmodules",
    ),
    "megatron.core.transformer.transformer_config": ("megatron.config:TransformerConfig,MLATransformerConfig",),
    "megatron.core.transformer.spec_utils": ("megatron.module:ModuleSpec,build_module,get_module,import_module",),
    "megatron.core.transformer.module": (
        "megatron.module:MegatronModule,GraphableMegatronModule,Float16Module,float16_to_fp32,fp32_to_float16",
    ),
    "megatron.core.transformer.enums": ("megatron.module:AttnMaskType,ModelType",),
    "megatron.core.transformer.identity_op": ("megatron.module:IdentityOp,IdentityFuncOp",),
    "megatron.core.transformer.attention": ("megatron.attention:SelfAttention,SelfAttentionSubmodules",),
    "megatron.core.transformer.dot_product_attention": ("megatron.attention:DotProductAttention",),
    "megatron.core.transformer.mlp": ("megatron.attention:MLP,MLPSubmodules",),
    "megatron.core.transformer.torch_norm": ("megatron.attention:WrappedTorchNorm",),
    "megatron.core.transformer.transformer_layer": (
        "megatron.transformer:TransformerLayer,TransformerLayerSubmodules,BaseTransformerLayer",
    ),
    "megatron.core.transformer.transformer_block": (
        "megatron.transformer:TransformerBlock,TransformerBlockSubmodules",
    ),
    "megatron.core.transformer.utils": (
        "megatron.attention:attention_mask_func",
        "megatron.sharding:make_sharded_tensors_for_checkpoint,sharded_state_dict_default",
    ),
    "megatron.core.fusions.fused_bias_dropout": ("megatron.transformer:get_bias_dropout_add",),
    "megatron.core.fusions.fused_layer_norm": ("megatron.attention:FusedLayerNorm",),
    "megatron.core.fusions.fused_softmax": ("megatron.attention:FusedScaleMaskSoftmax",),
    "megatron.core.models.gpt": ("megatron.gpt_model:GPTModel",),
    "megatron.core.models.gpt.gpt_model": ("megatron.gpt_model:GPTModel",),
    "megatron.core.models.gpt.gpt_layer_specs": (
        "megatron.gpt_model:get_gpt_layer_local_spec,get_gpt_layer_with_transformer_engine_spec",
    ),
    "megatron.core.models.common.language_module.language_module": ("megatron.gpt_model:LanguageModule",),
    "megatron.core.models.common.embeddings.language_model_embedding": ("megatron.gpt_model:LanguageModelEmbedding",),
    "megatron.core.models.common.embeddings.rotary_pos_embedding": (
        "megatron.rotary:RotaryEmbedding,apply_rotary_pos_emb",
    ),
    "megatron.core.pipeline_parallel": ("megatron.schedules:get_forward_backward_func",),
    "megatron.core.pipeline_parallel.schedules": ("megatron.schedules",),
    "megatron.core.distributed": (
        "megatron.distributed:DistributedDataParallel,DistributedDataParallelConfig,finalize_model_grads",
    ),
    "megatron.core.distributed.distributed_data_parallel": ("megatron.distributed:DistributedDataParallel",),
    "megatron.core.distributed.distributed_data_parallel_config": (
        "megatron.distributed:DistributedDataParallelConfig",
    ),
    "megatron.core.distributed.finalize_model_grads": ("megatron.distributed:finalize_model_grads",),
    "megatron.core.dist_checkpointing": ("megatron.dist_checkpointing", "megatron.sharding"),
    "megatron.core.dist_checkpointing.core": (
        "megatron.dist_checkpointing:CheckpointingException,check_is_distributed_checkpoint",
    ),
    "megatron.core.dist_checkpointing.mapping": (
        "megatron.sharding:ShardedTensor,ShardedObject,LocalNonpersistentObject",
        "megatron.dist_checkpointing:ShardedStateDict",
    ),
    "megatron.core.dist_checkpointing.serialization": ("megatron.dist_checkpointing",),
    "megatron.core.datasets.blended_megatron_dataset_builder": ("megatron.datasets:BlendedMegatronDatasetBuilder",),
    "megatron.core.datasets.blended_megatron_dataset_config": ("megatron.datasets:BlendedMegatronDatasetConfig",),
    "megatron.core.datasets.gpt_dataset": ("megatron.datasets:GPTDatasetConfig,MockGPTDataset",),
    "megatron.core.datasets.megatron_tokenizer": ("megatron.datasets:MegatronTokenizer",),
    "megatron.core.datasets.utils": ("megatron.datasets:Split,compile_helpers",),
    "megatron.training": (
        "megatron.training:get_model,print_rank_0",
        "state:get_args",
        "megatron.timers:get_timers",
        "mindspeed_mm.training:pretrain,initialize_megatron",
    ),
    "megatron.training.training": (
        "megatron.training:get_model",
        "mindspeed_mm.training:pretrain,train,train_step,evaluate_and_print_results,setup_model_and_optimizer",
        "mindspeed_mm.training:build_train_valid_test_datasets,build_train_valid_test_data_loaders",
        "mindspeed_mm.training:build_train_valid_test_data_iterators,get_optimizer_param_scheduler",
    ),
    "megatron.training.initialize": ("mindspeed_mm.training:initialize_megatron",),
    "megatron.training.checkpointing": ("mindspeed_mm.training:load_checkpoint,save_checkpoint",),
    "megatron.core.optimizer": ("mindspeed_mm.training:get_megatron_optimizer",),
    "megatron.training.global_vars": ("state:get_args,set_args", "megatron.timers:get_timers"),
    "megatron.training.utils": (
        "megatron.training:average_losses_across_data_parallel_group,print_rank_0",
        "megatron.training:get_batch_on_this_tp_rank,get_batch_on_this_cp_rank",
        "megatron.module:unwrap_model",
    ),
    "megatron.training.tokenizer.tokenizer": ("megatron.datasets:_NullTokenizer",),
    "mindspeed_mm.training": ("mindspeed_mm.training", "state:get_args"),
    "mindspeed_mm.arguments": ("mindspeed_mm.training:extra_args_provider_decorator",),
    "mindspeed_mm.configs.config": (
        "mindspeed_mm.training:mm_extra_args_provider",
        "mindspeed_mm.entry_names:merge_mm_args",
        "mindspeed_mm.config_files:ConfigReader",
    ),
    "mindspeed_mm.data": ("mindspeed_mm.data",),
    "mindspeed_mm.data.data_utils.utils": (
        "mindspeed_mm.data:build_iterations",
        "mindspeed_mm.entry_names:cal_gradient_accumulation_size",
    ),
    "mindspeed_mm.data.data_utils.constants": (
        "mindspeed_mm.entry_names:PROMPT_IDS,PROMPT_MASK,PROMPT_IDS_2,PROMPT_MASK_2,TEXT,PROMPT,CAPTIONS,VIDEO",
        "mindspeed_mm.entry_names:VIDEO_MASK,VIDEO_REJECTED,LATENTS,MASKED_VIDEO,INPUT_MASK,FILE_INFO",
        "mindspeed_mm.entry_names:FILE_REJECTED_INFO,SCORE,SCORE_REJECTED,GLOBAL_STEP_TOKEN_NUM,AVG_PER_STEP_TOKEN_NUM",
    ),
    "mindspeed_mm.data.dataloader.dataloader": ("mindspeed_mm.entry_names:PrefetchGradAccDataLoader",),
    "mindspeed_mm.data.dataloader.dynamic_batching_dataloader": ("mindspeed_mm.entry_names:DynamicBatchingDataLoader",),
    "mindspeed_mm.utils.utils": (
        "mindspeed_mm.forward_step:compute_token_level_loss",
        "mindspeed_mm.entry_names:EncoderBalanceComm,get_dtype",
    ),
    "mindspeed_mm.utils.transformer_model_config": ("mindspeed_mm.entry_names:get_model_config",),
    "mindspeed_mm.utils.hetero_parallel": (
        "mindspeed_mm.entry_names:change_parallel_state,apply_hetero_parallel_hooks,hetero_align_config",
    ),
    "mindspeed_mm.utils.dpcp_utils": ("mindspeed_mm.entry_names:is_use_dynamic_dpcp,get_dpcp_batch_for_step",),
    "mindspeed_mm.tasks.finetune.lora.utils": ("mindspeed_mm.entry_names:is_enable_lora",),
    "mindspeed.core.distributed.torch_fully_sharded_data_parallel.torch_fully_sharded_data_parallel_adaptor": (
        "mindspeed_mm.entry_names:torch_fully_sharded_data_parallel_init",
    ),
    "mindspeed_mm.patchs.patch_manager": ("mindspeed_mm.training:PatchesManager",),
    **dict.fromkeys(  # empty modules: in MindSpeed-MM they patch functions of Megatron and torch
        (
            *("mindspeed_mm.patchs.torch_dcp_patch", "mindspeed_mm.patchs.dummy_optimizer_patch"),
            *("mindspeed_mm.patchs.ring_attn_patch", "mindspeed_mm.patchs.ulysses_patches"),
            "mindspeed_mm.patchs.meta_device_patches",
        ),
        (),
    ),
    "mindspeed_mm.models.common.module": ("mindspeed_mm.mixins:MultiModalModule",),
    "mindspeed_mm.models.transformers.base_model": (
        "mindspeed_mm.mixins:FSDP2Mixin,WeightInitMixin",
        "mindspeed_mm.fsdp2:Fsdp2Config,get_submodules_by_path",
        "mindspeed_mm.fsdp2:set_recompute_modules_to_wrap,set_fullyshard_modules_to_wrap,set_modules_to_prefetch",
    ),
    "mindspeed_mm.models.common.modelzoo": ("mindspeed_mm.classes:ModelHub",),
    "mindspeed_mm.models.transformers.modelhub": ("mindspeed_mm.classes:ModelHub",),
    "mindspeed_mm.models.transformers_model": ("mindspeed_mm.classes:TransformersModel",),
    "mindspeed_mm.models.vl_model": ("mindspeed_mm.vl_model:VLModel",),
    "mindspeed_mm.models.vlm_model": ("mindspeed_mm.vl_model:VLMModel",),
    "mindspeed_mm.models.qwen2vl_model": ("mindspeed_mm.vl_model:Qwen2VLModel",),
    "mindspeed_mm.models.internvl_model": ("mindspeed_mm.vl_model:InternVLModel",),
    "mindspeed_mm.models.sora_model": ("mindspeed_mm.sora_model:SoRAModel",),
}


# Package -> why its other modules are not provided. The longest matching package name is used.
REASONS = {
    "mindspeed_mm.patchs": "Tessera patches no code",
    "mindspeed_mm.mindspore": "Tessera patches no code for MindSpore: --ai-framework mindspore trains on it",
    "mindspeed_mm.fsdp": "the FSDP2 trainer is mindspeed_mm/fsdp/train/trainer.py in a workspace",
    "mindspeed_mm.tasks": "inference, evaluation and post-training are entry points: inference_vlm.py, evaluate_vlm.py",
    "mindspeed_mm.models": "use VLModel, VLMModel or TransformersModel; other classes are not supported yet",
    "mindspeed_mm.tools": "profiling is configured by --mm-tool tools.json",
}


def source_parts(source: str) -> tuple[str, tuple[str, ...] | None]:
    """Split `module:names` into the full module name and the names to provide (None: all public names)."""
    module, _, names = source.partition(":")
    return _OURS + module, tuple(names.split(",")) if names else None


def packages() -> set[str]:
    """Return the dotted names of all packages that contain a provided module."""
    return {name[:end] for name in SERVED for end, letter in enumerate(name) if letter == "."}


class NotServed(TesseraError, ModuleNotFoundError):
    """Raised at the import of a module that Tessera does not provide. `except ImportError` catches it."""


class ServedModule(ModuleType):
    """Replace a module of Megatron or MindSpeed-MM under its import name. Submodules are imported at first access."""

    def __getattr__(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if below in SERVED or below in packages():
            return importlib.import_module(below)
        near = nearest(name, [known for known in vars(self) if not known.startswith("__")])
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"{self.__name__} of Tessera has no {name!r}{hint}")


class ServedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import provided modules, and modules that the user added to `mindspeed_mm/`.

    `folders`: folder of the script and working folder. A file in them with the name of a provided module is not read.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(dict.fromkeys(folder.resolve() for folder in folders))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ROOTS:
            return None
        if fullname in SERVED or fullname in packages():
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in packages())
            if fullname in packages() and fullname.split(".")[0] == USER_ROOT:
                spec.submodule_search_locations = [str(place) for place in self.places(fullname) if place.is_dir()]
            return spec
        added = importlib.machinery.PathFinder.find_spec(fullname, path) if path else None
        if added is not None:
            if added.origin is not None:
                logger().info("%s is read from %s", fullname, added.origin)
            return added
        prefixes = [name for name in REASONS if f"{fullname}.".startswith(f"{name}.")]
        why = f": {REASONS[max(prefixes, key=len)]}" if prefixes else ""
        error = NotServed(
            f"the module {fullname} is not offered here{why}",
            nearest=nearest(fullname, [*SERVED, *packages()]),
            fix="docs/reference/compat-megatron.md lists provided modules; files below mindspeed_mm/ are imported; "
            "`except ImportError` around the import works too",
            code="megatron.module-not-served",
        )
        error.name = fullname
        raise error

    def is_users(self, root: str, path: Path) -> bool:
        """Return whether a package is a folder of the user, or was created by `tessera migrate workspace`."""
        if root != USER_ROOT and (not path.is_file() or TAKES_OVER not in path.read_text(encoding="utf-8")):
            return False
        return any(path.is_relative_to(folder) for folder in self.folders)

    def places(self, fullname: str) -> list[Path]:
        """Return the possible paths of a user's module: one in each user folder, without `.py`."""
        return [folder.joinpath(*fullname.split(".")) for folder in self.folders]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name, f"Offer the names of {spec.name} from Tessera.")

    def exec_module(self, module: ModuleType) -> None:
        for source in SERVED.get(module.__name__, ()):
            name, wanted = source_parts(source)
            ours = importlib.import_module(name)
            for attribute in wanted or [one for one in vars(ours) if not one.startswith("_")]:
                setattr(module, attribute, vars(ours)[attribute])
        if module.__name__ == MODEL_USER:
            for name in REGISTRIES:
                importlib.import_module(name)
        for path in self.places(module.__name__) if module.__name__.startswith(f"{USER_ROOT}.") else ():
            file = path.with_suffix(".py")
            if file.is_file() and module.__name__ in REGISTRIES:
                _register(module, file)
            elif file.is_file():
                logger().info("%s is provided by Tessera; %s is not read", module.__name__, file)


def _register(module: ModuleType, file: Path) -> None:
    """Copy `ModelHub.MODEL_MAPPINGS` of a user's module to the `ModelHub` of Tessera."""
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    assert spec is not None
    assert spec.loader is not None
    user = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(user)
        classes = dict(user.ModelHub.MODEL_MAPPINGS)
    except (ImportError, AttributeError) as error:
        logger().warning("the models of %s cannot be registered: %s", file, error)
        return
    module.ModelHub.MODEL_MAPPINGS.update(classes)
    logger().info("models of %s: %s", file, ", ".join(map(str, classes)))


@contextmanager
def serving() -> Iterator[None]:
    """Provide the packages `megatron`, `mindspeed` and `mindspeed_mm` in this block.

    Installed packages of these names are ignored, with a warning. Raise if one of them is already imported.
    """
    imported = sorted(root for root in ROOTS if root in sys.modules)
    if imported:
        raise TesseraError(
            f"{', '.join(imported)} is already imported, so Tessera cannot provide it",
            fix="start the script with `tessera run --as-megatron` in a separate process",
            code="megatron.already-imported",
        )
    finder = ServedFinder([Path(sys.path[0] or "."), Path.cwd()])
    for root in ROOTS:
        spec = importlib.machinery.PathFinder.find_spec(root)
        location = "" if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or [])
        if location and not finder.is_users(root, Path(location)):
            logger().warning("%s is installed (%s); this run takes it from Tessera instead", root, location)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in ROOTS]:
            del sys.modules[name]
