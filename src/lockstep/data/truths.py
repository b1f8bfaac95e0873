r"""The final answer of a worked one: GSM8K's after `####`, MATH's in `\boxed{...}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

# An opening box, an escaped character (which opens and closes nothing), or a brace.
_TOKEN = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
MARK = "####"
_NUMBER = re.compile(r"[-+$]?[\d,]+(\.\d+)?")
GSM8K, MATH, MATH_500 = "openai/gsm8k", "lighteval/MATH", "HuggingFaceH4/MATH-500"


@dataclass(frozen=True)
class Truth:
    """What a right answer says, and the data set whose rows are written so; empty where nothing shows it."""

    value: str
    source: str = ""


def final_answer(worked: str) -> Truth:
    """The answer at the end of a worked one; a text without such an end is the answer itself.

    The mark stands on the last line, alone with the answer: with lines after it, it is a heading.
    """
    before, mark, final = worked.strip().rpartition(MARK)
    final = final.strip()
    if mark and final and "\n" not in final and not before.endswith("#"):
        return Truth(final.replace(",", "") if _NUMBER.fullmatch(final) else final, GSM8K)
    boxed = last_boxed(worked)
    return Truth(worked.strip()) if boxed is None else Truth(boxed, MATH)


def answer_beside(answer: str, solution: object) -> Truth:
    r"""An answer, worked or bare; beside a solution that ends in `\boxed{...}` it is written as those of MATH-500."""
    truth = final_answer(answer)
    boxed = not truth.source and isinstance(solution, str) and final_answer(solution).source == MATH
    return Truth(truth.value, MATH_500) if boxed else truth


def last_boxed(text: str) -> str | None:
    r"""What stands in the `\boxed{...}` that closes last, braces within it being paired. None without one."""
    found = None
    starts: list[int | None] = []
    for token in _TOKEN.finditer(text):
        if token.group() == "{":
            starts.append(None)
        elif token.group() == "}":
            start = starts.pop() if starts else None
            found = found if start is None else text[start : token.start()].strip()
        elif token.group().endswith("{") and token.group() != r"\{":
            starts.append(token.end())
    return found or None
