"""Each private symbol behind `core.torch_internals` still exists and still means what its wrapper says."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tessera.runtime import torch_internals as internals
from tessera.runtime.distributed import fake_world
from tessera.runtime.modules import whole_tensor


def test_the_stores_of_process_groups() -> None:
    assert isinstance(internals.fake_store(), torch.distributed.Store)
    with fake_world(2):
        assert isinstance(internals.default_store(), torch.distributed.Store)


def test_meshes_are_joined_and_sliced() -> None:
    with fake_world(8):
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp"))
        joined = internals.flatten_mesh(root["shard", "cp"], "both")
        assert joined.size() == 4
        assert internals.slice_flattened_mesh(root, ("replicate", "both")).shape == (2, 4)


def test_chunks_of_a_dtensor_are_named_and_found() -> None:
    with fake_world(2, rank=1):
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)], src_data_rank=None)
        (chunk,) = internals.local_chunks(whole)
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((3, 0), (2, 2))
        assert internals.tensor_of_chunk(whole, chunk.offsets).shape == (2, 2)
    (plain,) = internals.local_chunks(torch.zeros(3, 1))
    assert (tuple(plain.offsets), tuple(plain.sizes)) == ((0, 0), (3, 1))
    assert internals.tensor_of_chunk(torch.zeros(3, 1), plain.offsets).shape == (3, 1)


def test_a_tensor_that_is_sharded_twice_is_gathered_without_advice(caplog: pytest.LogCaptureFixture) -> None:
    advice = importlib.import_module("torch.distributed.tensor._redistribute").logger
    with internals.without_advice_on_gathers():
        assert not advice.isEnabledFor(logging.WARNING)
    assert advice.isEnabledFor(logging.WARNING)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        assert whole_tensor(tensor).shape == (8, 2)
    assert [record for record in caplog.records if record.name == advice.name] == []


def test_fake_tensors_take_real_ones_along() -> None:
    real = torch.ones(2)
    with internals.fake_tensor_mode() as mode:
        result = torch.empty(2) + real
        assert isinstance(mode.from_tensor(real), type(result))


def test_wrappers_give_their_module_back() -> None:
    inner = nn.Linear(2, 2)
    wrapper = internals.checkpoint_wrapper(inner)
    assert isinstance(wrapper, internals.ActivationWrapper)
    assert internals.wrapped_module(wrapper) is inner


def test_a_compiled_module_is_known() -> None:
    module = nn.Linear(2, 2)
    assert not internals.is_compiled(module)
    module.compile(backend="eager")
    assert internals.is_compiled(module)


def test_an_altered_tensor_is_another_one() -> None:
    tensor = torch.zeros(4)
    before = internals.tensor_identity(tensor)
    assert internals.tensor_identity(tensor[:]) == before
    assert internals.tensor_identity(tensor[1:]) != before
    tensor.add_(1)
    assert internals.tensor_identity(tensor) != before
    assert internals.view_base(tensor[1:]) is tensor


def test_operations_on_lists_of_tensors() -> None:
    tensors = [torch.zeros(2), torch.zeros(1)]
    internals.foreach_copy_(tensors, [torch.ones(2), torch.ones(1)])
    internals.foreach_add_(tensors, 1)
    internals.foreach_sub_(tensors, [torch.tensor(0.5)] * 2)
    internals.foreach_mul_(tensors, torch.tensor(2.0))
    internals.foreach_lerp_(tensors, [torch.ones(2), torch.ones(1)], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [2.0]]
    assert internals.foreach_norm(tensors, dtype=torch.float64)[1].dtype == torch.float64


def test_the_state_of_adamw_is_made_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    params, grads, means, squares, steps = internals.init_adamw_group(optimizer, optimizer.param_groups[0])
    assert params[0] is weight
    assert grads[0] is weight.grad
    assert means[0] is optimizer.state[weight]["exp_avg"]
    assert squares[0] is optimizer.state[weight]["exp_avg_sq"]
    assert steps[0] is optimizer.state[weight]["step"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "_flash_attention_forward",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale",
        ),
        (
            "_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state "
            "unused scale",
        ),
        (
            "_scaled_dot_product_cudnn_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
        ),
        (
            "_scaled_dot_product_cudnn_attention_backward",
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
            "max_k dropout_p is_causal scale",
        ),
    ],
)
def test_attention_kernels_take_the_arguments_that_are_passed(name: str, arguments: str) -> None:
    """By name and order alone: the kernels themselves need an accelerator, and are called in tests/gpu."""
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments][: len(arguments.split())] == arguments.split()


def test_pipeline_stages_are_built_on_methods_that_exist() -> None:
    from torch.distributed.pipelining import PipelineStage

    for stage_class in (internals.self_loop_stage(), internals.lone_stage()):
        assert issubclass(stage_class, PipelineStage)
    if torch.__version__ >= (2, 15):
        return  # nothing of the two is called any more
    if torch.__version__ >= (2, 13):  # stages greet nobody any more, and vote instead
        for method in ("_warmup_forward_vote", "_warmup_backward_result"):
            assert hasattr(PipelineStage, method)
    else:
        assert hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")


def test_the_order_of_a_schedule_is_read() -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    order = internals.schedule_actions(ScheduleInterleaved1F1B, [0, 2], 4, 2, 4)
    assert sorted(order) == [0, 1]
    assert str(next(action for action in order[1] if action is not None)) == "1F0"


def test_the_limit_of_compiled_forms_is_raised_and_not_lowered() -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=8):
        internals.raise_recompile_limit(64)
        internals.raise_recompile_limit(2)
        assert config.recompile_limit == 64


def test_ranges_of_a_recording() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        end = internals.open_range("a range")
        torch.ones(8).sum()
        end()
    event = next(event for event in recorded.events() if event.name == "a range")
    assert event.device_type.name == "CPU"
    for field in ("thread", "fwd_thread", "sequence_nr", "kernels", "flops", "is_async", "cpu_parent", "id"):
        assert field in vars(event)


def test_allocations_of_an_accelerator_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory, calls = torch.get_device_module("cuda").memory, []  # it can be imported without a device
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(memory, name, lambda argument, name=name: calls.append((name, argument)))
    internals.record_allocations(torch.device("cuda"), True)
    internals.dump_allocations(torch.device("cuda"), tmp_path / "memory.pickle")
    internals.record_allocations(torch.device("cuda"), False)
    expected = [("_record_memory_history", "all"), ("_dump_snapshot", str(tmp_path / "memory.pickle"))]
    assert calls == [*expected, ("_record_memory_history", None)]


def test_backward_is_noticed() -> None:
    seen: list[bool] = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda grad: seen.append(internals.inside_backward()))
    tensor.sum().backward()
    assert seen == [True]
    assert not internals.inside_backward()


def test_other_devices_have_neither_compiler_nor_fused_update() -> None:
    assert internals.generates_code("cpu")
    assert not internals.generates_code("privateuseone")
    assert not internals.has_fused_adamw()


def test_trees_and_dispatch_modes() -> None:
    names: list[str] = []

    class Names(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names():
        torch.ones(2).add_(1)
    assert "aten::add_.Tensor" in names
    assert internals.tree_leaves([1, {"a": (2, None)}])[:2] == [1, 2]
    assert internals.tree_map_only(int, str, [1, {"a": 2.0}]) == ["1", {"a": 2.0}]


def test_what_is_asked_of_a_class_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.Qwen2ForCausalLM
    settings = transformers.Qwen2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    module = internals.build_from_config(kind, copy.deepcopy(settings), torch.float32, "eager")
    assert isinstance(module, kind)
    assert internals.unsplit_modules(module) == {"Qwen2DecoderLayer"}
    assert hasattr(module, "_keys_to_ignore_on_load_unexpected")
    assert isinstance(internals.ignored_weight_patterns(module), tuple)
    assert internals.auto_class_mapping(transformers.AutoModelForCausalLM)[transformers.Qwen2Config] is kind
    assert internals.auto_class_mapping(kind) is None
    forward, backward, other = internals.weight_conversions(module)
    assert other is None
    assert all(callable(entry.rename_source_key) for entry in (*forward, *backward))


def test_every_entry_has_a_test() -> None:
    source = inspect.getsource(inspect.getmodule(test_every_entry_has_a_test))  # type: ignore[arg-type]
    entries = [
        name for name, value in vars(internals).items() if getattr(value, "__module__", "") == internals.__name__
    ]
    kernels = {name for name in entries if name.startswith(("flash_attention", "cudnn_attention"))}
    assert [name for name in {*entries, *internals.__all__} - kernels if f"internals.{name}" not in source] == []


def test_names_in_files_of_torch_exist() -> None:
    names = [value for name, value in vars(internals).items() if name.startswith(("SAVED_", "DCP_"))]
    assert len(names) == 7
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), name
