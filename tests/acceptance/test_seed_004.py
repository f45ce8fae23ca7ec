"""Items of seed 004: a first training script on MindSpeed and Megatron, with Tessera in the place of both."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tessera.runtime.distributed import fake_world
from tessera_compat import state
from tessera_compat.megatron import dist_checkpointing, parallel_state
from tessera_compat.megatron.config import TransformerConfig
from tessera_compat.megatron.distributed import finalize_model_grads
from tessera_compat.megatron.gpt_model import GPTModel, get_gpt_layer_local_spec
from tessera_compat.megatron.module import Float16Module, ModelType, wrapped
from tessera_compat.megatron.schedules import get_forward_backward_func
from tessera_compat.megatron.training import get_model
from tessera_compat.mindspeed_mm.migrate import lay_out
from tessera_compat.run import run_script
from tests.acceptance.megatron_layouts import (
    LENGTH,
    MICROBATCHES,
    STEPS,
    VOCABULARY,
    Layout,
    bf16_losses,
    dropout_of_two_ranks,
    losses_of_different_lengths,
    shared_batch,
    train,
)
from tests.close import assert_as_close, rounding
from tests.dist.spawn import run_ranks
from tests.errors import raises

SCRIPT = Path(__file__).parent / "seed_004_script.py"
LAYER = (
    ("input_layernorm.weight", [12], [12], "float32"),
    ("input_layernorm.bias", [12], [12], "float32"),
    ("self_attention.linear_proj.weight", [12, 12], [12, 6], "float16"),
    ("self_attention.linear_proj.bias", [12], [12], "float16"),
    ("self_attention.linear_qkv.weight", [36, 12], [18, 12], "float16"),
    ("self_attention.linear_qkv.bias", [36], [18], "float16"),
    ("pre_mlp_layernorm.weight", [12], [12], "float32"),
    ("pre_mlp_layernorm.bias", [12], [12], "float32"),
    ("mlp.linear_fc1.weight", [48, 12], [24, 12], "float16"),
    ("mlp.linear_fc1.bias", [48], [24], "float16"),
    ("mlp.linear_fc2.weight", [12, 48], [12, 24], "float16"),
    ("mlp.linear_fc2.bias", [12], [12], "float16"),
)
PRINTED = (
    ("embedding.word_embeddings.weight", [100, 12], [50, 12], "float16"),
    ("embedding.position_embeddings.weight", [64, 12], [64, 12], "float32"),
    *((f"decoder.layers.{number}.{name}", *rest) for number in (0, 1) for name, *rest in LAYER),
    ("decoder.final_layernorm.weight", [12], [12], "float32"),
    ("decoder.final_layernorm.bias", [12], [12], "float32"),
    ("output_layer.weight", [100, 12], [50, 12], "float16"),
)


def lines_of(tp: int) -> list[str]:
    """Return the lines that the seed prints for the parameters of one rank."""
    return [f"{name}, {shapes[tp - 1]}, torch.{dtype}, cpu" for name, *shapes, dtype in PRINTED]


class Ran:
    """The script as printed, and with parameters of float32, as the file has it that the seed links to."""

    def __init__(self, folder: Path) -> None:
        self.printed, self.names = self._run(folder / "printed", SCRIPT.read_text(encoding="utf-8"))
        wide = SCRIPT.read_text(encoding="utf-8").replace("params_dtype=torch.float16", "params_dtype=torch.float32")
        _, self.wide_names = self._run(folder / "wide", wide)

    def _run(self, folder: Path, text: str) -> tuple[str, dict[str, Any]]:
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(text, encoding="utf-8")
        said = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(said):
            names = run_script(script, ["1", "1"])
        return said.getvalue(), names


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("seed-004"))


def config_of(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, **fields})


def gpt_model(**fields: Any) -> GPTModel:
    """Return the model of the script, without dropout."""
    config = config_of(use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, **fields)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=64)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank with model parallelism of size 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    state.destroy()
    dist.destroy_process_group()


def test_01_the_adaptor_is_imported_and_nothing_stays_behind(ran: Ran) -> None:
    assert ran.names["mindspeed"].megatron_adaptor
    assert not [name for name in sys.modules if name.split(".")[0] in ("megatron", "mindspeed", "mindspeed_mm")]
    assert not [one for one in sys.meta_path if type(one).__name__ == "ServedFinder"]


def test_02_groups_are_destroyed_and_made_again(alone: None) -> None:
    assert parallel_state.model_parallel_is_initialized()
    with raises("megatron.initialized-twice"):
        parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(1, 1)
    assert parallel_state.get_data_parallel_world_size() == 1


def test_03_rank_device_and_group_from_the_environment(ran: Ran) -> None:
    """The script reads LOCAL_RANK and WORLD_SIZE and says torch.cuda.set_device: both worked, and nothing is left."""
    assert ran.names["gpt_model"].training
    assert not dist.is_initialized()
    assert torch.cuda.set_device.__module__ == "torch.cuda"  # where it was replaced, it is torch's own again
    assert "MASTER_ADDR" not in os.environ


def test_05_the_seven_fields_of_the_configuration() -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float16,
        bf16=True,
    )
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (48, 3, 4)


def test_06_a_model_of_a_spec_a_vocabulary_and_a_length(alone: None) -> None:
    model = gpt_model()
    assert (model.vocab_size, model.max_sequence_length) == (100, 64)
    assert isinstance(model.embedding.position_embeddings, torch.nn.Embedding)


def test_07_the_local_spec_names_the_modules() -> None:
    spec = get_gpt_layer_local_spec()
    assert spec.module.__name__ == "TransformerLayer"
    assert spec.submodules.self_attention.submodules.linear_qkv.__name__ == "ColumnParallelLinear"


def test_08_the_structure_is_printed_as_in_the_seed(ran: Ran) -> None:
    said = ran.printed
    for line in (
        "    (word_embeddings): VocabParallelEmbedding()",
        "    (position_embeddings): Embedding(64, 12)",
        "      (0-1): 2 x TransformerLayer(",
        "        (input_layernorm): FusedLayerNorm()",
        "            (scale_mask_softmax): FusedScaleMaskSoftmax()",
        "          (linear_proj): RowParallelLinear(in_features=12, out_features=12, bias=False, TP=1)",
        "          (linear_qkv): ColumnParallelLinear(in_features=12, out_features=36, bias=False, TP=1)",
        "          (q_layernorm): IdentityOp()",
        "        (cross_attn_bda): IdentityFuncOp()",
        "          (linear_fc1): ColumnParallelLinear(in_features=12, out_features=48, bias=False, TP=1)",
        "    (final_layernorm): FusedLayerNorm()",
        "  (output_layer): ColumnParallelLinear(in_features=12, out_features=100, bias=False, TP=1)",
    ):
        assert f"\n{line}\n" in said, line
    modules = re.findall(r"\((\w+)\): \w+\(", said.split("Creating GPT model...")[1].split("GPT model created.")[0])
    order = ["core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm", "pre_cross_attn_layernorm"]
    assert [name for name in modules if name in order] == order


def test_09_29_tensors_and_6960_numbers_as_printed(ran: Ran) -> None:
    lines = re.findall(r"^\w[\w.]*, \[.*$", ran.printed, re.MULTILINE)
    assert lines == lines_of(1)
    assert len(lines) == 29


def test_10_two_tensor_parallel_ranks_have_3948_numbers() -> None:
    with fake_world(2):
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        model = gpt_model(params_dtype=torch.float16)
        lines = [f"{name}, {list(p.shape)}, {p.dtype}, {p.device}" for name, p in model.named_parameters()]
        assert "RowParallelLinear(in_features=12, out_features=12, bias=False, TP=2)" in repr(model)
        state.destroy()
    assert lines == lines_of(2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 3948


def test_11_float16_parameters_beside_float32_norms_compute(alone: None) -> None:
    """Release 0.12.1 cannot multiply the two; here the product has the type of the weight."""
    model = gpt_model(params_dtype=torch.float16).eval()
    tokens = torch.arange(64)[None] % 100
    loss = model(tokens, torch.arange(64)[None], None, labels=tokens)
    wide = gpt_model(params_dtype=torch.float32).eval()
    wide.load_state_dict(model.state_dict())
    exact = wide(tokens, torch.arange(64)[None], None, labels=tokens)
    assert loss.dtype == torch.float32
    assert float((loss - exact).abs().max()) <= rounding(48, torch.float16) * float(exact.abs().max())


def test_12_the_summary_is_printed(ran: Ran) -> None:
    assert "\nTotal parameters: 6960\n" in ran.printed
    assert re.search(r"Unique dtypes in model: \{torch.float(16|32), torch.float(16|32)\}", ran.printed)
    assert "Unique devices in model: {device(type='cpu')}" in ran.printed


def test_13_get_model_casts_moves_and_wraps(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = get_model(lambda: gpt_model(bf16=True), ModelType.encoder_or_decoder, wrap_with_ddp=True)
    assert "parameters on (tensor, pipeline) model parallel rank (0, 0): 6960" in capsys.readouterr().out
    assert [type(one).__name__ for one in wrapped(model)] == ["DistributedDataParallel", "Float16Module", "GPTModel"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    (bare,) = get_model(lambda: gpt_model(), wrap_with_ddp=False)
    assert type(bare).__name__ == "GPTModel"


def test_14_the_model_type_is_an_enumeration(alone: None) -> None:
    assert gpt_model().model_type is ModelType.encoder_or_decoder
    with raises("megatron.model-type"):
        get_model(gpt_model, ModelType.encoder_and_decoder)


def test_15_float16_module_casts_weights_once_and_outputs_back(alone: None) -> None:
    model = Float16Module(config_of(bf16=True), gpt_model(bf16=True))
    seen: list[torch.dtype] = []
    model.module.output_layer.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[0].dtype))
    logits = model(torch.zeros(2, 64, dtype=torch.int64), torch.arange(64).expand(2, 64), None)
    assert seen == [torch.bfloat16]
    assert logits.dtype == torch.float32
    with raises("megatron.half-precision-flag", "fp16", "bf16"):
        Float16Module(config_of(), gpt_model())


def run_schedule(model: torch.nn.Module, loss_func: Any, **options: Any) -> list[Any]:
    """Run two micro-batches of a model by the schedule with its eight arguments."""

    def forward_step_func(data_iterator: Any, model: torch.nn.Module) -> Any:
        tokens = next(data_iterator)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, positions, None, labels=tokens.roll(-1, 1)), loss_func

    rows = torch.randint(0, 100, (4, 64), generator=torch.Generator().manual_seed(0))
    return get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=iter(rows.chunk(2)),
        model=model,
        num_microbatches=2,
        seq_length=64,
        micro_batch_size=2,
        decoder_seq_length=64,
        **{"forward_only": False, **options},
    )


def gradients(model: torch.nn.Module) -> torch.Tensor:
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    model.zero_grad()
    return flat


def test_16_the_schedule_takes_its_eight_arguments(alone: None) -> None:
    model = gpt_model().double().eval()
    reports = run_schedule(model, lambda losses: (losses.mean(), {"n": losses.numel()}))
    assert reports == [{"n": 128}, {"n": 128}]
    both = gradients(model)
    rows = torch.randint(0, 100, (4, 64), generator=torch.Generator().manual_seed(0))
    model(rows, torch.arange(64).expand(4, 64), None, labels=rows.roll(-1, 1)).mean().backward()
    assert torch.allclose(
        both, gradients(model), rtol=0, atol=rounding(64 * 48, torch.float64) * float(both.abs().max())
    )


def test_17_the_result_is_a_list_with_one_report_for_each_micro_batch(alone: None) -> None:
    """A report that holds the tensor of the loss itself shows it divided by the micro-batches, as in 0.12.1."""
    model = gpt_model().eval()

    def loss_func(losses: torch.Tensor) -> Any:
        loss = losses.mean()
        return loss, {"same": loss, "kept": loss.detach().clone()}

    reports = run_schedule(model, loss_func)
    assert [float(one["same"] / one["kept"]) for one in reports] == pytest.approx([0.5, 0.5])


def test_18_the_users_own_adam_and_loop_train(ran: Ran) -> None:
    said, history = ran.printed, ran.wide_names["history"]
    assert said.count("Forward-backward pass completed with losses: [{'lm loss': tensor(") == 5
    assert 4.0 < ran.names["history"][0] < 5.2  # near log(100): an untrained model
    assert len(history) == 5
    assert history[-1] < history[0] - 0.05


def test_19_the_forward_step_returns_output_and_loss_function(alone: None) -> None:
    with raises("megatron.forward-step-result", "forward_step_func", "loss_func"):
        get_forward_backward_func()(
            forward_step_func=lambda data_iterator, model: model,
            data_iterator=None,
            model=gpt_model(),
            num_microbatches=1,
            seq_length=64,
            micro_batch_size=1,
        )


def test_20_sums_and_counts_give_the_gradient_of_the_mean(alone: None) -> None:
    """With two results the loss is a mean, with three a sum and its tokens; per-token losses are left undivided."""
    model = gpt_model().double().eval()
    mask = torch.ones(2, 64, dtype=torch.float64)
    mask[:, 32:] = 0
    run_schedule(model, lambda losses: ((losses * mask).sum() / mask.sum(), {}))
    mean = gradients(model)
    run_schedule(model, lambda losses: ((losses * mask).sum(), mask.sum().long(), {}))
    limit = rounding(64 * 48, torch.float64) * float(mean.abs().max())
    assert float((gradients(model) - mean).abs().max()) <= limit
    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = finalize_model_grads
    run_schedule(model, lambda losses: ((losses * mask).sum(), mask.sum().long(), {}))
    assert float((gradients(model) - mean).abs().max()) <= limit
    with raises("megatron.loss-result", "loss_func"):
        run_schedule(model, lambda losses: losses.mean())


def test_21_labels_give_a_loss_for_each_token_and_none_logits(alone: None) -> None:
    model = gpt_model().eval()
    tokens = torch.randint(0, 100, (8, 64))
    positions = torch.arange(64).expand(8, 64)
    loss, logits = model(tokens, positions, None, labels=tokens), model(tokens, positions, None)
    assert loss.shape == (8, 64)
    assert logits.shape == (8, 64, 100)
    peer = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(8, 64)
    exact = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens.flatten(), reduction="none")
    assert_as_close(loss, peer, exact.view(8, 64))


def test_22_a_batch_has_tokens_labels_and_masks(ran: Ran) -> None:
    batch = next(ran.names["train_iterator"])
    assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
        "tokens": [8, 64],
        "labels": [8, 64],
        "loss_mask": [8, 64],
        "position_ids": [8, 64],
        "attention_mask": [8, 1, 64, 64],
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert int(batch["tokens"].max()) <= 64  # of the tokenizer's vocabulary of 65


def test_23_first_and_last_stage_are_known() -> None:
    with fake_world(4, rank=1):
        parallel_state.initialize_model_parallel(1, 4, create_gloo_process_groups=False)
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        state.destroy()
    assert ends == (False, False)


def test_24_forward_only_leaves_no_gradients(alone: None) -> None:
    model = gpt_model()
    with torch.no_grad():
        assert len(run_schedule(model, lambda losses: (losses.mean(), {}), forward_only=True)) == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    stored = run_schedule(
        model, lambda output, non_loss_data: output.shape, forward_only=True, collect_non_loss_data=True
    )
    assert stored == [torch.Size([2, 64])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("typed", [["-m", "tessera_compat.run", str(SCRIPT)], ["mindspeed_train.py"]])
def test_27_torchrun_starts_the_script_on_several_ranks(tmp_path: Path, typed: list[str]) -> None:
    """As the blog types it, in a folder of `tessera migrate workspace`; with a module of ours before it, anywhere."""
    if len(typed) == 1:
        lay_out(tmp_path)
        shutil.copy(SCRIPT, tmp_path / typed[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *typed, "2", "1"]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Total parameters: 3948" in ended.stdout
    assert [name for name in ended.stdout.split("\n") if name.startswith("embedding.")] == lines_of(2)[:2]


def test_28_mock_data_seeds_and_a_saved_checkpoint(ran: Ran) -> None:
    assert "Successfully loaded the model" in ran.printed


# ---------------------------------------------------------------------------------------------------- layouts

TWO_RANKS = (
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, options=(("sequence_parallel", True),)),
    Layout(),
)
FOUR_RANKS = (Layout(tp=2, pp=2), Layout(tp=2, pp=2, vpp=2), Layout(pp=4), Layout(tp=2))


def several(rank: int, world: int, layouts: tuple[Layout, ...], folder: Path, kind: str) -> list[Any]:
    return [train(rank, world, layout, folder / f"{world} {layout.name}", kind, folder / "plain") for layout in layouts]


def check_layouts(world: int, layouts: tuple[Layout, ...], folder: Path, kind: str) -> None:
    """Losses of all layouts, and the weights they end with, are those of one process; each reads the other's files.

    All is computed in float64: what differs is the order of sums over tokens, columns and ranks, of which the longest
    has as many terms as a step has products of one output: hidden size times tokens.
    """
    limit = rounding(16 * 8 * 16, torch.float64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, _ = train(0, 1, Layout(), folder / "plain", kind)
    finally:
        dist.destroy_process_group()
    assert [len(step) for step in plain] == [MICROBATCHES] * STEPS
    weights = dist_checkpointing.load_plain_tensors(folder / "plain")
    by_rank = run_ranks(several, world, layouts, folder, kind)
    for number, layout in enumerate(layouts):
        losses = [ranks[number][0] for ranks in by_rank]
        reported = [one for one in losses if one[0]]  # only last stages report
        assert len(reported) == world // layout.pp
        for step, expected in enumerate(plain):
            for at, loss in enumerate(expected):
                mean = sum(one[step][at] for one in reported) / len(reported)  # data-parallel ranks have different rows
                assert abs(mean - loss) <= limit * abs(loss), (layout.name, step, at)
        assert max(ranks[number][1] for ranks in by_rank) <= limit, layout.name
        saved = dist_checkpointing.load_plain_tensors(folder / f"{world} {layout.name}")
        assert saved.keys() == weights.keys()
        for name, weight in weights.items():
            apart = float((saved[name] - weight).abs().max())
            assert apart <= limit * float(weight.abs().max()), (layout.name, name)


@pytest.mark.slow
def test_04_two_ranks_train_as_one(tmp_path: Path) -> None:
    check_layouts(2, TWO_RANKS, tmp_path, "gpt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_04_four_ranks_train_as_one(kind: str, tmp_path: Path) -> None:
    check_layouts(4, FOUR_RANKS, tmp_path, kind)


@pytest.mark.slow
def test_04_gated_layers_and_shared_embeddings_train_as_one(tmp_path: Path) -> None:
    check_layouts(2, TWO_RANKS, tmp_path, "llama")


def in_this_process(function: Any, *args: Any) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(0, 1, *args)
    finally:
        dist.destroy_process_group()


def test_15_a_pipeline_in_bf16_gives_the_losses_of_one_process() -> None:
    """Stages exchange what they compute in bf16, so only the order of sums in a product can differ."""
    plain, (first, last) = in_this_process(bf16_losses, 1), run_ranks(bf16_losses, 2, 2)
    assert first == []
    assert len(last) == len(plain) == 2
    for loss, expected in zip(last, plain, strict=True):
        assert abs(loss - expected) <= rounding(64, torch.bfloat16) * expected


def test_24_micro_batches_of_different_lengths_pass_a_pipeline() -> None:
    plain = in_this_process(losses_of_different_lengths, 1)
    _, last = run_ranks(losses_of_different_lengths, 2, 2)
    assert len(last) == 3
    for loss, expected in zip(last, plain, strict=True):
        assert abs(loss - expected) <= rounding(16 * 8, torch.float64) * expected


def test_28_dropout_is_shared_where_ranks_hold_the_same_and_apart_where_they_do_not() -> None:
    first, second = run_ranks(dropout_of_two_ranks, 2)
    assert first["shape"] == [1, LENGTH, VOCABULARY]
    assert first["logits"] == second["logits"]
    assert first["dropped"] != second["dropped"]


def test_22_ranks_share_the_batch_that_one_of_them_reads() -> None:
    first, second = run_ranks(shared_batch, 2)
    assert (
        first[:3]
        == second[:3]
        == [[[0, 1, 2, 3, 4, 5]], [[1.0] * 6], "these keys of the batch are missing or not torch.int64: labels"]
    )
    assert (first[3], second[3]) == ([[0, 1, 6, 7]], [[2, 3, 4, 5]])
