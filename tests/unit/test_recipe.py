"""The recipe: what is read, what wins, and what is refused, all of it at once and before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hang import HANG
from lockstep.errors import Refusal
from lockstep.recipe import Recipe, load_recipe, recipe_text
from lockstep.recipe.loader import builtin_names, described_keys, dump_recipe
from lockstep.recipe.recipe_checks import DEFAULT_TOKENS
from lockstep.recipe.renamed_keys import OTHER_TRAINERS
from recipe_files import BASE, keys, refused, write


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path)


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optim.lr=1e-5", "optim.lr", 1e-5),
        ("optim.lr=3E-4", "optim.lr", 3e-4),
        ("optim.lr=.5e-3", "optim.lr", 5e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim.betas=[0.8, 0.99]", "optim.betas", [0.8, 0.99]),
        ("optim.clip=null", "optim.clip", None),
        ("optim.clip=", "optim.clip", None),
        ("run.deterministic=true", "run.deterministic", True),
        ("run.name='7'", "run.name", "7"),
        ("data.system='a = b: c'", "data.system", "a = b: c"),
        ("model.lora.rank=8", "model.lora.rank", 8),
        ("model.lora={rank: 4, targets: [q_proj, v_proj]}", "model.lora.targets", ["q_proj", "v_proj"]),
        ("log.track=[tensorboard, wandb]", "log.track", ["tensorboard", "wandb"]),
        ("val={every: 3, questions: q.jsonl}", "val.every", 3),
    ],
)
def test_override_values_are_yaml(base: str, word: str, key: str, value: object) -> None:
    found: Any = load_recipe(base, [word])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_file_over_default_and_override_over_file(tmp_path: Path) -> None:
    recipe = write(tmp_path, {**BASE, "optim": {"lr": 0.1, "eps": 0.2}, "model": {"path": "m", "lora": None}})
    read = load_recipe(recipe, ["optim.lr=0.3", "model.lora.rank=2", "optim.lr=0.4"])
    assert (read.optim.lr, read.optim.eps, read.optim.weight_decay) == (0.4, 0.2, 0.01)
    assert read.model.lora is not None
    assert (read.model.lora.rank, read.model.lora.alpha) == (2, 4.0)


def test_overrides_reach_into_listed_sources(tmp_path: Path) -> None:
    sources = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
    recipe = write(tmp_path, {**BASE, "data": {"train": sources}})
    assert [s.weight for s in load_recipe(recipe, ["data.train.1.weight=3"]).data.train] == [1.0, 3.0]
    assert "list with 2 entries" in refused(recipe, "data.train.2.weight=3")[0].why
    assert "list with 2 entries" in refused(recipe, "data.train.x.weight=3")[0].why


@pytest.mark.parametrize("given", ["a.jsonl", ["a.jsonl"], [{"path": "a.jsonl"}], {"path": "a.jsonl"}])
def test_short_forms_of_a_source(tmp_path: Path, given: object) -> None:
    assert [s.path for s in load_recipe(write(tmp_path, {**BASE, "data": {"train": given}})).data.train] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("word", "where", "why"),
    [
        ("novalue", "novalue", "key=value"),
        ("=3", "=3", "key=value"),
        ("optim.lr=[1", "optim.lr", "not valid YAML"),
        ("optim={lr: 1, lr: 2}", "optim", "'lr' is given twice"),
        ("model.path.x=1", "model.path.x", "path is a value"),
        ("optim.lr.x=1", "optim.lr", "a number"),
    ],
)
def test_malformed_overrides(base: str, word: str, where: str, why: str) -> None:
    (problem,) = refused(base, word)
    assert problem.where == where
    assert why in problem.why


# -- defaults that depend on other keys --------------------------------------------------------------------------------


def test_derived_defaults(base: str) -> None:
    read = load_recipe(base)
    assert (read.run.epochs, read.run.steps) == (1, None)
    assert (read.batch.tokens, read.batch.micro_batch_size) == (DEFAULT_TOKENS, None)
    assert read.model.master_weights is False
    assert load_recipe(base, ["model.dtype=bf16"]).model.master_weights is True
    assert load_recipe(base, ["model.dtype=bf16", "model.master_weights=false"]).model.master_weights is False
    assert load_recipe(base, ["run.steps=5"]).run.epochs is None
    assert load_recipe(base, ["batch.micro_batch_size=5"]).batch.tokens is None
    assert load_recipe(base, ["data.max_tokens=9000"]).batch.tokens == 9000


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("modle.path=x", "model"),
        ("batch.token=5", "batch.tokens"),
        ("lr=1", "optim.lr"),
        ("run.lr=1", "optim.lr"),
        ("data.max_token=5", "data.max_tokens"),
        ("model.lora={rank: 1, aplha: 2}", "model.lora.alpha"),
    ],
)
def test_unknown_key_names_the_nearest(base: str, word: str, nearest: str) -> None:
    (problem,) = refused(base, word)
    assert (problem.why, problem.remedy) == ("no such key", f"did you mean {nearest}?")


def test_unknown_key_like_nothing_lists_the_keys(base: str) -> None:
    (problem,) = refused(base, "zzz=1")
    assert all(name in problem.remedy for name in Recipe.model_fields)


@pytest.mark.parametrize(
    "word",
    [
        "optim.lr='1e-5'",
        "optim.lr=true",
        "optim.lr=fast",
        "run.seed=1.0",
        "run.seed='1'",
        "run.name=3",
        "run.deterministic=1",
        "optim.betas=0.9",
        "log.track=tensorboard",
        "optim=3",
        "model.lora=8",
        "data.train=3",
        "data.train.path=x",
        "data.system=a: b",
    ],
)
def test_wrong_types_are_never_converted(base: str, word: str) -> None:
    (problem,) = refused(base, word)
    assert problem.where.startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    "word",
    [
        "optim.lr=0",
        "optim.lr=-1",
        "optim.lr=.inf",
        "optim.lr=.nan",
        "optim.betas=[0.9]",
        "optim.betas=[0.9, 1.0]",
        "optim.min_lr_ratio=1.1",
        "optim.decay=0",
        "optim.warmup=-1",
        "optim.warmup=1.5",
        "optim.clip=0",
        "run.steps=0",
        "run.seed=-1",
        f"run.seed={2**63}",
        "run.name=../other",
        "run.name=.hidden",
        "batch.rows_per_update=0",
        "batch.tokens=0",
        "data.max_tokens=1",
        "data.train=[]",
        "data.train=[{path: a, weight: 0}]",
        "checkpoint.keep_last=0",
        "model.lora={rank: 0}",
        "model.lora={rank: 1, dropout: 1}",
        "log.every=0",
    ],
)
def test_out_of_range(base: str, word: str) -> None:
    (problem,) = refused(base, word)
    assert problem.where.startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["run.epochs=1", "run.steps=1"], "run.steps"),
        (["batch.tokens=9", "batch.micro_batch_size=1"], "batch.micro_batch_size"),
        (["batch.tokens=9", "data.max_tokens=10"], "data.max_tokens"),
        (["data.train=[{path: a, weight: 1}, {path: b}]"], "data.train"),
        (["data.val=[{path: a, weight: 1}, b]"], "data.val"),
        (["run.steps=5", "optim.warmup=5"], "optim.warmup"),
        (["checkpoint.keep_best=1"], "checkpoint.keep_best"),
        (["val.every=2"], "val.every"),
        (["model.lora={rank: 1, targets: []}"], "model.lora.targets"),
    ],
)
def test_impossible_combinations(base: str, words: list[str], key: str) -> None:
    (problem,) = refused(base, *words)
    assert problem.where == key
    assert problem.remedy or problem.why


def test_a_wrong_choice_lists_the_choices_and_the_nearest(base: str) -> None:
    (problem,) = refused(base, "optim.schedule=cosin")
    assert "'linear'" in problem.why
    assert problem.remedy == "did you mean cosine?"


@pytest.mark.parametrize(
    ("word", "where", "remedy"),
    [
        ("environment=games.py", "rollout.environment", "write games.py:NAME, with the name of a class or function"),
        ("tools=[calculater]", "rollout.tools.0", "did you mean calculator?"),
    ],
)
def test_an_invalid_environment_is_not_also_reported_as_missing(base: str, word: str, where: str, remedy: str) -> None:
    words = ["method=grpo", "model.path=m", "data.train=d", "rollout.max_turns=3", f"rollout.{word}"]
    with pytest.raises(Refusal) as refused:
        load_recipe(base, words)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.remedy.startswith(remedy)


def test_all_problems_in_one_refusal(base: str) -> None:
    problems = refused(
        base,
        "novalue",  # not an override
        "optim.lr=oops",  # type
        "run.steps=5",  # with run.epochs: combination
        "run.epochs=1",
        "batch.micro_batch_size=1",  # with batch.tokens: combination
        "batch.tokens=4",
        "optim.decay=2",  # range
        "nokey.x=1",  # unknown
        "val.every=3",  # nothing to validate on: combination
        "optim.schedule=step",  # choice
    )
    assert keys(problems) == {
        *(
            "novalue",
            "optim.lr",
            "run.steps",
            "batch.micro_batch_size",
            "optim.decay",
            "nokey",
            "val.every",
            "optim.schedule",
        )
    }
    assert len(problems) == 8


@pytest.mark.parametrize("missing", ["model", "data", "model.path", "data.train"])
def test_what_must_be_set(tmp_path: Path, missing: str) -> None:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "x"}}
    section, _, leaf = missing.partition(".")
    if leaf:
        del values[section][leaf]
    else:
        del values[section]
    (problem,) = refused(write(tmp_path, values))
    assert (problem.where, problem.why) == (missing, "must be set")


def test_a_missing_key_does_not_hide_the_rest(tmp_path: Path) -> None:
    problems = refused(write(tmp_path, {"data": {"train": "x"}, "run": {"epochs": 1, "steps": 1}}))
    assert keys(problems) == {"model", "run.steps"}


# -- the YAML itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("model: {path: m}\nmodel: {path: n}\n", "line 2, column 1: key 'model' is given twice", "into one group"),
        ("model: {path: m, path: n}\n", "line 1, column 18: key 'path' is given twice", "remove one"),
        ("model: [1\n", "not valid YAML: line 2, column 1: ", "brackets"),
        ("model:\n\tpath: m\n", "not valid YAML: line 2, column 1: ", "indent with spaces"),
        ("model: path: m\n", "not valid YAML: line 1, column 12: ", "quote a text that contains a colon"),
        ("model: !!python/object/apply:os.getcwd []\n", "not valid YAML: line 1, column 8: ", ""),
        ("- a\n- b\n", "a mapping of keys, not list", ""),
        ("", "a mapping of keys, not", ""),
        ("just words\n", "a mapping of keys, not str", ""),
    ],
)
def test_broken_files(tmp_path: Path, text: str, said: str, remedy: str) -> None:
    path = write(tmp_path, text)
    (problem,) = refused(path)
    assert problem.where == path
    assert said in problem.why
    assert "\n" not in problem.why
    assert remedy in problem.remedy


def test_a_wrong_value_shows_an_example(base: str) -> None:
    (problem,) = refused(base, "optim.lr=1e-4x")
    assert (problem.where, problem.remedy) == ("optim.lr", "for example optim.lr=1.0e-05")
    load_recipe(base, [problem.remedy.removeprefix("for example ")])


@pytest.mark.parametrize(
    ("words", "where", "remedy"),
    [
        (["run.steps=-3"], "run.steps", "set run.steps to 1 or more"),
        (
            ["run.steps=5", "optim.warmup=5"],
            "optim.warmup",
            "set optim.warmup to fewer steps or to a fraction such as 0.1, or raise run.steps",
        ),
    ],
)
def test_a_number_out_of_bounds_has_a_remedy(words: list[str], where: str, remedy: str) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe("sft-arithmetic", words)
    assert [(problem.where, problem.remedy) for problem in caught.value.problems] == [(where, remedy)]


def test_names_of_other_trainers_lead_to_keys_that_exist(tmp_path: Path) -> None:
    known = described_keys()
    assert [name for name in OTHER_TRAINERS.values() if re.split(r"[ ,]", name)[0] not in known] == []
    problems = refused(write(tmp_path, {"model_name_or_path": "m", "train_file": "x.jsonl"}))
    remedies = {problem.where: problem.remedy for problem in problems}
    assert remedies["model_name_or_path"] == "did you mean model.path?"
    assert remedies["train_file"] == "did you mean data.train?"
    assert remedies["model"].startswith("set model.path: ")
    assert remedies["data"].startswith("set data.train: ")


def test_a_key_that_is_a_list(tmp_path: Path) -> None:
    refused(write(tmp_path, "? [1]\n: 2\n"))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00m")
    assert "UTF-8" in refused(str(tmp_path / "recipe.yaml"))[0].why


# -- built-in recipes and the way back ---------------------------------------------------------------------------------


def test_builtin_recipes_are_listed_and_valid() -> None:
    names = builtin_names()
    assert "sft-arithmetic" in names
    for name in names:
        assert recipe_text(name).startswith("# "), f"{name}: the first line is what `lockstep recipes` shows"
        assert load_recipe(name).run.name == name


def test_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    (problem,) = refused("sft-arithmetics")
    assert "did you mean sft-arithmetic?" in problem.remedy
    (problem,) = refused(str(tmp_path / "none.yaml"))
    assert all(name in problem.remedy for name in builtin_names())


def test_a_builtin_recipe_comes_back_from_its_resolved_text(tmp_path: Path) -> None:
    for name in builtin_names():
        frozen = ["model.vision=freeze"] if load_recipe(name, []).model.vision else []  # an adapter needs it
        resolved = load_recipe(name, ["model.lora.rank=3", *frozen])
        assert load_recipe(write(tmp_path, dump_recipe(resolved))) == resolved


finite = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)
some_text = st.text(min_size=1, max_size=20)
recipes = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"path": some_text},
            optional={
                "dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
                "lora": st.none() | st.fixed_dictionaries({"rank": st.integers(1, 64)}, optional={"alpha": finite}),
            },
        ),
        "data": st.fixed_dictionaries(
            {"train": some_text | st.lists(some_text, min_size=1, max_size=3)},
            optional={"system": st.none() | some_text, "shuffle": st.booleans(), "prompt_key": some_text},
        ),
    },
    optional={
        "run": st.fixed_dictionaries(
            {},
            optional={
                "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,10}\Z"),
                "seed": st.integers(0, 2**63 - 1),
                "steps": st.integers(1, 10**9),
            },
        ),
        "optim": st.fixed_dictionaries({}, optional={"lr": finite, "eps": finite, "clip": st.none() | finite}),
        "batch": st.just({}) | st.fixed_dictionaries({"micro_batch_size": st.integers(1, 99)}),
    },
)


@settings(derandomize=True)
@given(recipes)
def test_the_resolved_recipe_reads_back_as_itself(tmp_path_factory: pytest.TempPathFactory, values: dict) -> None:
    folder = tmp_path_factory.mktemp("recipe")
    resolved = load_recipe(write(folder, dump_recipe(Recipe.model_validate(values))))
    assert load_recipe(write(folder, dump_recipe(resolved))) == resolved


def test_text_that_looks_like_a_number_reads_back_as_text(base: str, tmp_path: Path) -> None:
    resolved = load_recipe(base, ["run.name='1e5'"])
    assert load_recipe(write(tmp_path, dump_recipe(resolved))) == resolved


@settings(derandomize=True)
@given(st.floats(min_value=1e-300, max_value=1e300), st.sampled_from(["{!r}", "{:e}", "{:.3g}"]))
def test_every_way_of_writing_a_float(tmp_path_factory: pytest.TempPathFactory, value: float, form: str) -> None:
    written = form.format(value)
    read = load_recipe(write(tmp_path_factory.mktemp("recipe")), [f"optim.lr={written}"])
    assert read.optim.lr == float(written)


# -- early -------------------------------------------------------------------------------------------------------------


def test_a_bad_recipe_is_refused_before_torch_is_imported(base: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lockstep", "train", base, "bad.key=1", "optim.lr=-1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
        env={**os.environ, "COLUMNS": "80"},
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert done.returncode == 2, said
    assert "pydantic" in imported
    assert not imported & {"torch", "transformers", "pyarrow", "numpy", "peft"}
    assert "2 problems:" in said
    assert "bad [unknown-key]\n" in said
    assert "optim.lr [invalid-value]\n" in said


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("tapes", "did you mean tape?"),
        ("run.step", "did you mean run.steps?"),
        ("model.load_in_4bit", "model.lora.rank=16"),
        ("load_in_4bit", "model.lora.rank=16"),
        ("stage", "parallel.offload"),
        ("cage", "keys of a recipe: method, device"),
        ("optim.zzz", "keys of optim: "),
    ],
)
def test_a_hint_names_what_was_meant_or_all_there_is(tmp_path: Path, key: str, remedy: str) -> None:
    with pytest.raises(Refusal) as found:
        load_recipe(str(write(tmp_path, BASE)), [f"{key}=1"])
    (problem,) = [one for one in found.value.problems if one.why == "no such key"]
    assert remedy in problem.remedy


@pytest.mark.slow
def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    deep = "[" * 3000 + "]" * 3000
    (tmp_path / "deep.yaml").write_text(f"method: sft\nmodel: {deep}\n", encoding="utf-8")
    with pytest.raises(Refusal, match="is nested too deeply"):
        load_recipe(str(tmp_path / "deep.yaml"))
    with pytest.raises(Refusal, match=r"optim.betas(?s:.*)is nested too deeply"):
        load_recipe(str(write(tmp_path, BASE)), [f"optim.betas={deep}"])
