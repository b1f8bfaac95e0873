"""The registry: every name a recipe may use and what it stands for; user modules may add names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import Problem
from lockstep.functions import Unloadable, run_file, told

# The names that a recipe may say, and what stands behind each: estimators, policy losses, engines, trackers.
#
# Estimators, losses and engines say what they need; whoever runs them asks these rows, never the names. A new
# estimator or loss is a row here and a function in `algorithms/`. Engines and trackers are above the recipe, which
# must know their names before anything of theirs is imported: they stand as `package.module:name`. A new one is a row
# here and a file.


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
    server_adapter: str = ""
    """Serving engines only (weights in another process, reached over HTTP): `package.module:name` of the
    `ServerAdapter` (`rollout/servers/`). `rollout.server` and `rollout.url` start or locate the server. Its
    `open_engine` also gets the `RunPlace`."""
    scored: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(("mask", "ignore"), ("top_p", "top_k", "min_p"))
    )
    """The values of `rollout.truncated` for which it tells log-probs as the trainer scores them, each with the keys
    that may truncate."""

    @property
    def served(self) -> bool:
        return bool(self.server_adapter)


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
        "lockstep.rollout.servers.server_engine:open_engine",
        server_adapter="lockstep.rollout.servers.vllm:Vllm",
        scored={"mask": ("top_p", "top_k", "min_p")},
    ),
    "sglang": EngineRow(
        "lockstep.rollout.servers.server_engine:open_engine",
        server_adapter="lockstep.rollout.servers.sglang:Sglang",
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


# Modules of the user's that add rows to our tables, named by `run.plugins`: imported before a recipe is checked.

KEY = "run.plugins"
# By what the recipe says: their rows stay for all recipes of this process.
_imported: dict[str, ModuleType] = {}


def import_plugins(values: Mapping[str, Any]) -> list[Problem]:
    """Import what a recipe, not checked yet, names; returns what could not be."""
    run = values.get("run")
    named = run.get("plugins") if isinstance(run, Mapping) else None
    # Anything else than a list of texts is told by the schema.
    words = [word for word in named if isinstance(word, str)] if isinstance(named, list) else []
    return [problem for word in words if (problem := _import(word)) is not None]


def plugin_file(word: str) -> Path | None:
    """The file of a plug-in that was imported; None where it has none."""
    file = getattr(_imported.get(word), "__file__", None)
    return None if file is None else Path(file)


def _import(word: str) -> Problem | None:
    if word in _imported:
        return None
    file = Path(word).expanduser().absolute()
    try:
        if not word.endswith(".py"):
            _imported[word] = importlib.import_module(word)
        elif file.is_file():
            _imported[word] = run_file(file)
        else:
            return Problem(KEY, f"there is no file {word}", "give the path from the folder that you start in")
    except Unloadable as error:
        return Problem(f"{KEY} {word}", error.why, error.remedy)
    except ModuleNotFoundError as error:
        if error.name != word.split(".")[0] and error.name != word:
            return Problem(f"{KEY} {word}", f"cannot be imported: {told(error, word)}", "install what it needs")
        remedy = "install it, or name its file: path/to/file.py"
        return Problem(f"{KEY} {word}", "there is no such module", remedy)
    except Exception as error:  # noqa: BLE001 - whatever the user's module raises is what must be told
        return Problem(f"{KEY} {word}", f"cannot be imported: {told(error, word)}", "mend the module")
    return None
