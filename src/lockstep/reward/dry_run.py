"""Tests before the first step whether the rewards score a correct answer differently from an empty answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.errors import Problem, refuse_all, shortened
from lockstep.model.trials import TrialReport
from lockstep.reward.environment_rewards import overlap, overlap_reason, with_trajectory
from lockstep.reward.parts import PartOutcome, RewardPart
from lockstep.reward.rules import Rule, boxed_example
from lockstep.trajectory import COMPLETED, Trajectory, TurnRecord
from lockstep.types import Failure, Question

# Number of rows per data source that the dry run tests.
ROWS = 3
# Reward components that get the ground truth and should score it as a correct answer.
KNOWING = ("rule", "function", "remote")


@dataclass(frozen=True)
class _Trial:
    """The scores of one reward component for one row: for the empty answer, and for candidates for a correct answer."""

    question: Question
    tried: list[str]
    empty: Future[PartOutcome]
    right: list[Future[PartOutcome]]

    def scores(self, name: str) -> tuple[float | None, dict[str, float]]:
        """Waits for the results. Returns the score of the empty answer, and the scores of the candidates by their
        text. Leaves out candidates without a score, for which a function with TRL's signature returned None."""
        empty, *right = [future.result() for future in (self.empty, *self.right)]
        assert not isinstance(empty, Failure)
        scored = [(text, one) for text, one in zip(self.tried, right, strict=True) if isinstance(one, dict)]
        return empty.get(name), {text: one[name] for text, one in scored if name in one}


def dry_run(
    parts: Sequence[RewardPart],
    questions: Sequence[Question],
    rule_of: Callable[[str], Rule | None],
    weights: Mapping[str, float],
    *,
    conversations: bool = False,
) -> TrialReport:
    """Scores empty and correct answers to some rows; reports one line per reward component and data source.

    Raises a refusal if scoring fails, if a score is not a finite number, or if a ground truth is invalid for its rule.
    `right_answers` gives the candidates for a correct answer. Warns if a component gives the same score to all
    candidates and to the empty answer; the candidates may lack the format that the component expects. Also warns if the
    weighted score of the empty answer is above the score of every candidate. If the run has `conversations` with an
    environment, an answer is a conversation of one turn. A function or endpoint that fails for such a conversation may
    need what only the environment gives (`state`, `info`), so its failure is a warning.
    """
    problems: list[Problem] = []
    if any(part.name == "rule" for part in parts):
        problems += _bad_truths(questions, rule_of)
    if conversations:
        problems += _overlaps(questions, {field for part in parts for field in part.fields})
        refuse_all(problems)
    sources = list(dict.fromkeys(question.data_source for question in questions))
    trials: dict[tuple[str, str], list[_Trial]] = {}
    for source in sources:
        rows = [question for question in questions if question.data_source == source][:ROWS]
        for part in parts:
            trials[part.name, source] = [_try(part, row, rule_of(source), conversations) for row in rows]
    for part in parts:
        part.flush()
    lines: list[str] = []
    warnings: list[str] = []
    untested: set[str] = set()
    for (name, source), tried in trials.items():
        failed = _first_failure(name, tried)
        if failed is not None and conversations and name in ("function", "remote"):
            warnings.append(f"reward {name}: could not be tested without the environment: {failed.why}")
            untested.add(name)
            continue
        if failed is not None:
            problems.append(failed)
            continue
        line, warning = _summary(name, source, tried, say_source=len(sources) > 1)
        lines.append(line)
        warnings += [warning] if warning else []
    refuse_all(problems)
    counting = {name: weight for name, weight in weights.items() if weight and name in KNOWING and name not in untested}
    inverted = [_inverted_warning(source, [trials[name, source] for name in counting], counting) for source in sources]
    return TrialReport(lines, warnings + [warning for warning in inverted if warning])


def right_answers(part: str, question: Question, rule: Rule | None) -> list[str]:
    """Returns candidates for a correct answer: the plain ground truth, the ground truth in the formats of rules and
    common reward functions, and the worked answer of the data set. For a rule, the candidate in the format of that rule
    is first."""
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
    if part != "rule" or rule is None:
        return list(dict.fromkeys(candidates))
    rule_example = rule.example(truth)
    if rule_example is None:
        # The ground truth contains no answer, so only the worked answer of the data set can be correct.
        return [worked] if isinstance(worked, str) and worked else []
    return list(dict.fromkeys([rule_example, *candidates]))


def _bad_truths(questions: Sequence[Question], rule_of: Callable[[str], Rule | None]) -> list[Problem]:
    problems = []
    for question in questions:
        rule = rule_of(question.data_source)
        why = rule.truth_problem(question.ground_truth) if rule else None
        if rule and why:
            problems.append(
                Problem(
                    str(question.origin),
                    f"ground truth {why}",
                    f"fix the row, whose data source uses rule {rule.name}",
                    code="invalid-ground-truth",
                )
            )
    return shortened(problems, "rows")


