"""Run in a process with the stand-in NPU: a script that is written for cuda, and what the transfer left of it."""

import json

import torch
import torch.distributed as dist
from torch import nn

plain = torch.cuda.is_available(), torch.Tensor.to, torch.zeros, torch.cuda.device_count()
assert plain[0] is False
import tessera_compat.transfer as transfer  # noqa: E402

facts: dict[str, object] = {"touched": transfer.touched()}
assert torch.cuda.is_available()
assert torch.cuda.device_count() == 2
torch.cuda.set_device(1)
assert torch.cuda.current_device() == 1
torch.cuda.set_device(0)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
places = [
    torch.zeros(2, device="cuda"),
    torch.zeros(2, device=device),
    torch.randn(2, device="cuda:1"),
    torch.ones(2).cuda(),
    torch.ones(2).to("cuda", torch.float32),
    torch.ones(2).to(device=torch.device("cuda", 1)),
    torch.ones(2).to(0),
    torch.ones(2).cuda().new_zeros(3, device="cuda:0"),
    *nn.Linear(2, 2).cuda().parameters(),
    *nn.Linear(2, 2).to("cuda:1").parameters(),
]
facts["places"] = [str(x.device) for x in places]
assert all(x.is_cuda for x in places)
assert not torch.ones(2).is_cuda

torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3, device="cuda"))
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator)
assert generator.device.type == "npu"
assert torch.cuda.memory_allocated() > 0
torch.cuda.synchronize()
event = torch.cuda.Event()
event.record(torch.cuda.current_stream())

model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=False)
losses = []
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.ones(3, 4, device=device)).square().mean()
    assert model(torch.ones(1, 4, device=device)).dtype == torch.float32
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
assert losses[-1] < losses[0]

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
facts["backend"] = dist.get_backend()
total = torch.ones(2, device="cuda")
dist.all_reduce(total)
mesh = dist.init_device_mesh("cuda", (1,))
facts["mesh"] = mesh.device_type
dist.destroy_process_group()

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]):
    torch.ones(2, device="cuda").add(1)

branches: dict[str, object] = {}
for library, function in (
    ("transformers.utils.import_utils", "is_torch_cuda_available"),
    ("transformers.utils.import_utils", "is_torch_npu_available"),
    ("accelerate.utils.imports", "is_cuda_available"),
    ("accelerate.utils.imports", "is_npu_available"),
    ("peft.utils.other", "infer_device"),
):
    try:
        module = __import__(library, fromlist=[function])
    except ImportError:
        continue
    branches[f"{library.partition('.')[0]} {function}"] = getattr(module, function)()
facts["branches"] = branches

try:
    transfer.start()
except Exception as error:
    facts["twice"] = getattr(error, "code", type(error).__name__)
transfer.undo()
assert (torch.cuda.is_available(), torch.Tensor.to, torch.zeros, torch.cuda.device_count()) == plain
assert transfer.touched() == ()
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError) as error:
    facts["after"] = str(error).splitlines()[0]
transfer.start()
assert torch.zeros(1, device="cuda").device.type == "npu"
print(json.dumps(facts))
