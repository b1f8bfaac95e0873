"""`lockstep init`: every method's recipe passes the recipe check, also with all that is off put on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.commands.init import Wishes, needs_teacher, rewarded, write_recipe
from lockstep.errors import Refusal
from lockstep.recipe.load import load_recipe
from lockstep.recipe.methods import OFFLINE, ONLINE

OFF = re.compile(r"^( *)#(\w+:)", re.MULTILINE)


def wishes(method: str, *, more: bool) -> Wishes:
    return Wishes(
        method,
        "my-model",
        "rows: 1.jsonl",  # a name that YAML would read as something else
        "val.jsonl" if more else None,
        "reward.py:score" if more and rewarded(method) else None,
        "teacher" if needs_teacher(method) else None,
    )


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
    with pytest.raises(Refusal, match="exists, and is not overwritten"):
        write_recipe(file, wishes("sft", more=False))
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        (Wishes("stf", "m", "d"), "did you mean sft"),
        (Wishes("distill", "m", "d"), "needs a teacher"),
        (Wishes("sft", "m", "d", reward="r.py:f"), "reads no reward"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_file(tmp_path: Path, chosen: Wishes, where: str) -> None:
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
    assert "not there yet: data.train rows.jsonl" in said
    assert "not there yet: model.path" not in said
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
