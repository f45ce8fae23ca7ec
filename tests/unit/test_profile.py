"""Where a step's time goes: planted costs are found where they were planted, and the window changes nothing else."""

from __future__ import annotations

import ast
import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import Interval
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.config.run_config import load_config
from tessera.core.callback import Callback, StepResult
from tessera.core.step_source import StepSource
from tessera.errors import TesseraError
from tessera.observe.profile import table as kinds
from tessera.observe.profile.marks import Marks
from tessera.observe.profile.table import TimeTable, WorkTime, make_table
from tessera.parallel.modules import apply_compile
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set

# ------------------------------------------------------------------------------------------ a module of known cost


class Layer(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attn(x))


class Blocks(nn.Module):
    """Its mlps cost 20 times what its attns cost."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(128, 1280) for _ in range(3))
        self.head = nn.Linear(128, 128, bias=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


BLOCKS = [f"layers.{number}" for number in range(3)]


def recorded(module: nn.Module) -> TimeTable:
    x = torch.randn(512, 128, requires_grad=True)
    module(x).square().sum().backward()
    recorder = profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True)
    recorder.start()
    marks = Marks(module, BLOCKS)
    for _ in range(2):
        marks.phase("running the model")
        module(x).square().sum().backward()
    marks.phase("updating weights")
    marks.close()
    recorder.stop()
    return make_table(recorder, 2, accelerated=False)


def share(table: TimeTable, name: str, direction: str) -> float:
    return table.modules.get((name, direction), WorkTime()).us / table.window_us


def test_time_belongs_to_the_module_that_took_it() -> None:
    account = recorded(Blocks())
    for direction in ("forward", "backward"):
        # The products of one are many times those of the other; on a busy machine times tell no more than that.
        assert share(account, "layers.*.mlp", direction) > share(account, "layers.*.attn", direction) > 0
        assert share(account, "head", direction) > 0
    assert sum(row.us for row in account.modules.values()) == pytest.approx(account.window_us, rel=0.02)
    assert sum(row.us for row in account.kinds.values()) == pytest.approx(account.window_us, rel=0.02)
    forward = 2 * 512 * 3 * 2 * 128 * 1280
    assert account.modules["layers.*.mlp", "forward"].flops == 2 * forward
    assert account.modules["layers.*.mlp", "backward"].flops == 2 * 2 * forward
    assert account.kinds[kinds.PRODUCTS].tflops is not None


def test_what_is_computed_again_is_told_apart() -> None:
    account = recorded(Blocks(recompute=True))
    assert share(account, "layers.*.mlp", "recompute") > share(account, "layers.*.attn", "recompute") > 0
    assert share(account, "layers.*.mlp", "backward") > share(account, "layers.*.attn", "backward")
    assert share(account, "head", "recompute") == 0


def test_compiled_blocks_keep_their_time_and_are_not_compiled_again() -> None:
    module = Blocks()
    apply_compile(module, BLOCKS, backend="aot_eager")
    calls = [module.get_submodule(path)._compiled_call_impl for path in BLOCKS]
    with torch._dynamo.config.patch(error_on_recompile=True):
        account = recorded(module)
    assert share(account, "layers.*", "forward") > 0.05
    assert share(account, "layers.*", "backward") > 0.05
    assert share(account, "layers.*.mlp", "forward") == 0
    assert [module.get_submodule(path)._compiled_call_impl for path in BLOCKS] == calls


def test_nothing_stays_behind() -> None:
    module = Blocks(recompute=True)
    recorded(module)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


# ------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def recipe_of(data: Path, out: Path, **profile_: Any) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=5, global_batch=2)
    recipe["data"] |= {"workers": 0, "eval": []}
    recipe["checkpoint"] = {"at_end": False}
    recipe["log"] = {"every": 1}
    return recipe | ({"profile": profile_} if profile_ else {})


class Slow(StepSource):
    """A step source that takes its time."""

    def __init__(self, source: StepSource, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def start(self, step: int, row: int) -> None:
        self.source.start(step, row)

    def next_step(self) -> Any:
        time.sleep(self.seconds)
        return self.source.next_step()

    def close(self) -> None:
        self.source.close()


class Plant(Callback):
    """From the second step on, loading or the optimizer is slow."""

    def __init__(self, where: str, seconds: float = 0.3) -> None:
        self.where, self.seconds = where, seconds

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step == 2 and self.where == "data":
            trainer.steps = Slow(trainer.steps, self.seconds)
        elif result.step == 2:
            trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(self.seconds))
        self.hooks = sum(len(part._forward_hooks) for part in trainer.module.modules())
        self.phase_listeners = len(trainer.phase_listeners)


def table(run: tessera.Run) -> dict[str, Any]:
    return dict(json.loads((run.folder / "profile" / "table.json").read_text()))


@pytest.mark.slow
def test_a_slow_loader_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant = Plant("data")
    run = tessera.train(recipe_of(data, tmp_path, steps=[3, 4]), callbacks=[plant])
    result = table(run)
    assert result["steps"] == [3, 4]
    assert result["modules"][0]["name"] == kinds.LOADING
    assert result["modules"][0]["ms"] > 290
    assert "%  data wait" in capsys.readouterr().err
    assert plant.hooks == plant.phase_listeners == 0  # after the window
    folder = run.folder / "profile"
    with gzip.open(folder / "trace.json.gz") as file:
        assert any("tessera::forward text.layers.0.attn" in str(e.get("name")) for e in json.load(file)["traceEvents"])
    assert "text.layers.*.attn" in (folder / "table.txt").read_text()


@pytest.mark.slow
def test_a_slow_optimizer_is_named(data: Path, tmp_path: Path) -> None:
    result = table(tessera.train(recipe_of(data, tmp_path, steps=[4, 4], memory=False), callbacks=[Plant("optimizer")]))
    assert result["modules"][0]["name"] == kinds.OPTIMIZER


def test_a_profiled_run_computes_the_same(data: Path, tmp_path: Path) -> None:
    runs = [
        tessera.train(recipe_of(data, tmp_path / "plain")),
        tessera.train(recipe_of(data, tmp_path / "profiled", steps=[2, 3])),
    ]
    first, second = ([(r["loss"], r["grad_norm"]) for r in run.metrics if r["kind"] == "train"] for run in runs)
    assert first == second
    assert not (runs[0].folder / "profile").exists()


def two_ranks(rank: int, world: int, recipe: dict[str, Any]) -> None:
    tessera.train(recipe)


@pytest.mark.slow
def test_ranks_record_their_own(data: Path, tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, recipe_of(data, tmp_path, steps=[3, 4], ranks=[0, 1]))
    for folder, rank in ((tmp_path / "chat" / "profile", 0), (tmp_path / "chat" / "profile" / "rank-1", 1)):
        result = json.loads((folder / "table.json").read_text())
        assert (result["rank"], result["ranks"]) == (rank, 2)
        rows = {(row["name"], row["direction"]): row["ms"] for row in result["modules"]}
        assert "collectives" in {row["name"] for row in result["kinds"]}
        assert rows["text.layers.*.attn", "forward"] > 0
        assert rows["text.layers.*.attn", "backward"] > 0


def test_steps_and_ranks_that_do_not_exist(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match=r"profile.steps begins with step 9"):
        load_config(recipe_of(data, tmp_path, steps=[9, 10]))
    with pytest.raises(TesseraError, match="first step and the last"):
        load_config(recipe_of(data, tmp_path, steps=[3, 2]))
    with pytest.raises(TesseraError, match="rank 4 cannot be profiled"):
        tessera.train(recipe_of(data, tmp_path, steps=[1, 2], ranks=[4]))


# ------------------------------------------------------------------------------------------ an accelerator


class Recorded:
    """Events of a recording, as torch's profiler returns them."""

    def __init__(self, *events: Any) -> None:
        self._events = list(events)

    def events(self) -> list[Any]:
        return self._events


