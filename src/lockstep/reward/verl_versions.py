r"""The reward rules of verl (`default_compute_score`), for recipes that were converted from verl commands.

A rule is named `verl/NAME@VERSION`, for example `verl/gsm8k@0.9`. Its scores equal those of that verl version; a
version without its third number is the newest one. The versions differ in these points:

- gsm8k: before 0.4.1, the first `#### ` counts, not the last. From 0.5 on, only the last 300 characters are read.
- math, prime_math: before 0.6.1, of `\\\\%` only one backslash and the percent sign are removed.
- math_dapo: from 0.9.1 on, `\boxed{...}` counts if the response has no line `Answer: ...`.
- prime_math: see `verl_prime.py`. prime_code: see `verl_code.py`. sandbox_fusion: see `verl_fusion.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from lockstep.reward.verl_code import PrimeCode, bad_code_tests, prime_code_score, prime_code_text
from lockstep.reward.verl_fusion import bad_fusion_tests, fusion_code, fusion_score
from lockstep.reward.verl_grader import same_answer
from lockstep.reward.verl_prime import Prime, prime_answer, prime_score
from lockstep.reward.verl_scores import (
    braced,
    dapo_answer,
    dapo_score,
    gsm8k_answer,
    math_answer,
    math_score,
    search_answer,
    search_part_score,
    search_score,
    search_targets,
)

Version = tuple[int, int, int]


def _empty(ground_truth: str) -> str | None:
    return None if ground_truth.strip() else "is empty"


@dataclass(frozen=True)
class VerlScore:
    """A reward rule of one verl version."""

    score: Callable[[str, str], float]
    answer: Callable[[str], str | None]
    example: Callable[[str], str | None]
    truth_problem: Callable[[str], str | None] = _empty
    seconds: float = 0.0
    """Set if the rule needs a separate process: the time after which it ends in any case."""
    sandboxed: bool = False
    package: str = ""
    """A package that the rule needs, and that is not installed."""


_BOXED = "\\boxed{{{}}}".format
_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def _gsm8k(version: Version, *, strict: bool = True) -> VerlScore:
    read = partial(gsm8k_answer, tail=version >= (0, 5, 0), strict=strict, last=version >= (0, 4, 1))
    return VerlScore(lambda text, truth: float(read(text) == truth), read, "#### {}".format)


def _math(version: Version) -> VerlScore:
    return VerlScore(partial(math_score, both_percents=version >= (0, 6, 1)), math_answer, _BOXED)


def _math_dapo(version: Version) -> VerlScore:
    boxed = version >= (0, 9, 1)
    return VerlScore(partial(dapo_score, boxed=boxed), partial(dapo_answer, boxed=boxed), "Answer: {}".format)


def _search(version: Version, *, part: bool = False) -> VerlScore:
    def example(truth: str) -> str:
        return f"<answer>{search_targets(truth)[0]}</answer>"

    return VerlScore(search_part_score if part else search_score, search_answer, example, _bad_targets)


def _prime_math(version: Version) -> VerlScore:
    kind = Prime(symbolic=version < (0, 4, 0), matrices=version >= (0, 6, 1))
    score = partial(prime_score, version=kind)
    return VerlScore(score, prime_answer, _BOXED, seconds=60.0, package=_missing("pylatexenc"))


def _geo3k(version: Version) -> VerlScore:
    """The accuracy by the package mathruler, and a tenth of the score for the format."""

    def answer(text: str) -> str:
        found = braced(text, text.rfind("\\boxed{"))
        return "None" if found is None else found.strip()

    def score(text: str, truth: str) -> float:
        correct = same_answer(answer(text), truth, ruler=True, both_percents=False)
        return (1.0 - 0.1) * float(correct) + 0.1 * float(_FORMAT.fullmatch(text) is not None)

    def example(truth: str) -> str:
        return f"<think></think> {_BOXED(truth)}"

    return VerlScore(score, answer, example, seconds=60.0, package=_missing("pylatexenc"))


def _prime_code(version: Version) -> VerlScore:
    new = version >= (0, 4, 0)
    hidden = ("subprocess", "ctypes") if version >= (0, 9, 0) else ()
    kind = PrimeCode(single_seconds=10 if new else 5, alarm=new, hidden=hidden)
    score = partial(prime_code_score, version=kind)
    return VerlScore(score, prime_code_text, lambda truth: None, bad_code_tests, seconds=200.0, sandboxed=True)


def _fusion(version: Version) -> VerlScore:
    score = partial(fusion_score, statements=version >= (0, 6, 0))
    problem = partial(bad_fusion_tests, statements=version >= (0, 6, 0))
    return VerlScore(score, fusion_code, lambda truth: None, problem, seconds=400.0, sandboxed=True)


def _missing(package: str) -> str:
    return "" if find_spec(package) and find_spec("sympy") else package


def _bad_targets(ground_truth: str) -> str | None:
    try:
        search_targets(ground_truth)
    except ValueError as error:
        return str(error)
    return None


_MAKERS: dict[str, Callable[[Version], VerlScore]] = {
    "gsm8k": _gsm8k,
    "gsm8k_flexible": partial(_gsm8k, strict=False),
    "math": _math,
    "math_dapo": _math_dapo,
    "prime_math": _prime_math,
    "prime_code": _prime_code,
    "sandbox_fusion": _fusion,
    "geo3k": _geo3k,
    "search_r1": _search,
    "search_r1_subem": partial(_search, part=True),
}
NAMES = tuple(_MAKERS)
# The first version of rules that verl 0.3 does not have.
SINCE = dict.fromkeys(("math_dapo", "search_r1", "search_r1_subem", "sandbox_fusion"), (0, 4))
# The oldest and the newest version whose rules were read.
_OLDEST, _NEWEST = (0, 3), (0, 9)


def verl_score(name: str) -> VerlScore:
    """Returns the rule `verl/NAME@VERSION`. Raises ValueError that says what is wrong with the name."""
    match = re.fullmatch(r"verl/(\w+)@(\d+)\.(\d+)(?:\.(\d+)\w*)?(?:\.post\d+)?", name)
    if match is None or match[1] not in _MAKERS:
        raise ValueError(f"the rules of verl are {', '.join(f'verl/{one}@0.9' for one in NAMES)}")
    version = (int(match[2]), int(match[3]), 99 if match[4] is None else int(match[4]))
    if not _OLDEST <= version[:2] <= _NEWEST:
        raise ValueError("the rules of verl 0.3 to 0.9 are known; append one of these versions")
    first = SINCE.get(match[1], _OLDEST)
    if version[:2] < first:
        raise ValueError(f"verl has this rule from {first[0]}.{first[1]} on")
    return _MAKERS[match[1]](version)
