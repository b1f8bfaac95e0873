"""Fills in the tables of docs/*-keys.md and docs/from-*.md from the tables of the converters, and counts the recorded
outcomes of the scripts of public projects (tests/data/migration/real_*.json).

    python tools/migration_tables.py            rewrites the pages
    python tools/migration_tables.py --check    exits with 1 if a page is not current

`make docs` runs it, tests/unit/test_migration_pages.py keeps the pages current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.compat.key_table import KeyRow, table_rows
from lockstep.compat.openrlhf.openrlhf_rules import OFFLINE
from lockstep.recipe.loader import value_text

ROOT = Path(__file__).parents[1]
OUTCOMES = {"mapped": "", "changed": "differs: ", "ignored": "no effect: ", "refused": "refused: "}
_PRINTED = re.compile(r"(<!-- printed: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return sorted(path for pattern in ("from-*.md", "*-keys.md") for path in (ROOT / "docs").glob(pattern))


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
    text = OUTCOMES[row.outcome] + (f"{row.note}; {row.remedy}" if row.remedy else row.note)
    return re.sub(r"`lockstep help ([\w-]+)`", r"[\1](\1.md)", text)


REASONS = ("images", "Megatron", "unknown keys", "own keys", "own program", "other settings")


def _scripts(peer: str) -> Iterator[tuple[dict[str, str], str, str]]:
    """Yields project, group and recorded outcome of each script."""
    folder = ROOT / "tests" / "data" / "migration"
    outcomes = json.loads((folder / "real_outcomes.json").read_text(encoding="utf-8"))
    for project in json.loads((folder / f"real_{peer}.json").read_text(encoding="utf-8")):
        for script in project["scripts"]:
            number = f" command {script['command']}" if "command" in script else ""
            yield project, script["group"], outcomes[f"{project['repository']} {script['path']}{number}"]


def groups_table(peer: str) -> Iterator[str]:
    yield f"| | scripts | converted | {' | '.join(REASONS)} |"
    yield "|---" * (3 + len(REASONS)) + "|"
    rows = list(_scripts(peer))
    for group in ("released", "own keys", "own program"):
        found = Counter(outcome for _, its_group, outcome in rows if its_group == group)
        cells = " | ".join(str(found[reason] or "") for reason in REASONS)
        yield f"| {group} | {found.total()} | {found['converted']} | {cells} |"


def projects_table(peer: str) -> Iterator[str]:
    """Counts per project: scripts of the group `released` and converted ones, then the scripts of patched copies."""
    yield "| project | licence | released | converted | patched | converted |"
    yield "|---|---|---|---|---|---|"
    counts: dict[str, Counter[tuple[bool, bool]]] = {}
    licences: dict[str, str] = {}
    for project, group, outcome in _scripts(peer):
        name = project["repository"]
        licences[name] = project["licence"]
        counts.setdefault(name, Counter())[group == "released", outcome == "converted"] += 1
    for name, found in counts.items():
        cells = [
            f"{found[kind, True] + found[kind, False] or ''} | {found[kind, True] or ''}" for kind in (True, False)
        ]
        yield f"| {name} | {licences[name]} | {' | '.join(cells)} |"


TABLES = {
    "groups_verl": lambda: groups_table("verl"),
    "groups_openrlhf": lambda: groups_table("openrlhf"),
    "projects_verl": lambda: projects_table("verl"),
    "projects_openrlhf": lambda: projects_table("openrlhf"),
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
