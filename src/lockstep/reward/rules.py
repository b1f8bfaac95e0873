"""Rules that compute a score from the text of an answer. The `data_source` of a row selects its rule."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.data.encode.prompt_rows import last_boxed
from lockstep.environments.grading import extract_code, grade, read_tests
from lockstep.errors import Problem, Refusal, missing_extra
from lockstep.reward.verl_versions import verl_score

# The rule `math` compares the last `\boxed{...}` of a text with the ground truth, using the package math-verify.
#
# A symbolic comparison of two terms can run forever, and `math_score` has no time limit. So the scorer runs
# `math_score` in a process that can be killed (`math_judge.py`).

_LATEX_NUMBER = re.compile(
    r"([-+]?)(?:(\d+|\d{1,3}(?:,\d{3})+)?(\.\d+)?|(\d+)/0*([1-9]\d*)|\\frac\{(\d+)\}\{0*([1-9]\d*)\})"
)
# In majority votes, an answer with more characters than this is compared as text.
_LONGEST_VOTE = 1000
# Exceptions that math-verify raises if two terms, such as a matrix and an interval, cannot be compared. Terms that
# cannot be compared are not equal.
_NOT_COMPARABLE = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError, KeyError, IndexError)


def boxed_example(ground_truth: str) -> str:
    return ground_truth if last_boxed(ground_truth) else rf"\boxed{{{_bare(ground_truth)}}}"


def boxed_answer(text: str) -> str | None:
    """Returns the normalised boxed answer: a number as a reduced fraction, any other term as sympy prints it.

    Terms that are equal only after simplification (`2x` and `x+x`) give different results.
    """
    boxed = last_boxed(text)
    if boxed is None:
        return None
    if len(boxed) > _LONGEST_VOTE:
        return _plain(boxed)
    number = _as_number(boxed)
    if number is not None:
        return number
    try:
        parsed = _parse(boxed)
    except _NOT_COMPARABLE:
        parsed = []
    return re.sub(r"\s+", " ", str(parsed[0])) if parsed else _plain(boxed)


def math_score(text: str, ground_truth: str) -> float:
    r"""Returns 1.0 if the last `\boxed{...}` equals the ground truth mathematically, else 0.0. Answers that are words,
    not formulas, are compared as text.

    The ground truth may be in a LaTeX box, between dollar signs, or plain.
    """
    from math_verify import verify

    truth = last_boxed(ground_truth) or _bare(ground_truth)
    if not truth:
        raise Refusal.at("ground_truth", "is empty", "fix the row", code="invalid-ground-truth")
    answer = last_boxed(text)
    if answer is None:
        return 0.0
    gold = _parse(truth)
    try:
        same = verify(gold, _parse(answer), timeout_seconds=None, raise_on_error=True)
    except _NOT_COMPARABLE:
        return 0.0
    return 1.0 if same else 0.0


def _parse(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # Silence math-verify's warning about the missing time limit: the worker process enforces a time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed = rf"\boxed{{{latex}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True)


def _bare(latex: str) -> str:
    return latex.strip().strip("$").strip()


def _plain(latex: str) -> str:
    """Removes LaTeX formatting commands and spaces."""
    looks = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!$ ]|\s+", "", latex)
    return _bare(re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", looks)).rstrip(".")


def _as_number(latex: str) -> str | None:
    """Returns an integer, decimal or fraction as a reduced fraction, or None for other terms."""
    match = _LATEX_NUMBER.fullmatch(_plain(latex))
    if not match or not any(match.groups()[1:]):
        return None
    sign, integer, decimals, *ratio = match.groups()
    top, bottom = (ratio[0] or ratio[2], ratio[1] or ratio[3])
    size = Fraction(int(top), int(bottom)) if top else Fraction((integer or "0").replace(",", "") + (decimals or ""))
    return str(-size if sign == "-" else size)


# A number in common notation: sign, currency, thousands separators, decimals. A point at the end is punctuation.
_NUMBER = r"[-+]?\s?\$?\s?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!\d))(?:\.\d+)?|[-+]?\$?\.\d+"
# A final number is `####`, one number and optional words. An expression (3/4, 3 + 4 = 7) or a form such as 1e5 or
# 1,00,000 is not a final number. Markdown stars around the number are accepted.
_MARKED = re.compile(rf"(?<!#)####(?!#)\s*\**\s*({_NUMBER})(?![\d/^=]|[eE][-+]?\d|,\d|\s*[-+*/=]\s*[\d$])")
# Matches a number in running text. A plus or minus after a digit, with or without spaces, is an operator, not a sign.
_ANY = re.compile(r"(?<![\d.,])(?:(?<!\d\s)(?<!\d\s\s)[-+]\s?)?\$?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?")


def extract_answer(text: str, *, strict: bool = True) -> str | None:
    """Returns the final number of a text as plain digits: the number after the last `####` or, if not `strict`, the
    last number.

    `#### $1,234.`, `#### 1234 apples` and `####1234` all give `1234`. The result is None if the text has no final
    number.
    """
    matches = (_MARKED if strict else _ANY).findall(text)
    return re.sub(r"[\s$,]", "", matches[-1]).removeprefix("+") if matches else None


def gsm8k_score(solution: str, ground_truth: str, *, strict: bool = True) -> float:
    """Returns 1.0 if the final number of the solution equals the ground truth in value ('18.0' and '18' are equal),
    else 0.0.

    Raises a refusal if the ground truth is not a number.
    """
    truth = _truth(ground_truth)
    if truth is None:
        raise Refusal.at("ground_truth", _not_a_number(ground_truth) or "", "fix the row", code="invalid-ground-truth")
    answer = extract_answer(solution, strict=strict)
    return 1.0 if answer is not None and _value(answer) == truth else 0.0


def _truth(ground_truth: str) -> Decimal | None:
    """Returns the number in a ground truth; if that is a worked answer, the number after its last `####`."""
    return _value(re.sub(r"[\s$,]", "", ground_truth.rpartition("####")[2]))


def _value(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _gsm8k_answer(text: str, *, strict: bool = True) -> str | None:
    """Returns the normalised final number: no redundant zeros, no sign on zero."""
    answer = extract_answer(text, strict=strict)
    if answer is None:
        return None
    integer, _, fraction = answer.removeprefix("-").partition(".")
    size = (integer.lstrip("0") or "0") + ("." + fraction.rstrip("0")).rstrip(".")
    return "-" + size if answer.startswith("-") and size != "0" else size


def _gsm8k_example(ground_truth: str) -> str:
    return ground_truth if "####" in ground_truth else f"#### {ground_truth}"


def _not_a_number(ground_truth: str) -> str | None:
    return f"{ground_truth!r} is not a number" if _truth(ground_truth) is None else None


def exact_score(text: str, ground_truth: str) -> float:
    """Returns 1.0 if the text equals the ground truth, apart from surrounding whitespace, else 0.0."""
    return 1.0 if text.strip() == ground_truth.strip() else 0.0


def _exact_answer(text: str) -> str | None:
    return text.strip() or None


def _empty(ground_truth: str) -> str | None:
    return None if ground_truth.strip() else "is empty"


def _tested_code(text: str) -> str | None:
    return extract_code(text).strip() or None


def _bad_tests(ground_truth: str) -> str | None:
    try:
        read_tests(ground_truth)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Rule:
    """A rule that scores the answers of a data source."""

    name: str
    score: Callable[[str, str], float]
    """Computes the score from a text and the ground truth."""
    answer: Callable[[str], str | None]
    """Extracts the normalised final answer of a text, for majority votes."""
    example: Callable[[str], str | None]
    """Writes a ground truth as a correct answer in the format of the rule. None if the ground truth does not contain an
    answer."""
    truth_problem: Callable[[str], str | None] = _empty
    """Returns why a ground truth is invalid, or None if it is valid."""
    isolated: str | None = None
    """`file.py:name` of a reward function with the same result, which runs in a separate process; set if the rule may
    hang."""
    seconds: float = 0.0
    """The smallest `reward.time_limit` with which the rule always ends in time."""
    own_limit: float = 0.0
    """The time limit of a call in seconds, if it is longer than `reward.time_limit`."""
    missing: str = ""
    """A package that the rule needs and that is not installed. Only data sources that use the rule are refused, because
    a converted recipe names the rules of all data sources of verl."""

    def __call__(self, text: str, ground_truth: str) -> float:
        return self.score(text, ground_truth)


# `math_judge.py` is only named here, because importing it loads math-verify.
_MATH_JUDGE = Path(__file__).with_name("math_judge.py")
_SANDBOX_JUDGE = Path(__file__).with_name("sandbox_judge.py")
_VERL_JUDGE = Path(__file__).with_name("verl_judge.py")
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("gsm8k", gsm8k_score, _gsm8k_answer, _gsm8k_example, _not_a_number),
        Rule(
            "gsm8k_flexible",
            partial(gsm8k_score, strict=False),
            partial(_gsm8k_answer, strict=False),
            _gsm8k_example,
            _not_a_number,
        ),
        Rule("math", math_score, boxed_answer, boxed_example, isolated=f"{_MATH_JUDGE}:judge"),
        Rule("exact", exact_score, _exact_answer, str),
        Rule(
            "sandbox",
            grade,
            _tested_code,
            lambda ground_truth: None,
            _bad_tests,
            isolated=f"{_SANDBOX_JUDGE}:judge",
            seconds=10.0,
        ),
    )
}
DEFAULT_RULES: dict[str, str] = {
    "arithmetic": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}


def rules_at_hand(rules: Mapping[str, str]) -> dict[str, str]:
    """Returns the rule names by data source: the entries of `rules`, and the built-in entries whose package is
    installed."""
    return {source: name for source, name in DEFAULT_RULES.items() if _is_installed(name)} | dict(rules)


def rule_name(source: str, rules: Mapping[str, str]) -> str | None:
    """Returns the name of the rule of a data source. An entry `aime*` is for all data sources that start with `aime`
    and have no entry of their own."""
    if source in rules:
        return rules[source]
    starts = [entry for entry in rules if entry.endswith("*") and source.startswith(entry[:-1])]
    return rules[max(starts, key=len)] if starts else None


def _is_installed(name: str) -> bool:
    return name != "math" or find_spec("math_verify") is not None


def any_isolated(sources: Iterable[str], rules: Mapping[str, str] | None = None) -> bool:
    """Returns whether the rule of any of these data sources needs a separate process that can be killed."""
    return any(rule_for(source, rules).isolated for source in sources)


def rule_named(name: str, where: str) -> Rule:
    """Returns the rule with this name. `where` is the recipe key that error messages show."""
    if name.startswith("verl/"):
        try:
            verl = verl_score(name)
        except ValueError as error:
            raise Refusal.at(where, f"there is no rule {name!r}", str(error), code="unknown-name") from error
        function = re.sub(r"\W", "_", name)
        judge = f"{_VERL_JUDGE}:{function}" if verl.seconds else None
        return Rule(
            name,
            verl.score,
            verl.answer,
            verl.example,
            verl.truth_problem,
            judge,
            own_limit=verl.seconds,
            missing=verl.package,
        )
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        raise Refusal.at(
            where,
            f"there is no rule {name!r}",
            (f"did you mean {near[0]}? " if near else "")
            + f"rules are {', '.join(RULES)} and those of verl, such as verl/gsm8k@0.9",
            code="unknown-name",
        )
    if not _is_installed(name):
        raise missing_extra("math-verify", "math", f"the rule math ({where})")
    return RULES[name]


def unmatched_rules(rules: Mapping[str, str], sources: Collection[str], key: str = "reward.rules") -> list[Problem]:
    """Returns a problem for each entry of `rules` whose data source no row has, but whose name is similar to the data
    source of some rows. The name is probably misspelt. All other entries without rows are allowed, because several
    recipes may share one set of rules."""
    without_rule = [source for source in sources if rule_name(source, rules) is None]
    problems = []
    for name in rules:
        expected = name in sources or name.endswith("*")
        near = [] if expected else difflib.get_close_matches(name, without_rule, n=1, cutoff=0.8)
        # `aime24` and `aime25`, `MATH-Hard` and `MATH` are different datasets, not misspelt.
        near = [one for one in near if _numbers(one) == _numbers(name) and not _is_part(one, name)]
        if near:
            why = f"no row has the data source {name!r}"
            problems.append(
                Problem(f"{key}.{name}", why, f"did you mean {near[0]}? Else remove it", code="unknown-source")
            )
    return problems


def _is_part(one: str, other: str) -> bool:
    """Returns whether one name is the other name plus a word, such as `MATH` and `MATH-Hard`."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and not long[len(short)].isalnum()


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def rule_for(data_source: str, rules: Mapping[str, str] | None = None, key: str = "reward.rules") -> Rule:
    """Returns the rule of a data source: the entry of `rules` (the value of the recipe key `key`), or the built-in
    rule.

    Raises `Refusal` if the data source has no rule. Without the refusal, all answers of this source would silently
    score 0.
    """
    available = {**DEFAULT_RULES, **(rules or {})}
    name = rule_name(data_source, available)
    if name is not None:
        rule = rule_named(name, f"{key}.{data_source}")
        if rule.missing:
            raise missing_extra(rule.missing, "math", f"the rule {name} ({key}.{data_source})")
        return rule
    near = difflib.get_close_matches(data_source, available, n=1)
    # The remedy shows the syntax of a command option or of a recipe key.
    other = f"{key} {data_source}=RULE" if key.startswith("-") else f"{key}: {{{data_source}: RULE}}"
    own = "" if key.startswith("-") else "; for a function of your own: reward.function=FILE.py:NAME"
    raise Refusal.at(
        f"data_source {data_source!r}",
        "has no rule",
        (f"did you mean {near[0]}? " if near else "")
        + f"rules exist for {', '.join(available)}; for another source: {other}, RULE is one of {', '.join(RULES)}"
        + own,
        code="no-rule",
    )
