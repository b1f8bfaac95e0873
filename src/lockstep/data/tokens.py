"""Texts as tokens, on the short way: what a tokenizer's own call gives, without what the call does around it.

Of a call on one row's text, transformers' own work takes as long as a quarter of the tokenising itself; and most of
that is spared where the text is made of pieces whose tokens are known (`data/pieces.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from lockstep.data.pieces import Pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of the text alone, nothing put before or after them."""
    backend = plain_backend(tokenizer)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    runs = _runs(backend, text, ())
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids if runs is None else as_array(runs).tolist()
    return ids


def token_ids_and_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The same, and for each token the characters of the text that it stands for: (first, behind the last)."""
    backend = plain_backend(tokenizer)
    if backend is None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


def token_runs(tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int]) -> list[bytes] | None:
    """The tokens of the text before, between and behind the borders, which are places in it in their order; each run
    as 64-bit integers (`as_array`). None where that takes the places of all tokens to tell."""
    backend = plain_backend(tokenizer)
    return None if backend is None else _runs(backend, text, borders)


def as_array(runs: Sequence[bytes]) -> array[int]:
    ids = array("q")
    ids.frombytes(b"".join(runs))
    return ids


def _runs(backend: Tokenizer, text: str, borders: Sequence[int]) -> list[bytes] | None:
    if backend.encode_special_tokens or backend.pre_tokenizer is None:
        return None
    state = (backend.get_vocab_size(), backend.pre_tokenizer.__getstate__())
    known = _PIECES.get(backend)
    if known is None or known[0] != state:
        known = _PIECES[backend] = (state, Pieces.of(backend))
    return None if known[1] is None else known[1].runs(text, borders)


_PIECES: WeakKeyDictionary[Tokenizer, tuple[tuple[int, bytes], Pieces | None]] = WeakKeyDictionary()


def forget_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Before many texts: a word of the vocabulary that became an added token since is seen by nothing else."""
    backend = plain_backend(tokenizer)
    if backend is not None:
        _PIECES.pop(backend, None)


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
        self._is_special = np.zeros(max(self.special, default=0) + 2, dtype=bool)  # from the last one on none is
        self._is_special[list(self.special)] = True
        self._blank: dict[int, bool] = {}

    def where_special(self, ids: array[int]) -> list[int]:
        """The places of the special tokens among the ids, which are 64-bit integers."""
        found: list[int] = self._is_special.take(np.frombuffer(ids, dtype=np.int64), mode="clip").nonzero()[0].tolist()
        return found

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
