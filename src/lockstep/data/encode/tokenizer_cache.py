"""Fast tokenisation: each distinct piece of text is tokenised once and cached.

Byte-level BPE first splits a text into words by a regular expression, and tokenises each word independently. The text
can be cut at positions where a word ends regardless of its context. The tokens of a text that is cut there are the
concatenated tokens of its pieces. A chat consists of hundreds of pieces, and most pieces occur in many chats. Looking
up a cached piece is many times faster than tokenising it. A piece that is not cached is tokenised by the tokenizer. An
uncached ASCII piece is split into words, and only the words that are not cached are tokenised. This module does no BPE
merges itself. A text that cannot be cut safely is tokenised as a whole.

Positions where a text can safely be cut, for the word patterns in `_CUTS`:

- A text can be cut before white space that follows a character other than white space, because words contain white
  space only at their start. A cut between punctuation and a newline is not safe, because all patterns except GPT-2's
  join the newline to the punctuation.
- A text can be cut after the last newline in a run of white space. A cut after the newline is not safe with GPT-2's
  pattern, which splits a run of white space before the last character of the run. A cut between newline and "/" is not
  safe if the pattern lets newlines and slashes follow punctuation.

The word patterns have no lookbehind, and their lookahead covers only white space.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


# The cache uses about 50 MB at most. MOST limits the total size of the cached pieces, where the size of a piece is its
# number of characters plus OVERHEAD. LONGEST limits the characters of a cached piece. MOST_WORDS limits the number of
# cached words.
MOST, OVERHEAD, LONGEST, MOST_WORDS = 1 << 22, 16, 256, 1 << 16

_NEWLINES = r"[\r\n](?:\s*[\r\n])?"
_AT_SPACE = r"\s*\S+|\s+"
_AT_NEWLINE = rf"[^\S\r\n]*\S+(?:{_NEWLINES})?|\s*[\r\n]|\s+"
_AT_NEWLINE_BUT_SLASH = rf"[^\S\r\n]*\S+(?:{_NEWLINES}/\S*)*(?:{_NEWLINES})?|\s*[\r\n]|\s+"
# Maps the word pattern of a tokenizer to the pattern of the pieces into which a text may be cut.
_CUTS = {
    # GPT-2, built into ByteLevel
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _AT_SPACE,
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _AT_NEWLINE,
    # Qwen 2, 2.5 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _AT_NEWLINE,
    # Qwen 3.5
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _AT_NEWLINE,
    # GPT-4o and gpt-oss
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _AT_NEWLINE_BUT_SLASH,
    # Mistral since Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _AT_NEWLINE_BUT_SLASH,
}
_GPT2 = next(iter(_CUTS))


class NotCacheable(Exception):
    """Raised if the tokens of a text are not those of its pieces, or if the text cannot be cut safely at a border."""


class Pieces(dict[str, bytes]):
    """Cache of the token ids of each piece of text, as 64-bit integers."""

    def __init__(self, backend: Tokenizer, pieces: str, words: str | None, added: dict[str, int]):
        from tokenizers.pre_tokenizers import ByteLevel

        super().__init__()
        # Maps bytes to the characters of byte-level vocabularies.
        self._spelling = ByteLevel(add_prefix_space=False, use_regex=False)
        self._owner = ref(backend)
        self._find = re.compile(pieces)
        self._composes = backend.normalizer is not None
        self._added_ids = {content: array("q", [token]).tobytes() for content, token in added.items()}
        # Added tokens are matched longest first, as in the tokenizer.
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._parts: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self._held = 0
        self._letters = {letter for letter in map(chr, range(128)) if self._agrees(letter)}
        self._words = None if words is None else self._ascii_words(re.compile(words, re.ASCII).findall)
        self._word_tokens: dict[str, bytes] = {}

    @property
    def _backend(self) -> Tokenizer:
        """The tokenizer backend. This object holds only a weak reference, so the caller keeps the backend alive."""
        backend = self._owner()
        assert backend is not None
        return backend

    @classmethod
    def of(cls, backend: Tokenizer) -> Pieces | None:
        """Creates the cache. Returns None if the tokenizer does not work word by word, or if its word pattern is not in
        `_CUTS`."""
        patterns, added = _patterns(backend), _plain_added(backend)
        return None if patterns is None or added is None else cls(backend, *patterns, added)

    def runs(self, text: str, borders: Sequence[int] = ()) -> list[bytes] | None:
        """Returns the tokens of the text, split at the character positions `borders`. N borders give N + 1 runs of
        tokens.

        Returns None if a word or an added token crosses a border, or if the text cannot be cut into pieces.
        """
        try:
            return self._runs(text, borders)
        except (NotCacheable, UnicodeEncodeError):  # the text contains half of a surrogate pair
            return None

    def _runs(self, text: str, borders: Sequence[int]) -> list[bytes]:
        if self._composes and not text.isascii() and self._backend.normalizer.normalize_str(text) != text:
            raise NotCacheable  # the normaliser would change the text
        made: list[bytes] = []
        run: list[bytes] = []
        ahead, start = [*borders, len(text) + 1], 0
        tokens_of, words, added_ids = self.__getitem__, self._find.findall, self._added_ids
        for added in self._added.finditer(text):
            before, behind = added.span()
            while ahead[0] < before:
                start = self._to_border(text, start, before, ahead, made, run)
            if start < before:
                run += map(tokens_of, words(text, start, before))
            while ahead[0] == before:
                _next_run(ahead, made, run)
            run.append(added_ids[added.group()])
            start = behind
        while ahead[0] < len(text):
            start = self._to_border(text, start, len(text), ahead, made, run)
        run += map(tokens_of, words(text, start))
        while len(ahead) > 1:
            _next_run(ahead, made, run)
        made.append(b"".join(run))
        return made

    def _to_border(self, text: str, start: int, end: int, ahead: list[int], made: list[bytes], run: list[bytes]) -> int:
        """Tokenises the text up to the next border, which must lie before `end`. Returns where the tokenised text
        ends."""
        border = ahead[0]
        if border < start:
            raise NotCacheable  # the border is inside an added token, or is the second border in a piece
        match, right = self._find.match, b""
        while start < border:
            found = match(text, start, end)
            assert found is not None  # the pattern matches any character
            piece, begin, start = found.group(), start, found.end()
            if start <= border:
                run.append(self[piece])
            else:
                left, right = self._split(piece, border - begin)
                run.append(left)
        _next_run(ahead, made, run)
        run.append(right)
        return start

    def _split(self, piece: str, place: int) -> tuple[bytes, bytes]:
        """Returns the tokens of a piece before and after the position `place`. A word must end at `place`."""
        parts = self._parts.get((piece, place))
        if parts is None:
            tokens, left = self[piece], array("q")
            for word, (_, end) in self._backend.pre_tokenizer.pre_tokenize_str(piece):
                if end > place:
                    break
                left.extend(token.id for token in self._backend.model.tokenize(word))
                reached = end
            begin = left.tobytes()
            if not left or reached != place or not tokens.startswith(begin):
                raise NotCacheable
            parts = begin, tokens[len(begin) :]
            self._make_room(piece)
            self._parts[piece, place] = parts
        return parts

    def __missing__(self, piece: str) -> bytes:
        new_letters = set(piece) - self._letters
        if not all(map(self._agrees, new_letters)):
            raise NotCacheable
        self._letters |= new_letters
        if self._words is not None and piece.isascii():
            tokens = b"".join(map(self._of_word, self._words(piece)))
        else:
            tokens = array("q", self._backend.encode(piece, add_special_tokens=False).ids).tobytes()
        if len(piece) <= LONGEST:
            self._make_room(piece)
            self[piece] = tokens
        return tokens

    def _of_word(self, word: str) -> bytes:
        tokens = self._word_tokens.get(word)
        if tokens is None:
            ((spelt, _),) = self._spelling.pre_tokenize_str(word)
            tokens = array("q", [token.id for token in self._backend.model.tokenize(spelt)]).tobytes()
            if len(word) <= LONGEST:
                if len(self._word_tokens) >= MOST_WORDS:
                    self._word_tokens.clear()
                self._word_tokens[word] = tokens
        return tokens

    def _ascii_words(self, words: Callable[[str], list[str]]) -> Callable[[str], list[str]] | None:
        """Returns a function that splits an ASCII piece into words with Python's fast regular expressions. Returns None
        if Python and the tokenizer split any combination of three test characters into different words."""
        tried = "".join(map("".join, itertools.product("aSl1 .'/\n\r\t", repeat=3)))
        found = [tried[start:end] for _, (start, end) in self._backend.pre_tokenizer.pre_tokenize_str(tried)]
        return words if words(tried) == found else None

    def _make_room(self, piece: str) -> None:
        self._held += len(piece) + OVERHEAD
        if self._held > MOST:
            self._held = len(piece) + OVERHEAD
            self.clear()
            self._parts.clear()

    def _agrees(self, letter: str) -> bool:
        """Returns whether the tokenizer and Python agree on whether the character is white space. The Unicode versions
        of Python and the tokenizer may differ. A character is white space for the tokenizer if the tokenizer puts the
        character and a following newline into one word, but "!" and the character into two words."""
        if letter in "\r\n":
            return True
        words = self._backend.pre_tokenizer.pre_tokenize_str
        space = len(words(f"{letter}\n")) == 1 and len(words(f"!{letter}")) == 2
        return space == letter.isspace()


def _next_run(ahead: list[int], made: list[bytes], run: list[bytes]) -> None:
    made.append(b"".join(run))
    run.clear()
    ahead.pop(0)


def _in_ascii(pattern: str) -> str:
    """Converts a word pattern for ASCII texts: replaces the character classes (`\\p{L}`) that Python does not
    support."""
    kinds = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9"}  # other Unicode classes contain no ASCII characters
    inside, made = False, []
    for part in re.split(r"(\\p\{\w+\}|\\.|[\[\]])", pattern):
        if part.startswith("\\p"):
            letters = kinds.get(part[3:-1], "")
            made.append(letters if inside else f"[{letters}]")
        else:
            inside = part == "[" or (inside and part != "]")
            made.append(part)
    return "".join(made)


def _patterns(backend: Tokenizer) -> tuple[str, str | None] | None:
    """Returns two patterns for a byte-level BPE tokenizer: one for pieces, one for ASCII words. None if unsupported."""
    from tokenizers.models import BPE

    model = backend.model
    plain = isinstance(model, BPE) and model.dropout is None and not model.byte_fallback and model.unk_token is None
    if not plain or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normal = _state(backend.normalizer)
    steps = _state(backend.pre_tokenizer)
    if normal not in (None, {"type": "NFC"}) or steps is None:
        return None
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    kinds = [step["type"] for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1]["add_prefix_space"]:
        return None
    if steps[-1]["use_regex"]:
        # The pre-tokenizer Digits changes the words, but not the pieces, because digits are not white space.
        if kinds in (["ByteLevel"], ["Digits", "ByteLevel"]):
            return _CUTS[_GPT2], _in_ascii(_GPT2) if kinds == ["ByteLevel"] else None
        return None
    if kinds != ["Split", "ByteLevel"] or steps[0]["behavior"] != "Isolated" or steps[0]["invert"]:
        return None
    pattern = steps[0]["pattern"].get("Regex")
    return (_CUTS[pattern], _in_ascii(pattern)) if pattern in _CUTS else None


def _state(part: Any) -> Any:
    """Returns the settings of a tokenizer component, as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _plain_added(backend: Tokenizer) -> dict[str, int] | None:
    """Returns the added tokens and their ids. Returns None if the tokenizer does not match an added token by its exact
    text, or if an added token is white space, whose offsets are unreliable."""
    found: dict[str, int] = {}
    for index, token in backend.get_added_tokens_decoder().items():
        if token.normalized or token.lstrip or token.rstrip or token.single_word or not token.content.strip():
            return None
        if token.content in found:
            return None
        found[token.content] = index
    return found


