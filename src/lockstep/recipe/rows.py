"""The names that a recipe may say, and what stands behind each: estimators, policy losses, engines, trackers.

Estimators, losses and engines say what they need; whoever runs them asks these rows, never the names. A new estimator
or loss is a row here and a function in `algorithms/`. Engines and trackers are above the recipe, which must know their
names before anything of theirs is imported: they stand as `package.module:name`. A new one is a row here and a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class EstimatorRow:
    critic: bool = False
    """Values of a learned critic."""
    groups: bool = False
    """Several responses to a prompt, which are compared with each other."""
    greedy_baseline: bool = False
    """The score of the likeliest response to each prompt."""
    energy: bool = False
    """The sum of the squared probabilities of all words at each token."""
    parts: bool = False
    """The rewards one by one."""


@dataclass(frozen=True)
class LossRow:
    keys: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the function, and the keys of `algorithm` that they are."""
    ratio: bool = True
    """Whether it weighs what the policy did before the update: without, a step can have one update only."""
    tokenwise: bool = False
    """Whether the loss at a token depends on no other token of the update."""
    held: Mapping[str, str] | None = None
    """Where some tokens are held back: arguments of the function that chooses them, as `keys`. Old log-probs are needed
    before the update."""
    holds: bool = False
    """Whether a token that has moved too far from the policy of its old log-probs is pushed no further, by bounds that
    leave room for several updates: old ones of the policy that drew stale responses then hold the run near it. Not so
    where only a weight is bounded (cispo), or where the bounds are those of a single update (gspo)."""


@dataclass(frozen=True)
class EngineRow:
    opener: str
    """`package.module:name` of its `open_engine`."""
    paged: bool = False
    """Keys and values stay in blocks of ours between tokens: its architecture is tried on a miniature, and
    models whose positions move with the length are refused past what can be cached."""
    divided: bool = False
    """Generates from a model whose modules several processes divide (`parallel.tensor`)."""
    dialect: str = ""
    """Of a serving engine, one with weights of its own behind HTTP: `package.module:name` of its `Dialect`
    (`rollout/server/`). It is started or found by `rollout.server` and `rollout.url`, and its `open_engine` is told who
    and where the run is."""
    scored: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(("mask", "ignore"), ("top_p", "top_k", "min_p"))
    )
    """The values of `rollout.truncated` for which it tells log-probs as the trainer scores them, each with the keys
    that may truncate."""

    @property
    def served(self) -> bool:
        return bool(self.dialect)


_BOUNDS = {"low": "clip_low", "high": "clip_high"}

ESTIMATORS: dict[str, EstimatorRow] = {
    "gae": EstimatorRow(critic=True),
    "grpo": EstimatorRow(groups=True),
    "dr_grpo": EstimatorRow(groups=True),
    "rloo": EstimatorRow(groups=True),
    "reinforce": EstimatorRow(),
    "flash_reinforce": EstimatorRow(),
    "reinforce_pp": EstimatorRow(),
    "reinforce_pp_baseline": EstimatorRow(groups=True),
    "remax": EstimatorRow(greedy_baseline=True),
    "opo": EstimatorRow(groups=True),
    "grpo_passk": EstimatorRow(groups=True),
    "gpg": EstimatorRow(groups=True),
    "gdpo": EstimatorRow(groups=True, parts=True),
    "optimal_token_baseline": EstimatorRow(groups=True, energy=True),
}
LOSSES: dict[str, LossRow] = {
    "clip": LossRow({**_BOUNDS, "dual": "dual_clip"}, tokenwise=True, holds=True),
    "gspo": LossRow(_BOUNDS),
    "cispo": LossRow(_BOUNDS, tokenwise=True),
    "sapo": LossRow({"positive": "sapo_positive", "negative": "sapo_negative"}, tokenwise=True),
    "geo_mean": LossRow(_BOUNDS, holds=True),
    "clip_cov": LossRow(
        _BOUNDS, tokenwise=True, held={"share": "cov_share", "low": "cov_low", "high": "cov_high"}, holds=True
    ),
    "kl_cov": LossRow({"weight": "cov_kl"}, tokenwise=True, held={"share": "cov_share"}),
    "dppo_tv": LossRow({**_BOUNDS, "cap": "ratio_cap"}, tokenwise=True, holds=True),
    "dppo_kl": LossRow({**_BOUNDS, "cap": "ratio_cap"}, tokenwise=True, holds=True),
    "dro": LossRow({"beta": "dro_beta"}, tokenwise=True),
    "importance": LossRow({"cap": "ratio_cap", "of": "ratio_of"}),
    "policy_gradient": LossRow(ratio=False, tokenwise=True),
}
ENGINES: dict[str, EngineRow] = {
    "native": EngineRow("lockstep.rollout.native.engine:open_engine", paged=True, divided=True),
    "hf": EngineRow("lockstep.rollout.hf:open_engine"),
    "vllm": EngineRow(
        "lockstep.rollout.server.engine:open_engine",
        dialect="lockstep.rollout.server.vllm:Vllm",
        scored={"mask": ("top_p", "top_k", "min_p")},
    ),
    "sglang": EngineRow(
        "lockstep.rollout.server.engine:open_engine",
        dialect="lockstep.rollout.server.sglang:Sglang",
        scored={"mask": ("top_k",), "ignore": ("top_p", "top_k")},
    ),
}
TRACKERS: dict[str, str] = {
    "tensorboard": "lockstep.run.trackers.tensorboard:TensorboardSink",
    "wandb": "lockstep.run.trackers.wandb:WandbSink",
    "mlflow": "lockstep.run.trackers.mlflow:MlflowSink",
    "swanlab": "lockstep.run.trackers.swanlab:SwanlabSink",
}


def estimator_row(name: str) -> EstimatorRow:
    """A function of the user's own needs nothing that we know of."""
    return ESTIMATORS.get(name, EstimatorRow())


def loss_row(name: str) -> LossRow:
    return LOSSES.get(name, LossRow())


def drawn_by(engine: str) -> str:
    """Whose random numbers choose the tokens: engines of ours share theirs, a serving engine has its own."""
    return engine if ENGINES.get(engine, ENGINES["native"]).served else "lockstep"


def imported(path: str) -> Any:
    """What `package.module:name` names, imported when it is asked for."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
