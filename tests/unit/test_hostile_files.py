"""Files that were made to run code: every reader refuses them by name, and nothing in them runs.

Each payload would write the file `marker` if something of it ran. Each reader gets each payload in the place of the
file that it reads.
"""

from __future__ import annotations

import io
import json
import pickle
import posix
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

import lockstep
from lockstep.compat.checkpoints import convert_checkpoint
from lockstep.compat.pickles import read_pickle
from lockstep.data.encode.chat_text import render_prompt
from lockstep.data.row_cache import kept
from lockstep.data.sources.read import read_rows
from lockstep.errors import Refusal
from lockstep.model.gguf import import_gguf
from lockstep.model.lora import start_from
from lockstep.model.pretrained import tokenizer_of, whole_model
from lockstep.parity.compare.logs import read_log
from lockstep.recipe import load_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.serve.viewer_log import Missing
from lockstep.serve.viewer_runs import loaded
from lockstep.tape.tape_format import TapeFolder
from lockstep.train.logprob_cache import Shape, _is_complete
from lockstep.types import Origin


class Scripted(torch.nn.Module):
    """TorchScript, whose `__setstate__` runs inside of `torch.jit.load`."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(state[1], self.path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Trap:
    """Calls `function(*arguments)` when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any):
        self.told = function, arguments

    def __reduce__(self) -> Any:
        return self.told

    def __call__(self) -> None:
        """What pickle demands of a function, which another trap may stand for."""


class Attributes:
    """Sets an attribute of a function of torch's when it is unpickled."""

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (), (None, {"__defaults__": ("changed",)})


def archive(scripted: Path) -> bytes:
    torch.jit.save(torch.jit.script(Scripted(str(scripted))), scripted.with_suffix(".pt"))
    return scripted.with_suffix(".pt").read_bytes()


def saved(thing: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file, **settings)
    return file.getvalue()


def array_of(thing: Any, save: Callable[..., None] = np.save) -> bytes:
    file = io.BytesIO()
    values = np.empty(1, dtype=object)
    values[0] = thing
    save(file, values)
    return file.getvalue()


def zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(name, b"text")
        opened.writestr("archive/data.pkl", pickle.dumps({}))
    return file.getvalue()


