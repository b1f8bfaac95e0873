"""Expands the words of a shell script: quotes, variables, arrays, arithmetic and `${X%...}` operations.

Values that exist only at run time (the output of a program, an unset variable) are marked as unknown.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

from lockstep.compat.shell_filters import filtered, pipeline
from lockstep.compat.shell_operations import braces, computed, cut
from lockstep.compat.shell_syntax import RawCommand, RawWord, closing, closing_quote, nodes_of

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!-]")
_BRACED = re.compile(r"^(!?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?((?::?[-=+?])|[%#/:^,].*)?(.*)$", re.DOTALL)
_MANY = re.compile(r"(!?)(?:([A-Za-z_]\w*)\[@\]|@)(.*)", re.DOTALL)
# Commands that print the time: many scripts put it into the run name, but a recipe needs a fixed name.
_NOW = re.compile(r"^\s*(date|now)\b")
MARK = "\x00"
"""The marker before and after the name of a value that is unknown until the script runs."""
# Words between spaces. The name of an unknown value may contain spaces and stays in one word.
_WORDS = re.compile(f"(?:{MARK}[^{MARK}]*{MARK}|\\S)+")


class ShellExpansion:
    """The variables, arrays and arguments of a script, and the expansion of words with them."""

    def __init__(self, given: dict[str, str], arguments: list[str]):
        self.given, self.arguments = given, arguments
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, dict[str, str]] = {}
        """The values of arrays by index or key."""
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def expand(self, word: RawWord, *, split: bool = True) -> list[str]:
        """Expands a raw word: removes quotes, replaces variables, splits unquoted values at spaces."""
        if word.array is not None:
            return [word.text + "(" + " ".join(text for item in word.array for text in self.expand(item)) + ")"]
        if split and len(several := braces(word.text)) > 1:
            return [text for one in several for text in self.expand(RawWord(one, word.line))]
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
                many = self._quoted(text[i + 1 : end])
                fields[-1] += many[0] if many else ""
                fields += many[1:]
                seen, i = seen or bool(many), end + 1
            elif split and text.startswith("${", i) and (default := self._default(text, i)) is not None:
                many = self.expand(RawWord(default, word.line))
                fields[-1] += many[0] if many else ""
                fields += many[1:]
                seen, i = seen or bool(many), closing(text, i + 1) + 1
            elif sign in "$`":
                value, i = self._dollar(text, i)
                pieces = self._split(value) if split else [value]
                if split and value[:1].isspace() and fields[-1]:
                    fields.append("")
                fields[-1] += pieces[0] if pieces else ""
                fields += pieces[1:]
                seen = seen or bool(value)
            else:
                fields[-1] += sign
                seen, i = True, i + 1
        return fields if seen else []

    def _split(self, value: str) -> list[str]:
        signs = self.variables.get("IFS", " \t\n")
        if signs.isspace():
            return _WORDS.findall(value)
        return re.split(f"[{re.escape(signs)}]", value) if signs and MARK not in value else [value]

    def _default(self, text: str, i: int) -> str | None:
        """Returns the quoted default of `${NAME:-"two words"}`, if it is used: its quotes keep it from being split."""
        match = re.fullmatch(r"(\w+)(:?-)(.*)", text[i + 2 : closing(text, i + 1)], re.DOTALL)
        if match is None or not re.search(r"[\"']", match[3]):
            return None
        value = self._lookup(match[1])
        return None if value or (value is not None and match[2] == "-") else match[3]

    def _quoted(self, text: str) -> list[str]:
        """Expands a text in double quotes. `"$@"` and `"${NAME[@]}"` give several words, or none."""
        fields, seen, i = [""], not text, 0
        while i < len(text):
            if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in '"\\$`\n':
                fields[-1] += "" if text[i + 1] == "\n" else text[i + 1]
                seen, i = True, i + 2
            elif (found := self._many(text, i)) is not None:
                many, i = found
                fields[-1] += many[0] if many else ""
                fields += many[1:]
                seen = seen or bool(many)
            elif text[i] in "$`":
                value, i = self._dollar(text, i)
                fields[-1] += value
                seen = True
            else:
                fields[-1] += text[i]
                seen, i = True, i + 1
        return fields if seen else []

    def in_quotes(self, text: str) -> str:
        return " ".join(self._quoted(text))

    def _many(self, text: str, i: int) -> tuple[list[str], int] | None:
        """Returns the words of `$@`, `${@:2}`, `${NAME[@]}`, `${NAME[@]:1}`, `${NAME[@]/a/b}` or `${!NAME[@]}` at
        position `i`, and the position after it."""
        if text.startswith("$@", i):
            return self.arguments, i + 2
        if not text.startswith("${", i):
            return None
        end = closing(text, i + 1)
        match = _MANY.fullmatch(text[i + 2 : end])
        if match is None or (match[2] is not None and match[2] not in self.arrays):
            return None
        if match[2] is None:
            some = self.arguments if not match[3] else self._some("@" + match[3])
            return None if some is None or match[1] else (some, end + 1)
        values = list(self.arrays[match[2]]) if match[1] else list(self.arrays[match[2]].values())
        if part := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", match[3]):
            values = values[int(part[1]) :][: int(part[2]) if part[2] else None]
        elif match[3]:
            changed = [cut(value, match[3], self.in_quotes) for value in values]
            if None in changed:
                return [f"{MARK}{text[i + 2 : end]}{MARK}"], end + 1
            values = [value for value in changed if value is not None]
        return values, end + 1

    def _item(self, name: str, index: str, inner: str) -> str:
        """Evaluates `${NAME[0]}` and `${NAME[key]}`."""
        if name == "BASH_SOURCE":
            return self._value("0")
        values, key = self.arrays.get(name), self.in_quotes(index.strip("\"'"))
        if values is None:
            return f"{MARK}{name}{MARK}"
        if key in ("@", "*"):
            separator = self.variables.get("IFS", " ")[:1] if key == "*" else " "
            return separator.join(values.values())
        if re.fullmatch(r"-\d+", key):
            return [*[""] * -int(key), *values.values()][int(key)]
        if key not in values and not key.isdigit():
            key = self.sum(key)  # an index is arithmetic: ${LIST[I + 1]}
        return f"{MARK}{inner}{MARK}" if MARK in key else values.get(key, "")

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

    def _dollar(self, text: str, i: int) -> tuple[str, int]:
        """Returns the value of the `$` or backquote expansion at position `i` of `text`, and the position after it."""
        if text[i] == "`":
            end = _end(text.find("`", i + 1), text)
            return self._output(text[i + 1 : end]), end + 1
        if text.startswith("$((", i):
            end = closing(text, i + 1)
            return self.sum(text[i + 3 : end - 1]), end + 1
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
        if inner.startswith("!") and (found := self._many("${" + inner + "}", 0)) is not None:
            return " ".join(found[0])
        match = _BRACED.match(inner)
        if match is not None and match[1] and not match[3] and not match[4]:
            return self._indirect(match[2], inner)
        if match is None or match[1] or (match[2] in ("@", "*") and match[4]):
            return f"{MARK}{inner}{MARK}"
        name, index, sign, rest = match[2], match[3], match[4] or "", match[5]
        if index is not None:
            found = self._many("${" + inner + "}", 0) if index == "[@]" else None
            return " ".join(found[0]) if found is not None else self._item(name, index[1:-1], inner)
        value = self._lookup(name)
        if sign in (":-", "-", ":=", "="):
            if value or (value is not None and not sign.startswith(":")):
                return value
            default = self.in_quotes(rest.strip('"'))
            if "=" in sign:
                self.variables[name] = default
            return default
        if sign in (":+", "+"):
            is_set = bool(value) if sign == ":+" else value is not None
            return self.in_quotes(rest) if is_set else ""
        if sign in (":?", "?") or not sign:
            return self._value(name)
        changed = None if value is None else cut(value, sign + rest, self.in_quotes)
        return changed if changed is not None else f"{MARK}{inner if value is not None else name}{MARK}"

    def _indirect(self, name: str, inner: str) -> str:
        """Evaluates `${!NAME}`: the value of the variable whose name is the value of NAME."""
        other = self._lookup(name)
        return f"{MARK}{inner}{MARK}" if not other or MARK in other else self._value(other)

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
            return self.arrays[name].get("0", "")
        return self.given.get(name)

    def _value(self, name: str) -> str:
        value = self._lookup(name)
        return f"{MARK}{name}{MARK}" if value is None else value

    def _output(self, command: str) -> str:
        if command.strip() == "pwd":
            return self._value("PWD")
        if (path := self._path(command)) is not None:
            return path
        if command.strip().startswith("#"):
            return ""  # `# a comment between lines`
        if place := re.fullmatch(
            r"\s*cd (?:-- )?(\S.*?)\s*(?:>\s*/dev/null\s*(?:2>&1\s*)?)?&&\s*pwd(?: -P)?\s*", command
        ):
            return os.path.normpath(" ".join(self.expand(RawWord(place[1], 0), split=False)))
        if _NOW.match(command):
            remark = "the word `now` replaces the current time in a name"
            self.remark(remark)
            return "now"
        first, *filters = pipeline(command)
        echo = re.fullmatch(r"\s*echo\s+(.*?)\s*", first, re.DOTALL)
        value = self.in_quotes(echo[1].strip("\"'")) if echo else None
        if value is not None and filters:
            value = None if MARK in value else filtered(value, filters)
        return f"{MARK}$({command}){MARK}" if value is None else value

    def _path(self, command: str) -> str | None:
        """Evaluates `basename PATH [SUFFIX]` and `dirname PATH`."""
        nodes = nodes_of(command)
        first = nodes[0] if len(nodes) == 1 else None
        if not isinstance(first, RawCommand) or first.words[0].text not in ("basename", "dirname"):
            return None
        words = [text for word in first.words for text in self.expand(word)]
        if len(words) < 2 or any(MARK in word for word in words):
            return None
        path = PurePosixPath(words[1])
        if words[0] == "dirname":
            return str(path.parent)
        return path.name.removesuffix(words[2]) if len(words) > 2 else path.name

    def sum(self, text: str) -> str:
        """Evaluates `$((a * 2))`: integer arithmetic with variables."""
        filled = self.in_quotes(text)
        if MARK not in filled:  # variables in arithmetic need no $
            filled = re.sub(r"(?<!\w)[A-Za-z_]\w*", lambda match: self._value(match[0]), filled)
        if MARK in filled:
            return filled
        value = computed(filled)
        return f"{MARK}$(({text})){MARK}" if value is None else str(value)


def _end(position: int, text: str) -> int:
    return position if position >= 0 else len(text)
