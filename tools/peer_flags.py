"""Writes the flags and defaults of OpenRLHF's training programs to `compat/tables/openrlhf_flags.json`.

    python tools/peer_flags.py 0.7.5=FOLDER 0.11.2=FOLDER ...

FOLDER contains `openrlhf/cli`. The file has one line per flag: its default and its kind in each range of versions. The
kind is the type, `switch`, or a type with the number of values, as `float 2`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.compat.key_table import FOLDER
from peer_configs import ranges

NOTICE = (
    "Names, types and default values of the flags of OpenRLHF's training programs, "
    "https://github.com/OpenRLHF/OpenRLHF, Apache License 2.0. tools/peer_flags.py writes this file."
)


def flags_in(file: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yields the names of a program's flags with default and kind. A default that is not a literal is None."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        action = options.get("action")
        kind = ast.unparse(options["type"]) if "type" in options else "str"
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            kind = "switch"
        if "nargs" in options:
            kind += f" {ast.literal_eval(options['nargs'])}"
        try:
            default = ast.literal_eval(options["default"]) if "default" in options else None
        except ValueError:
            default = None
        for name in node.args:
            if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                yield str(name.value)[2:], [list(default) if isinstance(default, tuple) else default, kind]


def main(arguments: Sequence[str]) -> None:
    releases = dict(argument.split("=", 1) for argument in arguments)
    versions = sorted(releases, key=lambda version: [int(part) for part in version.split(".")])
    programs: dict[str, dict[str, dict[str, Any]]] = {}
    for version in versions:
        for file in sorted((Path(releases[version]) / "openrlhf" / "cli").glob("train_*.py")):
            for flag, found in flags_in(file):
                programs.setdefault(file.stem, {}).setdefault(flag, {})[version] = found
    blocks = []
    for name, flags in programs.items():
        rows = [f"{json.dumps(flag)}: {json.dumps(ranges(versions, found))}" for flag, found in flags.items()]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    head = f'{{"notice": {json.dumps(NOTICE)},\n"versions": {json.dumps(versions)},\n"programs": {{\n'
    (FOLDER / "openrlhf_flags.json").write_text(head + ",\n".join(blocks) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
