"""What ranks of tests need, imported once by the fork server: each rank then starts with it, and saves 0.8 s of CPU.

Nothing here may start a thread: a fork keeps only the one that forks.
"""

from __future__ import annotations

import gc

import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.profiler
from PIL import Image

import tessera.api
import tessera.data.kinds.chat
import tessera.models.qwen2_vl
import tessera.tasks.dpo
import tessera.tasks.language
import tessera.training.run
import tests.dist.layouts
import tests.toys.moe_decoder
import tests.toys.token_rows

Image.preinit()  # its plugins, too
gc.freeze()  # a rank that looked through all these objects for garbage would also copy their pages

__all__ = ["Image", "pytest", "tessera", "tests", "torch"]
