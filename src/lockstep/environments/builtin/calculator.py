"""The tool `calculator`: a parser for arithmetic. It never evaluates code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from lockstep.errors import Refusal

Number = int | float

LONGEST, DEEPEST = 1000, 50
# Integers with more bits are refused, so that no expression takes long: 1,000 digits.
MOST_BITS = 3322
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)|(?P<sign>\*\*|//|[-+*/%()^×÷]))")
_SAME = {"^": "**", "×": "*", "÷": "/"}


def calculator(expression: str) -> str:
    """Calculates an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).
    """
    try:
        return _text(_Parser(expression).result())
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


def calculator_tool(argument: str, where: str) -> Callable[..., str]:
    """Returns the tool `calculator`, which has no argument in the recipe."""
    if argument:
        raise Refusal.at(where, "calculator has no argument", "write calculator", code="unknown-name")
    return calculator


class _Parser:
    """A recursive-descent parser. Each method reads one level of precedence and returns its value."""

    def __init__(self, expression: str):
        if len(expression) > LONGEST:
            raise ValueError(f"the expression has more than {LONGEST} characters")
        self._tokens = list(_tokens(expression.replace(",", "").rstrip()))
        self._at = self._depth = 0

    def result(self) -> Number:
        if not self._tokens:
            raise ValueError("the expression is empty")
        value = self._sum()
        if self._at < len(self._tokens):
            raise ValueError(f"unexpected {self._tokens[self._at]}")
        return value

    def _next(self, *signs: str) -> str | None:
        """Returns the next token and moves on, if the token is one of `signs`."""
        if self._at < len(self._tokens) and self._tokens[self._at] in signs:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _sum(self) -> Number:
        value = self._product()
        while sign := self._next("+", "-"):
            other = self._product()
            value = _checked(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> Number:
        value = self._signed()
        while sign := self._next("*", "/", "//", "%"):
            value = _checked(_multiplied(value, sign, self._signed()))
        return value

    def _signed(self) -> Number:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("the expression is nested too deeply")
        sign = self._next("+", "-")
        value = self._power() if sign is None else self._signed()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Number:
        base = self._single()
        return base if self._next("**") is None else _power(base, self._signed())

    def _single(self) -> Number:
        if self._at == len(self._tokens):
            raise ValueError("the expression ends too early")
        token = self._tokens[self._at]
        self._at += 1
        if token == "(":
            value = self._sum()
            if self._next(")") is None:
                raise ValueError("a parenthesis is not closed")
            return value
        if not token[0].isdigit() and token[0] != ".":
            raise ValueError(f"unexpected {token}")
        return int(token) if token.isdigit() else _checked(float(token))


def _tokens(expression: str) -> Iterator[str]:
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"unexpected {expression[at:].strip()[:20]!r}")
        token = found["number"] or found["sign"]
        yield _SAME.get(token, token)
        at = found.end()


def _multiplied(value: Number, sign: str, other: Number) -> Number:
    if sign == "*":
        return value * other
    if other == 0:
        raise ValueError("division by zero")
    if sign == "%":
        return value % other
    if sign == "//":
        return value // other
    exact = isinstance(value, int) and isinstance(other, int) and value % other == 0
    return value // other if exact else value / other


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if exponent * base.bit_length() > MOST_BITS:
            raise ValueError("the result is too large")
        return base**exponent
    if base == 0:
        raise ValueError("division by zero")
    result = float(base) ** exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return _checked(result)


def _checked(value: Number) -> Number:
    too_large = value.bit_length() > MOST_BITS if isinstance(value, int) else abs(value) == float("inf")
    if too_large or value != value:
        raise ValueError("the result is too large")
    return value


def _text(value: Number) -> str:
    """Returns integers as digits, also those that come from decimals, such as 0.5 * 4."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)
