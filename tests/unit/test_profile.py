"""Where a step's time goes: planted costs are found where they were planted, and the window changes nothing else."""

from __future__ import annotations

import ast
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.config.run_config import load_config
from tessera.core.callback import Callback, StepResult
from tessera.errors import TesseraError
from tessera.observe.profile import account as kinds
from tessera.observe.profile import memory
from tessera.observe.profile.account import Account, Owned, WorkOwner, WorkTime, add_up, find_owners, make_account
from tessera.observe.profile.recording import Allocation, DeviceEvent, HostEvent, Marks, Recording, read
from tessera.observe.profile.summary import Case, advise
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


def recorded(module: nn.Module) -> Account:
    x = torch.randn(512, 128, requires_grad=True)
    module(x).square().sum().backward()
    recorder = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    recorder.start()
    marks = Marks(module, BLOCKS)
    for _ in range(2):
        marks.phase("running the model")
        module(x).square().sum().backward()
    marks.phase("updating weights")
    marks.close()
    recorder.stop()
    recording = read(recorder, torch.device("cpu"), memory=False)
    return make_account(recording, find_owners(recording.host), 2, accelerated=False)


def share(account: Account, name: str, direction: str) -> float:
    return account.share(account.owners.get(WorkOwner(name, direction), WorkTime()))  # type: ignore[arg-type]


def test_time_belongs_to_the_module_that_took_it() -> None:
    account = recorded(Blocks())
    for direction in ("forward", "backward"):
        # The products of one are many times those of the other; on a busy machine times tell no more than that.
        assert share(account, "layers.*.mlp", direction) > share(account, "layers.*.attn", direction) > 0
        assert share(account, "head", direction) > 0
    assert sum(row.ns for row in account.owners.values()) == pytest.approx(account.window_ns, rel=0.01)
    assert sum(row.ns for row in account.kinds.values()) == pytest.approx(account.window_ns, rel=0.01)
    forward = 2 * 512 * 3 * 2 * 128 * 1280
    assert account.owners[WorkOwner("layers.*.mlp", "forward")].flops == 2 * forward
    assert account.owners[WorkOwner("layers.*.mlp", "backward")].flops == 2 * 2 * forward
    assert account.kinds[kinds.PRODUCTS].rate is not None


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


