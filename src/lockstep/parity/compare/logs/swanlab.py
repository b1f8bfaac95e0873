"""SwanLab's own file of a run (`run-ID.swanlab`, before 0.7 `backup.swanlab`), which every local or offline run has.

Blocks and records are LevelDB's, as in wandb's file. Up to format 1 a record is JSON, in format 2 a protobuf message.
Steps are as the user gave them; SwanLab itself counts from 0.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import LARGEST_STEP, UNREAL, Points
from lockstep.parity.compare.logs.wandb import fields, records

MAGIC = b":SWL"
_VERSION = 6  # its place in the header
# Field numbers of the messages.
_RECORD_SCALAR = 13
_KEY, _STEP, _VALUE, _NUMBER = 1, 2, 5, 1
# What SwanLab measures of the machine itself.
_OF_THE_MACHINE = "__swanlab__."

Scalar = tuple[str, int, float]


def points(file: str, content: bytes) -> Points:
    """Every scalar; media, texts and what is measured of the machine are left out."""
    version = content[_VERSION] if len(content) > _VERSION else 0
    readers = {1: _from_json, 2: _from_message}
    if version not in readers:
        raise Refusal.at(file, f"is of SwanLab's format {version}, known are 1 and 2", "export its metrics as csv")
    found = Points()
    for index, record in enumerate(records(file, content), start=1):
        try:
            scalar = readers[version](record)
        except (ValueError, IndexError, KeyError, TypeError, struct.error):
            raise Refusal.at(
                f"{file} record {index}", "not a record of this kind of file", "export its metrics as csv"
            ) from None
        if scalar is not None and not scalar[0].startswith(_OF_THE_MACHINE) and 0 <= scalar[1] <= LARGEST_STEP:
            found.add(scalar[1], {scalar[0]: scalar[2]})
    return found


def _from_json(record: bytes) -> Scalar | None:
    model = json.loads(record)
    if model["model_type"] != "Scalar":
        return None
    data = model["data"]
    value = data["metric"]["data"]
    return data["key"], int(data["step"]), UNREAL[value] if isinstance(value, str) else float(value)


def _from_message(record: bytes) -> Scalar | None:
    for number, scalar in fields(record):
        if number == _RECORD_SCALAR and isinstance(scalar, bytes):
            # A field that is 0 is not written.
            told: dict[int, Any] = dict(fields(scalar))
            value = dict(fields(told.get(_VALUE, b""))).get(_NUMBER, 0.0)
            return told[_KEY].decode(), int(told.get(_STEP, 0)), float(value)
    return None
