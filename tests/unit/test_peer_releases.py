"""The stored configurations of verl's releases: Hydra's own results, coverage by the table, defaults, versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.compat.conversion_output import checked, report
from lockstep.compat.hydra_overrides import (
    Applied,
    StoredRelease,
    nested,
    parse_overrides,
    stored_files,
    stored_versions,
)
from lockstep.compat.key_table import load_tables, row_of, table_rows
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.openrlhf.openrlhf_release import stored_flags
from lockstep.compat.verl.convert_verl import convert_verl, renamed
from lockstep.compat.verl.verl_release import stored_keys
from refusals import refuses

VERSIONS = stored_versions("verl")
CONFIGS = {
    "main_ppo": ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "entropy_trainer", "one_step_off_ppo_trainer",
                 "fully_async_ppo_trainer"),
    "sft": ("sft_trainer", "sft_trainer_engine"),
}  # fmt: skip
GRPO = [
    "data.train_files=t.parquet",
    "actor_rollout_ref.model.path=m",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]


def choices(config: str, files: dict[str, Any]) -> Iterator[list[str]]:
    """The groups of a configuration that select a backend."""
    yield []
    names = (
        [name.split("/")[1] for name in files if name.startswith("model_engine/")] if config == "ppo_trainer" else []
    )
    yield from ([f"model_engine={name}"] for name in names)
    if config == "sft_trainer_engine":
        for name in (name.split("/")[1] for name in files if name.startswith("engine/")):
            if f"optim/{name}" in files:
                yield [f"engine={name}", f"optim={name}"]


@pytest.mark.parametrize("table", CONFIGS)
@pytest.mark.parametrize(
    "version", [pytest.param(v, marks=() if v in ("0.4.1",) else pytest.mark.slow) for v in VERSIONS]
)
def test_a_row_covers_every_key(version: str, table: str) -> None:
    rows, files = table_rows("verl", table), stored_files("verl", version)
    leaves: set[str] = set()
    for config in (config for config in CONFIGS[table] if config in files):
        for words in choices(config, files):
            nodes = StoredRelease("verl", version).compose(config, parse_overrides(words).overrides).nodes
            assert all(version in stored_keys()[key] for key in nodes)
            leaves |= renamed(dict.fromkeys(nodes.keys() - {key.rpartition(".")[0] for key in nodes}), nodes).keys()  # type: ignore[arg-type]
    assert [key for key in leaves if row_of(rows, key) is None] == []
    assert len(leaves) > (25 if table == "sft" else 100)


@cache
def defaults(version: str, config: str) -> Applied:
    return Applied(StoredRelease("verl", version).compose(config), (), ())


def newest_default(table: str, key: str) -> Any:
    """The default in the newest release that has the key."""
    names = [new + key[len(old) :] for new, old in load_tables("verl")["renamed"].items()
             if key == old or (old.endswith(".") and key.startswith(old))]  # fmt: skip
    for version in reversed(VERSIONS):
        for config in reversed(CONFIGS[table][:1] if table == "main_ppo" else CONFIGS[table]):
            if config not in stored_files("verl", version):
                continue
            for name in (*names, key):
                if defaults(version, config).has(name) and (value := defaults(version, config).value(name)) is not None:
                    return value
    return None


# The configuration for FSDP does not have these keys; verl's code or its Megatron configuration has their defaults. One
# table serves PPO and SFT.
OF_THE_CODE = (
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "actor_rollout_ref.actor.megatron.router_replay.mode",
)
SHARED = {("sft", "trainer.n_gpus_per_node"): 1}


@pytest.mark.parametrize("table", CONFIGS)
def test_defaults_of_the_table_are_those_of_the_newest_release(table: str) -> None:
    checks = 0
    for row in table_rows("verl", table):
        if row.default is not None and not row.key.startswith(OF_THE_CODE):
            checks += 1
            assert newest_default(table, row.key) == SHARED.get((table, row.key), row.default), row.key
    assert checks > 20


# Hydra ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored files of verl 0.9.1 as YAML files, which Hydra's own loader reads."""
    root = tmp_path_factory.mktemp("config")
    for name, flat in stored_files("verl", "0.9.1").items():
        file = root / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        header = f"# @package {flat['@package']}\n" if "@package" in flat else ""
        values = nested({key: value for key, value in flat.items() if key != "@package"})
        file.write_text(header + OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
    return root


VALUES = st.one_of(
    st.integers(-5, 10**6).map(str),
    st.floats(0, 1, allow_nan=False).map(repr),
    st.sampled_from(["true", "False", "null", "[a,b]", "[1,[2,x]]", "'q u'", "a/b-c.d", "{x:1,y:[2]}", "''", "1e-6",
                     "0.5_5", "${data.train_batch_size}", "${oc.select:data.none,3}", "run-${trainer.nnodes}"]),
)  # fmt: skip
NAMES = [
    key for key, versions in stored_keys().items() if "0.9.1" in versions and key.startswith(("data.", "trainer."))
]
LEAVES = [key for key in NAMES if not any(other.startswith(f"{key}.") for other in NAMES)]
WORDS = st.one_of(
    st.builds("{}={}".format, st.sampled_from(LEAVES), VALUES),
    st.builds("++{}={}".format, st.sampled_from([*LEAVES, "data.new", "own.group.key"]), VALUES),
    st.builds("+{}={}".format, st.sampled_from(["data.other", "trainer.new.inner"]), VALUES),
    st.sampled_from(["~data.seed", "model_engine=megatron", "model_engine=dp", "~trainer.logger"]),
)


def same_as_hydra(folder: Path, words: list[str]) -> bool:
    """Whether Hydra's public `compose` accepts the words. Ours has the same result."""
    GlobalHydra.instance().clear()
    expected: Any = None
    with initialize_config_dir(str(folder), version_base=None), contextlib.suppress(HydraException):
        expected = OmegaConf.to_container(compose("ppo_trainer", words), resolve=False)
    release = StoredRelease("verl", "0.9.1")
    overrides = parse_overrides(words).overrides
    groups = [placed for placed in overrides if release.is_group(placed.key)]
    try:
        composed = release.compose("ppo_trainer", groups)
    except HydraException:
        assert expected is None
        return False
    ours = Applied(composed, [placed for placed in overrides if placed not in groups], ())
    if expected is None:  # such as +key of a key that the command has set before
        assert ours.problems or ours.unknown or any(placed.override.is_add() for placed in overrides)
        return False
    assert not ours.problems
    assert not ours.unknown
    assert OmegaConf.to_container(ours.config, resolve=False) == expected
    return True


@pytest.mark.slow
@given(st.lists(WORDS, max_size=8))
@settings(max_examples=25, deadline=None)
def test_random_overrides_give_hydras_configuration(folder: Path, words: list[str]) -> None:
    same_as_hydra(folder, words)


def test_the_composed_configuration_is_hydras(folder: Path) -> None:
    words = [
        "model_engine=megatron",
        "data.seed=${trainer.nnodes}",
        "+own.key=[1,x]",
        "++data.shuffle=false",
        "~ray_kwargs",
    ]
    assert same_as_hydra(folder, words)
    assert not same_as_hydra(folder, ["data.nothing=1"])


# Versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words", "version"),
    [
        ("main_ppo", [], "0.9.1"),
        ("main_ppo", ["reward.num_workers=4"], "0.9.1"),
        # A key that a release removed, and keys that a later release has by itself.
        ("main_ppo", ["actor_rollout_ref.rollout.layer_name_map.qkv_layer_name=x"], "0.7.0"),
        ("main_ppo", ["+trainer.val_before_train=False"], "0.3.0"),
        ("main_ppo", ["++trainer.val_before_train=False"], "0.9.1"),
        ("main_dapo", [], "0.7.0"),
    ],
)
def test_the_newest_release_that_accepts_all_words(program: str, words: list[str], version: str) -> None:
    done = convert_verl(program, [*GRPO, *words])
    assert not done.problems
    assert done.settings.peer == f"verl {version}"
    assert f"verl {version}" in done.remarks[0]


