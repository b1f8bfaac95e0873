"""What is said of rows that are all good: the same ones twice in an update, or in training and validation; and how few
of them are encoded to show some."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import chat_rows, question_rows, run, write_jsonl
from lockstep.commands.plan import show_plan
from lockstep.data.encode.prompt_rows import PromptRows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.preflight.run_checks import prepare_offline, prepare_online
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from refusals import refuses


def remarks(path: Path, *words: str) -> list[str]:
    """Of a recipe of 48 chats, 8 to an update, and 10 for validation; or of 20 prompts, 4 to a step."""
    recipe = load_recipe(str(path), list(words))
    find: Any = prepare_online if recipe.method == "grpo" else prepare_offline
    found: list[str] = find(recipe, select("cpu"), 1, Console.silent()).remarks
    return found


def test_rows_that_are_trained_and_validated_are_counted(recipe_file: Path, tmp_path: Path) -> None:
    assert remarks(recipe_file) == []
    write_jsonl(tmp_path / "val.jsonl", [*chat_rows(10, seed=1), *chat_rows(48)[5:8], chat_rows(48)[5]])
    (said,) = remarks(recipe_file)
    assert said.startswith("data.val: 4 of 14 rows are also in data.train")


def test_an_update_larger_than_the_data_is_told(recipe_file: Path) -> None:
    assert remarks(recipe_file, "batch.rows_per_update=48") == []
    (said,) = remarks(recipe_file, "batch.rows_per_update=50")
    assert "of its 50 only 48" in said
    assert "lower batch.rows_per_update" in said
    # Epochs end a run before its first update is full: 2 x 48 rows of 100.
    (said,) = remarks(recipe_file, "batch.rows_per_update=100", "run.steps=null", "run.epochs=2")
    assert "of its 96 only 48 are different" in said
    assert remarks(recipe_file, "batch.rows_per_update=100", "run.steps=null", "run.epochs=1") == []


def test_a_small_source_with_a_large_weight_is_told(recipe_file: Path, tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", chat_rows(2, seed=7))
    sources = f"[{{path: {tmp_path / 'train.jsonl'}, weight: 1}}, {{path: {few}, weight: 1}}]"
    (said,) = remarks(recipe_file, f"data.train={sources}", "batch.rows_per_update=20", "data.shuffle=false")
    # Half of the 20 rows are of the source of 2, in turn with the other's.
    assert "of its 20 only 12" in said
    assert "weight" in said
    assert remarks(recipe_file, f"data.train={sources}", "batch.rows_per_update=4", "data.shuffle=false") == []


def test_prompts_are_counted_too(online_file: Path, tmp_path: Path) -> None:
    assert remarks(online_file) == []
    (said,) = remarks(online_file, "batch.prompts=24")
    assert "prompts" in said
    assert "of its 24 only 20" in said
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(23)[17:])
    (said,) = remarks(online_file, f"val.questions={questions}")
    assert said.startswith("val.questions: 3 of 6 rows are also in data.train")


def test_at_most_so_many_rows_of_each_source(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["data.max_rows=5", "batch.rows_per_update=2"])
    found = prepare_offline(recipe, select("cpu"), 1, Console.silent())
    assert found.batches.rows == found.train.counts.rows == 5
    assert found.val is not None
    assert found.val.counts.rows == 10  # validation is what it was


@pytest.mark.parametrize("kind", [SupervisedRows, PromptRows])
def test_showing_a_row_encodes_that_row(
    kind: Any, recipe_file: Path, online_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, plain = [], kind.__call__

    def counted(self: Any, row: Any, origin: Any) -> Any:
        read.append(str(origin))
        return plain(self, row, origin)

    monkeypatch.setattr(kind, "__call__", counted)
    path = recipe_file if kind is SupervisedRows else online_file
    assert run("data", "show", path, "--rows", 1) == 0
    assert len(read) == 1
    assert read[0].endswith("jsonl line 1")
    said = capsys.readouterr()
    assert "the first 1 of" in " ".join((said.out + said.err).split())


def test_data_sources_without_a_rule_are_refused_before_a_reward_is_opened(online_file: Path, tmp_path: Path) -> None:
    """As a plan does it: all of them at once, those of the questions too."""
    rows = question_rows(20)
    rows[7]["data_source"] = "mine"
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    asked = write_jsonl(
        tmp_path / "questions.jsonl", [{**row, "data_source": "hers"} for row in question_rows(30)[20:]]
    )
    assert remarks(online_file) == []  # the recipe's own function judges
    ruled = ["reward.function=null", f"val.questions={asked}"]
    with pytest.raises(Refusal) as refused:
        remarks(online_file, *ruled)
    assert [problem.where for problem in refused.value.problems] == ["data_source 'hers'", "data_source 'mine'"]
    assert remarks(online_file, *ruled, "reward.rules={mine: exact, hers: exact}") == []
    with refuses("reward.rules.arithmetics", "unknown-source"):
        remarks(online_file, *ruled, "reward.rules={mine: exact, hers: exact, arithmetics: math}")


def test_a_plan_tells_how_weights_mix_the_sources(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 48 and 12 rows an epoch of 60 takes a quarter and three quarters."""
    few = write_jsonl(tmp_path / "few.jsonl", chat_rows(12, seed=7))
    sources = [{"path": str(tmp_path / "train.jsonl"), "weight": 1}, {"path": str(few), "weight": 3}]
    show_plan(load_recipe(str(recipe_file), [f"data.train={sources}"]), 1)
    said = " ".join("".join(capsys.readouterr()).split())
    assert "train.jsonl: 25.0%, 15 rows per epoch from 48" in said
    assert "few.jsonl: 75.0%, 45 rows per epoch from 12" in said
    show_plan(load_recipe(str(recipe_file)), 1)
    assert "rows per epoch from" not in " ".join("".join(capsys.readouterr()).split())


def bare_model(tiny_folder: Path, folder: Path) -> Path:
    """The tiny model as a base model: its tokenizer has no chat template."""
    shutil.copytree(tiny_folder, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_that_run_into_their_responses(
    recipe_file: Path, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By train, plan and data show, with the format that ends it."""
    rows = [{"prompt": "A?", "response": "B"}, {"prompt": "A? ", "response": "B"}, {"prompt": "A?", "response": "\nB"}]
    train = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"prompt": "C?", "response": "D"}])
    words = (recipe_file, f"data.train={train}", "data.val=[]", f"model.path={bare_model(tiny_folder, tmp_path / 'm')}")
    for verb in (("data", "show"), ("plan",), ("train",)):
        more = {"show": ("--rows", 4), "train": ("run.steps=1", "optim.warmup=0")}.get(verb[-1], ())
        assert run(*verb, *words, *more) == 0
        told = " ".join("".join(capsys.readouterr()).split())
        assert "2 rows join prompt and response" in told, (verb, told)
        assert "the tokenizer has no chat template" in told
        assert f"the first is {train} line 1" in told
    assert run("data", "show", *words, 'data.prompt_format="Question: {}\\nAnswer: "') == 0
    assert "without a space" not in "".join(capsys.readouterr())
