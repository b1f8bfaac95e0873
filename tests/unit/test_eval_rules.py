"""Answers judged by a rule or a function that is named: `lockstep eval`, and the validation of an offline run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import uncached_config, write_model

from conftest import write_jsonl
from eval_by_hand import evaluated
from lockstep.commands.generate import Conversation
from lockstep.commands.without_recipe import NamedColumns
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.metrics import read_metrics
from lockstep.train.start import run_recipe
from speaker import write_speaker

WORDS = ["2+3?", "Who?", "9-1?", "Where?"]


@pytest.fixture(scope="module")
def speaker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("speaker") / "model", tiny_folder)


@pytest.fixture(scope="module")
def questions(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four questions, the model's own answer is the truth of three."""
    said = Conversation(str(speaker), "cpu", max_new_tokens=8, temperature=0.0, seed=0, system=None)
    truths = [said.answer(words).strip() for words in WORDS[:3]] + ["something else"]
    rows = [
        {
            "data_source": "mine/a" if number < 2 else "mine/b",
            "prompt": [{"role": "user", "content": words}],
            "reward_model": {"ground_truth": truth},
        }
        for number, (words, truth) in enumerate(zip(WORDS, truths, strict=True))
    ]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "questions.jsonl", rows)


def test_a_rule_that_is_named(speaker: Path, questions: Path, tmp_path: Path) -> None:
    metrics, lines = evaluated(speaker, questions, tmp_path / "out.jsonl", max_new_tokens=8, rules=["exact"])
    assert metrics["val/accuracy"] == 0.75
    assert [line["score"] for line in lines] == [1, 1, 1, 0]
    both = ["mine/a=exact", "mine/b=gsm8k_flexible"]
    with pytest.raises(Refusal, match="is not a number"):
        evaluated(speaker, questions, None, max_new_tokens=8, rules=both)
    for rules, told in (
        (["exat"], r"--rule exat \[unknown-name\]: .*'exat'"),
        (["other=exact"], r"--rule other=exact \[unknown-source\]: .*'other'"),
        (["mine/a=exact"], r"data_source 'mine/b' \[no-rule\](.|\n)*--rule mine/b=RULE"),
        (["exact", "gsm8k"], r"--rule gsm8k \[conflicting-keys\]: exact .* all sources"),
        (["mine/a=exact", "mine/a=gsm8k"], r"--rule mine/a=gsm8k \[conflicting-keys\]: exact .*'mine/a'"),
        ([], r"data_source 'mine/a' \[no-rule\](.|\n)*--rule mine/a=RULE"),
    ):
        with pytest.raises(Refusal, match=told):
            evaluated(speaker, questions, None, max_new_tokens=8, rules=rules)


def test_a_function_that_is_named(speaker: Path, questions: Path, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "def longer(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 8\n"
    )
    metrics, lines = evaluated(
        speaker, questions, tmp_path / "out.jsonl", max_new_tokens=8, reward=f"{file}:longer", rows=2
    )
    assert [line["score"] for line in lines] == [len(line["response"]) / 8 for line in lines]
    assert metrics["val/reward"] == sum(line["score"] for line in lines) / 2
    with pytest.raises(Refusal, match=r"--reward .*judge\.py"):
        evaluated(speaker, questions, None, reward=f"{file}:missing")


