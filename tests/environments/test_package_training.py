"""A small training through each adapter: the commands of docs/environments.md, and the tools of an MCP server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trl_factories
from lockstep.model.tiny import write_tiny
from lockstep.recipe.registry import ADAPTERS
from lockstep.run.metrics import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`(lockstep train games\.yaml rollout\.environment=(\w+):[^`]+)`", PAGE)
SEEDS = re.findall(r"^lockstep data seeds .+$", PAGE, re.MULTILINE)[0]
RECIPE = re.findall(r"<!-- file: games.yaml -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_tiny(folder / "model")
    (folder / "games.yaml").write_text(RECIPE)
    shutil.copy(trl_factories.__file__, folder / "factory.py")
    lockstep(folder, SEEDS)
    return folder


def lockstep(folder: Path, command: str, *more: str) -> str:
    words = [sys.executable, "-m", *shlex.split(command), *more]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path, name: str) -> dict[str, Any]:
    (_, found), *_ = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return found


def test_every_adapter_has_a_command() -> None:
    """The adapters of scripts that migrate (`chat=False`) have commands on the pages of their frameworks."""
    assert [name for _, name in COMMANDS] == [name for name, row in ADAPTERS.items() if row.chat]


@pytest.mark.parametrize(("command", "name"), COMMANDS, ids=[name for _, name in COMMANDS])
def test_the_command_of_each_adapter_trains(command: str, name: str, folder: Path, openenv_server: str) -> None:
    if name == "gem" and sys.version_info >= (3, 12):
        pytest.skip("gem-llm needs Python 3.12.0 or older")
    command = command.replace("http://localhost:8000", openenv_server)
    lockstep(folder, command, f"run.name={name}")
    found = metrics(folder, name)
    assert found["reward/failed"] == 0
    assert found["environment/turns"] >= 1
    stops = {key: value for key, value in found.items() if key.startswith("environment/stop/")}
    assert sum(stops.values()) == pytest.approx(1)
    assert not stops.keys() & {"environment/stop/tool_error", "environment/stop/timeout"}


def test_the_tools_of_an_mcp_server_train(folder: Path, mcp_command: str) -> None:
    name = f"mcp-{'own' if sys.executable in mcp_command else 'server'}"
    (folder / "reward.py").write_text(
        "def letters(data_source, solution_str, ground_truth, extra_info):\n    return len(set(solution_str)) / 20\n"
    )
    more = [f"run.name={name}", "rollout.environment=null", f"rollout.tools=['mcp:{mcp_command}']"]
    lockstep(folder, "lockstep train games.yaml", *more, "reward.function=reward.py:letters")
    found = metrics(folder, name)
    assert (found["reward/failed"], found["actor/grad_norm"] > 0) == (0, True)
