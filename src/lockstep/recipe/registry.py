"""The registries of estimators, losses, engines and trackers that a recipe may name. Plug-ins may add names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import Problem
from lockstep.functions import Unloadable, describe_error, run_file

# A row declares the requirements of an estimator, loss or engine; callers check the row, never the name. A new
# estimator or loss needs a row in this module and a function in `algorithms/`. Engines and trackers are in higher
# layers, so their rows contain `package.module:name`, which is imported on first use.


@dataclass(frozen=True)
class EstimatorRow:
    critic: bool = False
    """Whether the estimator needs the values of a critic."""
    groups: bool = False
    """Whether the estimator compares several responses to the same prompt."""
    greedy_baseline: bool = False
    """Whether the estimator needs the score of the greedy response to each prompt."""
    energy: bool = False
    """Whether the estimator needs the sum of squared probabilities over the vocabulary at each token."""
    parts: bool = False
    """Whether the estimator needs the score of each reward component, not only their sum."""
    turns: bool = False
    """Whether the estimator compares turns of trajectories with an environment, and not only trajectories."""


@dataclass(frozen=True)
class LossRow:
    keys: Mapping[str, str] = field(default_factory=dict)
    """Maps arguments of the loss function to keys of `algorithm`."""
    ratio: bool = True
    """Whether the loss uses the ratio of new to old probability. A loss without this ratio allows only one update per
    step."""
    tokenwise: bool = False
    """Whether the loss of a token is independent of all other tokens of the update."""
    selection_keys: Mapping[str, str] | None = None
    """For losses that select tokens: maps arguments of the selecting function to keys of `algorithm`. Losses that
    select tokens need the old log-probs before the first update."""
    trust_region: bool = False
    """True if a token outside the clip bounds gets no gradient, and the bounds are wide enough for several updates. If
    `trust_region` is true, the engine's log-probs of stale responses can serve as old log-probs. `trust_region` is
    false if the clip bounds only a weight (cispo) or the bounds fit a single update (gspo)."""


@dataclass(frozen=True)
class EngineRow:
    opener: str
    """`package.module:name` of the engine's `open_engine`."""
    paged: bool = False
    """Whether the engine uses lockstep's paged KV cache. If `paged` is true, a preflight check generates with a
    miniature model of the same architecture. The rotary embedding of some models changes above a certain sequence
    length, which makes cached keys invalid. Sequences above this length are refused."""
    images: bool = False
    """Whether the engine reads the images of a prompt (`model.vision`)."""
    divided: bool = False
    """Whether the engine supports tensor parallelism (`parallel.tensor_parallel`)."""
    precisions: tuple[str, ...] = ()
    """The values of `rollout.precision` that the engine supports."""
    routes: bool = False
    """Whether completions have the experts of each token (`algorithm.routing_replay: rollout`)."""
    quantizes_adapted: bool = True
    """Whether `rollout.precision` may be combined with a LoRA adapter."""
    server_adapter: str = ""
    """`package.module:name` of the `ServerAdapter` (`rollout/servers/`); empty if the engine is not a server. A serving
    engine has its weights in another process and is reached over HTTP. A run starts a server with the settings in
    `rollout.server`, or uses the running server at `rollout.url`. The `open_engine` of a serving engine also gets the
    `RunPlace`."""
    scored: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(("mask", "ignore"), ("top_p", "top_k", "min_p"))
    )
    """Maps each usable value of `rollout.truncated_sampling` to the sampling keys that the engine supports with this
    value. A value of `rollout.truncated_sampling` is usable if the log-probs of the engine match those of the
    trainer."""

    @property
    def served(self) -> bool:
        return bool(self.server_adapter)


