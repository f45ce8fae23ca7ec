"""Train a small GPT model under one layout of ranks, in float64, and say what came out of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tessera.errors import TesseraError
from tessera_compat import state
from tessera_compat.megatron import dist_checkpointing, parallel_state
from tessera_compat.megatron.config import TransformerConfig
from tessera_compat.megatron.distributed import finalize_model_grads
from tessera_compat.megatron.gpt_model import GPTModel, get_gpt_layer_local_spec
from tessera_compat.megatron.mappings import broadcast_data
from tessera_compat.megatron.module import unwrap_model
from tessera_compat.megatron.random import model_parallel_cuda_manual_seed
from tessera_compat.megatron.schedules import get_forward_backward_func
from tessera_compat.megatron.training import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, get_model

LENGTH, VOCABULARY, MICROBATCHES, STEPS = 8, 32, 4, 2
GPT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
MODELS = {"gpt": (GPT, "learned_absolute", False), "llama": (LLAMA, "rope", True)}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; data parallelism takes what is left."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        extra = "".join(f" {key}" for key, _ in self.options)
        return f"tp{self.tp} pp{self.pp}" + (f" vpp{self.vpp}" if self.vpp else "") + extra


def build(layout: Layout, kind: str) -> list[torch.nn.Module]:
    """Return the model chunks of this rank, drawn from the same seed in every layout."""
    fields, positions, shared = MODELS[kind]
    config = TransformerConfig(
        **{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "hidden_dropout": 0.0},
        **{"attention_dropout": 0.0, "use_cpu_initialization": True},
        **{"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp},
        virtual_pipeline_model_parallel_size=layout.vpp,
        finalize_model_grads_func=finalize_model_grads,
        **fields,
        **{"pipeline_dtype": torch.float64, **dict(layout.options)},
    )

    def provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        return GPTModel(
            *(config, spec, VOCABULARY, LENGTH, pre_process, post_process),
            position_embedding_type=positions,
            share_embeddings_and_output_weights=shared,
        ).double()

    return get_model(provider)


def train(
    rank: int, world: int, layout: Layout, folder: Path, kind: str, other: Path | None = None
) -> tuple[list[list[float]], float]:
    """Run some steps and save the weights; return the losses of each step by micro-batch, on the last stage, and how
    far this rank's weights are from those in the checkpoint of another layout, relative to the largest of a tensor."""
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, layout.vpp)
    try:
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        models = build(layout, kind)
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.3, momentum=0.5)
        copies = parallel_state.get_data_parallel_world_size()
        data_rank = parallel_state.get_data_parallel_rank()
        data = torch.randint(
            0, VOCABULARY, (STEPS, MICROBATCHES, 4, LENGTH + 1), generator=torch.Generator().manual_seed(1)
        )
        losses = []
        for step in data:
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(step.chunk(copies, 1)[data_rank]) for _ in models],
                model=models,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=4 // copies,
            )
            optimizer.step()
            losses.append([float(report["loss"]) for report in reports])
        shards: dict[str, Any] = {}
        for number, model in enumerate(models):
            described = unwrap_model(model).sharded_state_dict(prefix="")
            shards.update({f"{number}.{name}": shard for name, shard in described.items()})
        dist_checkpointing.save({"model": shards, "step": STEPS}, folder)
        return losses, 0.0 if other is None else distance_to(shards, other)
    finally:
        state.destroy()


def forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
    rows = next(data_iterator)
    output = model(rows[:, :-1], torch.arange(rows.shape[1] - 1).expand(len(rows), -1), None, labels=rows[:, 1:])

    def loss_func(losses: torch.Tensor) -> Any:
        loss = losses.mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_func


def distance_to(shards: dict[str, Any], folder: Path) -> float:
    loaded = dist_checkpointing.load({"model": shards}, folder)
    assert loaded["step"] == STEPS
    return max(
        float((tensor - shards[name].data).abs().max() / shards[name].data.abs().max().clamp(min=1e-12))
        for name, tensor in loaded["model"].items()
    )


# ---------------------------------------------------------------------------------------------------- on two ranks


def dropout_of_two_ranks(rank: int, world: int) -> dict[str, Any]:
    """Run one model split over two ranks with dropout: what both hold is the same, what is split is drawn apart."""
    parallel_state.initialize_model_parallel(2)
    try:
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        fields = {"hidden_dropout": 0.5, "attention_dropout": 0.5, "use_cpu_initialization": True}
        config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **fields)
        model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, parallel_output=False)
        attention: list[float] = []
        model.decoder.layers[0].self_attention.core_attention.attention_dropout.register_forward_hook(
            lambda module, inputs, output: attention.extend((output == 0).flatten().tolist())
        )
        tokens = torch.arange(LENGTH)[None]
        logits = model(tokens, tokens, None)
        return {"logits": logits.tolist(), "dropped": attention, "shape": list(logits.shape)}
    finally:
        state.destroy()


def bf16_losses(rank: int, world: int, pp: int) -> list[float]:
    """Return the losses of one step of a model in bf16, on the last stage."""
    options = (("bf16", True), ("pipeline_dtype", torch.bfloat16))
    return _one_step(Layout(pp=pp, options=options), [LENGTH] * 2, "gpt")


def losses_of_different_lengths(rank: int, world: int, pp: int) -> list[float]:
    """Return the losses of micro-batches of different lengths, on the last stage."""
    return _one_step(Layout(pp=pp, options=(("variable_seq_lengths", True),)), [LENGTH, LENGTH // 2, 3], "gpt")


def _one_step(layout: Layout, lengths: list[int], kind: str) -> list[float]:
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, layout.vpp)
    try:
        torch.manual_seed(5)
        models = build(layout, kind)
        chance = torch.Generator().manual_seed(1)
        rows = [torch.randint(0, VOCABULARY, (2, length + 1), generator=chance) for length in lengths]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(rows)],
            model=models,
            num_microbatches=len(rows),
            seq_length=LENGTH,
            micro_batch_size=2,
        )
        return [float(report["loss"]) for report in reports]
    finally:
        state.destroy()


def shared_batch(rank: int, world: int) -> list[Any]:
    """Return what two tensor-parallel ranks get of a batch that only the first one reads."""
    parallel_state.initialize_model_parallel(2)
    try:
        rows = {"tokens": torch.arange(6).view(1, 6), "loss_mask": torch.ones(1, 6)}
        batch = get_batch_on_this_tp_rank(iter([rows]) if rank == 0 else None)
        refused = ""
        try:
            broadcast_data(["labels"], rows if rank == 0 else None, torch.int64)
        except TesseraError as error:
            refused = error.what
    finally:
        state.destroy()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    try:
        part = get_batch_on_this_cp_rank({"tokens": torch.arange(8).view(1, 8), "attention_mask": None})
    finally:
        state.destroy()
    return [batch["tokens"].tolist(), batch["loss_mask"].tolist(), refused, part["tokens"].tolist()]
