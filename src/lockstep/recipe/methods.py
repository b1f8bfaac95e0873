"""The methods: each is a named set of defaults over the same keys. What a recipe says replaces them."""

from __future__ import annotations

from typing import Any

from lockstep.recipe.schema import Recipe

OFFLINE: dict[str, dict[str, Any]] = {
    "sft": {},
    # Ouyang et al. 2022 (arXiv 2203.02155).
    "rm": {},
    # Lightman et al. 2023 (arXiv 2305.20050), with the verdict as a word.
    "prm": {},
    # Rafailov et al. 2023 (arXiv 2305.18290).
    "dpo": {"optim": {"lr": 1e-6}, "preference": {"loss": "sigmoid"}},
    # Azar et al. 2023 (arXiv 2310.12036), on mean log-probabilities; `average: false` sums them.
    "ipo": {"optim": {"lr": 1e-6}, "preference": {"loss": "ipo", "average": True}},
    # Meng et al. 2024 (arXiv 2405.14734).
    "simpo": {"optim": {"lr": 1e-6}, "preference": {"loss": "simpo", "beta": 2.0, "gamma": 1.0}},
    # Hong et al. 2024 (arXiv 2403.07691): an odds ratio beside the likelihood of the chosen response.
    "orpo": {"optim": {"lr": 1e-6}, "preference": {"loss": "orpo", "beta": 0.1, "nll": 1.0}},
    # Xu et al. 2024 (arXiv 2401.08417).
    "cpo": {"optim": {"lr": 1e-6}, "preference": {"loss": "cpo", "beta": 0.1, "nll": 1.0}},
    # Ethayarajh et al. 2024 (arXiv 2402.01306).
    "kto": {"optim": {"lr": 1e-6}},
    # Hinton et al. 2015 (arXiv 1503.02531); divergences of Agarwal et al. 2023 (arXiv 2306.13649).
    "distill": {},
}

ONLINE: dict[str, dict[str, Any]] = {
    # Schulman et al. 2017 (arXiv 1707.06347), with a critic; the divergence is a part of the reward, as in RLHF.
    "ppo": {
        "rollout": {"n": 1},
        "algorithm": {"advantage": "gae", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001}},
    },
    # Shao et al. 2024 (arXiv 2402.03300): group-normalised rewards, divergence in the loss.
    "grpo": {"algorithm": {"advantage": "grpo", "kl": {"where": "loss", "coefficient": 0.001}}},
    # Liu et al. 2025 (arXiv 2503.20783): no division by the group's deviation nor by a response's length.
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"}},
    # Williams 1992: return to go, no baseline.
    "reinforce": {"rollout": {"n": 1}, "algorithm": {"advantage": "reinforce", "loss": "policy_gradient"}},
    # Hu 2025 (arXiv 2501.03262): PPO's clip without a critic, k1 divergence in the reward, global whitening.
    "reinforce_pp": {
        "rollout": {"n": 1},
        "algorithm": {"advantage": "reinforce_pp", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001}},
    },
    "reinforce_pp_baseline": {
        "algorithm": {"advantage": "reinforce_pp_baseline", "kl": {"where": "loss", "estimator": "k2"}}
    },
    # Ahmadian et al. 2024 (arXiv 2402.14740): the mean of the other samples as baseline.
    "rloo": {
        "algorithm": {
            "advantage": "rloo",
            "loss": "policy_gradient",
            "aggregation": "seq_mean_token_sum",
            "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
        }
    },
    # Li et al. 2023 (arXiv 2310.10505): the greedy response as baseline.
    "remax": {
        "rollout": {"n": 1},
        "algorithm": {
            "advantage": "remax",
            "loss": "policy_gradient",
            "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
        },
    },
    # Hao et al. 2025 (arXiv 2505.23585): the length-weighted baseline of least variance, exactly on policy.
    "opo": {"algorithm": {"advantage": "opo", "loss": "policy_gradient"}},
    # Chu et al. 2025 (arXiv 2504.02546).
    "gpg": {"algorithm": {"advantage": "gpg", "loss": "policy_gradient"}},
    # Zheng et al. 2025 (arXiv 2507.18071): the ratio of a whole sequence, with tiny bounds.
    "gspo": {
        "algorithm": {
            "advantage": "grpo",
            "loss": "gspo",
            "aggregation": "seq_mean_token_mean",
            "clip_low": 0.0003,
            "clip_high": 0.0004,
        }
    },
    # Yu et al. 2025 (arXiv 2503.14476): clip higher, dynamic sampling, overlong shaping (set its buffer), token mean.
    "dapo": {"algorithm": {"advantage": "grpo", "clip_high": 0.28, "dynamic_sampling": {"rounds": 3}}},
    # MiniMax 2025 (arXiv 2506.13585): the clipped ratio as a constant weight; only the upper bound is used.
    "cispo": {"algorithm": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    # Agarwal et al. 2023 (arXiv 2306.13649), Lu 2025 (Thinking Machines): the student's own responses, each token
    # rewarded by how much likelier the teacher finds it. No reward besides; `algorithm.kl.reference` is the teacher.
    "on_policy_distill": {
        "rollout": {"n": 1},
        "reward": {"weights": {"rule": 0.0}},
        "algorithm": {
            "advantage": "reinforce",
            "gamma": 0.0,
            "loss": "policy_gradient",
            "kl": {"where": "reward", "estimator": "k1", "coefficient": 1.0},
        },
    },
}

