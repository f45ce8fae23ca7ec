"""The blocks of a KV cache: which are used, which are free, and which prompts can reuse their contents.

A full block has a key: a hash of its tokens, their positions and media, and of the key of the block before. A request
whose prompt has the same keys reuses the blocks. A free block keeps its contents until it is allocated again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

PADDING_BLOCK = 0  # the block into which padding tokens of a call are written; no row uses it


class BlockPool:
    """Count the users of each block. The least recently used free blocks are allocated first."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """Create a pool of `blocks` free blocks, numbered from 1. Block 0 is for padding tokens."""
        self.block_size = block_size
        self.blocks = blocks
        # free blocks, the next one to allocate first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks + 1))
        self._users = [0] * (blocks + 1)
        self._keys: dict[int, bytes] = {}  # block -> its key, for each block that later requests can reuse
        self._with_key: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Return how many blocks can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate blocks. Return None, and allocate nothing, if there are not enough."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._users[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one user of each block. Free blocks with a key can be reused until they are allocated."""
        for block in reversed(blocks):  # free the end of a sequence first: fewer prompts reuse it than the beginning
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} is released twice"
            if not self._users[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the stored blocks of the longest matching prefix, and add a user to each."""
        blocks = []
        for key in keys:
            block = self._with_key.get(key)
            if block is None:
                break
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Let later requests reuse a full block. If another block has the same contents, that other block is reused."""
        if key not in self._with_key and block not in self._keys:
            self._keys[block] = key
            self._with_key[key] = block

    def discard(self, blocks: Iterable[int]) -> list[int]:
        """Return which of these blocks are free, and let no later request reuse their contents."""
        free = [block for block in blocks if not self._users[block]]
        for block in free:
            self._forget(block)
        return free

    def forget_all(self) -> None:
        self._keys.clear()
        self._with_key.clear()

    def grow(self, blocks: int) -> None:
        """Enlarge the pool to this number of blocks."""
        new = range(self.blocks + 1, blocks + 1)
        self._free.update(dict.fromkeys(new))
        for block in reversed(new):
            self._free.move_to_end(block, last=False)
        self._users += [0] * len(new)
        self.blocks = blocks

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._with_key[key]


class BlockKeys:
    """Compute the keys of a sequence's full blocks, in order."""

    def __init__(self, root: str, contents: np.ndarray, block_size: int) -> None:
        """Prepare the keys of a prompt's blocks.

        `contents` [tokens, any width] int64: for each token of the prompt, all numbers that determine its attention
        keys and values. `root`: everything else that these depend on, such as the adapter.
        """
        self.block_size = block_size
        self._contents = np.ascontiguousarray(contents)
        self._keys = [blake2b(root.encode(), digest_size=16).digest()]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that have been added: those of the prompt, and of the answer so far."""
        return len(self._contents)

    @property
    def width(self) -> int:
        return int(self._contents.shape[1])

    def upto(self, count: int) -> list[bytes]:
        """Return the keys of the first `count` blocks, which must be full."""
        size = self.block_size
        for number in range(len(self._keys) - 1, count):
            part = self._contents[number * size : (number + 1) * size]
            assert len(part) == size, "the last block is not full"
            self._keys.append(blake2b(self._keys[-1] + part.tobytes(), digest_size=16).digest())
        return self._keys[1 : count + 1]

    def extend(self, contents: np.ndarray) -> None:
        """Add the contents of generated tokens."""
        self._contents = np.concatenate([self._contents, contents])