def _overlaps(questions: Sequence[Question], fields: Collection[str]) -> list[Problem]:
    problems = [
        Problem(
            str(question.origin),
            overlap_reason(field),
            f"rename the field {field!r} of the rows, for example in a reader (data.reader)",
            code="duplicate-name",
        )
        for question in questions
        if (field := overlap(question, fields))
    ]
    return shortened(problems, "rows")


def _try(part: RewardPart, question: Question, rule: Rule | None, conversations: bool) -> _Trial:
    tried = right_answers(part.name, question, rule)

    def submit(text: str) -> Future[PartOutcome]:
        messages = [*question.prompt, {"role": "assistant", "content": text}]
        trajectory = Trajectory(messages, (TurnRecord(0, 1),), COMPLETED)
        return part.submit(with_trajectory(question, trajectory) if conversations else question, text)

    return _Trial(question, tried, submit(""), [submit(text) for text in tried])


def _first_failure(name: str, trials: Sequence[_Trial]) -> Problem | None:
    for trial in trials:
        outcomes = [future.result() for future in (trial.empty, *trial.right)]
        for text, outcome in zip(["", *trial.tried], outcomes, strict=True):
            if isinstance(outcome, Failure):
                return _failure_problem(name, trial.question, text, outcome)
    return None


def _summary(name: str, source: str, trials: Sequence[_Trial], *, say_source: bool) -> tuple[str, str | None]:
    """Returns the summary line of a reward component and data source, and a warning if the component does not
    distinguish correct from empty answers."""
    where = f"reward {name}" + (f" ({source})" if say_source else "")
    shown: tuple[float, float] | None = None
    distinct = False
    for trial in trials:
        empty, scores = trial.scores(name)
        if empty is None or not scores:
            continue  # The component returned None for this row.
        # For a rule, only the first candidate is compared, which has the format of the rule.
        right = list(scores.values())[: 1 if name == "rule" else None]
        better = [score for score in right if score != empty]
        if shown is None or (better and not distinct):
            shown = (better or right)[0], empty
        distinct = distinct or bool(better)
    if shown is None and trials and not any(trial.tried for trial in trials):
        return f"{where}: no right answer to test with; a row can have one in extra_info.answer", None
    if shown is None:
        return f"{where}: {'None for the tested answers' if trials else 'no rows to test'}", None
    if name != "rule" and not any(trial.question.ground_truth for trial in trials):
        return f"{where}: empty answer {shown[1]:g}; no ground truth to test a right answer with", None
    line = f"{where}: right answer {shown[0]:g}, empty answer {shown[1]:g}"
    return line, None if distinct or name == "format" else _indistinct_warning(name, source, trials, shown[1])


def _inverted_warning(source: str, by_part: Sequence[Sequence[_Trial]], weights: Mapping[str, float]) -> str | None:
    """Returns a warning if the weighted score of the empty answer is higher than that of every candidate for a right
    answer."""
    worse: list[tuple[Question, str, float, float]] = []
    for row in zip(*by_part, strict=True):
        if row and not row[0].question.ground_truth:
            continue  # without a ground truth, no candidate is correct
        scored = [trial.scores(name) for trial, name in zip(row, weights, strict=True)]
        parts = list(zip(scored, weights.values(), strict=True))
        texts = [text for text in row[0].tried if all(text in found for _, found in scored)]
        if not texts or any(score is None for score, _ in scored):
            continue  # a component returned None
        empty = sum(weight * (score or 0.0) for (score, _), weight in parts)
        right = {text: sum(weight * found[text] for (_, found), weight in parts) for text in texts}
        best = max(right, key=lambda text: right[text])
        if empty > right[best]:
            worse.append((row[0].question, best, right[best], empty))
    if not worse:
        return None
    question, text, score, empty = worse[0]
    return (
        f"data source {source}: on {len(worse)} of {len(by_part[0])} tested rows the empty answer scores higher "
        f"than a right one, by reward {' + '.join(weights)}; on {question.origin} {empty:g} against {score:g} for "
        f"{text[:60]!r}. Training would teach the policy to say nothing. Check the sign and the weights of the "
        "rewards, or set extra_info.answer to a right answer in the format that the reward reads"
    )


def _failure_problem(name: str, question: Question, text: str, failure: Failure) -> Problem:
    return Problem(
        f"reward.{'rules' if name == 'rule' else name}",
        f"tested on {question.origin} (data source {question.data_source}), the answer {text[:60]!r} could not be "
        f"scored: {failure.message}",
        "fix the reward before training: lockstep never scores a failed response as 0",
        code="reward-failed",
    )


def _indistinct_warning(name: str, source: str, trials: Sequence[_Trial], score: float) -> str:
    tried = ", ".join(repr(text[:60]) for text in trials[0].tried[: 1 if name == "rule" else None])
    remedy = (
        "Check the rule of this data source and its ground truths"
        if name == "rule"
        else "If the reward expects another format, put a right answer in that format into extra_info.answer; a "
        "reward that is the same for all answers trains nothing"
    )
    return (
        f"reward {name}: data source {source}: the empty answer and right answers both score {score:g} on all of "
        f"{len(trials)} rows; tested on {trials[0].question.origin}: {tried}. {remedy}"
    )
