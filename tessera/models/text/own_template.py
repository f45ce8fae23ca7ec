"""Say so where the chat template of a folder is not the one that its family writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.data.tokenizer import read_chat_template
from tessera.models.processing.conversation import ConversationProcessor
from tessera.runtime.log import logger


def warn_of_another_template(processor: Any, folder: Path | None) -> None:
    """Warn where the template of `folder` has no header of the one that `processor` writes.

    A model that was tuned with another template (Llama 2 with `[INST]`, many tuned copies of others) would otherwise
    be asked and trained in words it has never seen, and nothing would tell.
    """
    if folder is None or not isinstance(processor, ConversationProcessor):
        return
    jinja = read_chat_template(folder)
    if jinja is None or processor.template.headers_in(jinja):
        return
    logger().warning(
        f"the chat template of {folder} is not the one of this family, which is written in its place "
        f"({processor.template.header('user').strip()!r}); if the model was tuned with its own, "
        "a recipe with model.family: transformers follows it"
    )
