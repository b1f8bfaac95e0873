"""What a model is, by content: two runs started from the same weights, tokenizer and template say the same here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.run.files import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# Of larger files so many pieces of so many bytes are read, evenly spaced: other weights differ everywhere.
WHOLE_BYTES, PIECES, PIECE = 2**30, 64, 2**20


def model_fingerprint(path: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """Checksums of weights, tokenizer and chat template in a model's folder; None for what is not in it."""
    folder = Path(path)
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    vocabulary = [file for file in names if file.name in TOKENIZER_FILES]
    template = tokenizer.chat_template
    return {
        "weights": _sampled(filter(_computes, names)),
        "tokenizer": _sampled(vocabulary),
        "template": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
    }


def model_checksums(path: str) -> dict[str, str]:
    """The files that say what a model computes, each by its whole content: a path may hold other weights tomorrow."""
    return {file.name: checksum(file) for file in filter(_computes, sorted(Path(path).iterdir()))}


def model_files(folder: str) -> dict[str, str]:
    """What tells a model from another without reading it: small files by content, weights by size and last change."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: _size_and_time(path) if path.suffix in WEIGHTS else checksum(path) for path in files}


def _size_and_time(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size} bytes, changed at {facts.st_mtime_ns / 1e9:.6f}"


def _computes(file: Path) -> bool:
    return file.name == "config.json" or file.suffix in (".safetensors", ".bin")


def _sampled(files: Iterable[Path]) -> str | None:
    digest, seen = hashlib.sha256(), False
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
        seen = True
    return digest.hexdigest() if seen else None


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            while block := stream.read(PIECE):
                yield block
            return
        for number in range(PIECES):
            stream.seek((size - PIECE) * number // (PIECES - 1))
            yield stream.read(PIECE)
