"""Responses and ground truths for verl's reward rules, and verl's functions that score them.

`python -m tests.migration.verl_reward_texts OUT.json`, in the environment of `make test-migration` and with
LOCKSTEP_PEERS set, writes the expectations of tests/unit/test_verl_scores.py (tests/data/migration/verl_rewards.json).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from .peers import module

# Every version in which the code of a rule changed, and the newest.
VERSIONS = {
    "gsm8k": ("0.3.0.post1", "0.4.1", "0.6.0", "0.9.1"),
    "gsm8k_flexible": ("0.3.0.post1", "0.4.1", "0.6.0", "0.9.1"),
    "math": ("0.3.0.post1", "0.4.1", "0.6.0", "0.9.1"),
    "math_dapo": ("0.4.1", "0.9.0", "0.9.1"),
    "prime_math": ("0.3.0.post1", "0.4.1", "0.6.0", "0.9.1"),
    "geo3k": ("0.3.0.post1", "0.4.1", "0.9.1"),
    "search_r1": ("0.4.1", "0.9.1"),
    "search_r1_subem": ("0.4.1", "0.9.1"),
}
MARKS = (
    "#### ", "####", "####  ", "18", "18.", "-", "$", "\\$", "1,234", "3.0", ".5", "0.5", "\\boxed{", "\\boxed ",
    "\\boxed", "\\fbox{", "}", "{", "\\frac", "\\dfrac", "\\tfrac", "12", "1", "/", "3/4", "{1}{2}", "\\sqrt", "3", "x",
    "=", "x=", "ab=", " ", "\n", "\\text{ cm}", "\\text{ ", "\\text{and}", "\\text{s}", "\\left(", "\\right)", "\\%",
    "%", "\\\\", "\\\\\\\\%", "\\!", "^\\circ", "^{\\circ}", "Answer:", "answer : ", "Answer:\n", "ANSWER:",
    "[INVALID]", "<answer>", "</answer>", "the ", "a ", "an ", "Paris", "paris.", "dollars", "km", "{,}", ",\\!", '"',
    "\\dots", "é", "１", "²", "a" * 310, " " * 305, "b" * 90, "\\overline{", "\\textbf{", "mbox{", ".$", "+", "－",
)  # fmt: skip
TRUTHS = (
    "18", "1234", "3", "0.5", "\\frac{1}{2}", "3/4", "x", "", "1,234", "Paris", "\\sqrt{3}", "5\\text{ cm}", ".5",
    "-18", "[INVALID]", "2 dollars", "18.", "１", "\\boxed{3}", "=3", "ab=3", ".", "²", "1/02", "a", "\\frac", "\\sqrt",
)  # fmt: skip
FORMS = (
    "#### {}", "\\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>", "so #### {}.\n", "$\\boxed {}$ x", "Answer: ${}$",
    "\\boxed{{{}}} done", "<answer> the {} </answer>", "<answer>{0}</answer>" * 12, "#### 7 then #### {}",
)  # fmt: skip
# Further marks, ground truths and forms for the rules that compare terms.
TERM_MARKS = (
    ". ", "is ", "be ", "get ", ": ", "the answer is ", "answer: ", " is the answer", "are", "\\pi", "2\\pi", "(", ")",
    "[", "]", "(1,2)", "[1,2)", ",", "1,000", "x+x", "2x", "x^2", "^", "^{2}", "\\sqrt{2}", " or ", " and ", "million",
    "cm", "meters", "liters", "degrees", "inf", "\\infty", "\\cup", "\\cdot", "\\times", "\\begin{pmatrix}",
    "\\end{pmatrix}", "&", "Point(1,2)", "Matrix([1,2])", "Interval(0, 1)", "Interval.open(0, 1)", "[[1,2],[3,4]]",
    "Interval.Ropen(0,1)", "_2", "101_2", "1e3", "50%", "50\\%", "$5", "0.333", "1/3", "2/6", "7 3/4", " - 3",
    "1{,}000", "\\text{no}", "sqrt(2)", "*", "sin", "abs(", "max(1,", "e", "i", "<think>", "</think>", "None",
)  # fmt: skip
TERM_TRUTHS = (
    "\\pi", "2\\pi", "6.28", "6.2832", "(1,2)", "[1,2)", "2x", "\\frac{1}{3}", "33.33", "50", "1000", "x^2",
    "\\sqrt{2}", "101_2", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "\\begin{pmatrix}1&2\\3&4\\end{pmatrix}", "\\text{no}", "(0,\\infty)", "7\\frac{3}{4}", "1,000", "-3", "(1,2,3)",
    "\\{1,2\\}", "x=3", "2 or 3", "None", "50%", "x+1", "2(x+1)", "0.3333", "\\frac{x}{2}",
)  # fmt: skip
TERM_FORMS = (
    "{}", "the answer is {}", "so x = {}.", "Answer: {} . ", "\\fbox{{{}}}", "{} is the answer",
    "<think> x </think> \\boxed{{{}}}", "<think></think>\\boxed{{ {} }}.",
)  # fmt: skip
TERMS = ("prime_math", "geo3k")


def cases(name: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields responses and ground truths. Half of the responses are answers with small changes, half are random
    sequences of the marks that the rules read."""
    more = name in TERMS
    marks, truths, forms = MARKS + TERM_MARKS * more, TRUTHS + TERM_TRUTHS * more, FORMS + TERM_FORMS * more
    draw = random.Random(seed)
    for place in range(count):
        truth = draw.choice(truths)
        if place % 2:
            text = "".join(draw.choices(marks, k=draw.randrange(12)))
        else:
            text = draw.choice(forms).format(truth if draw.random() < 0.8 else draw.choice(truths))
            for _ in range(draw.randrange(3)):
                at = draw.randrange(len(text) + 1)
                text = text[:at] + draw.choice(marks) + text[at:]
        truth = "".join(draw.choices(marks, k=draw.randrange(4))) if draw.random() < 0.3 else truth
        yield text, json.dumps({"target": [truth, "x"]}) if name.startswith("search") else truth


