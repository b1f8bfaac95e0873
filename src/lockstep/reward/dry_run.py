"""Before the first step: can the rewards tell a right answer from none? One that cannot may train nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.errors import Problem, refuse_all, shortened
from lockstep.reward.parts import PartOutcome, RewardPart
from lockstep.reward.rules import Rule, boxed_example
from lockstep.types import Failure, Question

# Rows of each data source that are tried.
ROWS = 3
# Rewards that are given the ground truth: what they say of it is what they say of a right answer.
KNOWING = ("rule", "function", "remote")


@dataclass(frozen=True)
class _Trial:
    """One row as one part scored it: the empty answer, and each answer that may be right."""

    question: Question
    tried: list[str]
    empty: Future[PartOutcome]
    right: list[Future[PartOutcome]]

    def scores(self, name: str) -> tuple[float, dict[str, float]]:
        """Of the empty answer, and by text of the others; once all are there and none has failed."""
        empty, *right = [future.result() for future in (self.empty, *self.right)]
        assert not isinstance(empty, Failure)
        found = {text: score[name] for text, score in zip(self.tried, right, strict=True) if isinstance(score, dict)}
        return empty[name], found


@dataclass(frozen=True)
class Tried:
    """What the dry run has to say, and what it warns of."""

    lines: list[str]
    warnings: list[str]


def dry_run(
    parts: Sequence[RewardPart],
    questions: Sequence[Question],
    rule_of: Callable[[str], Rule | None],
    weights: Mapping[str, float],
) -> Tried:
    """A line for each part and data source; refuses what cannot work: an exception, or a score that is no number.

    Every ground truth is looked at where the rule counts. The answers tried are those of `right_answers`. A warning
    where a part scores right and empty answers alike (it may read a form that is not among them), and where the parts
    that know the ground truth score the empty answer, by their weights, above all right ones.
    """
    problems: list[Problem] = []
    if any(part.name == "rule" for part in parts):
        problems += _bad_truths(questions, rule_of)
    sources = list(dict.fromkeys(question.data_source for question in questions))
    trials: dict[tuple[str, str], list[_Trial]] = {}
    for source in sources:
        rows = [question for question in questions if question.data_source == source][:ROWS]
        for part in parts:
            trials[part.name, source] = [_try(part, row, rule_of(source)) for row in rows]
    for part in parts:
        part.flush()
    lines, alike = [], []
    for (name, source), tried in trials.items():
        failed = _first_failure(name, tried)
        if failed is not None:
            problems.append(failed)
            continue
        line, warning = _judged(name, source, tried, say_source=len(sources) > 1)
        lines.append(line)
        alike += [warning] if warning else []
    refuse_all(problems)
    counting = {name: weight for name, weight in weights.items() if weight and name in KNOWING}
    said = [_upside_down(source, [trials[name, source] for name in counting], counting) for source in sources]
    return Tried(lines, alike + [warning for warning in said if warning])


def right_answers(part: str, question: Question, rule: Rule | None) -> list[str]:
    """Whatever may be a right answer: the bare truth, the forms that rules and common reward functions read, and the
    worked answer that some data sets carry. For the rule, its own form first."""
    truth = question.ground_truth
    worked = question.extra_info.get("answer")
    boxed = boxed_example(truth)
    known = [truth, f"#### {truth}", boxed]
    if part in KNOWING:
        known += [
            f"<answer>{truth}</answer>",
            f"<think>\nso\n</think>\n<answer>\n{truth}\n</answer>",
            f"<think>\nso\n</think>\n{boxed}",
            f"<think>\nso\n</think>\n<answer>{boxed}</answer>",
            f"Answer: {truth}",
            f"The answer is {truth}.",
        ]
    known += [worked] if isinstance(worked, str) and worked else []
    own = [rule.example(truth)] if part == "rule" and rule is not None else []
    return list(dict.fromkeys([*own, *known]))


def _bad_truths(questions: Sequence[Question], rule_of: Callable[[str], Rule | None]) -> list[Problem]:
    problems = []
    for question in questions:
        rule = rule_of(question.data_source)
        why = rule.truth_problem(question.ground_truth) if rule else None
        if rule and why:
            problems.append(Problem(str(question.origin), f"ground truth {why}", f"mend the row: rule {rule.name}"))
    return shortened(problems, "rows")


def _try(part: RewardPart, question: Question, rule: Rule | None) -> _Trial:
    tried = right_answers(part.name, question, rule)
    return _Trial(question, tried, part.submit(question, ""), [part.submit(question, text) for text in tried])


def _first_failure(name: str, trials: Sequence[_Trial]) -> Problem | None:
    for trial in trials:
        outcomes = [future.result() for future in (trial.empty, *trial.right)]
        for text, outcome in zip(["", *trial.tried], outcomes, strict=True):
            if isinstance(outcome, Failure):
                return _failed(name, trial.question, text, outcome)
    return None


def _judged(name: str, source: str, trials: Sequence[_Trial], *, say_source: bool) -> tuple[str, str | None]:
    """What a part said of a source, in a line, and a warning where it cannot tell right from empty answers."""
    where = f"reward {name}" + (f" ({source})" if say_source else "")
    shown: tuple[float, float] | None = None
    apart = False
    for trial in trials:
        empty, scores = trial.scores(name)
        # The rule is held to its own form, which comes first: another one is right only by accident.
        right = list(scores.values())[: 1 if name == "rule" else None]
        better = [score for score in right if score != empty]
        if shown is None or (better and not apart):
            shown = (better or right)[0], empty
        apart = apart or bool(better)
    if shown is None:
        return f"{where}: no rows to try", None
    if name != "rule" and not any(trial.question.ground_truth for trial in trials):
        return f"{where}: empty answer {shown[1]:g}; no ground truth to try a right one with", None
    line = f"{where}: right answer {shown[0]:g}, empty answer {shown[1]:g}"
    return line, None if apart or name == "format" else _blind(name, source, trials, shown[1])


def _upside_down(source: str, by_part: Sequence[Sequence[_Trial]], weights: Mapping[str, float]) -> str | None:
    """A warning of rows whose empty answer earns more than every answer that may be right."""
    worse: list[tuple[Question, str, float, float]] = []
    for row in zip(*by_part, strict=True):
        if row and not row[0].question.ground_truth:
            continue  # nothing that was tried is a right answer
        scored = [trial.scores(name) for trial, name in zip(row, weights, strict=True)]
        parts = list(zip(scored, weights.values(), strict=True))
        empty = sum(weight * score for (score, _), weight in parts)
        texts = [text for text in row[0].tried if all(text in found for _, found in scored)]
        right = {text: sum(weight * found[text] for (_, found), weight in parts) for text in texts}
        best = max(right, key=lambda text: right[text])
        if empty > right[best]:
            worse.append((row[0].question, best, right[best], empty))
    if not worse:
        return None
    question, text, score, empty = worse[0]
    return (
        f"data source {source}: on {len(worse)} of {len(by_part[0])} rows that were tried the empty answer earns more "
        f"than a right one, by reward {' + '.join(weights)}; on {question.origin} {empty:g} against {score:g} for "
        f"{text[:60]!r}. Training would teach the policy to say nothing. Check sign and weights, or put a right answer "
        "in the form that the reward reads into extra_info.answer"
    )


def _failed(name: str, question: Question, text: str, failure: Failure) -> Problem:
    return Problem(
        f"reward.{'rules' if name == 'rule' else name}",
        f"tried on {question.origin} (data source {question.data_source}), the answer {text[:60]!r} could not be "
        f"scored: {failure.told}",
        "mend it before training: a failure is never scored 0",
    )


def _blind(name: str, source: str, trials: Sequence[_Trial], score: float) -> str:
    tried = ", ".join(repr(text[:60]) for text in trials[0].tried[: 1 if name == "rule" else None])
    remedy = (
        "Check the rule of this data source and its ground truths"
        if name == "rule"
        else "If it reads another form, put a right answer in that form into extra_info.answer; a reward that is the "
        "same for all answers trains nothing"
    )
    return (
        f"reward {name}: data source {source}: the empty answer and right answers both score {score:g} on all of "
        f"{len(trials)} rows; tried on {trials[0].question.origin}: {tried}. {remedy}"
    )
