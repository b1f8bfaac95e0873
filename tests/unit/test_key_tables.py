"""The migration tables (compat/tables/*.yaml): no duplicates, valid recipe keys and values, flags, remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from lockstep.compat.command_grammar import FLAG_TYPES, is_flag, parse_flags
from lockstep.compat.conversion_output import checked
from lockstep.compat.hydra_overrides import parse_overrides
from lockstep.compat.key_table import FOLDER, KeyRow, load_tables, nearest_name, row_of, table_rows
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf, defaults_of, flags_of
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe.loader import checked_recipe, sections_of
from lockstep.recipe.schema import Recipe

PEERS = ("verl", "openrlhf")
TABLES = [(peer, table) for peer in PEERS for table in load_tables(peer)["tables"]]
# The tables of whole programs; the others are included by them.
PROGRAMS = [(peer, table) for peer in PEERS for table in dict.fromkeys(load_tables(peer)["programs"].values())]
ROWS = [(peer, table, row) for peer, table in PROGRAMS for row in table_rows(peer, table)]
SECTION = {"section", "include", "prefix", "keys", "ignored", "refused"}
ENTRY = {"to", "as", "default", "unit", "note", "differs", "values", "type", "dotted", "flat", "only"}
# Recipe keys whose values are names in a registry, not in a type.
NAMES = ("method", "algorithm.advantage", "algorithm.loss")
GROUP = {"because", "do", "accepts", "accepted", "keys"}


def duplicate_keys(node: yaml.Node) -> Iterator[str]:
    """Keys that a mapping has twice. A YAML loader would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        yield from (name for name, count in Counter(names).items() if count > 1)
        for _, value in node.value:
            yield from duplicate_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from duplicate_keys(item)


@pytest.mark.parametrize("peer", PEERS)
def test_no_mapping_has_a_key_twice(peer: str) -> None:
    node = yaml.compose((FOLDER / f"{peer}.yaml").read_text(encoding="utf-8"))
    assert list(duplicate_keys(node)) == []
    assert list(duplicate_keys(yaml.compose("a: {b: 1, c: [{d: 1, d: 2}]}\ne: 1\ne: 2"))) == ["e", "d"]


@pytest.mark.parametrize(("peer", "table"), PROGRAMS)
def test_no_table_has_a_key_or_flag_twice(peer: str, table: str) -> None:
    rows = table_rows(peer, table)
    for names in ([row.key for row in rows], [row.flat for row in rows], [row.dotted for row in rows]):
        assert [name for name, count in Counter(names).items() if count > 1 and name is not None] == []


@pytest.mark.parametrize(("peer", "table"), TABLES)
def test_fields_are_those_that_the_loader_reads(peer: str, table: str) -> None:
    for section in load_tables(peer)["tables"][table]:
        assert set(section) <= SECTION
        for key, entry in section.get("keys", {}).items():
            assert set(entry) <= ENTRY, key
        for group in (*section.get("ignored", ()), *section.get("refused", ())):
            assert set(group) <= GROUP, group["because"]


def test_every_table_is_a_program_or_included() -> None:
    for peer in PEERS:
        content = load_tables(peer)
        included = {section.get("include") for sections in content["tables"].values() for section in sections}
        assert set(content["tables"]) == set(content["programs"].values()) | (included - {None})
        defaults = content["defaults" if peer == "openrlhf" else "defaults_of_release"]
        assert set(defaults) == set(content["programs"].values())


@cache
def annotation(key: str) -> Any:
    """The type of a recipe key. Raises KeyError for a key that the schema does not have."""
    models: list[Any] = [Recipe]
    found: Any = None
    for name in key.split("."):
        found = next(model.model_fields[name] for model in models if name in model.model_fields)
        models = sections_of(found.annotation)
    return found.annotation


@cache
def problems(key: str, value: Any) -> list[str]:
    """The problems of a small recipe at this key, once it has the value."""
    recipe: dict[str, Any] = {"method": "grpo", "model": {"path": "m"}, "data": {"train": "t"}}
    *parents, leaf = key.split(".")
    group = recipe
    for parent in parents:
        group = group.setdefault(parent, {})
    group[leaf] = value
    try:
        checked_recipe(recipe)
    except Refusal as refusal:
        return [str(problem) for problem in refusal.problems if problem.where.startswith(key)]
    return []


def accepts(key: str, value: Any) -> bool:
    """By type, and for names of estimators, losses and methods by the checks of a recipe."""
    try:
        TypeAdapter(annotation(key)).validate_python(value)
    except ValidationError:
        return False
    return key not in NAMES or not problems(key, value)


