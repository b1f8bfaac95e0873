"""Whatever names a model: a run, a checkpoint, an adapter, a GGUF file, a name of the hub; and what of it is kept."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from commands import torchrun
from conftest import run, write_sft_recipe
from gguf_files import write_gguf
from lockstep.commands.export import export_run
from lockstep.errors import Refusal
from lockstep.model import resolve as hub
from lockstep.model.gguf import import_gguf
from lockstep.model.resolve import model_folder
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.resume import adopt
from refusals import refuses
from runs import facts, stored

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])


def train(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(str(recipe_file), ["optim.warmup=0", *overrides])
    train_offline(recipe, Console.silent())
    return Path(recipe.run.folder) / recipe.run.name


def logits(path: str) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path)(IDS).logits
    return found


def losses(folder: Path) -> list[float]:
    return [metrics["val/loss"] for _, metrics in read_metrics(folder / "metrics.jsonl") if "val/loss" in metrics]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with a recipe, a run of all weights, one of an adapter, and that adapter alone."""
    folder = tmp_path_factory.mktemp("paths")
    recipe = write_sft_recipe(folder, tiny_folder)
    train(recipe, "run.name=full", "run.steps=2", "optim.lr=1e-2", "checkpoint.every=1")
    train(recipe, "run.name=lora", "run.steps=2", "optim.lr=1e-1", "model.lora.rank=4", "run.export=false")
    export_run(folder / "runs" / "lora", folder / "adapter", step=None, best=False, adapter=True)
    return folder


KINDS = {
    "run": ("runs/full", "full"),
    "checkpoint": ("runs/full/checkpoints/step_2", "full"),
    "adapter": ("adapter", "lora"),
    "run without an export": ("runs/lora", "lora"),
    "checkpoint of an adapter": ("runs/lora/checkpoints/step_2", "lora"),
}
DAILY = ("checkpoint", "adapter")


@pytest.mark.daily("checkpoint")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in DAILY else pytest.mark.slow) for k in KINDS])
def test_training_starts_where_the_other_run_ended(place: Path, tmp_path: Path, kind: str) -> None:
    """The validation loss before the first step is that of the other run after its last."""
    path, source = KINDS[kind]
    begun = train(
        place / "recipe.yaml",
        f"model.path={place / path}",
        f"run.folder={tmp_path}",
        "run.steps=1",
        "val.at_start=true",
        "run.export=false",
    )
    assert losses(begun)[0] == pytest.approx(losses(place / "runs" / source)[-1], rel=1e-5)


ADAPTERS = [
    "runs/lora",
    *[pytest.param(one, marks=pytest.mark.slow) for one in ("adapter", KINDS["checkpoint of an adapter"][0])],
]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_goes_on_from_its_folder_or_its_run(place: Path, tmp_path: Path, adapter: str) -> None:
    words = [f"model.adapter={place / adapter}", "run.steps=1", "val.at_start=true", "run.export=false"]
    begun = train(place / "recipe.yaml", *words, f"run.folder={tmp_path}")
    assert losses(begun)[0] == pytest.approx(losses(place / "runs" / "lora")[-1], rel=1e-5)
    trained = stored(begun, 1)
    assert trained.keys() == stored(place / "runs" / "lora", 2).keys()
    assert all(".lora_" in name for name in trained)


def test_a_folder_is_made_once_and_again_when_what_it_is_of_changes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    adapter = tmp_path / "adapter"
    shutil.copytree(place / "adapter", adapter)
    first = model_folder(str(adapter))
    assert "to a model folder: " in capsys.readouterr().err
    assert model_folder(str(adapter)) == first
    assert capsys.readouterr().err == ""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 1}))
    other = model_folder(str(adapter))
    assert other != first
    assert (logits(first) - logits(other)).abs().max() > 1e-3


def test_an_adapters_base_is_found_beside_it_or_named_in_the_refusal(place: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(place / "adapter", adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    base = settings["base_model_name_or_path"]
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "/gone/base"}))
    with pytest.raises(Refusal, match=r"its base model /gone/base was not found") as caught:
        model_folder(str(adapter))
    assert "model.adapter" in str(caught.value)
    assert "--base" in str(caught.value)
    shutil.copytree(base, tmp_path / "base")
    torch.testing.assert_close(logits(model_folder(str(adapter))), logits(model_folder(str(place / "adapter"))))


