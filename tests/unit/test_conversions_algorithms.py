"""Algorithms of verl and OpenRLHF as keys of a recipe: estimators, losses, resampling, corrections of rollouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.algorithms.correction import Band, correct
from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe import Recipe

A, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
GRPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo", f"{R}.n=4")
PPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "critic.model.path=c")
DOTTED = ("--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--reward.model_name_or_path", "rm")
IS = "--algo.advantage.is_correction"
OVERLONG = [
    "algorithm.filter_groups.enable=True",
    "reward_model.reward_manager=dapo",
    *(
        f"+reward_model.reward_kwargs.overlong_buffer_cfg.{word}"
        for word in ("enable=True", "len=8", "penalty_factor=1")
    ),
]


def at(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for name in key.split("."):
        found = getattr(found, name)
    return [band.model_dump(exclude_defaults=True) for band in found] if key.endswith(".reject") else found


def outcome_of(done: Conversion, key: str) -> tuple[str, str]:
    (found,) = [found for found in done.outcomes if found.key == key]
    return found.outcome, found.note


@pytest.mark.daily(every=4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["algorithm.adv_estimator=optimal_token_baseline", f"{A}.calculate_sum_pi_squared=True"],
            {"advantage": "optimal_token_baseline", "loss": "clip"},
        ),
        (["algorithm.adv_estimator=tir_optimal_token_baseline"], {"advantage": "optimal_token_baseline"}),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "+algorithm.gdpo_reward_keys=[score,format]",
                "+algorithm.gdpo_reward_weights=[1,0.5]",
                "custom_reward_function.path=r.py",
            ],
            {"advantage": "gdpo", "gdpo_rewards": {"function": 1.0, "function/format": 0.5}},
        ),
        (
            [f"{A}.policy_loss.loss_mode=dppo_tv", f"{A}.clip_ratio_high=0.15", f"{A}.clip_ratio_c=10"],
            {"loss": "dppo_tv", "clip_high": 0.15, "ratio_cap": 10.0},
        ),
        ([f"{A}.policy_loss.loss_mode=dppo_kl"], {"loss": "dppo_kl", "ratio_cap": 3.0}),
        ([f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0.3"], {"loss": "dro", "dro_beta": 0.3}),
        ([f"{A}.loss_agg_mode=token-sum"], {"aggregation": "token_sum"}),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"],
            # verl's default of max_num_gen_batches, 0, has no limit.
            {"dynamic_sampling.metric": None, "dynamic_sampling.max_gen_batches": 10},
        ),
        (
            [
                "algorithm.filter_groups.enable=True",
                "algorithm.filter_groups.metric=acc",
                "custom_reward_function.path=r.py",
            ],
            {"dynamic_sampling.metric": "function/acc"},
        ),
        # verl's dapo manager filters groups by the score without the overlong penalty.
        ([*OVERLONG, "algorithm.filter_groups.metric=acc"], {"dynamic_sampling.metric": "rule", "overlong.buffer": 8}),
        ([*OVERLONG, "algorithm.filter_groups.metric=seq_reward"], {"dynamic_sampling.metric": None}),
        (
            [*OVERLONG, "algorithm.filter_groups.metric=score", "custom_reward_function.path=r.py"],
            {"dynamic_sampling.metric": "function"},
        ),
        # No other manager reads the buffer.
        ([*OVERLONG, "reward_model.reward_manager=naive"], {"overlong.buffer": 0}),
        ([*OVERLONG, "reward_model.enable=True", "reward_model.model.path=m"], {"overlong.buffer": 0}),
        ([f"{C}.rollout_is=sequence", f"{C}.rollout_is_batch_normalize=true"], {"rollout_correction.normalize": True}),
        # IcePop: the weight is 0 out of the band, which still counts in the mean.
        (
            [f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=0.5_5.0"],
            {
                "rollout_correction.weight": "token",
                "rollout_correction.floor": 0.5,
                "rollout_correction.cap": 5.0,
                "rollout_correction.outside": "zero",
                "rollout_correction.reject": [],
            },
        ),
        # GMPO's weight is one of the response.
        (
            [f"{C}.rollout_is=token", f"{A}.policy_loss.loss_mode=geo_mean"],
            {"rollout_correction.weight": "geometric_mean", "rollout_correction.outside": "clip"},
        ),
        (["algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False"], {"divide_by_std": False}),
        # verl's estimator does not read the key.
        (
            ["algorithm.adv_estimator=grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo=False"],
            {"advantage": "grpo"},
        ),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], {"advantage": "remax", "gamma": 1.0}),
        ([f"{R}.n=1"], {"advantage": "grpo", "lone_response": "score"}),
        # Without the engine's log-probs verl corrects nothing.
        ([f"{C}.rollout_is=token", f"{R}.calculate_log_probs=False"], {"rollout_correction.weight": "none"}),
        # One number for Hydra, and so for verl.
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=0.5_5"], {"rollout_correction.cap": 0.55}),
        (
            [f"{C}.rollout_rs='token_k1,seq_max_k2'", f"{C}.rollout_rs_threshold='0.5_1.6,2.5'"],
            {
                "rollout_correction.reject": [
                    {"by": "ratio", "low": 0.625, "high": 2.0},
                    {"over": "max", "by": "k2", "high": 2.5},
                ],
                "rollout_correction.rejected": "counted",
                "rollout_correction.mask_first": True,
                "rollout_correction.weight": "none",
            },
        ),
        (
            [f"{C}.rollout_rs=token_k2", f"{C}.rollout_rs_threshold=2", "trainer.use_v1=False"],
            {"rollout_correction.rejected": "left_out", "rollout_correction.mask_first": True},
        ),
        (
            [f"{C}.rollout_rs=seq_mean_k1", f"{C}.rollout_rs_threshold=2"],
            {"rollout_correction.reject": [{"over": "mean", "by": "ratio", "low": 0.5, "high": 2.0}]},
        ),
        (
            [f"{C}.bypass_mode=true", f"{A}.policy_loss.loss_mode=gspo", f"{C}.rollout_is=token"],
            {
                "loss": "clip",
                "rollout_correction.bypass": True,
                "rollout_correction.weight": "none",
                "aggregation": "token_mean",
            },
        ),
        (
            [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", f"{C}.rollout_is=sequence"],
            {"loss": "importance", "ratio_of": "sequence", "ratio_cap": 2.0, "rollout_correction.bypass": True},
        ),
        (
            [
                f"{C}.bypass_mode=true",
                f"{C}.loss_type=reinforce",
                f"{C}.rollout_is=sequence",
                f"{C}.rollout_rs=token_k2",
                f"{C}.rollout_rs_threshold=2",
            ],
            {
                "ratio_of": "response",
                "rollout_correction.rejected": "zero",
                "rollout_correction.mask_first": False,
            },
        ),
    ],
)
def test_verls_algorithms(words: list[str], expected: dict[str, Any]) -> None:
    recipe = checked(convert_verl("main_ppo", [*GRPO, *words]))
    assert {key: at(recipe, f"algorithm.{key}") for key in expected} == expected


def test_resampling_is_with_gae_only() -> None:
    words = ["algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=3"]
    recipe = checked(convert_verl("main_ppo", [*PPO, *words]))
    assert (recipe.algorithm.pf_ppo.method, recipe.algorithm.pf_ppo.power) == ("pow", 3.0)
    done = convert_verl("main_ppo", [*GRPO, *words])
    assert checked(done).algorithm.pf_ppo.method == "none"
    assert outcome_of(done, "algorithm.use_pf_ppo") == ("ignored", "verl resamples only with gae")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([f"{A}.policy_loss.loss_mode=dro"], f"{A}.policy_loss.dro_beta"),
        (["algorithm.adv_estimator=gdpo"], "algorithm.gdpo_reward_keys"),
        ([f"{C}.rollout_rs=token_k4", f"{C}.rollout_rs_threshold=2"], f"{C}.rollout_rs_threshold"),
        ([f"{C}.rollout_rs=token_k1"], f"{C}.rollout_rs_threshold"),
        ([f"{C}.rollout_rs=token_k3", f"{C}.rollout_rs_threshold=0.5_2.0"], f"{C}.rollout_rs_threshold"),
        (
            [
                f"{C}.bypass_mode=true",
                f"{C}.loss_type=reinforce",
                f"{C}.rollout_is=token",
                f"{C}.rollout_is_batch_normalize=true",
            ],
            f"{C}.rollout_is_batch_normalize",
        ),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=100"], f"{A}.loss_scale_factor"),
        ([f"{C}.rollout_is=group"], f"{C}.rollout_is"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=3.0_2.0"], f"{C}.rollout_is_threshold"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=0"], f"{C}.rollout_is_threshold"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=inf"], f"{C}.rollout_is_threshold"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=1.0_2.0_3.0"], f"{C}.rollout_is_threshold"),
        (
            [
                f"{C}.rollout_rs=token_k1",
                f"{C}.rollout_rs_threshold=2",
                "algorithm.adv_estimator=optimal_token_baseline",
            ],
            "algorithm.adv_estimator",
        ),
        ([f"{C}.bypass_mode=true", "algorithm.adv_estimator=tir_optimal_token_baseline"], f"{C}.bypass_mode"),
        ([f"{C}.bypass_mode=true", f"{R}.calculate_log_probs=False"], f"{R}.calculate_log_probs"),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", f"{R}.multi_turn.tool_config_path=t.yaml"],
            "algorithm.adv_estimator",
        ),
        (
            [
                f"{C}.bypass_mode=true",
                f"{C}.rollout_rs=token_k2",
                f"{C}.rollout_rs_threshold=2",
                f"{A}.loss_agg_mode=seq-mean-token-mean",
            ],
            f"{A}.loss_agg_mode",
        ),
        (
            [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", "algorithm.use_kl_in_reward=True"],
            "algorithm.use_kl_in_reward",
        ),
        (
            [
                f"{C}.rollout_rs=token_k2",
                f"{C}.rollout_rs_threshold=2",
                f"{A}.policy_loss.loss_mode=sapo",
                "trainer.use_v1=False",
            ],
            f"{C}.rollout_rs",
        ),
        (
            [
                f"{C}.rollout_is=token",
                f"{A}.policy_loss.loss_mode=geo_mean",
                "algorithm.adv_estimator=optimal_token_baseline",
            ],
            f"{C}.rollout_is",
        ),
        (
            [
                f"{C}.bypass_mode=true",
                f"{C}.loss_type=reinforce",
                f"{C}.rollout_is=token",
                f"{C}.rollout_is_threshold=0.5_2.0",
            ],
            f"{C}.rollout_is_threshold",
        ),
        (
            ["algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True", "algorithm.kl_ctrl.type=adaptive"],
            "algorithm.kl_ctrl.type",
        ),
    ],
)
def test_what_of_verls_is_still_refused(words: list[str], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        checked(convert_verl("main_ppo", [*GRPO, *words]))
    assert [problem.where for problem in refused.value.problems] == [where]


@pytest.mark.parametrize("bounds", ["0.6_1.6", "2.0"])
def test_their_k1_is_the_ratio_the_other_way_round(bounds: str) -> None:
    """verl keeps a token iff log(lower) <= -log r <= log(upper); one number is the upper bound and its reciprocal."""
    words = [f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold={bounds}"]
    (band,) = checked(convert_verl("main_ppo", [*GRPO, *words])).algorithm.rollout_correction.reject
    low, high = (0.6, 1.6) if "_" in bounds else (0.5, 2.0)
    log_ratio = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    theirs = [float(math.log(low) <= -d <= math.log(high)) for d in log_ratio.tolist()]
    found = correct(
        log_ratio - 3,
        torch.full_like(log_ratio, -3.0),
        torch.arange(61),
        61,
        weight="none",
        cap=None,
        mask="none",
        low=0.5,
        high=2.0,
        reject=[Band(**band.model_dump())],
    )
    assert found.keep_K.tolist() == theirs
    assert 0 < sum(theirs) < 61


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--algo.advantage.estimator", "flash_reinforce"],
            {"advantage": "flash_reinforce", "whiten.over": "none", "loss": "clip", "gamma": 1.0},
        ),
        (
            ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.unbiased_gradient"],
            {"kl.estimator": "k3+", "kl.weighted": True},
        ),
        # 0.11.2 no longer whitens rloo.
        (
            ["--algo.advantage.estimator", "rloo", "--rollout.n_samples_per_prompt", "2"],
            {"advantage": "rloo", "whiten.over": "none"},
        ),
        (
            [f"{IS}_level", "token", f"{IS}_mode", "clip"],
            {
                "rollout_correction.weight": "token",
                "rollout_correction.floor": 0.5,
                "rollout_correction.cap": 5.0,
                "rollout_correction.reject": [],
            },
        ),
        (
            [f"{IS}_level", "token"],
            {
                "rollout_correction.cap": None,
                "rollout_correction.reject": [{"by": "ratio", "low": 0.5, "high": 5.0}],
                "rollout_correction.rejected": "zero",
            },
        ),
        (
            [f"{IS}_level", "seq", f"{IS}_gating", "binary_kl", f"{IS}_threshold", "0.01"],
            {
                "rollout_correction.reject": [{"over": "mean", "by": "binary_kl", "high": 0.01}],
                "rollout_correction.weight": "token",
            },
        ),
        (
            [f"{IS}_enable", f"{IS}_type", "seq-mask-tis", f"{IS}_threshold", "0.99", "1.01"],
            {"rollout_correction.reject": [{"over": "mean", "by": "ratio", "low": 0.99, "high": 1.01}]},
        ),
        ([f"{IS}_enable"], {"rollout_correction.floor": 0.5, "rollout_correction.cap": 5.0}),
        (
            [f"{IS}_level", "seq", "--actor.policy_loss_type", "gspo"],
            {"rollout_correction.bypass": True, "loss": "gspo"},
        ),
    ],
)
def test_openrlhfs_algorithms(words: list[str], expected: dict[str, Any]) -> None:
    recipe = checked(convert_openrlhf("train_ppo_ray", [*DOTTED, *words]))
    assert {key: at(recipe, f"algorithm.{key}") for key in expected} == expected


def test_openrlhfs_corrections_that_are_none() -> None:
    for words, where in (
        ([f"{IS}_level", "seq", f"{IS}_mode", "clip"], f"{IS}_mode"),
        ([f"{IS}_level", "token", f"{IS}_threshold", "5", "0.5"], f"{IS}_threshold"),
        ([f"{IS}_level", "token", f"{IS}_threshold", "0"], f"{IS}_threshold"),
    ):
        with pytest.raises(Refusal) as refused:
            checked(convert_openrlhf("train_ppo_ray", [*DOTTED, *words]))
        assert [problem.where for problem in refused.value.problems] == [where]
    flat = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm", "--n_samples_per_prompt", "2")
    recipe = checked(convert_openrlhf("train_ppo_ray", [*flat, "--advantage_estimator", "rloo"]))
    assert recipe.algorithm.whiten.over == "step"  # 0.7.5 does


def test_the_divisor_of_sums_is_the_longest_response() -> None:
    """verl's `loss_scale_factor` is either absent, which is remarked, or must be that number."""
    scale, mode = f"{A}.loss_scale_factor", f"{A}.loss_agg_mode"
    sum_norm = f"{mode}=seq-mean-token-sum-norm"
    done = convert_verl("main_ppo", [*GRPO, sum_norm], version="0.4")
    assert checked(done).algorithm.aggregation == "seq_mean_token_sum_norm"
    assert "larger by the number of sequences" in outcome_of(done, mode)[1]
    same = convert_verl("main_ppo", [*GRPO, sum_norm, "data.max_response_length=64", f"+{scale}=64"])
    assert checked(same).algorithm.aggregation == "seq_mean_token_sum_norm"
    assert outcome_of(same, mode)[1] == ""
    assert outcome_of(same, scale) == ("ignored", "lockstep divides the token sums by data.max_response_length")
    # Without sums it has no effect, whatever the number.
    other = convert_verl("main_ppo", [*GRPO, f"+{scale}=7"])
    assert checked(other).algorithm.aggregation == "token_mean"
    assert outcome_of(other, scale)[0] == "ignored"
    assert "only with seq-mean-token-sum-norm" in outcome_of(other, scale)[1]


