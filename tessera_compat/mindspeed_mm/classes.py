"""Offer `ModelHub` and `TransformersModel`: a class of transformers, or a user's subclass of one, as a model to train.

ModelHub.MODEL_MAPPINGS["internvl"] = InternVLChatModelGeneration
model = TransformersModel(args.mm.model)          # init_from_hf_path names a folder with config.json and weights
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.checkpoint.state import model_tensors, tied_names
from tessera.core.batch import IGNORE
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError, nearest
from tessera.inference.weight_source import fill_from
from tessera.models.transformers.hub import MODEL_MAPPINGS, choose_class
from tessera.models.transformers.weights import published_names
from tessera.runtime.log import logger
from tessera.runtime.modules import without_weights
from tessera.runtime.torch_internals import build_from_config, unsplit_modules
from tessera.weights.map import WeightMap
from tessera_compat import state
from tessera_compat.mindspeed_mm.config_files import ConfigReader
from tessera_compat.mindspeed_mm.fsdp2 import Fsdp2Config
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin, MultiModalModule

WHERE = "model.json"
LossType = Literal["default", "per_sample_loss", "per_token_loss", "token_loss", "square_loss"]
# Flags that select a loss -> its name in model.json. Without such a flag, `loss_cfg.loss_type` selects it.
_LOSS_FLAGS: dict[str, LossType] = {
    "calculate_per_sample_loss": "per_sample_loss",
    "calculate_per_token_loss": "per_token_loss",
    "calculate_token_loss": "token_loss",
    "calculate_square_loss": "square_loss",
}


def plain(config: Any) -> dict[str, Any]:
    """Return the content of a `model.json` as plain data. `config`: a mapping, or `args.mm.model`."""
    if isinstance(config, ConfigReader):
        return config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    raise TesseraError(
        f"the configuration of a model must be a mapping, not {type(config).__name__}",
        where=WHERE,
        fix="pass args.mm.model, or the content of model.json as a dict",
        code="job.model-not-mapping",
    )


def flag(name: str) -> Any:
    """Return an argument of the run; None if it is missing, or if no arguments are parsed yet."""
    args = state.current().args
    return None if args is None else vars(args).get(name)


@runtime_checkable
class OverwritesConfig(Protocol):
    """Protocol of model classes that change the configuration from config.json before the model is built."""

    def overwrite_transformer_config(self, transformer_config: Any) -> Any: ...


class ModelHub:
    """Select the class of a model by its id."""

    MODEL_MAPPINGS: ClassVar[
        dict[str, type[nn.Module]]
    ] = {}  # model_id -> class; scripts add their classes; classes of transformers need no entry

    @staticmethod
    def build(config: Any, transformer_config: Any) -> type[nn.Module]:
        """Return the class for a `model.json` and a config.json.

        `model_id` selects the class; without it the class name in config.json, and then its `model_type`. Code in the
        folder is never run: classes come from transformers and from `MODEL_MAPPINGS`.
        """
        classes, model_id = ModelHub.MODEL_MAPPINGS, plain(config).get("model_id")
        data = transformer_config.to_dict()
        if model_id in classes:
            return classes[str(model_id)]
        if model_id is None and data.get("model_type") in classes and not data.get("architectures"):
            return classes[str(data["model_type"])]
        try:
            chosen: type[nn.Module] = choose_class(data, None if model_id is None else str(model_id))
        except TesseraError:
            if model_id is None and data.get("model_type") in classes:
                return classes[str(data["model_type"])]
            raise TesseraError(
                f"no model class has the model_id {model_id!r} or the model_type {data.get('model_type')!r}",
                where=WHERE,
                allowed=[*classes, *MODEL_MAPPINGS, "a class of transformers"],
                nearest=nearest(str(model_id), [*classes, *MODEL_MAPPINGS]),
                fix='ModelHub.MODEL_MAPPINGS["ID"] = YourClass, and model_id: ID',
                code="job.unknown-model-class",
            ) from None
        return chosen


class TransformersModel(MultiModalModule, FSDP2Mixin):
    """Wrap a model class of transformers as `model`. `forward` returns the loss of the labels.

    Patterns of `fsdp2_config.yaml` are paths inside of `model`. Weights are read from the safetensors of
    `init_from_hf_path`, or with `--init-model-with-meta-device` from `--load`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        data = plain(config)
        self.loss_type = _loss_type(data.get("loss_cfg") or {})
        folder = data.get("init_from_hf_path")
        if not folder:
            raise TesseraError(
                "init_from_hf_path, the folder to build the model from, is missing",
                where=WHERE,
                fix="set init_from_hf_path to a folder with config.json",
                code="job.model-folder-missing",
            )
        self.transformer_config, self.model = _load(config, str(folder))
        self.model.train()
        # Since transformers 5.3 some classes need `mm_token_type_ids`, which batches of MindSpeed-MM do not have.
        self.marks_media = "mm_token_type_ids" in inspect.signature(self.model.forward).parameters
        if isinstance(self.model, FSDP2Mixin):
            self.model.freeze(config)

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return {"loss": ..., "loss_mask": ...} if there are labels, else the unchanged output of the model class.

        `loss_mask`: True for positions whose next token has a label.
        """
        tensors = {name: value for name, value in inputs.items() if value is not None}
        if input_ids is not None and self.marks_media and ("image_grid_thw" in tensors or "video_grid_thw" in tensors):
            tensors.setdefault("mm_token_type_ids", self._kinds(input_ids))
        outputs = self.model(input_ids=input_ids, **tensors, use_cache=False)
        if labels is None:
            return outputs
        loss, mask = self.compute_language_model_loss(outputs.logits.float(), labels)
        return {"loss": loss, "loss_mask": mask}

    def _kinds(self, input_ids: Tensor) -> Tensor:
        """Return the type of each token: 1 for images, 2 for videos, 0 for text."""
        kinds = torch.zeros_like(input_ids)
        for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
            kinds[input_ids == self.transformer_config.to_dict().get(name, -1)] = kind
        return kinds

    def compute_language_model_loss(
        self, logits: Tensor, labels: Tensor, ignore_index: int = IGNORE
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of predicting the next tokens, and a mask of the positions with a loss.

        default: mean over the positions of the micro-batch. per_sample_loss: mean of each sample, then mean of samples.
        per_token_loss: sum. token_loss: sum, divided by the mean number of positions per rank. square_loss: as
        token_loss, but each position has the weight 1 / sqrt(number of labels in its sample).
        """
        shifted = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        mask = shifted != ignore_index
        each = F.cross_entropy(logits.transpose(1, 2), shifted, ignore_index=ignore_index, reduction="none")
        if self.loss_type == "per_sample_loss":
            return (each.sum(1) / mask.sum(1).clamp(min=1)).mean(), mask
        if self.loss_type == "per_token_loss":
            return each.sum(), mask
        weights = mask.to(each.dtype)
        if self.loss_type == "square_loss":
            weights = weights / (labels != ignore_index).sum(1, keepdim=True).clamp(min=1).sqrt()
        total = weights.sum()
        if self.loss_type != "default" and dist.is_initialized():
            dist.all_reduce(total)
            total = total / dist.get_world_size()
        return (each * weights).sum() / total.clamp(min=torch.finfo(each.dtype).tiny), mask

    def model_plan(self) -> ModelPlan:
        """Return the parallel plan. Its blocks are the classes in `_no_split_modules` of transformers."""
        names = unsplit_modules(self.model)
        units = [path for path, part in self.model.named_modules() if path and type(part).__name__ in names]
        blocks = [path for path in units if not any(path.startswith(f"{outer}.") for outer in units)]
        return ModelPlan(
            blocks=tuple(f"model.{path}" for path in blocks),
            tensor={name: "replicate" for name, _ in self.named_parameters()},
        )

    def offer_parameter_type(self, dtype: torch.dtype) -> None:
        """Give `model.model` the private method of torch by which FSDP2 modules return the dtype of their parameters.

        The newest pretrain_transformers.py calls it, also if `model.model` is not an FSDP2 module itself.
        """
        answer = SimpleNamespace(_mp_policy=SimpleNamespace(param_dtype=dtype))
        for part in (self.model, getattr(self.model, "model", None)):
            if part is not None and not hasattr(part, "_get_fsdp_state"):
                vars(part)["_get_fsdp_state"] = lambda: answer

    def post_meta_init(self) -> None:
        """Call `post_meta_init` of the model class, if it has one: it computes buffers."""
        if isinstance(self.model, FSDP2Mixin):
            self.model.post_meta_init()

    def fully_shard(self, process_group: Any = None, fsdp2_config_path: Any = None, **kwargs: Any) -> bool:
        """Call the sharding method of the model class, if it has one. Return whether it has one."""
        return isinstance(self.model, FSDP2Mixin) and self.model.fully_shard(process_group, fsdp2_config_path, **kwargs)

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Fsdp2Config) -> None:
        if isinstance(self.model, FSDP2Mixin):
            assert fsdp2_config.plan is not None
            self.model.shard_itself(fsdp2_config.plan.below("model"), fsdp2_kwargs)
        else:
            super()._fully_shard(fsdp2_kwargs, fsdp2_config)


