"""An export that reads its weights one by one: what `save_pretrained` writes, and never two tensors in memory."""

from __future__ import annotations

import json
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
