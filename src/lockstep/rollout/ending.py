"""When a response ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import Refusal
from lockstep.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def why_ended(tokens: Sequence[int], prompt: int, sampling: Sampling, decode: Callable[[list[int]], str]) -> str:
    """`token`, `string` or `length` when the last token ends the response, else nothing.

    The response is what follows the first `prompt` tokens.
    """
    if tokens[-1] in sampling.stop_ids:
        return "token"
    if sampling.stop_strings:
        # The last token may complete a text that began some tokens before it. A token is at least a byte and a
        # character at most four, so this reaches far enough back.
        back = max(len(text) for text in sampling.stop_strings) * 4
        tail = decode(list(tokens[max(prompt, len(tokens) - back) :]))
        if any(text in tail for text in sampling.stop_strings):
            return "string"
    return "length" if len(tokens) - prompt >= sampling.max_tokens else ""


def refuse_unknown_ids(stop_ids: Sequence[int], vocabulary: int, key: str = "rollout.stop_ids") -> None:
    """Tokens that the model cannot produce would never end a response."""
    unknown = [token for token in stop_ids if not 0 <= token < vocabulary]
    if unknown:
        raise Refusal.at(
            key,
            f"{', '.join(map(str, unknown[:8]))}: not among the model's tokens, which are 0 to {vocabulary - 1}, so it "
            "would never end a response",
            "take ids from this model's tokenizer, or remove them",
        )


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a generation: the model's own and the tokenizer's."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ids = own if isinstance(own, list) else [] if own is None else [own]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