class Slow:
    """A loader that takes its time."""

    def __init__(self, loader: Any, seconds: float) -> None:
        self.loader, self.seconds = loader, seconds

    def __next__(self) -> Any:
        time.sleep(self.seconds)
        return next(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Plant(Callback):
    """From the second step on, loading or the optimizer is slow."""

    def __init__(self, where: str, seconds: float = 0.3) -> None:
        self.where, self.seconds = where, seconds

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step == 2 and self.where == "data":
            trainer.loader = Slow(trainer.loader, self.seconds)
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
    assert re.match(r"waiting for data \d\d%: .*data\.workers=auto", result["verdict"][0])
    assert result["verdict"][0] in capsys.readouterr().err
    assert plant.hooks == plant.phase_listeners == 0  # after the window
    folder = run.folder / "profile"
    with gzip.open(folder / "trace.json.gz") as file:
        assert any("tessera::forward text.layers.0.attn" in str(e.get("name")) for e in json.load(file)["traceEvents"])
    assert "text.layers.*.attn" in (folder / "table.txt").read_text()
    assert "<polyline" in (folder / "memory.html").read_text()
    rows = (folder / "memory.csv").read_text().splitlines()
    assert {row.split(",")[2] for row in rows[1:]} >= {"forward", "backward", "optimizer"}
    assert {"weights", "optimizer state"} <= {one["name"] for one in result["memory"]["used_by"]}


@pytest.mark.slow
def test_a_slow_optimizer_is_named(data: Path, tmp_path: Path) -> None:
    result = table(tessera.train(recipe_of(data, tmp_path, steps=[4, 4], memory=False), callbacks=[Plant("optimizer")]))
    assert result["modules"][0]["name"] == kinds.OPTIMIZER
    assert result["verdict"][0].startswith("optimizer ")
    assert "memory" not in result


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
        assert rows["communication", ""] > 0
        assert rows["text.layers.*.attn", "forward"] > 0
        assert rows["text.layers.*.attn", "backward"] > 0


def test_steps_and_ranks_that_do_not_exist(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match=r"profile.steps begins with step 9"):
        load_config(recipe_of(data, tmp_path, steps=[9, 10]))
    with pytest.raises(TesseraError, match="first step and the last"):
        load_config(recipe_of(data, tmp_path, steps=[3, 2]))
    with pytest.raises(TesseraError, match="rank 4 cannot be profiled"):
        tessera.train(recipe_of(data, tmp_path, steps=[1, 2], ranks=[4]))


# ------------------------------------------------------------------------------------------ an accelerator's account


def host(name: str, start: int, end: int, number: int, *, thread: int = 1, made: int = -1, of: int = 0) -> HostEvent:
    return HostEvent(name, thread, start, end, number, made, of, [[64, 64], [64, 64]] if name == "aten::mm" else [])


def device_account() -> tuple[Recording, Owned, Account]:
    """Data until 100, a product forward, its backward on another thread, a collective half hidden, a copy."""
    hosts = [
        host("tessera::phase loading data", 0, 100, 1),
        host("tessera::phase running the model", 100, 400, 2),
        host("tessera::forward text.layers.3.mlp", 110, 150, 3),
        host("aten::mm", 120, 130, 4, made=7),
        host("autograd::engine::evaluate_function: MmBackward0", 200, 260, 5, thread=9, made=7, of=1),
        host("aten::mm", 210, 220, 6, thread=9),
        host("tessera::phase updating weights", 400, 500, 8),
    ]
    kernels = [
        DeviceEvent("nvjet_sm90_gemm", 130, 180, 4),
        DeviceEvent("nvjet_sm90_gemm", 220, 300, 6),
        DeviceEvent("ncclDevKernel_AllGather", 260, 340, 0),
        DeviceEvent("Memcpy HtoD (Pinned -> Device)", 340, 350, 0),
        DeviceEvent("Memset (Device)", 345, 345, 0),
    ]
    recording = Recording(hosts, kernels, waits=0)
    owned = find_owners(hosts)
    return recording, owned, make_account(recording, owned, 1, accelerated=True)


def test_computation_hides_what_runs_beside_it_and_idle_time_has_a_reason() -> None:
    _, _, account = device_account()
    found = {str(owner): row.ns for owner, row in account.owners.items() if row.ns}
    assert found == {
        "text.layers.*.mlp, forward": 50,
        "text.layers.*.mlp, backward": 80,
        "communication": 40,
        "host-device copies": 10,
        "data wait": 100,
        "device idle": 220,
    }
    assert sum(found.values()) == account.window_ns == 500
    assert account.hidden_collectives_ns == 40
    assert account.idle_while[WorkOwner("text.layers.*.mlp", "backward")] == 20  # the thread that the step waits for
    assert account.idle_while[WorkOwner("optimizer")] == 100
    assert account.kinds[kinds.PRODUCTS].rate == pytest.approx(2 * 2 * 64**3 / 130e-9)


def test_sentences_say_what_bounds_the_step() -> None:
    _, _, account = device_account()
    config = load_config({"model": {"family": "qwen2_vl"}, "train": {"steps": 20}, "data": {"workers": 2}})
    account.launches = 12_000
    said = advise(Case(account, config, 10, peak_flops=1e13))
    assert said[0].startswith("the device was idle 44% of the time")
    assert "12,000 kernels a step" in said[0]
    assert "parallel.compile=true" in said[0]
    assert said[1].startswith("waiting for data 20%: raise data.workers (now 2)")
    assert said[2].startswith("communication not hidden 8%")
    assert said[-1] == "of what was computed, most time went to text.layers.*.mlp: 26% (backward 16%, forward 10%)"
    good = Account(1, True, 100)
    good.kinds[kinds.PRODUCTS] = WorkTime(71, 1, flops=620, product_ns=1)
    (first, _) = advise(Case(good, config, 10, peak_flops=1e12))
    assert first.startswith("matrix products and attention 71%")
    assert "0.62 of the stated peak: this is near what the device can do" in first


def test_what_used_memory_at_its_peak_is_named() -> None:
    recording, owned, _ = device_account()
    allocations = [
        Allocation(122, 1, 100, 1100, 4),
        Allocation(212, 2, 60, 1160, 6),
        Allocation(215, 99, -200, 960, 6),  # from before the window
        Allocation(250, 1, -100, 860, 5),
        Allocation(410, 3, 50, 910, 8),
    ]
    recording = Recording(recording.host, recording.device, allocations)
    line = memory.replay(recording, owned, {"weights": 700}, accelerated=True)
    assert line is not None
    assert (line.peak, line.peak_phase) == (1160, "backward")
    assert dict(line.users) == {
        "weights": 700,
        memory.BEFORE: 300,
        "text.layers.*.mlp, forward": 100,
        "text.layers.*.mlp, backward": 60,
    }
    assert [span.name for span in line.spans] == ["data", "forward", "backward", "optimizer"]


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


def test_rows_add_up() -> None:
    assert add_up([WorkTime(1, 2, 3, 4), WorkTime(1, 1, 1, 1)]) == WorkTime(2, 3, 4, 5)


def test_kernels_of_our_own_have_a_kind() -> None:
    """By the names that a trace shows: of functions that are launched, which do not begin with an underscore."""
    found: dict[str, str] = {}
    for path in Path(tessera.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
                found |= {} if node.name.startswith("_") else {node.name: kinds.kind_of(node.name)}
    assert kinds.OTHER not in found.values()
    assert {kind for name, kind in found.items() if "attention" in name} == {kinds.ATTENTION}
