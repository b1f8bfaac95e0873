r"""verl's rule `prime_math`, for the data sources `numina_*`: finds the answer of a response and compares it with the
ground truth as text, with sympy, as a number within 0.01 % (also if it is a hundred times as large or as small, for
percentages), and part by part.

The versions differ: from 0.4 on, the last comparison, a symbolic one, always fails in verl, because verl uses its timer
in a way that raises an exception. The rule of 0.3 compares. Matrices are compared from 0.6.1 on.

verl evaluates parts of a response as Python code. Here only arithmetic is evaluated; other code counts as text.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.functions import TimeUp, time_limit
from lockstep.reward.verl_grader import SYMPY_SECONDS, same_answer

_BEFORE_ANSWER = ("answer:", "answer is", "answers are")
_AFTER_ANSWER = ("is answer", "is the answer", "are answers", "are the answers")
_BEFORE_RESULT = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_MATRIX = r"\begin{pmatrix}"
_TOLERANCE = 1e-4
_LONGEST = 1000


@dataclass(frozen=True)
class Prime:
    """What differs between the versions of verl."""

    symbolic: bool = False
    """Whether the symbolic comparison works (0.3)."""
    matrices: bool = True
    """Whether matrices are compared, and doubly escaped percent signs are removed (from 0.6.1 on)."""


def prime_answer(text: str) -> str:
    """Returns the part of a response that verl compares with the ground truth."""
    for mark in _BEFORE_ANSWER:
        text = _after(text, mark)
    for mark in _AFTER_ANSWER:
        place = text.lower().rfind(mark)
        text = text[:place].strip() if place >= 0 else text
    text = _box(text) or text
    if ". " in text:
        text = text[: text.lower().rfind(". ")].strip()
    for mark in _BEFORE_RESULT:
        text = _after(text, mark)
    return text


def _after(text: str, mark: str) -> str:
    place = text.lower().rfind(mark)
    return text[place + len(mark) :].strip() if place >= 0 else text


def _box(text: str) -> str | None:
    """Returns the content of the first braces after the last `\\boxed`, or after the last `\\fbox`."""
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    if start < 0:
        return None
    depth, left = 0, None
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
            left = place if left is None else left
        elif text[place] == "}":
            depth -= 1
            if not depth:
                return None if left is None else text[left + 1 : place].strip()
    return None


def prime_score(text: str, ground_truth: str, version: Prime) -> float:
    answer = prime_answer(text)
    if same_answer(answer, ground_truth, ruler=False, both_percents=version.matrices):
        return 1.0
    circles = (math.pi, 3.14) if "\\pi" in answer or "\\pi" in ground_truth else (math.pi,)
    try:
        # All are compared, because verl gives 0 if one of the comparisons raises an exception.
        found = [_equal(answer, ground_truth, version, pi, 1.0) for pi in circles]
        return float(any(found))
    except Exception:  # noqa: BLE001 - texts of a model may cause any exception; verl then gives 0
        return 0.0


def _equal(answer: Any, truth: Any, version: Prime, pi: float = math.pi, seconds: float = SYMPY_SECONDS) -> bool:
    answer, truth = _value(answer, pi), _value(truth, pi)
    if isinstance(answer, str):
        answer = answer[:_LONGEST]
        if isinstance(truth, str) and (
            answer.strip().lower() == truth.strip().lower() or answer.replace(" ", "") == truth.replace(" ", "")
        ):
            return True
    numbers = _number(answer), _number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        wanted = numbers[1]
        return any(math.isclose(one, numbers[0], rel_tol=_TOLERANCE) for one in (wanted / 100, wanted, wanted * 100))
    if not answer and answer not in [0, False]:
        return False
    answer, truth = _interval(str(answer).strip()), str(truth).strip()
    if _without_brackets(answer, truth) == _without_brackets(truth, truth, answer):
        return True
    found = _by_parts(answer, truth, version)
    if found is None and version.matrices and _MATRIX in truth:
        found = _same_matrix(answer, truth, version)
    if found is not None:
        return found
    return version.symbolic and _same_symbolically(answer, truth, seconds)


def _without_brackets(text: str, truth: str, answer: str | None = None) -> str:
    answer = text if answer is None else answer
    square = answer.startswith("[") and answer.endswith("]") and not truth.startswith("(")
    if square or (answer.startswith("(") and answer.endswith(")") and not truth.startswith("[")):
        text = text.strip("[]()")
    return re.sub(r"[{}()]", "", text)


def _by_parts(answer: str, truth: str, version: Prime) -> bool | None:
    """Compares tuples, intervals, lists and points part by part. None if this does not decide."""
    bracketed = answer and truth and answer[0] in "([" and answer[-1] in ")]"
    inside = truth[1:-1].split(",")
    if (
        bracketed
        and (answer[0], answer[-1]) == (truth[0], truth[-1])
        and _all_equal(answer[1:-1].split(","), inside, version)
    ):
        return True
    if "," in answer and "," in truth:
        parts, wanted = ([part.strip() for part in one.split(",")] for one in (answer, truth))
        if len(parts) == len(wanted):
            return _all_equal(parts, wanted, version)
    point = answer.startswith("Point") and truth[0] == "(" and truth[-1] == ")"
    return True if point and _all_equal(answer[answer.find("(") + 1 : -1].split(","), inside, version) else None


def _all_equal(parts: Any, wanted: Any, version: Prime) -> bool:
    if len(parts) != len(wanted):
        return False
    # All parts are compared, because verl gives 0 if one of the comparisons raises an exception.
    found = [_equal(*pair, version) for pair in zip(parts, wanted, strict=False)]
    return all(found)


def _same_matrix(answer: str, truth: str, version: Prime) -> bool | None:
    if answer.startswith("Matrix"):
        try:
            return _all_equal(_parsed(answer), truth.split()[1:-1:2], version) or None
        except Exception:  # noqa: BLE001 - as in verl, a text that is no matrix is compared in other ways
            return None
    if answer.startswith("[") and answer.endswith("]") and isinstance(rows := arithmetic(answer, {}), list):
        content = truth.removeprefix(rf"\{_MATRIX}").removeprefix(_MATRIX)
        content = content.removesuffix(r"\\end{pmatrix}").removesuffix(r"\end{pmatrix}")
        try:
            wanted = [row.split("&") if "&" in row else row for row in content.split("\\")]
            return _all_equal(rows, wanted, version) or None
        except Exception:  # noqa: BLE001 - as above
            return None
    return None


def _interval(text: str) -> str:
    """Writes sympy's notation of an interval in brackets."""
    for start, left, right in (("", "[", "]"), (".Ropen", "[", ")"), (".Lopen", "(", "]"), (".open", "(", ")")):
        if found := re.match(rf"^Interval{re.escape(start)}\((.*)\)$", text):
            return f"{left}{found[1]}{right}"
    return text