@dataclass(frozen=True)
class AdapterRow:
    """An adapter for the environments of another package, which a recipe selects as `NAME:ENVIRONMENT`."""

    path: str
    """`package.module:name` of the environment class. It gets the text after `NAME:` as `environment`."""
    package: str = ""
    """The module that must be installed. Empty if the adapter needs none. The extra has the name of the adapter."""
    tools: bool = False
    """Whether the adapter runs tool calls, and therefore limits the time and the length of each call itself."""
    chat: bool = True
    """Whether the chat template renders messages of the environment. Raw text and token ids need no template."""
    tokenizer: bool = False
    """Whether the environment loads the tokenizer, and gets the settings of the rollout as `run`."""


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
    "gigpo": EstimatorRow(groups=True, turns=True),
}
LOSSES: dict[str, LossRow] = {
    "clip": LossRow({**_BOUNDS, "dual": "dual_clip"}, tokenwise=True, trust_region=True),
    "gspo": LossRow(_BOUNDS),
    "cispo": LossRow(_BOUNDS, tokenwise=True),
    "sapo": LossRow({"positive": "sapo_positive", "negative": "sapo_negative"}, tokenwise=True),
    "geo_mean": LossRow(_BOUNDS, trust_region=True),
    "clip_cov": LossRow(
        _BOUNDS,
        tokenwise=True,
        selection_keys={"share": "cov_ratio", "low": "cov_low", "high": "cov_high"},
        trust_region=True,
    ),
    "kl_cov": LossRow({"weight": "cov_kl"}, tokenwise=True, selection_keys={"share": "cov_ratio"}),
    "dppo_tv": LossRow({**_BOUNDS, "cap": "ratio_cap"}, tokenwise=True, trust_region=True),
    "dppo_kl": LossRow({**_BOUNDS, "cap": "ratio_cap"}, tokenwise=True, trust_region=True),
    "dro": LossRow({"beta": "dro_beta"}, tokenwise=True),
    "importance": LossRow({"cap": "ratio_cap", "of": "ratio_of"}),
    "policy_gradient": LossRow(ratio=False, tokenwise=True),
}
# Built-in environments and tools: `package.module:name` of the class or function.
ENVIRONMENTS: dict[str, str] = {
    "guess_number": "lockstep.environments.builtin.guess_number:GuessNumber",
    "maze": "lockstep.environments.builtin.maze:Maze",
}
_ADAPTERS = "lockstep.environments.adapters"
ADAPTERS: dict[str, AdapterRow] = {
    "gymnasium": AdapterRow(f"{_ADAPTERS}.gymnasium_env:GymnasiumEnvironment", "gymnasium"),
    "textarena": AdapterRow(f"{_ADAPTERS}.textarena_env:TextArenaEnvironment", "textarena"),
    "reasoning_gym": AdapterRow(f"{_ADAPTERS}.reasoning_gym_env:ReasoningGymEnvironment", "reasoning_gym"),
    "gem": AdapterRow(f"{_ADAPTERS}.gem_env:GemEnvironment", "gem"),
    "openenv": AdapterRow(f"{_ADAPTERS}.openenv_client:OpenEnvEnvironment", "websockets"),
    "openrlhf": AdapterRow(f"{_ADAPTERS}.openrlhf_agent:OpenrlhfAgent", chat=False),
    "verl": AdapterRow(f"{_ADAPTERS}.verl_agent_loop:VerlAgentLoop", chat=False, tokenizer=True),
    "trl": AdapterRow(f"{_ADAPTERS}.trl_env:TrlEnvironment", tools=True),
}
TOOLS: dict[str, str] = {
    "calculator": "lockstep.environments.builtin.calculator:calculator_tool",
    "python": "lockstep.environments.builtin.code_tools:python_tool",
    "bash": "lockstep.environments.builtin.code_tools:bash_tool",
    "search": "lockstep.environments.builtin.corpus_search:search_tool",
    "verl": f"{_ADAPTERS}.verl_tools:verl_tools",
    "mcp": f"{_ADAPTERS}.mcp_servers:mcp_tools",
    "mcp_shared": f"{_ADAPTERS}.mcp_servers:shared_mcp_tools",
}
# The value of `val.environment` for validation without an environment.
NO_ENVIRONMENT = {"none": ""}

