"""What a model is, by content: two runs started from the same weights, tokenizer and template say the same here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.run.files import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# Besides weights and tokenizer: what decides how a model computes and how text becomes tokens.
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    # What a reward model's scores are normalised by, and where a process reward model judges.
    "score_stats.json",
    "process_reward.json",
)
# Of larger files so many pieces of so many bytes are read, evenly spaced: other weights differ everywhere.
WHOLE_BYTES, PIECES, PIECE = 2**30, 64, 2**20
# Where the weights of a folder take more than WHOLE_BYTES: bytes that are read at the start, in the middle and at the
# end of each tensor. A tensor that was trained further, merged or replaced differs in all of them.
TENSOR_BLOCK = 4096


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


def folder_fingerprint(folder: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """A digest of the content of each file that a model is loaded from, by name. `progress` hears of each file.

    Whole files up to 1 GiB of weights; of larger models a sample of every tensor, so that it takes seconds.
    """
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file()]
    weights = [file for file in files if file.suffix == ".safetensors"]
    weights = weights or [file for file in files if file.name.startswith(("pytorch_model", "adapter_model"))]
    large = sum(file.stat().st_size for file in weights) > WHOLE_BYTES
    found = {}
    for file in files:
        if file in weights or file.name in (*SETTINGS_FILES, *TOKENIZER_FILES):
            progress(file.name)
            found[file.name] = _sampled_tensors(file) if large and file in weights else f"sha256 {_digest(file)}"
    return found


def _digest(file: Path) -> str:
    """Of its content; of a config without the version of whoever wrote it, which changes nothing that is computed."""
    if file.name not in ("config.json", "generation_config.json"):
        return checksum(file)
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        told.pop("transformers_version", None)
    except (ValueError, AttributeError, RecursionError):
        return checksum(file)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def differing_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What has changed between two fingerprints of a folder, a sentence for each file."""
    changed = [f"{name} has other content" for name in before if name in now and before[name] != now[name]]
    gone = [f"{name} is missing" for name in before if name not in now]
    return changed + gone + [f"{name} is new" for name in now if name not in before]


def model_files(folder: str) -> dict[str, str]:
    """What tells a model from another without reading it: small files by content, weights by size and last change."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: _size_and_time(path) if path.suffix in WEIGHTS else checksum(path) for path in files}


def _size_and_time(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size} bytes, changed at {facts.st_mtime_ns / 1e9:.6f}"


def _computes(file: Path) -> bool:
    return file.name == "config.json" or file.suffix in (".safetensors", ".bin")


def _sampled_tensors(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    for block in _tensor_blocks(file, size) if file.suffix == ".safetensors" else _blocks(file):
        digest.update(block)
    return f"sampled {digest.hexdigest()}"


def _tensor_blocks(file: Path, size: int) -> Iterator[bytes]:
    """The header of a safetensors file, and blocks of each tensor; evenly spaced pieces where it has no such header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length < size else b""
        try:
            told = json.loads(header)
            spans = [tuple(one["data_offsets"]) for name, one in told.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            yield from _blocks(file)
            return
        yield header
        for start, end in sorted(spans):
            last = max(start, end - TENSOR_BLOCK)
            for place in sorted({start, (start + last) // 2, last}):
                stream.seek(8 + length + place)
                yield stream.read(min(TENSOR_BLOCK, end - place))


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
