"""Converts sampled and scored responses to training rows: best of n, pairs, KTO rows, conditional SFT."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.data.prepare.generated import assistant_message, write_rows
from lockstep.data.sources.read import read_rows
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.types import Message, Row

COLUMNS = ("question", "prompt", "response", "reward", "stop", "tokens")
NO_SCORE, CUT, EMPTY = "without a score", "cut off at the length limit", "empty"


@dataclass(frozen=True)
class ScoredResponse:
    text: str
    reward: float
    tokens: int


@dataclass
class ScoredQuestion:
    """A question with its usable responses (scored, not cut off, not empty), in the order of the file."""

    prompt: list[Message]
    responses: list[ScoredResponse] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """The images of the prompt, as data URIs, which jsonl and parquet files can store."""

    @property
    def tied(self) -> bool:
        return len(self.responses) > 1 and len({response.reward for response in self.responses}) == 1


@dataclass(frozen=True)
class Scored:
    """Scored responses by question. `unused` counts the responses that cannot be used, by reason."""

    groups: list[ScoredQuestion]
    responses: int
    unused: Counter[str]


def read_scored(samples: str, *, keep_cut: bool = False) -> Scored:
    """Reads the output of `lockstep sample` from a file or a glob pattern. Responses to the same question are
    merged."""
    rows = read_rows(samples)
    missing = [column for column in COLUMNS if column not in rows.columns]
    if missing:
        raise Refusal.at(
            samples,
            f"lacks the columns {', '.join(missing)}; the existing columns are {', '.join(rows.columns)}",
            "give a file that `lockstep sample` wrote",
            code="missing-column",
        )
    if "conversation" in rows.columns:
        raise Refusal.at(
            samples,
            "has conversations with an environment, and the rows that this command writes have one response per prompt",
            "sample without --environment and --tool",
            code="lost-content",
        )
    groups: dict[tuple[int, str], ScoredQuestion] = {}
    unused: Counter[str] = Counter()
    problems: list[Problem] = []
    for number, row in enumerate(rows):
        wrong = _wrong(row)
        if wrong:
            problems.append(Problem(str(rows.origin(number)), wrong, "fix or remove the row", code="invalid-row"))
            continue
        key = row["question"], json.dumps(row["prompt"], ensure_ascii=False, sort_keys=True)
        group = groups.setdefault(key, ScoredQuestion(row["prompt"], images=_data_uris(row)))
        reason = _unusable(row, keep_cut)
        if reason:
            unused[reason] += 1
        else:
            group.responses.append(ScoredResponse(row["response"], float(row["reward"]), row["tokens"]))
    refuse_all(problems, "rows")
    return Scored(list(groups.values()), len(rows), unused)


def _data_uris(row: Row) -> list[str]:
    return [f"data:image;base64,{base64.b64encode(one['bytes']).decode()}" for one in row.get("images") or ()]


def _wrong(row: Row) -> str:
    """Returns why the row is not a valid response, or an empty string if the row is valid."""
    prompt, reward = row["prompt"], row["reward"]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and m.get("role") for m in prompt):
        return "prompt is not a list of chat messages"
    if not isinstance(row["response"], str):
        return "response is not text"
    if reward is not None and (isinstance(reward, str | bool) or not math.isfinite(reward)):
        return f"reward is {reward!r}, not a number"
    if not isinstance(row["tokens"], int) or not isinstance(row["question"], int):
        return "question and tokens must be integers"
    return ""


def _unusable(row: Row, keep_cut: bool) -> str:
    if row["reward"] is None:
        return NO_SCORE
    if row["stop"] == "length" and not keep_cut:
        return CUT
    return "" if row["response"].strip() else EMPTY


# Conditional SFT (arXiv 2308.12050) trains on every response, with its reward in the prompt. At inference, a high
# reward in the prompt requests a good response.

TEMPLATE = "{input} <rm_score>: {reward} "
_FIELDS = ("{input}", "{reward}")


def refuse_template(template: str) -> None:
    missing = [name for name in _FIELDS if name not in template]
    if missing:
        raise Refusal.at(
            "--reward-template",
            f"does not contain {' and '.join(missing)}",
            f"for example {TEMPLATE!r}",
            code="missing-placeholder",
        )


def normalised(groups: Sequence[ScoredQuestion]) -> list[ScoredQuestion]:
    """Normalises rewards by the mean and the standard deviation (divisor n - 1) over all usable responses."""
    rewards = [response.reward for group in groups for response in group.responses]
    mean = math.fsum(rewards) / max(len(rewards), 1)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    if variance == 0:
        raise Refusal.at(
            "--normalize", "all rewards are equal: their standard deviation is 0", "remove it", code="equal-rewards"
        )

    def scaled(response: ScoredResponse) -> ScoredResponse:
        return replace(response, reward=(response.reward - mean) / math.sqrt(variance))

    return [replace(group, responses=[scaled(response) for response in group.responses]) for group in groups]


def conditioned(prompt: Sequence[Message], reward: float, template: str) -> list[Message]:
    """Returns the prompt with the reward (two decimals) in its last message."""
    *before, last = prompt
    # The prompt is inserted last, so that a "{reward}" in the prompt is not replaced.
    text = template.replace("{reward}", f"{reward:.2f}").replace("{input}", str(last["content"]))
    return [*before, {**last, "content": text}]


def conditional_rows(group: ScoredQuestion, responses: Sequence[ScoredResponse], template: str) -> list[Row]:
    return [
        {"messages": [*conditioned(group.prompt, r.reward, template), *assistant_message(r.text)], "reward": r.reward}
        for r in responses
    ]


KINDS = ("pairs", "sft", "kto", "conditional")
TIES = ("first", "shortest")
# By default, a response with at least this reward is labelled as good. Rule-based rewards are 0 or 1.
THRESHOLD = 0.5

EQUAL = "all rewards equal"
NOTHING = "no response that can be used"
TOO_FEW = "fewer than two different responses"
BELOW = "best reward below --min-reward"
CLOSE = "margin below --min-margin"


@dataclass(frozen=True)
class Selection:
    """Options that select responses of a question. A `threshold` of None means the mean reward of the question's
    responses."""

    kind: str = "pairs"
    per_prompt: int = 1
    min_margin: float = 0.0
    min_reward: float = -math.inf
    threshold: float | None = THRESHOLD
    length_tie: str = "first"
    keep_cut: bool = False
    reward_template: str = TEMPLATE
    normalize: bool = False


def choice_of(
    kind: str,
    per_prompt: int | None = None,
    min_margin: float | None = None,
    min_reward: float | None = None,
    threshold: str | None = None,
    length_tie: str | None = None,
    keep_cut: bool = False,
    reward_template: str | None = None,
    normalize: bool = False,
) -> Selection:
    """Converts the options of `lockstep pairs`. Raises an error for options that do not apply to the kind of
    rows."""
    if kind not in KINDS:
        raise Refusal.at("--kind", f"{kind!r} is not one of {', '.join(KINDS)}", code="unknown-name")
    if length_tie not in (None, *TIES):
        raise Refusal.at("--length-tie", f"{length_tie!r} is not one of {', '.join(TIES)}", code="unknown-name")
    given = {
        "--per-prompt": (per_prompt, ("pairs", "sft")),
        "--min-margin": (min_margin, ("pairs",)),
        "--min-reward": (min_reward, ("pairs", "sft")),
        "--threshold": (threshold, ("kto",)),
        "--length-tie": (length_tie, ("pairs", "sft")),
        "--reward-template": (reward_template, ("conditional",)),
        "--normalize": (normalize or None, ("conditional",)),
    }
    problems = [
        Problem(
            option,
            f"does not apply to --kind {kind}",
            f"remove it; it applies only to --kind {' and '.join(kinds)}",
            code="unused-key",
        )
        for option, (value, kinds) in given.items()
        if value is not None and kind not in kinds
    ]
    refuse_all(problems)
    if reward_template is not None:
        refuse_template(reward_template)
    return Selection(
        kind,
        per_prompt or 1,
        min_margin or 0.0,
        -math.inf if min_reward is None else min_reward,
        THRESHOLD if threshold is None else _threshold(threshold),
        length_tie or "first",
        keep_cut,
        TEMPLATE if reward_template is None else reward_template,
        normalize,
    )


def _threshold(given: str) -> float | None:
    if given == "mean":
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refusal.at("--threshold", f"{given!r} is not a number", "give a number, or mean", code="not-a-number")
    return value


@dataclass
class SelectionCounts:
    """Counts of the conversion. `left_out` counts questions without a row, and `unused` counts unused responses, both
    by reason."""

    questions: int = 0
    responses: int = 0
    used: int = 0
    ties: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)

    def table(self) -> list[tuple[str, str]]:
        lines = [("questions", self.questions), ("  used", self.used)]
        lines += [(f"  left out: {reason}", count) for reason, count in self.left_out.items()]
        if EQUAL not in self.left_out:
            lines.append(("  with all rewards equal", self.ties))
        lines.append(("responses", self.responses))
        lines += [(f"  left out: {reason}", count) for reason, count in self.unused.items()]
        return [(name, f"{count:,}") for name, count in [*lines, ("rows written", self.rows)]]


def write_pairs(samples: str, out: Path, choice: Selection) -> SelectionCounts:
    """Reads the responses of `samples` and writes the selected rows to `out` (.parquet or .jsonl). Returns the
    counts."""
    if out.suffix not in (".parquet", ".jsonl"):
        raise Refusal.at(
            out,
            "has no suffix that names the format to write",
            "use the suffix .parquet or .jsonl",
            code="unsupported-format",
        )
    if out.exists():
        raise Refusal.at(out, "exists already", "choose another name, or remove it", code="already-exists")
    scored = read_scored(samples, keep_cut=choice.keep_cut)
    counts = SelectionCounts(len(scored.groups), scored.responses, unused=scored.unused)
    groups = normalised(scored.groups) if choice.normalize else scored.groups
    rows = list(chosen_rows(groups, choice, counts))
    if not rows:
        raise Refusal.at(
            samples, f"gives no row of kind {choice.kind}: {_why_none(counts)}", _remedy(counts), code="no-rows"
        )
    write_rows(out, rows)
    return counts


def chosen_rows(groups: Sequence[ScoredQuestion], choice: Selection, counts: SelectionCounts) -> Iterator[Row]:
    """Yields the training rows of every question in order. Updates `counts`."""
    makers: dict[str, Callable[[ScoredQuestion, Selection], list[Row] | str]] = {
        "pairs": _pairs,
        "sft": _best,
        "kto": _verdicts,
        "conditional": _conditional,
    }
    make = makers[choice.kind]
    for group in groups:
        made = make(group, choice)
        counts.ties += group.tied
        if isinstance(made, str):
            counts.left_out[made] += 1
            continue
        counts.used += 1
        counts.rows += len(made)
        yield from ({**row, "images": group.images} for row in made) if group.images else made


def _best(group: ScoredQuestion, choice: Selection) -> list[Row] | str:
    """Returns the best distinct responses with at least the minimum reward, or the reason why there are none."""
    ranked = _distinct(_ranked(group.responses, choice.length_tie, best_first=True))
    if not ranked:
        return NOTHING
    good = [response for response in ranked if response.reward >= choice.min_reward][: choice.per_prompt]
    return [{"messages": [*group.prompt, *assistant_message(r.text)], "reward": r.reward} for r in good] or BELOW


def _pairs(group: ScoredQuestion, choice: Selection) -> list[Row] | str:
    """Returns pairs of the best and the worst response, then of the next best and the next worst. No response text is
    used in two pairs. Returns the reason if there is no pair."""
    if group.tied:
        return EQUAL
    best = _ranked(group.responses, choice.length_tie, best_first=True)
    worst = _ranked(group.responses, choice.length_tie, best_first=False)
    if best and best[0].reward < choice.min_reward:
        return BELOW
    taken: set[str] = set()
    made: list[Row] = []
    while len(made) < choice.per_prompt:
        chosen = next((r for r in best if r.text not in taken), None)
        if chosen is None:
            return made or TOO_FEW
        taken.add(chosen.text)
        rejected = next((r for r in worst if r.text not in taken), None)
        if rejected is None:
            return made or TOO_FEW
        taken.add(rejected.text)
        margin = chosen.reward - rejected.reward
        if margin <= 0 or margin < choice.min_margin or chosen.reward < choice.min_reward:
            return made or CLOSE
        made.append(
            {
                "prompt": group.prompt,
                "chosen": assistant_message(chosen.text),
                "rejected": assistant_message(rejected.text),
                "margin": margin,
                "score_chosen": chosen.reward,
                "score_rejected": rejected.reward,
            }
        )
    return made


def _verdicts(group: ScoredQuestion, choice: Selection) -> list[Row] | str:
    """Returns a KTO row for each distinct response. The label of a row is true if the reward of the response is at
    least `threshold`, which by default is the mean reward of the question's responses. Returns the reason if there is
    no row."""
    if not group.responses:
        return NOTHING
    threshold = choice.threshold
    if threshold is None:
        if len({response.reward for response in group.responses}) == 1:
            return EQUAL
        threshold = math.fsum(response.reward for response in group.responses) / len(group.responses)
    return [
        {
            "prompt": group.prompt,
            "completion": assistant_message(r.text),
            "label": r.reward >= threshold,
            "reward": r.reward,
        }
        for r in _distinct(group.responses)
    ]


def _conditional(group: ScoredQuestion, choice: Selection) -> list[Row] | str:
    """Returns a row for each distinct response, with its reward in the prompt. Returns the reason if there is no
    row."""
    return conditional_rows(group, _distinct(group.responses), choice.reward_template) or NOTHING


def _ranked(responses: Sequence[ScoredResponse], tie: str, *, best_first: bool) -> list[ScoredResponse]:
    sign = -1 if best_first else 1
    return sorted(responses, key=lambda r: (sign * r.reward, r.tokens if tie == "shortest" else 0))


def _distinct(responses: Sequence[ScoredResponse]) -> list[ScoredResponse]:
    """Returns the first response of each distinct text."""
    kept: dict[str, ScoredResponse] = {}
    for response in responses:
        kept.setdefault(response.text, response)
    return list(kept.values())


def _why_none(counts: SelectionCounts) -> str:
    questions = [f"{count:,} questions: {reason}" for reason, count in counts.left_out.items()]
    return "; ".join([*questions, *(f"{count:,} responses {reason}" for reason, count in counts.unused.items())])


def _remedy(counts: SelectionCounts) -> str:
    """Returns the remedy for the most frequent reason why questions give no row. If the reason is a lack of usable
    responses, returns the remedy for the most frequent reason why responses are not usable."""
    reason = counts.left_out.most_common(1)[0][0]
    if reason in (NOTHING, TOO_FEW) and counts.unused:
        reason = counts.unused.most_common(1)[0][0]
    return {
        EQUAL: "sample more responses (--n), use a higher temperature, or choose easier or harder questions",
        TOO_FEW: "sample more responses (--n), or use a higher temperature",
        BELOW: "lower --min-reward, or sample more responses (--n)",
        CLOSE: "lower --min-margin, or sample more responses (--n)",
        NO_SCORE: "fix the reward and sample again; the column `failure` says what went wrong",
        CUT: "raise --max-new-tokens of `lockstep sample`, or keep truncated responses with --keep-cut",
        EMPTY: "sample from a model that gives non-empty answers",
    }[reason]
