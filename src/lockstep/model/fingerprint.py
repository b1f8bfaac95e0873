"""Computes fingerprints of model folders from the content of weights, tokenizer and chat template."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.run.files import THREADS, checksum
from lockstep.vision.images import PROCESSOR_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# Other files of a model folder that affect the computation or the tokenisation.
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    # score_stats.json: score normalisation of a reward model; process_reward.json: label tokens of a PRM.
    "score_stats.json",
    "process_reward.json",
    *PROCESSOR_FILES,
)
# Of files above WHOLE_BYTES only PIECES evenly spaced blocks of PIECE bytes are read. Files with different weights
# differ in every block, so a sample of the blocks detects a difference.
WHOLE_BYTES, PIECES, PIECE = 2**30, 64, 2**20
# If the weights of a folder exceed WHOLE_BYTES, only this many bytes are read at the start, middle and end of each
# tensor. A tensor that was trained, merged or replaced differs in all three blocks.
TENSOR_BLOCK = 4096
# Bytes that a thread reads of a file that is prefetched, and bytes of each call.
PREFETCHED, CACHED_AT_ONCE = 2**27, 2**24


# Results of `prefetch_model` by what was computed and by the state of the files. A result is used once.
_prefetched: dict[tuple[object, ...], Future[str]] = {}


def prefetch_model(path: str) -> None:
    """Starts to read the weights of a model folder in the background, so that the disk works while Python imports
    libraries. The digests of weights that are read completely are computed, too, which takes as long as the imports.
    Has no effect for other paths, such as names of the hub."""
    files = sorted(Path(path).glob("*.safetensors"))
    if files:
        threading.Thread(target=_prefetch, args=(files,), daemon=True, name="prefetch").start()


def _prefetch(files: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):
        # The processes of a machine share the page cache, and one of them needs the digests.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        size = sum(file.stat().st_size for file in files)
        if size > WHOLE_BYTES:
            # The page cache of a small machine would drop the first files before they are loaded.
            if size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
                _read_into_cache(files)
            return
        computing = list(filter(_computes, sorted(files[0].parent.iterdir())))
        works: list[tuple[tuple[object, ...], Callable[[], str]]] = [
            (("content", *map(_state, computing)), partial(_content, computing)),
            *((("checksum", _state(file)), partial(checksum, file)) for file in files),
        ]
        _prefetched.update((key, Future()) for key, _ in works)
        for key, work in works:
            # `_prefetched` may have no such result any more, if the main thread needed it.
            if (future := _prefetched.get(key)) is not None and future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - the waiting thread raises the error
                    future.set_exception(error)


def _read_into_cache(files: Sequence[Path]) -> None:
    """Reads the files into the page cache. `posix_fadvise` is not enough: Linux reads only the first megabytes then.
    The threads are daemons, so a run that is refused or interrupted does not wait for them."""
    pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, PREFETCHED)]
    shares = [pieces[first::THREADS] for first in range(THREADS)]
    threads = [threading.Thread(target=_read_pieces, args=(share,), daemon=True) for share in shares if share]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_pieces(pieces: Sequence[tuple[Path, int]]) -> None:
    with contextlib.suppress(OSError):  # whoever loads the file reports the error
        for file, start in pieces:
            with file.open("rb", buffering=0) as opened:
                opened.seek(start)
                for _ in range(PREFETCHED // CACHED_AT_ONCE):
                    if not opened.read(CACHED_AT_ONCE):
                        break


def _state(file: Path) -> tuple[object, ...]:
    facts = file.stat()
    return str(file.resolve()), facts.st_ino, facts.st_size, facts.st_mtime_ns


def _read_once(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """Returns the result of the background thread, if it has started to compute it, or computes it."""
    future = _prefetched.pop((kind, *map(_state, files)), None)
    return compute() if future is None or future.cancel() else future.result()


def model_fingerprint(path: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """Returns the checksums of weights, tokenizer and chat template of a model folder, and of the image processor if it
    has one. The checksum of a missing part is None."""
    folder = Path(path)
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    vocabulary = [file for file in names if file.name in TOKENIZER_FILES]
    processor = [file for file in names if file.name in PROCESSOR_FILES]
    template = tokenizer.chat_template
    return {
        "weights": _sampled(list(filter(_computes, names))),
        "tokenizer": _sampled(vocabulary),
        "template": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        **({"processor": _sampled(processor)} if processor else {}),
    }


def model_checksums(path: str) -> dict[str, str]:
    """Returns the checksums of the config and weight files."""
    return {file.name: checksum(file) for file in filter(_computes, sorted(Path(path).iterdir()))}


def folder_fingerprint(folder: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """Returns a digest of each file of a model, by name. `progress` is called with each file name.

    Files are read completely if the weights have at most 1 GiB. For larger models, only a sample of every tensor is
    read, which takes seconds.
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
    """Returns the checksum of a file. In config files the key `transformers_version` is ignored."""
    if file.name not in ("config.json", "generation_config.json"):
        return _read_once("checksum", [file], partial(checksum, file))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config.pop("transformers_version", None)
    except (ValueError, AttributeError, RecursionError):
        return checksum(file)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def differing_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Describes each file that changed between two fingerprints of a folder."""
    changed = [f"{name} has other content" for name in before if name in now and before[name] != now[name]]
    gone = [f"{name} is missing" for name in before if name not in now]
    # Older versions stored no digests of the image processor.
    return changed + gone + [f"{name} is new" for name in now if name not in before and name not in PROCESSOR_FILES]


def model_files(folder: str) -> dict[str, str]:
    """Identifies a model without reading its weights. Weight files are identified by size and mtime, other files by
    content."""
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
    """Yields the header of a safetensors file and blocks of each tensor, or evenly spaced blocks if the header is
    invalid."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length < size else b""
        try:
            entries = json.loads(header)
            spans = [tuple(one["data_offsets"]) for name, one in entries.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            yield from _blocks(file)
            return
        yield header
        for start, end in sorted(spans):
            last = max(start, end - TENSOR_BLOCK)
            for place in sorted({start, (start + last) // 2, last}):
                stream.seek(8 + length + place)
                yield stream.read(min(TENSOR_BLOCK, end - place))


def _sampled(files: Sequence[Path]) -> str | None:
    return _read_once("content", files, partial(_content, files)) if files else None


def _content(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


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
