"""Rules that score an answer: text in, a score out. The `data_source` of a row selects its rule."""

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
from lockstep.errors import Problem, Refusal, missing_extra

# The rule `math`: the last `\boxed{...}` of a text, compared as mathematics by the package math-verify.
#
# Nothing here is limited in time: an answer can be built to keep the comparison busy for ever. The scorer therefore
# compares in a process that it can kill (`math_judge.py`).

_LATEX_NUMBER = re.compile(
    r"([-+]?)(?:(\d+|\d{1,3}(?:,\d{3})+)?(\.\d+)?|(\d+)/0*([1-9]\d*)|\\frac\{(\d+)\}\{0*([1-9]\d*)\})"
)
# A longer answer is compared by its letters alone when votes are counted.
_LONGEST_VOTE = 1000
# What math-verify raises when two things have no comparison (a matrix with an interval ...): they are not equal.
_NOT_COMPARABLE = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError, KeyError, IndexError)


def boxed_example(ground_truth: str) -> str:
    return ground_truth if last_boxed(ground_truth) else rf"\boxed{{{_bare(ground_truth)}}}"


def boxed_answer(text: str) -> str | None:
    """The boxed answer in one spelling: numbers as fractions, other terms as sympy orders them.

    Equal terms that need working out (`2x` and `x+x`) stay apart.
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
    r"""1.0 when the last `\boxed{...}` equals the ground truth as mathematics, else 0.0. Words are compared as words.

    The ground truth may stand in a box or in dollars, or bare.
    """
    from math_verify import verify

    truth = last_boxed(ground_truth) or _bare(ground_truth)
    if not truth:
        raise Refusal.at("ground_truth", "is empty", "mend the row")
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

    # It warns that no time limit is set; the limit is the process's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed = rf"\boxed{{{latex}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True)


def _bare(latex: str) -> str:
    return latex.strip().strip("$").strip()


def _plain(latex: str) -> str:
    """Without what only changes the looks."""
    looks = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!$ ]|\s+", "", latex)
    return _bare(re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", looks)).rstrip(".")


def _as_number(latex: str) -> str | None:
    """A whole number, a decimal or a fraction as a fraction in lowest terms; None for anything else."""
    match = _LATEX_NUMBER.fullmatch(_plain(latex))
    if not match or not any(match.groups()[1:]):
        return None
    sign, whole, decimals, *ratio = match.groups()
    top, bottom = (ratio[0] or ratio[2], ratio[1] or ratio[3])
    size = Fraction(int(top), int(bottom)) if top else Fraction((whole or "0").replace(",", "") + (decimals or ""))
    return str(-size if sign == "-" else size)


# Rules that check an answer: pure text in, a score out. Which rule checks a row is said by its `data_source`.

# A number as people write it: sign, currency, thousands separators, decimals. A trailing point is punctuation.
_NUMBER = r"[-+]?\s?\$?\s?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!\d))(?:\.\d+)?|[-+]?\$?\.\d+"
# After the mark comes one number and then, at most, words: an expression (3/4, 3 + 4 = 7) or a form such as 1e5 or
# 1,00,000 is no final number. Markdown stars around the number are let through.
_MARKED = re.compile(rf"(?<!#)####(?!#)\s*\**\s*({_NUMBER})(?![\d/^=]|[eE][-+]?\d|,\d|\s*[-+*/=]\s*[\d$])")
# In running text a minus right after a digit or a space between numbers is an operator, not a sign.
_ANY = re.compile(r"(?<![\d.,])(?:(?<!\d\s)(?<!\d\s\s)[-+]\s?)?\$?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?")


def extract_answer(text: str, *, strict: bool = True) -> str | None:
    """The final number as plain digits: what follows the last `####`, or (flexible) the last number of all.

    `#### $1,234.`, `#### 1234 apples` and `####1234` all give `1234`. None when there is no such number.
    """
    found = (_MARKED if strict else _ANY).findall(text)
    return re.sub(r"[\s$,]", "", found[-1]).removeprefix("+") if found else None


def gsm8k_score(solution: str, ground_truth: str, *, strict: bool = True) -> float:
    """1.0 when the final number equals the ground truth as a number ('18.0' is '18'), else 0.0.

    A ground truth that is no number is an error of the data, not a wrong answer.
    """
    truth = _truth(ground_truth)
    if truth is None:
        raise Refusal.at("ground_truth", _not_a_number(ground_truth) or "", "mend the row")
    answer = extract_answer(solution, strict=strict)
    return 1.0 if answer is not None and _value(answer) == truth else 0.0


def _truth(ground_truth: str) -> Decimal | None:
    """The number of a ground truth, which may be a worked answer: then what follows its last `####`."""
    return _value(re.sub(r"[\s$,]", "", ground_truth.rpartition("####")[2]))


def _value(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _gsm8k_answer(text: str, *, strict: bool = True) -> str | None:
    """The final number in one spelling: no needless zeros, no sign on zero."""
    found = extract_answer(text, strict=strict)
    if found is None:
        return None
    whole, _, fraction = found.removeprefix("-").partition(".")
    size = (whole.lstrip("0") or "0") + ("." + fraction.rstrip("0")).rstrip(".")
    return "-" + size if found.startswith("-") and size != "0" else size


def _gsm8k_example(ground_truth: str) -> str:
    return ground_truth if "####" in ground_truth else f"#### {ground_truth}"


def _not_a_number(ground_truth: str) -> str | None:
    return f"{ground_truth!r} is not a number" if _truth(ground_truth) is None else None


def exact_score(text: str, ground_truth: str) -> float:
    """1.0 when the two texts are equal but for space around them, else 0.0."""
    return 1.0 if text.strip() == ground_truth.strip() else 0.0


def _exact_answer(text: str) -> str | None:
    return text.strip() or None


def _empty(ground_truth: str) -> str | None:
    return None if ground_truth.strip() else "is empty"


@dataclass(frozen=True)
class Rule:
    """How the answers of a data source are checked."""

    name: str
    score: Callable[[str, str], float]
    """(text, ground truth) -> score."""
    answer: Callable[[str], str | None]
    """The final answer of a text, spelled so that equal answers are equal strings; for votes."""
    example: Callable[[str], str]
    """A right answer in the form that the rule reads."""
    truth_problem: Callable[[str], str | None] = _empty
    """What is wrong with a ground truth that no answer could match, or None."""
    isolated: str | None = None
    """`file.py:name` of the same check for a process that can be killed, where a check may take for ever."""

    def __call__(self, text: str, ground_truth: str) -> float:
        return self.score(text, ground_truth)


# Named, not imported: importing it loads math-verify.
_MATH_JUDGE = Path(__file__).with_name("math_judge.py")
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
    """Rule by data source: those of the setting, and the built-in ones whose package is installed."""
    return {source: name for source, name in DEFAULT_RULES.items() if _is_installed(name)} | dict(rules)


def _is_installed(name: str) -> bool:
    return name != "math" or find_spec("math_verify") is not None


def any_isolated(sources: Iterable[str], rules: Mapping[str, str] | None = None) -> bool:
    """Whether answers to questions of these data sources are checked in a process that can be killed."""
    return any(rule_for(source, rules).isolated for source in sources)


def rule_named(name: str, where: str) -> Rule:
    """The rule of this name; `where` is the key that asked for it."""
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        raise Refusal.at(
            where,
            f"there is no rule {name!r}",
            (f"did you mean {near[0]}? " if near else "") + f"rules are {', '.join(RULES)}",
        )
    if not _is_installed(name):
        raise missing_extra("math-verify", "math", f"the rule math ({where})")
    return RULES[name]


def unmatched_rules(rules: Mapping[str, str], sources: Collection[str], key: str = "reward.rules") -> list[Problem]:
    """Entries that are nearly the name of a data source that has none: its rows would be judged by another rule. Other
    entries that no row needs do no harm: recipes of several datasets share them."""
    alone = [source for source in sources if source not in rules]
    problems = []
    for name in rules:
        near = difflib.get_close_matches(name, alone, n=1, cutoff=0.8) if name not in sources else []
        # `aime24` beside `aime25`, `MATH-Hard` beside `MATH`: another dataset, not a misspelt one.
        near = [one for one in near if _numbers(one) == _numbers(name) and not _is_part(one, name)]
        if near:
            why = f"no row has the data source {name!r}"
            problems.append(Problem(f"{key}.{name}", why, f"did you mean {near[0]}? Else remove it"))
    return problems


def _is_part(one: str, other: str) -> bool:
    """Whether one is the other and a word more: `MATH` and `MATH-Hard`."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and not long[len(short)].isalnum()


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def rule_for(data_source: str, rules: Mapping[str, str] | None = None, key: str = "reward.rules") -> Rule:
    """The rule of a data source: of the setting `key`, or else a built-in one.

    A source without a rule is refused: it must not score 0.
    """
    known = {**DEFAULT_RULES, **(rules or {})}
    if data_source in known:
        return rule_named(known[data_source], f"{key}.{data_source}")
    near = difflib.get_close_matches(data_source, known, n=1)
    # An option of a command is written otherwise than a key of a recipe.
    other = f"{key} {data_source}=RULE" if key.startswith("-") else f"{key}: {{{data_source}: RULE}}"
    raise Refusal.at(
        f"data_source {data_source!r}",
        "has no rule",
        (f"did you mean {near[0]}? " if near else "")
        + f"rules exist for {', '.join(known)}; for another source: {other}, RULE being {', '.join(RULES)}",
    )
