"""MindSpeed-RL's console: `[2025-06-01 10:00:00] iteration: 3 / 200 | grpo/rewards/mean : 0.2500 | ...`.

Each iteration has a line, with four digits behind the point. The first is 1.
"""

from __future__ import annotations

import re

from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.megatron import numbered
from lockstep.parity.compare.logs.table import damaged
from lockstep.parity.compare.logs.text import number

_LINE = re.compile(r"(?:^|\] )iteration: (\d{1,18}) / \d{1,18} \| (\S.*)$")


def points(file: str, text: str) -> Points:
    found = Points()
    for row, line in numbered(text):
        parts = _LINE.search(line) if "iteration: " in line else None
        # A message of an iteration in words is no line of metrics.
        if parts is None or " : " not in parts.group(2) or int(parts.group(1)) > LARGEST_STEP:
            continue
        values = {}
        for field in parts.group(2).split(" | "):
            name, _, written = field.strip().rpartition(" : ")
            value = number(written)
            if not name or value is None:
                raise damaged(file, row, line.strip(), f"line of numbers, at {field.strip()!r}")
            values[name.strip()] = value
        found.add(int(parts.group(1)), values)
    return found