def test_the_user_names_the_release() -> None:
    done = convert_verl("main_ppo", GRPO, version="0.5")
    assert done.settings.peer == "verl 0.5.0"
    assert "--peer-version" in report(done)
    with refuses("--peer-version", "unknown-name", "9.9", remedy="0.9.1"):
        convert_verl("main_ppo", GRPO, version="9.9")


def test_keys_of_several_releases_are_converted_and_named() -> None:
    old, new = "actor_rollout_ref.rollout.layer_name_map.qkv_layer_name=x", "trainer.use_v1=True"
    done = convert_verl("main_ppo", [*GRPO, old, new])
    assert not done.problems
    assert "trainer.use_v1" in done.remarks[1] or "layer_name_map" in done.remarks[1]


def test_a_key_is_unknown_only_if_no_release_has_it() -> None:
    done = convert_verl("main_ppo", [*GRPO, "data.nothing=1"], ["line 1"] * 5)
    assert [(problem.where, problem.code) for problem in done.problems] == [("line 1: data.nothing", "unknown-key")]
    done = convert_verl("main_ppo", [*GRPO, "+my_project.flag=1"])
    assert not done.problems
    (outcome,) = [outcome for outcome in done.outcomes if outcome.key == "my_project.flag"]
    assert outcome.outcome == "ignored"
    assert "0.9.1" in outcome.note


