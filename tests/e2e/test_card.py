"""The card of an exported model says what the run's files say; a push takes it and the model to a hub."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from conftest import run, write_sft_recipe
from hub_server import TOKEN, Hub, hub_server
from lockstep.model.resolve import model_folder
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics
from lockstep.run.model_card import card_files, curves_svg
from lockstep.train.offline import train_offline
from refusals import has_problem, printed_problems

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])


def logits(path: object) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path)(IDS).logits
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A LoRA run and another one that it was compared with."""
    folder = tmp_path_factory.mktemp("card")
    recipe = write_sft_recipe(folder, tiny_folder)
    words = ["model.lora.rank=4", "optim.lr=1e-1", "run.steps=3", "val.at_start=true"]
    for name in ("first", "second"):
        train_offline(load_recipe(str(recipe), [*words, f"run.name={name}"]), Console.silent())
    assert run("compare", folder / "runs" / "first", folder / "runs" / "second", "--metric", "train/loss") in (0, 1, 2)
    return folder


def test_the_card_says_what_the_run_says(place: Path) -> None:
    source = place / "runs" / "second"
    assert run("export", source, place / "out", "--merge") == 0
    card = (place / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {"library_name": "transformers", "tags": ["lockstep", "sft"]}
    metrics = dict(read_metrics(source / "metrics.jsonl"))
    assert f"| val/loss | {metrics[0]['val/loss']:.4g} -> {metrics[3]['val/loss']:.4g} |" in card
    assert "the weights after step 3 of 3" in card
    env = RunFolder(source).read_env()
    (file,) = env["data"]["train"][0]["files"]
    assert f"| train | train.jsonl | 48 | `{file['sha256'][:16]}` |" in card
    assert "## Comparison" in card
    assert "| first | in step |" in card or "| first | cannot tell |" in card, card
    (fenced,) = card.split("~~~~yaml\n")[1:]
    shown, stored = yaml.safe_load(fenced.split("~~~~")[0]), yaml.safe_load((source / "recipe.yaml").read_text())
    assert shown["optim"] == stored["optim"]
    assert str(place) not in card
    # The export at the end of the run has one too, and both are models.
    assert (source / "export" / "README.md").is_file()
    torch.testing.assert_close(logits(place / "out"), logits(source / "export"))
    assert run("export", source, place / "adapter", "--adapter") == 0
    assert "library_name: peft" in (place / "adapter" / "README.md").read_text()
    # The adapter and its base once more, by hand.
    base = load_recipe(str(source / "recipe.yaml")).model.path
    assert run("export", place / "adapter", place / "merged", "--merge", "--base", base) == 0
    torch.testing.assert_close(logits(place / "merged"), logits(place / "out"), rtol=1e-5, atol=1e-5)


def test_the_picture_has_the_values_at_their_places() -> None:
    text = curves_svg([(1, {"train/loss": 4.0}), (2, {"train/loss": 2.0}), (3, {"train/loss": 3.0})])
    assert text is not None
    (line,) = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}polyline")
    # 272 x 112 inside margins of 44: the highest value on top, the lowest at the bottom, one half way.
    assert line.attrib["points"] == "44.0,44.0 180.0,156.0 316.0,100.0"
    assert curves_svg([(1, {"train/loss": 4.0})]) is None
    assert curves_svg([(1, {"train/loss": float("nan")}), (2, {"train/loss": 1.0})]) is None


def test_names_in_a_card_are_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a<b|c")
    folder.path.mkdir()
    folder.recipe.write_text("method: sft\nmodel: {path: /secret/place/export}\ndata: {system: 'x ~~~~ <script>'}\n")
    card = card_files(folder, 2)["README.md"]
    assert "# a&lt;b\\|c" in card
    assert "`place/export`" in card
    assert "/secret" not in card
    assert "~~~~~~~~yaml" in card


def test_a_card_is_of_its_step_and_names_no_host(tmp_path: Path) -> None:
    """Numbers of later steps say nothing of the weights; addresses of servers are nobody's business."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.recipe.write_text(
        "method: grpo\nmodel: {path: m}\nreward: {remote: 'http://me:secret@10.0.0.5:8000/score'}\n"
    )
    losses = [4.0, 3.0, 2.0, 9.0]
    lines = [{"step": step, "data": {"val/loss": loss}} for step, loss in enumerate(losses)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = card_files(folder, 2)["README.md"]
    assert "| val/loss | 4 -> 2 |" in card
    assert "the weights after step 2 of 3" in card
    assert "remote: http://..." in card
    assert "secret" not in card
    assert "10.0.0.5" not in card


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants, file_download, hf_api

    with hub_server() as server:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        assert file_download.constants is constants is hf_api.constants
        yield server


@pytest.mark.slow
def test_a_pushed_model_comes_back_from_the_hub(place: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    source = place / "runs" / "second"
    assert run("export", source, "--push", "someone/sums") == 0, capsys.readouterr().err
    assert "pushed to" in capsys.readouterr().out
    (message,) = hub.messages
    assert message.startswith("exported step 3 of")
    files = hub.files["someone/sums"]
    assert {"README.md", "curves.svg", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    found = model_folder("someone/sums")
    torch.testing.assert_close(logits(found), logits(source / "export"))
    assert run("generate", "someone/sums", "hello", "--max-new-tokens", "1", "--device", "cpu") == 0
    capsys.readouterr()
    assert run("generate", "someone/else", "hello") == 2
    assert has_problem(printed_problems(capsys.readouterr().err), "someone/else", "hub-access", "(404)")


def test_a_push_that_cannot_be_is_refused_before_anything_is_written(
    place: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = place / "runs" / "second", tmp_path / "out"

    def refused(*words: object) -> str:
        assert run("export", source, *words) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "is not a hub name" in refused(out, "--push", "sums")
    assert "DIR [not-set]" in refused()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refused(out, "--push", "a/b")
    assert "--push a/b [hub-failed]" in said
    assert "(HF_HUB_OFFLINE is set)" in said
    assert not out.exists()


@pytest.mark.slow
def test_a_push_that_fails_on_the_way_loses_nothing(
    place: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The connection breaks off where the files are committed."""
    handler = hub.RequestHandlerClass
    answer = handler.do_POST  # type: ignore[attr-defined]

    def break_off(self: Any) -> None:
        if "/commit/" in self.path:
            self.connection.close()
        else:
            answer(self)

    monkeypatch.setattr(handler, "do_POST", break_off)
    out = tmp_path / "out"
    assert run("export", place / "runs" / "second", out, "--push", "someone/sums") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the model is in {out}" in said
    assert TOKEN not in said
    torch.testing.assert_close(logits(str(out)), logits(str(place / "runs" / "second" / "export")))
