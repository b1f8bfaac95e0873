"""Old names of recipe keys: they work with a warning, everywhere a recipe is read, and runs written with them too."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from commands import lockstep
from conftest import write_online_recipe
from lockstep import cli
from lockstep.errors import RenamedKey
from lockstep.parity.compare.logs.run_logs import read_evidence
from lockstep.parity.compare.run_setup import setup_differences
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.loader import checked_recipe, described_keys, dump_recipe, override_of, recipe_with, resolved
from lockstep.recipe.methods import ONLINE, method_defaults
from lockstep.recipe.renamed_keys import RENAMED, current_key, stored_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.serve.viewer_runs import setup_difference
from lockstep.tape.tape_format import TapeFolder
from lockstep.train.offline import train_offline
from recipe_files import BASE, refused, write
from runs import facts

OLD_RUN = Path(__file__).parents[2] / "docs" / "support-appendix" / "grpo-gsm8k-kernels" / "fused-1"
ONLINE_BASE = {"method": "grpo", "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
# One value of each key that is not its default, with what else the recipe needs.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "run.stop_early": ({"metric": "reward", "patience": 2}, {}),
    "data.reader_limit": (5.0, {}),
    "batch.rows": (3, {}),
    "rollout.hand_over": ("memory", {"rollout.max_staleness": 1}),
    "rollout.truncated": ("mask", {"rollout.top_k": 5}),
    "rollout.function_limit": (5.0, {}),
    "rollout.server.start_limit": (5.0, {"rollout.engine": "vllm"}),
    "rollout.server.answer_limit": (5.0, {"rollout.engine": "vllm"}),
    "algorithm.function_limit": (5.0, {}),
    "algorithm.cov_share": (0.5, {"algorithm.loss": "kl_cov"}),
    "algorithm.kl.compared": (False, {"algorithm.kl.where": "reward"}),
    "algorithm.correction": ({"weight": "token", "cap": 3.0}, {}),
    "algorithm.dynamic_sampling.rounds": (4, {}),
    "algorithm.filtration": ({"method": "pow", "power": 3.0}, {"method": "ppo"}),
    "algorithm.overlong.cut": (0.5, {}),
    "algorithm.overlong.skip": (True, {}),
    "rm.centre": (0.5, {"method": "rm"}),
    "parallel.context": (2, {}),
    "parallel.tensor": (2, {}),
}


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, leaf = key.split(".")
        group = values
        for parent in parents:
            group = group.setdefault(parent, {})
        group[leaf] = value
    return values


def case(old: str, name: str) -> dict[str, Any]:
    """A recipe that sets this key by `name`, as nested values."""
    value, more = VALUES[old]
    online = {} if more.get("method") == "rm" else {"method": "grpo"}
    return nested({"model.path": "m", "data.train": "d.jsonl", **online, **more, name: value})


def words_of(values: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def with_old_names(values: Any, group: str = "") -> Any:
    """The values as the version before the renaming stored them."""
    if not isinstance(values, dict):
        return values
    old_names = {new: old for old, new in RENAMED.items()}
    result = {}
    for name, value in values.items():
        key = f"{group}.{name}" if group else name
        result[old_names.get(key, key).rpartition(".")[2]] = with_old_names(value, key)
    return result


@pytest.fixture
def silent() -> Iterator[None]:
    """Fails on a warning about an old name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RenamedKey)
        yield


def test_the_table_has_old_names_of_existing_keys() -> None:
    keys = described_keys()
    assert set(VALUES) == set(RENAMED)
    assert set(RENAMED.values()) <= set(keys)
    assert not set(RENAMED) & set(keys)
    assert all(old.rpartition(".")[0] == new.rpartition(".")[0] for old, new in RENAMED.items())


@pytest.mark.parametrize("old", RENAMED)
def test_the_old_name_reads_as_the_new_one(tmp_path: Path, old: str) -> None:
    new, note = RENAMED[old], f"{old} is now {RENAMED[old]}; the old name works until the next release"
    expected = load_recipe(write(tmp_path, case(old, new)))
    found: Any = resolved(expected)
    for part in new.split("."):
        found = found[part]
    assert found == (VALUES[old][0] if not isinstance(found, dict) else {**found, **VALUES[old][0]})
    base = {key: value for key, value in case(old, new).items() if key in ("method", "model", "data")}
    file = write(tmp_path, base)
    value, more = VALUES[old]
    rest = {name: item for name, item in more.items() if name != "method"}
    readings = {
        "file": lambda: load_recipe(write(tmp_path, case(old, old))),
        "command line": lambda: load_recipe(file, words_of({**rest, old: value})),
        "dotted keys": lambda: recipe_with(file, {**rest, old: value}),
        "nested keys": lambda: recipe_with(file, nested({**rest, old: value})),
        "values": lambda: checked_recipe(case(old, old)),
    }
    for form, read in readings.items():
        file = write(tmp_path, base)
        with pytest.warns(RenamedKey) as caught:
            assert resolved(read()) == resolved(expected), form
        assert note in {str(warning.message) for warning in caught}, form


