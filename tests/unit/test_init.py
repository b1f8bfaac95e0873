"""`lockstep init`: every method's recipe passes the recipe check, also with all that is off put on."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.commands.init import Choices, needs_teacher, rewarded, write_recipe
from lockstep.commands.smoke import smoke_test
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.preflight.prepared import PreparedOnline
from lockstep.preflight.run_checks import prepare_offline, prepare_online
from lockstep.recipe.loader import load_recipe
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.reward.rules import rule_for
from lockstep.run.console import Console

OFF = re.compile(r"^( *)#(\w+:)", re.MULTILINE)


def wishes(method: str, *, more: bool) -> Choices:
    return Choices(
        method,
        "my-model",
        "rows: 1.jsonl",  # a name that YAML would read as something else
        "val.jsonl" if more else None,
        "reward.py:score" if more and rewarded(method) else None,
        "teacher" if needs_teacher(method) else None,
    )


@pytest.mark.daily
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("method", [*OFFLINE, *ONLINE])
def test_every_method_gets_a_recipe_that_passes(tmp_path: Path, method: str, more: bool) -> None:
    file = tmp_path / "my recipe.yaml"
    write_recipe(file, wishes(method, more=more))
    text = file.read_text(encoding="utf-8")
    recipe = load_recipe(str(file))
    assert (recipe.method, recipe.model.path, recipe.run.name) == (method, "my-model", "my-recipe")
    assert [source.path for source in recipe.data.train] == ["rows: 1.jsonl"]
    given = recipe.val.questions or ", ".join(source.path for source in recipe.data.val)
    assert given == ("val.jsonl" if more else "")
    if rewarded(method):
        assert recipe.reward.function == ("reward.py:score" if more else None)
    assert max(map(len, text.splitlines())) <= 100
    # What is off is right too: a user takes the mark away and no more.
    assert OFF.search(text)
    file.write_text(OFF.sub(r"\1\2", text), encoding="utf-8")
    assert load_recipe(str(file)).model.lora is not None


def test_every_key_has_its_meaning_above_it(tmp_path: Path) -> None:
    write_recipe(tmp_path / "r.yaml", wishes("ppo", more=True))
    lines = (tmp_path / "r.yaml").read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *#?\w+: \S", line)]
    assert len(keys) > 15
    assert all(lines[number - 1].strip().startswith("# ") for number in keys)
    assert "  # Peak learning rate." in lines


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("mine")
    with pytest.raises(Refusal, match="already exists"):
        write_recipe(file, wishes("sft", more=False))
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        (Choices("stf", "m", "d"), "did you mean sft"),
        (Choices("distill", "m", "d"), "needs a teacher"),
        (Choices("sft", "m", "d", reward="r.py:f"), "uses no reward"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_file(tmp_path: Path, chosen: Choices, where: str) -> None:
    with pytest.raises(Refusal, match=where):
        write_recipe(tmp_path / "r.yaml", chosen)
    assert not list(tmp_path.iterdir())


def test_on_a_terminal_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lockstep", "init", "--model", "m"])
    (tmp_path / "m").mkdir()
    answers = iter(["grpo", "rows.jsonl", "", "reward.py:score"])
    monkeypatch.setattr("typer.prompt", lambda *words, **more: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    values = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    assert values["method"] == "grpo"
    assert values["reward"] == {"function": "reward.py:score"}
    assert "val" not in values
    said = capsys.readouterr().out
    assert "missing: data.train rows.jsonl" in said
    assert "missing: model.path" not in said
    assert "lockstep train recipe.yaml --smoke" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_without_a_terminal_it_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lockstep", "init", "--method", "sft"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "--model" in said
    assert "--data" in said
    assert "--method" not in said


# Rows as people have them: by method, the rows, and words that a recipe needs besides.
FORMATS: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "messages": (
        "sft",
        {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "it is 1"}]},
        [],
    ),
    "sharegpt": (
        "sft",
        {"conversations": [{"from": "human", "value": "say 1"}, {"from": "gpt", "value": "it is 1"}]},
        [],
    ),
    "alpaca": ("sft", {"instruction": "add 1", "input": "and 2", "output": "3"}, []),
    "prompt and completion": ("sft", {"prompt": "add 1", "completion": "2"}, []),
    "text": ("sft", {"text": "once upon"}, []),
    "own columns": ("sft", {"asked": "add 1", "said": "2"}, ["data.prompt_key=asked", "data.response_key=said"]),
    "pairs": ("dpo", {"prompt": "add 1", "chosen": "2", "rejected": "3"}, []),
    "pairs of chats": (
        "dpo",
        {
            "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
            "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}],
        },
        [],
    ),
    "scored lists": (
        "rm",
        {"prompt": "1?", "completions": [{"response": "a", "score": 30.0}, {"response": "b", "score": 0.5}]},
        [],
    ),
    "verdicts": ("kto", {"prompt": "add 1", "completion": "it is 1", "label": True}, []),
    "steps": (
        "prm",
        {"prompt": "add 1", "completions": ["one", "two"], "labels": [True, False]},
        ["prm.placeholder='@'", "prm.tokens=[+, '-']"],
    ),
    "gsm8k": ("grpo", {"question": "1+1?", "answer": "so\n#### 2"}, []),
    "prompts with answers": ("grpo", {"prompt": "1+1?", "answer": "2"}, []),
    "RL schema": (
        "ppo",
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        },
        [],
    ),
}
DAILY = ("sharegpt", "pairs", "prompts with answers")


def rows_of(folder: Path, row: dict[str, object], count: int = 6) -> Path:
    """So many rows that differ, as a file."""
    file = folder / "rows.jsonl"
    texts = [json.dumps(row).replace("1", str(number + 1)) for number in range(count)]
    texts[0] = texts[0].replace("true", "false")  # verdicts are of both kinds
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_looked_at(tmp_path: Path, tiny_folder: Path, kind: str) -> None:
    """What is said of them is what training will read, and updates are no larger than the data."""
    method, row, words = FORMATS[kind]
    data = rows_of(tmp_path, row)
    file = tmp_path / "r.yaml"
    said = write_recipe(file, Choices(method, str(tiny_folder), str(data), words=tuple(words)))
    assert said[0].startswith(f"{data}:")
    recipe = load_recipe(str(file))
    assert (recipe.batch.prompts if method in ONLINE else recipe.batch.rows_per_update) == 6
    prepared = (prepare_online if method in ONLINE else prepare_offline)(recipe, select("cpu"), 1, Console.silent())
    assert prepared.train.counts.rows == 6
    assert prepared.train.notes[0] in " ".join(" ".join(said).split())
    for question in prepared.train.questions if isinstance(prepared, PreparedOnline) else ():
        assert rule_for(question.data_source, recipe.reward.rules).truth_problem(str(question.ground_truth)) is None


@pytest.mark.daily("prompts with answers", "pairs")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in DAILY else pytest.mark.slow) for k in FORMATS])
def test_the_recipe_trains_as_written(tmp_path: Path, tiny_folder: Path, kind: str) -> None:
    method, row, words = FORMATS[kind]
    file = tmp_path / "r.yaml"
    write_recipe(file, Choices(method, str(tiny_folder), str(rows_of(tmp_path, row)), words=tuple(words)))
    smoke_test(load_recipe(str(file)))


def test_a_tokenizer_without_a_template_gets_one_whose_tokens_it_has(tmp_path: Path, tiny_folder: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    (model / "chat_template.jinja").unlink()
    data = rows_of(tmp_path, FORMATS["messages"][1])
    said = write_recipe(tmp_path / "r.yaml", Choices("sft", str(model), str(data)))
    assert load_recipe(str(tmp_path / "r.yaml")).data.template == "chatml"
    assert any("data.template=chatml" in line for line in said)


def test_rows_that_are_too_long_are_dropped_and_it_is_said(tmp_path: Path, tiny_folder: Path) -> None:
    data = rows_of(tmp_path, FORMATS["text"][1])
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "x" * 5000}) + "\n")
    said = write_recipe(tmp_path / "r.yaml", Choices("sft", str(tiny_folder), str(data)))
    assert load_recipe(str(tmp_path / "r.yaml")).data.overlong == "drop"
    assert any("data.overlong=drop" in line for line in said)


@pytest.mark.parametrize(
    ("method", "row", "model", "told"),
    [
        ("sft", FORMATS["pairs"][1], "tiny", "these rows fit --method dpo or kto"),
        ("dpo", FORMATS["messages"][1], "not here", "these rows fit --method sft"),
        ("sft", FORMATS["own columns"][1], "tiny", "data.prompt_key"),
        ("grpo", {"prompt": "1+1?"}, "tiny", "--reward FILE.py:NAME"),
        ("grpo", {"prompt": "1+1?", "answer": "two"}, "tiny", "not all numbers"),
        ("prm", FORMATS["steps"][1], "tiny", "prm.placeholder"),
    ],
)
def test_rows_that_would_not_train_are_refused_and_leave_no_file(
    tmp_path: Path, tiny_folder: Path, method: str, row: dict[str, object], model: str, told: str
) -> None:
    data = rows_of(tmp_path, row)
    folder = str(tiny_folder) if model == "tiny" else model
    with pytest.raises(Refusal) as refused:
        write_recipe(tmp_path / "r.yaml", Choices(method, folder, str(data)))
    assert told in str(refused.value)
    assert not (tmp_path / "r.yaml").exists()


def test_without_the_model_the_columns_are_told(tmp_path: Path) -> None:
    data = rows_of(tmp_path, FORMATS["alpaca"][1])
    said = " ".join(" ".join(write_recipe(tmp_path / "r.yaml", Choices("sft", "later", str(data)))).split())
    assert "6 rows of instruction, input, output" in said
    assert load_recipe(str(tmp_path / "r.yaml")).batch.rows_per_update == 6


def test_commands_to_copy_are_quoted(tmp_path: Path) -> None:
    file = tmp_path / "my recipe.yaml"
    said = write_recipe(file, wishes("sft", more=False))
    assert f"  lockstep train '{file}'" in said
