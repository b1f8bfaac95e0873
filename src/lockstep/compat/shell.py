"""The commands of a shell script with its variables filled in, without running any of it.

Variables, defaults, positional parameters, arrays, here-documents and sums of known numbers are worked out. What only a
run would know (another program's output, a variable that nobody sets) stays unknown, and is told where it matters.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.compat.shell_words import RawCommand, RawWord, closing, commands_of

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!-]")
_BRACED = re.compile(r"^(!?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?((?::?[-=+?])|[%#/:^,].*)?(.*)$", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_KEYWORDS = ("then", "else", "do", "time", "!", "{", "exec", "nohup")
# The time of the start is in many names; a recipe needs one name.
_NOW = re.compile(r"^\s*(date|now)\b")
MARK = "\x00"
"""Around the name of what is not known."""

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: lambda a, b: int(a / b), ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


@dataclass(frozen=True)
class Word:
    text: str
    line: int

    @property
    def unknown(self) -> list[str]:
        """Names in it that nobody set."""
        return re.findall(f"{MARK}([^{MARK}]*){MARK}", self.text)


@dataclass
class Script:
    """What came of reading it."""

    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_script(text: str, given: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> Script:
    """`given` are variables from outside, `arguments` the words behind the script's name."""
    shell = _Shell(dict(given or {}), list(arguments))
    for raw in commands_of(text):
        shell.command(raw)
    return shell.script


