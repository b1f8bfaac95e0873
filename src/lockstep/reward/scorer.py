"""`Scorer`: the weighted sum of all reward components. This module also contains the components `rule` and `format`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.model.trials import TrialReport
from lockstep.recipe.keys_reward import Reward
from lockstep.recipe.schema import Recipe
from lockstep.reward.dry_run import dry_run
from lockstep.reward.environment_rewards import (
    ENVIRONMENT_PARTS,
    STEPS,
    environment_parts,
    overlap,
    overlap_reason,
    turn_rewards,
    weighted,
    with_trajectory,
)
from lockstep.reward.function import FunctionPart
from lockstep.reward.model import ModelPart, ModelsPart
from lockstep.reward.parts import Countdown, PartOutcome, RewardPart, StepOutcome, settled
from lockstep.reward.process_model import ProcessPart
from lockstep.reward.remote import RemotePart
from lockstep.reward.rules import Rule, rule_for, rule_name, rule_named, rules_at_hand
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Question, Score

# The reward components `rule` and `format`, which check the text of a response.


class RulePart(RewardPart):
    """Scores each response with the rule of its data source, in a separate process if the check may hang."""

    name = "rule"

    def __init__(self, settings: Reward, sources: Iterable[str], *, output: Path | None = None):
        self._settings = settings
        self._output = output
        self._isolated: dict[str, FunctionPart] = {}
        self._lock = threading.Lock()
        problems: list[Problem] = []
        rules: list[Rule] = []
        for source in sorted(set(sources)):
            try:
                rules.append(self.rule(source))
                problems += _too_short(rules[-1], settings.time_limit)
            except Refusal as refusal:
                problems += refusal.problems
        refuse_all(problems)
        for rule in rules:
            if rule.isolated is not None:
                self._process(rule)

    def rule(self, source: str) -> Rule:
        return rule_for(source, self._settings.rules)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        rule = self.rule(question.data_source)
        if rule.isolated is not None:
            return self._process(rule).submit(question, text)
        try:
            return settled({self.name: rule(text, question.ground_truth)})
        except Refusal as refusal:
            # The ground truth of the row is invalid.
            return settled(Failure(self.name, f"{question.origin}: {refusal.problems[0]}"))

    def close(self) -> None:
        for part in self._isolated.values():
            part.close()

    def _process(self, rule: Rule) -> FunctionPart:
        with self._lock:
            if rule.name not in self._isolated:
                output = self._output and self._output.with_name(f"{rule.name.replace('/', '-')}-{self._output.name}")
                limit = max(self._settings.time_limit, rule.own_limit)
                settings = self._settings.model_copy(update={"time_limit": limit})
                self._isolated[rule.name] = FunctionPart(
                    str(rule.isolated), settings, name=self.name, key="reward.rules", output=output
                )
            return self._isolated[rule.name]


def _too_short(rule: Rule, seconds: float) -> list[Problem]:
    """Returns a problem if a slow but valid score of the rule would exceed `reward.time_limit`."""
    if seconds >= rule.seconds:
        return []
    why = f"{seconds:g} s is shorter than the rule {rule.name} may take"
    return [Problem("reward.time_limit", why, f"set it to {rule.seconds:g} or more", code="out-of-range")]


class FormatPart(RewardPart):
    """Scores 1 if the full response matches the regular expression (`.` also matches line breaks), else 0."""

    name = "format"

    def __init__(self, expression: str):
        try:
            self._pattern = re.compile(expression, re.DOTALL)
        except re.error as error:
            where = "" if error.pos is None else f" at character {error.pos + 1}"
            raise Refusal.at(
                "reward.format",
                f"{expression!r} is not a regular expression: {error.msg}{where}",
                "fix it",
                code="invalid-regex",
            ) from error

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        return settled({self.name: 1.0 if self._pattern.fullmatch(text) else 0.0})


# The largest number of fp32, in which the trainer computes.
LARGEST = float(torch.finfo(torch.float32).max)
PARTS = ("rule", "function", "model", "process", "remote", "format", *ENVIRONMENT_PARTS)


class Scorer:
    """Scores responses. Scores do not depend on timing or on the number of processes."""

    def __init__(
        self,
        parts: Sequence[RewardPart],
        weights: Mapping[str, float],
        rules: Mapping[str, str],
        required: frozenset[str] = frozenset(),
    ):
        """`required` are the rewards that the environment must give."""
        self._parts, self._required = list(parts), required
        self._weights = dict(weights)
        self._rules = dict(rules)

    @classmethod
    def open(
        cls,
        settings: Reward,
        sources: Iterable[str],
        device: torch.device,
        *,
        output: Path | None = None,
        offload: bool = False,
        environment: bool = False,
        policy: str | None = None,
    ) -> Scorer:
        """Creates the reward components that `settings` names, for rows of the data sources `sources`. `environment`
        says whether the run has an environment, whose rewards count.

        Reports all problems at once. The file `output`-N.log keeps the last output lines of function worker N, if its
        parent folder exists; without `output` they are dropped. With `offload` the weights of reward models are on the
        device only during their forward passes. `policy` is the model folder of the policy, if prompts have images.
        """
        sources = list(sources)
        weights, problems = active_weights(settings, environment=environment)
        available = rules_at_hand(settings.rules)
        if weights.get("rule") == 0 and any(rule_name(source, available) is None for source in sources):
            del weights["rule"]  # a rule with weight 0 is only logged, and some rows have no rule
        problems += _unknown_rules(settings.rules)
        makers: dict[str, Callable[[], RewardPart]] = {
            "rule": lambda: RulePart(settings, sources, output=output),
            "function": lambda: FunctionPart(str(settings.function), settings, output=output),
            "model": lambda: _models(settings, device, offload, policy),
            "process": lambda: ProcessPart(
                str(settings.process), settings.separator, device, offload=offload, policy=policy
            ),
            "remote": lambda: RemotePart(settings.remote or [], settings),
            "format": lambda: FormatPart(str(settings.format)),
        }
        with ExitStack() as opened:
            parts: list[RewardPart] = []
            for name in [name for name in weights if name in makers]:
                try:
                    parts.append(makers[name]())
                except Refusal as refusal:
                    problems += refusal.problems
                else:
                    opened.callback(parts[-1].close)
            if problems:
                raise Refusal(list(dict.fromkeys(problems)))
            opened.pop_all()
        required = frozenset(str(name) for name in settings.weights) & frozenset(ENVIRONMENT_PARTS) & weights.keys()
        return cls(parts, weights, settings.rules, required)

    def submit(self, question: Question, text: str, trajectory: Trajectory | None = None) -> Future[Score | Failure]:
        """Submits a response and returns the future of its score, which may wait for `flush`. A failed reward is a
        `Failure`, not an exception. The text of a trajectory is that of the model alone."""
        if trajectory is not None:
            for part in self._parts:
                if field := overlap(question, part.fields):  # a row of a stream, which no check has seen
                    done: Future[Score | Failure] = Future()
                    done.set_result(Failure(part.name, f"{question.origin} {overlap_reason(field)}"))
                    return done
            question = with_trajectory(question, trajectory)
        outcomes = [part.submit(question, text) for part in self._parts]
        future: Future[Score | Failure] = Future()
        future.set_running_or_notify_cancel()
        if not outcomes:
            future.set_result(self._sum([], trajectory))
            return future

        def settle() -> None:
            # A future swallows the exceptions of its callbacks, and the run would wait forever.
            try:
                future.set_result(self._sum([outcome.result() for outcome in outcomes], trajectory))
            except BaseException as error:  # noqa: BLE001 - the thread that reads the score raises it
                future.set_exception(error)

        remaining = Countdown(len(outcomes), settle)
        for outcome in outcomes:
            outcome.add_done_callback(remaining)
        return future

    def set_progress(self, step: int, steps: int) -> None:
        """Tells the reward components how many of the run's `steps` are finished."""
        for part in self._parts:
            part.progress = step, steps

    def flush(self) -> None:
        """Scores all waiting responses. Call `flush` after the last response of a step."""
        for part in self._parts:
            part.flush()

    def dry_run(self, questions: Sequence[Question], *, conversations: bool = False) -> TrialReport:
        """Scores correct and empty answers to some questions; warns if a reward component gives both the same score."""
        report = dry_run(self._parts, questions, self.rule_of, self._weights, conversations=conversations)
        report.lines.extend(part.note for part in self._parts if part.note)
        if self._rules and "rule" not in self._weights:
            report.lines.append(
                "reward rule: reward.rules has no effect, because other rewards are set and reward.weights has no "
                "entry `rule`"
            )
        return report

    def rule_of(self, source: str) -> Rule | None:
        """Returns the rule of a data source, even if the component `rule` has no weight, or None if the source has no
        rule."""
        return rule_for(source, self._rules) if rule_name(source, rules_at_hand(self._rules)) else None

    def answer_of(self, question: Question, text: str) -> str | None:
        """Returns the final answer that the data source's rule extracts from a text, normalised so that equal answers
        are equal strings."""
        rule = self.rule_of(question.data_source)
        return rule.answer(text) if rule else None

    def close(self) -> None:
        """Ends all processes and requests; unscored responses become failures."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sum(self, outcomes: Sequence[PartOutcome], trajectory: Trajectory | None) -> Score | Failure:
        """Returns the first failure in the order of the components, or the weighted sum of their scores."""
        given = {} if trajectory is None else environment_parts(trajectory, self._required)
        failures = [outcome for outcome in (*outcomes, given) if isinstance(outcome, Failure)]
        if failures:
            return failures[0]
        assert isinstance(given, dict)
        unscored = [part for part, outcome in zip(self._parts, outcomes, strict=True) if not outcome]
        counted = [self._weights[part.name] for part in self._parts if part not in unscored]
        counted += [self._weights[name] for name in given if name in self._weights]
        if unscored and not any(counted):
            return Failure(unscored[0].name, "returned None for the response, and no other reward scores it")
        parts: dict[str, float] = {}
        steps: list[tuple[int, float]] = []
        for part, outcome in zip(self._parts, outcomes, strict=True):
            assert isinstance(outcome, dict)
            parts |= outcome
            if isinstance(outcome, StepOutcome):
                steps += [(end, self._weights[part.name] * share) for end, share in outcome.steps]
        total = sum(self._weights[part.name] * parts[part.name] for part in self._parts if part not in unscored)
        if trajectory is None or STEPS not in self._weights:
            return _finite(Score(total, parts, tuple(steps)))
        shares = turn_rewards(trajectory, self._weights[STEPS])
        return _finite(Score(total + weighted(given, self._weights), parts | given, tuple(steps), shares))


def _finite(score: Score) -> Score | Failure:
    """Returns the score, or a failure if the weighted sum is too large for the trainer."""
    if abs(score.total) <= LARGEST:
        return score
    largest = max(score.parts, key=lambda name: abs(score.parts[name]))
    return Failure(largest, f"the weighted sum of the rewards is {score.total:g}, which fp32 cannot represent")


def _models(settings: Reward, device: torch.device, offload: bool, policy: str | None) -> RewardPart:
    if isinstance(settings.model, list):
        return ModelsPart(settings.model, settings.model_weights, device, offload=offload, policy=policy)
    return ModelPart(str(settings.model), device, offload=offload, policy=policy)


def active_weights(settings: Reward, *, environment: bool = False) -> tuple[dict[str, float], list[Problem]]:
    """Returns the weights of the active reward components in the order of PARTS, and a problem for each weight of a
    component that is not set. `environment` says whether the run has an environment."""
    is_set = dict.fromkeys(ENVIRONMENT_PARTS, environment)
    is_set |= {name: getattr(settings, name) is not None for name in PARTS if name not in (*is_set, "rule")}
    is_set["rule"] = "rule" in settings.weights or not any(is_set.values())
    keys = {name: "rollout.environment" if name in ENVIRONMENT_PARTS else f"reward.{name}" for name in PARTS}
    problems = [
        Problem(
            f"reward.weights.{name}",
            f"{keys[name]} is not set",
            f"set {keys[name]}, or remove the weight",
            code="needs-key",
        )
        for name in settings.weights
        if not is_set[name]
    ]
    configured: Mapping[str, float] = {str(name): weight for name, weight in settings.weights.items()}
    return {name: configured.get(name, 1.0) for name in PARTS if is_set[name]}, problems


def recipe_weights(recipe: Recipe) -> tuple[dict[str, float], list[Problem]]:
    """Returns the weights and problems of `active_weights` for a recipe. An environment gives rewards; functions in
    `rollout.tools` give none."""
    return active_weights(recipe.reward, environment=recipe.rollout.gives_rewards)


def _unknown_rules(rules: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    for source, name in rules.items():
        try:
            rule_named(name, f"reward.rules.{source}")
        except Refusal as refusal:
            problems += refusal.problems
    return problems
