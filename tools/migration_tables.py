"""Fills in the tables of docs/from-verl.md and docs/from-openrlhf.md from the maps that the converters run on.

    python tools/migration_tables.py            writes the pages anew
    python tools/migration_tables.py --check    ends with 1 where a page is not current

`make docs` runs it, tests/unit/test_migration_pages.py keeps the pages current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.compat.openrlhf import offline, online_flags
from lockstep.compat.openrlhf.options import Option
from lockstep.compat.table import KeyRow
from lockstep.compat.verl import online_keys as verl_keys
from lockstep.compat.verl import sft as verl_sft
from lockstep.recipe.loader import value_text

ROOT = Path(__file__).parents[1]
FATES = {"taken": "", "changed": "another meaning: ", "idle": "no effect: ", "refused": "refused: "}
_PRINTED = re.compile(r"(<!-- printed: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("from-*.md"))


def verl_table(rows: Iterable[KeyRow]) -> Iterator[str]:
    yield "| verl | default | here | |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| `{row.key}` | {_default(row.default)} | {_to(row)} | {FATES[row.fate]}{row.note} |"


def openrlhf_table(options: Iterable[Option]) -> Iterator[str]:
    yield "| 0.7 | 0.11 | default | here | |"
    yield "|---|---|---|---|---|"
    seen: set[tuple[Any, ...]] = set()
    for option in options:
        row = option.row
        line = (
            f"| {_flag(option.flat)} | {_flag(option.dotted)} | {_default(row.default)} | {_to(row)} | "
            f"{FATES[row.fate]}{row.note} |"
        )
        if (line,) not in seen:
            seen.add((line,))
            yield line


def _flag(name: str | None) -> str:
    return f"`--{name}`" if name else ""


def _to(row: KeyRow) -> str:
    return ", ".join(f"`{key}`" for key in row.to)


def _default(value: Any) -> str:
    return "" if value is None else f"`{value_text(value)}`"


TABLES = {
    "main_ppo": lambda: verl_table(verl_keys.ROWS),
    "sft": lambda: verl_table(verl_sft.ROWS),
    "train_ppo_ray": lambda: openrlhf_table(online_flags.OPTIONS),
    "offline": lambda: openrlhf_table(option for trainer in offline.TRAINERS.values() for option in trainer.options),
}


def current(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        return found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3]

    return _PRINTED.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if current(text) != text:
            stale.append(page.name)
            if not check:
                page.write_text(current(text), encoding="utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
