"""Trials: checks before training that run a small model, a user function, or the rewards on a few rows.

`TRIALS` lists all trials. `run_trial` runs one trial, shows its progress and prints its results. `run_trial` raises
`Refusal` if the trial fails. A trial that passed before on this machine with the same code and packages is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lockstep.device.base import EMULATED
from lockstep.device.select import DEVICES
from lockstep.errors import Problem, Refusal
from lockstep.kernels.fused import KERNEL_PACKAGES
from lockstep.kernels.mixers import RECURRENCE_PACKAGES
from lockstep.run.caches import VERIFIED, cache_home
from lockstep.run.console import Console
from lockstep.version import PACKAGE_FOLDER


class Unfit(Exception):
    """Raised if lockstep would train, score or generate wrongly with a model. The message says why."""


@dataclass(frozen=True)
class Trial:
    """Describes one trial. If `cached` is true, a success is stored on this machine, and the trial is skipped the next
    time."""

    name: str
    when: str
    function: str
    """Module and function that run the trial."""
    proves: str
    cached: bool = False
    task: str | None = None
    """Text of the progress line, for a trial that may take seconds."""


ARCHITECTURE = Trial(
    "architecture",
    "before weights load, for every model",
    "model.check.check_architecture",
    "packed and padded log-probs and gradients of a small model equal those of transformers",
    cached=True,
    task="Comparing a small model of the architecture with transformers",
)
ROUTER_NOISE = Trial(
    "router_noise",
    "before weights load, for every trained model",
    "model.router.refuse_router_noise",
    "a small model gives the same logits twice in training mode",
    cached=True,
)
LOAD_BALANCE = Trial(
    "load_balance",
    "before weights load, with model.aux_loss_coef",
    "model.router.refuse_router_loss",
    "the load-balancing loss of a small model equals that of transformers",
    cached=True,
)
TENSOR_PARALLEL = Trial(
    "tensor_parallel",
    "before weights load, with parallel.tensor_parallel above 1",
    "model.division.tensor_trial.check_division",
    "a small model gives the same log-probs and gradients undivided and divided over the ranks",
    cached=True,
)
EXPERT_PARALLEL = Trial(
    "expert_parallel",
    "before weights load, with parallel.expert_parallel above 1",
    "model.division.expert_plan.check_experts",
    "a small model gives the same log-probs and gradients undivided and with its experts divided over the ranks",
    cached=True,
)
ENGINE = Trial(
    "engine",
    "when the built-in engine starts",
    "rollout.engine_check.check_engine_architecture",
    "greedy tokens and log-probs of the engine on a small model equal those of transformers",
    cached=True,
)
LOADED_MODEL = Trial(
    "loaded_model",
    "after weights load",
    "model.check.check_policy",
    "log-probs of the loaded model on a few tokens equal those of transformers",
)
LOADED_IMAGES = Trial(
    "loaded_images",
    "after weights load, with model.vision",
    "preflight.image_trial.check_images",
    "log-probs of the loaded model on rows with images equal those of transformers",
)
LOADED_ENGINE = Trial(
    "loaded_engine",
    "when an engine starts",
    "rollout.engine_check.check_engine",
    "log-probs of the engine equal those of the trainer on a few sampled tokens",
)
ADVANTAGE_FUNCTION = Trial(
    "advantage_function",
    "before weights load, if algorithm.advantage is a function",
    "preflight.user_trials.try_advantage",
    "the function returns finite advantages for an artificial step",
)
LOSS_FUNCTION = Trial(
    "loss_function",
    "before weights load, if algorithm.loss is a function",
    "preflight.user_trials.try_loss",
    "the loss function has a finite gradient for an artificial step",
)
ROLLOUT_FUNCTION = Trial(
    "rollout_function",
    "before weights load, with rollout.function",
    "preflight.user_trials.try_rollout",
    "the function returns a valid response to the first prompt",
)
ENVIRONMENT = Trial(
    "environment",
    "before weights load, with rollout.environment, rollout.tools or rollout.agent",
    "environments.setup.try_environment",
    "the environment loads and starts a trajectory for the first prompt, and the chat template renders it; an agent "
    "loads, and its server starts",
    task="Testing the environment on one row",
)
REWARDS = Trial(
    "rewards",
    "before weights load, in an online run; in `generate` with rewards",
    "reward.dry_run.dry_run",
    "for some rows, the rewards give finite scores to correct and to empty answers",
    task="Testing the rewards on real rows",
)
INITIAL_LOSS = Trial(
    "initial_loss",
    "before the first step, if the reference is the same model as the policy",
    "train.offline.assert_identity",
    "policy and reference give equal log-probs, and the loss is that of equal models",
)

TRIALS = (
    ARCHITECTURE,
    ROUTER_NOISE,
    LOAD_BALANCE,
    TENSOR_PARALLEL,
    ENGINE,
    LOADED_MODEL,
    LOADED_IMAGES,
    LOADED_ENGINE,
    ADVANTAGE_FUNCTION,
    LOSS_FUNCTION,
    ROLLOUT_FUNCTION,
    ENVIRONMENT,
    REWARDS,
    INITIAL_LOSS,
)


@dataclass(frozen=True)
class TrialReport:
    """Lines and warnings that a trial prints."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run_trial(
    trial: Trial,
    attempt: Callable[[], TrialReport | Problem | None],
    *,
    config: Any = None,
    key: Sequence[str] = (),
    agree: Callable[[bool], bool] = bool,
    console: Console | None = None,
) -> None:
    """Runs a trial by calling `attempt`. If the trial fails, `attempt` returns a problem, which is raised as `Refusal`.
    If the trial passes, `attempt` may return a report to print.

    `config` and `key` identify a cached result. `agree` returns whether all ranks have the cached result.
    """
    cached_at = fingerprint(config, trial.name, *key) if trial.cached else None
    if cached_at is not None and agree(is_verified(cached_at)):
        return
    with console.task(trial.task, None) if console is not None and trial.task else nullcontext():
        result = attempt()
    if isinstance(result, Problem):
        refuse_unless_replayed(result)
        return
    if cached_at is not None:
        remember(cached_at)
    if console is not None and result is not None:
        for line in result.lines:
            console.say(line)
        for warning in result.warnings:
            console.warn(warning)


