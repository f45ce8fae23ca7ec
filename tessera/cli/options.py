"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TrustFlag = Annotated[
    bool, typer.Option("--trust", help="import and call what a folder names that you did not make; see SECURITY.md")
]