def test_every_recipe_key_exists() -> None:
    for peer, table, row in ROWS:
        for key in row.to:
            try:
                annotation(key)
            except StopIteration:
                raise AssertionError(f"{peer} {table} {row.key}: the recipe has no key {key}") from None
    with pytest.raises(StopIteration):
        annotation("algorithm.nothing")


def test_every_mapped_value_is_accepted() -> None:
    checks = 0
    for peer, table, row in ROWS:
        for theirs, ours in row.values.items():
            pairs = ours if isinstance(ours, dict) else {row.to[0]: ours}
            for key, value in pairs.items():
                checks += 1
                assert accepts(key, value), (peer, table, row.key, theirs, key, value)
    assert checks > 100
    assert not accepts("algorithm.loss", "vanilla")
    assert not accepts("algorithm.kl.estimator", "low_var_kl")
    assert not accepts("method", "gae")


def test_defaults_of_direct_rows_are_accepted() -> None:
    """`as` rows write their default as it is."""
    rows = [(row, row.default) for _, _, row in ROWS if row.cast is not None and row.default is not None]
    assert len(rows) > 30
    for row, default in rows:
        assert accepts(row.to[0], default), row.key


def test_the_default_of_a_row_with_values_has_a_value() -> None:
    for peer, table, row in ROWS:
        assert not row.values or row.default is None or row.default in row.values, (peer, table, row.key)


def test_a_direct_row_has_one_recipe_key() -> None:
    for _, _, row in ROWS:
        assert row.cast in (None, "int", "float", "bool", "same"), row.key
        assert row.cast is None or len(row.to) == 1, row.key


SAMPLE = {"int": ["3"], "float": ["0.5"], "str": ["x"], "switch": [], "float2": ["-1", "1"], "str+": ["a", "b"]}
SAMPLE["float+"] = ["0.5", "2"]


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("program", [table for peer, table in PROGRAMS if peer == "openrlhf"])
def test_every_flag_is_read(program: str, dotted: bool) -> None:
    rows = [row for row in table_rows("openrlhf", program) if row.name(dotted)]
    for row in rows:
        parsed = parse_flags([f"--{row.name(dotted)}", *SAMPLE[row.type]], flags_of(rows, dotted))
        assert not parsed.problems, row.key
        assert list(parsed.given) == [row.key]
    assert set(SAMPLE) == set(FLAG_TYPES)
    assert not dotted or not rows or any("." in str(row.dotted) for row in rows)


def test_every_key_of_verl_is_an_override() -> None:
    for peer, table, row in ROWS:
        if peer == "verl":
            key = row.key.replace("*", "x")
            (parsed,) = parse_overrides([f"{key}=1"]).overrides
            assert parsed.name == key
            found = row_of(table_rows(peer, table), key)
            assert found is not None
            assert found.outcome == row.outcome, row.key


def test_the_longest_pattern_decides() -> None:
    rows = [KeyRow("a.*", "ignored"), KeyRow("a.b.*", "refused"), KeyRow("a.b.c", "mapped")]
    keys = ("a.x", "a.b.x", "a.b.c", "b")
    assert [(row_of(rows, key) or KeyRow("", "changed")).outcome for key in keys] == [
        "ignored",
        "refused",
        "mapped",
        "changed",
    ]


