"""Fills in the tables of docs/from-verl.md and docs/from-openrlhf.md from the tables of the converters.

    python tools/migration_tables.py            rewrites the pages
    python tools/migration_tables.py --check    exits with 1 if a page is not current

`make docs` runs it, tests/unit/test_migration_pages.py keeps the pages current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.compat.key_table import KeyRow, table_rows
from lockstep.compat.openrlhf.openrlhf_rules import OFFLINE
from lockstep.recipe.loader import value_text

ROOT = Path(__file__).parents[1]
OUTCOMES = {"mapped": "", "changed": "differs: ", "ignored": "no effect: ", "refused": "refused: "}
_PRINTED = re.compile(r"(<!-- printed: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("from-*.md"))


def verl_table(rows: Iterable[KeyRow]) -> Iterator[str]:
    yield "| verl | default | here | |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| `{row.key}` | {_default(row)} | {_to(row)} | {_note(row)} |"


def openrlhf_table(rows: Iterable[KeyRow]) -> Iterator[str]:
    yield "| 0.7 | 0.11 | default | here | |"
    yield "|---|---|---|---|---|"
    lines = [
        f"| {_flag(row.flat)} | {_flag(row.dotted)} | {_default(row)} | {_to(row)} | {_note(row)} |" for row in rows
    ]
    yield from dict.fromkeys(lines)  # offline trainers share flags


def _flag(name: str | None) -> str:
    return f"`--{name}`" if name else ""


def _to(row: KeyRow) -> str:
    return ", ".join(f"`{key}`" for key in row.to)


def _default(row: KeyRow) -> str:
    value = "" if row.default is None else f"`{value_text(row.default)}`"
    return f"{value} {row.unit}".strip()


def _note(row: KeyRow) -> str:
    return OUTCOMES[row.outcome] + (f"{row.note}; {row.remedy}" if row.remedy else row.note)


TABLES = {
    "main_ppo": lambda: verl_table(table_rows("verl", "main_ppo")),
    "sft": lambda: verl_table(table_rows("verl", "sft")),
    "train_ppo_ray": lambda: openrlhf_table(table_rows("openrlhf", "train_ppo_ray")),
    "offline": lambda: openrlhf_table(row for program in OFFLINE for row in table_rows("openrlhf", program)),
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
