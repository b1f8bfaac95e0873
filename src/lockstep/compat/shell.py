"""A shell interpreter that expands the commands of a script and runs none of them.

The interpreter evaluates variables, defaults, positional parameters, arrays, here-documents and arithmetic. Values that
exist only at run time (the output of a program, an unset variable) are marked as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from lockstep.compat.shell_expansion import MARK, ShellExpansion
from lockstep.compat.shell_operations import holds, negation
from lockstep.compat.shell_syntax import (
    RawCommand,
    RawWord,
    ShellCase,
    ShellFunction,
    ShellIf,
    ShellLoop,
    ShellNode,
    nodes_of,
)

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_SCOPED = ("local", "declare", "typeset")
# Files that many scripts source and that set no setting of a training.
_ENVIRONMENTS = re.compile(r"(^|/)(activate|conda\.sh|\.?bashrc|\.?(bash_)?profile|set_env\.sh|setup-env\.sh)$")
_PASSES = 200
"""The largest number of passes of a loop."""


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
    shell.script_of(nodes_of(text))
    shell.script.variables = shell.prefixed | shell.variables
    return shell.script


class _Leave(Exception):
    """`break`, `continue`, `return` or `exit` of a command that certainly runs."""

    def __init__(self, how: str, line: int):
        self.how, self.line = how, line


class _Shell(ShellExpansion):
    def __init__(self, given: dict[str, str], arguments: list[str]):
        super().__init__(given, arguments)
        self.prefixed: dict[str, str] = {}
        """Variables that were set for one command only (`NAME=VALUE command`)."""
        self.script = Script(remarks=self.remarks)
        self.branches: list[bool | None] = []
        """For each open `if` and `case`, whether the current branch runs (None: unknown)."""
        self.functions: dict[str, list[ShellNode]] = {}
        self.called: list[str] = []
        self.scopes: list[dict[str, str | None]] = []
        """For each open function call, its local variables with their values outside of the function."""
        self.unsure_break = False
        """Whether a `break` under an unknown condition may have ended the current loop."""

    def script_of(self, nodes: Sequence[ShellNode]) -> None:
        """Expands a whole script, then the functions that it does not call, because another script may call them."""
        try:
            self.run(nodes)
        except _Leave as leave:
            if leave.how == "exit":
                self.remark(f"line {leave.line}: `exit` ends the script; later commands are not converted")
        for name in [name for name in self.functions if name not in self.called]:
            before = len(self.script.commands)
            self._call(name, self.arguments)
            if len(self.script.commands) > before:
                self.remark(f"the script does not call the function {name}; its body is converted once")

    # Control -----------------------------------------------------------------------------------------------------

    def run(self, nodes: Sequence[ShellNode]) -> bool | None:
        """Expands commands in order. Returns whether the last one succeeds (None: unknown)."""
        status: bool | None = True
        for node in nodes:
            wanted = {"&&": status, "||": negation(status)}.get(node.operator, True)
            if wanted is False:
                continue
            if wanted is None:
                self.branches.append(None)
            try:
                status = self._node(node)
            finally:
                if wanted is None:
                    self.branches.pop()
                    status = None
        return status

    def _node(self, node: ShellNode) -> bool | None:
        if isinstance(node, RawCommand):
            status = self._simple(node.words, node)
            return negation(status) if node.negated else status
        if isinstance(node, ShellIf):
            self._if(node)
        elif isinstance(node, ShellCase):
            self._case(node)
        elif isinstance(node, ShellLoop):
            self._loop(node)
        elif isinstance(node, ShellFunction):
            self.functions[node.name] = node.body
        elif node.subshell:
            before = dict(self.variables), {name: dict(items) for name, items in self.arrays.items()}, self.arguments
            self.run(node.body)
            self.variables, self.arrays, self.arguments = before
        else:
            return self.run(node.body)
        return None

    def _if(self, node: ShellIf) -> None:
        unsure = False
        for condition, body in node.branches:
            holds_here = True if condition is None else self.run(condition)
            if holds_here is False:
                continue
            self._branch(body, None if unsure else holds_here)
            # If it is unknown whether this branch runs, it is also unknown whether a later branch runs.
            unsure = unsure or holds_here is None
            if holds_here:
                return

    def _case(self, node: ShellCase) -> None:
        value = " ".join(self.expand(node.word, split=False))
        unsure = MARK in value
        for patterns, body in node.branches:
            texts = [" ".join(self.expand(pattern, split=False)) for pattern in patterns]
            if unsure or any(MARK in text for text in texts):
                unsure = True
                self._branch(body, None)
            elif any(fnmatchcase(value, text) for text in texts):
                self._branch(body, True)
                return

    def _branch(self, body: Sequence[ShellNode], runs: bool | None) -> None:
        self.branches.append(runs)
        try:
            self.run(body)
        finally:
            self.branches.pop()

    def _loop(self, node: ShellLoop) -> None:
        """Expands all passes of a loop for its variables. Commands are kept only of the first pass."""
        words = node.head.words
        if len(words) > 2 and words[1].text == "((":
            start, condition, step = [*words[2].text.split(";"), "", ""][:3]
            self._arithmetic(start)
            self._passes(node, lambda: self._arithmetic(condition) if condition.strip() else True, step)
        elif words[0].text in ("while", "until"):
            until = words[0].text == "until"
            self._passes(node, lambda: negation(self.run(node.condition)) if until else self.run(node.condition), "")
        elif len(words) > 1:
            listed = words[3:] if len(words) > 2 and words[2].text == "in" else [RawWord('"$@"', words[0].line)]
            values = iter([text for word in listed for text in self.expand(word)])

            def next_value() -> bool:
                value = next(values, None)
                if value is not None:
                    self.variables[words[1].text] = value
                return value is not None

            self._passes(node, next_value, "", name=words[1].text)

    def _passes(self, node: ShellLoop, goes_on: Callable[[], bool | None], step: str, name: str = "") -> None:
        first = len(self.script.commands)
        outer, self.unsure_break = self.unsure_break, False
        for number in range(_PASSES):
            runs = goes_on()
            if runs is False:
                break
            value = self.variables.get(name, "")
            before = len(self.script.commands)
            try:
                self._branch(node.body, runs)
            except _Leave as leave:
                if leave.how not in ("break", "continue"):
                    raise
                if leave.how == "break":
                    break
            finally:
                if number:
                    del self.script.commands[before:]
            self._arithmetic(step)
            if number == 0 and name and len(self.script.commands) > first:
                self.remark(f"line {node.head.line}: only the first pass of the loop is used, with {name}={value}")
            if runs is None or self.unsure_break:
                break
        self.unsure_break = outer

    def _call(self, name: str, arguments: list[str]) -> None:
        self.called.append(name)
        if len(self.scopes) > 20:
            return  # endless recursion
        before, self.arguments = self.arguments, arguments
        self.scopes.append({})
        try:
            self.run(self.functions[name])
        except _Leave as leave:
            if leave.how == "exit" and len(self.scopes) == 1 and name in self.called[:-1]:
                raise
        finally:
            self.arguments = before
            for variable, value in self.scopes.pop().items():
                self.variables.pop(variable, None)
                if value is not None:
                    self.variables[variable] = value

    def _leave(self, how: str, words: Sequence[RawWord]) -> None:
        if None in self.branches:
            self.unsure_break = self.unsure_break or how == "break"
            return
        # A script that exits with an error in a branch checks its arguments, which the caller may still have to set.
        checks = how in ("exit", "return") and self.branches and len(words) > 1 and words[1].text not in ("0", "$?")
        if not checks:
            raise _Leave(how, words[0].line)

    # Simple commands ---------------------------------------------------------------------------------------------

    def _simple(self, words: Sequence[RawWord], raw: RawCommand) -> bool | None:
        if words[0].text == "((":
            return self._arithmetic(words[1].text)
        declares = words[0].text in _DECLARES
        rest = list(words)
        if declares:
            rest = [word for word in words[1:] if not re.fullmatch(r"[-+][a-zA-Z]+", word.text)]
            if words[0].text in _SCOPED and self.scopes:
                for name in [re.split(r"[=+\[]", word.text)[0] for word in rest]:
                    self.scopes[-1].setdefault(name, self.variables.get(name))
        assignments: list[tuple[RawWord, re.Match[str]]] = []
        while rest and (match := _ASSIGNMENT.match(rest[0].text)):
            assignments.append((rest.pop(0), match))
        if declares or not rest:
            for word, match in assignments:
                self._assign(word, match)
            return True
        return self._command(rest, raw, assignments)

    def _command(
        self, words: list[RawWord], raw: RawCommand, assignments: Sequence[tuple[RawWord, re.Match[str]]]
    ) -> bool | None:
        """Expands a command. The assignments before it hold only for this command, after its words are expanded."""
        name = words[0].text
        if name == "read" and (raw.heredoc is not None or raw.here_string is not None):
            separators = next((word.text[match.end() :] for word, match in assignments if match[1] == "IFS"), "")
            self._read(words, raw, " ".join(self.expand(RawWord(separators, 0), split=False)))
        elif raw.heredoc is not None and self._starts_a_shell(words):
            self._inner_script(raw)
        elif name == "shift":
            count = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
            if None not in self.branches:
                self.arguments = self.arguments[count:]
        elif name == "set" and len(words) > 1 and words[1].text == "--":
            self.arguments = [text for word in words[2:] for text in self.expand(word)]
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word.text, None)
                self.arrays.pop(word.text, None)
        elif name == "let":
            return [self._arithmetic("".join(self.expand(word, split=False))) for word in words[1:]][-1:] == [True]
        elif name in ("[", "[[", "test", "true", "false"):
            return holds([text for word in words for text in self.expand(word) or [""]], MARK)
        elif name in ("break", "continue", "return", "exit"):
            self._leave(name, words)
        elif name == ":":
            _ = [self.expand(word) for word in words[1:]]  # `: ${NAME:=VALUE}` sets a variable
            return True
        elif name in ("source", "."):
            file = " ".join(text for word in words[1:2] for text in self.expand(word))
            if not _ENVIRONMENTS.search(file):
                self.remark(
                    f"line {words[0].line}: {file.replace(MARK, '')} is not read; set its variables with NAME=VALUE"
                )
        elif name != "cd":
            self._other(words, assignments)
        return None

    def _other(self, words: Sequence[RawWord], assignments: Sequence[tuple[RawWord, re.Match[str]]]) -> None:
        expanded = [Word(text, word.line) for word in words for text in self.expand(word)]
        before = dict(self.variables)
        for word, match in assignments:
            self._assign(word, match)
            self.prefixed[match[1]] = self.variables.get(match[1], "")
        if expanded and expanded[0].text in self.functions:
            self._call(expanded[0].text, [word.text for word in expanded[1:]])
        elif expanded:
            self.script.commands.append(expanded)
        for _, match in assignments:
            self.variables.pop(match[1], None)
            if match[1] in before:
                self.variables[match[1]] = before[match[1]]

    def _read(self, words: Sequence[RawWord], raw: RawCommand, separators: str) -> None:
        """`read NAME <<EOF` stores the text; `read A B <<< "..."` and `read -a LIST <<< "..."` store its fields."""
        if raw.here_string is None:
            self.variables[words[-1].text] = self._heredoc(raw)
            return
        text = " ".join(self.expand(raw.here_string, split=False))
        options = [word.text for word in words[1:] if word.text.startswith("-")]
        names = [word.text for word in words[1:] if not word.text.startswith("-")]
        if MARK in text or not names:
            return
        fields = re.split(f"[{re.escape(separators)}]", text) if separators else text.split()
        if any("a" in option for option in options):
            self.arrays[names[0]] = {str(place): value for place, value in enumerate(fields)}
            return
        for place, name in enumerate(names):
            last = place == len(names) - 1
            joined = (separators[:1] or " ").join(fields[place:])
            self.variables[name] = joined if last else fields[place] if place < len(fields) else ""

    def _arithmetic(self, text: str) -> bool | None:
        """Evaluates the command `((...))`, which may assign. Returns whether the value is not 0 (None: unknown)."""
        text = text.strip()
        if change := re.fullmatch(r"(?:(\+\+|--)\s*)?([A-Za-z_]\w*)\s*(\+\+|--)?", text):
            sign = change[1] or change[3]
            text = f"{change[2]} {sign[0]}= 1" if sign else text
        if match := re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL):
            name, sign, value = match[1], match[2], match[3]
            found = self.sum(f"{name} {sign} ({value})" if sign else value)
            self._set(name, f"{MARK}{name}{MARK}" if MARK in found else found, 0)
        else:
            found = self.sum(text) if text else "1"
        return None if MARK in found else found != "0"

    @staticmethod
    def _starts_a_shell(words: Sequence[RawWord]) -> bool:
        """Returns whether the command runs the here-document as a script (`sbatch <<EOF`, `srun ... bash <<EOF`)."""
        names = {PurePosixPath(word.text).name for word in words}
        return words[0].text in ("sbatch", "ssh") or bool(names & {"bash", "sh"})

    def _inner_script(self, raw: RawCommand) -> None:
        first = raw.words[-1].line
        before = len(self.script.commands)
        self.run(nodes_of(self._heredoc(raw)))
        self.script.commands[before:] = [
            [replace(word, line=word.line + first) for word in command] for command in self.script.commands[before:]
        ]

    def _assign(self, word: RawWord, match: re.Match[str]) -> None:
        name, index, adds = match[1], match[2], bool(match[3])
        if word.array is not None:
            self._assign_array(name, word.array, adds)
            return
        value = " ".join(self.expand(RawWord(word.text[match.end() :], word.line), split=False))
        if index is not None:
            key = self.in_quotes(index.strip("\"'"))
            self.arrays.setdefault(name, {})[key] = (self.arrays.get(name, {}).get(key, "") if adds else "") + value
            return
        self._set(name, value, word.line, adds=adds)

    def _assign_array(self, name: str, items: Sequence[RawWord], adds: bool) -> None:
        values = dict(self.arrays.get(name, {})) if adds else {}
        for item in items:
            if keyed := re.match(r"\[([^\]]+)\]=(.*)", item.text, re.DOTALL):
                key = self.in_quotes(keyed[1].strip("\"'"))
                values[key] = " ".join(self.expand(RawWord(keyed[2], item.line), split=False))
                continue
            for text in self.expand(item):
                values[str(len(values))] = text
        self.arrays[name] = values

    def _set(self, name: str, value: str, line: int, *, adds: bool = False) -> None:
        if name in self.given and (self.branches or MARK in value):
            # The caller's value replaces a value that is set in a branch or is the output of a program.
            self.variables[name] = self.given[name]
            return
        if program := re.search(f"{MARK}(\\$\\([^{MARK}]*){MARK}", value):
            self.script.computed[name] = program[1]
            value = f"{MARK}{name}{MARK}"  # the caller can set the variable
        if None in self.branches and not adds:
            kept = self.variables.setdefault(name, value)
            self.remark(
                f"line {line}: {name} is set under a condition; {kept!r} is used (set {name}=VALUE to change it)"
            )
            return
        self.variables[name] = self.variables.get(name, "") + value if adds else value

    def _heredoc(self, raw: RawCommand) -> str:
        text = raw.heredoc or ""
        if raw.quoted_heredoc:
            return text
        return self.in_quotes(text)