BASES = {
    "main_ppo": ["data.train_files=t", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo"],
    "sft": ["data.train_files=t", "model.path=m"],
}
# A group of Hydra has only the values that its folder has.
GROUPS = {
    ("main_ppo", "model_engine"): "model_engine=torchtitan",
    ("main_ppo", "*@*"): "actor@actor_rollout_ref.actor=torchtitan_actor",
    ("sft", "engine"): "engine=torchtitan",
    ("sft", "optim"): "optim=torchtitan",
}
FLAT = ["--pretrain", "m", "--dataset", "d.jsonl"]
ONLINE = {
    False: ["--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm"],
    True: ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.model_name_or_path", "rm"],
}
DOTTED = ["--model.model_name_or_path", "m", "--data.dataset", "d.jsonl"]


def refused_commands() -> Iterator[Any]:
    """One command per refused key, with a value that the table does not accept."""
    for peer, table, row in ROWS:
        if row.outcome != "refused":
            continue
        if peer == "verl":
            word = GROUPS.get((table, row.key), f"{row.key.replace('*', 'x')}=requested")
            key = word.partition("=")[0]
            yield pytest.param(row, peer, table, [*BASES[table], word], key, id=f"{table} {row.key}")
            continue
        dotted = row.flat is None
        if dotted and table in ("train_kto", "train_prm", "train_kd"):
            continue  # 0.11 does not have these programs
        base = ONLINE[dotted] if table == "train_ppo_ray" else DOTTED if dotted else FLAT
        words = [*base, f"--{row.name(dotted)}", *SAMPLE[row.type]]
        yield pytest.param(row, peer, table, words, f"--{row.name(dotted)}", id=f"{table} {row.key}")


@pytest.mark.daily(every=6)
@pytest.mark.parametrize(("row", "peer", "table", "words", "where"), refused_commands())
def test_a_refusal_names_key_reason_and_remedy(
    row: KeyRow, peer: str, table: str, words: list[str], where: str
) -> None:
    done = (convert_verl if peer == "verl" else convert_openrlhf)(table, words)
    with pytest.raises(Refusal) as refused:
        checked(done)
    (problem,) = [problem for problem in refused.value.problems if problem.where == where]
    assert (problem.why, problem.remedy) == (row.note, row.remedy)
    assert len(row.note) > 10
    assert len(row.remedy) > 9
    (outcome,) = [outcome for outcome in done.outcomes if outcome.outcome == "refused"]
    assert row.remedy in outcome.note


def test_ignored_keys_have_a_reason() -> None:
    for _, _, row in ROWS:
        assert row.outcome != "ignored" or len(row.note) > 10, row.key


@pytest.mark.parametrize("table", ["main_ppo", "sft"])
def test_defaults_of_releases_belong_to_keys_without_a_default(table: str) -> None:
    rows = {row.key: row for row in table_rows("verl", table)}
    assert all(rows[key].default is None for key in load_tables("verl")["defaults_of_release"][table])


@pytest.mark.parametrize("program", [table for peer, table in PROGRAMS if peer == "openrlhf"])
def test_defaults_of_programs_belong_to_flags_and_have_their_type(program: str) -> None:
    rows = {row.key: row for row in table_rows("openrlhf", program)}
    types = {"int": int, "float": int | float, "str": str, "switch": bool, "float2": list, "float+": list}
    for dotted in (False, True):
        for key, value in defaults_of(program, dotted).items():
            expected = types.get(rows[key].type, str)
            assert isinstance(value, expected), (key, value)


def test_new_names_of_verl_lead_to_keys() -> None:
    """A name that ends with a dot is a group."""
    keys = [row.key for row in table_rows("verl", "main_ppo")]
    for name in load_tables("verl")["renamed"].values():
        assert any(key.startswith(name) if name.endswith(".") else key == name for key in keys), name


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["actor_rollout_ref.actor.optim.betas=0.9"], "actor_rollout_ref.actor.optim.betas"),
        (["actor_rollout_ref.actor.optim.lr_warmup_steps=x"], "actor_rollout_ref.actor.optim.lr_warmup_steps"),
        (["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=null"], "actor_rollout_ref.actor.optim"),
        (["algorithm.adv_estimator=[a,b]"], "algorithm.adv_estimator"),
        (["trainer.total_epochs=null"], "trainer.total_epochs"),
        (["trainer.max_actor_ckpt_to_keep=x"], "trainer.max_actor_ckpt_to_keep"),
        (["data.shuffle=True", "algorithm.gamma=x"], "algorithm.gamma"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_problem_of_its_key(words: list[str], where: str) -> None:
    done = convert_verl("main_ppo", [*BASES["main_ppo"], *words])
    (problem,) = done.problems
    assert problem.where.startswith(where)
    assert problem.remedy


def test_a_count_of_zero_responses_is_refused() -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE[False], "--n_samples_per_prompt", "0"])
    assert [problem.where for problem in done.problems] == ["--train_batch_size"]


def test_flags_that_start_with_a_minus_are_values() -> None:
    assert [is_flag(word) for word in ("--a", "-1", "-1e-3", "-", "-.5", "-x")] == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        # No name is similar, but one has the same last component.
        ("everything.about.the.length.max_tokens", "data.max_tokens"),
        ("unrelated.word", None),
    ],
)
def test_the_nearest_name_is_the_most_similar_or_has_the_same_last_component(name: str, expected: str | None) -> None:
    assert nearest_name(name, ["data.seed", "trainer.total_epochs", "data.max_tokens"]) == expected


def test_a_row_has_the_fields_of_its_entry() -> None:
    row = next(row for row in table_rows("verl", "main_ppo") if row.key == "trainer.save_freq")
    assert row == KeyRow("trainer.save_freq", "mapped", ("checkpoint.every",), row.note, default=-1, unit="steps")
