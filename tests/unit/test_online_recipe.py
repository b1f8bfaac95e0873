"""Online recipes: every method's defaults, what beats them, what is refused and in which words."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from lockstep.algorithms.advantage import ESTIMATORS
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.token_selection import SELECTORS
from lockstep.cli import app
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.methods import METHODS
from lockstep.preflight.run_checks import prepare_online
from lockstep.recipe import load_recipe
from lockstep.recipe import registry as rows
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.loader import dump_recipe, resolved
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.recipe.registry import estimator_row
from lockstep.run.console import Console
from loss_settings import SETTINGS
from recipe_files import BASE, keys, refused, write


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path, {**BASE, "method": "grpo"})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part] if isinstance(recipe, dict) else getattr(recipe, part)
    return recipe


# -- methods -----------------------------------------------------------------------------------------------------------


def test_every_method_is_in_one_table() -> None:
    assert [*OFFLINE, *ONLINE] == list(dict.fromkeys([*OFFLINE, *ONLINE]))
    assert set(METHODS) == set(OFFLINE)


def needs(method: str) -> dict[str, Any]:
    """What a recipe of the method must say."""
    return {"algorithm": {"kl": {"reference": "teacher"}}} if method == "on_policy_distill" else {}


@pytest.mark.parametrize("method", ONLINE)
def test_a_methods_defaults_hold_and_a_recipes_own_value_beats_them(tmp_path: Path, method: str) -> None:
    recipe = write(tmp_path, {**BASE, **needs(method), "method": method})
    read = load_recipe(recipe)
    defaults = flat(ONLINE[method])
    assert defaults
    for key, value in defaults.items():
        assert at(read, key) == value, key
    others: dict[str, Any] = {
        "rollout.n": 5,
        "algorithm.advantage": "opo",
        "algorithm.loss": "sapo",
        "algorithm.aggregation": "seq_mean_token_sum",
        "algorithm.clip_low": 0.11,
        "algorithm.clip_high": 0.22,
        "algorithm.kl.where": "loss",
        "algorithm.kl.estimator": "abs",
        "algorithm.kl.coefficient": 0.33,
        "algorithm.dynamic_sampling.max_gen_batches": 2,
        "algorithm.gamma": 0.5,
        "reward.weights.rule": 2.0,
    }
    assert set(defaults) <= set(others)
    words = [f"{key}={others[key]}" for key in defaults]
    own = load_recipe(recipe, [*words, *([] if "rollout.n" in defaults else ["rollout.n=5"])])
    for key in defaults:
        assert at(own, key) == others[key], key


def test_one_value_of_a_group_leaves_the_methods_others(tmp_path: Path) -> None:
    recipe = write(tmp_path, {**BASE, "method": "ppo", "algorithm": {"kl": {"coefficient": 0.5}}})
    kl = load_recipe(recipe).algorithm.kl
    assert (kl.coefficient, kl.where, kl.estimator) == (0.5, "reward", "k1")
    assert load_recipe(recipe).algorithm.advantage == "gae"


def test_the_table_is_not_changed_by_reading(tmp_path: Path) -> None:
    before = yaml.safe_dump(ONLINE)
    load_recipe(write(tmp_path, {**BASE, "method": "ppo"}), ["algorithm.kl.coefficient=0.5", "rollout.n=3"])
    assert yaml.safe_dump(ONLINE) == before


@pytest.mark.daily("grpo", "ppo", "remax")
@pytest.mark.parametrize("method", ONLINE)
def test_recipes_prints_what_a_method_sets(method: str) -> None:
    done = CliRunner().invoke(app, ["recipes", method])
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout) == {"method": method, **ONLINE[method]}


def test_recipes_lists_the_methods() -> None:
    said = CliRunner().invoke(app, ["recipes"]).stdout
    assert all(method in said for method in ONLINE)


@pytest.mark.parametrize("method", [*OFFLINE, *ONLINE])
def test_a_resolved_recipe_comes_back_equal(tmp_path: Path, method: str) -> None:
    words = ["model.lora.rank=3", "optim.lr=2e-5", "run.steps=7"]
    words += ["batch.prompts=12", "reward.format='a.*'"] if method in ONLINE else []
    plain = ONLINE.get(method, {}).get("algorithm", {}).get("loss") == "policy_gradient"
    words += ["batch.prompts_per_update=4"] if method in ONLINE and not plain else []
    words += ["critic.lr=3e-4", "critic.warmup=2", "critic.clip=null"] if method == "ppo" else []
    words += ["distill.teacher=t"] if method == "distill" else []
    recipe = load_recipe(write(tmp_path, {**BASE, **needs(method), "method": method}), words)
    text = dump_recipe(recipe)
    again = load_recipe(write(tmp_path, text))
    assert again == recipe
    assert dump_recipe(again) == text


def test_a_resolved_recipe_says_only_what_its_method_reads(tmp_path: Path) -> None:
    def sections(method: str) -> dict[str, Any]:
        return resolved(load_recipe(write(tmp_path, {**BASE, "method": method})))

    assert not {"rollout", "reward", "algorithm", "critic"} & set(sections("sft"))
    assert "prompts" not in sections("sft")["batch"]
    assert "critic" not in sections("grpo")
    assert "rows_per_update" not in sections("grpo")["batch"]
    assert sections("grpo")["batch"]["prompts_per_update"] == 32
    assert {"rollout", "reward", "algorithm", "critic"} <= set(sections("ppo"))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["rollout.stop=['###', '']"], "rollout.stop.1", "must not be empty"),
        (["rollout.stop_ids=[3, -1]"], "rollout.stop_ids.1", "must be at least 0"),
        (["batch.rows_per_update=8"], "batch.rows_per_update", "batch.prompts_per_update"),
        (["batch.prompts=12", "batch.prompts_per_update=5"], "batch.prompts_per_update", "use 4"),
        (["batch.prompts=8", "batch.prompts_per_update=16"], "batch.prompts_per_update", "use 8"),
        (["rollout.n=1"], "rollout.n", "2 or more"),
        (["rollout.top_p=0.9"], "rollout.top_p", "rollout.truncated_sampling=mask"),
        (["rollout.top_k=20"], "rollout.top_k", "rollout.truncated_sampling=mask"),
        (["rollout.min_p=0.1"], "rollout.min_p", "rollout.truncated_sampling=mask"),
        (["data.val=rows.jsonl"], "data.val", "val.questions"),
        (["val.questions=q.jsonl", "val.rules={a: gsm8k}"], "val.rules", "reward.rules"),
        (["data.overlong=truncate_right"], "data.overlong", "truncate_left"),
        (["algorithm.kl.where=none", "algorithm.kl.target=0.1"], "algorithm.kl.target", "algorithm.kl.where"),
        (["algorithm.kl.where=reward", "algorithm.kl.estimator=k3+"], "algorithm.kl.estimator", "remove the +"),
        (
            ["algorithm.rollout_correction.low=3"],
            "algorithm.rollout_correction.low",
            "algorithm.rollout_correction.high",
        ),
        (
            ["algorithm.rollout_correction.floor=3"],
            "algorithm.rollout_correction.floor",
            "algorithm.rollout_correction.cap",
        ),
        (
            ["algorithm.rollout_correction.reject=[{by: k2, low: 3, high: 1}]"],
            "algorithm.rollout_correction.reject.0.low",
            "its high",
        ),
        (
            ["algorithm.rollout_correction.rejected=zero"],
            "algorithm.rollout_correction.rejected",
            "nothing is rejected",
        ),
        (
            ["algorithm.rollout_correction.bypass=true", "algorithm.rollout_correction.weight=token"],
            "algorithm.rollout_correction.weight",
            "correct twice",
        ),
        (
            ["algorithm.rollout_correction.bypass=true", "algorithm.loss=policy_gradient"],
            "algorithm.rollout_correction.bypass",
            "importance",
        ),
        (["algorithm.kl.weighted=true"], "algorithm.kl.weighted", "k3+"),
        (["algorithm.gdpo_rewards={rule: 1.0}"], "algorithm.gdpo_rewards", "does not read it"),
        (["algorithm.advantage=gdpo", "algorithm.kl.where=reward"], "algorithm.kl.where", "only the total score"),
        (["algorithm.advantage=gdpo", "reward.clip=[-1, 1]"], "reward.clip", "only the total score"),
        (["algorithm.dynamic_sampling.metric=rule"], "algorithm.dynamic_sampling.metric", "max_gen_batches above 1"),
        (["reward.model_weights=[1.0]"], "reward.model_weights", "one weight per model"),
        (["reward.model=[]"], "reward.model", "empty"),
        (
            ["rollout.max_tokens=9", "algorithm.overlong.buffer=10"],
            "algorithm.overlong.buffer",
            "raise rollout.max_tokens",
        ),
        (["critic.lr=1e-3"], "critic", "method ppo"),
        (["method=ppo", "critic.warmup=5", "run.steps=5"], "critic.warmup", "none of the 5"),
        (
            ["method=ppo", "algorithm.dynamic_sampling.max_gen_batches=2"],
            "algorithm.dynamic_sampling.max_gen_batches",
            "group method",
        ),
        (["val.questions=q.jsonl", "val.n=4"], "val.n", "val.temperature"),
        (["data.response_key=answer"], "data.response_key", "RL schema"),
        (["data.messages_key=chat"], "data.messages_key", "RL schema"),
        (["data.text_key=body"], "data.text_key", "RL schema"),
        (["data.shape=messages"], "data.shape", "RL schema"),
        (["data.require_end=false"], "data.require_end", "remove it"),
        (["data.max_tokens=512"], "data.max_tokens", "data.max_prompt_tokens"),
        (["data.train=[a, {path: b, response_key: q}]"], "data.train.1.response_key", "RL schema"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_an_online_method_cannot_do(base: str, words: list[str], key: str, said: str) -> None:
    (problem,) = refused(base, *words)
    assert problem.where == key
    assert said in str(problem)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_stop_ids_outside_of_the_vocabulary_are_refused(online_file: Path, engine: str) -> None:
    """The tiny model has 259 tokens."""
    words = ["rollout.stop_ids=[3, 99999, 259]", f"rollout.engine={engine}"]
    with pytest.raises(Refusal) as refusal:
        prepare_online(load_recipe(str(online_file), words), Cpu(), 1, Console.silent())
    (problem,) = [one for one in refusal.value.problems if one.where == "rollout.stop_ids"]
    assert problem.code == "unknown-token"
    assert problem.why.startswith("99999, 259: ")
    assert "(0 to 258)" in problem.why
    prepare_online(load_recipe(str(online_file), ["rollout.stop_ids=[258]"]), Cpu(), 1, Console.silent())


def test_no_best_checkpoint_without_a_loss(base: str) -> None:
    (problem,) = refused(base, "checkpoint.keep_best=1")
    assert problem.where == "checkpoint.keep_best"
    assert "val/loss" in problem.why


def _turns(advantage: str) -> list[str]:
    """What an estimator that compares turns needs."""
    return ["rollout.environment=game.py:Game"] if estimator_row(advantage).turns else []


@pytest.mark.parametrize("advantage", [name for name in ESTIMATORS if estimator_row(name).groups])
def test_group_estimators_need_a_group(base: str, advantage: str) -> None:
    words = [f"algorithm.advantage={advantage}", *_turns(advantage)]
    (problem,) = refused(base, *words, "rollout.n=1")
    assert problem.where == "rollout.n"
    assert advantage in problem.why


@pytest.mark.parametrize("advantage", ["gae", "reinforce", "reinforce_pp", "remax", "flash_reinforce"])
def test_the_others_do_with_one_sample(base: str, advantage: str) -> None:
    assert load_recipe(base, [f"algorithm.advantage={advantage}", "rollout.n=1"]).rollout.n == 1


@pytest.mark.parametrize(
    ("word", "key", "said"),
    [
        ("rollout.n=4", "rollout.n", "does not read this key"),
        ("reward.function=f.py:f", "reward.function", "does not read this key"),
        ("algorithm.entropy=0.1", "algorithm.entropy", "does not read this key"),
        ("critic.lr=1", "critic.lr", "does not read this key"),
        ("batch.prompts=4", "batch.prompts", "batch.rows_per_update"),
        ("batch.prompts_per_update=4", "batch.prompts_per_update", "batch.rows_per_update"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens", "data.max_tokens"),
        ("val={questions: q, n: 3}", "val.n", "val.temperature"),
    ],
)
def test_what_an_offline_method_cannot_do(base: str, word: str, key: str, said: str) -> None:
    (problem,) = refused(base, "method=sft", word)
    assert problem.where == key
    assert said in str(problem)


def test_truncated_sampling_is_refused_with_the_reason_and_both_ways_out(base: str) -> None:
    (problem,) = refused(base, "rollout.top_k=20", "rollout.top_p=0.9")
    assert "the trainer would use the full distribution" in problem.why
    assert "ratio" in problem.why
    assert "ignore" in problem.remedy
    for choice in ("mask", "ignore"):
        assert (
            load_recipe(base, ["rollout.top_k=20", f"rollout.truncated_sampling={choice}"]).rollout.truncated_sampling
            == choice
        )


def test_all_problems_of_an_online_recipe_come_together(base: str) -> None:
    found = refused(base, "rollout.n=1", "rollout.top_p=0.5", "data.val=x", "critic.warmup=1", "rollout.temperature=0")
    assert keys(found) == {"rollout.n", "rollout.top_p", "data.val", "critic", "rollout.temperature"}


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("num_generations=8", "rollout.n"),
        ("f_alpha_divergence_coef=0.7", "preference.alpha, which is 1 minus TRL's value"),
        ("rollout.n_samples_per_prompt=8", "rollout.n"),
        ("max_completion_length=9", "rollout.max_tokens"),
        ("data.max_response_length=9", "rollout.max_tokens"),
        ("data.max_prompt_length=9", "data.max_prompt_tokens"),
        ("algorithm.adv_estimator=grpo", "algorithm.advantage"),
        ("clip_ratio_high=0.3", "algorithm.clip_high"),
        ("epsilon=0.2", "algorithm.clip_low"),
        ("loss_agg_mode=token-mean", "algorithm.aggregation"),
        ("beta=0.04", "preference.beta, or online algorithm.kl.coefficient"),
        ("algorithm.kl.kl_loss_coef=0.1", "algorithm.kl.coefficient"),
        ("ppo_epochs=2", "algorithm.epochs"),
        ("ppo_mini_batch_size=8", "batch.prompts_per_update"),
        ("entropy_coeff=0", "algorithm.entropy"),
        ("reward_funcs=f", "reward.function"),
    ],
)
def test_names_from_elsewhere_lead_to_ours(base: str, word: str, ours: str) -> None:
    (problem,) = refused(base, word)
    assert problem.remedy == f"did you mean {ours}?"


SEVERAL = [("batch.prompts_per_update=8", "batch.prompts_per_update"), ("algorithm.epochs=2", "algorithm.epochs")]


@pytest.mark.parametrize("method", ONLINE)
@pytest.mark.parametrize(("word", "where"), SEVERAL)
def test_a_loss_without_a_ratio_updates_once_a_step(tmp_path: Path, method: str, word: str, where: str) -> None:
    """Whatever the method: its own loss or another's decides."""
    recipe = write(tmp_path, {**BASE, **needs(method), "method": method})
    (problem,) = refused(recipe, "batch.prompts=16", word, "algorithm.loss=policy_gradient")
    assert problem.where == where
    assert "no ratio" in problem.why
    assert "algorithm.loss=clip" in problem.remedy
    assert load_recipe(recipe, ["batch.prompts=16", word, "algorithm.loss=clip"]).algorithm.loss == "clip"


