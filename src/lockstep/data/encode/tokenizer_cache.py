"""Fast tokenisation: each distinct piece of text is tokenised once."""

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


# Texts as tokens by their pieces: each different piece is tokenised once and its tokens are known from then on.
#
# Byte-level BPE first cuts a text into words by a pattern, and each word becomes tokens by itself. Where a word of
# the pattern surely ends whatever stands around it, the text can be cut too, and both parts give the tokens of the
# whole. Chats are some hundred such pieces of some thousand different ones, so that looking them up is many times
# faster than tokenising. A piece that was not seen before is given to the tokenizer itself, or its words are where it
# is ASCII: no merge is done here. What may not be cut so, in all that is known of it, is left to the tokenizer as a
# whole.
#
# Where a word surely ends, for the patterns in `_CUTS`:
#
# - Before white space that follows anything else. Their words hold white space at the beginning, where they are not
# white   space altogether. But newlines at the end of punctuation belong to it, except in GPT-2's pattern. - Behind
# the last newline of white space, but not in GPT-2's pattern, which parts white space before its last character,
# and not before a "/" in those that let newlines and slashes follow punctuation.
#
# They look ahead only over white space, for what follows it, and never back.

# Characters of the different pieces that are known at a time, with some for what else a piece takes; of the longest
# piece; and how many words are known: about 50 MB at most in all.
MOST, BESIDE, LONGEST, MOST_WORDS = 1 << 22, 16, 256, 1 << 16

_NEWLINES = r"[\r\n](?:\s*[\r\n])?"
_AT_SPACE = r"\s*\S+|\s+"
_AT_NEWLINE = rf"[^\S\r\n]*\S+(?:{_NEWLINES})?|\s*[\r\n]|\s+"
_AT_NEWLINE_BUT_SLASH = rf"[^\S\r\n]*\S+(?:{_NEWLINES}/\S*)*(?:{_NEWLINES})?|\s*[\r\n]|\s+"
# By the pattern of the words: the pieces that a text may be cut into.
_CUTS = {
    # GPT-2's, which ByteLevel has in itself
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


class NotKnown(Exception):
    """A text, or a cut in it, of which it is not sure that its pieces give its tokens."""


class Pieces(dict[str, bytes]):
    """The tokens of each piece that was seen, as 64-bit integers."""

    def __init__(self, backend: Tokenizer, pieces: str, words: str | None, added: dict[str, int]):
        from tokenizers.pre_tokenizers import ByteLevel

        super().__init__()
        # Bytes as the letters that vocabularies have for them.
        self._spelling = ByteLevel(add_prefix_space=False, use_regex=False)
        self._owner = ref(backend)
        self._find = re.compile(pieces)
        self._composes = backend.normalizer is not None
        self._added_ids = {content: array("q", [token]).tobytes() for content, token in added.items()}
        # The longest that stands there, as the tokenizer finds them.
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._parts: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self._held = 0
        self._letters = {letter for letter in map(chr, range(128)) if self._agrees(letter)}
        self._words = None if words is None else self._ascii_words(re.compile(words, re.ASCII).findall)
        self._known_words: dict[str, bytes] = {}

    @property
    def _backend(self) -> Tokenizer:
        """What made the tokens, and keeps them: alive for whoever asks."""
        backend = self._owner()
        assert backend is not None
        return backend

    @classmethod
    def of(cls, backend: Tokenizer) -> Pieces | None:
        """None for a tokenizer that does not work word by word, or with words of which nothing is said here."""
        patterns, added = _patterns(backend), _plain_added(backend)
        return None if patterns is None or added is None else cls(backend, *patterns, added)

    def runs(self, text: str, borders: Sequence[int] = ()) -> list[bytes] | None:
        """The tokens of the whole text, cut at the borders: one run more than there are borders.

        None where that is not known: a word or an added token reaches over a border, or the text is none for pieces.
        """
        try:
            return self._runs(text, borders)
        except (NotKnown, UnicodeEncodeError):  # half of a surrogate pair is no text
            return None

    def _runs(self, text: str, borders: Sequence[int]) -> list[bytes]:
        if self._composes and not text.isascii() and self._backend.normalizer.normalize_str(text) != text:
            raise NotKnown  # the tokenizer would see another text, and its words
        made: list[bytes] = []
        run: list[bytes] = []
        ahead, start = [*borders, len(text) + 1], 0
        known, words, added_ids = self.__getitem__, self._find.findall, self._added_ids
        for added in self._added.finditer(text):
            before, behind = added.span()
            while ahead[0] < before:
                start = self._to_border(text, start, before, ahead, made, run)
            if start < before:
                run += map(known, words(text, start, before))
            while ahead[0] == before:
                _next_run(ahead, made, run)
            run.append(added_ids[added.group()])
            start = behind
        while ahead[0] < len(text):
            start = self._to_border(text, start, len(text), ahead, made, run)
        run += map(known, words(text, start))
        while len(ahead) > 1:
            _next_run(ahead, made, run)
        made.append(b"".join(run))
        return made

    def _to_border(self, text: str, start: int, end: int, ahead: list[int], made: list[bytes], run: list[bytes]) -> int:
        """Up to the next border, which lies before the end; returns how far the tokens reach."""
        border = ahead[0]
        if border < start:
            raise NotKnown  # in an added token, or in a piece that had a border already
        match, right = self._find.match, b""
        while start < border:
            found = match(text, start, end)
            assert found is not None  # white space or anything else
            piece, begin, start = found.group(), start, found.end()
            if start <= border:
                run.append(self[piece])
            else:
                left, right = self._parted(piece, border - begin)
                run.append(left)
        _next_run(ahead, made, run)
        run.append(right)
        return start

    def _parted(self, piece: str, place: int) -> tuple[bytes, bytes]:
        """The tokens of a piece before and behind a place in it where a word of it ends."""
        known = self._parts.get((piece, place))
        if known is None:
            whole, left = self[piece], array("q")
            for word, (_, end) in self._backend.pre_tokenizer.pre_tokenize_str(piece):
                if end > place:
                    break
                left.extend(token.id for token in self._backend.model.tokenize(word))
                reached = end
            begin = left.tobytes()
            if not left or reached != place or not whole.startswith(begin):
                raise NotKnown
            known = begin, whole[len(begin) :]
            self._make_room(piece)
            self._parts[piece, place] = known
        return known

    def __missing__(self, piece: str) -> bytes:
        strange = set(piece) - self._letters
        if not all(map(self._agrees, strange)):
            raise NotKnown
        self._letters |= strange
        if self._words is not None and piece.isascii():
            tokens = b"".join(map(self._of_word, self._words(piece)))
        else:
            tokens = array("q", self._backend.encode(piece, add_special_tokens=False).ids).tobytes()
        if len(piece) <= LONGEST:
            self._make_room(piece)
            self[piece] = tokens
        return tokens

    def _of_word(self, word: str) -> bytes:
        tokens = self._known_words.get(word)
        if tokens is None:
            ((spelt, _),) = self._spelling.pre_tokenize_str(word)
            tokens = array("q", [token.id for token in self._backend.model.tokenize(spelt)]).tobytes()
            if len(word) <= LONGEST:
                if len(self._known_words) >= MOST_WORDS:
                    self._known_words.clear()
                self._known_words[word] = tokens
        return tokens

    def _ascii_words(self, words: Callable[[str], list[str]]) -> Callable[[str], list[str]] | None:
        """The words of a piece in ASCII, which Python's own patterns find fast; None where they are not the
        tokenizer's, asked for every three kinds of letters that follow each other."""
        tried = "".join(map("".join, itertools.product("aSl1 .'/\n\r\t", repeat=3)))
        found = [tried[start:end] for _, (start, end) in self._backend.pre_tokenizer.pre_tokenize_str(tried)]
        return words if words(tried) == found else None

    def _make_room(self, piece: str) -> None:
        self._held += len(piece) + BESIDE
        if self._held > MOST:
            self._held = len(piece) + BESIDE
            self.clear()
            self._parts.clear()

    def _agrees(self, letter: str) -> bool:
        """Whether the tokenizer takes the letter for white space where Python does, and only there: the versions of
        Unicode differ. Asked of the pattern itself: white space ends a word of punctuation, and no newline starts one
        behind it."""
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
    """The pattern for texts of ASCII alone, without the classes that Python does not know."""
    kinds = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9"}  # there are no others
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
    """The pattern of the pieces, and that of the words in ASCII where it is known; of a byte-level BPE."""
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
        # Digits may be set apart before: they are no white space, so that the pieces are the same, but not the words.
        if kinds in (["ByteLevel"], ["Digits", "ByteLevel"]):
            return _CUTS[_GPT2], _in_ascii(_GPT2) if kinds == ["ByteLevel"] else None
        return None
    if kinds != ["Split", "ByteLevel"] or steps[0]["behavior"] != "Isolated" or steps[0]["invert"]:
        return None
    pattern = steps[0]["pattern"].get("Regex")
    return (_CUTS[pattern], _in_ascii(pattern)) if pattern in _CUTS else None


def _state(part: Any) -> Any:
    """What a tokenizer.json says of a part."""
    return None if part is None else json.loads(part.__getstate__())


def _plain_added(backend: Tokenizer) -> dict[str, int] | None:
    """The added tokens; None where one is found otherwise than by its text, or is white space, whose place in the
    text a tokenizer may not tell."""
    found: dict[str, int] = {}
    for index, token in backend.get_added_tokens_decoder().items():
        if token.normalized or token.lstrip or token.rstrip or token.single_word or not token.content.strip():
            return None
        if token.content in found:
            return None
        found[token.content] = index
    return found


# Texts as tokens, on the short way: what a tokenizer's own call gives, without what the call does around it.
#
# Of a call on one row's text, transformers' own work takes as long as a quarter of the tokenising itself; and most of
# that is spared where the text is made of pieces whose tokens are known (`data/encode/tokenizer_cache.py`).


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
