"""How long the command line takes to answer: `import lockstep` and `lockstep --help`, best and median of some starts.

python bench/startup.py --out bench/results/startup.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import lockstep": [sys.executable, "-c", "import lockstep"],
    "lockstep --help": [str(Path(sys.executable).with_name("lockstep")), "--help"],
    "import torch (for scale)": [sys.executable, "-c", "import torch"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results = {}
    for name, command in COMMANDS.items():
        seconds(command)
        times = [seconds(command) for _ in range(words.starts)]
        results[name] = {"best_s": min(times), "median_s": statistics.median(times)}
        print(f"{name:26} best {min(times):.3f} s  median {statistics.median(times):.3f} s")
    if words.out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "results": results}
        words.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
