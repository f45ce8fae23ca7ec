"""The surface of Megatron: what is served, what is refused and why, random streams, orders of passes, checkpoints."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tessera.cli.main import main
from tessera.errors import TesseraError
from tessera_compat import run, state
from tessera_compat.megatron import dist_checkpointing, parallel_state
from tessera_compat.megatron.config import HINTS, REFUSED, REFUSED_BEGINNINGS, TransformerConfig, layer_counts
from tessera_compat.megatron.datasets import GPTDatasetConfig, MockGPTDataset, _NullTokenizer
from tessera_compat.megatron.distributed import DistributedDataParallelConfig
from tessera_compat.megatron.gpt_model import GPTModel, get_gpt_layer_local_spec
from tessera_compat.megatron.mappings import vocab_parallel_cross_entropy
from tessera_compat.megatron.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from tessera_compat.megatron.schedules import Pass, interleaved, one_forward_one_backward
from tessera_compat.megatron.sharding import LocalNonpersistentObject, ShardedObject, ShardedTensor
from tessera_compat.mindspeed_mm.classes import ModelHub
from tessera_compat.mindspeed_mm.migrate import lay_out
from tessera_compat.served import ROOTS, SERVED, packages, serving, source_parts
from tests.close import assert_as_close
from tests.errors import raises

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    state.destroy()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------- imports


def test_every_served_name_exists() -> None:
    for module, sources in SERVED.items():
        for source in sources:
            name, wanted = source_parts(source)
            ours = vars(importlib.import_module(name))
            assert not [one for one in wanted or () if one not in ours], f"{module}: {source}"


def test_the_page_names_everything_that_is_served_and_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "compat-megatron.md").read_text(encoding="utf-8")
    assert sorted(SERVED) == sorted(re.findall(r"^- `([\w.]+)`$", page, re.MULTILINE))
    for name, reason in {**HINTS, **REFUSED, **REFUSED_BEGINNINGS}.items():
        assert f"| `{name}` | {reason} |" in page


def test_served_modules_are_imported_in_every_way_and_only_inside() -> None:
    with serving():
        import megatron.core  # type: ignore[import-not-found]
        from megatron.core import mpu, tensor_parallel  # type: ignore[import-not-found]

        assert megatron.core.parallel_state.get_tensor_model_parallel_rank is mpu.get_tensor_model_parallel_rank
        assert tensor_parallel.layers.ColumnParallelLinear is tensor_parallel.ColumnParallelLinear
        assert "megatron.core" in packages()
        with pytest.raises(ImportError, match=r"megatron\.core\.inference is not offered"):
            importlib.import_module("megatron.core.inference")
        with pytest.raises(AttributeError, match="did you mean get_model_config"):
            importlib.import_module("megatron.core.utils").get_model_konfig  # noqa: B018
    assert "megatron" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron")


def test_an_installed_package_is_not_shadowed_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(run.log.logger(), "propagate", True)
    with serving():
        pass
    assert "megatron is installed" in caplog.text
    importlib.import_module("megatron")
    with raises("megatron.already-imported"), serving():
        pass
    del sys.modules["megatron"]


def test_scripts_that_cannot_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from megatron.core import nothing_like_this", encoding="utf-8")
    with raises("megatron.import-not-served", "train.py"):
        run.run_script(tmp_path / "train.py")
    with raises("job.script-missing", "train.py"):
        run.run_script(tmp_path / "trian.py")
    (tmp_path / "fails.py").write_text("import not_a_module_at_all", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="not_a_module_at_all"):
        run.run_script(tmp_path / "fails.py")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("", None),
        ("raise RuntimeError('mine')", RuntimeError),
        ("import sys; sys.exit(3)", SystemExit),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
        ("import megatron.nothing", TesseraError),
    ],
)
def test_nothing_is_left_however_a_script_ends(tmp_path: Path, end: str, error: type[BaseException] | None) -> None:
    """Twice in one process: the second run finds what the first one found."""

    def ambient_state() -> tuple[object, ...]:
        ours = [name for name in sys.modules if name.split(".")[0] in ROOTS]
        return [*sys.meta_path], [*sys.path], [*sys.argv], dict(os.environ), ours, torch.Tensor.cuda, state.HOLDER.state

    script = tmp_path / "train.py"
    joins = "torch.distributed.init_process_group('gloo')\nparallel_state.initialize_model_parallel()\n"
    script.write_text(f"import torch\nfrom megatron.core import parallel_state\n{joins}{end}\n", encoding="utf-8")
    before = ambient_state()
    for _ in range(2):
        with pytest.raises(error) if error else nullcontext():
            run.run_script(script)
        assert ambient_state() == before
        assert not dist.is_initialized()


def test_files_of_the_user_below_mindspeed_mm_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seed 000 puts a class into mindspeed_mm/models/ and names it in modelzoo.py; an edited copy of a served file is
    left alone, and said to be."""
    monkeypatch.setattr(ModelHub, "MODEL_MAPPINGS", {})
    monkeypatch.setattr(run.log.logger(), "propagate", True)
    caplog.set_level("INFO")
    files = {
        "models/transformers/internvl3_5.py": "from mindspeed_mm.models.transformers.base_model import FSDP2Mixin\n"
        "from mindspeed_mm.mine.parts import NAME\nclass Chat(FSDP2Mixin):\n    name = NAME\n",
        "models/common/modelzoo.py": "from mindspeed_mm.models.transformers.internvl3_5 import Chat\n"
        "class ModelHub:\n    MODEL_MAPPINGS = {'internvl': Chat}\n",
        "mine/parts.py": "NAME = 'mine'\n",
        "training.py": "raise RuntimeError('the original needs Megatron')\n",
    }
    for name, text in files.items():
        (tmp_path / "mindspeed_mm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mindspeed_mm" / name).write_text(text, encoding="utf-8")
    names = ("training import pretrain", "models.transformers_model import TransformersModel", "mine import parts")
    script = "".join(f"from mindspeed_mm.{name}\n" for name in names)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    assert run.run_script(tmp_path / "train.py")["parts"].NAME == "mine"  # type: ignore[attr-defined]
    assert ModelHub.MODEL_MAPPINGS["internvl"].name == "mine"
    assert f"{tmp_path / 'mindspeed_mm' / 'training.py'} is not read" in caplog.text
    assert "installed" not in caplog.text


