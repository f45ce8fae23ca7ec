"""Parameter names as the model's author wrote them, whatever wraps the modules now."""

from __future__ import annotations

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
