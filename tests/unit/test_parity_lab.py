"""The parity lab: recordings, their files, shards that are put together, and what counts as a difference."""

from __future__ import annotations

import copy
import csv
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.findings import Comparison
from tessera.evaluation.parity.recorder import Budget, moved_weights, record_call
from tessera.evaluation.parity.recording import RankRecord, Recording, TensorEntry, read_recording, write_recording
from tessera.evaluation.parity.results import lines, write_results
from tessera.parallel.sequence_sharding import SequenceSharding
from tessera.runtime.scratch import scratch_folder
from tessera.tools.parity.bisect import _first
from tessera.tools.parity.lab import parity
from tessera.tools.parity.runs import parse_steps, record
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(torch.tanh(self.first(x))))
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x))
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


INPUTS = torch.randn(32, 24, generator=torch.Generator().manual_seed(1))


def recording(module: nn.Module, label: str = "net", inputs: Tensor = INPUTS, **options: object) -> Recording:
    record = record_call(module, lambda model: model(inputs), **options)  # type: ignore[arg-type]
    return Recording(label, [record])


@pytest.fixture(scope="module")
def reference() -> Recording:
    return recording(net())


def first_of(a: Recording, b: Recording) -> tuple[str, str] | None:
    finding = compare_recordings(a, b).first
    return None if finding is None else (finding.phase, finding.name)


# ---------------------------------------------------------------------------------------------- what differs


def test_the_same_model_does_not_differ(reference: Recording) -> None:
    assert first_of(reference, recording(net())) is None


def test_another_order_of_additions_does_not_differ(reference: Recording) -> None:
    """A permutation of hidden units adds the same products in another order."""
    other = net()
    with torch.no_grad():
        for block in other.blocks:
            block.register_forward_hook(
                lambda module, inputs, output: (
                    inputs[0][:, torch.arange(23, -1, -1)] @ module.weight.flip(1).t() + module.bias
                )
            )
    assert first_of(reference, recording(other)) is None


