"""What `python -m lockstep.compat.verl` and `python -m lockstep.compat.openrlhf` do: convert, report, train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from lockstep.compat.report import report
from lockstep.compat.table import Conversion
from lockstep.compat.writing import checked
from lockstep.errors import Interrupted, Refusal
from lockstep.run.output import never_fail_to_encode, write

Others = Mapping[str, Callable[[Sequence[str]], None]]
"""Programs that train nothing, each with what runs instead."""


def main(
    peer: str,
    convert: Callable[[str, Sequence[str]], Conversion],
    programs: Mapping[str, object],
    others: Others | None = None,
) -> None:
    """The entry point: the words of the command line are the other trainer's."""
    others = others or {}
    never_fail_to_encode()
    words = sys.argv[1:]
    if words and words[0].startswith("--local_rank"):
        # DeepSpeed's launcher puts it before everything else; it stands in the environment too.
        words = words[1:]
    if not words or words[0] in ("-h", "--help"):
        write(f"python -m lockstep.compat.{peer} PROGRAM SETTINGS: converts and trains; PROGRAM is one of")
        write(f"  {', '.join([*programs, *others])}")
        write("`lockstep migrate SCRIPT.sh -o RECIPE.yaml` converts a whole script and trains nothing.")
        sys.exit(0 if words else 2)
    try:
        if words[0] in others:
            others[words[0]](words[1:])
        else:
            run(convert, words)
    except Refusal as refusal:
        from lockstep.run.console import print_problems

        if (rank := os.environ.get("RANK", "0")) != "0":
            write(f"rank {rank}:", error=True)
        print_problems(refusal)
        sys.exit(2)
    except Interrupted as stop:
        write(f"{stop}")
        sys.exit(130)


def run(convert: Callable[[str, Sequence[str]], Conversion], words: Sequence[str]) -> None:
    done = convert(words[0], words[1:])
    # One process speaks, where torchrun started several.
    if os.environ.get("RANK", "0") == "0":
        write(report(done))
    recipe = checked(done)

    from lockstep.train.start import run_recipe

    run_recipe(recipe)
