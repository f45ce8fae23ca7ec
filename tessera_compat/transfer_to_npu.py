"""The import that guides for Ascend name, with the package exchanged: `from tessera_compat import transfer_to_npu`."""

from __future__ import annotations

from tessera_compat.transfer import start, touched, undo

__all__ = ["start", "touched", "undo"]
