"""Container files, workflows and forms: they name targets, keys and versions that exist, and the doctor runs first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from hang import HANG, wait_until
from lockstep.recipe import load_recipe
from lockstep.rollout.servers.adapter import ServerNeeds
from lockstep.rollout.servers.vllm import Vllm

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
ENTRY = """#!/bin/sh
echo "lockstep $*" >>"$SAID"
[ "$1" != doctor ] || exit "$DOCTOR"
"""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def entered(tmp_path: Path, *words: str, doctor: int = 0, **environment: str) -> tuple[int, list[str]]:
    """The exit status of the real entry point, and its calls; `lockstep` and `python` only note their arguments."""
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    for name, text in {"lockstep": ENTRY, "python": 'echo "python $*" "$PYTHONPATH" >>"$SAID"\n'}.items():
        (programs / name).write_text(text if name == "lockstep" else f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    settings = {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(said), "DOCTOR": str(doctor), **environment}
    command = ["sh", str(DOCKER / "entrypoint.sh"), *words]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    return done.returncode, said.read_text().splitlines()


def test_the_entry_point_runs_the_doctor_first(tmp_path: Path) -> None:
    code, said = entered(tmp_path, "train", "my recipe.yaml", LOCKSTEP_DOCTOR_DEVICE="cuda")
    assert (code, said) == (0, ["lockstep doctor --device cuda", "lockstep train my recipe.yaml"])


@pytest.mark.parametrize(("answer", "ends", "calls"), [("stop", 1, 1), ("warn", 0, 2)])
def test_a_broken_machine_stops_the_container(tmp_path: Path, answer: str, ends: int, calls: int) -> None:
    code, said = entered(tmp_path, "train", "recipe.yaml", doctor=1, LOCKSTEP_DOCTOR=answer)
    assert (code, len(said)) == (ends, calls)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_doctor_ends_the_container(tmp_path: Path, number: int, ends: int) -> None:
    program, said = tmp_path / "lockstep", tmp_path / "said"
    program.write_text('#!/bin/sh\necho $$ >"$SAID.new" && mv "$SAID.new" "$SAID"\nexec sleep 600\n')
    program.chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
    with subprocess.Popen(["sh", str(DOCKER / "entrypoint.sh"), "train"], env=settings) as entry:
        wait_until(said.exists)
        entry.send_signal(number)
        assert entry.wait(HANG) == ends
    wait_until(lambda: not Path(f"/proc/{said.read_text().strip()}").exists())


def test_an_ascend_container_reads_cann_and_keeps_its_python_path(tmp_path: Path) -> None:
    (tmp_path / "set_env.sh").write_text('export PYTHONPATH="/cann${NOT_SET}"\n')
    given = {"CANN_ENV": str(tmp_path / "set_env.sh"), "ENGINE_PYTHON": "python", "LOCKSTEP_SERVER_KEY": "k"}
    _, said = entered(tmp_path, "engine", "--model", "m", **given)
    assert said[-1].endswith(":/cann")


def test_the_engine_gets_a_key_and_the_flags_of_a_vllm_server(tmp_path: Path) -> None:
    code, said = entered(tmp_path, "engine", "--model", "m", LOCKSTEP_SERVER_KEY="k")
    assert code == 0
    assert said[-1].startswith("python -m vllm.entrypoints.openai.api_server ")
    needed = Vllm().flags(ServerNeeds(device="cuda"))
    assert set(needed) <= set(said[-1].split())
    (tmp_path / "again").mkdir()
    code, said = entered(tmp_path / "again", "engine", "--model", "m")
    assert (code, said) == (2, ["lockstep doctor --device cpu"])


@pytest.mark.parametrize("file", sorted(DOCKER.glob("Dockerfile.*")), ids=lambda file: file.suffix[1:])
def test_an_image_copies_files_that_exist_and_enters_through_the_doctor(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert "docker/entrypoint.sh" in copied
    assert not [word for word in copied if not (ROOT / word).exists()]
    assert re.search(
        r'^ENTRYPOINT \["tini", "--", "(ba)?sh", "/usr/local/bin/lockstep-entrypoint"\]$', text, re.MULTILINE
    )
    assert " tini " in text
    assert "\nSTOPSIGNAL SIGINT\n" in text
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([a-z-]+) = ", table, re.MULTILINE))
    assert set(re.findall(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)[0].split(",")) <= extras


def test_the_ascend_image_has_the_versions_of_the_known_stack() -> None:
    text = (DOCKER / "Dockerfile.ascend").read_text(encoding="utf-8")
    stack = read(ROOT / "src/lockstep/doctor/stacks.yaml")["ascend-vllm-0.23"]
    assert f"ARG VLLM={stack['engines']['vllm-ascend']}\n" in text
    for package in ("torch", "torch_npu"):
        assert f"{package}{stack['packages'][package]}" in text


def test_the_trainer_of_the_compose_file_has_keys_of_the_recipe() -> None:
    services = read(DOCKER / "compose.yaml")["services"]
    assert set(services) == {"trainer", "engine", "viewer"}
    verb, _, *overrides = services["trainer"]["command"]
    assert verb == "train"
    recipe = load_recipe("grpo-arithmetic", [re.sub(r"\$\{(\w+)[^}]*\}", r"\1", word) for word in overrides])
    assert (recipe.model.path, recipe.rollout.url) == ("MODEL", "http://127.0.0.1:8000")
    assert "--port" in services["engine"]["command"]
    assert "8000" in services["engine"]["command"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_targets_of_make(file: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    jobs = read(file)["jobs"]
    called = []
    for job in jobs.values():
        listed = job.get("strategy", {}).get("matrix", {}).get("target", [])
        for line in (step["run"] for step in job["steps"] if "run" in step):
            for word in re.findall(r"\bmake (\S+)", line):
                called += listed if word.startswith("${{") else [word]
    assert called
    assert set(called) <= targets


def test_the_tests_run_on_every_supported_python_and_on_two_architectures() -> None:
    matrix = read(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()  # type: ignore[union-attr]
    assert matrix["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]
    assert len(matrix["runner"]) == 2


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_every_issue_form_requires_the_doctor(file: Path) -> None:
    parts = {part["id"]: part for part in read(file)["body"]}
    assert "lockstep doctor --json" in parts["doctor"]["attributes"]["label"]
    assert parts["doctor"]["validations"] == {"required": True}


def test_hooks_before_a_commit_call_tools_with_fixed_versions() -> None:
    hooks = [hook for repository in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert {"ruff-check", "ruff-format", "mypy", "actionlint"} <= {hook["id"] for hook in hooks}
    for hook in hooks:
        fixed = [re.search(r"@[\d.]+$", package) for package in hook.get("additional_dependencies", [])]
        assert hook["entry"].startswith(".venv/bin/") or (fixed and all(fixed))
        assert not [word for word in hook["entry"].split() if word.startswith("tests/") and not (ROOT / word).is_file()]


def test_the_first_change_of_the_guide_works(tmp_path: Path) -> None:
    """Applies the two code blocks to copies of the files, and runs the new test."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## A first change")[1].split("\n## ")[0]
    row, test = (textwrap.dedent(block) for block in re.findall(r"   ```python\n(.*?)   ```", guide, re.DOTALL))
    rules = (ROOT / "src/lockstep/reward/rules.py").read_text(encoding="utf-8")
    before = '        Rule("exact", exact_score, _exact_answer, str),\n'
    assert before in rules
    (tmp_path / "changed_rules.py").write_text(
        rules.replace(before, f"{before}        {row.strip()},\n"), encoding="utf-8"
    )
    code = f"from changed_rules import rule_for\n{test}\ntest_case_is_ignored()\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_citation_names_the_license_and_no_person() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["authors"] == [{"name": "The lockstep authors"}]
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