# A replay of a recorded run does not stop at a failed trial. The trial passed when the run was recorded, and the replay
# locates the error.

_collected: ContextVar[list[Problem] | None] = ContextVar("problems that a replay locates", default=None)


def refuse_unless_replayed(problem: Problem) -> None:
    """Raises `Refusal` for a problem found before the first step. In a replay of a recorded run, collects the problem
    instead of raising it."""
    collected = _collected.get()
    if collected is None:
        raise Refusal([problem])
    if problem not in collected:
        collected.append(problem)


@contextmanager
def judged_later() -> Iterator[list[Problem]]:
    """Collects problems of trials inside the `with` block instead of raising `Refusal`."""
    problems: list[Problem] = []
    token = _collected.set(problems)
    try:
        yield problems
    finally:
        _collected.reset(token)


# Cache of trials that passed on this machine with the same code and packages.

# Folders of lockstep whose code affects the results of a model. A change of this code invalidates the cache.
CODE = ("device", "kernels", "model", "parallel", "rollout")


def fingerprint(config: Any, *more: str) -> str:
    """Returns a hash of the model config, the versions of packages and lockstep's code. The hash does not depend on
    weights and paths."""
    data = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    packages = (*KERNEL_PACKAGES, *RECURRENCE_PACKAGES)
    versions = [torch.__version__, version("transformers"), *map(_version, packages), _code()]
    text = json.dumps([data, versions, more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hardware(torch_device: torch.device) -> list[str]:
    """Returns a description of the device for the fingerprint of a trial. Machines with different devices may share a
    home directory, which has the cache."""
    device = DEVICES[torch_device.type]()
    return [device.name, device.chip(), os.environ.get(EMULATED, "")]


def is_verified(key: str) -> bool:
    if key in _verified_here():
        return True
    # If the home directory is not readable, there is no cache, and the trial runs at every start.
    with contextlib.suppress(OSError, RuntimeError):
        return (_folder() / key).is_file()
    return False


def remember(key: str) -> None:
    _verified_here().add(key)
    # If the result cannot be stored, the trial runs again at the next start.
    with contextlib.suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / key).touch()


@cache
def _verified_here() -> set[str]:
    return set()


def _folder() -> Path:
    return cache_home() / VERIFIED


@cache
def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (PACKAGE_FOLDER / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
