"""A shell interpreter that expands the commands of a script and runs none of them.

The interpreter evaluates variables, defaults, positional parameters, arrays, here-documents and arithmetic. Values that
exist only at run time (the output of a program, an unset variable) are marked as unknown.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from lockstep.compat.shell_filters import filtered, pipeline
from lockstep.compat.shell_syntax import RawCommand, RawWord, closing, closing_quote, commands_of, cut, holds

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!-]")
_BRACED = re.compile(r"^(!?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?((?::?[-=+?])|[%#/:^,].*)?(.*)$", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_KEYWORDS = ("then", "else", "do", "time", "!", "{", "exec", "nohup")
# Commands that print the time: many scripts put it into the run name, but a recipe needs a fixed name.
_NOW = re.compile(r"^\s*(date|now)\b")
# The folder of `$(cd FOLDER && pwd)`.
_FOLDER = re.compile(r"cd (?:-- )?(\S.*?)\s*(?:>\s*/dev/null\s*(?:2>&1\s*)?)?&&\s*pwd(?: -P)?")
MARK = "\x00"
"""The marker before and after the name of a value that is unknown until the script runs."""

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b), ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


@dataclass(frozen=True)
class Word:
    text: str
    line: int

    @property
    def unknown(self) -> list[str]:
        """The names of the values in the word that are unknown until the script runs."""
        return re.findall(f"{MARK}([^{MARK}]*){MARK}", self.text)


@dataclass
class Script:
    """The expanded commands of a script, and remarks."""

    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """The values of the variables at the end of the script."""
    computed: dict[str, str] = field(default_factory=dict)
    """Variables with the output of a program, and the program."""


def read_script(text: str, given: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> Script:
    """Expands a script. `given` are variables set by the caller; `arguments` are the script's positional parameters."""
    shell = _Shell(dict(given or {}), list(arguments))
    for raw in commands_of(text):
        shell.command(raw)
    shell.uncalled()
    shell.script.variables = shell.variables
    return shell.script