@pytest.mark.slow
def test_verbs_take_a_checkpoint(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "runs" / "full" / "checkpoints" / "step_1"
    questions = tmp_path / "questions.jsonl"
    row = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1?"}]}
    questions.write_text(json.dumps({**row, "reward_model": {"style": "rule", "ground_truth": "2"}}) + "\n")
    short = ["--max-new-tokens", "2", "--device", "cpu"]
    assert run("generate", path, "hello", *short) == 0
    assert run("eval", path, questions, *short) == 0
    assert run("sample", path, questions, tmp_path / "out.parquet", "-n", "1", *short) == 0
    assert run("plan", place / "recipe.yaml", f"model.path={path}") == 0
    assert run("data", "show", place / "recipe.yaml", f"model.path={path}", "--rows", "1") == 0
    assert (
        run(
            "train",
            place / "recipe.yaml",
            f"run.folder={tmp_path}",
            "run.steps=1",
            "optim.warmup=0",
            "--init-from",
            path,
        )
        == 0
    )
    said = capsys.readouterr()
    assert said.err.count("to a model folder: ") <= 1


@pytest.mark.slow
def test_a_copy_of_a_run_goes_on_as_the_run_would_have(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(place / "recipe.yaml", "run.name=whole", "checkpoint.every=2")
    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    words: list[Any] = ["train", place / "recipe.yaml", "run.name=copy", "checkpoint.every=2", "optim.warmup=0"]
    source = whole / "checkpoints" / "step_4"
    assert run(*words, "--resume-from", source) == 0
    copy = place / "runs" / "copy"
    assert facts(copy) == facts(whole)
    weights = stored(copy, 6)
    assert all((weights[name] == one).all() for name, one in stored(whole, 6).items())
    assert {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()} == before
    assert json.loads((copy / "resumed_from.json").read_text())["step"] == 4
    begun = load_recipe(str(place / "recipe.yaml"), ["run.name=begun", *words[3:]])
    assert "starts from" in str(adopt(begun, source))
    assert [step for step, _ in facts(place / "runs" / "begun")] == [1, 2, 3, 4]
    assert run(*words, "--resume-from", source) == 0  # the same command again: done already
    capsys.readouterr()
    for name, path, says in (
        ("whole", source, "has reached step 6"),
        ("full", source, "does not start from this checkpoint"),
        ("new", place, "neither a checkpoint nor a run folder"),
    ):
        assert run("train", place / "recipe.yaml", f"run.name={name}", "optim.warmup=0", "--resume-from", path) == 2
        assert says in " ".join(capsys.readouterr().err.split())
    assert run(*words[:2], "run.name=other", "optim.eps=5", "--resume-from", source) == 2
    assert "optim.eps" in capsys.readouterr().err
    assert not (place / "runs" / "other").exists()


def test_a_gguf_file_is_the_model_that_was_packed(place: Path, tmp_path: Path, tiny_folder: Path) -> None:
    file = write_gguf(tiny_folder, tmp_path / "tiny.gguf")
    found = model_folder(str(file))
    torch.testing.assert_close(logits(found), logits(str(tiny_folder)), rtol=1e-5, atol=1e-5)
    assert AutoConfig.from_pretrained(found).tie_word_embeddings
    tokenizers = [AutoTokenizer.from_pretrained(one) for one in (found, tiny_folder)]
    assert len({tuple(one("12+3? so")["input_ids"]) for one in tokenizers}) == 1
    (tmp_path / "no.gguf").write_bytes(b"GGML and more")
    with pytest.raises(Refusal, match="not a GGUF file"):
        model_folder(str(tmp_path / "no.gguf"))


@pytest.mark.slow
def test_a_head_of_its_own_in_a_tied_models_file_is_told_and_offered_both_ways(
    tmp_path: Path, tiny_folder: Path
) -> None:
    file = write_gguf(tiny_folder, tmp_path / "own.gguf", head=0.05)
    (_, said) = import_gguf(file, tmp_path / "own")
    assert "differs from its embedding by only 5.0%" in said
    assert "--tie" in said
    assert not AutoConfig.from_pretrained(tmp_path / "own").tie_word_embeddings
    own = logits(str(tmp_path / "own"))
    assert (own - logits(str(tiny_folder))).abs().max() > 1e-3
    (_, said) = import_gguf(file, tmp_path / "tied", tie=True)
    assert "tied" in said
    assert AutoConfig.from_pretrained(tmp_path / "tied").tie_word_embeddings
    torch.testing.assert_close(logits(str(tmp_path / "tied")), logits(str(tiny_folder)), rtol=1e-5, atol=1e-5)
    other = write_gguf(tiny_folder, tmp_path / "other.gguf", head=1.0)
    with refuses("--tie", "untied-weights"):
        import_gguf(other, tmp_path / "refused", tie=True)
    assert "a separate matrix" in import_gguf(other, tmp_path / "other")[1]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_export_keeps_what_is_tied(recipe_file: Path, tmp_path: Path, tiny_folder: Path, tied: bool) -> None:
    base = tiny_folder
    if not tied:
        import_gguf(write_gguf(tiny_folder, tmp_path / "own.gguf", head=0.05), base := tmp_path / "own")
    folder = train(recipe_file, "run.steps=1", f"model.path={base}")
    assert AutoConfig.from_pretrained(folder / "export").tie_word_embeddings is tied
    assert ("lm_head.weight" in load_file(folder / "export" / "model.safetensors")) is not tied


@pytest.mark.slow
def test_masters_start_with_the_digits_of_the_files(place: Path, tmp_path: Path, tiny_folder: Path) -> None:
    """With a learning rate of nothing the masters in a checkpoint are those that the run began with."""
    words = ["run.steps=1", "model.dtype=bf16", "optim.lr=1e-30", "optim.weight_decay=0", "run.export=false"]
    files = load_file(tiny_folder / "model.safetensors")
    for name, more in (("device", []), ("host", ["parallel.offload=optimizer"])):
        begun = train(place / "recipe.yaml", *words, *more, f"run.folder={tmp_path}", f"run.name={name}")
        assert_begun_with(begun, files)


def assert_begun_with(begun: Path, files: dict[str, torch.Tensor]) -> None:
    state, weights = stored(begun, 1, "optimizer"), stored(begun, 1)
    for name, value in files.items():
        assert state[f"master/{name}"].dtype == torch.float32
        assert (state[f"master/{name}"] - value).abs().max() < 1e-29, name  # biases are 0: they moved by the rate
        assert (weights[name] - value.bfloat16()).abs().max() < 1e-29, name
    assert any((value != value.bfloat16().float()).any() for value in files.values()), "nothing to lose"


@pytest.mark.slow
def test_masters_of_two_processes_start_with_the_digits_of_the_files(
    place: Path, tmp_path: Path, tiny_folder: Path
) -> None:
    words = ["run.steps=1", "model.dtype=bf16", "optim.lr=1e-30", "optim.weight_decay=0", "run.export=false"]
    done = torchrun("train", place / "recipe.yaml", "optim.warmup=0", *words, f"run.folder={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert_begun_with(tmp_path / "run", load_file(tiny_folder / "model.safetensors"))


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes every connection and never says a word."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(hub, "SECONDS", 0.3)
        held: list[socket.socket] = []
        taking = threading.Thread(target=lambda: held.append(server.accept()[0]), daemon=True)
        taking.start()
        yield
        for one in held:
            one.close()


def test_a_hub_that_never_answers_is_one_sentence(silent_hub: None) -> None:
    with pytest.raises(Refusal, match=r"\[hub-failed\].*: (no answer in 0\.3 s|timed out)") as caught:
        model_folder("nobody/nothing")
    assert len(caught.value.problems) == 1


def test_nobody_waits_for_it_twice(silent_hub: None, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asks for the tokenizer, for the config and more; one question is put, and one problem told."""
    asked: list[object] = []
    own = hub._status_of
    monkeypatch.setattr(hub, "_status_of", lambda request: asked.append(request) or own(request))
    with pytest.raises(Refusal) as caught:
        train(recipe_file, "model.path=nobody/nothing")
    assert len(caught.value.problems) == len(asked) == 1


def test_without_a_hub_a_name_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refuses("model.path nobody/nothing", "hub-failed", "HF_HUB_OFFLINE is set"):
        model_folder("nobody/nothing")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    with pytest.raises(Refusal, match=r"cannot be reached.*refused"):
        model_folder("nobody/nothing")
