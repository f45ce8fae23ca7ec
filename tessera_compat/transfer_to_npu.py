"""Take the place of the module that guides for Ascend import: `from tessera_compat import transfer_to_npu`."""

from __future__ import annotations

from tessera_compat.transfer import start, touched, undo

__all__ = ["start", "touched", "undo"]
