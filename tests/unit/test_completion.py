"""Completion in a real shell: installed by the one command, and asked as the shell asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hang import HANG
from lockstep.commands.maintenance import install_for
from lockstep.errors import Refusal

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


FISH = """
lockstep --install-completion fish
for words in "lockstep tr" "lockstep train grpo" "lockstep plan my" "lockstep data "
    echo "$words = "(complete -C $words | string split -f1 \\t | string join " ")
end
"""
# Without a terminal: who answers for the command, and what it answers.
ZSH = """
lockstep --install-completion zsh
source ~/.zshrc
echo $_comps[lockstep]
for words in "lockstep tr" "lockstep train sft-g"; do
    env _TYPER_COMPLETE_ARGS=$words _LOCKSTEP_COMPLETE=complete_zsh lockstep
done
"""


def asked(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A shell in a home of its own, with a `lockstep` on its path and some files around it."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    program = programs / "lockstep"
    program.write_text(f"#!{sys.executable}\nfrom lockstep.cli import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "my.yaml").touch()
    (tmp_path / "my.txt").touch()
    (tmp_path / "my-recipes").mkdir()
    return subprocess.run(
        command,
        env={**os.environ, "HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_installs_with_one_command_and_answers(tmp_path: Path) -> None:
    done = asked(tmp_path, "bash", "--norc", "-c", ASKED)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-5:] == [
        "complete -o default -F _lockstep_completion lockstep",
        "lockstep tr = train",
        "lockstep train grpo = grpo-arithmetic grpo-gsm8k-lora grpo-squares",
        "lockstep plan my = my-recipes/ my.yaml",
        "lockstep data  = arithmetic preferences calculator guess-number seeds squares tiny-vlm gsm8k show",
    ]
    assert (tmp_path / "home" / ".bashrc").read_text().count("source ") == 1


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_in_fish(tmp_path: Path) -> None:
    done = asked(tmp_path, "fish", "-c", FISH)
    assert done.stdout.splitlines()[-4:] == [
        "lockstep tr = train",
        "lockstep train grpo = grpo-arithmetic grpo-gsm8k-lora grpo-squares",
        "lockstep plan my = my.yaml my-recipes/",
        "lockstep data  = arithmetic gsm8k preferences show",
    ], done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_in_zsh(tmp_path: Path) -> None:
    done = asked(tmp_path, "zsh", "-f", "-c", ZSH)
    name, verb, recipe = done.stdout.splitlines()[-3:]
    assert name == "_lockstep", done.stdout + done.stderr
    assert '"train"' in verb
    assert '(("sft-gsm8k-lora"))' in recipe


def test_a_shell_that_is_not_known_is_refused() -> None:
    with pytest.raises(Refusal, match=r"'tcsh' is not supported\s.*bash, zsh, fish"):
        install_for("tcsh")
