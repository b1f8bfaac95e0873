"""`lockstep migrate --verify`: the table of all keys and defaults, its file, and its use by `lockstep compare`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.compat.conversion_output import lockstep_defaults
from lockstep.compat.key_table import Conversion
from lockstep.compat.migrate import migrate
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verify import MigrationRow, MigrationTable, table_json, table_of, table_text
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.parity.compare.known_differences import known_differences
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.recipe import load_recipe

CASES = Path(__file__).parents[1] / "data" / "migration"
GRPO = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet \\
    actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \\
    data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32 trainer.total_training_steps=9
"""


def table(done: Conversion) -> MigrationTable:
    method = str(done.recipe["method"].value) if "method" in done.recipe else "sft"
    return table_of(done, lockstep_defaults(method))


def verl(*words: str) -> dict[str, MigrationRow]:
    given = ["algorithm.adv_estimator=grpo", "data.train_files=t", "actor_rollout_ref.model.path=m"]
    found = table(convert_verl("main_ppo", [*given, "actor_rollout_ref.rollout.name=vllm", *words]))
    return {row.key: row for row in found.rows}


def test_every_key_has_one_row_with_its_verdict() -> None:
    a = "actor_rollout_ref.actor"
    rows = verl(
        *("data.train_batch_size=16", f"{a}.ppo_mini_batch_size=32", f"{a}.use_kl_loss=True", "a.b=1"),
        f"{a}.fsdp_config.mixed_precision.reduce_dtype=fp32",
    )
    assert rows["a.b"].verdict == "refused"
    rows = verl(
        *("data.train_batch_size=16", f"{a}.ppo_mini_batch_size=32", f"{a}.use_kl_loss=True"),
        f"{a}.fsdp_config.mixed_precision.reduce_dtype=fp32",
    )
    kept, changed = rows["data.train_batch_size"], rows[f"{a}.ppo_mini_batch_size"]
    assert (kept.verdict, kept.recipe) == ("kept", {"batch.prompts": 16})
    assert (changed.verdict, changed.recipe, changed.curves) == ("different", {"batch.prompts_per_update": 16}, ("*",))
    assert changed.why
    assert rows[f"{a}.use_kl_loss"].verdict == "translated"
    ignored = rows[f"{a}.fsdp_config.mixed_precision.reduce_dtype"]
    assert (ignored.verdict, bool(ignored.why)) == ("no effect", True)


def test_defaults_that_differ_are_rows() -> None:
    row = verl()["actor_rollout_ref.actor.optim.lr"]
    assert (row.origin, row.verdict, row.recipe, row.value) == ("default", "kept", {"optim.lr": 1e-6}, 1e-6)
    assert "1.0e-05" in row.why  # lockstep's default
    assert "actor_rollout_ref.actor.optim.lr" not in {
        key for key, row in verl("actor_rollout_ref.actor.optim.lr=1e-5").items() if row.origin == "default"
    }


def test_differences_without_a_key_depend_on_version_and_recipe() -> None:
    def trainer(done: Conversion) -> set[str]:
        return {row.key for row in table(done).rows if row.origin == "trainer"}

    words = ["algorithm.adv_estimator=grpo", "data.train_files=t", "actor_rollout_ref.model.path=m"]
    words += ["actor_rollout_ref.rollout.name=vllm"]
    sequences = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    assert "loss normaliser" in trainer(convert_verl("main_ppo", words, version="0.4.1"))
    assert "loss normaliser" not in trainer(convert_verl("main_ppo", [*words, sequences], version="0.4.1"))
    assert "loss normaliser" not in trainer(convert_verl("main_ppo", words, version="0.9.1"))
    assert "loss normaliser" in trainer(convert_openrlhf("train_sft", ["--pretrain", "m", "--dataset", "t"]))
    dotted = convert_openrlhf("train_sft", ["--actor.model_name_or_path", "m"])
    assert "loss normaliser" not in trainer(dotted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verl", "openrlhf_flat", "openrlhf_dotted"])
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_the_tables_of_the_stored_commands_fit_80_columns(name: str, every: int) -> None:
    for case in json.loads((CASES / f"{name}.json").read_text(encoding="utf-8"))[::every]:
        try:
            if name == "verl":
                words = [f"{key}={value}" for key, value in case["settings"].items()]
                done = convert_verl(case["program"], words)
            else:
                done = convert_openrlhf(case["program"], [word for flag in case["flags"] for word in flag])
        except Refusal:
            continue
        found = table(done)
        keys = [row.key for row in found.rows if row.origin == "command"]
        assert keys[: len(done.settings.given)] == list(map(done.settings.spelling, done.settings.given)), case["name"]
        assert max(map(len, table_text(found).splitlines())) <= 80, case["name"]
        assert json.loads(table_json(found))["counts"] == found.counts()
        for row in found.rows:  # a reason for every key that is not simply kept or translated
            assert row.verdict in ("kept", "translated") or row.why, (case["name"], row.key)


def test_a_secret_is_not_stored() -> None:
    words = ["--pretrain", "m", "--dataset", "t", "--use_wandb", "0123456789abcdef"]
    found = table(convert_openrlhf("train_dpo", words))
    assert "0123456789abcdef" not in table_json(found) + table_text(found)


def test_migrate_writes_the_table_beside_the_recipe(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text(GRPO, encoding="utf-8")
    migrate(script, [], Path("mine.yaml"))
    recipe = load_recipe("mine.yaml")
    assert recipe.run.migration == "mine.migration.json"
    stored = json.loads((tmp_path / "mine.migration.json").read_text(encoding="utf-8"))
    assert (stored["peer"], stored["program"], stored["method"]) == ("verl 0.9.1", "main_ppo", "grpo")
    capsys.readouterr()
    migrate(script, [], None, verify=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == stored
    migrate(script, [], None, verify=True)
    shown = capsys.readouterr().out
    assert re.search(r"^different +actor_rollout_ref\.actor\.ppo_mini_batch_size = 32  \(line 4\)$", shown, re.M)
    assert f"{stored['counts']['kept']} kept" in shown


def test_compare_lists_the_differences_of_the_compared_metrics(tmp_path: Path) -> None:
    rows = (
        MigrationRow("a", 1, "different", {}, "why a", curves=("*",)),
        MigrationRow("b", 2, "different", {}, "why b", curves=("val*",)),
        MigrationRow("c", 3, "different", {}, "why c", curves=("actor/*",)),
        MigrationRow("d", 4, "different", {}, "why d"),
        MigrationRow("e", 5, "translated", {}),
    )
    (tmp_path / "migration.json").write_text(table_json(MigrationTable("verl 0.4", "main_ppo", "grpo", rows)))
    other, run = log("verl.log"), replace(log(str(tmp_path)), evidence=object())
    found = known_differences(other, run, ["actor/pg_loss", "critic/rewards/mean"])
    assert [(each.key, each.how, each.metrics) for each in found] == [
        ("a = 1", "why a", ["actor/pg_loss", "critic/rewards/mean"]),
        ("c = 3", "why c", ["actor/pg_loss"]),
    ]
    assert known_differences(run, run, ["actor/pg_loss"]) == []
    assert known_differences(other, other, ["actor/pg_loss"]) == []


def log(source: str) -> Any:
    return Log(source, "verl console", {}, {})