def event(name: str, start: float, end: float, number: int = 0, **more: Any) -> Any:
    fields = {"thread": 1, "fwd_thread": None, "sequence_nr": -1, "kernels": [], "flops": 0, "is_async": False}
    fields |= {"cpu_parent": None, "device_type": SimpleNamespace(name="CPU"), **more}
    return SimpleNamespace(name=name, id=number, time_range=Interval(start, end), **fields)


def kernel(name: str, start: float, end: float) -> tuple[Any, Any]:
    """A kernel beside the operation that launched it, and on the device."""
    on_device = event(name, start, end, device_type=SimpleNamespace(name="CUDA"))
    return SimpleNamespace(name=name, duration=end - start), on_device


def test_kernels_belong_to_the_module_that_launched_them_and_the_rest_is_idle() -> None:
    product, first = kernel("nvjet_sm90_gemm", 130, 180)
    gradient, second = kernel("nvjet_sm90_gemm", 220, 300)
    update, third = kernel("multi_tensor_apply_kernel", 420, 430)
    running = event("tessera::phase running the model", 100, 400, 2)
    layer = event("tessera::forward text.layers.3.mlp", 110, 150, 3, cpu_parent=running)
    optimizer = event("tessera::phase updating weights", 400, 500, 8)
    backward = "autograd::engine::evaluate_function: MmBackward0"
    node = event(backward, 200, 260, 5, thread=9, sequence_nr=7, fwd_thread=1)
    table = make_table(
        Recorded(  # type: ignore[arg-type]
            event("tessera::phase loading data", 0, 100, 1),
            running,
            layer,
            event("aten::mm", 120, 130, 4, cpu_parent=layer, sequence_nr=7, kernels=[product], flops=10),
            node,
            event("aten::mm", 210, 220, 6, thread=9, cpu_parent=node, kernels=[gradient]),
            optimizer,
            event("aten::_fused_adamw_", 410, 415, 9, cpu_parent=optimizer, kernels=[update]),
            *(first, second, third),
        ),
        1,
        accelerated=True,
    )
    assert {row: time.us for row, time in table.modules.items() if time.us} == {
        ("text.layers.*.mlp", "forward"): 50,
        ("text.layers.*.mlp", "backward"): 80,
        ("optimizer", ""): 10,
        ("device idle", ""): 360,
        ("data wait", ""): 100,
    }
    assert {kind: time.us for kind, time in table.kinds.items()} == {kinds.PRODUCTS: 130, kinds.POINTWISE: 10}
    assert table.kinds[kinds.PRODUCTS].tflops == pytest.approx(10 / 50 / 1e6)
    assert "text.layers.*.mlp  backward" in table.as_text("a run")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", kinds.PRODUCTS),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128>>", kinds.ATTENTION),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", kinds.POINTWISE),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>", kinds.REDUCTIONS),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel>", kinds.COPIES),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>", kinds.POINTWISE),
        ("Memcpy HtoD (Pageable -> Device)", kinds.TRANSFERS),
        ("Memcpy DtoD (Device -> Device)", kinds.COPIES),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", kinds.COLLECTIVES),
        ("something_of_its_own", kinds.OTHER),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kinds.kind_of(name) == kind


def test_kernels_of_our_own_have_a_kind() -> None:
    """By the names that a trace shows: of functions that are launched, which do not begin with an underscore."""
    kinds_by_name: dict[str, str] = {}
    for path in Path(tessera.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
                kinds_by_name |= {} if node.name.startswith("_") else {node.name: kinds.kind_of(node.name)}
    assert kinds.OTHER not in kinds_by_name.values()
    assert {kind for name, kind in kinds_by_name.items() if "attention" in name} == {kinds.ATTENTION}
