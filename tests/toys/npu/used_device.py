"""Run in a process with the stand-in NPU: what the library asks of a device, and calls that only cuda serves."""

from __future__ import annotations

import json

import torch
from torch import nn

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime import rng

facts: dict[str, object] = {}
device = devices.resolve("auto", 1)
facts["device"] = str(device)
facts["backend"] = devices.backend(device, with_host=True)
assert devices.current() == device
assert devices.is_accelerator("auto")
assert devices.peak_flops(device) == 376e12

# memory
before = devices.memory(device)
held = torch.zeros(1 << 18, device=device)
assert devices.memory(device).used == before.used + held.nbytes
assert devices.free_memory(device) == devices.memory(device).total - devices.memory(device).used
del held
assert devices.memory(device).used == before.used
assert devices.memory(device).peak >= before.used + (1 << 20)
devices.reset_peak_memory(device)
assert devices.memory(device).peak == devices.memory(device).used
try:
    torch.empty(1 << 40, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError as error:
    facts["out of memory"] = devices.is_out_of_memory(error)

# random numbers: each step derives its seed, on the host and on the device
rng.seed_process(7, "step", 3, 0)
drawn = nn.functional.dropout(torch.ones(64, device=device)), torch.rand(4)
rng.seed_process(7, "step", 3, 0)
again = nn.functional.dropout(torch.ones(64, device=device)), torch.rand(4)
assert all(map(torch.equal, drawn, again))
assert torch.equal(
    torch.rand(4, device=device, generator=rng.generator(device, 1)),
    torch.rand(4, device=device, generator=rng.generator(device, 1)),
)

# copies, streams and events
copy = devices.HostCopy(torch.arange(3.0, device=device))
assert copy() == [0.0, 1.0, 2.0]
assert copy.ready()
assert devices.send([1, 2], torch.int64, device).device == device
target = torch.zeros(2, device=device)
devices.send_to(target, [3, 4])
assert target.tolist() == [3, 4]
copies = devices.SideCopies(device)
moved, done = copies.start(lambda: torch.ones(5).pin_memory().to(device, non_blocking=True))
copies.finish(done, [moved])
assert moved.sum().item() == 5
with devices.own_stream(device, devices.queued(device)):
    moved.add_(1)
assert not devices.has_unfinished_work(device)

facts["supports"] = {
    what: devices.supports(device, what)
    for what in (
        "flash_attention",
        "triton",
        "graphs",
        "pinned_memory",
        "fused_optimizer",
        "compiler",
        "ascend_kernels",
    )
}
try:
    devices.resolve("cuda")
except TesseraError as error:
    facts["cuda"] = error.code
try:
    devices.resolve("npu", 5)
except TesseraError as error:
    facts["rank 5"] = error.code

# calls that assume cuda fail here, so that no test with this device passes over one
planted = {
    "synchronize": lambda: torch.cuda.synchronize(),
    "method": lambda: torch.ones(1).cuda(),
    "argument": lambda: torch.ones(1, device="cuda"),
    "stream": lambda: torch.cuda.Stream(),
    "random state": lambda: torch.cuda.get_rng_state(),
    "host tensor": lambda: torch.ones(2, device=device) + torch.ones(2),
    "backend": lambda: torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    ),
}
failed = []
for name, call in planted.items():
    try:
        call()
    except (AssertionError, RuntimeError, ValueError, torch.distributed.DistBackendError):
        failed.append(name)
facts["not planted in vain"] = failed == list(planted)
print(json.dumps(facts))
