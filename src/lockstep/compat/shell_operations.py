"""Evaluates shell conditions (`[ -z "$X" ]`), integer arithmetic (`$((a * 2))`), braces and `${X%...}` operations."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Sequence

# Conditions ----------------------------------------------------------------------------------------------------------

_COUNTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


def holds(words: Sequence[str], mark: str) -> bool | None:
    """Evaluates `[ -z "$X" ]`, `[[ $N -gt 4 && $A == b* ]]` and similar tests. Returns None for other commands, and for
    words that contain `mark`, which marks unknown values."""
    if words[:1] == ["true"] or words[:1] == ["false"]:
        return words[0] == "true"
    if not words or words[0] not in ("[", "[[", "test"):
        return None
    inside = list(words[1:] if words[0] == "test" else words[1:-1])
    either, both = ("||", "&&") if words[0] == "[[" else ("-o", "-a")
    if either in inside or both in inside:
        terms = [[holds([words[0], *term, "]"], mark) for term in split(part, both)] for part in split(inside, either)]
        return some_of([all_of(term) for term in terms])
    if any(mark in word for word in inside):
        return None
    if inside[:1] == ["!"] and len(inside) > 1:
        return negation(holds([words[0], *inside[1:], "]"], mark))
    if len(inside) == 1:
        return bool(inside[0])
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        return (not inside[1]) == (inside[0] == "-z")
    if len(inside) != 3:
        return None
    left, sign, right = inside
    if sign in _COUNTS:
        return _COUNTS[sign](int(left), int(right)) if _is_integer(left) and _is_integer(right) else None
    if sign in ("=", "==", "!="):
        # [[ ]] treats the right operand as a glob pattern.
        same = fnmatch.fnmatchcase(left, right) if words[0] == "[[" else left == right
        return same == (sign != "!=")
    return None


def split(words: Sequence[str], sign: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == sign:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def all_of(values: Sequence[bool | None]) -> bool | None:
    """Returns the conjunction of values, of which None is unknown."""
    return False if False in values else None if None in values else True


def some_of(values: Sequence[bool | None]) -> bool | None:
    """Returns the disjunction of values, of which None is unknown."""
    return True if True in values else None if None in values else False


def negation(value: bool | None) -> bool | None:
    return None if value is None else not value


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit()


# Arithmetic ----------------------------------------------------------------------------------------------------------

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b), ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_TERNARY = re.compile(r"^([^?:]+)\?([^?:]+):([^?:]+)$")


def computed(expression: str) -> int | None:
    """Evaluates integer arithmetic without variables. Returns None for what it does not support."""
    if ternary := _TERNARY.match(expression):
        condition = computed(ternary[1])
        return None if condition is None else computed(ternary[2 if condition else 3])
    text = expression.strip().replace("/", "//")
    text = re.sub(r"\b0(?=[0-7]+\b)", "0o", text).replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text).strip()
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _quotient(a: int, b: int) -> int:
    """Divides like a shell, which rounds towards zero (Python rounds down)."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else int(not _value(node.operand))
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow | ast.LShift) and not 0 <= _value(node.right) < 64:
            raise ValueError("too large for a shell integer")
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_OPERATORS[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_value(part)) for part in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("not integer arithmetic")


# Braces --------------------------------------------------------------------------------------------------------------

_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"])*\"|\$\{[^}]*\}|\$\([^)]*\)", re.DOTALL)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST = 1000


def braces(text: str) -> list[str]:
    """Expands `{a,b}` and `{1..3}` of a raw word. Quoted braces are text."""
    hidden = _QUOTED.sub(lambda match: "\x01" * len(match[0]), text)  # as long as the text, without braces and commas
    for start in [place for place, sign in enumerate(hidden) if sign == "{"]:
        depth, commas = 0, []
        for end in range(start, len(hidden)):
            depth += (hidden[end] == "{") - (hidden[end] == "}")
            if hidden[end] == "," and depth == 1:
                commas.append(end)
            if depth == 0:
                break
        else:
            continue
        before, after = text[:start], text[end + 1 :]
        if commas:
            places = [start, *commas, end]
            items = [text[a + 1 : b] for a, b in itertools.pairwise(places)]
        elif (bounds := _RANGE.fullmatch(hidden[start + 1 : end])) and abs(int(bounds[2]) - int(bounds[1])) < _MOST:
            first, last = int(bounds[1]), int(bounds[2])
            items = [
                str(number) for number in range(first, last + (1 if first <= last else -1), 1 if first <= last else -1)
            ]
        else:
            continue
        return [word for item in items for word in braces(before + item + after)]
    return [text]


# Operations on values ------------------------------------------------------------------------------------------------


def cut(value: str, how: str, filled: Callable[[str], str]) -> str | None:
    """Evaluates `${X%/}`, `${X##*/}`, `${X//./_}`, `${X:0:3}` ...; `how` follows the name. None if unsupported."""
    if how[0] in "#%":
        twice = how[:2] in ("##", "%%")
        return _without(value, _glob(filled(how[2 if twice else 1 :])), at_end=how[0] == "%", longest=twice)
    if how[0] == "/":
        return _replaced(value, how[1:], filled)
    if how[0] == ":":
        return _part(value, filled(how[1:]))
    if how in ("^^", ",,"):
        return value.upper() if how == "^^" else value.lower()
    if how in ("^", ","):
        return (value[:1].upper() if how == "^" else value[:1].lower()) + value[1:]
    return None


def _glob(pattern: str) -> str:
    """Converts a shell pattern for fnmatch, which has no quotes or backslashes: `\\*` and `"*"` mean a literal `*`."""

    def literal(text: str) -> str:
        return re.sub(r"[*?[]", r"[\g<0>]", text)

    return re.sub(r"\\(.)|\"([^\"]*)\"|'([^']*)'", lambda m: literal(m[1] or m[2] or m[3] or ""), pattern)


def _without(value: str, pattern: str, *, at_end: bool, longest: bool) -> str:
    """Removes the shortest or longest prefix or suffix that matches the pattern."""
    sizes = range(len(value), -1, -1) if longest else range(len(value) + 1)
    for size in sizes:
        piece = value[len(value) - size :] if at_end else value[:size]
        if fnmatch.fnmatchcase(piece, pattern):
            return value[: len(value) - size] if at_end else value[size:]
    return value


def _replaced(value: str, how: str, filled: Callable[[str], str]) -> str:
    """Evaluates the part of `${X/...}` after the first slash.

    `pattern/text` replaces the first match, `/pattern/text` all matches, `#pattern/text` a match at the start,
    `%pattern/text` a match at the end.
    """
    mode, how = (how[0], how[1:]) if how[:1] in ("/", "#", "%") else ("", how)
    parts = re.match(r"((?:\\.|[^/\\])*)/?(.*)", how, re.DOTALL)
    pattern, text = (parts[1], parts[2]) if parts else (how, "")
    regex = fnmatch.translate(_glob(filled(pattern))).removeprefix("(?s:").rsplit(")", 1)[0]
    regex = {"#": f"^(?:{regex})", "%": f"(?:{regex})$"}.get(mode, regex)
    replacement = filled(text)
    return re.sub(regex, lambda _: replacement, value, count=0 if mode == "/" else 1, flags=re.DOTALL)


def _part(value: str, how: str) -> str | None:
    numbers = [part.strip() for part in how.split(":")]
    if not all(re.fullmatch(r"-?\d+", number) for number in numbers) or len(numbers) > 2:
        return None
    start = int(numbers[0])
    rest = value[start:]
    if len(numbers) == 1:
        return rest
    length = int(numbers[1])
    return rest[:length]