def test_a_kl_term_in_both_places() -> None:
    words = ["algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.02"]
    recipe = checked(convert_verl("main_ppo", [*GRPO, *words, "algorithm.kl_ctrl.kl_coef=0.03"]))
    kl = recipe.algorithm.kl
    assert (kl.where, kl.coefficient, kl.reward_coefficient) == ("loss", 0.02, 0.03)
    adaptive = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=500"]
    kl = checked(convert_verl("main_ppo", [*GRPO, *adaptive])).algorithm.kl
    assert (kl.where, kl.target, kl.horizon) == ("reward", 0.1, 500)
    none = checked(convert_verl("main_ppo", [*GRPO, "algorithm.kl_ctrl.kl_coef=0.03"])).algorithm.kl
    assert none.where == "none"


def test_an_unknown_loss_of_openrlhf_is_refused_alone() -> None:
    flat = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm", "--gamma", "0.8")
    assert convert_openrlhf("train_ppo_ray", flat).recipe["algorithm.gamma"].value == 0.8
    done = convert_openrlhf("train_ppo_ray", [*flat, "--policy_loss_type", "new"])
    assert [problem.where for problem in done.problems] == ["--policy_loss_type"]
    # The terms of the loss are not converted without it.
    assert "algorithm.gamma" not in done.recipe


