"""`lockstep quickstart` in an empty folder: its commands, in order. `make test-dist` runs it when installed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer

from commands import lockstep
from lockstep.commands.quickstart import run_quickstart
from lockstep.recipe.loader import builtin_names


def asked(overrides: list[str], fails: str = "") -> tuple[list[list[str]], int]:
    """The commands up to the first failure, and the exit code; 0 if the metrics of the last run are asked for."""
    commands: list[list[str]] = []

    def note(words: list[str]) -> int:
        commands.append(words)
        return 3 if words[:2] == fails.split() else 0

    try:
        run_quickstart(overrides, note)
    except typer.Exit as end:
        return commands, end.exit_code
    except FileNotFoundError:
        return commands, 0
    raise AssertionError("the runs were not trained, so there are no metrics")


def test_both_runs_get_the_given_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands, _ = asked(["device=cpu"])
    assert [words[0] for words in commands] == ["tiny", "data", "train", "train", "generate"]
    trained = [words for words in commands if words[0] == "train"]
    assert [words[2:] for words in trained] == [["device=cpu"]] * 2
    assert {words[1] for words in trained} <= set(builtin_names())


def test_a_failed_command_ends_it_and_a_written_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "quickstart/model/config.json"
    model.parent.mkdir(parents=True)
    model.touch()
    commands, code = asked([], fails="train warmup-arithmetic")
    assert ([words[0] for words in commands], code) == (["data", "train"], 3)


def test_a_terminal_shows_the_commands_in_bold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    asked([])
    assert "\n\x1b[1m1. lockstep tiny quickstart/model\x1b[0m\n" in terminal.getvalue()


@pytest.mark.slow
def test_a_short_quickstart_leaves_two_runs_and_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = lockstep("quickstart", "run.steps=2", "optim.warmup=1")
    assert done.returncode == 0, done.stderr
    for name in ("warmup-arithmetic", "grpo-arithmetic"):
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 2
        assert (tmp_path / "runs" / name / "export/config.json").is_file()
    assert "val/accuracy" in done.stdout.split("Before and after")[1]
