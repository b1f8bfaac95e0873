"""Recipes of the offline methods: their defaults, and every refusal by its key and its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import write_jsonl
from lockstep.algorithms import preference as pair_losses
from lockstep.device.select import select
from lockstep.errors import Problem, Refusal
from lockstep.preflight.model_checks import refuse_other_tokenizer
from lockstep.preflight.run_checks import prepare_offline
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Source
from lockstep.recipe.keys_offline import Distill, Preference, ProcessReward, RewardModelSettings
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.loader import dump_recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import OFFLINE, PREFERENCE_READS, sections_read
from lockstep.run.console import Console
from lockstep.train.offline import train_offline
from preference_rows import judged_rows, write_recipe
from recipe_files import BASE, keys, refused, write

TEACHER = ["distill.teacher=t"]
# A value of each key that is not its default.
OTHERS: dict[str, Any] = {
    "preference.loss": "hinge",
    "preference.beta": 0.7,
    "preference.label_smoothing": 0.1,
    "preference.gamma": 0.5,
    "preference.discopop_tau": 0.2,
    "preference.divergence": "js",
    "preference.alpha": 0.3,
    "preference.ld_alpha": 0.5,
    "preference.average": "true",
    "preference.nll": 0.3,
    "preference.reference": "folder",
    "preference.precompute": "true",
    "preference.reference_free": "true",
    "preference.desirable": 1.2,
    "preference.undesirable": 1.2,
    "rm.loss": "logexp",
    "rm.ranking": "plackett_luce",
    "rm.center_rewards_coef": 0.1,
    "prm.placeholder": "<step>",
    "prm.tokens": "[good, bad]",
    "distill.teacher": "folder",
    "distill.divergence": "reverse",
    "distill.mix": 0.3,
    "distill.temperature": 2.0,
    "distill.coefficient": 0.9,
    "distill.top_k": 5,
    "rollout.n": 4,
    "reward.format": "x",
    "algorithm.gamma": 0.9,
    "critic.lr": 1e-4,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], str]:
    def make(method: str) -> str:
        return write(tmp_path, {**BASE, "method": method})

    return make


def only(problems: list[Problem]) -> Problem:
    (problem,) = problems
    return problem


def test_every_key_of_the_offline_sections_is_tried_here() -> None:
    sections = {"preference": Preference, "rm": RewardModelSettings, "prm": ProcessReward, "distill": Distill}
    known = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    assert known == {key for key in OTHERS if key.split(".")[0] in sections}
    assert "n" in RolloutSettings.model_fields


@pytest.mark.parametrize("method", OFFLINE)
def test_sections_of_other_methods_are_refused(recipe, method: str) -> None:
    unread = [key for key in OTHERS if key.split(".")[0] not in sections_read(method)]
    own = TEACHER if method == "distill" else []
    assert len(unread) > 8
    for key in unread:
        problem = only(refused(recipe(method), *own, f"{key}={OTHERS[key]}"))
        assert problem.where == key
        assert problem.why == f"method {method} does not read this key"
        assert problem.remedy == "remove it"


LOSSES = [*pair_losses.LOSSES, *pair_losses.RANKED]
# What a key asks for besides.
BESIDES = {"alpha": ["preference.divergence=alpha"]}


@pytest.mark.parametrize("loss", LOSSES)
def test_keys_that_a_loss_does_not_read_are_refused(recipe, loss: str) -> None:
    """Of the pair losses; those of KTO are all strange to them."""
    read = PREFERENCE_READS[loss]
    for key, value in OTHERS.items():
        section, _, name = key.partition(".")
        if section != "preference" or name == "loss":
            continue
        own = ["preference.label_smoothing=0.2"] if loss == "exo_pair" else []
        words = [f"preference.loss={loss}", *own, f"{key}={value}"]
        if name in read:
            words += BESIDES.get(name, [])
            assert load_recipe(recipe("dpo"), words).preference.loss == loss
        else:
            problem = only(refused(recipe("dpo"), *words))
            assert problem.where == key
            assert problem.why == f"loss {loss} does not read this key"


def test_what_the_new_pair_losses_cannot_do(recipe) -> None:
    problem = only(refused(recipe("dpo"), "preference.loss=exo_pair"))
    assert (problem.where, problem.remedy) == (
        "preference.label_smoothing",
        "set preference.label_smoothing, for example to 0.001",
    )
    problem = only(refused(recipe("dpo"), "preference.alpha=0.3"))
    assert (problem.where, problem.why) == ("preference.alpha", "divergence reverse_kl does not read preference.alpha")


def test_what_each_loss_reads_is_what_its_formula_has() -> None:
    free = {"simpo", "orpo", "cpo"}
    for loss in LOSSES:
        read = set(PREFERENCE_READS[loss])
        assert {"loss", "beta", "nll"} <= read
        assert ("reference" in read) == ("precompute" in read) == (loss not in free)
        assert ("label_smoothing" in read) == (loss in pair_losses.SMOOTHED)
        assert ("gamma" in read) == (loss == "simpo")
        assert ("discopop_tau" in read) == (loss == "discopop")
        # Those two are means by their definition, and the ranks are of sums.
        assert ("average" in read) == (loss not in {"simpo", "orpo", *pair_losses.RANKED})
        assert ("divergence" in read) == ("alpha" in read) == (loss in pair_losses.DIVERGENT)
        assert ("ld_alpha" in read) == (loss not in free)
        assert not read & {"desirable", "undesirable", "reference_free"}


def test_keys_that_kto_does_not_read_are_refused(recipe) -> None:
    for name in ("label_smoothing", "gamma", "average", "nll", "precompute", "loss", "divergence", "ld_alpha"):
        problem = only(refused(recipe("kto"), f"preference.{name}={OTHERS[f'preference.{name}']}"))
        assert (problem.where, problem.why) == (f"preference.{name}", "kto does not read this key")
    for name in ("beta", "reference", "reference_free", "desirable", "undesirable"):
        load_recipe(recipe("kto"), [f"preference.{name}={OTHERS[f'preference.{name}']}"])


@pytest.mark.parametrize("method", OFFLINE)
def test_a_stored_recipe_is_read_again(recipe, tmp_path: Path, method: str) -> None:
    """It spells out every default, also of keys that the method does not read."""
    found = load_recipe(recipe(method), TEACHER if method == "distill" else [])
    (tmp_path / "stored.yaml").write_text(dump_recipe(found))
    assert load_recipe(str(tmp_path / "stored.yaml")) == found


PAIR = {"prompt_key", "messages_key", "chosen_key", "rejected_key"}
COLUMNS = {
    "sft": {"prompt_key", "messages_key", "response_key", "text_key"},
    "distill": {"prompt_key", "messages_key", "response_key", "text_key"},
    "dpo": {*PAIR, "responses_key", "scores_key"},
    "orpo": {*PAIR, "responses_key", "scores_key"},
    "rm": {*PAIR, "margin_key", "responses_key", "scores_key"},
    "kto": {*PAIR, "response_key", "label_key"},
    "prm": {"prompt_key", "messages_key", "text_key", "steps_key", "label_key"},
}


@pytest.mark.parametrize("method", COLUMNS)
def test_columns_that_a_method_has_not_are_refused(tmp_path: Path, method: str) -> None:
    """For all rows and for the rows of one source."""
    every = {key for key in Source.model_fields if key.endswith("_key")}
    assert len(every) == 11
    own = TEACHER if method == "distill" else []
    for key in every:
        path = write(tmp_path, {**BASE, "method": method})
        source = {**BASE, "method": method, "data": {"train": [{"path": "rows.jsonl", key: "column"}]}}
        if key in COLUMNS[method]:
            load_recipe(path, [*own, f"data.{key}=column"])
            load_recipe(write(tmp_path, source), own)
        else:
            problem = only(refused(path, *own, f"data.{key}=column"))
            assert (problem.where, problem.code, problem.remedy) == (f"data.{key}", "unused-key", "remove it")
            assert keys(refused(write(tmp_path, source), *own)) == {f"data.train.0.{key}"}


def test_keys_without_effect_are_refused(recipe) -> None:
    problem = only(refused(recipe("rm"), "rm.loss=logexp", "rm.ranking=plackett_luce"))
    assert (problem.where, problem.remedy) == ("rm.loss", "remove rm.loss, or set rm.ranking=pairs")
    problem = only(refused(recipe("distill"), *TEACHER, "distill.mix=0.3"))
    assert (problem.where, problem.why) == ("distill.mix", "divergence forward does not read distill.mix")
    load_recipe(recipe("distill"), [*TEACHER, "distill.mix=0.3", "distill.divergence=jsd"])


def test_words_that_yaml_takes_for_something_else(recipe) -> None:
    first, second = refused(recipe("prm"), "prm.tokens=[yes, no]")
    assert (first.where, second.where) == ("prm.tokens.0", "prm.tokens.1")
    assert "quote the word" in first.remedy
    assert load_recipe(recipe("prm"), ["prm.tokens=['yes', 'no']"]).prm.tokens == ["yes", "no"]


def test_defaults_of_the_methods(recipe) -> None:
    wanted = {
        "dpo": ("sigmoid", 0.1, False, 0.0, 0.0),
        "ipo": ("ipo", 0.1, True, 0.0, 0.0),
        "simpo": ("simpo", 2.0, False, 0.0, 1.0),
        "orpo": ("orpo", 0.1, False, 1.0, 0.0),
        "cpo": ("cpo", 0.1, False, 1.0, 0.0),
    }
    for method, values in wanted.items():
        found = load_recipe(recipe(method))
        settings = found.preference
        assert (settings.loss, settings.beta, settings.average, settings.nll, settings.gamma) == values
        assert found.optim.lr == 1e-6
    assert load_recipe(recipe("kto")).optim.lr == 1e-6


def test_where_the_reference_comes_from(recipe) -> None:
    wanted = {
        ("dpo",): "model",
        ("dpo", "model.lora.rank=4"): "adapter",
        ("dpo", "model.lora.rank=4", "preference.reference=other"): "model",
        ("dpo", "preference.precompute=true"): "disk",
        ("dpo", "preference.precompute=true", "model.lora.rank=4"): "disk",
        ("dpo", "preference.loss=simpo"): "none",
        ("ipo",): "model",
        ("orpo",): "none",
        ("kto",): "model",
        ("kto", "model.lora.rank=4"): "adapter",
        ("kto", "preference.reference_free=true"): "none",
        ("rm",): "none",
        ("prm",): "none",
        ("sft",): "none",
    }
    for (method, *words), kind in wanted.items():
        assert reference_kind(load_recipe(recipe(method), words)) == kind, (method, words)
    assert reference_folder(load_recipe(recipe("dpo"))) == "m"
    assert reference_folder(load_recipe(recipe("dpo"), ["preference.reference=other"])) == "other"


def test_what_cannot_be_is_refused_with_a_remedy(recipe) -> None:
    cases = {
        ("kto", "batch.rows_per_update=1"): ("batch.rows_per_update", "mismatched pairs", "2 or more"),
        ("kto", "preference.reference_free=true", "preference.reference=x"): (
            "preference.reference",
            "preference.reference_free",
            "remove one",
        ),
        ("distill",): ("distill.teacher", "must be set", "folder of the teacher"),
        ("prm", "prm.tokens=[+, +]"): ("prm.tokens", "twice", "different word for each label"),
        ("rm", "val.questions=q.jsonl"): ("val.questions", "does not generate", "data.val"),
        ("prm", "val.questions=q.jsonl"): ("val.questions", "does not generate", "data.val"),
        ("on_policy_distill",): ("algorithm.kl.reference", "as the teacher", "the teacher's folder"),
        ("dpo", "batch.prompts=4"): ("batch.prompts", "trains rows", "batch.rows_per_update"),
        ("rm", "checkpoint.keep_best=1"): ("checkpoint.keep_best", "val/loss needs data.val", "set data.val"),
        ("dpo", "data.max_prompt_tokens=9"): ("data.max_prompt_tokens", "trains rows", "data.max_tokens"),
    }
    for (method, *words), (key, why, remedy) in cases.items():
        problem = only(refused(recipe(method), *words))
        assert problem.where == key
        assert why in problem.why, problem
        assert remedy in problem.remedy, problem


@pytest.mark.parametrize("word", ["preference.beta=0", "preference.label_smoothing=0.5", "distill.coefficient=1.1"])
def test_values_out_of_range_are_refused(recipe, word: str) -> None:
    method = "distill" if word.startswith("distill") else "dpo"
    assert keys(refused(recipe(method), *(TEACHER if method == "distill" else []), word)) == {word.split("=")[0]}


def test_one_judging_word_is_too_few(recipe) -> None:
    assert keys(refused(recipe("prm"), "prm.tokens=[+]")) == {"prm.tokens"}


def test_a_micro_batch_has_room_for_a_pair_by_default(recipe) -> None:
    assert load_recipe(recipe("dpo"), ["data.max_tokens=3000"]).batch.tokens == 6000
    assert load_recipe(recipe("rm"), ["data.max_tokens=3000"]).batch.tokens == 6000
    assert load_recipe(recipe("kto"), ["data.max_tokens=3000"]).batch.tokens == 4096


# -- with rows ---------------------------------------------------------------------------------------------------------


def prepared(path: Path, *words: str) -> Any:
    return prepare_offline(load_recipe(str(path), list(words)), select("cpu"), 1, Console.silent())


def problems_of(path: Path, *words: str) -> list[Problem]:
    with pytest.raises(Refusal) as caught:
        prepared(path, *words)
    return caught.value.problems


def test_a_pair_over_the_budget_is_refused_with_its_row(tiny_folder: Path, tmp_path: Path) -> None:
    """31 tokens of the prompt in its template are shared; each response has 30 and two that end its turn."""
    rows: list[dict[str, object]] = [{"prompt": "x", "chosen": "a", "rejected": "b"} for _ in range(4)]
    rows[2] = {"prompt": "x" * 12, "chosen": "a" * 30, "rejected": "b" * 30}
    path = write_recipe(tmp_path, tiny_folder, "dpo", rows)
    assert prepared(path, "batch.tokens=95").batches.steps == 4
    problem = only(problems_of(path, "batch.tokens=94", "data.val=[]"))
    assert problem.where == f"{tmp_path / 'train.jsonl'} line 3"
    assert problem.why == "its 2 sequences have 95 tokens together, more than batch.tokens=94"
    assert "raise batch.tokens" in problem.remedy
    assert "data.overlong" in problem.remedy
    # Validation rows are run in the same micro-batches.
    assert len(problems_of(path, "batch.tokens=94")) == 2
    # Padded rows have no budget.
    assert prepared(path, "batch.tokens=null", "batch.micro_batch_size=1").batches.steps == 4


def test_kto_wants_rows_of_both_kinds(tiny_folder: Path, tmp_path: Path) -> None:
    good = [row for row in judged_rows(9) if row["label"]]
    path = write_recipe(tmp_path, tiny_folder, "kto", good)
    problem = only(problems_of(path))
    assert (problem.where, problem.remedy) == ("data.train", "add rows with the other label")
    assert "every row is desirable" in problem.why
    path = write_recipe(tmp_path, tiny_folder, "kto", [{**row, "label": 0} for row in good])
    assert "every row is undesirable" in only(problems_of(path)).why
    # Validation rows of one kind only measure.
    path = write_recipe(tmp_path, tiny_folder, "kto", judged_rows(9))
    write_jsonl(tmp_path / "val.jsonl", good)
    prepared(path)
    write_jsonl(tmp_path / "val.jsonl", good[:1])
    problem = only(problems_of(path))
    assert problem.where == "data.val"
    assert "has one row" in problem.why


def test_kto_wants_no_last_update_of_one_row(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, tiny_folder, "kto", judged_rows(13))
    words = ["run.steps=null", "run.epochs=1"]
    problem = only(problems_of(path, *words))
    assert (problem.where, problem.code) == ("batch.rows_per_update", "too-few-rows")
    assert "one row" in problem.why
    assert "run.steps" in problem.remedy
    # Two epochs are 26 rows: the last update has two. A number of steps has only whole updates.
    assert prepared(path, "run.steps=null", "run.epochs=2").batches.steps == 5
    prepared(path, "run.steps=3")
    prepared(path, *words, "batch.rows_per_update=7")


def test_kto_remarks_on_unbalanced_rows(tiny_folder: Path, tmp_path: Path) -> None:
    """24 rows of which every third is undesirable: 16 to 8, so the bad ones should weigh 1.5 to 2."""
    path = write_recipe(tmp_path, tiny_folder, "kto")
    (remark,) = prepared(path).remarks
    assert "16 desirable and 8 undesirable rows weigh 2 to 1" in remark
    assert "preference.undesirable between 1.5 and 2" in remark
    assert prepared(path, "preference.undesirable=1.8").remarks == []


def test_a_teacher_of_other_words_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Of the same size, but two words have changed places."""
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_folder, teacher)
    file = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (teacher / "tokenizer.json").write_text(json.dumps(file))
    path = write_recipe(tmp_path, tiny_folder, "distill")
    with pytest.raises(Refusal) as caught:
        train_offline(load_recipe(str(path), [f"distill.teacher={teacher}"]), Console.silent())
    problem = only(caught.value.problems)
    assert problem.where == f"distill.teacher {teacher}"
    assert "4 tokens differ, the first is 'A'" in problem.why
    assert "same family" in problem.remedy
    refuse_other_tokenizer(
        load_recipe(str(path), [f"distill.teacher={tiny_folder}"]), "distill.teacher", str(tiny_folder)
    )


def test_a_placeholder_of_several_tokens_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, tiny_folder, "prm")
    assert any("prm.placeholder" in problem.where for problem in problems_of(path, "prm.placeholder=ки"))
    assert any("prm.tokens" in problem.where for problem in problems_of(path, "prm.tokens=[good, bad]"))