class _Shell:
    def __init__(self, given: dict[str, str], arguments: list[str]):
        self.given, self.arguments = given, arguments
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.script = Script()
        self.branches: list[bool | None] = []
        """For each open `if` and `case`, whether the current branch runs (None: unknown)."""
        self.chosen: list[bool | None] = []
        """For each open `if`, whether one of its branches ran (None: unknown)."""
        self.functions: dict[str, list[RawCommand]] = {}
        self.called: list[str] = []
        self.calls = 0
        self.defining: tuple[str, int] | None = None
        """The function whose body is being read, and the number of open braces."""

    def command(self, raw: RawCommand) -> None:
        if self.defining is not None:
            self._define(raw)
            return
        words = raw.words
        if words[0].text == "function" and len(words) > 1:
            self.functions[words[1].text] = []
            self.defining = (words[1].text, int(words[-1].text == "{"))
            return
        while words and words[0].text in _KEYWORDS and words[0].text != "else":
            words = words[1:]
        if not words or self._branches(words):
            return
        if False in self.branches:
            return
        if words[0].text in ("for", "while", "until", "done", "select", "}"):
            self._loop(words)
            return
        if raw.conditional:
            self.branches.append(None)
        self._simple(words, raw)
        if raw.conditional:
            self.branches.pop()

    def _branches(self, words: Sequence[RawWord]) -> bool:
        """Handles `if`, `elif`, `else`, `fi`, `case` and `esac`; returns whether the command is one of them."""
        first = words[0].text
        if first == "case":
            self.branches.append(None)
        elif first == "if":
            self.branches.append(self._holds(words[1:]))
            self.chosen.append(self.branches[-1])
        elif first in ("elif", "else") and self.chosen:
            before = self.chosen[-1]
            now = True if first == "else" else self._holds(words[1:])
            # If an earlier branch ran, this branch does not run. If it is unknown whether an earlier branch ran, it is
            # also unknown whether this branch runs.
            self.branches[-1] = False if before else now if before is False or now is False else None
            self.chosen[-1] = True if before or self.branches[-1] else None if None in (before, now) else False
            if first == "else" and len(words) > 1:
                self.command(RawCommand(list(words[1:])))
        elif first in ("fi", "esac") and self.branches:
            self.branches.pop()
            if first == "fi":
                self.chosen.pop()
        else:
            return False
        return True

    def _holds(self, words: Sequence[RawWord]) -> bool | None:
        return holds([text for word in words for text in self.expand(word) or [""]], MARK)

    def _define(self, raw: RawCommand) -> None:
        """Stores a command of a function's body for later calls."""
        assert self.defining is not None
        name, depth = self.defining
        texts = [word.text for word in raw.words]
        depth += (texts[0] == "{") - (texts[0] == "}")
        inside = raw.words[1:] if texts[0] in "{}" else raw.words
        if inside and depth:
            self.functions[name].append(RawCommand(list(inside), raw.heredoc, raw.quoted_heredoc))
        self.defining = (name, depth) if depth else None

    def _call(self, name: str, arguments: list[str]) -> None:
        self.called.append(name)
        if self.calls > 20:
            return  # endless recursion
        before, self.arguments, self.calls = self.arguments, arguments, self.calls + 1
        for raw in self.functions[name]:
            self.command(raw)
        self.arguments, self.calls = before, self.calls - 1

    def uncalled(self) -> None:
        """Expands functions that the script does not call, because another script may call them."""
        self.defining = None
        for name in [name for name in self.functions if name not in self.called]:
            before = len(self.script.commands)
            self._call(name, self.arguments)
            if len(self.script.commands) > before:
                self.script.remarks.append(f"the script does not call the function {name}; its body is converted once")

    def _loop(self, words: Sequence[RawWord]) -> None:
        """Expands the body of a loop once, with the first value of the loop variable."""
        if words[0].text == "for" and len(words) > 3 and words[2].text == "in":
            values = self.expand(words[3])
            if values:
                self.variables[words[1].text] = values[0]
                self.script.remarks.append(
                    f"line {words[0].line}: only the first pass of the loop is used, with {words[1].text}={values[0]}"
                )

    def _simple(self, words: Sequence[RawWord], raw: RawCommand) -> None:
        declares = words[0].text in _DECLARES
        rest = list(words[1:] if declares else words)
        while rest and (match := _ASSIGNMENT.match(rest[0].text)):
            self._assign(rest.pop(0), match)
        if declares or not rest:
            return
        if rest[0].text == "read" and raw.heredoc is not None:
            self.variables[rest[-1].text] = self._heredoc(raw)
        elif raw.heredoc is not None and self._starts_a_shell(rest):
            self._inner_script(raw)
        elif rest[0].text == "shift":
            count = int(rest[1].text) if len(rest) > 1 and rest[1].text.isdigit() else 1
            self.arguments = self.arguments[count:]
        elif rest[0].text == "cd":
            return
        elif rest[0].text in self.functions:
            self._call(rest[0].text, [text for word in rest[1:] for text in self.expand(word)])
        else:
            expanded = [Word(text, word.line) for word in rest for text in self.expand(word)]
            if expanded:
                self.script.commands.append(expanded)

    @staticmethod
    def _starts_a_shell(words: Sequence[RawWord]) -> bool:
        """Returns whether the command runs the here-document as a script (`sbatch <<EOF`, `srun ... bash <<EOF`)."""
        names = {PurePosixPath(word.text).name for word in words}
        return words[0].text in ("sbatch", "ssh") or bool(names & {"bash", "sh"})

    def _inner_script(self, raw: RawCommand) -> None:
        first = raw.words[-1].line
        for inner in commands_of(self._heredoc(raw)):
            inner.words = [replace(word, line=word.line + first) for word in inner.words]
            self.command(inner)

    def _assign(self, word: RawWord, match: re.Match[str]) -> None:
        name, adds = match[1], bool(match[2])
        if word.array is not None:
            values = [text for item in word.array for text in self.expand(item)]
            self.arrays[name] = [*self.arrays.get(name, []), *values] if adds else values
            return
        value = " ".join(self.expand(RawWord(word.text[match.end() :], word.line), split=False))
        if name in self.given and (self.branches or MARK in value):
            # The caller's value replaces a value that is set in a branch or is the output of a program.
            self.variables[name] = self.given[name]
            return
        if program := re.search(f"{MARK}(\\$\\([^{MARK}]*){MARK}", value):
            self.script.computed[name] = program[1]
            value = f"{MARK}{name}{MARK}"  # the caller can set the variable
        if None in self.branches and not adds:
            kept = self.variables.setdefault(name, value)
            remark = f"{name} is set under a condition; {kept!r} is used (set {name}=VALUE to change it)"
            self.script.remarks.append(f"line {word.line}: {remark}")
            return
        self.variables[name] = self.variables.get(name, "") + value if adds else value

    def _heredoc(self, raw: RawCommand) -> str:
        text = raw.heredoc or ""
        if raw.quoted_heredoc:
            return text
        return self._in_quotes(text)

    # Expansion ---------------------------------------------------------------------------------------------------

    def expand(self, word: RawWord, *, split: bool = True) -> list[str]:
        """Expands a raw word: removes quotes, replaces variables, splits unquoted values at spaces."""
        if word.array is not None:
            return [word.text + "(" + " ".join(text for item in word.array for text in self.expand(item)) + ")"]
        fields: list[str] = [""]
        seen = False  # whether the result has a word; a quoted empty string is a word
        text, i = word.text, 0
        while i < len(text):
            sign = text[i]
            if sign == "\\" and i + 1 < len(text):
                fields[-1] += text[i + 1]
                seen, i = True, i + 2
            elif sign == "\\":
                break  # a backslash at the end of the script continues nothing
            elif sign == "'":
                end = _end(text.find("'", i + 1), text)
                fields[-1] += text[i + 1 : end]
                seen, i = True, end + 1
            elif text.startswith("$'", i):
                end = _end(text.find("'", i + 2), text)
                fields[-1] += text[i + 2 : end].encode().decode("unicode_escape")
                seen, i = True, end + 1
            elif sign == '"':
                end = closing_quote(text, i + 1)
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
                # A value that is unknown until the script runs is not split, because splitting would lose its name.
                pieces = value.split() if split and MARK not in value else [value]
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
        """Returns the words of `"$@"` and `"${NAME[@]}"`."""
        if inner in ("$@", "${@}"):
            return self.arguments
        if inner.startswith("${@:") and (some := self._some(inner[2:-1])) is not None:
            return some
        match = re.fullmatch(r"\$\{(\w+)\[@\]\}", inner)
        return self.arrays.get(match[1]) if match else None

    def _item(self, name: str, index: str, inner: str) -> str:
        """Evaluates `${NAME[0]}` and `${NAME[@]}`."""
        if name == "BASH_SOURCE":
            return self._value("0")
        values, number = self.arrays.get(name), self._in_quotes(index)
        if values is None:
            return f"{MARK}{name}{MARK}"
        if number in ("@", "*"):
            return " ".join(values)
        if not number.isdigit():
            return f"{MARK}{inner}{MARK}"
        return values[int(number)] if int(number) < len(values) else ""

    def _some(self, inner: str) -> list[str] | None:
        """Evaluates `@:2` (the arguments from the second on) and `@:2:1` (one argument from the second on)."""
        match = re.fullmatch(r"[@*]:\s*([1-9]\d*)(?::\s*(\d+))?", inner)
        if match is None:
            return None
        rest = self.arguments[int(match[1]) - 1 :]
        return rest if match[2] is None else rest[: int(match[2])]

    def _length(self, name: str) -> str:
        """Evaluates `${#X}` and `${#X[@]}`."""
        listed = re.fullmatch(r"(\w+)\[[@*]\]", name)
        if listed and listed[1] in self.arrays:
            return str(len(self.arrays[listed[1]]))
        value = self._lookup(name) if re.fullmatch(r"\w+", name) else None
        return f"{MARK}#{name}{MARK}" if value is None or MARK in value else str(len(value))

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
        """Returns the value of the `$` or backquote expansion at position `i` of `text`, and the position after it."""
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
        if inner.startswith("#") and len(inner) > 1:
            return self._length(inner[1:])
        if (some := self._some(inner)) is not None:
            return " ".join(some)
        match = _BRACED.match(inner)
        if match is None or match[1] or (match[2] in ("@", "*") and match[4]):
            return f"{MARK}{inner}{MARK}"
        name, index, sign, rest = match[2], match[3], match[4] or "", match[5]
        if index is not None:
            return self._item(name, index[1:-1], inner)
        value = self._lookup(name)
        if sign in (":-", "-", ":=", "="):
            if value or (value is not None and not sign.startswith(":")):
                return value
            default = self._in_quotes(rest.strip('"'))
            if "=" in sign:
                self.variables[name] = default
            return default
        if sign in (":+", "+"):
            is_set = bool(value) if sign == ":+" else value is not None
            return self._in_quotes(rest) if is_set else ""
        if sign in (":?", "?") or not sign:
            return self._value(name)
        changed = None if value is None else cut(value, sign + rest, self._in_quotes)
        return changed if changed is not None else f"{MARK}{inner if value is not None else name}{MARK}"

    def _lookup(self, name: str) -> str | None:
        if name in ("@", "*"):
            return " ".join(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name == "0":
            return self.given.get("0")
        if name.isdigit():
            number = int(name)
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        return self.given.get(name)

    def _value(self, name: str) -> str:
        value = self._lookup(name)
        return f"{MARK}{name}{MARK}" if value is None else value

    def _output(self, command: str) -> str:
        if command.strip() == "pwd":
            return self._value("PWD")
        if (path := self._path(command)) is not None:
            return path
        if place := re.fullmatch(
            r"\s*cd (?:-- )?(\S.*?)\s*(?:>\s*/dev/null\s*(?:2>&1\s*)?)?&&\s*pwd(?: -P)?\s*", command
        ):
            return os.path.normpath(" ".join(self.expand(RawWord(place[1], 0), split=False)))
        if _NOW.match(command):
            remark = "the word `now` replaces the current time in a name"
            if remark not in self.script.remarks:
                self.script.remarks.append(remark)
            return "now"
        first, *filters = pipeline(command)
        echo = re.fullmatch(r"\s*echo\s+(.*?)\s*", first, re.DOTALL)
        value = self._in_quotes(echo[1].strip("\"'")) if echo else None
        if value is not None and filters:
            value = None if MARK in value else filtered(value, filters)
        return f"{MARK}$({command}){MARK}" if value is None else value

    def _path(self, command: str) -> str | None:
        """Evaluates `basename PATH [SUFFIX]` and `dirname PATH`."""
        commands = commands_of(command)
        if len(commands) != 1 or commands[0].words[0].text not in ("basename", "dirname"):
            return None
        words = [text for word in commands[0].words for text in self.expand(word)]
        if len(words) < 2 or any(MARK in word for word in words):
            return None
        path = PurePosixPath(words[1])
        if words[0] == "dirname":
            return str(path.parent)
        return path.name.removesuffix(words[2]) if len(words) > 2 else path.name

    def _sum(self, text: str) -> str:
        """Evaluates `$((a * 2))`: integer arithmetic with variables."""

        filled = self._in_quotes(text)
        if MARK not in filled:  # variables in arithmetic need no $
            filled = re.sub(r"[A-Za-z_]\w*", lambda match: self._value(match[0]), filled)
        if MARK in filled:
            return filled
        try:
            return str(_computed(ast.parse(filled.strip().replace("/", "//").replace("////", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return f"{MARK}$(({text})){MARK}"


def _quotient(a: int, b: int) -> int:
    """Divides like a shell, which rounds towards zero (Python rounds down)."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow | ast.LShift) and not 0 <= _computed(node.right) < 64:
            raise ValueError("too large for a shell integer")
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("not integer arithmetic")


def _end(position: int, text: str) -> int:
    return position if position >= 0 else len(text)
