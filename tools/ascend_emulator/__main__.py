"""python tools/ascend_emulator build | run ARGUMENTS OF PYTHON"""

from __future__ import annotations

import sys
from pathlib import Path

# Python puts the folder that it runs in front, and the package is found from the folder above.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ascend_emulator import build, launch  # noqa: E402
from ascend_emulator.problems import CannotEmulate  # noqa: E402


def main(words: list[str]) -> None:
    try:
        match words:
            case ["build"]:
                print(build.build())
            case ["run", first, *rest]:
                launch.run([first, *rest])
            case _:
                sys.exit(f"usage: {__doc__}")
    except CannotEmulate as problem:
        sys.exit(f"ascend emulator: {problem}")


if __name__ == "__main__":
    main(sys.argv[1:])