def test_float32_is_allowed_what_bfloat16_rounds(reference: Recording) -> None:
    class Rounded(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(0)
    assert first_of(reference, recording(Rounded(), compute=torch.bfloat16)) is None
    torch.manual_seed(0)
    assert first_of(reference, recording(Rounded())) is not None, "it is a fault if nobody says that it is bfloat16"


@torch.no_grad()
def transpose(module: Net) -> None:
    module.second.weight.copy_(module.second.weight.t().clone())


def drop_bias(module: Net) -> None:
    module.blocks[1].register_forward_hook(lambda part, inputs, output: output - part.bias)


def round_norm(module: Net) -> None:
    module.norm.register_forward_hook(lambda part, inputs, output: output.bfloat16().float())


def scale_gradient(module: Net) -> None:
    module.norm.weight.register_hook(lambda gradient: gradient * 1.01)


FAULTS: list[tuple[Callable[[Net], None], str, str]] = [
    (transpose, "weight", "second.weight"),
    (drop_bias, "output", "blocks.1"),
    (round_norm, "output", "norm"),
    (scale_gradient, "gradient", "norm.weight"),
]


@pytest.mark.parametrize(("plant", "phase", "name"), FAULTS)
def test_a_planted_fault_is_named_first(
    reference: Recording, plant: Callable[[Net], None], phase: str, name: str
) -> None:
    module = net()
    plant(module)
    assert first_of(reference, recording(module)) == (phase, name)


def test_weights_of_another_shape_differ(reference: Recording) -> None:
    module = net()
    module.first = nn.Linear(24, 12)
    module.norm, module.second = nn.LayerNorm(12), nn.Linear(12, 24)
    assert first_of(reference, recording(module)) == ("weight", "first.weight")


def test_nan_on_one_side_differs(reference: Recording) -> None:
    module = net()
    module.norm.register_forward_hook(lambda part, inputs, output: output / torch.zeros(()))
    assert first_of(reference, recording(module)) == ("output", "norm")


def test_recordings_without_elements_compare_by_their_norms() -> None:
    nothing = Budget(bytes=0)
    plain = recording(net(), budget=nothing)
    assert not plain.ranks[0].tensors
    assert first_of(plain, recording(net(), budget=nothing)) is None
    module = net()
    drop_bias(module)
    assert first_of(plain, recording(module, budget=nothing)) == ("output", "blocks.1")


def test_samples_of_elements_are_the_same_for_any_budget(reference: Recording) -> None:
    small = recording(net(), budget=Budget(elements=100))
    entry = next(e for e in small.ranks[0].entries if e.moment == "weight" and e.name == "first.weight")
    assert entry.stride == 8
    assert entry.key is not None
    assert small.ranks[0].tensors[entry.key].shape == (3, 24)
    assert first_of(reference, small) is None
    module = net()
    transpose(module)
    assert first_of(small, recording(module)) == ("weight", "second.weight")


def test_moved_weights_are_restored() -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    with moved_weights(module, torch.float32, 0):
        assert not torch.equal(before["first.weight"], module.first.weight)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


# ---------------------------------------------------------------------------------------------- shards


def tensor_entry(record: RankRecord, moment: str, name: str, tensor: Tensor, **more: object) -> None:
    entry = TensorEntry(1, moment, name, "F32", list(tensor.shape), key=str(len(record.tensors)), **more)  # type: ignore[arg-type]
    entry.moved_max, entry.moved_rms = 1e-6, 1e-7
    record.tensors[str(len(record.tensors))] = tensor.contiguous()
    record.entries.append(entry)


def whole_and_parts(
    whole: Tensor, parts: list[Tensor], sizes: dict[str, int], split: list[int] | None = None
) -> Comparison:
    first = RankRecord(0)
    tensor_entry(first, "output", "layer", whole, rows="0")
    ranks = []
    axis = next(iter(sizes))
    for rank, part in enumerate(parts):
        record = RankRecord(rank, {axis: rank}, sizes, split)
        tensor_entry(record, "output", "layer", part, rows="0")
        ranks.append(record)
    return compare_recordings(Recording("whole", [first]), Recording("parts", ranks))


def test_features_of_tensor_parallel_ranks_are_joined() -> None:
    whole = torch.randn(8, 6)
    assert whole_and_parts(whole, list(whole.chunk(2, dim=1)), {"tp": 2}).first is None
    swapped = whole_and_parts(whole, list(whole.chunk(2, dim=1))[::-1], {"tp": 2})
    assert swapped.first is not None


def test_tokens_of_ring_ranks_are_joined_in_the_order_of_the_sequence() -> None:
    whole, split = torch.randn(16, 6), SequenceSharding(2, 1)
    parts = [torch.cat([whole[a:b] for a, b in split.ranges(16, rank)]) for rank in range(2)]
    comparison = whole_and_parts(whole, parts, {"cp_ring": 2}, [2, 1, 1])
    assert comparison.first is None
    assert not comparison.skipped


def test_replicas_that_disagree_are_a_difference() -> None:
    whole = torch.randn(8, 6)
    assert whole_and_parts(whole, [whole, whole.clone()], {"tp": 2}).first is None
    first = whole_and_parts(whole, [whole, whole + 0.1], {"tp": 2}).first
    assert first is not None
    assert "ranks have different values" in first.reason


def test_parameters_are_joined_by_their_offsets() -> None:
    whole = torch.randn(7, 4)
    record = RankRecord(0)
    tensor_entry(record, "gradient", "weight", whole)
    ranks = []
    for rank, (start, end) in enumerate(((0, 4), (4, 7))):
        other = RankRecord(rank, {"dp_shard": rank}, {"dp_shard": 2})
        tensor_entry(other, "gradient", "weight", whole[start:end], whole=[7, 4], offsets=[start, 0])
        ranks.append(other)
    assert first_of(Recording("a", [record]), Recording("b", ranks)) is None
    del ranks[1]
    comparison = compare_recordings(Recording("a", [record]), Recording("b", ranks))
    assert comparison.skipped, "a part is missing: nothing is said"


def test_slices_of_large_shards_are_joined() -> None:
    whole = torch.randn(16, 6)
    first = RankRecord(0)
    tensor_entry(first, "output", "layer", whole[::4], rows="0", stride=4)
    first.entries[0].shape = [16, 6]
    ranks = []
    for rank, part in enumerate(whole.chunk(2, dim=1)):
        record = RankRecord(rank, {"tp": rank}, {"tp": 2})
        tensor_entry(record, "output", "layer", part[::2], rows="0", stride=2)
        record.entries[0].shape = [16, 3]
        ranks.append(record)
    comparison = compare_recordings(Recording("whole", [first]), Recording("parts", ranks))
    assert not comparison.skipped
    assert comparison.first is None
    ranks[1].tensors["0"][2, 1] += 0.1
    assert compare_recordings(Recording("whole", [first]), Recording("parts", ranks)).first is not None


def test_images_that_ranks_encode_are_joined_in_the_order_of_the_batch() -> None:
    """Rank 0 encodes images 0 and 2, and rank 1 encodes image 1; an image has 4 patches."""
    whole, order = torch.randn(12, 6), torch.tensor([0, 2, 1])
    parts = [whole.unflatten(0, (3, 4))[images].flatten(0, 1) for images in ([0, 2], [1])]
    records = [RankRecord(0)]
    tensor_entry(records[0], "output", "vision.layer", whole, rows="0")
    for rank, part in enumerate(parts):
        encoders = {"vision": ("vision.dp", rank)}
        records.append(RankRecord(rank, {"cp_ulysses": rank}, {"cp_ulysses": 2}, [1, 2, 1], encoders))
        tensor_entry(records[-1], "data", "vision.dp", order, rows="0")
        tensor_entry(records[-1], "output", "vision.layer", part, rows="0")
    comparison = compare_recordings(Recording("whole", records[:1]), Recording("parts", records[1:]))
    assert (comparison.first, comparison.skipped) == (None, [])


# ---------------------------------------------------------------------------------------------- steps


def adam_step(record: RankRecord, step: int, weight: Tensor, gradient: Tensor, lr: float = 0.01) -> Tensor:
    """Record a first step of Adam, which moves every element by `lr` in the direction of its gradient's sign."""
    update = -lr * gradient.sign()
    for moment, tensor in (("weight", weight), ("gradient", gradient), ("update", update)):
        tensor_entry(record, moment, "layer.weight", tensor, order=float(len(record.entries)))
        record.entries[-1].step = step
    return weight + update


def test_an_update_whose_gradient_is_rounding_may_have_any_sign() -> None:
    weight, gradient = torch.randn(50), torch.randn(50)
    gradient[7] = 1e-9
    other = gradient.clone()
    other[7] = -1e-9

    def record(gradient: Tensor, lr: float = 0.01) -> Recording:
        rank = RankRecord(0)
        adam_step(rank, 1, weight, gradient, lr)
        return Recording("step", [rank])

    assert first_of(record(gradient), record(other)) is None
    assert first_of(record(gradient), record(gradient, 0.0101)) == ("update", "layer.weight")


def test_weights_after_updates_that_agree_do_not_differ() -> None:
    weight, gradient = torch.randn(50), torch.randn(50)
    gradient[7] = 1e-9
    sides = []
    for sign, fault in ((1, 0.0), (-1, 0.0), (1, 1e-4)):
        record, changed = RankRecord(0), gradient.clone()
        changed[7] *= sign
        after = adam_step(record, 1, weight, changed)
        after[3] += fault  # not by the update
        adam_step(record, 2, after, gradient)
        sides.append(Recording("steps", [record]))
    plain, drifted, faulty = sides
    assert first_of(plain, drifted) is None
    finding = compare_recordings(plain, faulty).first
    assert finding is not None
    assert (finding.step, finding.phase) == (2, "weight")


def test_a_sign_of_a_mean_that_cancels_is_rounding_but_not_one_of_another_mean() -> None:
    """Lion: the mean of earlier gradients cancels the gradient of one element up to rounding."""
    chance = torch.Generator().manual_seed(3)
    weight, gradient, mean = (torch.randn(50, generator=chance) for _ in range(3))
    mean[7] = -gradient[7]
    rounding = torch.finfo(torch.float32).eps * float(gradient.abs().max())

    def record(apart: float, scale: float = 1.0) -> Recording:
        rank, direction = RankRecord(0), (scale * mean + gradient) / 2
        direction[7] += apart
        update = -0.01 * direction.sign()
        for moment, tensor in (
            ("weight", weight),
            ("gradient", gradient),
            ("direction", direction),
            ("update", update),
        ):
            tensor_entry(rank, moment, "layer.weight", tensor, order=float(len(rank.entries)))
            rank.entries[-1].step = 2
        return Recording("step", [rank])

    assert first_of(record(rounding), record(-rounding)) is None
    assert first_of(record(rounding), record(-0.1)) == ("update", "layer.weight")
    assert first_of(record(rounding), record(rounding, scale=-1.0)) == ("update", "layer.weight")


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def folder(reference: Recording, tmp_path: Path) -> Path:
    return write_recording(reference, tmp_path / "recording")


def test_a_recording_is_read_as_it_was_written(reference: Recording, folder: Path) -> None:
    again = read_recording(folder)
    assert again.ranks[0].entries == reference.ranks[0].entries
    assert first_of(reference, again) is None
    assert [path.name for path in folder.parent.iterdir()] == ["recording"]


def test_a_folder_that_exists_is_not_replaced(reference: Recording, folder: Path) -> None:
    with raises("parity.folder-exists"):
        write_recording(reference, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["recording"]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_first_entry(path: Path, **changes: object) -> None:
    first, *others = json.loads(path.read_text())["entries"]
    edit(path, entries=[first | changes, *others])


def forge(path: Path) -> None:
    header = json.dumps({"0": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


TENSORS = "rank-0.safetensors"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "recording.json").unlink(), "parity.no-recording"),
    (lambda f: edit(f / "recording.json", version=9), "parity.damaged-recording"),
    (lambda f: edit(f / "recording.json", ranks=10**9), "parity.damaged-recording"),
    (lambda f: edit(f / "recording.json", ranks=2), "parity.damaged-recording"),
    (lambda f: edit(f / "recording.json", pairs=[1]), "parity.damaged-recording"),
    (lambda f: edit(f / "rank-0.json", entries=[{"step": "x"}]), "parity.damaged-recording"),
    (lambda f: edit(f / "rank-0.json", rank=1), "parity.damaged-recording"),
    (lambda f: (f / "rank-0.json").write_text("{"), "parity.damaged-recording"),
    (lambda f: edit_first_entry(f / "rank-0.json", stride=0), "parity.damaged-recording"),
    (lambda f: edit_first_entry(f / "rank-0.json", stride=-1), "parity.damaged-recording"),
    (lambda f: (f / TENSORS).unlink(), "parity.damaged-recording"),
    (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-100]), "weights.unreadable-file"),
    (lambda f: (f / TENSORS).write_bytes(b""), "weights.unreadable-file"),
    (lambda f: forge(f / TENSORS), "weights.unreadable-file"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_recording_is_refused(folder: Path, number: int) -> None:
    damage, code = DAMAGES[number]
    damage(folder)
    with raises(code):
        read_recording(folder)


def test_shapes_that_differ_from_the_tensors_are_refused(reference: Recording, tmp_path: Path) -> None:
    record = copy.deepcopy(reference.ranks[0])
    record.entries[0].shape = [5, 5]
    with raises("parity.damaged-recording"):
        read_recording(write_recording(replace(reference, ranks=[record]), tmp_path / "forged"))


def test_recordings_of_different_steps_are_refused(reference: Recording) -> None:
    other = copy.deepcopy(reference)
    for entry in other.ranks[0].entries:
        entry.step = 2
    with raises("parity.nothing-in-common"):
        compare_recordings(reference, other)


def test_results_are_a_page_a_table_and_json(reference: Recording, tmp_path: Path) -> None:
    module = net()
    drop_bias(module)
    comparison = compare_recordings(reference, recording(module, "<b>other</b>"))
    page, data, table = write_results(comparison, tmp_path)
    assert "<b>other</b>" not in page.read_text()
    assert json.loads(data.read_text())["first"]["name"] == "blocks.1"
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == sum(bool(finding.sides[0]) for finding in comparison.findings)
    (row,) = (row for row in rows if row["NPU Name"] == "output.blocks.1")
    assert row["Result"] == "error"
    assert float(row["MaxAbsErr"]) > 0.01
    assert {"Cosine", "EucDist", "One Thousandth Err Ratio", "Requires_grad Consistent", "Data_name"} <= row.keys()
    text = lines(replace(comparison, labels=("a\nno difference", "b")))
    assert text[0] == "A: a no difference"
    assert any(line.startswith(" >>") and "blocks.1" in line for line in text)


# ---------------------------------------------------------------------------------------------- commands


def test_the_command_compares_recordings(reference: Recording, folder: Path, tmp_path: Path) -> None:
    module = net()
    drop_bias(module)
    other = write_recording(recording(module), tmp_path / "other")
    same = CliRunner().invoke(app, ["compare", str(folder), str(folder)])
    assert same.exit_code == 0, same.output
    different = CliRunner().invoke(app, ["compare", str(folder), str(other), "--out", str(tmp_path / "results")])
    assert different.exit_code == 1
    assert "first difference: step 1: output of blocks.1" in different.output
    assert (tmp_path / "results" / "parity.html").is_file()


def test_wrong_requests_are_refused(folder: Path, tmp_path: Path) -> None:
    for steps in ("0", "2-1", "x", "1-", "-1"):
        with raises("parity.wrong-steps"):
            parse_steps(steps)
    with raises("parity.unknown-over"):
        parity(folder, folder, over="days")  # type: ignore[arg-type]
    with raises("parity.engine-without-data"):
        parity(folder, "engine")
    with raises("parity.command-without-out"):
        parity("HEAD", "HEAD", over="commits", command="true")
    with raises("parity.wrong-command"):
        parity("HEAD", "HEAD", over="commits", command="record '{out}")
    refused = CliRunner().invoke(app, ["compare", str(folder), "--over", "data"])
    assert getattr(refused.exception, "code", None) == "parity.one-side"


def test_recording_a_recipe_writes_the_recording_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path), tmp_path / "runs")
    recipe["checkpoint"]["export"] = True
    assert record(recipe, out=tmp_path / "recording", rounding=0).is_dir()
    assert "read again and compared" not in "".join(capsys.readouterr())  # an exported folder
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_logs_of_compared_trainings_are_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path), tmp_path / "runs")
    result = parity(recipe, None, {"b.optim.lr": 0.5}, out=tmp_path / "out")
    assert not result.same
    printed = "".join(capfd.readouterr())
    assert "recording a: a recipe" in printed
    assert "recording b: a recipe optim.lr=0.5" in printed
    assert "grad" not in printed
    assert all("grad" in (tmp_path / "out" / f"{name}.log").read_text() for name in "ab")


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os, signal, sys\nfrom tessera.runtime.scratch import scratch_folder\n"
    code += "with scratch_folder('ours-'):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    (abandoned,) = tmp_path.glob("ours-*")
    (tmp_path / "ours-unlocked").mkdir()
    (tmp_path / "ours-link").symlink_to(abandoned)
    with scratch_folder("ours-") as first, scratch_folder("ours-") as second:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"ours-unlocked", "ours-link", first.name, second.name}
    assert {path.name for path in tmp_path.iterdir()} == {"ours-unlocked", "ours-link"}


def test_the_first_step_is_found_in_curves() -> None:
    a = {step: {"loss": 1.0 / step, "grad_norm": 1.0} for step in range(1, 9)}
    b = {step: {"loss": 1.0 / step + (0.01 if step > 4 else 1e-9), "grad_norm": 1.0} for step in range(2, 9)}
    assert _first(a, b, lambda step, name, value: 1e-6)[0] == 5
    assert _first(a, a, lambda step, name, value: 0.0)[0] is None
    with raises("parity.no-common-step"):
        _first(a, {}, lambda step, name, value: 0.0)
