"""The first moments of the command, before there is a command line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("ignored", "ended"), [(False, -signal.SIGINT), (True, 7)])
def test_ctrl_c_while_python_imports_shows_no_traceback(tmp_path: Path, ignored: bool, ended: int) -> None:
    """Where the signal is ignored, as after `nohup`, it stays so."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, sys\n"
        "print('importing', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(7)  # whom no signal has ended\n"
    )
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if ignored else "pass"
    code = (
        f"import signal, sys; {before}; sys.path.insert(0, {str(tmp_path)!r}); import lockstep.__main__ as m; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (ended, "importing\n", "")


def test_the_command_line_has_ctrl_c_back() -> None:
    code = (
        "import signal, sys, lockstep.cli, lockstep.__main__ as m\n"
        "lockstep.cli.main = lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        "m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