@pytest.mark.parametrize("old", RENAMED)
def test_both_names_are_refused(tmp_path: Path, old: str) -> None:
    new, value = RENAMED[old], VALUES[old][0]
    both = case(old, old) | {}
    group = both
    for part in old.split(".")[:-1]:
        group = group[part]
    group[new.rpartition(".")[2]] = value
    problems = [problem for problem in refused(write(tmp_path, both)) if problem.where == new]
    assert problems
    assert old in problems[0].why
    assert old in problems[0].remedy
    words = words_of({old: value, new: value})
    assert [problem for problem in refused(write(tmp_path, case(old, new)), *words) if f"remove {old}" in str(problem)]


def test_a_file_with_the_old_name_and_an_override_with_the_new_one(tmp_path: Path) -> None:
    file = write(tmp_path, {**BASE, "batch": {"rows": 4}})
    assert load_recipe(file, ["batch.micro_batch_size=2"]).batch.micro_batch_size == 2
    assert recipe_with(file, {"batch": {"micro_batch_size": 3}}).batch.micro_batch_size == 3
    assert load_recipe(write(tmp_path, {**BASE, "batch": {"micro_batch_size": 4}}), ["batch.rows=2"]).batch.rows == 2


def test_keys_inside_a_renamed_group(tmp_path: Path) -> None:
    file = write(tmp_path, ONLINE_BASE)
    words = ["algorithm.correction.weight=token", "algorithm.correction.cap=3", "algorithm.overlong={skip: true}"]
    with pytest.warns(RenamedKey):
        algorithm = load_recipe(file, words).algorithm
    assert (algorithm.rollout_correction.weight, algorithm.rollout_correction.cap) == ("token", 3.0)
    assert algorithm.overlong.mask_truncated
    assert current_key("algorithm.correction.reject.0.low") == "algorithm.rollout_correction.reject.0.low"
    assert current_key("parallel.context_layout") == "parallel.context_layout"
    assert override_of("parallel.tensor=2") == ("parallel.tensor_parallel", 2)
    (problem,) = refused(file, "algorithm.overlong={skip: true, mask_truncated: true}")
    assert problem.where == "algorithm.overlong.mask_truncated"


def test_the_python_api() -> None:
    values = {**ONLINE_BASE, "batch": {"rows": 2}}
    with pytest.warns(RenamedKey, match=r"batch\.rows is now batch\.micro_batch_size"):
        assert Recipe.model_validate(values).batch.micro_batch_size == 2
    with pytest.raises(ValidationError, match=r"batch\.micro_batch_size.*batch\.rows"):
        Recipe.model_validate({**values, "batch": {"rows": 2, "micro_batch_size": 2}})
    recipe = recipe_with(checked_recipe(ONLINE_BASE), {"parallel.tensor_parallel": 2})
    with pytest.warns(RenamedKey, match="tensor is now tensor_parallel"):
        assert recipe.parallel.tensor == 2  # type: ignore[attr-defined]
    with pytest.warns(RenamedKey):
        assert recipe.algorithm.correction is recipe.algorithm.rollout_correction  # type: ignore[attr-defined]
    assert not hasattr(recipe.batch, "context")
    assert recipe.model_copy(deep=True) == recipe


def test_the_defaults_of_a_plug_in_may_have_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ONLINE, "mine", {"algorithm": {"dynamic_sampling": {"rounds": 3}}})
    assert method_defaults("mine") == {"algorithm": {"dynamic_sampling": {"max_gen_batches": 3}}}


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("rollout.hand_ovr=files", "rollout.weight_sync"),
        ("stop_early=null", "run.early_stopping"),
        ("algorithm.overlong.skipp=true", "algorithm.overlong.mask_truncated"),
        ("micro_batch_size=2", "batch.micro_batch_size"),
        ("center_rewards_coefficient=0.1", "rm.center_rewards_coef"),
    ],
)
def test_suggestions_have_the_new_name(tmp_path: Path, word: str, suggested: str) -> None:
    (problem,) = [one for one in refused(write(tmp_path, ONLINE_BASE), word) if one.why == "no such key"]
    assert problem.remedy == f"did you mean {suggested}?"


def test_the_command_line_prints_one_line_for_each_old_name(tmp_path: Path) -> None:
    file = write(tmp_path, {**BASE, "batch": {"rows": 4}})
    done = lockstep("plan", file, "parallel.tensor=2", "batch.rows=2")
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert lines == [
        "warning: batch.rows is now batch.micro_batch_size; the old name works until the next release",
        "warning: parallel.tensor is now parallel.tensor_parallel; the old name works until the next release",
    ]