def _load(config: Any, folder: str) -> tuple[Any, nn.Module]:
    """Return the configuration of a folder and its model, in float32, without a KV cache."""
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError:
        raise TesseraError(
            "TransformersModel needs the transformers library, which is not installed",
            fix="pip install 'tessera-mm[hf]'",
            code="environment.transformers-missing",
        ) from None
    if flag("trust_remote_code"):
        raise TesseraError(
            "--trust-remote-code is not supported: code of a model folder is never run",
            where="command line",
            fix="install the code as a package, and add its class to ModelHub.MODEL_MAPPINGS",
            code="job.remote-code",
        )
    try:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TesseraError(
            f"{folder} has no configuration that transformers reads: {error}",
            where=WHERE,
            code="model.unreadable-config",
        ) from None
    kind: Any = ModelHub.build(config, settings)
    if isinstance(kind, OverwritesConfig):
        settings = kind.overwrite_transformer_config(settings)
    settings.use_cache = False
    try:
        model = build_from_config(kind, settings, torch.float32, "sdpa")
    except Exception as error:  # constructors raise any exception for an invalid field
        raise TesseraError(
            f"{kind.__name__} cannot be built from {folder}: {error}", where=WHERE, code="job.model-not-built"
        ) from error
    if not flag("init_model_with_meta_device"):
        fill_from(Path(folder), model_tensors(model), _weight_map(kind, settings), tied_names(model))
    return settings, model