def verl_function(name: str, version: str, *, processes: bool = False) -> Callable[[str, str], float]:
    """Returns verl's function. verl starts a process for each comparison with sympy; without `processes`, the
    comparison runs in this process."""
    folder = "utils.reward_score"
    if name.startswith("gsm8k"):
        method = "strict" if name == "gsm8k" else "flexible"
        gsm8k = module("verl", version, f"{folder}.gsm8k")
        return lambda text, truth: float(gsm8k.compute_score(text, truth, method=method))
    file = {"math": "math" if version < "0.6" else "math_reward"}.get(name, name)
    peer: Any = module("verl", version, f"{folder}.{'search_r1_like_qa_em' if name.startswith('search') else file}")
    if name.startswith("search"):
        score = peer.compute_score if name == "search_r1" else peer.compute_score_subem
        return lambda text, truth: float(score(text, json.loads(truth)))
    if name == "math_dapo":
        return lambda text, truth: float(peer.compute_score(text, truth)["score"])
    if name == "prime_math":
        compared = peer.are_equal_under_sympy

        def prime(text: str, truth: str) -> float:
            peer.are_equal_under_sympy = compared if processes else getattr(compared, "__wrapped__", compared)
            try:
                return float(peer.compute_score(text, truth)[0])
            finally:
                peer.are_equal_under_sympy = compared

        return prime
    return lambda text, truth: float(peer.compute_score(text, truth))


def quiet(function: Callable[..., float], *arguments: Any) -> float:
    """Calls a function of verl, which prints some of the answers."""
    with redirect_stdout(StringIO()):
        return function(*arguments)


def prime_code(version: str) -> Callable[[str, str], float]:
    """Returns verl's function. Before 0.9 it needs the package pyext, which cannot be installed with Python 3.11; the
    one function of pyext that verl calls creates a module from its source."""

    class RuntimeModule:
        @staticmethod
        def from_string(name: str, doc: str, code: str) -> ModuleType:
            made = ModuleType(name, doc)
            exec(compile(code, "<string>", "exec"), made.__dict__)
            sys.modules[name] = made
            return made

    pyext: Any = ModuleType("pyext")
    pyext.RuntimeModule = RuntimeModule
    sys.modules["pyext"] = pyext
    try:
        peer = module("verl", version, "utils.reward_score.prime_code")
    finally:
        del sys.modules["pyext"]
    return lambda text, truth: float(peer.compute_score(text, truth, continuous=True)[0])


def expectations(count: int) -> list[list[Any]]:
    """Returns rule, response, ground truth and verl's score: of `count` random cases, those whose scores differ between
    versions, and as many correct as wrong responses."""
    rows: list[list[Any]] = []
    for name, versions in VERSIONS.items():
        functions = {version: verl_function(name, version) for version in versions}
        kept: dict[Sequence[float], int] = {}
        for text, truth in cases(name, count, seed=1):
            scores = tuple(quiet(function, text, truth) for function in functions.values())
            if len(text) < 400 and kept.setdefault(scores, 0) < 12:
                kept[scores] += 1
                rows += [[f"{name}@{one}", text, truth, score] for one, score in zip(versions, scores, strict=True)]
    return rows


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in expectations(1500))
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
