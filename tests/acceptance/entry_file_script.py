"""An entry file in the form that users edit: the imports of pretrain_vlm.py, pretrain_sora.py and
pretrain_transformers.py, and callbacks that ask the model and the configuration as those do."""

# ruff: noqa: I001, F401
from copy import deepcopy

import torch
import mindspeed.megatron_adaptor
from mindspeed.core.distributed.torch_fully_sharded_data_parallel.torch_fully_sharded_data_parallel_adaptor import (
    torch_fully_sharded_data_parallel_init,
)
from mindspeed.megatron_adaptor import get_mindspeed_args
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, print_rank_0
from megatron.training.utils import average_losses_across_data_parallel_group, unwrap_model
from mindspeed_mm.configs.config import merge_mm_args, mm_extra_args_provider
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.data_utils.constants import AVG_PER_STEP_TOKEN_NUM, GLOBAL_STEP_TOKEN_NUM
from mindspeed_mm.data.data_utils.constants import PROMPT_IDS, PROMPT_MASK, VIDEO, VIDEO_MASK
from mindspeed_mm.data.data_utils.utils import build_iterations, cal_gradient_accumulation_size
from mindspeed_mm.data.dataloader.dataloader import PrefetchGradAccDataLoader
from mindspeed_mm.data.dataloader.dynamic_batching_dataloader import DynamicBatchingDataLoader
from mindspeed_mm.models.qwen2vl_model import Qwen2VLModel
from mindspeed_mm.models.sora_model import SoRAModel
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.models.vlm_model import VLMModel
from mindspeed_mm.patchs import dummy_optimizer_patch
from mindspeed_mm.tasks.finetune.lora.utils import is_enable_lora
from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.hetero_parallel import apply_hetero_parallel_hooks, change_parallel_state, hetero_align_config
from mindspeed_mm.utils.transformer_model_config import get_model_config
from mindspeed_mm.utils.utils import EncoderBalanceComm, compute_token_level_loss
import mindspeed_mm.utils.dpcp_utils as dpcp

steps = []


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    merge_mm_args(args)
    config = deepcopy(args.mm.model)
    config.pre_process, config.post_process, config.audio_encoder = pre_process, post_process, None
    for section, names in ((config.image_encoder, ("vision_encoder", "vision_projector")), (config, ("text_decoder",))):
        for name in names:
            setattr(section, name, get_model_config(getattr(section, name)))
    model = VLMModel(config)
    model.freeze(freeze_image_encoder=True, freeze_image_projection=True, freeze_audio_encoder=False)
    return model


def loss_func(output_tensor):
    loss = output_tensor["loss"].mean()
    averaged = average_losses_across_data_parallel_group([loss])
    return loss.unsqueeze(0) / mpu.get_context_parallel_world_size(), {"loss": averaged[0]}


def forward_step(data_iterator, model):
    assert model.module.module.add_image_encoder
    assert model.module.module.image_encoder.post_process
    assert not dpcp.is_use_dynamic_dpcp()
    assert not is_enable_lora()
    assert cal_gradient_accumulation_size() == get_num_microbatches() == 2
    batch = next(data_iterator)
    steps.append({name for name, parameter in unwrap_model(model).named_parameters() if parameter.requires_grad})
    return model(**batch, tranfer=None), loss_func


def train_valid_test_datasets_provider(train_val_test_num_samples):
    data = get_args().mm.data
    loader = build_mm_dataloader(
        build_mm_dataset(data.dataset_param),
        data.dataloader_param,
        process_group=mpu.get_data_parallel_group(),
        consumed_samples=get_args().consumed_train_samples,
        dataset_param=data.dataset_param,
        generator=torch.Generator(),
    )
    return build_iterations(train_dl=loader)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=mm_extra_args_provider,
        args_defaults={"dataloader_type": "external"},
    )