@pytest.mark.parametrize(
    ("rank", "printed"), [("0", "warning: b is now c; the old name works until the next release\n"), ("1", "")]
)
def test_of_several_ranks_one_prints_the_warning(
    rank: str, printed: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    cli._show_warning("b is now c; the old name works until the next release", RenamedKey, "file", 1)
    assert capfd.readouterr().err == printed


# -- runs written with the old names -----------------------------------------------------------------------------------


def written_earlier(run: Path) -> None:
    """Rewrites a run folder as the version before the renaming wrote it."""
    for file in run.glob("recipe*.yaml"):
        file.write_text(yaml.safe_dump(with_old_names(yaml.safe_load(file.read_text())), sort_keys=False))
    for state in run.glob("checkpoints/*/state.json"):
        values = json.loads(state.read_text())
        state.write_text(json.dumps({**values, "recipe": with_old_names(values["recipe"])}))
        manifest = state.parent / checkpoints.MANIFEST
        entries = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**entries, **checkpoints.told_of(state.parent, [state])}))
    manifest = run / "tape" / "tape.json"
    if manifest.is_file():
        values = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**values, "recipe": with_old_names(values["recipe"])}))


def setup(a: Path, b: Path) -> list[str]:
    return [one.key for one in setup_differences(read_evidence(a), read_evidence(b))[0]]


@pytest.mark.slow
def test_an_old_run_resumes_and_compares_without_a_difference(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: None
) -> None:
    words = ["run.export=false", "batch.tokens=null", "batch.micro_batch_size=2", "checkpoint.every=3", "tape=true"]
    words += ["checkpoint.keep_last=9", "tape.steps=1"]
    for name in ("whole", "part"):
        train_offline(load_recipe(str(recipe_file), [*words, f"run.name={name}"]), Console.silent())
    whole, part = tmp_path / "runs" / "whole", tmp_path / "runs" / "part"
    written_earlier(part)
    assert "rows: 2" in (part / "recipe.yaml").read_text()
    assert setup(whole, part) == ["run.name"]
    assert [row["key"] for row in setup_difference(tmp_path, whole, part)["differences"]] == ["run.name"]
    assert TapeFolder(RunFolder(part).tape).manifest()["recipe"]["batch"]["micro_batch_size"] == 2
    stored = load_recipe(str(part / "recipe.yaml"), stored=True)
    assert resolved(stored) == resolved(load_recipe(str(recipe_file), [*words, "run.name=part"]))

    shutil.rmtree(part / "checkpoints" / "step_6")
    capsys.readouterr()
    train_offline(load_recipe(str(recipe_file), [*words, "run.name=part"]), Console.open(plain=True))
    said = capsys.readouterr().out
    assert "resum" in said
    assert "warning" not in said
    assert facts(part) == facts(whole)
    # No key has changed: there is one recipe, with the new names.
    assert not list(part.glob("recipe.to_step_*"))
    assert "micro_batch_size: 2" in (part / "recipe.yaml").read_text()


def test_a_changed_key_of_an_old_run_is_still_refused(tmp_path: Path, tiny_folder: Path) -> None:
    from lockstep.errors import Refusal
    from lockstep.train.resume import refuse_changed_recipe

    file = str(write_online_recipe(tmp_path, tiny_folder))
    recipe = resolved(load_recipe(file))
    old = stored_recipe(with_old_names(recipe))
    state = checkpoints.State(step=1, rows_seen=1, recipe=old, data={}, world_size=1)
    assert refuse_changed_recipe(state, recipe, ()) == []
    changed = resolved(load_recipe(file, ["algorithm.overlong.mask_truncated=true"]))
    with pytest.raises(Refusal, match=r"algorithm\.overlong\.mask_truncated"):
        refuse_changed_recipe(state, changed, ())
    spread = resolved(load_recipe(file, ["parallel.context_parallel=2"]))
    assert [one.key for one in refuse_changed_recipe(state, spread, ())] == ["parallel.context_parallel"]


def test_a_published_run_with_old_names_is_read(tmp_path: Path, silent: None) -> None:
    values = yaml.safe_load((OLD_RUN / "recipe.yaml").read_text())
    assert "correction" in values["algorithm"]
    recipe = load_recipe(str(OLD_RUN / "recipe.yaml"), stored=True)
    assert recipe.algorithm.rollout_correction.weight == values["algorithm"]["correction"]["weight"]
    new = shutil.copytree(OLD_RUN, tmp_path / "new")
    (new / "recipe.yaml").write_text(dump_recipe(recipe))
    assert "rollout_correction" in (new / "recipe.yaml").read_text()
    assert setup(OLD_RUN, new) == []
