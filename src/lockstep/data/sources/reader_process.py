"""The process that runs a user's reader function and sends the rows. This module imports no heavy packages.

Each message is a line: one byte for the kind of message, then JSON. The parent process hashes the lines that contain
rows, and the hash is the fingerprint of the data.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.functions import Unloadable, describe_error, load_by_position
from lockstep.launch.supervisor import exit_if_forked, limit_memory, worker_socket

ROW, BAD_ROW, UNLOADABLE, NO_ROWS, RAISED, OUT_OF_MEMORY, END = b"r", b"b", b"u", b"n", b"x", b"m", b"e"
CALL = ("path",)


def serve(descriptor: int, file: str, name: str, memory_bytes: int, path: str) -> None:
    """Loads the user's reader function, then sends the rows of `path`."""
    worker = os.getpid()
    with worker_socket(descriptor) as connection, connection.makefile("wb", 2**16) as stream:
        for kind, payload in lines(file, name, memory_bytes, path):
            exit_if_forked(worker)
            stream.write(kind + payload + b"\n")


def lines(file: str, name: str, memory_bytes: int, path: str) -> Iterator[tuple[bytes, bytes]]:
    try:
        function = load_by_position(Path(file), name, CALL)
    except Unloadable as error:
        yield UNLOADABLE, json.dumps([error.why, error.remedy, error.code]).encode()
        return
    limit_memory(memory_bytes)
    try:
        found = function(path)
        if not is_rows(found):
            yield NO_ROWS, json.dumps(type(found).__name__).encode()
            return
        for row in found:
            yield encoded(row)
    except MemoryError as error:
        why = describe_error(error, file)
        # Frees the memory of the reader before the error is sent.
        traceback.clear_frames(error.__traceback__)
        yield OUT_OF_MEMORY, json.dumps(why).encode()
    except BaseException as error:  # noqa: BLE001 - any error of the user function is reported
        yield RAISED, json.dumps(describe_error(error, file)).encode()
    else:
        yield END, b""


def is_rows(found: Any) -> bool:
    return isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping)


def encoded(row: Any) -> tuple[bytes, bytes]:
    """Returns a row as JSON, or the reason why it cannot be encoded."""
    if not isinstance(row, Mapping) or not row:
        what = "an empty row" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        return BAD_ROW, f"is {what}".encode()
    try:
        return ROW, json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return BAD_ROW, " ".join(f"cannot be kept: {error}".split()).encode(errors="backslashreplace")
