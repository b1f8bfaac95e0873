"""The online methods: each is a named set of defaults over the same keys. What a recipe says replaces them."""

from __future__ import annotations

from typing import Any

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
}


def with_method_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a recipe over the defaults of its method."""
    defaults = ONLINE.get(str(values.get("method")), {})
    return _over(defaults, values)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged
