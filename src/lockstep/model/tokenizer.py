"""The tokenizer of a model folder, or the plain word that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import Refusal
from lockstep.model.pretrained import pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Files that tokenizers of all families are stored in.
FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
WHERE_FROM = "copy the tokenizer's files from the model it was trained with: tokenizer.json, tokenizer_config.json"


def tokenizer_of(path: str, where: str) -> PreTrainedTokenizerBase:
    """The tokenizer in `path`; `where` names the folder in a refusal."""
    folder = Path(path)
    if folder.is_dir() and not has_tokenizer(folder):
        raise Refusal.at(where, f"the folder {path} has no tokenizer", WHERE_FROM)
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = pretrained(AutoTokenizer, path, where, "its tokenizer")
    # Without its vocabulary transformers builds a tokenizer that turns every text into nothing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        why = f"the tokenizer in {path} has no vocabulary: it knows special tokens only"
        raise Refusal.at(where, why, WHERE_FROM)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    return any(file for pattern in FILES for file in folder.glob(pattern))
