"""verl: the console logger's `step:7 - critic/rewards/mean:0.25 - ...` and the file logger's JSON lines.

The first update is step 1; a validation before it is step 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.text import number

_LINE = re.compile(r"(?<![\w/])step:(\d{1,18}) - (\S.*)$")


def points(lines: Iterable[tuple[str, str]]) -> Points:
    """Every metric of the console lines; other output between them is passed over."""
    found = Points()
    for _, line in lines:
        if " - " not in line or "step:" not in line:
            continue
        parts = _LINE.search(line)
        if parts is None or int(parts.group(1)) > LARGEST_STEP:
            continue
        values = {}
        for pair in parts.group(2).split(" - "):
            name, colon, text = pair.rpartition(":")
            value = number(text) if colon else None
            if value is not None:
                values[name] = value
        found.add(int(parts.group(1)), values)
    return found
