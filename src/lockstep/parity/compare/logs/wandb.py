"""wandb's own file of an offline run: blocks of 32 KiB with records, as LevelDB's log has them, of protobuf messages.

Read here rather than through the package, which has no public reader for it. Of all the records only the history's are
looked at, and of them only names and numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.table import LogRow

MAGIC = b":W&B"
_FILE_HEADER = 7
_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Field numbers of the messages.
_RECORD_HISTORY = 2
_HISTORY_ITEM = 1
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_INTEGER, _ITEM_NUMBER, _ITEM_JSON = 1, 2, 5, 6, 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def rows(file: str, content: bytes) -> Iterator[LogRow]:
    """The rows of the run's history. A record that is cut short at the end is left out."""
    for index, record in enumerate(records(file, content), start=1):
        try:
            for number, history in fields(record):
                if number == _RECORD_HISTORY and isinstance(history, bytes):
                    yield index, _row(history)
        except (ValueError, IndexError, struct.error):
            raise Refusal.at(
                f"{file} record {index}", "not a record of this kind of file", "export the run's history as csv"
            ) from None


def records(file: str, content: bytes) -> Iterator[bytes]:
    offset, parts = _FILE_HEADER, b""
    while offset + _HEADER.size <= len(content):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER.size:
            offset += left
            continue
        _, length, kind = _HEADER.unpack_from(content, offset)
        start = offset + _HEADER.size
        if kind == 0 and length == 0:  # a block that was made larger than what was written into it
            offset += left
            continue
        if start + length > len(content):
            return
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise Refusal.at(f"{file} byte {offset}", "no record starts there", "export the run's history as csv")
        data, offset = content[start : start + length], start + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts


def _row(history: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, item in fields(history):
        if number != _HISTORY_ITEM or not isinstance(item, bytes):
            continue
        keys, value = [], None
        for field, found in fields(item):
            if field in (_ITEM_KEY, _ITEM_NESTED_KEY) and isinstance(found, bytes):
                keys.append(found.decode())
            elif field == _ITEM_JSON and isinstance(found, bytes):
                value = json.loads(found)
            elif field == _ITEM_INTEGER and isinstance(found, int):
                value = (found >> 1) ^ -(found & 1)  # signed numbers go 0, -1, 1, -2 ...
            elif field == _ITEM_NUMBER:
                value = found
        row[".".join(keys)] = value
    return row


def fields(message: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """The fields of a protobuf message: number and value."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        number, kind = tag >> 3, tag & 7
        value: bytes | int | float
        if kind == _VARINT:
            value, offset = _varint(message, offset)
        elif kind == _FIXED64:
            (value,), offset = struct.unpack_from("<d", message, offset), offset + 8
        elif kind == _FIXED32:
            (value,), offset = struct.unpack_from("<f", message, offset), offset + 4
        elif kind == _BYTES:
            length, offset = _varint(message, offset)
            if offset + length > len(message):
                raise ValueError("a field is longer than its message")
            value, offset = message[offset : offset + length], offset + length
        else:
            raise ValueError(f"no field is of kind {kind}")
        yield number, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value, offset = value | (byte & 0x7F) << shift, offset + 1
        if byte < 0x80:
            return value, offset
        shift += 7
