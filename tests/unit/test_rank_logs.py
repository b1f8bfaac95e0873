"""The output of ranks on this machine: on the console, and in a log file per rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep.launch.launcher import launch
from lockstep.launch.rank_logs import LoggedRanks


def say(logged: LoggedRanks, rank: int, *words: str) -> None:
    """A rank that prints the words on stdout, and then on stderr."""
    for text, files in zip(words, (logged.stdouts, logged.stderrs), strict=True):
        with open(files[rank], "w") as output:
            subprocess.run(["printf", text], stdout=output, check=True)


def test_each_rank_has_a_file_with_all_its_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also with what it printed before there was a run folder, which the ranks make, and what it printed after the last
    newline. A restart appends."""
    for attempt in ("first", "second"):
        logged = LoggedRanks(tmp_path / "run", 3)
        say(logged, 0, f"{attempt} a\\n", "")
        (tmp_path / "run").mkdir(exist_ok=True)
        say(logged, 1, f"{attempt} b\\nend", f"{attempt} error\\n")
        logged.close()
    logs = tmp_path / "run" / "logs"
    assert sorted(file.name for file in logs.iterdir()) == ["rank_0.log", "rank_1.log", "rank_2.log"]
    assert (logs / "rank_0.log").read_text() == "first a\nsecond a\n"
    wanted = ["first b", "end", "first error", "second b", "end", "second error"]
    assert sorted((logs / "rank_1.log").read_text().replace("end", "end\n").split("\n")) == sorted(["", *wanted])
    assert (logs / "rank_2.log").read_text() == ""
    shown = capfd.readouterr()
    assert "first a" in shown.out
    assert "second b" in shown.out
    assert shown.err == "first error\nsecond error\n"


def test_rank_0_keeps_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    logged = LoggedRanks(tmp_path / "run", 2)
    logged.close()
    assert (list(logged.stdouts), list(logged.stderrs)) == ([1], [0, 1])


@pytest.mark.torchrun
def test_the_launcher_writes_the_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with patch.dict(os.environ):
        assert launch(1, ["train", "nowhere.yaml"], tmp_path / "run") == 2
    shown = capfd.readouterr()
    assert "nowhere.yaml" in shown.err
    assert (tmp_path / "run" / "logs" / "rank_0.log").read_text() == shown.out + shown.err