def test_columns_are_named_by_options(speaker: Path, questions: Path, tmp_path: Path) -> None:
    """What is advised can be given: a command has no data.label_key."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    other = [{"ask": row["prompt"], "so": row["reward_model"]["ground_truth"]} for row in rows]
    file = write_jsonl(tmp_path / "other.jsonl", other)
    out = tmp_path / "out.jsonl"
    with pytest.raises(Refusal, match=r"(?s)\[unclear-columns\].*prompts.*set --prompt-key, and --label-key"):
        evaluated(speaker, file, out, rules=["exact"])
    with pytest.raises(Refusal, match=r"\[unclear-columns\].*prompts(.|\n)*rename the prompt column"):
        trained(speaker, file, tmp_path)
    columns = NamedColumns("ask", "so")
    assert evaluated(speaker, file, out, rules=["exact"], columns=columns)[0]["val/accuracy"] == 0.75
    # A function that reads no ground truth needs none, and may look for what no answer tried before has.
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def thinks(data_source, solution_str, ground_truth, extra_info):\n    return '<t>' in solution_str\n"
    )
    for given, named in ((questions, NamedColumns()), (file, NamedColumns("ask"))):
        metrics, _ = evaluated(speaker, given, out, reward=f"{judge}:thinks", columns=named, rows=2)
        assert metrics["val/reward"] == 0


def test_answers_over_the_context_are_refused_before_the_model_is_loaded(speaker: Path, questions: Path) -> None:
    with pytest.raises(Refusal, match=r"line 1 \[over-context\]: 23 tokens .* 2040 .* 2048"):
        evaluated(speaker, questions, None, max_new_tokens=2040, rules=["exact"])


@pytest.mark.slow
def test_a_model_that_the_built_in_engine_cannot_run_is_answered_by_transformers(
    tiny_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe would be advised to set rollout.engine=hf; a command has no recipe."""
    folder = write_model(tmp_path / "model", uncached_config(), tiny_folder)
    _, lines = evaluated(folder, questions, tmp_path / "out.jsonl", max_new_tokens=8, rules=["exact"], rows=2)
    said = Conversation(str(folder), "cpu", max_new_tokens=8, temperature=0.0, seed=0, system=None)
    assert [line["response"] for line in lines] == [said.answer(words) for words in WORDS[:2]]
    told = capsys.readouterr()
    assert "generate of transformers instead" in " ".join((told.out + told.err).split())


def trained(speaker: Path, questions: Path, folder: Path, *words: str) -> None:
    rows = write_jsonl(
        folder / "rows.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4,
    )
    given = [f"model.path={speaker}", f"data.train={rows}", f"run.folder={folder}", "run.name=r", "run.steps=1"]
    given += [
        f"val.questions={questions}",
        "val.at_start=true",
        "val.max_new_tokens=8",
        "device=cpu",
        "batch.micro_batch_size=4",
    ]
    given += ["run.export=false", "optim.lr=1e-9"]
    (folder / "recipe.yaml").write_text("method: sft\n")
    run_recipe(load_recipe(str(folder / "recipe.yaml"), [*given, *words]))


def test_an_offline_run_validates_by_a_rule_of_its_own(speaker: Path, questions: Path, tmp_path: Path) -> None:
    trained(speaker, questions, tmp_path, "val.rules={mine/a: exact, mine/b: exact}")
    found = dict(read_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert found[0]["val/accuracy"] == 0.75
    assert found[0]["val/accuracy/mine/b"] == 0.5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], r"data_source 'mine/a' \[no-rule\](.|\n)*val\.rules: \{mine/a: RULE\}"),
        (
            ["val.rules={mine/a: exact, mine/b: exact}", "val.max_new_tokens=2040"],
            r"val\.max_new_tokens \[over-context\]: 2040 .* 25 tokens .* line 4\) .* 2048",
        ),
        (
            ["val.rules={mine/a: exact, min/b: exact}"],
            r"val\.rules\.min/b \[unknown-source\](.|\n)*mine/b",
        ),
        (["val.rules={mine/a: exact, mine/b: exat}"], r"val\.rules\.mine/b \[unknown-name\]: .*'exat'"),
        (["val.rules={mine/a: exact}", "val.questions=null"], r"val\.rules \[needs-key\]: val\.questions"),
    ],
)
def test_what_is_advised_is_taken(speaker: Path, questions: Path, tmp_path: Path, words: list[str], told: str) -> None:
    with pytest.raises(Refusal, match=told):
        trained(speaker, questions, tmp_path, *(words or ["val.at_start=true"]))