def test_one_bound_is_for_every_criterion() -> None:
    words = [f"{C}.rollout_rs='token_k1,seq_max_k2'", f"{C}.rollout_rs_threshold=2"]
    recipe = checked(convert_verl("main_ppo", [*GRPO, *words]))
    assert at(recipe, "algorithm.rollout_correction.reject") == [
        {"by": "ratio", "low": 0.5, "high": 2.0},
        {"over": "max", "by": "k2", "high": 2.0},
    ]
    with pytest.raises(Refusal, match="neither one bound nor one for each"):
        checked(convert_verl("main_ppo", [*GRPO, words[0], f"{C}.rollout_rs_threshold='1,2,3'"]))


def test_rewards_of_gdpo_count_alike_without_weights() -> None:
    words = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[score,format]"]
    recipe = checked(convert_verl("main_ppo", [*GRPO, *words, "custom_reward_function.path=r.py"]))
    assert recipe.algorithm.gdpo_rewards == {"function": 1.0, "function/format": 1.0}


def test_the_loss_that_bypass_mode_reads() -> None:
    mode, kind = f"{A}.policy_loss.loss_mode", f"{C}.loss_type"
    done = convert_verl("main_ppo", [*GRPO, f"{C}.bypass_mode=true", f"{mode}=gspo"])
    assert outcome_of(done, mode) == ("ignored", "with bypass_mode, loss_type sets the loss")
    done = convert_verl("main_ppo", [*GRPO, f"{kind}=reinforce"])
    assert checked(done).algorithm.loss == "clip"
    assert outcome_of(done, kind) == ("ignored", "verl reads this key only with bypass_mode")
    one_update = ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=64"]
    plain = convert_verl("main_ppo", [*GRPO, *one_update, f"{C}.bypass_mode=true", f"{kind}=reinforce"])
    recipe = checked(plain)
    assert (recipe.algorithm.loss, recipe.algorithm.rollout_correction.bypass) == ("policy_gradient", False)
    assert outcome_of(plain, f"{C}.bypass_mode")[0] == "mapped"


