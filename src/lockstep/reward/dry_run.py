"""Dry run of the rewards before the first step: checks that they distinguish correct from empty answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.errors import Problem, refuse_all, shortened
from lockstep.model.trials import TrialReport
from lockstep.reward.parts import PartOutcome, RewardPart
from lockstep.reward.rules import Rule, boxed_example
from lockstep.types import Failure, Question

# Rows per data source that are tried.
ROWS = 3
# Parts that get the ground truth, so it is a correct answer for them.
KNOWING = ("rule", "function", "remote")


@dataclass(frozen=True)
class _Trial:
    """The scores of one part for one row: the empty answer, and each candidate of a correct answer."""

    question: Question
    tried: list[str]
    empty: Future[PartOutcome]
    right: list[Future[PartOutcome]]

    def scores(self, name: str) -> tuple[float, dict[str, float]]:
        """The score of the empty answer, and the other scores by text. Waits for the results."""
        empty, *right = [future.result() for future in (self.empty, *self.right)]
        assert not isinstance(empty, Failure)
        by_text = {text: score[name] for text, score in zip(self.tried, right, strict=True) if isinstance(score, dict)}
        return empty[name], by_text


def dry_run(
    parts: Sequence[RewardPart],
    questions: Sequence[Question],
    rule_of: Callable[[str], Rule | None],
    weights: Mapping[str, float],
) -> TrialReport:
    """Returns one line per part and data source. Refuses exceptions and scores that are not finite numbers.

    With a rule every ground truth is checked. The candidates come from `right_answers`. Warns if a part gives equal
    scores to correct and empty answers (its format may be missing), and if the empty answer has a higher weighted score
    than all candidates.
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
    lines, warnings = [], []
    for (name, source), tried in trials.items():
        failed = _first_failure(name, tried)
        if failed is not None:
            problems.append(failed)
            continue
        line, warning = _summary(name, source, tried, say_source=len(sources) > 1)
        lines.append(line)
        warnings += [warning] if warning else []
    refuse_all(problems)
    counting = {name: weight for name, weight in weights.items() if weight and name in KNOWING}
    inverted = [_inverted_warning(source, [trials[name, source] for name in counting], counting) for source in sources]
    return TrialReport(lines, warnings + [warning for warning in inverted if warning])


def right_answers(part: str, question: Question, rule: Rule | None) -> list[str]:
    """Candidates of a correct answer: the plain ground truth, the formats of rules and common reward functions, and the
    worked answer of the data set. For the rule its format comes first."""
    truth = question.ground_truth
    worked = question.extra_info.get("answer")
    boxed = boxed_example(truth)
    candidates = [truth, f"#### {truth}", boxed]
    if part in KNOWING:
        candidates += [
            f"<answer>{truth}</answer>",
            f"<think>\nso\n</think>\n<answer>\n{truth}\n</answer>",
            f"<think>\nso\n</think>\n{boxed}",
            f"<think>\nso\n</think>\n<answer>{boxed}</answer>",
            f"Answer: {truth}",
            f"The answer is {truth}.",
        ]
    candidates += [worked] if isinstance(worked, str) and worked else []
    rule_example = [rule.example(truth)] if part == "rule" and rule is not None else []
    return list(dict.fromkeys([*rule_example, *candidates]))


def _bad_truths(questions: Sequence[Question], rule_of: Callable[[str], Rule | None]) -> list[Problem]:
    problems = []
    for question in questions:
        rule = rule_of(question.data_source)
        why = rule.truth_problem(question.ground_truth) if rule else None
        if rule and why:
            problems.append(Problem(str(question.origin), f"ground truth {why}", f"fix the row: rule {rule.name}"))
    return shortened(problems, "rows")


def _try(part: RewardPart, question: Question, rule: Rule | None) -> _Trial:
    tried = right_answers(part.name, question, rule)
    return _Trial(question, tried, part.submit(question, ""), [part.submit(question, text) for text in tried])


def _first_failure(name: str, trials: Sequence[_Trial]) -> Problem | None:
    for trial in trials:
        outcomes = [future.result() for future in (trial.empty, *trial.right)]
        for text, outcome in zip(["", *trial.tried], outcomes, strict=True):
            if isinstance(outcome, Failure):
                return _failure_problem(name, trial.question, text, outcome)
    return None


def _summary(name: str, source: str, trials: Sequence[_Trial], *, say_source: bool) -> tuple[str, str | None]:
    """The summary line of a part and source, and a warning if it does not distinguish correct from empty answers."""
    where = f"reward {name}" + (f" ({source})" if say_source else "")
    shown: tuple[float, float] | None = None
    distinct = False
    for trial in trials:
        empty, scores = trial.scores(name)
        # For the rule only its format counts, which comes first.
        right = list(scores.values())[: 1 if name == "rule" else None]
        better = [score for score in right if score != empty]
        if shown is None or (better and not distinct):
            shown = (better or right)[0], empty
        distinct = distinct or bool(better)
    if shown is None:
        return f"{where}: no rows to try", None
    if name != "rule" and not any(trial.question.ground_truth for trial in trials):
        return f"{where}: empty answer {shown[1]:g}; no ground truth to try a right one with", None
    line = f"{where}: right answer {shown[0]:g}, empty answer {shown[1]:g}"
    return line, None if distinct or name == "format" else _indistinct_warning(name, source, trials, shown[1])


def _inverted_warning(source: str, by_part: Sequence[Sequence[_Trial]], weights: Mapping[str, float]) -> str | None:
    """A warning if the empty answer scores higher than every candidate."""
    worse: list[tuple[Question, str, float, float]] = []
    for row in zip(*by_part, strict=True):
        if row and not row[0].question.ground_truth:
            continue  # no candidate is a correct answer
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
        f"data source {source}: on {len(worse)} of {len(by_part[0])} rows the empty answer earns more "
        f"than a right one, by reward {' + '.join(weights)}; on {question.origin} {empty:g} against {score:g} for "
        f"{text[:60]!r}. Training would teach the policy to say nothing. Check sign and weights, or set "
        "extra_info.answer to a right answer in the format that the reward reads"
    )


def _failure_problem(name: str, question: Question, text: str, failure: Failure) -> Problem:
    return Problem(
        f"reward.{'rules' if name == 'rule' else name}",
        f"tried on {question.origin} (data source {question.data_source}), the answer {text[:60]!r} could not be "
        f"scored: {failure.message}",
        "fix it before training: a failure is never scored 0",
    )


def _indistinct_warning(name: str, source: str, trials: Sequence[_Trial], score: float) -> str:
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
