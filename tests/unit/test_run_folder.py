import json
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import Refusal
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from refusals import refuses

HOLDER = """
import os, sys
from pathlib import Path
from lockstep.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    # The child speaks, so that it is known to run.
    if sys.argv[2] == "alone":
        print(0, flush=True)
    elif os.fork() == 0:
        print(os.getpid(), flush=True)
    sys.stdin.read()  # until it is killed, or nobody is there any more
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.create()
    return folder


def test_names_are_those_of_the_design(folder: RunFolder) -> None:
    files = [folder.recipe, folder.env, folder.metrics, folder.samples, folder.checkpoints, folder.export, folder.tape]
    assert [file.name for file in files] == [
        "recipe.yaml",
        "env.json",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "export",
        "tape",
    ]
    assert {file.parent for file in files} == {folder.path}


def test_create_keeps_what_is_there_and_refuses_a_file(folder: RunFolder) -> None:
    folder.write_recipe("method: sft\n")
    folder.create()
    assert folder.recipe.read_text() == "method: sft\n"
    with pytest.raises(Refusal, match="cannot be created"):
        RunFolder(folder.recipe).create()


def recipes(folder: RunFolder) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(folder.path.glob("recipe*"))}


def test_recipes_that_trained_a_part_of_the_run_stay(folder: RunFolder) -> None:
    folder.write_recipe("a")
    folder.write_recipe("a", 3)  # killed and started again: nothing else holds
    assert recipes(folder) == {"recipe.yaml": "a"}
    folder.write_recipe("b", 10)
    folder.write_recipe("c", 25)
    assert recipes(folder) == {"recipe.to_step_10.yaml": "a", "recipe.to_step_25.yaml": "b", "recipe.yaml": "c"}
    assert folder.earlier_recipes() == {10: folder.earlier_recipe(10), 25: folder.earlier_recipe(25)}


@pytest.mark.parametrize(
    ("step", "text", "left"),
    [
        # Of c nothing remains: it was killed before its first checkpoint.
        (25, "d", {"recipe.to_step_10.yaml": "a", "recipe.to_step_25.yaml": "b", "recipe.yaml": "d"}),
        # And the old recipe goes on as if nothing had been.
        (25, "b", {"recipe.to_step_10.yaml": "a", "recipe.yaml": "b"}),
        # Newer checkpoints are damaged: the run goes back, and what it trained after is trained anew.
        (20, "d", {"recipe.to_step_10.yaml": "a", "recipe.to_step_20.yaml": "b", "recipe.yaml": "d"}),
        (10, "d", {"recipe.to_step_10.yaml": "a", "recipe.yaml": "d"}),
        (4, "d", {"recipe.to_step_4.yaml": "a", "recipe.yaml": "d"}),
        (4, "a", {"recipe.yaml": "a"}),
        (0, "d", {"recipe.yaml": "d"}),
    ],
)
def test_a_run_that_goes_back_keeps_the_recipes_of_what_it_keeps(
    folder: RunFolder, step: int, text: str, left: dict[str, str]
) -> None:
    for written, at in (("a", 0), ("b", 10), ("c", 25)):
        folder.write_recipe(written, at)
    for _ in range(2):  # writing it twice is writing it once
        folder.write_recipe(text, step)
        assert recipes(folder) == left


def test_atomic_write_keeps_the_old_text_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    atomic_write_text(path, "old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with refuses("file.txt", "unwritable", "No space"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_env_tells_versions_and_the_callers_facts_but_not_the_host(folder: RunFolder) -> None:
    folder.write_env({"device": {"name": "cpu"}})
    facts = json.loads(folder.env.read_text())
    assert facts["lockstep"] == lockstep.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["packages"]["pydantic"] == version("pydantic")
    assert facts["command"] == sys.argv
    assert facts["cpu_count"] == os.cpu_count()
    assert facts["device"] == {"name": "cpu"}
    assert socket.gethostname() not in [value for value in facts.values() if isinstance(value, str)]
    with pytest.raises(ValueError, match="python"):
        folder.write_env({"python": "2.7"})


def test_env_of_a_resumed_run_keeps_the_earlier_ones(folder: RunFolder) -> None:
    for device in ("a", "b", "c"):
        folder.write_env({"device": device})
    facts = json.loads(folder.env.read_text())
    assert facts["device"] == "c"
    assert [earlier["device"] for earlier in facts["before_resume"]] == ["a", "b"]
    assert all("before_resume" not in earlier for earlier in facts["before_resume"])


def test_env_imports_none_of_what_it_describes(folder: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from lockstep.run.folder import RunFolder;"
        "RunFolder(Path(sys.argv[1])).write_env({});"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_lock_can_be_taken_again_after_it_was_given_back(folder: RunFolder) -> None:
    for _ in range(2):
        with folder.lock():
            pass


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_lock_refuses_a_second_process_and_vanishes_with_a_killed_one(folder: RunFolder, forks: str) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder.path), forks]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(Refusal, match=f"process {holder.pid} is using it"), folder.lock():
                pass
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            with folder.lock():  # also while a forked child of the killed process lives on
                pass
        finally:
            holder.kill()
            if child:
                os.kill(child, signal.SIGKILL)
