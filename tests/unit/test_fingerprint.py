"""Two runs say the same of their model exactly when weights, tokenizer and template are the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from hang import HANG, wait_until
from lockstep.model import fingerprint
from lockstep.model.fingerprint import differing_files, folder_fingerprint, model_fingerprint
from lockstep.model.load import load_tokenizer
from lockstep.run.files import checksum


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def of(folder: Path) -> dict[str, str | None]:
    return model_fingerprint(str(folder), load_tokenizer(str(folder)))


def small(path: Path, template: str | None = None) -> dict[str, str | None]:
    tokenizer: Any = SimpleNamespace(chat_template=template)
    return model_fingerprint(str(path), tokenizer)


def differing(a: dict[str, str | None], b: dict[str, str | None]) -> set[str]:
    return {name for name in a if a[name] != b[name]}


def test_a_copy_elsewhere_is_the_same_model(tiny_folder: Path, folder: Path) -> None:
    found = of(tiny_folder)
    assert found == of(folder)
    assert all(found.values())


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("place", [0, -1, 1000])
def test_one_bit_of_the_weights(tiny_folder: Path, folder: Path, place: int) -> None:
    flip(folder / "model.safetensors", place)
    assert differing(of(tiny_folder), of(folder)) == {"weights"}


def test_what_else_changes_what(tiny_folder: Path, folder: Path) -> None:
    before = of(tiny_folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 65'))
    assert differing(before, of(folder)) == {"weights"}
    shutil.copy(tiny_folder / "config.json", config)
    (folder / "README.md").write_text("words that are no part of the model")
    assert of(folder) == before
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert differing(before, of(folder)) == {"template"}
    words = folder / "tokenizer.json"
    words.write_text(words.read_text() + "\n")
    assert differing(before, of(folder)) == {"template", "tokenizer"}


def test_checksums_are_those_of_names_sizes_and_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(b"weights")
    (tmp_path / "vocab.txt").write_bytes(b"a\nb\n")
    assert small(tmp_path, "hello") == {
        "weights": hashlib.sha256(b"b.safetensors 7\nweightsconfig.json 2\n{}").hexdigest(),
        "tokenizer": hashlib.sha256(b"vocab.txt 4\na\nb\n").hexdigest(),
        "template": hashlib.sha256(b"hello").hexdigest(),
    }


def test_content_that_moved_to_the_next_file_is_another_model(tmp_path: Path) -> None:
    for name, parts in (("one", (b"ab", b"c")), ("two", (b"a", b"bc"))):
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            (tmp_path / name / f"{number}.bin").write_bytes(part)
    assert differing(small(tmp_path / "one"), small(tmp_path / "two")) == {"weights"}


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert small(tmp_path) == {"weights": None, "tokenizer": None, "template": None}


def test_large_files_are_sampled_to_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces of 4 of 100 bytes at 0, 32, 64 and 96."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 50)
    monkeypatch.setattr(fingerprint, "PIECES", 4)
    monkeypatch.setattr(fingerprint, "PIECE", 4)
    file = tmp_path / "w.safetensors"
    content = bytes(range(100))
    file.write_bytes(content)
    read = b"".join(content[at : at + 4] for at in (0, 32, 64, 96))
    before = small(tmp_path)
    assert before["weights"] == hashlib.sha256(b"w.safetensors 100\n" + read).hexdigest()
    for place, seen in ((0, True), (33, True), (99, True), (50, False)):
        file.write_bytes(content)
        flip(file, place)
        assert (small(tmp_path) != before) == seen, place


def test_a_folder_is_known_by_the_files_that_a_model_is_loaded_from(tiny_folder: Path, folder: Path) -> None:
    before = folder_fingerprint(str(tiny_folder))
    digest = hashlib.sha256((tiny_folder / "model.safetensors").read_bytes()).hexdigest()
    assert before["model.safetensors"] == f"sha256 {digest}"
    (folder / "README.md").write_text("words that are no part of the model")
    assert folder_fingerprint(str(folder)) == before
    flip(folder / "tokenizer.json", 40)
    (folder / "config.json").unlink()
    (folder / "chat_template.json").write_text("{}")
    assert differing_files(before, folder_fingerprint(str(folder))) == [
        "tokenizer.json has other content",
        "config.json is missing",
        "chat_template.json is new",
    ]


def test_of_a_large_folder_every_tensor_is_sampled(
    tiny_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any tensor that was changed is seen, in whichever of the files; and few bytes are read."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "TENSOR_BLOCK", 8)
    before = folder_fingerprint(str(tiny_folder))
    assert before["model.safetensors"].startswith("sampled ")
    assert folder_fingerprint(str(folder)) == before
    file = folder / "model.safetensors"
    weights = load_file(file)
    read = sum(len(block) for block in fingerprint._tensor_blocks(file, file.stat().st_size))
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert read <= header + len(weights) * 3 * 8 < file.stat().st_size
    for name in weights:
        changed = {**weights, name: weights[name] + 0.01}
        save_file(changed, file, metadata={"format": "pt"})
        assert differing_files(before, folder_fingerprint(str(folder))) == ["model.safetensors has other content"], name


def test_a_large_file_without_a_safetensors_header_is_sampled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of 4 of 100 bytes at 0, 32, 64 and 96."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 50)
    monkeypatch.setattr(fingerprint, "PIECES", 4)
    monkeypatch.setattr(fingerprint, "PIECE", 4)
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(bytes(range(100)))
        before = folder_fingerprint(str(folder))
        flip(folder / name, 65)
        assert differing_files(before, folder_fingerprint(str(folder))) == [f"{name} has other content"]


def test_who_wrote_a_config_is_no_part_of_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    before = folder_fingerprint(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0.0"}), encoding="utf-8")
    assert folder_fingerprint(str(folder)) == before
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}), encoding="utf-8")
    assert folder_fingerprint(str(folder)) != before


@pytest.fixture(autouse=True)
def _nothing_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_prefetched", {})


def prefetched(folder: Path) -> None:
    fingerprint.prefetch_model(str(folder))
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join()


def every(folder: Path) -> tuple[dict[str, str | None], dict[str, str]]:
    return small(folder), folder_fingerprint(str(folder))


def test_the_background_reads_the_weights_once_for_each_digest(folder: Path) -> None:
    expected = every(folder)
    prefetched(folder)
    with patch.object(fingerprint, "checksum", side_effect=checksum) as checksums:
        with patch.object(fingerprint, "_content", side_effect=fingerprint._content) as contents:
            assert every(folder) == expected
        assert [[file.name for file in call.args[0]] for call in contents.call_args_list] == [["tokenizer.json"]]
        read = {call.args[0].name for call in checksums.call_args_list}
        assert "tokenizer.json" in read
        assert "model.safetensors" not in read
        # A result is used once: files may change between two readings within the resolution of their times.
        assert every(folder) == expected
        assert "model.safetensors" in {call.args[0].name for call in checksums.call_args_list}


def test_weights_that_change_after_the_background_read_them_are_read_again(folder: Path) -> None:
    before = every(folder)
    prefetched(folder)
    flip(folder / "model.safetensors", -1)
    found = every(folder)
    assert found[0]["weights"] != before[0]["weights"]
    assert found[1]["model.safetensors"] != before[1]["model.safetensors"]


def test_an_error_of_the_background_is_raised_where_the_digest_is_needed(folder: Path) -> None:
    with patch.object(fingerprint, "_content", side_effect=OSError("unreadable")):
        prefetched(folder)
    with pytest.raises(OSError, match="unreadable"):
        small(folder)


def test_the_background_has_not_begun_yet(folder: Path) -> None:
    """The digests are needed before the thread computes them: they are computed where they are needed."""
    expected, begin, ends = every(folder), threading.Event(), []
    compute = fingerprint._content

    def late(files: Sequence[Path]) -> str:
        if threading.current_thread().name == "prefetch":
            begin.wait(HANG)
            ends.append(files)
        return compute(files)

    with patch.object(fingerprint, "_content", side_effect=late):
        fingerprint.prefetch_model(str(folder))
        wait_until(lambda: bool(fingerprint._prefetched))
        # The first digest is being computed, the second one waits.
        assert folder_fingerprint(str(folder)) == expected[1]
        begin.set()
        assert small(folder) == expected[0]
    assert len(ends) == 1
    assert not fingerprint._prefetched


def test_large_weights_and_other_processes_of_a_machine_compute_no_digests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    prefetched(folder)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    prefetched(folder)
    prefetched(folder / "none")
    assert not fingerprint._prefetched


def bytes_read() -> int:
    """The bytes that the threads of this process have read with system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts system calls as Linux does")
@pytest.mark.parametrize(("rank", "share"), [("0", 1), ("1", 0)])
def test_the_background_reads_large_weights_into_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: str, share: int
) -> None:
    """Weights that are too large for a complete digest: each byte is read once, by one process of the machine."""
    size, weights = 20 * 2**20, folder / "model-00002.safetensors"
    weights.write_bytes(bytes(size))
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1)
    monkeypatch.setattr(fingerprint, "PREFETCHED", 2**22)
    monkeypatch.setattr(fingerprint, "CACHED_AT_ONCE", 2**20)
    monkeypatch.setenv("LOCAL_RANK", rank)
    before = bytes_read()
    prefetched(folder)
    assert bytes_read() - before == pytest.approx(share * size, abs=2**20)
    assert not fingerprint._prefetched


def test_a_run_that_ends_early_does_not_wait_for_the_background(folder: Path) -> None:
    script = """
import sys, threading
from lockstep.model import fingerprint
started = threading.Event()
def read(pieces):
    started.set()
    threading.Event().wait()
fingerprint.WHOLE_BYTES, fingerprint._read_pieces = 1, read
fingerprint.prefetch_model(sys.argv[1])
assert started.wait(60)
"""
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=HANG)
