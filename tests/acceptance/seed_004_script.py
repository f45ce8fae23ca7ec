"""The script of seed 004, as its text prints it: groups, model, training loop, forward step, loss.

Between the printed parts stands what the text only names: imports, mock data, printing of parameters, saving and
loading. Start it with `tessera run --as-megatron` or `torchrun -m tessera_compat.run`; arguments: TP and PP.
"""

# ruff: noqa: I001
import os
import sys
from functools import partial

import torch
import mindspeed.megatron_adaptor  # noqa: F401
from torch.optim import Adam
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.tokenizer.tokenizer import _NullTokenizer

_SEQUENCE_LENGTH = 64


def initialize_distributed(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    parallel_state.destroy_model_parallel()

    rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(world_size=world_size, rank=rank)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size)


def model_provider():
    transformer_config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float16,
        bf16=True,
    )

    print("Creating GPT model...")
    gpt_model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=_SEQUENCE_LENGTH,
    )
    print(gpt_model)
    print("GPT model created.")
    return gpt_model


def print_model_parameters(model):
    for name, parameter in model.named_parameters():
        print(f"{name}, {list(parameter.shape)}, {parameter.dtype}, {parameter.device}")
    print("\nSummary:")
    print(f"Unique dtypes in model: { {parameter.dtype for parameter in model.parameters()} }")
    print(f"Unique devices in model: { {parameter.device for parameter in model.parameters()} }")
    print(f"Total parameters: {sum(parameter.numel() for parameter in model.parameters())}")


def get_train_data_iterator():
    if torch.distributed.get_rank() == 0:
        compile_helpers()
    torch.distributed.barrier()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=_SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=_NullTokenizer(vocab_size=_SEQUENCE_LENGTH),
    )
    datasets = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    return iter(DataLoader(datasets[0], batch_size=8, shuffle=True))


def forward_step_func(data_iterator, model):
    def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor):

        losses = output_tensor.float()
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss}

    data = next(data_iterator)
    tokens = data["tokens"].to(device)
    attention_mask = data["attention_mask"].to(device)
    position_ids = data["position_ids"].to(device)
    labels = data["labels"].to(device)
    loss_mask = data["loss_mask"].to(device)

    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)

    return output_tensor, partial(loss_func, loss_mask)


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:3]]
    initialize_distributed(*sizes)
    model_parallel_cuda_manual_seed(123)
    gpt_model = model_provider()
    if torch.distributed.get_rank() == 0:
        print_model_parameters(gpt_model)
    device = torch.device("cuda")
    gpt_model.to(device)
    train_iterator = get_train_data_iterator()

    optim = Adam(gpt_model.parameters())
    forward_backward_func = get_forward_backward_func()
    history = []
    for i in range(5):
        print(f"Starting iteration {i + 1}/5...")
        optim.zero_grad()
        print("Gradients zeroed.")
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=gpt_model,
            num_microbatches=1,
            seq_length=_SEQUENCE_LENGTH,
            micro_batch_size=8,
            decoder_seq_length=_SEQUENCE_LENGTH,
            forward_only=False,
        )
        print(f"Forward-backward pass completed with losses: {losses_reduced}")
        optim.step()
        history += [float(report["lm loss"]) for report in losses_reduced]

    folder = os.path.join(os.getcwd(), "ckpt")
    dist_checkpointing.save(gpt_model.sharded_state_dict(prefix=""), folder)
    gpt_model.load_state_dict(dist_checkpointing.load(gpt_model.sharded_state_dict(prefix=""), folder))
    print("Successfully loaded the model")
