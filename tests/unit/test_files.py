"""What is written aside appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from lockstep.model.tiny import write_tiny
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.run.files import checksum, replace_text, written_aside


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    replace_text(path, "old")
    with written_aside(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("over", [False, True])
def test_a_folder_replaces_another_only_where_it_may(tmp_path: Path, over: bool) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()

    def write() -> None:
        with written_aside(path, over=over) as aside:
            (aside / "deep").mkdir(parents=True)
            (aside / "deep" / "new").touch()

    if over:
        write()
    else:
        with pytest.raises(OSError):
            write()
    assert [file.name for file in path.iterdir()] == (["deep"] if over else ["old"])
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_stays_of_what_failed_or_was_killed(tmp_path: Path) -> None:
    left = tmp_path / ".writing-folder"
    left.mkdir()
    (left / "half").touch()

    def write() -> None:
        with written_aside(tmp_path / "folder") as aside:
            assert not aside.exists()
            aside.mkdir()
            (aside / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.daily("4194305", "0", "5")
@pytest.mark.parametrize("size", [0, 5, 2**22, 2**22 + 1])
def test_a_checksum_is_that_of_all_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(content)
    assert checksum(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_other_users_can_read_a_new_model_folder(tmp_path: Path) -> None:
    """safetensors writes private files, and a temporary folder is private."""
    before = os.umask(0o022)
    try:
        for write, name in ((write_tiny, "text"), (write_tiny_vlm, "vision")):
            write(tmp_path / name, hidden=64, layers=1)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / name).iterdir()}
            assert "model.safetensors" in modes
            assert set(modes.values()) == {0o644}, modes
        os.umask(0o077)  # a user who wants private files
        write_tiny(tmp_path / "private", hidden=64, layers=1)
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "private").iterdir()} == {0o600}
    finally:
        os.umask(before)