@pytest.mark.parametrize("advantage", rows.ESTIMATORS)
def test_no_estimator_makes_up_for_the_ratio(base: str, advantage: str) -> None:
    words = [f"algorithm.advantage={advantage}", "algorithm.loss=policy_gradient", "rollout.n=4", *_turns(advantage)]
    (problem,) = refused(base, *words, "algorithm.epochs=2")
    assert problem.where == "algorithm.epochs"
    assert load_recipe(base, words).algorithm.epochs == 1


def test_losses_that_do_not_look_at_the_old_log_probabilities_are_the_ones_without_a_ratio() -> None:
    """By what they compute: another policy before gives another gradient, or it does not."""
    blind = []
    for name, loss in LOSSES.items():
        gradients = []
        for old in ([-1.0, -2.0], [-1.5, -1.2]):
            logprobs = torch.tensor([-1.05, -1.9], requires_grad=True)
            tokens = PolicyTokens(
                logprobs,
                torch.tensor(old),
                torch.tensor([1.0, -1.0]),
                torch.ones(2),
                torch.tensor([0, 1]),
                torch.zeros(2),
            )
            bounds = {"low": 0.9, "high": 9.0} if "low" in SETTINGS[name] else {}
            (gradient,) = torch.autograd.grad(loss(tokens, **{**SETTINGS[name], **bounds}).loss, logprobs)
            gradients.append(gradient.tolist())
        if gradients[0] == gradients[1]:
            blind.append(name)
    assert blind == [name for name, row in rows.LOSSES.items() if not row.ratio]


@pytest.mark.parametrize(("word", "where"), SEVERAL)
def test_on_policy_distillation_updates_once_a_step(tmp_path: Path, word: str, where: str) -> None:
    recipe = write(tmp_path, {**BASE, **needs("on_policy_distill"), "method": "on_policy_distill"})
    (problem,) = refused(recipe, "batch.prompts=16", word)
    assert problem.where == where
    assert "one update per step" in problem.remedy
    (problem,) = refused(write(tmp_path, {**BASE, "method": "on_policy_distill"}))
    why = "must be set, because on_policy_distill uses this model as the teacher"
    assert (problem.where, problem.why) == ("algorithm.kl.reference", why)


def test_every_name_has_a_row_and_a_function() -> None:
    assert list(rows.ESTIMATORS) == list(ESTIMATORS)
    assert list(rows.LOSSES) == list(LOSSES)
    assert {name for name, row in rows.LOSSES.items() if row.selection_keys is not None} == set(SELECTORS)
    for name, row in rows.LOSSES.items():
        assert set(row.keys) == set(inspect.signature(LOSSES[name]).parameters) - {"tokens"}
        assert {*row.keys.values(), *(row.selection_keys or {}).values()} <= set(Algorithm.model_fields)
