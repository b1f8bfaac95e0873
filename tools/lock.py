"""Writes uv.lock with the versions of constraints.txt: `make lock`.

uv keeps the versions of an existing lock file where they fit. So the packages are locked first within the constraints,
without the extras that pin a torch of their own, and then all extras are locked on top of that.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
OWN_TORCH = ("npu", "vllm", "sglang")


def constraints() -> list[str]:
    """Returns the pins of constraints.txt and of the file that it includes."""
    lines = [line for name in ("constraints.txt", "constraints-common.txt") for line in (ROOT / name).open()]
    return [line.strip() for line in lines if re.match(r"[A-Za-z0-9_.-]+==", line)]


def main() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("README.md", "LICENSE", "setup.py", "src"):
            (copy / name).symlink_to(ROOT / name)
        own = "|".join(map(re.escape, OWN_TORCH))
        pinned = re.sub(rf"^(?:{own}) = .*\n", "", text, flags=re.MULTILINE)
        pinned = re.sub(rf".*\{{extra = \"(?:{own})\"\}}.*\n", "", pinned)
        pinned = pinned.replace("[tool.uv]\n", f"[tool.uv]\nconstraint-dependencies = {json.dumps(constraints())}\n")
        for content in (pinned, text):
            (copy / "pyproject.toml").write_text(content, encoding="utf-8")
            subprocess.run([find_uv_bin(), "lock"], cwd=copy, check=True)
        shutil.copy(copy / "uv.lock", ROOT / "uv.lock")


if __name__ == "__main__":
    main()
