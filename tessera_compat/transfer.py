"""Send `torch.cuda` and "cuda" devices to the accelerator of this machine: import this module first in a script.

    import tessera_compat.transfer             # for this process, until it ends
    tessera_compat.transfer.touched()          # the names of torch that it replaced
    tessera_compat.transfer.undo()             # torch as it was

On a machine with cuda nothing is replaced.
"""

from __future__ import annotations

import sys

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks
from tessera_compat.device_transfer import FOREIGN, Transfer

_DEVICE = devices.current()
if _DEVICE.type == "cpu":
    raise TesseraError(
        "this machine has no accelerator to use in place of cuda",
        fix="install torch's extension of the accelerator, or write the code for any device: "
        "device = torch.accelerator.current_accelerator() or 'cpu'",
        code="device.no-accelerator",
    )
_TRANSFER = Transfer(_DEVICE)


def start() -> None:
    """Replace functions of torch, as the import of this module does. Raise if they are already replaced."""
    if _DEVICE.type == FOREIGN:
        return
    _TRANSFER.start()
    if environment_ranks()[0] == 0:
        count = len(touched())
        print(
            f"cuda means {_DEVICE.type} in this process: {count} names of torch are replaced; "
            "tessera_compat.transfer.touched() lists them, undo() puts them back",
            file=sys.stderr,
        )


def touched() -> tuple[str, ...]:
    """Return the replaced names, such as `torch.Tensor.cuda`."""
    return _TRANSFER.touched


def undo() -> None:
    """Restore the functions of torch."""
    _TRANSFER.undo()


start()