def tarred(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for each in (name, "storages", "tensors", "pickle"):
            told = tarfile.TarInfo(each)
            told.size = 4
            opened.addfile(told, io.BytesIO(b"text"))
    return file.getvalue()


def payloads(marker: Path) -> dict[str, bytes]:
    shell = Trap(posix.system, f"touch {marker}")
    evaluated = Trap(eval, f"open({str(marker)!r}, 'w')")
    nested = Trap(getattr, Trap(__import__, "pathlib"), "Path")
    nested = Trap(Trap(getattr, nested, "touch"), Trap(Path, str(marker)))
    found = {
        "torchscript": archive(marker),
        "numpy object array": array_of(shell),
        "numpy object archive": array_of(shell, np.savez),
        "zip with a path": zipped(f"../../../../../../../..{marker}"),
        "tar with a path": tarred(str(marker)),
        "attributes of a function": saved({"module": {"a": Attributes()}}),
    }
    for name, trap in (("system", shell), ("eval", evaluated), ("nested", nested)):
        # The keys that the readers of DeepSpeed's and FSDP's files ask for.
        thing = {"module": {"a": trap}, "param_shapes": trap, "optimizer_state_dict": trap}
        found[f"pickle {name}"] = pickle.dumps(thing)
        found[f"torch {name}"] = saved(thing)
        found[f"old torch {name}"] = saved(thing, _use_new_zipfile_serialization=False)
    return found


def reader_of(name: str, content: bytes, folder: Path, tiny: Path) -> tuple[str, Callable[[], Any]]:
    """The file's name, and what reads it."""
    model = folder / "model"

    def put(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def model_with(file: str) -> None:
        shutil.copytree(tiny, model)
        (model / "model.safetensors").unlink()
        put(model / file)

    def whole() -> Any:
        from transformers import AutoModelForCausalLM

        return whole_model(AutoModelForCausalLM, str(model), f"model.path {model}", "its weights")

    if name in ("mp_rank_00_model_states.pt", "model_world_size_1_rank_0.pt"):
        put(model / name)
        return name, lambda: convert_checkpoint(model, folder / "out", tiny)
    if name == "zero_pp_rank_0_mp_rank_00_optim_states.pt":
        put(model / name)
        torch.save({"param_shapes": [{}]}, model / "zero_pp_rank_0_mp_rank_00_model_states.pt")
        return name, lambda: convert_checkpoint(model, folder / "out", tiny)
    if name in ("model.safetensors", "pytorch_model.bin"):
        model_with(name)
        return name, whole
    if name == "tokenizer.json":
        model_with(name)
        return str(model), lambda: tokenizer_of(str(model), str(model))
    if name == "adapter_model.safetensors":
        put(folder / "adapter" / name)
        (folder / "adapter" / "adapter_config.json").write_text("{}")
        return name, lambda: start_from(torch.nn.Linear(1, 1), str(folder / "adapter"))
    if name == "step_1":
        put(folder / name / checkpoints.MODEL)
        put(folder / name / checkpoints.OPTIMIZER)
        state = {"step": 1, "rows_seen": 1, "recipe": {}, "data": {}, "world_size": 1, "version": checkpoints.VERSION}
        (folder / name / checkpoints.STATE).write_text(json.dumps(state))
        return name, lambda: checkpoints.read(folder / name)
    tape = TapeFolder(folder)
    if name == "step_000001.safetensors":
        put(tape.step_file(1))
        return name, lambda: tape.read_step(1)
    if name == "step_000001.rows.parquet":
        put(tape.rows_file(1))
        return name, lambda: tape.read_table(tape.rows_file(1))
    put(folder / name)
    if name == "model.gguf":
        return name, lambda: import_gguf(folder / name, folder / "out")
    if name == "metrics.jsonl":
        return name, lambda: read_log(str(folder / name))
    return name, lambda: read_rows(str(folder / name))


READERS = [
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "model_world_size_1_rank_0.pt",
    "model.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "adapter_model.safetensors",
    "step_1",
    "step_000001.safetensors",
    "step_000001.rows.parquet",
    "model.gguf",
    "metrics.jsonl",
    "rows.parquet",
    "rows.arrow",
    "rows.jsonl",
]


@pytest.mark.parametrize("name", READERS)
def test_a_file_made_to_run_code_is_refused_by_name(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    defaults = torch._utils._rebuild_tensor_v2.__defaults__
    for number, (kind, content) in enumerate(payloads(marker).items()):
        marker.unlink(missing_ok=True)  # making the payload may have run it
        folder = tmp_path / str(number)
        folder.mkdir()
        told, read = reader_of(name, content, folder, tiny_folder)
        with pytest.raises(Refusal) as refused:
            read()
        assert told in str(refused.value), (kind, str(refused.value))
        assert not marker.exists(), kind
        assert torch._utils._rebuild_tensor_v2.__defaults__ == defaults, kind


def test_the_payloads_are_dangerous(tmp_path: Path) -> None:
    """What the readers above must not do: read without restriction, each of them runs."""
    marker = tmp_path / "marker"
    made = payloads(marker)
    for kind in ("torchscript", "torch system", "torch eval", "torch nested"):
        marker.unlink(missing_ok=True)
        torch.load(io.BytesIO(made[kind]), weights_only=False)
        assert marker.exists(), kind
    marker.unlink()
    np.load(io.BytesIO(made["numpy object array"]), allow_pickle=True)
    assert marker.exists()


def test_a_torchscript_archive_is_named_as_one(tmp_path: Path) -> None:
    file = tmp_path / "mp_rank_00_model_states.pt"
    file.write_bytes(archive(tmp_path / "marker"))
    with pytest.raises(Refusal, match="TorchScript archive"):
        read_pickle(file)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("system", r"posix\.system"), ("eval", r"builtins\.eval"), ("nested", "builtins")],
)
def test_the_forbidden_name_is_told(kind: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "optim_states.pt"
    file.write_bytes(payloads(tmp_path / "marker")[f"torch {kind}"])
    with pytest.raises(Refusal, match=why):
        read_pickle(file)


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES += [torch.bool, torch.float8_e4m3fn]


def test_plain_values_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    """Every dtype, shared storage, strides, sets and dates: as torch.load reads them."""
    whole = torch.arange(12.0).view(3, 4)
    values = {
        "tied": [whole, whole[1:], whole.t()],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "sizes": torch.Size([2, 3]),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "nothing": None,
        **{str(dtype): torch.tensor([0, 1, 0], dtype=dtype) for dtype in DTYPES},
    }
    file = tmp_path / "states.pt"
    for settings in ({}, {"_use_new_zipfile_serialization": False}):
        if settings:
            del values["torch.float8_e4m3fn"]  # the old format has no storage of it
        torch.save(values, file, **settings)
        found = read_pickle(file)
        expected = torch.load(file, weights_only=True)
        assert found.keys() == expected.keys()
        for key in values.keys() - {"tied"}:
            same = found[key] == expected[key]
            assert bool(same.float().min() if isinstance(same, torch.Tensor) and same.numel() else True), key
            assert type(found[key]) is type(expected[key]), key
        assert [one.tolist() for one in found["tied"]] == [one.tolist() for one in expected["tied"]]
        assert len({one.untyped_storage().data_ptr() for one in found["tied"]}) == 1


def test_a_storage_of_another_size_than_its_numbers_is_refused(tmp_path: Path) -> None:
    """torch's own reader would take memory beyond the record for numbers."""
    file = tmp_path / "states.pt"
    torch.save({"module": {"a": torch.ones(8)}}, file)
    changed = tmp_path / "changed.pt"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for told in old.infolist():
            content = old.read(told.filename)
            new.writestr(told.filename, content[:4] if told.filename.endswith("data/0") else content)
    with pytest.raises(Refusal, match=r"changed\.pt.*4 bytes, not 8 numbers"):
        read_pickle(changed)


def test_the_latest_step_is_a_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest").write_text("../elsewhere")
    with pytest.raises(Refusal, match="latest"):
        convert_checkpoint(tmp_path / "ckpt", tmp_path / "out")


@pytest.mark.parametrize("name", ["../evil.pth", "/tmp/evil.pth", "sub/evil.pth", "..", ""])
def test_an_export_writes_only_into_its_folder(name: str, tmp_path: Path) -> None:
    """`files` of a checkpoint's state are written beside the exported model."""
    state = {"step": 1, "rows_seen": 1, "recipe": {}, "data": {}, "world_size": 1, "version": checkpoints.VERSION}
    (tmp_path / checkpoints.STATE).write_text(json.dumps({**state, "files": {name: "import os"}}))
    for file in (checkpoints.MODEL, checkpoints.OPTIMIZER):
        save_file({"a": torch.ones(1)}, tmp_path / file)
    with pytest.raises(Refusal, match=r"state\.json"):
        checkpoints.read(tmp_path)


def test_caches_take_nothing_that_runs(tmp_path: Path) -> None:
    """A cache that is not what was written is made again."""
    marker = tmp_path / "marker"
    (tmp_path / "manifest.json").write_text("{}")
    for kind, content in payloads(marker).items():
        marker.unlink(missing_ok=True)
        (tmp_path / "logprobs.npy").write_bytes(content)
        assert not _is_complete(tmp_path, {"logprobs": Shape("float32")}, 1), kind
        assert kept(tmp_path / "logprobs.npy", "key") is None
        assert not marker.exists(), kind


def test_yaml_makes_plain_values_only(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = f"method: !!python/object/apply:os.system ['touch {marker}']\n"
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(Refusal, match=r"recipe\.yaml"):
        load_recipe(str(file))
    with pytest.raises(Missing):
        loaded(text)
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(text)
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_chat_templates_are_sandboxed(template: str, tiny_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    tokenizer = tokenizer_of(str(tiny_folder), "model")
    tokenizer.chat_template = template.replace("MARKER", str(marker))
    with pytest.raises(Refusal):
        render_prompt(tokenizer, [{"role": "user", "content": "hi"}], Origin("rows.jsonl", 1))
    assert not marker.exists()


def test_a_config_cannot_ask_for_a_kernel_of_the_hub(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from lockstep.model.pretrained import pretrained

    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        config = json.loads((tiny_folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: "somebody/kernel:forward"}))
        with pytest.raises(Refusal, match=r"config\.json requests the hub kernel 'somebody/kernel:forward'"):
            pretrained(AutoConfig, str(tmp_path), "model.path", "its config")


# Between processes of one run, over connections that it opened itself. The graders' programs run in the sandbox.
TRUSTED = {
    "parallel/world.py": "pickle.loads",
    "reward/function_worker.py": "pickle.loads",
    "rollout/worker/prompt_exchange.py": "pickle.loads",
    "environments/host_worker.py": "pickle.loads",
    "environments/grading.py": "exec",
    "reward/verl_code.py": "exec",
}
RUNS_CODE = re.compile(
    r"weights_only=False|allow_pickle=True|torch\.jit\.load|trust_remote_code=True|shell=True|os\.system\(|pickle\.loads?\(|"
    r"(?<![\w.])(?:eval|exec)\(|extractall|np\.load\(|yaml\.(?:unsafe_|full_)?load\((?!.*Loader=)|joblib|cloudpickle|marshal"
)


def test_no_other_reader_runs_what_it_reads() -> None:
    """A new one must be restricted, and join `READERS`."""
    root = Path(lockstep.__file__).parent
    found = {
        f"{file.relative_to(root).as_posix()}: {match[0]}"
        for file in root.rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith(("#", '"', "`"))
        for match in RUNS_CODE.finditer(line)
    }
    assert found == {f"{file}: {call}(" for file, call in TRUSTED.items()}
