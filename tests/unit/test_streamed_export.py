"""An export that reads its weights one by one: what `save_pretrained` writes, and never two tensors in memory."""

from __future__ import annotations

import json
import stat
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep.errors import Refusal
from lockstep.model.export_folder import export_model
from lockstep.model.load_folder import ModelFolders
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.recipe.schema import Model
from lockstep.run import tensor_file


class OneByOne(StoredTensors):
    """Weights of which the one before is gone when the next is asked for."""

    last: weakref.ref[torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        assert self.last is None or self.last() is None, f"what was read before {name} is still there"
        tensor = super().__getitem__(name)
        self.last = weakref.ref(tensor)
        return tensor


@pytest.mark.daily("100000-fp32", "1000000000-bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("file_bytes", [10**9, 100_000])
def test_it_is_what_save_pretrained_writes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, file_bytes: int
) -> None:
    monkeypatch.setattr(tensor_file, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(tensor_file, "LINKED_BYTES", 0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    weights = OneByOne([tmp_path / "theirs" / "model.safetensors"])
    export_model(
        Model(path=str(tiny_folder), dtype=dtype),
        weights,
        tmp_path / "mine",
        where="test",
        folders=ModelFolders(str(tiny_folder)),
    )  # type: ignore[arg-type]
    assert weights.last is not None
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    files = sorted((tmp_path / "mine").glob("*.safetensors"))
    mine = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)
    assert len(files) == 1 if file_bytes == 10**9 else len(files) > 2
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "mine" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine", dtype=kind)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def changed_model(tiny_folder: Path, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Writes the file of a checkpoint with other weights than the tiny model, and returns its tensors."""
    stored = load_file(tiny_folder / "model.safetensors")
    weights = {name: (tensor + torch.randn_like(tensor)).to(dtype) for name, tensor in stored.items()}
    folder.mkdir()
    tensor_file.write_files({folder / "model.safetensors": weights})
    return weights


def exported(tiny_folder: Path, file: Path, out: Path) -> Path:
    folders = ModelFolders(str(tiny_folder))
    export_model(Model(path=str(tiny_folder), dtype="bf16"), StoredTensors([file]), out, where="test", folders=folders)
    return out / "model.safetensors"


def test_equal_tensors_share_the_file_of_the_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    weights = changed_model(tiny_folder, tmp_path / "stored", torch.bfloat16)
    file = tmp_path / "stored" / "model.safetensors"
    linked = exported(tiny_folder, file, tmp_path / "linked")
    assert linked.read_bytes() == file.read_bytes()
    if linked.samefile(file):  # no reflink here, so the file must not be changed in place
        assert stat.S_IMODE(file.stat().st_mode) & 0o222 == 0
    found = load_file(linked)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "linked", dtype=torch.bfloat16)
    assert torch.equal(loaded.get_input_embeddings().weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("reason", ["dtype", "disk"])
def test_other_bytes_are_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def no_links(*_: object) -> None:
        raise OSError("no links here")

    weights = changed_model(tiny_folder, tmp_path / "stored", torch.float32 if reason == "dtype" else torch.bfloat16)
    file = tmp_path / "stored" / "model.safetensors"
    if reason == "disk":
        monkeypatch.setattr(tensor_file.fcntl, "ioctl", no_links)
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    written = exported(tiny_folder, file, tmp_path / "written")
    assert not written.samefile(file)
    found = load_file(written)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights.items())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_weights_of_another_model_are_refused_and_nothing_is_left(tiny_folder: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    del weights["model.norm.weight"]
    with pytest.raises(Refusal, match=r"the checkpoint has no weight model\.norm\.weight"):
        export_model(
            Model(path=str(tiny_folder)),
            weights,
            tmp_path / "mine",
            where="test",
            folders=ModelFolders(str(tiny_folder)),
        )
    assert not list(tmp_path.iterdir())