def _weight_map(kind: Any, settings: Any) -> WeightMap:
    """Return the map between parameter names and names in weight files.

    For a user's class, this is the map of the transformers class that it extends.
    """
    from transformers import PreTrainedModel

    published: Any = next(one for one in kind.__mro__ if one.__module__.startswith("transformers."))
    # The class extends no model class of transformers, only their base class: files have the names of its parameters.
    if published is PreTrainedModel:
        return WeightMap((), same_names=True)
    return published_names(without_weights(lambda: build_from_config(published, settings, torch.float32, "sdpa")))


def _loss_type(loss_cfg: Mapping[str, Any]) -> LossType:
    losses = {loss for name, loss in _LOSS_FLAGS.items() if flag(name)}
    if loss_cfg.get("loss_type") is not None:
        losses.add(loss_cfg["loss_type"])
    if len(losses) > 1 or losses - set(get_args(LossType)):
        raise TesseraError(
            f"several losses are selected: {', '.join(map(str, sorted(losses)))}",
            where=f"{WHERE}: loss_cfg.loss_type, and the flags --calculate-...",
            allowed=[*get_args(LossType), "one of them"],
            code="job.loss-ambiguous",
        )
    if loss_cfg.get("compute_mode", "default") != "default":
        logger().warning(
            "loss_cfg.compute_mode has no effect on TransformersModel: the class computes all logits; families of "
            "Tessera compute their loss in chunks, always"
        )
    return next(iter(losses), "default")
