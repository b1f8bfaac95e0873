"""Parses shell scripts into a tree of commands, with raw words and line numbers. Variables are not expanded.

The parser handles comments, quotes, line continuations, `;` `&&` `||` `|` `&`, here-documents, arrays, redirections,
`if`, `case`, loops, functions, subshells, `((...))` and nested `$(...)`, `${...}` and `$((...))`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_ENDS = ";&|\n()"
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_][\w]*)\2")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
# Words that are a command of their own at the start of a command.
_KEYWORDS = ("if", "then", "elif", "else", "fi", "while", "until", "do", "done", "{", "}")
# Words before a command that do not change what it does.
_PREFIXES = ("time", "exec", "nohup")
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
    here_string: RawWord | None = None
    """The word after `<<<`."""
    operator: str = ""
    """`&&`, `||` or `|`, if the command follows it."""
    negated: bool = False
    """Whether `!` precedes the command."""
    keyword: str = ""
    """The keyword (`if`, `then`, ...), bracket or `;;` that the command is."""
    patterns: tuple[RawWord, ...] | None = None
    """The patterns of a branch of `case`."""

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass
class ShellIf:
    branches: list[tuple[list[ShellNode] | None, list[ShellNode]]]
    """Condition and body of each branch; `else` has no condition."""
    operator: str = ""


@dataclass
class ShellCase:
    word: RawWord
    branches: list[tuple[tuple[RawWord, ...], list[ShellNode]]]
    operator: str = ""


@dataclass
class ShellLoop:
    head: RawCommand
    """`for NAME in WORDS`, or the keyword `while` or `until`."""
    condition: list[ShellNode]
    body: list[ShellNode]
    operator: str = ""


@dataclass
class ShellFunction:
    name: str
    body: list[ShellNode]
    operator: str = ""


@dataclass
class ShellGroup:
    """`{ ...; }` or, with its own variables, `( ... )`."""

    body: list[ShellNode]
    subshell: bool
    operator: str = ""


ShellNode = RawCommand | ShellIf | ShellCase | ShellLoop | ShellFunction | ShellGroup


def nodes_of(script: str) -> list[ShellNode]:
    """Returns the commands of a script as a tree."""
    tree = _Tree(_Reader(script).commands())
    nodes: list[ShellNode] = []
    while tree.rest():
        nodes += tree.nodes(())
        tree.at += 1  # a keyword that closes nothing
    return nodes


class _Tree:
    """Builds the tree from the commands and keywords of a script. A block that is not closed ends with the script."""

    def __init__(self, commands: list[RawCommand]):
        self.commands, self.at = commands, 0

    def rest(self) -> bool:
        return self.at < len(self.commands)

    def nodes(self, ends: Collection[str]) -> list[ShellNode]:
        """Reads commands up to one of the keywords `ends`, or up to a keyword that belongs to an outer block."""
        found: list[ShellNode] = []
        while self.rest():
            command = self.commands[self.at]
            if command.keyword in ends or command.keyword in (*_CLOSING, ";;") or command.patterns is not None:
                break
            self.at += 1
            found.append(self._node(command))
        return found

    def _node(self, command: RawCommand) -> ShellNode:
        before, first = command.operator, command.words[0].text
        if command.keyword == "if":
            return ShellIf(self._branches(), before)
        if command.keyword in ("while", "until") or (first in ("for", "select") and not command.keyword):
            condition = self.nodes(("do",))
            self._past("do")
            body = self.nodes(("done",))
            self._past("done")
            return ShellLoop(command, condition, body, before)
        if command.keyword in ("{", "("):
            return ShellGroup(self._body(command.keyword), command.keyword == "(", before)
        if command.keyword == "function":
            opens = self.commands[self.at].keyword if self.rest() else ""
            self.at += opens in ("{", "(")
            return ShellFunction(command.words[1].text, self._body(opens or "{"), before)
        if command.keyword == "case":
            return ShellCase(command.words[1], self._cases(), before)
        return command

    def _past(self, keyword: str) -> None:
        if self.rest() and self.commands[self.at].keyword == keyword:
            self.at += 1

    def _body(self, opens: str) -> list[ShellNode]:
        closes = "}" if opens == "{" else ")"
        body = self.nodes((closes,))
        self._past(closes)
        return body

    def _branches(self) -> list[tuple[list[ShellNode] | None, list[ShellNode]]]:
        branches: list[tuple[list[ShellNode] | None, list[ShellNode]]] = []
        keyword = "if"
        while keyword in ("if", "elif", "else"):
            condition = None if keyword == "else" else self.nodes(("then",))
            self._past("then")
            branches.append((condition, self.nodes(("elif", "else", "fi"))))
            keyword = self.commands[self.at].keyword if self.rest() else "fi"
            self._past(keyword)
        return branches

    def _cases(self) -> list[tuple[tuple[RawWord, ...], list[ShellNode]]]:
        branches = []
        while self.rest() and (patterns := self.commands[self.at].patterns) is not None:
            self.at += 1
            branches.append((patterns, self.nodes((";;", "esac"))))
            self._past(";;")
        self._past("esac")
        return branches


_CLOSING = ("then", "elif", "else", "fi", "do", "done", "}", ")", "esac")


class _Reader:
    def __init__(self, text: str):
        self.text, self.at, self.line = text, 0, 1
        self.result: list[RawCommand] = []
        self.current = RawCommand()
        self.waiting: list[tuple[RawCommand, str, bool, bool]] = []
        self.pattern = False
        """Whether the next text is a pattern of a `case` branch."""
        self.subshells = 0
        """The number of open subshells."""

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
        elif self._in_test():
            self._test_word()
        elif self.text.startswith(";;", self.at):
            self._end()
            self._keyword(";;", 2)
            self.pattern = True
        elif self.text.startswith(("&&", "||"), self.at):
            self._end()
            self.current.operator = self.text[self.at : self.at + 2]
            self._skip(2)
        elif self.text.startswith("((", self.at) and [word.text for word in self.current.words] in ([], ["for"]):
            end = closing(self.text, self.at)
            expression = self.text[self.at + 2 : end - 1]
            self.current.words += [RawWord("((", self.line), RawWord(expression, self.line)]
            self._skip(end + 1 - self.at)
        elif (sign == "(" and not self.current.words) or (sign == ")" and self.subshells):
            if sign == ")":
                self._end()
            self.subshells += 1 if sign == "(" else -1
            self._keyword(sign, 1)
        elif sign in _ENDS:
            self._end()
            self.current.operator = "|" if sign == "|" else ""
            self._skip(1)
            if sign == "\n":
                self._heredocs()
        elif not self.current.words and (function := _FUNCTION.match(self.text, self.at)):
            self._function(function[1])
            self._skip(function.end() - self.at)
        elif heredoc := _HEREDOC.match(self.text, self.at):
            self.waiting.append((self.current, heredoc[3], bool(heredoc[2]), bool(heredoc[1])))
            self._skip(heredoc.end() - self.at)
        elif self._redirected():
            pass
        else:
            self._append(self._word())

    def _append(self, word: RawWord) -> None:
        words = self.current.words
        if not words and word.text in _PREFIXES:
            return
        if not words and word.text == "!":
            self.current.negated = not self.current.negated
            return
        words.append(word)
        texts = [each.text for each in words]
        if len(words) == 1 and (word.text in _KEYWORDS or word.text == "esac"):
            self.current.keyword = word.text
            self._end()
        elif len(words) == 2 and texts[0] == "function":
            self._function(word.text)
        elif len(words) > 2 and texts[0] == "case" and texts[-1] == "in":
            self.current.keyword = "case"
            self._end()
            self.pattern = True

    def _keyword(self, text: str, size: int) -> None:
        self.current.words, self.current.keyword = [RawWord(text, self.line)], text
        self._skip(size)
        self._end()

    def _function(self, name: str) -> None:
        self.current.words = [RawWord("function", self.line), RawWord(name, self.line)]
        self.current.keyword = "function"
        self._end()

    def _in_test(self) -> bool:
        """Returns whether the next text is inside `[[ ... ]]`, where `&&`, `<` and brackets are words."""
        words = self.current.words
        return bool(words) and words[0].text == "[[" and words[-1].text != "]]" and self.text[self.at] not in "\n;"

    def _test_word(self) -> None:
        sign = self.text[self.at : self.at + 2]
        size = 2 if sign in ("&&", "||") else 1 if sign[0] in "()<>" else 0
        self.current.words.append(RawWord(sign[:size], self.line) if size else self._word())
        self._skip(size)

    def _case_pattern(self) -> None:
        """Reads the patterns `a | b)` of a branch of `case`."""
        self.pattern = False
        if re.match(r"esac\b", self.text[self.at :]):
            return
        if self.text[self.at] == "(":
            self._skip(1)
        patterns, line = [""], self.line
        while self.at < len(self.text) and self.text[self.at] != ")":
            piece = self._piece()
            patterns = [*patterns, ""] if piece == "|" else [*patterns[:-1], patterns[-1] + piece]
        self._skip(1)
        words = [RawWord(pattern.strip(), line) for pattern in patterns]
        self.result.append(RawCommand(words, patterns=tuple(words)))

    def _redirected(self) -> bool:
        """Skips a redirection: `2>&1`, `> file`."""
        match = _REDIRECTION.match(self.text, self.at)
        if not match:
            return False
        self._skip(match.end() - self.at)
        if self.at < len(self.text) and self.text[self.at] not in " \t\n" + _ENDS:
            word = self._word()
            if match[2] == "<<<":
                self.current.here_string = word
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
