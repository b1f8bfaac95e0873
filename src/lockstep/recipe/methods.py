"""The training methods. A method is a named set of default values of recipe keys; values in the recipe override them.

An online method consists of its defaults only. An offline method also lists the keys it reads; its loss is in
`methods/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.recipe.renamed_keys import stored_recipe

# For each kind of training rows, the keys of `data` that contain column names.
SUPERVISED_COLUMNS = ("shape", "messages_key", "prompt_key", "response_key", "text_key", "turns", "train_roles")
PAIR_COLUMNS = ("messages_key", "prompt_key", "chosen_key", "rejected_key", "responses_key", "scores_key")
JUDGED_COLUMNS = ("messages_key", "prompt_key", "chosen_key", "rejected_key", "response_key", "label_key")
STEP_COLUMNS = ("messages_key", "prompt_key", "text_key", "steps_key", "label_key")


@dataclass(frozen=True)
class OfflineRow:
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    """Groups of recipe keys that this method reads in addition to the common groups."""
    columns: tuple[str, ...] = SUPERVISED_COLUMNS
    compares: bool = False
    """Whether a row has two or more sequences, which must be in the same micro-batch."""
    judges: bool = False
    """Whether the trained model scores responses and cannot generate, as a reward model does."""
    preference: str | None = None
    """The entry of PREFERENCE_READS for a method with a fixed loss, or None if `preference.loss` selects the entry."""


def _pairs(**preference: Any) -> OfflineRow:
    return OfflineRow(
        defaults={"optim": {"lr": 1e-6}, "preference": preference},
        sections=("preference",),
        columns=PAIR_COLUMNS,
        compares=True,
    )


OFFLINE: dict[str, OfflineRow] = {
    "sft": OfflineRow(),
    # Ouyang et al. 2022 (arXiv 2203.02155).
    "rm": OfflineRow(sections=("rm",), columns=(*PAIR_COLUMNS, "margin_key"), compares=True, judges=True),
    # Lightman et al. 2023 (arXiv 2305.20050), with the label as a token.
    "prm": OfflineRow(sections=("prm",), columns=STEP_COLUMNS, judges=True),
    # Rafailov et al. 2023 (arXiv 2305.18290).
    "dpo": _pairs(loss="sigmoid"),
    # Azar et al. 2023 (arXiv 2310.12036), on mean log-probabilities, or on their sums with `average: false`.
    "ipo": _pairs(loss="ipo", average=True),
    # Meng et al. 2024 (arXiv 2405.14734).
    "simpo": _pairs(loss="simpo", beta=2.0, gamma=1.0),
    # Hong et al. 2024 (arXiv 2403.07691): an odds ratio plus the likelihood of the chosen response.
    "orpo": _pairs(loss="orpo", beta=0.1, nll=1.0),
    # Xu et al. 2024 (arXiv 2401.08417).
    "cpo": _pairs(loss="cpo", beta=0.1, nll=1.0),
    # Ethayarajh et al. 2024 (arXiv 2402.01306).
    "kto": OfflineRow(
        defaults={"optim": {"lr": 1e-6}},
        sections=("preference",),
        columns=JUDGED_COLUMNS,
        preference="kto",
    ),
    # Hinton et al. 2015 (arXiv 1503.02531); divergences of Agarwal et al. 2023 (arXiv 2306.13649).
    "distill": OfflineRow(sections=("distill",)),
}

ONLINE: dict[str, dict[str, Any]] = {
    # Schulman et al. 2017 (arXiv 1707.06347), with a critic; the KL penalty is part of the reward, as in RLHF.
    "ppo": {
        "rollout": {"n": 1},
        "algorithm": {"advantage": "gae", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001}},
    },
    # Shao et al. 2024 (arXiv 2402.03300): the advantage is the group-normalised reward; the KL penalty is in the loss.
    "grpo": {"algorithm": {"advantage": "grpo", "kl": {"where": "loss", "coefficient": 0.001}}},
    # Liu et al. 2025 (arXiv 2503.20783) do not divide by the standard deviation of the group and the response length.
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"}},
    # Williams 1992: a token's advantage is the sum of the rewards after it, without a baseline.
    "reinforce": {"rollout": {"n": 1}, "algorithm": {"advantage": "reinforce", "loss": "policy_gradient"}},
    # Hu 2025 (arXiv 2501.03262): PPO's clipped loss without a critic, a k1 KL penalty in the reward, advantages
    # whitened over the batch.
    "reinforce_pp": {
        "rollout": {"n": 1},
        "algorithm": {"advantage": "reinforce_pp", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001}},
    },
    "reinforce_pp_baseline": {
        "algorithm": {"advantage": "reinforce_pp_baseline", "kl": {"where": "loss", "estimator": "k2"}}
    },
    # Ahmadian et al. 2024 (arXiv 2402.14740): the baseline is the mean reward of the other responses to the same
    # prompt.
    "rloo": {
        "algorithm": {
            "advantage": "rloo",
            "loss": "policy_gradient",
            "aggregation": "seq_mean_token_sum",
            "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
        }
    },
    # Li et al. 2023 (arXiv 2310.10505): the baseline is the reward of the greedy response.
    "remax": {
        "rollout": {"n": 1},
        "algorithm": {
            "advantage": "remax",
            "loss": "policy_gradient",
            "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
        },
    },
    # Hao et al. 2025 (arXiv 2505.23585): the length-weighted baseline with the least variance; every update is on
    # policy.
    "opo": {"algorithm": {"advantage": "opo", "loss": "policy_gradient"}},
    # Chu et al. 2025 (arXiv 2504.02546).
    "gpg": {"algorithm": {"advantage": "gpg", "loss": "policy_gradient"}},
    # Zheng et al. 2025 (arXiv 2507.18071): one importance ratio per sequence, with tight clip bounds.
    "gspo": {
        "algorithm": {
            "advantage": "grpo",
            "loss": "gspo",
            "aggregation": "seq_mean_token_mean",
            "clip_low": 0.0003,
            "clip_high": 0.0004,
        }
    },
    # Yu et al. 2025 (arXiv 2503.14476): clip-higher, dynamic sampling, token mean, and overlong shaping if its buffer
    # is set.
    "dapo": {"algorithm": {"advantage": "grpo", "clip_high": 0.28, "dynamic_sampling": {"max_gen_batches": 3}}},
    # MiniMax 2025 (arXiv 2506.13585): the clipped ratio is a constant weight of the gradient; only the upper bound
    # takes effect.
    "cispo": {"algorithm": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    # Agarwal et al. 2023 (arXiv 2306.13649), Lu 2025 (Thinking Machines): the student generates, and the reward of a
    # token is its log-ratio of teacher to student. On-policy distillation uses no other reward, and
    # `algorithm.kl.reference` is the teacher.
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
_ONLINE_SECTIONS = ("rollout", "reward", "algorithm", "critic")
OPTIONAL_SECTIONS = tuple(
    dict.fromkeys([*_ONLINE_SECTIONS, *(section for row in OFFLINE.values() for section in row.sections)])
)
# Keys of `preference` that each loss reads. KTO has a fixed loss, so its entry has the name of the method.
_COMMON = ("loss", "beta", "nll")
_RANKED = (*_COMMON, "reference", "precompute", "ld_alpha")
_REFERENCED = (*_RANKED, "average")
_DIVERGENT = (*_REFERENCED, "divergence", "alpha")
PREFERENCE_READS: dict[str, tuple[str, ...]] = {
    "sigmoid": (*_DIVERGENT, "label_smoothing"),
    "robust": (*_DIVERGENT, "label_smoothing"),
    "ipo": _DIVERGENT,
    "hinge": _DIVERGENT,
    "exo_pair": (*_DIVERGENT, "label_smoothing"),
    "discopop": (*_DIVERGENT, "discopop_tau"),
    "nca_pair": _REFERENCED,
    "bco_pair": _REFERENCED,
    "sppo_hard": _REFERENCED,
    "apo_zero": _REFERENCED,
    "apo_down": _REFERENCED,
    "aot": (*_RANKED, "label_smoothing"),
    "aot_unpaired": (*_RANKED, "label_smoothing"),
    "simpo": (*_COMMON, "gamma", "label_smoothing"),
    "cpo": (*_COMMON, "average", "label_smoothing"),
    "orpo": _COMMON,
    "kto": ("beta", "reference", "reference_free", "desirable", "undesirable"),
}


def sections_read(method: str) -> tuple[str, ...]:
    return _ONLINE_SECTIONS if method in ONLINE else OFFLINE[method].sections


def with_method_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Merges the values of a recipe over the defaults of its method."""
    return over(method_defaults(str(values.get("method", "sft"))), values)


def method_defaults(name: str) -> dict[str, Any]:
    """Returns the defaults of a method; empty for an undefined method, which the schema rejects."""
    # The defaults of a plug-in's method may use old names of keys.
    defaults: dict[str, Any] = stored_recipe(dict(OFFLINE[name].defaults) if name in OFFLINE else ONLINE.get(name, {}))
    return defaults


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges two nested dicts recursively; values of `above` override values of `below`."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = over(below[key], above[key])
    return merged
