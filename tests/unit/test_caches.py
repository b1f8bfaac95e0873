"""Model folders in the cache: bounded, never taken away from a process that uses them, cleared on demand."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.commands.maintenance import cache_lines
from lockstep.errors import Refusal
from lockstep.model.resolve import converted
from lockstep.run import caches
from lockstep.run.caches import MadeFolder, made_folders

SOURCES = Path(caches.__file__).parents[2]

MIB = 2**20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "folders"


def make(name: str, *, used: int = 0) -> Path:
    """A folder of one MiB, as a conversion writes it; last used at this second, and by nobody now."""

    def convert(aside: Path) -> None:
        aside.mkdir()
        (aside / "weights").write_bytes(bytes(MIB))

    folder = Path(converted(name, [name], convert))
    if used:
        os.close(caches._held.pop(folder))
        os.utime(folder.with_suffix(".used"), (used, used))
    return folder


def test_what_was_not_used_for_longest_goes_and_what_is_used_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE_GB", str(3.5 / 1024))
    held, oldest, older = make("held"), make("oldest", used=1000), make("older", used=2000)
    os.utime(held.with_suffix(".used"), (10, 10))  # used for longest ago, but by this process
    assert capsys.readouterr().err.count("to a model folder") == 3
    make("newest")
    said = capsys.readouterr().err
    assert f"removed the model folder of {Path('oldest').absolute()}" in said
    assert said.count("removed") == 1
    assert not oldest.exists()
    assert held.is_dir()
    assert older.is_dir()
    # A bound that cannot be kept is told.
    monkeypatch.setenv("LOCKSTEP_CACHE_GB", str(0.5 / 1024))
    last = make("last")
    assert {one.path for one in made_folders()} == {held, last, *[Path(p) for p in [make("newest")]]}
    assert "more than LOCKSTEP_CACHE_GB" in capsys.readouterr().err


def test_a_folder_that_was_deleted_is_made_again(cache: Path) -> None:
    folder = make("one", used=5)
    assert MadeFolder(folder).delete()
    assert not folder.exists()
    assert make("one") == folder
    assert (folder / "weights").stat().st_size == MIB
    assert not MadeFolder(folder).delete()  # this process uses it now


def test_what_a_kill_left_is_cleared_unless_somebody_is_making_it(cache: Path) -> None:
    make("one", used=5)
    # What a conversion writes aside in turn has the beginning twice.
    for name in (".writing-abc", ".writing-.writing-abc", ".writing-def", ".writing-.writing-def", ".removing-ghi"):
        (cache / name).mkdir()
    with MadeFolder(cache / "def").alone():
        make("two")
        assert sorted(path.name for path in cache.glob(".*")) == [".writing-.writing-def", ".writing-def"]
    make("three")
    assert not list(cache.glob(".*"))


def test_it_is_shown_and_cleared(cache: Path) -> None:
    make("mine", used=86400 * 400)
    held = make("held")
    shown = "\n".join(cache_lines(None))
    assert "2.0 MiB, model folders" in shown
    assert f"last used 1971-02-05: {Path('mine').absolute()}" in shown
    assert "folders: freed 1.0 MiB" in cache_lines("all")
    assert [one.path for one in made_folders()] == [held]
    assert any("which a process uses" in line for line in cache_lines("folders"))
    with pytest.raises(Refusal, match="there is no part 'rwos'"):
        cache_lines("rwos")


def test_a_cache_that_may_only_be_read_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("one", used=5)

    def refuse(*words: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(caches.os, "open", refuse)
    assert make("one") == folder


def test_a_bound_that_is_no_number_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE_GB", "lots")
    with pytest.raises(Refusal, match="'lots' is not a number"):
        make("one")


def test_a_cache_that_is_full_is_named(cache: Path) -> None:
    def convert(aside: Path) -> None:
        raise Refusal.at(aside, "could not be written: No space left on device", code="unwritable")

    with pytest.raises(Refusal, match="LOCKSTEP_CACHE names the folder of the cache"):
        converted("one", ["one"], convert)


def started(
    folder: Path, *, compiled: bool, file_bytes: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Starts the command line with a package torch that may not be written, and prints where Python keeps bytecode.
    Files that it writes end after `file_bytes`."""
    package = folder / "site" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    if not (package / "__init__.py").exists():
        (package / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    if compiled:
        py_compile.compile(str(package / "__init__.py"))
    program = """
import os, sys
sys.argv = ["lockstep", "--version"]
from lockstep.__main__ import main
try:
    main()
except SystemExit:
    pass
import torch
print(torch.VALUE, sys.pycache_prefix, os.path.exists(torch.__cached__))
"""
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{SOURCES}", "LOCKSTEP_CACHE": "cache"}
    environment.update(variables)
    if file_bytes is not None:
        limit = f"({file_bytes}, resource.RLIM_INFINITY)"
        program = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, {limit})\n{program}"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, check=False, capture_output=True, text=True
    )


def test_bytecode_that_python_may_not_write_is_kept_in_the_cache(tmp_path: Path) -> None:
    done = started(tmp_path, compiled=False, PYTHONDONTWRITEBYTECODE="1")
    (kept,) = (tmp_path / "cache" / "bytecode").iterdir()
    assert done.stdout.splitlines()[-1] == f"1 {kept} True", done.stderr
    assert not (tmp_path / "site" / "torch" / "__pycache__").exists()
    assert any(path.name.startswith("cli.") for path in kept.rglob("*.pyc"))  # lockstep's own modules too


def test_bytecode_that_a_full_disk_cuts_off_is_not_kept(tmp_path: Path) -> None:
    """A limit of the size of files cuts off a write as a full disk does."""
    started(tmp_path, compiled=False, file_bytes=2000, PYTHONDONTWRITEBYTECODE="1")
    (kept,) = (tmp_path / "cache" / "bytecode").iterdir()
    sizes = [path.stat().st_size for path in kept.rglob("*.pyc")]
    assert sizes
    assert max(sizes) < 2000
    done = started(tmp_path, compiled=False, PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout.splitlines()[-1] == f"1 {kept} True", done.stderr


def test_another_release_of_equal_size_and_time_is_compiled_again(tmp_path: Path) -> None:
    """Images with normalised times have such files."""
    for number in (1, 2):
        for old in (tmp_path / "site").glob("*.dist-info"):
            old.rmdir()
        (tmp_path / "site" / f"torch-{number}.0.dist-info").mkdir(parents=True)
        module = tmp_path / "site" / "torch" / "__init__.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"VALUE = {number}\n", encoding="utf-8")
        os.utime(module, (0, 0))
        done = started(tmp_path, compiled=False, PYTHONDONTWRITEBYTECODE="1")
        assert done.stdout.splitlines()[-1].split()[0] == str(number), done.stderr


@pytest.mark.parametrize(
    ("compiled", "variables"),
    [
        (True, {"PYTHONDONTWRITEBYTECODE": "1"}),  # pip compiled the package
        (False, {"PYTHONDONTWRITEBYTECODE": ""}),  # this start writes it beside the module
        (False, {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "elsewhere"}),
        (False, {"PYTHONDONTWRITEBYTECODE": "1", "LOCKSTEP_CACHE": "/proc/none"}),
    ],
    ids=["compiled", "writable", "prefix", "no-cache"],
)
def test_other_bytecode_stays_where_it_is(tmp_path: Path, compiled: bool, variables: dict[str, str]) -> None:
    done = started(tmp_path, compiled=compiled, **variables)
    prefix = variables.get("PYTHONPYCACHEPREFIX")
    found = compiled or variables["PYTHONDONTWRITEBYTECODE"] == ""
    assert done.stdout.splitlines()[-1] == f"1 {prefix} {found}", done.stderr
    assert not (tmp_path / "cache" / "bytecode").exists()
