"""Texts as tokens, on the short way: what a tokenizer's own call gives, without what the call does around it.

Of a call on one row's text, transformers' own work takes as long as a quarter of the tokenising itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of the text alone, nothing put before or after them."""
    backend = plain_backend(tokenizer)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def token_ids_and_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The same, and for each token the characters of the text that it stands for: (first, behind the last)."""
    backend = plain_backend(tokenizer)
    if backend is None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """What the tokenizer's own call asks, in the state in which it asks it; None where the call does more than ask."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = kind.__call__ is PreTrainedTokenizerBase.__call__
    if not plain or getattr(kind, "_encode_plus", None) is not PreTrainedTokenizerFast._encode_plus:
        return None
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    backend: Tokenizer = tokenizer.backend_tokenizer
    # A tokenizer.json may say that texts are cut or padded; a call that asks for neither says that they are not.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


class TokenFacts:
    """What is asked of a tokenizer's vocabulary for every row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(added | set(tokenizer.all_special_ids))
        self.size = len(tokenizer)
        self._blank: dict[int, bool] = {}

    def blank(self, tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
        """Whether nothing is seen of the token."""
        if token not in self._blank:
            self._blank[token] = not tokenizer.decode([token]).strip()
        return self._blank[token]


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, TokenFacts] = WeakKeyDictionary()


def token_facts(tokenizer: PreTrainedTokenizerBase) -> TokenFacts:
    """Asked once, and again when tokens were added."""
    known = _KNOWN.get(tokenizer)
    if known is None or known.size != len(tokenizer):
        known = _KNOWN[tokenizer] = TokenFacts(tokenizer)
    return known
