"""How long a verb takes to answer: processor seconds until its first line, and in all, beside `import torch`.

python bench/startup.py [--starts 5] [--out bench/results/startup.json]

Processor seconds of the command and its threads, so that a busy machine tells the same as an idle one. The first start
of each is not counted: it may compile modules. `train` is stopped after its first line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import transformers": ["-c", "import transformers"],
    "AutoModelForCausalLM": ["-c", "from transformers import AutoModelForCausalLM"],
    "import lockstep": ["-c", "import lockstep"],
    "lockstep --help": ["-m", "lockstep", "--help"],
    "lockstep --version": ["-m", "lockstep", "--version"],
    "lockstep import-gguf": ["-m", "lockstep", "import-gguf", "none.gguf", "out"],
    "lockstep plan": ["-m", "lockstep", "plan", "sft-arithmetic", "device=cpu"],
    "lockstep train": ["-m", "lockstep", "train", "sft-arithmetic", "device=cpu"],
}


def processor_seconds(process: int) -> float:
    """User and system time of a running process and its threads, from the kernel's table."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(words: list[str], folder: Path) -> tuple[float | None, float | None]:
    """Seconds up to the first line of output, None without any, and in all, None where it was stopped after that."""
    stops = words[2:3] == ["train"]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    first = processor_seconds(process.pid) if line else None
    if stops:
        process.kill()
    process.stdout.read()
    used = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return first, None if stops else used.ru_utime + used.ru_stime


def told(seconds: list[float | None]) -> dict[str, float] | None:
    known = [one for one in seconds if one is not None]
    return {"best_s": min(known), "median_s": statistics.median(known)} if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results = {}
    print(f"{'processor seconds, best (median)':34}{'first line':>16}{'in all':>16}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lockstep = [sys.executable, "-m", "lockstep"]
        for prepared in (["data", "arithmetic", "quickstart/data"], ["tiny", "quickstart/model"]):
            subprocess.run([*lockstep, *prepared], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name, command in COMMANDS.items():
            start(command, folder)
            found = [start(command, folder) for _ in range(words.starts)]
            columns = [told([one[at] for one in found]) for at in (0, 1)]
            results[name] = dict(zip(("first_line", "in_all"), columns, strict=True))
            cells = ["-" if one is None else f"{one['best_s']:.2f} ({one['median_s']:.2f})" for one in columns]
            print(f"{name:34}{cells[0]:>16}{cells[1]:>16}", flush=True)
    if words.out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "results": results}
        words.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
