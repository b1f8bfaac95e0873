r"""verl's reward rules that compare text: gsm8k, math, math_dapo and search_r1 (`verl_versions.py` names them all).

Scores equal those of verl, also where a rule of lockstep judges better: verl gives 0 for `####18` and for `\boxed{3.0}`
with the ground truth 3.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from functools import partial

TAIL = 300  # verl reads at most this many characters of a response
BOX_TAIL = 100  # math_dapo looks for a box only in this many characters

# gsm8k


def gsm8k_answer(text: str, *, tail: bool, strict: bool, last: bool = True) -> str | None:
    """Returns the number after `#### `. `tail`: reads only the end of the text. `last`: reads the last mark, else the
    first. Without `strict`, returns the last number of the text."""
    text = text[-TAIL:] if tail else text
    if strict:
        marked = re.findall(r"#### (-?[0-9.,]+)", text)
        return marked[-1 if last else 0].replace(",", "") if marked else None
    numbers = re.findall(r"-?[0-9.,]+", text)
    # If no number is left, verl compares the first point.
    return next((number for number in reversed(numbers) if number != "."), numbers[0]) if numbers else None


# math (the normalisation of the MATH data set). Replacements are applied in this order.

_LATEX_STYLE = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_ZEROS = ((" .", " 0."), ("{.", "{0."))
_UNIT = "\\text{ "


class NotNormal(Exception):
    """Raised where verl's normalisation fails; verl then compares the answers unchanged."""


def math_answer(text: str) -> str | None:
    """Returns the content of the last box. A box without braces ends at a dollar sign."""
    spaced = text.rpartition("\\boxed ")
    if spaced[1]:
        return spaced[2].partition("$")[0]
    return braced(text, text.rfind("\\boxed"))


def braced(text: str, start: int) -> str | None:
    """Returns the content of the braces of `\\boxed{...}` at `start`, or None if they are missing or not closed."""
    inside = start + len("\\boxed{")
    if start < 0 or text[start:inside] != "\\boxed{":
        return None
    depth = 1
    for place in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[inside:place]
    return None


def math_score(text: str, ground_truth: str, *, both_percents: bool = True) -> float:
    answer = math_answer(text)
    if answer is None:
        return 0.0
    try:
        form = partial(math_form, both_percents=both_percents)
        return float(form(answer) == form(ground_truth))
    except NotNormal:
        return float(answer == ground_truth)


def math_form(answer: str, *, both_percents: bool = True, bare_percents: bool = False) -> str:
    """Returns an answer in the normal form. `both_percents`: removes two backslashes before a percent sign too.
    `bare_percents`: removes percent signs without backslash too."""
    answer = _replaced(answer, _LATEX_STYLE)
    units = answer.split(_UNIT)
    if len(units) > 2:
        raise NotNormal
    percents = ["\\\\%"] * both_percents + ["\\%"] + ["%"] * bare_percents
    answer = _replaced(units[0], [*((sign, "") for sign in percents), *_ZEROS])
    if answer.startswith("."):
        answer = f"0{answer}"
    sides = answer.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # such as `x = 5`
        answer = sides[1]
    answer = _roots(answer).replace(" ", "")
    answer = _fractions(answer)
    return _divided("\\frac{1}{2}" if answer == "0.5" else answer)


def _replaced(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    for before, after in replacements:
        text = text.replace(before, after)
    return text


def _roots(text: str) -> str:
    first, *parts = text.split("\\sqrt")
    for part in parts:
        if not part:
            raise NotNormal
        first += "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return first


def _fractions(text: str) -> str:
    """Writes braces around the numerator and denominator of `\\frac12` and `\\frac1{2}`."""
    result, *parts = text.split("\\frac")
    for part in parts:
        if not part:
            raise NotNormal
        if part[0] == "{":
            result += f"\\frac{part}"
            continue
        if len(part) < 2:
            return text
        bottom = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
        result += f"\\frac{{{part[0]}}}{bottom}"
    return result


def _divided(text: str) -> str:
    """Converts `3/4` to `\\frac{3}{4}`, if both are integers in normal form."""
    top, slash, bottom = text.partition("/")
    try:
        plain = slash and f"{int(top)}/{int(bottom)}" == text
    except ValueError:
        return text
    return f"\\frac{{{top}}}{{{bottom}}}" if plain else text


# math_dapo and aime: the normalisation of Minerva. Replacements are applied in this order.

_MINERVA_CHANGED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_PATTERNS = (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_NO_ANSWER = "[INVALID]"


def minerva_form(answer: str) -> str:
    answer = _replaced(answer.split("=")[-1], _MINERVA_CHANGED)
    answer = _replaced(answer, [(word, "") for word in _MINERVA_REMOVED])
    for pattern, replacement in _MINERVA_PATTERNS:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def dapo_answer(text: str, *, boxed: bool) -> str | None:
    """Returns the answer that math_dapo reads. `boxed`: whether a box counts if there is no answer line."""
    form, box = _dapo_parts(text, boxed)
    return box if form is None else form


def _dapo_parts(text: str, boxed: bool) -> tuple[str | None, str | None]:
    """Returns the normalised answer line, and the content of the box if there is no answer line."""
    text = text[-TAIL:]
    lines = _ANSWER_LINE.findall(text)
    form = minerva_form(lines[-1]) if lines else _NO_ANSWER
    if form != _NO_ANSWER:
        return form, None
    tail = text[-BOX_TAIL:]
    return None, braced(tail, tail.rfind("\\boxed{")) if boxed else None


def dapo_score(text: str, ground_truth: str, *, boxed: bool) -> float:
    """Returns 1.0 for a correct answer, else -1.0. The content of a box must equal the ground truth exactly."""
    form, box = _dapo_parts(text, boxed)
    if box is not None:
        return 1.0 if box == ground_truth else -1.0
    return 1.0 if (_NO_ANSWER if form is None else form) == minerva_form(ground_truth) else -1.0


# searchR1: exact match of the text between the answer tags

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MANY_TAGS = 10  # a response with more tags than this gets a quarter of the score


def search_answer(text: str) -> str | None:
    found = _TAGGED.findall(text)
    return _words(found[-1].strip()) if found else None


def search_part_score(text: str, ground_truth: str) -> float:
    """Returns 1.0 if the answer contains an accepted answer, else 0.0."""
    answer = search_answer(text)
    return float(answer is not None and any(_words(one) in answer for one in search_targets(ground_truth)))


def search_score(text: str, ground_truth: str) -> float:
    answer = search_answer(text)
    if answer is None or answer not in [_words(one) for one in search_targets(ground_truth)]:
        return 0.0
    many = max(text.count("<answer>"), text.count("</answer>")) > _MANY_TAGS
    return 0.25 if many else 1.0


def search_targets(ground_truth: str) -> list[str]:
    """Returns the accepted answers of a ground truth `{"target": ...}`. Raises ValueError for another form."""
    try:
        target = json.loads(ground_truth)["target"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError('is not an object with the key "target"') from error
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        raise ValueError('has no text or list of texts in "target"')
    return targets


def _words(text: str) -> str:
    letters = "".join(one for one in text.lower() if one not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())
