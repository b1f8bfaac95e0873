"""Readers of binary logs: wandb's and SwanLab's files of offline runs, and tensorboard's event files.

wandb and SwanLab write LevelDB log blocks of 32 KiB that contain records. Neither wandb nor SwanLab has a public reader
for these files.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal, missing_extra
from lockstep.parity.compare.logs.log_curves import LARGEST_STEP, NON_FINITE, Points
from lockstep.parity.compare.logs.table_logs import LogRow

_FILE_HEADER, _BLOCK = 7, 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXPORT = "export its metrics as csv"


def _records(file: str, content: bytes) -> Iterator[bytes]:
    """Yields the records of LevelDB's log blocks. An incomplete last record is skipped."""
    offset, parts = _FILE_HEADER, b""
    while offset + _HEADER.size <= len(content):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER.size:
            offset += left
            continue
        _, length, kind = _HEADER.unpack_from(content, offset)
        start = offset + _HEADER.size
        if kind == 0 and length == 0:  # the rest of the block is unused
            offset += left
            continue
        if start + length > len(content):
            return
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise Refusal.at(f"{file} byte {offset}", "no record starts there", _EXPORT, code="damaged-file")
        data, offset = content[start : start + length], start + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Yields the field number and the value of each field of a protobuf message."""
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
                raise ValueError("a protobuf field is longer than its message")
            value, offset = message[offset : offset + length], offset + length
        else:
            raise ValueError(f"unknown wire type {kind}")
        yield number, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value, offset = value | (byte & 0x7F) << shift, offset + 1
        if byte < 0x80:
            return value, offset
        shift += 7


def _damaged(file: str, record: int) -> Refusal:
    return Refusal.at(f"{file} record {record}", "the record cannot be decoded", _EXPORT, code="damaged-file")


# wandb ---------------------------------------------------------------------------------------------------------------

WANDB_MAGIC = b":W&B"
# Protobuf field numbers in wandb's records.
_RECORD_HISTORY, _HISTORY_ITEM = 2, 1
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_INTEGER, _ITEM_NUMBER, _ITEM_JSON = 1, 2, 5, 6, 16


def wandb_rows(file: str, content: bytes) -> Iterator[LogRow]:
    """Yields the metric rows that the run logged (wandb's history records). Other records are skipped."""
    for index, record in enumerate(_records(file, content), start=1):
        try:
            for number, history in _fields(record):
                if number == _RECORD_HISTORY and isinstance(history, bytes):
                    yield index, _history_row(history)
        except (ValueError, IndexError, struct.error):
            raise _damaged(file, index) from None


def _history_row(history: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, item in _fields(history):
        if number != _HISTORY_ITEM or not isinstance(item, bytes):
            continue
        keys, value = [], None
        for field, found in _fields(item):
            if field in (_ITEM_KEY, _ITEM_NESTED_KEY) and isinstance(found, bytes):
                keys.append(found.decode())
            elif field == _ITEM_JSON and isinstance(found, bytes):
                value = json.loads(found)
            elif field == _ITEM_INTEGER and isinstance(found, int):
                value = (found >> 1) ^ -(found & 1)  # zigzag encoding
            elif field == _ITEM_NUMBER:
                value = found
        row[".".join(keys)] = value
    return row


# SwanLab -------------------------------------------------------------------------------------------------------------

SWANLAB_MAGIC = b":SWL"
_SWANLAB_VERSION = 6  # The offset of the format version in the file header.
# Protobuf field numbers in SwanLab's records.
_RECORD_SCALAR = 13
_KEY, _STEP, _VALUE, _NUMBER = 1, 2, 5, 1
_MACHINE_METRICS = "__swanlab__."

Scalar = tuple[str, int, float]


def swanlab_points(file: str, content: bytes) -> Points:
    """Reads every scalar of `run-ID.swanlab` (before 0.7 `backup.swanlab`); media, texts and machine metrics are
    skipped.

    Files of format version 1 contain JSON records, and files of version 2 contain protobuf records. Steps are the
    user's; SwanLab counts from 0.
    """
    version = content[_SWANLAB_VERSION] if len(content) > _SWANLAB_VERSION else 0
    readers = {1: _json_scalar, 2: _protobuf_scalar}
    if version not in readers:
        raise Refusal.at(
            file, f"has SwanLab's format {version}; supported are 1 and 2", _EXPORT, code="unsupported-version"
        )
    found = Points()
    for index, record in enumerate(_records(file, content), start=1):
        try:
            scalar = readers[version](record)
        except (ValueError, IndexError, KeyError, TypeError, struct.error):
            raise _damaged(file, index) from None
        if scalar is not None and not scalar[0].startswith(_MACHINE_METRICS) and 0 <= scalar[1] <= LARGEST_STEP:
            found.add(scalar[1], {scalar[0]: scalar[2]})
    return found


def _json_scalar(record: bytes) -> Scalar | None:
    model = json.loads(record)
    if model["model_type"] != "Scalar":
        return None
    data = model["data"]
    value = data["metric"]["data"]
    return data["key"], int(data["step"]), NON_FINITE[value] if isinstance(value, str) else float(value)


def _protobuf_scalar(record: bytes) -> Scalar | None:
    for number, scalar in _fields(record):
        if number == _RECORD_SCALAR and isinstance(scalar, bytes):
            # Protobuf omits fields with the value 0, so a missing field means 0.
            fields: dict[int, Any] = dict(_fields(scalar))
            value = dict(_fields(fields.get(_VALUE, b""))).get(_NUMBER, 0.0)
            return fields[_KEY].decode(), int(fields.get(_STEP, 0)), float(value)
    return None


# tensorboard ---------------------------------------------------------------------------------------------------------


def tensorboard_points(path: Path) -> Points:
    """Reads every scalar of an event file, or of all event files in a folder, because a resumed run has several event
    files."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise missing_extra("tensorboard", "track", f"reading {path}") from None
    # With the size 0 the package keeps every event. By default the tensorboard package keeps only a sample of the
    # events.
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    # The tensorboard package logs warnings about repeated steps, which are normal in a resumed run.
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        events.Reload()
    except Exception as error:  # tensorboard raises various errors for a damaged file
        raise Refusal.at(path, f"tensorboard cannot read it: {error}", "restore the file", code="unreadable") from error
    finally:
        logger.setLevel(level)
    found = Points()
    tags = events.Tags()
    for name in tags["scalars"]:
        for event in events.Scalars(name):
            if abs(event.step) <= LARGEST_STEP:
                found.add(event.step, {name: event.value})
    for name in tags["tensors"]:
        for event in events.Tensors(name):
            value = make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fi" and abs(event.step) <= LARGEST_STEP:
                found.add(event.step, {name: float(value.reshape(()))})
    return found