def _number(value: Any) -> float | None:
    text = str(value)
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def _value(answer: Any, pi: float) -> Any:
    """Removes a dollar sign or a percent sign and the base of a number, and computes a term with `\\pi`."""
    if not isinstance(answer, str):
        return answer
    if re.match(r"\$\d+(\.\d+)?", answer):
        return answer[1:]
    if re.match(r"^\d+(\.\d+)?%$", answer) or re.match(r"^\d+(\.\d+)?\\%$", answer):
        return answer.replace("\\%", "").replace("%", "")
    if "_" in answer:
        return int(float(answer.split("_")[0]))
    if "\\pi" not in answer:
        return answer
    place = answer.find("\\pi")
    while place >= 0:
        factor = "*" if place > 0 and answer[place - 1].isdigit() else "1*"
        answer = f"{answer[:place]}{factor}{pi}{answer[place + 3 :]}"
        place = answer.find("\\pi", place + 1)
    try:
        return arithmetic(answer, {"pi": pi, "idx": -1, "string": answer})
    except Exception:  # noqa: BLE001 - any text may stand around the term
        return answer


# Python expressions without names, attributes and calls of other functions.

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (abs, float, int, max, min, pow, round, sum)
}


def arithmetic(text: str, names: dict[str, Any]) -> Any:
    """Returns the value of a Python expression of constants, operators, displays and a few functions. Raises an
    exception for other expressions."""
    return _computed(ast.parse(text.lstrip(" \t"), mode="eval").body, names)


def _computed(node: ast.expr, names: dict[str, Any]) -> Any:
    def of(child: ast.expr) -> Any:
        return _computed(child, names)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.Tuple(elts=elements):
            return tuple(map(of, elements))
        case ast.List(elts=elements):
            return list(map(of, elements))
        case ast.Set(elts=elements):
            return set(map(of, elements))
        case ast.Dict(keys=keys, values=values):
            return {of(key): of(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=sign, operand=operand):
            return _OPERATORS[type(sign)](of(operand))
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATORS[type(sign)](of(left), of(right))
        case ast.BoolOp(op=ast.And(), values=values):
            return [*map(of, values)][-1] if all(map(of, values)) else next(v for v in map(of, values) if not v)
        case ast.BoolOp(values=values):
            return next((value for value in map(of, values) if value), of(values[-1]))
        case ast.Compare(left=left, ops=signs, comparators=others):
            terms = [of(left), *map(of, others)]
            pairs = zip(signs, terms, terms[1:], strict=False)
            return all(_OPERATORS[type(sign)](one, other) for sign, one, other in pairs)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _FUNCTIONS[name](*map(of, arguments))
        case ast.Subscript(value=value, slice=index):
            return of(value)[of(index)]
    raise ValueError("is not arithmetic")


# The symbolic comparison of verl 0.3. sympy evaluates text as Python code, so text with names of functions that may do
# harm, with attributes or with quotation marks is not given to it.

_HARMLESS = r"(?:abs|all|any|divmod|hash|id|len|max|min|pow|round|sum)\b"
_CODE = re.compile(
    rf"__|['\"`@\\]|\.\s*[^\W\d]|\b(?!{_HARMLESS})(?:lambda|import|"
    r"breakpoint|callable|chr|compile|delattr|dir|eval|exec|exit|format|getattr|globals|hasattr|input|isinstance|iter|"
    r"issubclass|locals|next|open|ord|print|quit|repr|setattr|sorted|vars|sympify|parse_expr|lambdify|preview|plot\w*)\b"
)


def _parsed(text: str) -> Any:
    from sympy.parsing.sympy_parser import parse_expr

    if _CODE.search(text):
        raise ValueError("is code")
    return parse_expr(text)


def _same_symbolically(answer: str, truth: str, seconds: float) -> bool:
    from sympy import N, simplify

    def limited(compute: Callable[[], Any], otherwise: Any) -> Any:
        try:
            with time_limit(seconds, "sympy did not end"):
                return compute()
        except (Exception, TimeUp):  # noqa: BLE001 - sympy raises any exception for a text that is not a term
            return otherwise

    if _CODE.search(answer) or _CODE.search(truth):
        return False
    one, other = (limited(partial(_parsed, text), text) for text in (answer, truth))
    if limited(lambda: simplify(one - other) == 0, False):
        return True
    return bool(limited(lambda: math.isclose(N(one), N(other), rel_tol=_TOLERANCE), False))