# The functions below give the same tokens as the tokenizer's `__call__`. These functions avoid the overhead of
# `__call__` in transformers, which is a quarter of the tokenisation time.


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of the text, without special tokens."""
    backend = plain_backend(tokenizer)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    runs = _runs(backend, text, ())
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids if runs is None else as_array(runs).tolist()
    return ids


def token_ids_and_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the tokens of the text with their character offsets as (start, end) pairs."""
    backend = plain_backend(tokenizer)
    if backend is None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


def token_runs(tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int]) -> list[bytes] | None:
    """Returns the tokens of the text, split at the sorted character positions `borders`. Each run of tokens is stored
    as 64-bit integers (see `as_array`). Returns None if the split needs the offsets of all tokens."""
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
    cached = _PIECES.get(backend)
    if cached is None or cached[0] != state:
        cached = _PIECES[backend] = (state, Pieces.of(backend))
    return None if cached[1] is None else cached[1].runs(text, borders)


_PIECES: WeakKeyDictionary[Tokenizer, tuple[tuple[int, bytes], Pieces | None]] = WeakKeyDictionary()


def forget_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Clears the cache of pieces. Call this after a vocabulary word became an added token, because the cache does not
    notice that change."""
    backend = plain_backend(tokenizer)
    if backend is not None:
        _PIECES.pop(backend, None)


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Returns the Rust tokenizer that `__call__` uses, with the same settings. Returns None for a slow tokenizer, or if
    a class overrides `__call__`."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = kind.__call__ is PreTrainedTokenizerBase.__call__
    if not plain or getattr(kind, "_encode_plus", None) is not PreTrainedTokenizerFast._encode_plus:
        return None
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    backend: Tokenizer = tokenizer.backend_tokenizer
    # tokenizer.json may enable truncation and padding. `__call__` disables truncation and padding by default.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


class TokenFacts:
    """The special tokens and the blank tokens (white space or nothing) of a vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(added | set(tokenizer.all_special_ids))
        self.size = len(tokenizer)
        self._is_special = np.zeros(
            max(self.special, default=0) + 2, dtype=bool
        )  # ids beyond the last special token are clipped to the last entry, which is False
        self._is_special[list(self.special)] = True
        self._blank: dict[int, bool] = {}

    def where_special(self, ids: array[int]) -> list[int]:
        """Returns the positions of the special tokens among the 64-bit ids."""
        found: list[int] = self._is_special.take(np.frombuffer(ids, dtype=np.int64), mode="clip").nonzero()[0].tolist()
        return found

    def blank(self, tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
        """Returns whether the token decodes to white space or nothing."""
        if token not in self._blank:
            self._blank[token] = not tokenizer.decode([token]).strip()
        return self._blank[token]


_TOKEN_FACTS: WeakKeyDictionary[PreTrainedTokenizerBase, TokenFacts] = WeakKeyDictionary()


def token_facts(tokenizer: PreTrainedTokenizerBase) -> TokenFacts:
    """Returns the cached `TokenFacts` of a tokenizer, which are computed again if the vocabulary size changed."""
    facts = _TOKEN_FACTS.get(tokenizer)
    if facts is None or facts.size != len(tokenizer):
        facts = _TOKEN_FACTS[tokenizer] = TokenFacts(tokenizer)
    return facts