ENGINES: dict[str, EngineRow] = {
    "native": EngineRow(
        "lockstep.rollout.native.native_engine:open_engine",
        paged=True,
        images=True,
        divided=True,
        precisions=("fp8", "int8"),
        routes=True,
    ),
    "hf": EngineRow("lockstep.rollout.hf:open_engine"),
    "vllm": EngineRow(
        "lockstep.rollout.servers.server_engine:open_engine",
        server_adapter="lockstep.rollout.servers.vllm:Vllm",
        images=True,
        precisions=("fp8",),
        routes=True,
        scored={"mask": ("top_p", "top_k", "min_p")},
    ),
    "sglang": EngineRow(
        "lockstep.rollout.servers.server_engine:open_engine",
        server_adapter="lockstep.rollout.servers.sglang:Sglang",
        precisions=("fp8",),
        quantizes_adapted=False,
        scored={"mask": ("top_k",), "ignore": ("top_p", "top_k")},
    ),
}
TRACKERS: dict[str, str] = {
    "tensorboard": "lockstep.run.trackers.tensorboard:TensorboardSink",
    "wandb": "lockstep.run.trackers.wandb:WandbSink",
    "mlflow": "lockstep.run.trackers.mlflow:MlflowSink",
    "swanlab": "lockstep.run.trackers.swanlab:SwanlabSink",
}


def adapter_row(environment: str | None) -> AdapterRow | None:
    """Returns the adapter that `NAME:SOURCE` selects, or None."""
    name, colon, _ = (environment or "").partition(":")
    return ADAPTERS.get(name) if colon else None


def estimator_row(name: str) -> EstimatorRow:
    """Returns the row of an estimator; a user function has no declared requirements."""
    return ESTIMATORS.get(name, EstimatorRow())


def loss_row(name: str) -> LossRow:
    return LOSSES.get(name, LossRow())


def drawn_by(engine: str) -> str:
    """Returns the owner of the random generator that samples the tokens, which is `lockstep` or the name of a serving
    engine."""
    return engine if ENGINES.get(engine, ENGINES["native"]).served else "lockstep"


def imported(path: str) -> Any:
    """Imports the object named `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


KEY = "run.plugins"
# Imported plug-ins by their name in the recipe. The names that a plug-in registers remain until the process ends.
_imported: dict[str, ModuleType] = {}


def import_plugins(values: Mapping[str, Any]) -> list[Problem]:
    """Imports the plug-ins of an unchecked recipe; returns a problem for each plug-in that fails."""
    run = values.get("run")
    named = run.get("plugins") if isinstance(run, Mapping) else None
    # A value that is not a list of strings is skipped here; the schema check reports it.
    words = [word for word in named if isinstance(word, str)] if isinstance(named, list) else []
    return [problem for word in words if (problem := _import(word)) is not None]


def plugin_file(word: str) -> Path | None:
    """Returns the source file of an imported plug-in, or None if the module has no file."""
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
            return Problem(
                KEY,
                f"file {word} does not exist",
                "give the path relative to the working directory",
                code="no-such-file",
            )
    except Unloadable as error:
        return Problem(f"{KEY} {word}", error.why, error.remedy, code=error.code)
    except ModuleNotFoundError as error:
        if error.name != word.split(".")[0] and error.name != word:
            return Problem(
                f"{KEY} {word}",
                f"the plug-in cannot be imported: {describe_error(error, word)}",
                "install what it needs",
                code="import-failed",
            )
        remedy = "install the module, or give its file: path/to/file.py"
        return Problem(f"{KEY} {word}", "no such module", remedy, code="import-failed")
    except Exception as error:  # noqa: BLE001 - a user module may raise any exception; it is reported as a problem
        return Problem(
            f"{KEY} {word}",
            f"the plug-in cannot be imported: {describe_error(error, word)}",
            "fix the module",
            code="import-failed",
        )
    return None