def early(*words: str) -> Recipe:
    """The recipe of a command for verl 0.3."""
    return checked(convert_verl("main_ppo", [*GRPO, *words], (), "0.3"))


def test_verl_before_0_4_has_the_kl_penalty_in_the_reward_unless_the_loss_has_it() -> None:
    """As verl 0.3.0: `if not actor.use_kl_loss: apply_kl_penalty(...)`; there is no use_kl_in_reward."""
    algorithm = early("algorithm.kl_ctrl.kl_coef=0.02").algorithm
    assert (algorithm.kl.where, algorithm.kl.coefficient, algorithm.kl.estimator) == ("reward", 0.02, "k1")
    assert early(f"{A}.use_kl_loss=True").algorithm.kl.where == "loss"
    newer = checked(convert_verl("main_ppo", [*GRPO, "algorithm.kl_ctrl.kl_coef=0.02"], (), "0.4"))
    assert newer.algorithm.kl.where == "none"


def test_verl_before_0_4_clips_by_clip_ratio_alone() -> None:
    """As verl 0.3.0's compute_policy_loss: one clip range on both sides, and no dual clip."""
    algorithm = early(f"{A}.clip_ratio=0.1").algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.1, 0.1, None)
    newer = checked(convert_verl("main_ppo", [*GRPO, f"{A}.clip_ratio=0.1"], (), "0.4")).algorithm
    assert (newer.clip_low, newer.clip_high, newer.dual_clip) == (0.2, 0.2, 3.0)
