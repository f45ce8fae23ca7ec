"""What every test stands on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tessera.core.trust import STATE_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests leave no note in the home of whoever runs them; ranks and commands that they start inherit it."""
    before = os.environ.get(STATE_VARIABLE)
    os.environ[STATE_VARIABLE] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ[STATE_VARIABLE]
    else:
        os.environ[STATE_VARIABLE] = before