def test_the_overlong_buffer_of_dapo() -> None:
    group = "reward_model.overlong_buffer"
    words = [*GRPO, f"{group}.enable=True", f"{group}.len=128", f"{group}.penalty_factor=0.5"]
    done = convert_verl("recipe.dapo.main_dapo", words)
    overlong = checked(done).algorithm.overlong
    assert (overlong.buffer, overlong.factor) == (128, 0.5)
    assert f"{group}.len = 128" in report(done)
    # dapo_trainer.yaml has the factor 0; reward_kwargs of main_ppo has 1.
    assert checked(convert_verl("main_dapo", words[:-1])).algorithm.overlong.factor == 0.0
    other = convert_verl("main_ppo", [*GRPO, f"+{group}.enable=True", f"+{group}.len=128"])
    assert not [key for key in other.recipe if key.startswith("algorithm.overlong")]


@pytest.mark.parametrize(
    ("word", "harmless"),
    [
        ("attn_implementation=eager", True),
        ("max_position_embeddings=32768", True),
        ("attention_dropout=0.", True),
        ("attention_dropout=0.1", False),
        ("num_hidden_layers=2", False),
    ],
)
def test_override_config(word: str, harmless: bool) -> None:
    done = convert_verl("main_ppo", [*GRPO, f"+actor_rollout_ref.model.override_config.{word}"])
    assert (not done.problems) is harmless


def test_groups_of_hydra() -> None:
    done = convert_verl("sft_trainer", ["data.train_files=t", "model.path=m", "engine=fsdp", "optim=fsdp"])
    assert not done.problems
    assert {outcome.outcome for outcome in done.outcomes if outcome.key in ("engine", "optim")} == {"ignored"}
    with refuses("model_engine", "unsupported-setting", "nothing"):
        convert_verl("main_ppo", [*GRPO, "model_engine=nothing"], version="0.9.1")


# OpenRLHF ------------------------------------------------------------------------------------------------------------

SFT = ["--pretrain", "m", "--dataset", "d.jsonl", "--input_key", "q", "--output_key", "a"]
# Programs and flags that other tables of the converter explain.
OLD = ("torch_compile", "use_kl_estimator_k3", "pretrain_data", "pretrain_data_probs", "pretrain_split")


@pytest.mark.parametrize("program", [name for name in stored_flags()["programs"] if name != "train_ppo"])
def test_every_flag_of_every_release_is_known(program: str) -> None:
    rows = table_rows("openrlhf", program)
    names = {*(row.flat for row in rows), *(row.dotted for row in rows), *OLD}
    assert [flag for flag in stored_flags()["programs"][program] if flag not in names] == []


@pytest.mark.parametrize(
    ("words", "release", "dtype"),
    [
        ([], "0.7.5", "fp32"),
        (["--bf16"], "0.7.5", "bf16"),
        (["--param_dtype", "fp16"], "0.9.10", "fp16"),
        (["--dataloader_num_workers", "2"], "0.9.10", "bf16"),
    ],
)
def test_the_precision_of_openrlhfs_releases(words: list[str], release: str, dtype: str) -> None:
    done = convert_openrlhf("train_sft", [*SFT, *words])
    assert not done.problems
    assert (done.settings.peer, checked(done).model.dtype) == (f"OpenRLHF {release}", dtype)
    assert release in done.remarks[0]


def test_defaults_of_openrlhfs_releases() -> None:
    words = ["--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm"]
    clips = [checked(convert_openrlhf("train_ppo_ray", words, version=v)).critic.clip for v in ("0.7", "0.8")]
    assert clips == [0.2, 0.5]
    with refuses("--peer-version", "unknown-name", "0.99", remedy="0.11.2"):
        convert_openrlhf("train_sft", SFT, version="0.99")
