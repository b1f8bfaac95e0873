"""Scores of verl's reward rules against verl's own functions, on 10,000 texts per rule and version: half of them are
answers with small changes, half are random sequences of the marks that the rules read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from lockstep.reward.verl_versions import NAMES, verl_score

from .peers import VERL, module

pytestmark = pytest.mark.peers

TEXTS = 10_000
MARKS = (
    "#### ", "####", "####  ", "18", "18.", "-", "$", "\\$", "1,234", "3.0", ".5", "0.5", "\\boxed{", "\\boxed ",
    "\\boxed", "\\fbox{", "}", "{", "\\frac", "\\dfrac", "\\tfrac", "12", "1", "/", "3/4", "{1}{2}", "\\sqrt", "3", "x",
    "=", "x=", "ab=", " ", "\n", "\\text{ cm}", "\\text{ ", "\\text{and}", "\\text{s}", "\\left(", "\\right)", "\\%",
    "%", "\\\\", "\\!", "^\\circ", "^{\\circ}", "Answer:", "answer : ", "Answer:\n", "ANSWER:", "[INVALID]", "<answer>",
    "</answer>", "the ", "a ", "an ", "Paris", "paris.", "dollars", "km", "{,}", ",\\!", '"', "\\dots", "é", "１", "²",
    "a" * 310, " " * 305, "b" * 90, "\\overline{", "\\textbf{", "mbox{", ".$", "+", "－",
)  # fmt: skip
TRUTHS = (
    "18", "1234", "3", "0.5", "\\frac{1}{2}", "3/4", "x", "", "1,234", "Paris", "\\sqrt{3}", "5\\text{ cm}", ".5",
    "-18", "[INVALID]", "2 dollars", "18.", "１", "\\boxed{3}", "=3", "ab=3", ".", "²", "1/02", "a", "\\frac", "\\sqrt",
)  # fmt: skip
FORMS = (
    "#### {}", "\\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>", "so #### {}.\n", "$\\boxed {}$ x", "Answer: ${}$",
    "\\boxed{{{}}} done", "<answer> the {} </answer>", "<answer>{0}</answer>" * 12,
)  # fmt: skip


def cases(seed: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(seed)
    for place in range(TEXTS):
        truth = draw.choice(TRUTHS)
        if place % 2:
            text = "".join(draw.choices(MARKS, k=draw.randrange(12)))
        else:
            text = draw.choice(FORMS).format(truth)
            for _ in range(draw.randrange(3)):
                at = draw.randrange(len(text) + 1)
                text = text[:at] + draw.choice(MARKS) + text[at:]
        yield text, "".join(draw.choices(MARKS, k=draw.randrange(4))) if draw.random() < 0.3 else truth


def verl_function(name: str, version: str) -> Callable[[str, str], float]:
    folder = "utils.reward_score"
    if name.startswith("gsm8k"):
        method = "strict" if name == "gsm8k" else "flexible"
        gsm8k = module("verl", version, f"{folder}.gsm8k")
        return lambda text, truth: float(gsm8k.compute_score(text, truth, method=method))
    file = {"math": "math" if version < "0.6" else "math_reward", "search_r1": "search_r1_like_qa_em"}.get(name, name)
    peer: Any = module("verl", version, f"{folder}.{file}")
    if name == "search_r1":
        return lambda text, truth: float(peer.compute_score(text, json.loads(truth)))
    if name == "math_dapo":
        return lambda text, truth: float(peer.compute_score(text, truth)["score"])
    return lambda text, truth: float(peer.compute_score(text, truth))


@pytest.mark.parametrize("version", VERL)
@pytest.mark.parametrize("name", NAMES)
def test_every_score_is_verls(name: str, version: str) -> None:
    ours, theirs = verl_score(f"verl/{name}@{version}").score, verl_function(name, version)
    scores = set()
    for text, truth in cases(seed=len(name)):
        truth = json.dumps({"target": [truth, "x"]}) if name == "search_r1" else truth
        with redirect_stdout(StringIO()):  # verl prints some of the answers
            expected = theirs(text, truth)
        assert ours(text, truth) == expected, (text, truth)
        scores.add(expected)
    assert len(scores) == (3 if name == "search_r1" else 2)
