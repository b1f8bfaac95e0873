"""Completion in a real bash: installed by the one command, and asked as bash asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hang import HANG

ASKED = """
set -e
lockstep --install-completion bash
lockstep --install-completion bash
. ~/.bashrc
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
    _lockstep_completion lockstep "${@: -1}" "${@: -2:1}"
    echo "$* = ${COMPREPLY[*]}"
}
complete -p lockstep
ask lockstep tr
ask lockstep train grpo
ask lockstep plan my
ask lockstep data ''
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_installs_with_one_command_and_answers(tmp_path: Path) -> None:
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    program = programs / "lockstep"
    program.write_text(f"#!{sys.executable}\nfrom lockstep.cli import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "my.yaml").touch()
    (tmp_path / "my.txt").touch()
    (tmp_path / "my-recipes").mkdir()
    done = subprocess.run(
        ["bash", "--norc", "-c", ASKED],
        env={**os.environ, "HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-5:] == [
        "complete -o default -F _lockstep_completion lockstep",
        "lockstep tr = train",
        "lockstep train grpo = grpo-arithmetic grpo-gsm8k-lora",
        "lockstep plan my = my-recipes/ my.yaml",
        "lockstep data  = arithmetic preferences gsm8k show",
    ]
    assert (home / ".bashrc").read_text().count("source ") == 1
