"""Parses shell scripts into commands and raw words with line numbers; evaluates conditions and `${X%...}` operations.

The parser handles comments, quotes, line continuations, `;` `&&` `||` `|` `&`, here-documents, arrays, redirections,
functions (`name()` becomes `function name`) and nested `$(...)`, `${...}` and `$((...))`. The parser skips the patterns
of `case` branches and does not expand variables.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_ENDS = ";&|\n()"
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_][\w]*)\2")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"(\d*|&)(>>|>&|>\||<>|<<<|>|<)&?\s*")


@dataclass(frozen=True)
class RawWord:
    """A word of the script, including its quotes and unexpanded variables."""

    text: str
    line: int
    array: tuple[RawWord, ...] | None = None
    """The words of `NAME=( ... )`."""


@dataclass
class RawCommand:
    words: list[RawWord] = field(default_factory=list)
    heredoc: str | None = None
    quoted_heredoc: bool = False
    conditional: bool = False
    """Whether the command follows `&&` or `||`, so that the result of another command decides whether it runs."""

    @property
    def line(self) -> int:
        return self.words[0].line


def commands_of(script: str) -> list[RawCommand]:
    """Returns the simple commands of a script in order, including the commands in loops and conditions."""
    return _Reader(script).commands()


class _Reader:
    def __init__(self, text: str):
        self.text, self.at, self.line = text, 0, 1
        self.result: list[RawCommand] = []
        self.current = RawCommand()
        self.waiting: list[tuple[RawCommand, str, bool, bool]] = []
        self.pattern = False
        """Whether the next text is a pattern of a `case` branch."""

    def commands(self) -> list[RawCommand]:
        while self.at < len(self.text):
            self._next()
        self._end()
        return self.result

    def _next(self) -> None:
        sign = self.text[self.at]
        if self.text.startswith("\\\n", self.at):
            self._skip(2)
        elif sign in " \t":
            self._skip(1)
        elif sign == "#":
            end = self.text.find("\n", self.at)
            self._skip((end if end >= 0 else len(self.text)) - self.at)
        elif self.pattern and sign not in "\n":
            self._case_pattern()
        elif self.text.startswith(";;", self.at):
            self._end()
            self._skip(2)
            self.pattern = True
        elif self.text.startswith(("&&", "||"), self.at):
            self._end()
            self._skip(2)
            self.current.conditional = True
        elif sign in _ENDS:
            self._end()
            self._skip(1)
            if sign == "\n":
                self._heredocs()
        elif not self.current.words and (function := _FUNCTION.match(self.text, self.at)):
            self.current.words += [RawWord("function", self.line), RawWord(function[1], self.line)]
            self._skip(function.end() - self.at)
            self._end()
        elif heredoc := _HEREDOC.match(self.text, self.at):
            self.waiting.append((self.current, heredoc[3], bool(heredoc[2]), bool(heredoc[1])))
            self._skip(heredoc.end() - self.at)
        elif self._redirected():
            pass
        else:
            self.current.words.append(self._word())
            words = self.current.words
            if len(words) > 2 and words[0].text == "case" and words[-1].text == "in":
                self._end()
                self.pattern = True

    def _case_pattern(self) -> None:
        """Skips a pattern `a | b)` of `case`."""
        self.pattern = False
        if re.match(r"esac\b", self.text[self.at :]):
            return
        if self.text[self.at] == "(":
            self._skip(1)
        while self.at < len(self.text) and self.text[self.at] != ")":
            self._piece()
        self._skip(1)

    def _redirected(self) -> bool:
        """Skips a redirection: `2>&1`, `> file`."""
        match = _REDIRECTION.match(self.text, self.at)
        if not match:
            return False
        self._skip(match.end() - self.at)
        if self.at < len(self.text) and self.text[self.at] not in " \t\n" + _ENDS:
            self._word()
        return True

    def _end(self) -> None:
        if self.current.words:
            self.result.append(self.current)
        self.current = RawCommand()

    def _heredocs(self) -> None:
        for command, mark, quoted, tabs in self.waiting:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self._skip(min(end + 1, len(self.text)) - self.at)
                if (line.lstrip("\t") if tabs else line) == mark:
                    break
                lines.append(line.lstrip("\t") if tabs else line)
            command.heredoc, command.quoted_heredoc = "\n".join(lines), quoted
        self.waiting = []

    def _word(self) -> RawWord:
        start, line = self.at, self.line
        text = ""
        while self.at < len(self.text):
            sign = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._skip(2)
                if self.at < len(self.text) and self.text[self.at] in " \t":
                    break
                continue
            if sign == "(" and text.endswith(("=", "+=")) and start != self.at:
                return RawWord(text, line, self._array())
            if sign in " \t" or sign in _ENDS or sign in "<>":
                break
            text += self._piece()
        return RawWord(text, line)

    def _piece(self) -> str:
        """Reads one character, one quoted text or one `$` expansion."""
        start = self.at
        sign = self.text[start]
        if sign == "\\":
            self._skip(2)
        elif sign == "'":
            self._to(self.text.find("'", start + 1) + 1)
        elif sign == '"':
            self._to(closing_quote(self.text, start + 1) + 1)
        elif sign == "`":
            self._to(self.text.find("`", start + 1) + 1)
        elif self.text.startswith("$'", start):
            self._to(self.text.find("'", start + 2) + 1)
        elif self.text.startswith(("$(", "${"), start):
            self._to(closing(self.text, start + 1) + 1)
        else:
            self._skip(1)
        return self.text[start : self.at]

    def _array(self) -> tuple[RawWord, ...]:
        self._skip(1)
        words: list[RawWord] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\n":
                self._skip(1)
            elif self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self._skip((end if end >= 0 else len(self.text)) - self.at)
            else:
                words.append(self._word())
        self._skip(1)
        return tuple(words)

    def _to(self, end: int) -> None:
        # An unclosed quotation or bracket extends to the end of the script.
        self._skip((end if end > self.at else len(self.text)) - self.at)

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at = min(self.at + count, len(self.text))


def closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at `start`, or the end of the text."""
    pairs = {"(": ")", "{": "}"}
    opens, shuts = text[start], pairs[text[start]]
    depth, i = 0, start
    while i < len(text):
        sign = text[i]
        if sign == "\\":
            i += 1
        elif sign == "'":
            i = _position(text, "'", i + 1)
        elif sign == '"':
            i = closing_quote(text, i + 1)
        elif sign == opens:
            depth += 1
        elif sign == shuts:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return len(text)


def closing_quote(text: str, start: int) -> int:
    i = start
    while i < len(text) and text[i] != '"':
        if text[i] == "\\":
            i += 1
        elif text.startswith(("$(", "${"), i):
            i = closing(text, i + 1)
        i += 1
    return i


def _position(text: str, sign: str, start: int) -> int:
    at = text.find(sign, start)
    return at if at >= 0 else len(text)


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
    """Evaluates `[ -z "$X" ]`, `[[ $N -gt 4 ]]` and similar tests. Returns None for other commands, and for words that
    contain `mark`, which marks unknown values."""
    if words[:1] == ["!"]:
        inner = holds(words[1:], mark)
        return None if inner is None else not inner
    if words[:1] == ["true"] or words[:1] == ["false"]:
        return words[0] == "true"
    if not words or words[0] not in ("[", "[[", "test") or any(mark in word for word in words):
        return None
    inside = list(words[1:] if words[0] == "test" else words[1:-1])
    if inside[:1] == ["!"]:
        inner = holds(["test", *inside[1:]], mark)
        return None if inner is None else not inner
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


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit()


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
