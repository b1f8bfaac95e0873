"""Set-up differences between two runs, and their weights."""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from lockstep.parity.compare.comparison import Difference
from lockstep.parity.compare.logs.log_curves import Evidence, Log
from lockstep.parity.compare.run_setup import differences, leaves
from lockstep.recipe.loader import resolved
from lockstep.recipe.measure import facts_of
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Named

ENV: dict[str, Any] = {
    "lockstep": "0.1.0",
    "git_commit": "abc",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    "platform": "Linux",
    "machine": "x86_64",
    "cpu_count": 2,
    "command": ["lockstep", "train"],
    "device": {"name": "cpu", "chip": "Xeon", "memory": {"free": 1}, "torch": "2.13.0"},
    "world_size": 1,
    "determinism": {"torch.use_deterministic_algorithms": "False"},
    "data": {"train": [{"fingerprint": "f" * 64}], "val": [], "kept": {"rows": 10, "tokens": 100}},
    "model": {"weights": "w" * 64, "tokenizer": "t" * 64, "template": None},
}


def recipe(method: str = "sft", **changes: Any) -> dict[str, Any]:
    """A resolved recipe, as a run folder has it. `optim__lr=1` changes `optim.lr`."""
    values: dict[str, Any] = {"method": method, "model": {"path": "m"}, "data": {"train": "rows.jsonl"}}
    for name, value in changes.items():
        *groups, key = name.split("__")
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[key] = value
    return resolved(Recipe(**with_method_defaults(values)))


def log(recipe: dict[str, Any], env: dict[str, Any] | None = None) -> Log:
    return Log("runs/x", "lockstep run", {}, {}, Evidence(recipe, ENV if env is None else env))


