"""Messages between processes: a pickle, and the bytes of its tensors and arrays in shared memory.

The shared memory is anonymous (memfd): nothing remains if a process is killed, and the size of /dev/shm does not
matter. A message needs one file descriptor for a moment, however many tensors it contains. Tensors that share a storage
arrive as separate tensors. These pickles pass only between a program and its own processes, over private
sockets, and are never written to disk.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_HEAD = struct.Struct("<QQQ")  # size of the pickle, number of buffers, size of all buffers with padding
_ALIGN = 64
_INLINE = 1 << 15  # buffers below this number of bytes are sent over the socket, without shared memory


class Packed:
    """Hold a pickled object that is ready to be sent. The object must not change before it is sent.

    `modules`: names of the modules whose classes and functions the object needs.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(file, buffers)
        pickler.dump(value)
        self.modules = pickler.modules
        self._pickle = file.getbuffer()
        self._buffers = [buffer.raw() for buffer in buffers]
        self._starts, self._bytes = _layout([len(buffer) for buffer in self._buffers])

    @property
    def inline_bytes(self) -> int:
        """Return the number of bytes that are sent over the socket, not in shared memory."""
        return len(self._pickle) + (self._bytes if self._bytes < _INLINE else 0)

    def send(self, to: socket.socket) -> None:
        sizes = struct.pack(f"<{len(self._buffers)}Q", *(len(buffer) for buffer in self._buffers))
        head = _HEAD.pack(len(self._pickle), len(self._buffers), self._bytes)
        if self._bytes < _INLINE:
            inline = bytearray(self._bytes)
            for start, buffer in zip(self._starts, self._buffers, strict=True):
                inline[start : start + len(buffer)] = buffer
            to.sendall(head + sizes + self._pickle + inline)
            return
        fd = os.memfd_create("tessera")
        try:
            os.ftruncate(fd, self._bytes)
            for start, buffer in zip(self._starts, self._buffers, strict=True):
                _write(fd, buffer, start)
            socket.send_fds(to, [head], [fd])
        finally:
            os.close(fd)
        to.sendall(sizes + self._pickle)


def send(to: socket.socket, value: Any) -> None:
    Packed(value).send(to)


def receive(
    source: socket.socket, *, shared: bool = True, before_find: Callable[[str, str], None] | None = None
) -> Any:
    """Receive the next object. Raise EOFError if the other process has ended.

    `shared=False`: writes to the object's tensors are not visible in other processes, not even after a fork.
    `before_find(module, name)` is called before the unpickler looks up a class or function.
    """
    # The file descriptor arrives with the first byte of the head.
    head, fds, _, _ = socket.recv_fds(source, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not head:
            raise EOFError
        head += _exactly(source, _HEAD.size - len(head))
        length, count, total = _HEAD.unpack(head)
        sizes = struct.unpack(f"<{count}Q", _exactly(source, 8 * count))
        data = _exactly(source, length)
        if fds:  # mapped by torch, because Python's mmap keeps a file descriptor open
            mapped = torch.from_file(f"/proc/self/fd/{fds[0]}", shared=shared, size=total, dtype=torch.uint8)
            whole = mapped.numpy().data
        else:
            whole = memoryview(_exactly(source, total))
    finally:
        for fd in fds:
            os.close(fd)
    starts, _ = _layout(sizes)
    parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return _Unpickler(io.BytesIO(data), parts, before_find).load()


def can_be_pickled(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes
    except Exception:
        return False
    return True


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, buffers: Sequence[memoryview], before_find: Callable[[str, str], None] | None
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._before_find = before_find

    def find_class(self, module: str, name: str) -> Any:
        if self._before_find is not None:
            self._before_find(module, name)
        return super().find_class(module, name)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            self.modules.add(str(value.__module__))
            return NotImplemented
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat.data), value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)  # the tensor keeps the buffer alive


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return starts, at


def _write(fd: int, buffer: memoryview, at: int) -> None:
    # pwrite fills new pages directly; a copy into a mapping would make the kernel zero each page first.
    while len(buffer):
        written = os.pwrite(fd, buffer, at)
        buffer, at = buffer[written:], at + written


def _exactly(source: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        got = source.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
