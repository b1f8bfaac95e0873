r"""The comparison of two answers in verl's rules `prime_math` and `geo3k`: as text in a normal form, then with sympy.

Both rules descend from the grader of PRM800K. `geo3k` uses the package mathruler, whose normal form is shorter: it has
no spaces and no braces.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress

from lockstep.functions import TimeUp, time_limit
from lockstep.reward.verl_scores import NotNormal, math_form

SYMPY_SECONDS = 10.0
_ENCLOSING_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_WORDS = (
    ("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , "), ("million", "*10^6"),
    ("billion", "*10^9"), ("trillion", "*10^12"),
)  # fmt: skip
_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_LATEX_FRACTIONS = (("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\frac", " \\frac"))
_SYMBOLS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"
# sympy may take very long for such powers, so terms with them are not compared.
_SLOW_POWER = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")


def same_answer(given: str, truth: str, *, ruler: bool, both_percents: bool = True) -> bool:
    """Returns whether two answers are equal. `ruler`: as the package mathruler does it. `both_percents`: see
    `math_form`."""
    if _text_form(given, ruler, both_percents) == _text_form(truth, ruler, both_percents):
        return True
    given, truth = _term_form(given, ruler), _term_form(truth, ruler)
    if given == truth:
        return True
    if not given:
        return False
    parts, wanted = _parts(given), _parts(truth)
    if len(wanted) > 1 and (truth[0], truth[-1]) != (given[0], given[-1]):
        return False
    if len(parts) != len(wanted):
        return False
    return all(_same_part(one, other) for one, other in zip(parts, wanted, strict=True))


def _text_form(answer: str, ruler: bool, both_percents: bool) -> str:
    answer = answer.strip()
    enclosed = _ENCLOSING_TEXT.search(answer)
    answer = enclosed[1].strip() if enclosed else answer
    try:
        return math_form(answer, both_percents=both_percents, bare_percents=ruler)
    except NotNormal:
        return answer


def _term_form(answer: str, ruler: bool) -> str:
    enclosed = _ENCLOSING_TEXT.search(answer)
    answer = replaced(enclosed[1] if enclosed else answer, _WORDS)
    for unit in _UNITS if ruler else (*_UNITS, "liter"):
        answer = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", answer)
    answer = re.sub(r"\^ *\\circ", "", answer)
    if answer and answer[0] == "{" and answer[-1] == "}":
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    value = _number(answer)
    if value is not None and _is_whole(value):
        answer = str(round(value))
    if "\\" in answer:
        with suppress(Exception):
            answer = _without_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = re.sub("([0-9]) +([0-9])", r"\1+\2", answer)  # a mixed number
    if ruler:
        answer = answer.replace(" ", "").replace("{", "").replace("}", "")
    answer = answer.lower()
    return str(int(float(answer.replace(",", "")))) if _is_integer(answer) else answer


def _without_latex(answer: str) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns about every text that is not LaTeX
    text = LatexNodes2Text().latex_to_text(replaced(answer, _LATEX_FRACTIONS))
    return replaced(text, _SYMBOLS).strip()


def _parts(answer: str) -> list[str]:
    """Returns the elements of a tuple or an interval; otherwise the answer itself."""
    answer = _without_thousands(answer)
    inside = answer[1:-1]
    brackets = len(answer) > 2 and answer[0] in _BRACKETS and answer[-1] in _BRACKETS
    if brackets and not any(bracket in inside for bracket in _BRACKETS):
        return [part.strip() for part in inside.split(",")]
    return [answer] if answer else []


def _same_part(given: str, truth: str) -> bool:
    if _FRACTION.search(truth) and _FRACTION.search(given):
        return truth == given  # a fraction that is not reduced is wrong
    if _is_integer(truth) != _is_integer(given):
        return False
    return _same_term(given, truth)


def _same_term(given: str, truth: str) -> bool:
    difference = f"({truth})-({given})"
    letters = {one for one in difference.replace("sqrt", "").replace("frac", "") if one.isalpha()}
    if len(letters) > 2 or _SLOW_POWER.search(difference):
        return False
    try:
        with time_limit(SYMPY_SECONDS, "sympy did not end"):
            return _is_zero(difference)
    except TimeUp:
        return False


def _is_zero(difference: str) -> bool:
    """Returns whether sympy simplifies a term to 0. The term has at most two different letters, so that no text can
    name a function that does harm."""
    import sympy
    from sympy.parsing import sympy_parser as parser

    steps = (*parser.standard_transformations, parser.implicit_multiplication_application)
    try:
        return bool(sympy.simplify(parser.parse_expr(difference.replace("^", "**"), transformations=steps)) == 0)
    except Exception:  # noqa: BLE001 - sympy raises any exception for a text that is not a term
        return False


def _without_thousands(answer: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2\3", answer)) != answer:
        answer = shorter
    return answer


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_whole(value: float) -> bool:
    try:
        return abs(value - round(value)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _is_integer(text: str) -> bool:
    value = _number(_without_thousands(text))
    return value is not None and _is_whole(value)


def replaced(text: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for before, after in replacements:
        text = text.replace(before, after)
    return text
