"""Parameter names as the model's author wrote them, whatever wraps the modules now."""

from __future__ import annotations

import re

# Recompute, compile, and the stages of a pipeline.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_stage\d+\.|_stage_model\.")


def clean(name: str) -> str:
    return _WRAPPERS.sub("", name)