# Groups of keys that only some methods read.
_ONLINE_READS = ("rollout", "reward", "algorithm", "critic")
_PAIRS = ("dpo", "ipo", "simpo", "orpo", "cpo")
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ONLINE, _ONLINE_READS),
    "sft": (),
    "rm": ("rm",),
    "prm": ("prm",),
    **dict.fromkeys((*_PAIRS, "kto"), ("preference",)),
    "distill": ("distill",),
}
OPTIONAL_SECTIONS = tuple(dict.fromkeys(section for sections in READS.values() for section in sections))
# Keys of `preference` by loss; those of KTO, which has no such choice, by its name.
_COMMON = ("loss", "beta", "nll")
_REFERENCED = (*_COMMON, "average", "reference", "precompute")
PREFERENCE_READS: dict[str, tuple[str, ...]] = {
    "sigmoid": (*_REFERENCED, "label_smoothing"),
    "robust": (*_REFERENCED, "label_smoothing"),
    "ipo": _REFERENCED,
    "hinge": _REFERENCED,
    "simpo": (*_COMMON, "gamma", "label_smoothing"),
    "cpo": (*_COMMON, "average", "label_smoothing"),
    "orpo": _COMMON,
    "kto": ("beta", "reference", "reference_free", "desirable", "undesirable"),
}


def preference_reads(recipe: Recipe) -> tuple[str, ...]:
    """The keys of `preference` that the recipe's method reads."""
    return PREFERENCE_READS["kto" if recipe.method == "kto" else recipe.preference.loss]


def reference_kind(recipe: Recipe) -> str:
    """How the run has its reference: `none`, the policy without its `adapter`, a `model` beside it, or `disk`."""
    if recipe.method in ONLINE:
        used, folder, precompute = recipe.algorithm.kl.where != "none", recipe.algorithm.kl.reference, False
    elif "preference" in READS[recipe.method]:
        settings = recipe.preference
        used = "reference" in preference_reads(recipe) and not settings.reference_free
        folder, precompute = settings.reference, settings.precompute
    else:
        return "none"
    if not used:
        return "none"
    if precompute:
        return "disk"
    return "adapter" if recipe.model.lora is not None and folder is None else "model"


def reference_folder(recipe: Recipe) -> str:
    """The folder of the reference, which is the policy's own unless the recipe names another."""
    named = recipe.algorithm.kl.reference if recipe.method in ONLINE else recipe.preference.reference
    return named or recipe.model.path


def with_method_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a recipe over the defaults of its method."""
    defaults = {**OFFLINE, **ONLINE}.get(str(values.get("method", "sft")), {})
    return over(defaults, values)


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Values over others; groups of keys are merged."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = over(below[key], above[key])
    return merged
