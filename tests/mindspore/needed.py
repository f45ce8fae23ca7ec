"""Skip the test files that import this where MindSpore is not installed. `make test-mindspore` installs it."""

import pytest

pytest.importorskip("mindspore.nn", reason="needs MindSpore: make test-mindspore")
