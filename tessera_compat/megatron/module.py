"""Build modules from specifications (`ModuleSpec`), and offer the base classes `MegatronModule` and `Float16Module`."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera.runtime.torch_internals import tree_map_only
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import ModelParallelConfig, TransformerConfig
from tessera_compat.megatron.sharding import make_sharded_tensors_for_checkpoint, sharded_state_dict_default


class ModelType(enum.Enum):
    """List the kinds of models: one stack of layers, or encoder and decoder."""

    encoder_or_decoder = 1
    retro_encoder = 2
    retro_decoder = 3
    encoder_and_decoder = 4


class AttnMaskType(enum.Enum):
    """List the attention masks."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


@dataclass
class ModuleSpec:
    """Describe a module: its class, its arguments and its submodules."""

    module: tuple[str, str] | type | Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the class that a (module, name) pair names."""
    path, name = module_path
    return vars(importlib.import_module(path))[name]


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Return the class or function of a specification."""
    target = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(target) if isinstance(target, tuple) else target


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the module that a specification describes; a function is returned as it is."""
    target = get_module(spec_or_module)
    if not isinstance(target, type):
        return target
    spec = spec_or_module if isinstance(spec_or_module, ModuleSpec) else ModuleSpec(target)
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    return target(*args, **spec.params, **kwargs)


class MegatronModule(nn.Module):
    """Base class of modules: stores `config`, and describes its parameters for sharded checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the parameters of this rank for a checkpoint, with those of all child modules."""
        parameters = dict(self.named_parameters(recurse=False))
        shards: dict[str, Any] = dict(make_sharded_tensors_for_checkpoint(parameters, prefix, {}, sharded_offsets))
        for name, child in self.named_children():
            shards.update(sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata))
        return shards

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def set_is_first_microbatch(self) -> None:
        """Do nothing: layers keep no state between micro-batches."""


class GraphableMegatronModule(MegatronModule):
    """Base class that newer Megatron code uses. It is a plain `MegatronModule`: no CUDA graph is captured."""


class IdentityOp(nn.Module):
    """Return the input. This class replaces a module that a specification does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """Return a function that returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward


def float16_to_fp32(value: Any) -> Any:
    """Cast 16-bit tensors in nested values to float32."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, value)


def fp32_to_float16(value: Any, float16_convertor: Callable[[Tensor], Tensor]) -> Any:
    """Cast float32 tensors in nested values to 16 bit."""
    return tree_map_only(Tensor, lambda t: float16_convertor(t) if t.dtype == torch.float32 else t, value)


class ModelWrapper(MegatronModule):
    """Wrap a model as `module`. Its state dict is that of the model."""

    module: Any

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.module.set_input_tensor(input_tensor)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return sharded_state_dict_default(self.module, prefix, sharded_offsets, metadata)


class Float16Module(ModelWrapper):
    """Wrap a model, and cast its parameters to fp16 or bf16.

    Positional inputs of the first pipeline stage are cast to 16 bit, outputs of the last stage to float32.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        self.fp16, self.bf16 = config.fp16, config.bf16
        if not (self.fp16 or self.bf16):
            raise TesseraError(
                "Float16Module needs fp16 or bf16",
                where="TransformerConfig",
                fix="set fp16=True or bf16=True",
                code="megatron.half-precision-flag",
            )
        dtype = torch.float16 if self.fp16 else torch.bfloat16
        self.add_module("module", module.to(dtype))
        self.float16_convertor = lambda value: value.to(dtype)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if parallel_state.is_pipeline_first_stage():
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if parallel_state.is_pipeline_last_stage() else outputs


def wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the models it wraps, outermost first. Wrappers store their model as `module`."""
    current: nn.Module | None = model
    while current is not None:
        yield current
        current = dict(current.named_children()).get("module")


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Return an attribute of a model, or of the first model inside its wrappers that has it."""
    if isinstance(model, list):
        raise TesseraError(
            "a single model is expected, not a list of model chunks",
            where="get_attr_wrapped_model",
            code="megatron.several-models",
        )
    for part in wrapped(model):
        if hasattr(part, attr) and (allow_none or getattr(part, attr) is not None):
            return part if return_model_obj else getattr(part, attr)
    raise TesseraError(
        f"the model has no attribute {attr!r}",
        where=type(model).__name__,
        fix="derive the model from MegatronModule",
        code="megatron.model-attribute",
    )


def get_model_config(model: nn.Module) -> ModelParallelConfig:
    """Return the configuration of a model, through its wrappers."""
    config: ModelParallelConfig = get_attr_wrapped_model(model, "config", allow_none=False)
    return config


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Return a model without its wrappers, or a list of models without theirs."""
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    inner = list(wrapped(model))
    return next((one for one in inner if not isinstance(one, module_instances or ModelWrapper)), inner[-1])


def refuse_inference(**options: Any) -> None:
    """Raise if an argument for inference or packing is not None."""
    for name, value in options.items():
        if value is not None:
            raise TesseraError(
                f"{name} is not supported: these layers only train on full sequences",
                fix="remove it; tessera.load runs inference",
                code="megatron.context-parallel",
            )