def env(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(ENV)
    for name, value in changes.items():
        *groups, key = name.split("__")
        place = changed
        for group in groups:
            place = place[group]
        place[key] = value
    return changed


def found(a: Log, b: Log) -> dict[str, str]:
    return {difference.key: difference.weight for difference in differences(a, b)[0]}


def by_recipe(method: str, **changes: Any) -> dict[str, str]:
    return found(log(recipe(method)), log(recipe(method, **changes)))


def by_env(**changes: Any) -> list[Difference]:
    return differences(log(recipe()), log(recipe(), env(**changes)))[0]


def test_a_run_does_not_differ_from_itself() -> None:
    for method in ("sft", "dpo", "grpo", "ppo", "distill"):
        assert differences(log(recipe(method)), log(recipe(method))) == ([], [])


@pytest.mark.parametrize(
    ("method", "changes", "weights"),
    [
        ("sft", {"optim__lr": 1.0}, {"optim.lr": "blocks"}),
        ("sft", {"optim__betas": [0.9, 0.99]}, {"optim.betas": "blocks"}),
        ("sft", {"batch__rows_per_update": 7}, {"batch.rows_per_update": "blocks"}),
        ("sft", {"batch__tokens": 77, "batch__micro_batch_size": None}, {"batch.tokens": "harmless"}),
        ("sft", {"run__seed": 1, "run__name": "y"}, {"run.seed": "matters", "run.name": "harmless"}),
        ("sft", {"model__dtype": "bf16"}, {"model.dtype": "matters"}),
        ("sft", {"model__attention": "sdpa"}, {"model.attention": "matters"}),
        ("sft", {"data__system": "hi"}, {"data.system": "blocks"}),
        ("sft", {"data__shuffle": False}, {"data.shuffle": "matters"}),
        ("sft", {"device": "other"}, {"device": "harmless"}),
        ("sft", {"checkpoint__every": 3, "val__every": 2}, {"checkpoint.every": "harmless", "val.every": "harmless"}),
        ("dpo", {"preference__beta": 0.5}, {"preference.beta": "blocks"}),
        ("dpo", {"preference__precompute": True}, {"preference.precompute": "harmless"}),
        ("grpo", {"rollout__temperature": 0.5}, {"rollout.temperature": "blocks"}),
        ("grpo", {"rollout__n": 4}, {"rollout.n": "blocks"}),
        ("grpo", {"rollout__engine": "hf"}, {"rollout.engine": "matters"}),
        ("grpo", {"rollout__block_tokens": 32}, {"rollout.block_tokens": "harmless"}),
        ("grpo", {"algorithm__clip_high": 0.3}, {"algorithm.clip_high": "blocks"}),
        ("grpo", {"algorithm__kl__coefficient": 0.5}, {"algorithm.kl.coefficient": "blocks"}),
        ("grpo", {"reward__workers": 5}, {"reward.workers": "harmless"}),
        ("grpo", {"reward__function": "f.py:g"}, {"reward.function": "blocks"}),
        ("ppo", {"critic__lr": 1.0}, {"critic.lr": "blocks"}),
        ("ppo", {"critic__path": "c"}, {"critic.path": "matters"}),
    ],
)
def test_weights_of_single_keys(method: str, changes: dict[str, Any], weights: dict[str, str]) -> None:
    assert by_recipe(method, **changes) == weights


def test_a_key_that_neither_side_reads_is_harmless() -> None:
    assert by_recipe("grpo", algorithm__cov_ratio=0.5) == {"algorithm.cov_ratio": "harmless"}
    assert by_recipe("grpo", algorithm__cov_ratio=0.5, algorithm__loss="kl_cov")["algorithm.cov_ratio"] == "blocks"
    assert by_recipe("dapo", algorithm__kl__coefficient=0.5) == {"algorithm.kl.coefficient": "harmless"}
    assert by_recipe("sft", optim__decay=0.5) == {"optim.decay": "harmless"}


def test_the_same_function_elsewhere_is_a_name_and_another_file_is_another_function() -> None:
    """Files are compared by the checksums of the runs; a missing checksum is reported."""

    def side(path: str, sha256: str | None) -> Log:
        code = {} if sha256 is None else {"own_code": {"reward.function": {"name": path, "sha256": sha256}}}
        return log(recipe("grpo", reward__function=path), {**ENV, **code})

    assert found(side("a/f.py:g", "1"), side("a/f.py:g", "1")) == {}
    (moved,) = differences(side("a/f.py:g", "1"), side("b/f.py:g", "1"))[0]
    assert (moved.weight, "checksum" in moved.effect) == ("harmless", True)
    assert found(side("a/f.py:g", "1"), side("a/f.py:h", "1")) == {"reward.function": "matters"}
    ((changed,), silent) = differences(side("a/f.py:g", "1"), side("a/f.py:g", "2"))
    assert (changed.part, changed.key, changed.a, changed.b) == ("own code", "reward.function", "1", "2")
    assert (changed.weight, silent) == ("matters", [])
    listed, (unknown,) = differences(side("a/f.py:g", "1"), side("a/f.py:g", None))
    assert listed == []
    assert re.search(r"functions \(checksum\): unknown .*side b", unknown)


def test_an_adapter_is_one_difference() -> None:
    (one,) = differences(log(recipe()), log(recipe(model__lora={"rank": 4})))[0]
    assert (one.key, one.a, one.weight) == ("model.lora", None, "blocks")
    assert one.b["rank"] == 4
    a, b = (log(recipe(model__lora={"rank": rank})) for rank in (4, 8))
    assert found(a, b) == {"model.lora.rank": "blocks"}


def test_another_method_comes_first_and_defaults_are_not_listed() -> None:
    """A group that only one method reads differs where it is not at its defaults."""
    a, b = log(recipe("sft")), log(recipe("dpo", optim__lr=1e-5, preference__beta=0.5))
    listed = differences(a, b)[0]
    assert [(one.key, one.a, one.b) for one in listed] == [("method", "sft", "dpo"), ("preference.beta", 0.1, 0.5)]


def test_a_recipe_of_an_older_version_has_the_defaults_of_what_it_lacks() -> None:
    old = recipe()
    del old["run"]["allow_fallback"], old["log"], old["data"]["train"][0]["margin_key"]
    assert differences(log(old), log(recipe())) == ([], [])
    assert found(log(old), log(recipe(log__samples=9))) == {"log.samples": "harmless"}


def test_a_key_that_is_in_no_row_matters() -> None:
    strange = recipe() | {"novelty": {"x": 1}}
    assert found(log(strange), log(recipe())) == {"novelty.x": "matters"}
    assert found(log(recipe()), log(strange)) == {"novelty.x": "matters"}


@pytest.mark.parametrize(
    ("a", "b", "weights"),
    [
        ({"run__steps": 10}, {"run__steps": 20}, {"run.steps": "blocks"}),
        (
            {"run__steps": 10, "optim__schedule": "constant"},
            {"run__steps": 20, "optim__schedule": "constant"},
            "harmless",
        ),
        (
            {"run__steps": 10, "optim__schedule": "constant", "optim__warmup": 0.1},
            {"run__steps": 20, "optim__schedule": "constant", "optim__warmup": 0.1},
            "blocks",
        ),
        (
            {"run__steps": 10, "optim__schedule": "constant", "optim__warmup": 3},
            {"run__steps": 20, "optim__schedule": "constant", "optim__warmup": 3},
            "harmless",
        ),
        ({"run__epochs": 1}, {"run__epochs": 2}, {"run.epochs": "blocks"}),
        ({"run__epochs": 1}, {"run__steps": 20}, "matters"),
    ],
)
def test_runs_of_different_lengths(a: dict[str, Any], b: dict[str, Any], weights: Any) -> None:
    listed = found(log(recipe(**a)), log(recipe(**b)))
    assert listed == weights if isinstance(weights, dict) else listed == {"run.steps": weights}


def test_paths_are_only_names_where_fingerprints_tell() -> None:
    a, b = recipe(), recipe(model__path="other", data__train="other.jsonl")
    assert found(log(a), log(b)) == {"model.path": "harmless", "data.train.0.path": "harmless"}
    silent = {key: value for key, value in ENV.items() if key not in ("data", "model")}
    assert found(log(a, silent), log(b)) == {"model.path": "matters", "data.train.0.path": "matters"}


def test_the_data() -> None:
    (rows,) = by_env(data__train=[{"fingerprint": "e" * 64}])
    assert rows == Difference("data", "data.train", ["f" * 12], ["e" * 12], "blocks", rows.effect)
    (kept,) = by_env(data__kept={"rows": 10, "tokens": 101})
    assert (kept.part, kept.key, kept.a, kept.b, kept.weight) == ("data", "data.kept.tokens", 100, 101, "blocks")
    (val,) = by_env(data__val=[{"fingerprint": "e"}])
    assert (val.key, val.weight) == ("data.val", "harmless")


def test_images_and_their_processor() -> None:
    """Rows with paths of images have the same content although the images differ."""

    def run(image: str | None, processor: str | None) -> Log:
        images = {} if image is None else {"images": {"fingerprint": image * 64, "files": {}}}
        model = {**ENV["model"], **({} if processor is None else {"processor": processor})}
        recorded = env(data__train=[{"fingerprint": "f" * 64, **images}], model=model)
        return log(recipe(model__vision="freeze"), recorded)

    assert differences(run("i", "p"), run("i", "p")) == ([], [])
    (images,) = differences(run("i", "p"), run("j", "p"))[0]
    assert (images.part, images.a, images.b, images.weight) == ("data", ["i" * 12], ["j" * 12], "blocks")
    (processor,) = differences(run("i", "p"), run("i", "q"))[0]
    assert (processor.key, processor.weight) == ("model.processor", "blocks")
    assert differences(run(None, None), run("i", "p")) == (
        [],
        ["the content of the images: unknown for side a", "the image processor (fingerprint): unknown for side a"],
    )


@pytest.mark.parametrize(
    ("change", "part", "weight"),
    [
        ({"model__weights": "v"}, "weights", "blocks"),
        ({"model__tokenizer": "u"}, "tokenizer", "blocks"),
        ({"model__template": "p"}, "tokenizer", "blocks"),
        ({"lockstep": "0.2.0"}, "versions", "matters"),
        ({"git_commit": "def"}, "versions", "matters"),
        ({"packages__torch": "2.14.0"}, "versions", "matters"),
        ({"packages__triton": "3.0"}, "versions", "matters"),
        ({"packages__numpy": "2.5"}, "versions", "harmless"),
        ({"python": "3.12"}, "versions", "harmless"),
        ({"determinism": {"torch.use_deterministic_algorithms": "True"}}, "determinism", "matters"),
        ({"engine": {"version": "vllm 0.32.0"}}, "engine", "matters"),
        ({"engine": {"servers": 2}}, "engine", "harmless"),
        ({"world_size": 2}, "device", "harmless"),
        ({"machine": "aarch64"}, "device", "harmless"),
        ({"device__chip": "other"}, "device", "harmless"),
        ({"device__driver": "550"}, "device", "harmless"),
    ],
)
def test_the_environment(change: dict[str, Any], part: str, weight: str) -> None:
    (one,) = by_env(**change)
    assert (one.part, one.weight) == (part, weight)
    assert one.effect


def test_what_the_machine_was_doing_is_no_difference() -> None:
    assert by_env(device__memory={"free": 2}, cpu_count=8, command=["other"]) == []


def test_what_blocks_comes_first() -> None:
    a = log(recipe())
    b = log(recipe(run__name="y", run__seed=1, optim__lr=1.0), env(model__weights="v", world_size=2))
    weights = [one.weight for one in differences(a, b)[0]]
    assert weights == ["blocks", "blocks", "matters", "harmless", "harmless"]


def test_missing_information_of_a_side_is_reported() -> None:
    old = {key: value for key, value in ENV.items() if key not in ("model", "determinism")}
    listed, unknown = differences(log(recipe(), old), log(recipe()))
    assert listed == []
    assert unknown == [
        "the initial weights (fingerprint): unknown for side a",
        "the tokenizer (fingerprint): unknown for side a",
        "the chat template (fingerprint): unknown for side a",
        "the switches for determinism: unknown for side a",
    ]
    unknown = differences(log(recipe(), {}), log(recipe(), {}))[1]
    assert len(unknown) == 7
    assert all(sentence.endswith("unknown on both sides") for sentence in unknown)
    unknown = differences(log(recipe()), log(recipe(), env(model__weights=None)))[1]
    assert unknown == ["the initial weights (fingerprint): unknown for side b"]


def test_a_resumed_run_is_reported() -> None:
    unknown = differences(log(recipe()), log(recipe(), env() | {"before_resume": [{}, {}]}))[1]
    (sentence,) = unknown
    assert sentence.startswith("runs/x was resumed 2 times")


def with_earlier(one: Log, earlier: dict[int, Any]) -> Log:
    assert one.evidence is not None
    return replace(one, evidence=replace(one.evidence, earlier=earlier))


def test_parts_of_a_resumed_run_are_compared_with_their_recipes() -> None:
    final = recipe(run__steps=20, optim__schedule="cosine")
    single, first = log(final), recipe(run__steps=10, optim__schedule="cosine")
    listed, _ = differences(with_earlier(log(final), {10: first}), single)
    assert [(one.key, one.a, one.b, one.weight) for one in listed] == [("run.steps to step 10", 10, 20, "blocks")]
    # Both went the same way: nothing differs.
    assert differences(with_earlier(log(final), {10: first}), with_earlier(log(final), {10: first}))[0] == []
    # A difference in all parts is listed once.
    other = recipe(run__steps=20, optim__schedule="cosine", run__seed=5)
    begun = recipe(run__steps=20, optim__schedule="cosine", run__seed=5, batch__tokens=7)
    keys = [one.key for one in differences(with_earlier(log(other), {3: begun}), single)[0]]
    assert sorted(keys) == ["batch.tokens to step 3", "run.seed"]


def test_a_foreign_log_has_no_setup() -> None:
    foreign = Log("their.log", "verl console", {}, {})
    listed, unknown = differences(log(recipe()), foreign)
    assert listed == []
    assert len(unknown) == 1
    assert unknown[0].startswith("their.log (verl console) is not a run folder")
    assert len(differences(foreign, foreign)[1]) == 2


# The table -----------------------------------------------------------------------------------------------------------


def every_key() -> Iterator[str]:
    """Every key of the schema, also inside optional groups and lists of groups."""

    def groups(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        elif not isinstance(annotation, types.GenericAlias) or typing.get_origin(annotation) is list:
            for inner in typing.get_args(annotation):
                yield from groups(inner)

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            inner = list(groups(field.annotation))
            if not inner or type(None) in typing.get_args(field.annotation):
                yield prefix + name
            for group in inner:
                yield from walk(group, f"{prefix}{name}.")

    return walk(Recipe, "")


# These depend on more than the key, and are weighed in `comparable.py`.
BY_HAND = {"run.steps", "run.epochs", "model.path"}


def test_every_key_of_a_recipe_has_a_row() -> None:
    keys = list(every_key())
    assert {"model.lora.rank", "data.train.weight", "algorithm.kl.where", "method"} <= set(keys)
    assert [key for key in keys if facts_of(key).effect is None and key not in BY_HAND] == []


def literals(annotation: Any) -> list[Any]:
    """The values of a `Literal`, or of the `Literal` in a union with None."""
    found = typing.get_args(annotation)
    return [value for one in found for value in (typing.get_args(one) or [one])]


def test_values_that_decide_whether_a_key_is_read_exist() -> None:
    fields = dict(leaves(Recipe))
    chosen = [facts.read_where for key in fields if (facts := facts_of(key)).read_where is not None]
    assert len(chosen) > 15
    for other, values in chosen:
        named = [kind.names for kind in fields[other].metadata if isinstance(kind, Named)]
        assert set(values) <= set(*named or [literals(fields[other].annotation)])


def test_sections_without_a_table_row_are_listed_by_key() -> None:
    """A new key in these groups must be thought about: it has no row to fall back on."""
    for group in ("run", "model", "batch", "rollout", "reward"):
        assert facts_of(group).effect is None
        assert facts_of(f"{group}.new").effect is None
