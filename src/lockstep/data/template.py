"""Arguments of a chat template, such as `enable_thinking`: `data.template_arguments`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.errors import Problem, refuse_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, bool | int | float | str]
) -> PreTrainedTokenizerBase:
    """The tokenizer, whose template has the arguments set at its beginning: wherever it is rendered, they hold.

    For the run alone: an export has the tokenizer of the model's own folder.
    """
    if not arguments:
        return tokenizer
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    refuse_all(
        [
            Problem(f"data.template_arguments.{name}", "the chat template does not read it", "remove it")
            for name in arguments
            if not re.search(rf"\b{re.escape(name)}\b", template)
        ]
    )
    opening = "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in arguments.items())
    tokenizer.chat_template = opening + template
    return tokenizer


def _literal(value: bool | int | float | str) -> str:
    return json.dumps(value)  # true, false, numbers and quoted text are written alike in both
