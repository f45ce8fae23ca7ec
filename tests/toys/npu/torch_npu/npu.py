"""The module `torch.npu`: the functions that torch and its users call on the module of an accelerator."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import _stand_in
import torch

Stream = torch.Stream
Event = torch.Event
device_count = _stand_in.count
current_device = _stand_in.current


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _index(device=None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def set_device(device) -> None:
    _stand_in.set(_index(device))


class device:
    def __init__(self, device) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        _stand_in.set(self.idx)

    def __exit__(self, *error) -> None:
        _stand_in.set(self.before)


def synchronize(device=None) -> None:
    pass


def current_stream(device=None):
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None):
    return current_stream(device)


@contextmanager
def stream(stream):
    with stream:
        yield


def get_rng_state(device="npu") -> torch.Tensor:
    return _stand_in.generator(_index(device)).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state(state: torch.Tensor, device="npu") -> None:
    _stand_in.generator(_index(device)).set_state(state)


def set_rng_state_all(states) -> None:
    for number, state in enumerate(states):
        set_rng_state(state, number)


def manual_seed(seed: int) -> None:
    _stand_in.generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for number in range(device_count()):
        _stand_in.generator(number).manual_seed(seed)


def get_device_name(device=None) -> str:
    return "Ascend910B3"


def get_device_properties(device=None):
    return SimpleNamespace(name=get_device_name(), total_memory=_stand_in.total())


def mem_get_info(device=None) -> tuple[int, int]:
    return _stand_in.total() - memory_allocated(device), _stand_in.total()


def memory_allocated(device=None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device=None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    pass


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