def test_the_packages_of_a_workspace_serve_a_script_that_plain_python_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python puts the folder of the script first on its path; what is served stays until the process ends."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(run.atexit, "register", at_exit.append)
    lay_out(tmp_path)
    (tmp_path / "mindspeed_mm" / "mine.py").write_text("from megatron.core import mpu\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for first in ("mindspeed.megatron_adaptor", "megatron.core", "mindspeed_mm.training"):
        importlib.import_module(first)
        try:
            mine = importlib.import_module("mindspeed_mm.mine")
            assert mine.mpu is importlib.import_module("megatron.core.mpu")
            assert torch.zeros(1, device="cuda").device.type == torch.get_default_device().type
        finally:
            at_exit.pop()()
            state.destroy()
        assert "megatron" not in sys.modules


def test_modules_of_mindspeed_mm_are_refused_with_the_reason() -> None:
    with serving():
        for name in ("dummy_optimizer_patch", "ring_attn_patch", "ulysses_patches", "meta_device_patches"):
            importlib.import_module(f"mindspeed_mm.patchs.{name}")
        with pytest.raises(ImportError, match=r"profiling is configured"):
            importlib.import_module("mindspeed_mm.tools.profiler")
        with pytest.raises(ImportError, match="--ai-framework mindspore"):
            importlib.import_module("mindspeed_mm.mindspore.mindspore_adaptor")


def test_the_command_asks_as_what_a_script_should_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom megatron.core import mpu\nprint(sys.argv[1:], mpu.is_initialized())")
    monkeypatch.setattr(sys, "argv", ["tessera", "run", str(script)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "tessera run --as-megatron" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tessera", "run", "--as-megatron", str(script), "--lr", "0.1", "name"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == "['--lr', '0.1', 'name'] False\n"


def test_words_for_absent_devices_mean_the_one_that_is_there(tmp_path: Path) -> None:
    script = tmp_path / "places.py"
    script.write_text(
        "import sys, torch\n"
        "torch.cuda.set_device(0)\n"
        "made = torch.zeros(2, device='cuda'), torch.ones(2).cuda(), torch.ones(2).to(torch.device('cuda', 0))\n"
        "kinds = {x.device.type for x in made} | {p.device.type for p in torch.nn.Linear(2, 2).cuda().parameters()}\n"
        "torch.cuda.synchronize(); number = torch.cuda.current_device()\n"
        "torch.distributed.init_process_group('nccl')\n"
        "words = sys.argv[1:]\n",
        encoding="utf-8",
    )
    names = run.run_script(script, ["--flag", "x"])
    assert names["kinds"] == {
        torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    }
    assert (names["number"], names["words"]) == (0, ["--flag", "x"])
    assert not dist.is_initialized()


# ---------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"hiden_size": 4}, "megatron.unknown-field hiden_size hidden_size"),
        ({"num_layers": 0}, "megatron.unsupported-field num_layers=0"),
        ({"fp16": True, "bf16": True}, "megatron.unsupported-field"),
        ({"tensor_model_parallel_size": 4}, "megatron.unsupported-field num_attention_heads=2"),
        ({"sequence_parallel": True}, "megatron.unsupported-field"),
        ({"pipeline_model_parallel_size": 2}, "megatron.unsupported-field pipeline_dtype"),
        ({"num_moe_experts": 4}, "megatron.unsupported-field"),
        ({"fp8": "e4m3"}, "megatron.unsupported-field fp8"),
        ({"moe_router_topk": 2}, "megatron.unsupported-field moe_router_topk"),
        ({"recompute_granularity": "full"}, "megatron.unsupported-field"),
        ({"normalization": "GroupNorm"}, "megatron.unsupported-field LayerNorm"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(fields: dict[str, Any], error: str) -> None:
    with raises(error):
        TransformerConfig(**{**SMALL, **fields})


def test_layers_are_counted_by_stage_and_chunk() -> None:
    config = TransformerConfig(**{**SMALL, "num_layers": 8})
    assert layer_counts(config, 4, 1) == [[2]] * 4
    assert layer_counts(config, 2, 2) == [[2, 2], [2, 2]]
    uneven = TransformerConfig(**{**SMALL, "num_layers": 7}, num_layers_in_first_pipeline_stage=1)
    assert layer_counts(uneven, 4, 1) == [[1], [2], [2], [2]]
    padded = TransformerConfig(
        **{**SMALL, "num_layers": 6},
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert layer_counts(padded, 4, 1) == [[1], [2], [2], [1]]
    with raises("megatron.unsupported-field"):
        layer_counts(config, 3, 1)


def test_ranks_are_grouped_with_tensor_parallelism_fastest() -> None:
    sizes = {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 2}
    order = ("tp", "cp", "ep", "dp", "pp")
    assert parallel_state.rank_groups(8, sizes, order, ["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parallel_state.rank_groups(8, sizes, order, ["pp"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert parallel_state.rank_groups(8, sizes, order, ["dp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    other = ("tp", "pp", "dp", "cp", "ep")
    assert parallel_state.rank_groups(8, sizes, other, ["pp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_groups_that_cannot_be_made_are_refused(alone: None) -> None:
    parallel_state.destroy_model_parallel()
    for arguments, message in (
        ({"tensor_model_parallel_size": 2}, "megatron.rank-count"),
        ({"order": "tp-tp-dp"}, "megatron.axis-order"),
        ({"virtual_pipeline_model_parallel_size": 2}, "megatron.interleaved-stages"),
        ({"encoder_tensor_model_parallel_size": 1}, "megatron.unsupported-argument"),
    ):
        with raises(message):
            parallel_state.initialize_model_parallel(**arguments)  # type: ignore[arg-type]
    with raises("megatron.not-initialized"):
        parallel_state.get_tensor_model_parallel_rank()
    with raises("megatron.unsupported-field", "use_distributed_optimizer"):
        DistributedDataParallelConfig(use_distributed_optimizer=True)


# ---------------------------------------------------------------------------------------------------- computation


def test_random_streams_are_kept_apart_and_recompute_draws_the_same(alone: None) -> None:
    model_parallel_cuda_manual_seed(3)
    tracker = get_cuda_rng_tracker()
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork():
        second = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    model_parallel_cuda_manual_seed(3)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), first)
    with raises("megatron.random-stream-missing", "model-parallel-rng"), tracker.fork("model-paralel-rng"):
        pass

    def noisy(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            noise = torch.rand(4)
        drawn.append(noise)
        return x * noise * torch.nn.functional.dropout(x, 0.5)

    drawn: list[torch.Tensor] = []
    x = torch.ones(4, requires_grad=True)
    checkpoint(noisy, False, x).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy(alone: None, smoothing: float) -> None:
    logits = torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(1))
    results = []
    for dtype in (torch.float32, torch.float64):
        x = logits.detach().clone().to(dtype).requires_grad_()
        # Of the other classes each has smoothing / (V - 1) there, of all classes smoothing / V here.
        peer = torch.nn.functional.cross_entropy(
            x.flatten(0, 1), labels.flatten(), label_smoothing=smoothing * 17 / 16, reduction="none"
        )
        peer.sum().backward()
        results.append((peer.detach().view(3, 5), x.grad))
    x = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(x, labels, smoothing)
    loss.sum().backward()
    assert_as_close(loss.detach(), results[0][0], results[1][0])
    assert x.grad is not None
    assert_as_close(x.grad, results[0][1], results[1][1])
    with raises("megatron.ids-outside-vocabulary"):
        vocab_parallel_cross_entropy(x, labels + 17)


@pytest.mark.parametrize("recompute", [("selective", None, None), ("full", "uniform", 2), ("full", "block", 1)])
def test_recompute_changes_no_gradient(alone: None, recompute: tuple[str, str | None, int | None]) -> None:
    grads = []
    for granularity, method, layers in ((None, None, None), recompute):
        config = TransformerConfig(
            **SMALL,
            use_cpu_initialization=True,
            recompute_granularity=granularity,
            recompute_method=method,
            recompute_num_layers=layers,
        )
        torch.manual_seed(1)
        model = GPTModel(config, get_gpt_layer_local_spec(), 16, 8)
        model_parallel_cuda_manual_seed(1)
        tokens = torch.arange(8)[None]
        model(tokens, tokens, None, labels=tokens).sum().backward()
        grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    assert torch.equal(grads[0], grads[1])


def test_tokens_outside_the_vocabulary_are_named(alone: None) -> None:
    model = GPTModel(TransformerConfig(**SMALL), get_gpt_layer_local_spec(), 16, 8)
    with raises("megatron.ids-outside-vocabulary", "16"):
        model(torch.full((1, 8), 16), torch.arange(8)[None], None)


# ---------------------------------------------------------------------------------------------------- schedules


def finishes(orders: list[list[Pass]], chunks: int) -> bool:
    """Run all ranks, each in its order, with messages that arrive in the order of sending; say whether all end."""
    stages = len(orders)
    at = [0] * stages
    channels: dict[tuple[str, int], list[tuple[int, int]]] = {}
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            kind, number, chunk = order[at[stage]]
            depth, last = chunk * stages + stage, chunks * stages - 1
            source = depth - 1 if kind == "forward" else depth + 1
            if 0 <= source <= last:
                waiting = channels.get((kind, stage), [])
                if not waiting:
                    continue
                assert waiting.pop(0) == (number, source), "another message stands first"
            target = depth + 1 if kind == "forward" else depth - 1
            if 0 <= target <= last:
                channels.setdefault((kind, target % stages), []).append((number, depth))
            at[stage] += 1
            moved = True
    return all(place == len(order) for place, order in zip(at, orders, strict=True))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_no_schedule_waits_for_ever(stages: int) -> None:
    for microbatches in (1, 2, stages, 3 * stages + 1):
        orders = [one_forward_one_backward(microbatches, stage, stages) for stage in range(stages)]
        assert finishes(orders, 1)
        assert max(_in_flight(order) for order in orders) <= min(stages, microbatches)
    for chunks in (2, 3):
        for group in (stages, stages + 1, 2 * stages):
            for microbatches in (group, 2 * group, 2 * group + stages):
                orders = [interleaved(microbatches, chunks, group, stage, stages) for stage in range(stages)]
                assert finishes(orders, chunks)


def _in_flight(order: list[Pass]) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    in_flight = most = 0
    for kind, _, _ in order:
        in_flight += 1 if kind == "forward" else -1
        most = max(most, in_flight)
    return most


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_hold_tensors_objects_and_values(tmp_path: Path) -> None:
    local = object()
    state_dict = {
        "model": {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0).view(2, 3))},
        "list": [1, {"rate": 0.5}],
        "seen": torch.tensor([3]),
        "meter": ShardedObject("meter", {"a": 1}),
        "here": LocalNonpersistentObject(local),
    }
    dist_checkpointing.save(state_dict, tmp_path / "c")
    loaded = dist_checkpointing.load(state_dict, tmp_path / "c")
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0).view(2, 3))
    assert (loaded["list"], loaded["meter"], loaded["here"]) == ([1, {"rate": 0.5}], {"a": 1}, local)
    assert torch.equal(loaded["seen"], torch.tensor([3]))
    assert dist_checkpointing.load_tensors_metadata(tmp_path / "c")["w"].global_shape == (2, 3)
    dist_checkpointing.verify(tmp_path / "c")
    with raises("megatron.save-folder-not-empty"):
        dist_checkpointing.save(state_dict, tmp_path / "c")


def test_half_written_changed_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    state_dict = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    with raises("megatron.no-checkpoint"):
        dist_checkpointing.load(state_dict, tmp_path)
    with raises("megatron.shards-incomplete"):
        dist_checkpointing.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))}, tmp_path / "half"
        )
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "half")
    with raises("megatron.state-not-json"):
        dist_checkpointing.save({"f": print}, tmp_path / "function")
    dist_checkpointing.save(state_dict, tmp_path / "c")
    for other, message in (
        ({"v": ShardedTensor.from_rank_offsets("v", torch.ones(2))}, "megatron.checkpoint-key-missing"),
        ({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, "megatron.checkpoint-shape"),
    ):
        with raises(message):
            dist_checkpointing.load(other, tmp_path / "c")
    metadata = json.loads((tmp_path / "c/metadata.json").read_text())
    for key, value in (("files", 3), ("files", [{}]), ("tensors", {"w": {"shape": [2], "parts": [7]}}), ("tensors", 1)):
        shutil.copytree(tmp_path / "c", tmp_path / "odd")
        (tmp_path / "odd/metadata.json").write_text(json.dumps(metadata | {key: value}))
        with raises("environment.wrong-value-in-file", "metadata.json"):
            dist_checkpointing.load(state_dict, tmp_path / "odd")
        shutil.rmtree(tmp_path / "odd")
    file = tmp_path / "c" / "rank-00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(bytes(damaged))
    with raises("megatron.checkpoint-file-changed"):
        dist_checkpointing.verify(tmp_path / "c")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}), encoding="utf-8")
    with raises("megatron.checkpoint-format"):
        dist_checkpointing.load(state_dict, tmp_path / "theirs")


# ---------------------------------------------------------------------------------------------------- data


def test_mock_documents_count_and_end() -> None:
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=4096,
        tokenizer=_NullTokenizer(64),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    samples = MockGPTDataset(range(1000), 3, config)
    assert len(samples) == 3
    sample = samples[1]
    tokens, ends = sample["tokens"], sample["tokens"] == 64
    assert int(ends.sum()) > 0
    assert set(tokens.tolist()) <= set(range(1, 65))
    assert torch.equal(sample["loss_mask"] == 0, ends)
    after = int(ends.nonzero()[0]) + 1
    assert int(tokens[after]) == 1
    assert int(sample["position_ids"][after]) == 0
    assert bool(sample["attention_mask"][0, after, after - 1])  # hidden: another document
    assert torch.equal(samples[1]["tokens"], MockGPTDataset(range(1000), 3, config)[1]["tokens"])
    with raises("megatron.indexed-dataset", ".bin", ".idx"):
        GPTDatasetConfig(sequence_length=8, blend=(["corpus"], None))
