"""A shell script cut into commands and raw words, with the line of each. Nothing is expanded, nothing is run.

What is understood: comments, quotes, line continuations, `;` `&&` `||` `|` `&`, here-documents, arrays, redirections,
functions (`name()` stands as `function name`), the patterns of `case`, which are left out, and nested `$(...)`,
`${...}` and `$((...))`, which are kept whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ENDS = ";&|\n()"
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_][\w]*)\2")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"(\d*|&)(>>|>&|>\||<>|<<<|>|<)&?\s*")


@dataclass(frozen=True)
class RawWord:
    """A word as it is written, quotes and dollars in it."""

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
    """Behind `&&` or `||`: whether it runs is another command's to say."""

    @property
    def line(self) -> int:
        return self.words[0].line


def commands_of(script: str) -> list[RawCommand]:
    """The simple commands in the order they stand, with what is inside of loops and conditions."""
    return _Reader(script).commands()


class _Reader:
    def __init__(self, text: str):
        self.text, self.at, self.line = text, 0, 1
        self.found: list[RawCommand] = []
        self.current = RawCommand()
        self.waiting: list[tuple[RawCommand, str, bool, bool]] = []
        self.pattern = False
        """Whether a pattern of `case` comes next."""

    def commands(self) -> list[RawCommand]:
        while self.at < len(self.text):
            self._next()
        self._end()
        return self.found

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
        """`a | b)`, or the end of them all. A pattern is no command."""
        self.pattern = False
        if re.match(r"esac\b", self.text[self.at :]):
            return
        if self.text[self.at] == "(":
            self._skip(1)
        while self.at < len(self.text) and self.text[self.at] != ")":
            self._piece()
        self._skip(1)

    def _redirected(self) -> bool:
        """`2>&1`, `> file`: neither the sign nor where it leads to is a word of the command."""
        found = _REDIRECTION.match(self.text, self.at)
        if not found:
            return False
        self._skip(found.end() - self.at)
        if self.at < len(self.text) and self.text[self.at] not in " \t\n" + _ENDS:
            self._word()
        return True

    def _end(self) -> None:
        if self.current.words:
            self.found.append(self.current)
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
        """One sign, or a quotation or expansion as a whole."""
        start = self.at
        sign = self.text[start]
        if sign == "\\":
            self._skip(2)
        elif sign == "'":
            self._to(self.text.find("'", start + 1) + 1)
        elif sign == '"':
            self._to(_closing_quote(self.text, start + 1) + 1)
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
        # What is never closed goes on to the end of the script.
        self._skip((end if end > self.at else len(self.text)) - self.at)

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at = min(self.at + count, len(self.text))


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed; the end of the text where it is not."""
    pairs = {"(": ")", "{": "}"}
    opens, shuts = text[start], pairs[text[start]]
    depth, i = 0, start
    while i < len(text):
        sign = text[i]
        if sign == "\\":
            i += 1
        elif sign == "'":
            i = _found(text, "'", i + 1)
        elif sign == '"':
            i = _closing_quote(text, i + 1)
        elif sign == opens:
            depth += 1
        elif sign == shuts:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return len(text)


def _closing_quote(text: str, start: int) -> int:
    i = start
    while i < len(text) and text[i] != '"':
        if text[i] == "\\":
            i += 1
        elif text.startswith(("$(", "${"), i):
            i = closing(text, i + 1)
        i += 1
    return i


def _found(text: str, sign: str, start: int) -> int:
    at = text.find(sign, start)
    return at if at >= 0 else len(text)