class _Shell:
    def __init__(self, given: dict[str, str], arguments: list[str]):
        self.given, self.arguments = given, arguments
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.script = Script()
        self.conditions = 0

    def command(self, raw: RawCommand) -> None:
        words = raw.words
        while words and words[0].text in _KEYWORDS:
            words = words[1:]
        if not words:
            return
        first = words[0].text
        if first in ("if", "case"):
            self.conditions += 1
            return
        if first in ("fi", "esac"):
            self.conditions = max(0, self.conditions - 1)
            return
        if first in ("for", "while", "until", "done", "elif", "else", "select", "function", "}"):
            self._loop(words)
            return
        self._simple(words, raw)

    def _loop(self, words: Sequence[RawWord]) -> None:
        """A loop's body is read once, with its first value."""
        if words[0].text == "for" and len(words) > 3 and words[2].text == "in":
            values = self.expand(words[3])
            if values:
                self.variables[words[1].text] = values[0]
                self.script.remarks.append(
                    f"line {words[0].line}: the loop is read once, with {words[1].text}={values[0]}"
                )

    def _simple(self, words: Sequence[RawWord], raw: RawCommand) -> None:
        declares = words[0].text in _DECLARES
        rest = list(words[1:] if declares else words)
        while rest and (found := _ASSIGNMENT.match(rest[0].text)):
            self._assign(rest.pop(0), found)
        if declares or not rest:
            return
        if rest[0].text == "read" and raw.heredoc is not None:
            self.variables[rest[-1].text] = self._heredoc(raw)
        elif rest[0].text == "shift":
            count = int(rest[1].text) if len(rest) > 1 and rest[1].text.isdigit() else 1
            self.arguments = self.arguments[count:]
        elif rest[0].text == "cd":
            return
        else:
            expanded = [Word(text, word.line) for word in rest for text in self.expand(word)]
            if expanded:
                self.script.commands.append(expanded)

    def _assign(self, word: RawWord, found: re.Match[str]) -> None:
        name, adds = found[1], bool(found[2])
        if word.array is not None:
            values = [text for item in word.array for text in self.expand(item)]
            self.arrays[name] = [*self.arrays.get(name, []), *values] if adds else values
            return
        value = " ".join(self.expand(RawWord(word.text[found.end() :], word.line), split=False))
        if self.conditions and name in self.variables and not adds:
            said = f"line {word.line}: {name} is set under a condition; {self.variables[name]!r} is kept"
            self.script.remarks.append(said)
            return
        self.variables[name] = self.variables.get(name, "") + value if adds else value

    def _heredoc(self, raw: RawCommand) -> str:
        text = raw.heredoc or ""
        if raw.quoted_heredoc:
            return text
        return self._in_quotes(text)

    # Expansion ---------------------------------------------------------------------------------------------------

    def expand(self, word: RawWord, *, split: bool = True) -> list[str]:
        """The words that a raw word becomes: quotes taken off, variables filled in, unquoted ones split at spaces."""
        if word.array is not None:
            return [word.text + "(" + " ".join(text for item in word.array for text in self.expand(item)) + ")"]
        fields: list[str] = [""]
        seen = False  # whether anything makes the last field a word, be it an empty quotation
        text, i = word.text, 0
        while i < len(text):
            sign = text[i]
            if sign == "\\" and i + 1 < len(text):
                fields[-1] += text[i + 1]
                seen, i = True, i + 2
            elif sign == "'":
                end = _end(text.find("'", i + 1), text)
                fields[-1] += text[i + 1 : end]
                seen, i = True, end + 1
            elif text.startswith("$'", i):
                end = _end(text.find("'", i + 2), text)
                fields[-1] += text[i + 2 : end].encode().decode("unicode_escape")
                seen, i = True, end + 1
            elif sign == '"':
                end = _quote_end(text, i + 1)
                inner = text[i + 1 : end]
                many = self._all_of(inner)
                if many is not None:
                    fields[-1] += many[0] if many else ""
                    fields += many[1:]
                    seen = seen or bool(many)
                else:
                    fields[-1] += self._in_quotes(inner)
                    seen = True
                i = end + 1
            elif sign in "$`":
                value, i = self._dollar(text, i)
                pieces = value.split() if split else [value]
                if split and value[:1].isspace() and fields[-1]:
                    fields.append("")
                fields[-1] += pieces[0] if pieces else ""
                fields += pieces[1:]
                seen = seen or bool(value)
            else:
                fields[-1] += sign
                seen, i = True, i + 1
        return fields if seen else []

    def _all_of(self, inner: str) -> list[str] | None:
        """`"$@"` and `"${NAME[@]}"` are as many words as there are."""
        if inner in ("$@", "${@}"):
            return self.arguments
        found = re.fullmatch(r"\$\{(\w+)\[@\]\}", inner)
        return self.arrays.get(found[1], []) if found else None

    def _in_quotes(self, text: str) -> str:
        out, i = "", 0
        while i < len(text):
            if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in '"\\$`\n':
                out += "" if text[i + 1] == "\n" else text[i + 1]
                i += 2
            elif text[i] in "$`":
                value, i = self._dollar(text, i)
                out += value
            else:
                out += text[i]
                i += 1
        return out

    def _dollar(self, text: str, i: int) -> tuple[str, int]:
        """The expansion that begins at `i`, and where it ends."""
        if text[i] == "`":
            end = _end(text.find("`", i + 1), text)
            return self._output(text[i + 1 : end]), end + 1
        if text.startswith("$((", i):
            end = closing(text, i + 1)
            return self._sum(text[i + 3 : end - 1]), end + 1
        if text.startswith("$(", i):
            end = closing(text, i + 1)
            return self._output(text[i + 2 : end]), end + 1
        if text.startswith("${", i):
            end = closing(text, i + 1)
            return self._braced(text[i + 2 : end]), end + 1
        name = _NAME.match(text, i + 1)
        if name is None:
            return "$", i + 1
        return self._value(name[0]), name.end()

    def _braced(self, inner: str) -> str:
        found = _BRACED.match(inner)
        if found is None or found[1]:
            return f"{MARK}{inner}{MARK}"
        name, index, sign, rest = found[2], found[3], found[4] or "", found[5]
        if index is not None:
            values = self.arrays.get(name, [])
            if index in ("[@]", "[*]"):
                return " ".join(values)
            return values[int(index[1:-1])] if index[1:-1].isdigit() and int(index[1:-1]) < len(values) else ""
        known = self._known(name)
        if sign in (":-", "-", ":=", "="):
            if known or (known is not None and not sign.startswith(":")):
                return known
            default = self._in_quotes(rest.strip('"'))
            if "=" in sign:
                self.variables[name] = default
            return default
        if sign in (":+", "+"):
            return self._in_quotes(rest) if known else ""
        if sign in (":?", "?") or not sign:
            return self._value(name)
        return f"{MARK}{inner}{MARK}"  # cutting and replacing in a variable

    def _known(self, name: str) -> str | None:
        if name in ("@", "*"):
            return " ".join(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit():
            number = int(name)
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        return self.given.get(name)

    def _value(self, name: str) -> str:
        known = self._known(name)
        return f"{MARK}{name}{MARK}" if known is None else known

    def _output(self, command: str) -> str:
        if command.strip() == "pwd":
            return self._value("PWD")
        if _NOW.match(command):
            remark = "the time in a name is written as `now`"
            if remark not in self.script.remarks:
                self.script.remarks.append(remark)
            return "now"
        echo = re.fullmatch(r"\s*echo\s+(.*?)\s*", command, re.DOTALL)
        return self._in_quotes(echo[1].strip("\"'")) if echo else f"{MARK}$({command}){MARK}"

    def _sum(self, text: str) -> str:
        """`$((a * 2))`, of numbers and of variables that hold numbers."""

        def number(found: re.Match[str]) -> str:
            return self._value(found[1])

        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, text)
        if MARK in filled:
            return filled
        try:
            return str(_computed(ast.parse(filled.strip().replace("/", "//").replace("////", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return f"{MARK}$(({text})){MARK}"


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("not a sum of whole numbers")


def _end(found: int, text: str) -> int:
    return found if found >= 0 else len(text)


def _quote_end(text: str, start: int) -> int:
    i = start
    while i < len(text) and text[i] != '"':
        if text[i] == "\\":
            i += 1
        elif text.startswith(("$(", "${"), i):
            i = closing(text, i + 1)
        i += 1
    return i
