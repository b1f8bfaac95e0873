"""Escape sequences in text are shown, not sent, by whatever prints; and nothing prints but through the one door."""

from __future__ import annotations

import ast
import io
import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lockstep
from conftest import run, write_jsonl
from lockstep.errors import Refusal
from lockstep.run.console import LiveConsole, PlainConsole, print_problems
from lockstep.run.output import OFFLINE_COLUMNS, visible, write
from lockstep.run.screen import Screen, shown
from lockstep.train import training
from source_trees import parsed

HOUSE = Path(lockstep.__file__).parent
Capture = pytest.CaptureFixture[str]

# Clears the screen, renames the window, goes back over the line, rings; C1's short form of the first; turns what
# follows round; half a pair, which no encoding has.
HOSTILE = "\x1b[2J\x1b]0;gone\x07ok\rNO\x08\x9b31m\u202eevil\u2066\u2028\ud800[/red]"
SENT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SHOWN = ("\\x1b[2J", "\\x1b]0;gone\\x07", "ok\\x0dNO\\x08", "\\u009b31m", "\\u202eevil\\u2066", "\\u2028\\ud800[/red]")


def assert_shown(output: str, parts: tuple[str, ...] = SHOWN) -> None:
    assert SENT.search(output) is None, repr(output)
    whole = re.sub(r"\s", "", output)  # a long line was wrapped
    for part in parts:
        assert part in whole, (part, output)


def told(capsys: Capture) -> str:
    """What was written since the last look. The captured streams are strict: half a pair would raise."""
    return "".join(capsys.readouterr())


def test_every_hidden_character_is_spelt_and_no_other() -> None:
    plain = "a b\tc\nd [red] :smile: ü 漢字 עברית e\u0301 👩\u200d🚀"
    assert visible(plain) == plain
    every = "".join(map(chr, range(0x110000)))
    assert SENT.search(visible(every)) is None
    assert visible("\x1b\x9b\u202e\x7f") == "\\x1b\\u009b\\u202e\\u007f"


def test_what_is_spelt_out_in_json_is_still_that_json(capsys: Capture) -> None:
    values = {"name\u202e": "\x9b\x7f\x1b\ud800"}
    write(json.dumps(values, ensure_ascii=False))
    output = told(capsys)
    assert json.loads(output) == values
    assert_shown(output, ())


@pytest.mark.parametrize("live", [False, True])
def test_consoles_show_it(capsys: Capture, live: bool) -> None:
    console = LiveConsole(OFFLINE_COLUMNS, Screen(width=100)) if live else PlainConsole(OFFLINE_COLUMNS)
    for say in (console.say, console.warn, lambda text: console.banner(text, [])):
        say(HOSTILE)
        assert_shown(told(capsys))
    console.banner("a table", [(HOSTILE, "value")])
    assert_shown(told(capsys))
    console.banner("a table", [("key", HOSTILE)])
    assert_shown(told(capsys))
    console.begin(2)
    with console.task(HOSTILE, 3) as task:
        task.advance()
    console.step(1, {"train/loss": 1.0})
    console.validation(1, {f"val/accuracy/{HOSTILE}": 0.5})
    console.end()
    assert_shown(told(capsys))


def test_a_live_bar_shows_what_it_does() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=300, color_system=None)
    console = LiveConsole(OFFLINE_COLUMNS, screen)
    with console.task(HOSTILE, 3) as task:
        task.advance()
    output = screen.file.getvalue()  # type: ignore[attr-defined]
    # It sends sequences of its own: to move and to hide the cursor.
    assert_shown(re.sub("\x1b\\[[?0-9;]*[A-Za-z]|\r", "", output))


def test_problems_show_it(capsys: Capture) -> None:
    print_problems(Refusal.at(HOSTILE, "why", code="unreadable"), colour=False)
    assert_shown(told(capsys))


def test_a_screen_shows_what_a_caller_forgot(capsys: Capture) -> None:
    """A new table or text of rich's needs no care of its own."""
    from rich.table import Table

    table = Table(title=HOSTILE)
    table.add_column(HOSTILE, no_wrap=True)
    table.add_row(HOSTILE)
    screen = Screen(width=200)
    screen.print(table)
    screen.print(HOSTILE)
    assert_shown(told(capsys), ("\\x1b[2J", "\\u202eevil"))
    screen.print(shown(HOSTILE))
    assert_shown(told(capsys))


# What JSON can hold as text (half a pair it cannot: rows with one are refused).
ROW_TEXT = HOSTILE.replace("\ud800", "")
ROW_SHOWN = tuple(part.replace("\\ud800", "") for part in SHOWN)


def test_data_show_shows_it_of_rows(capsys: Capture, recipe_file: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": ROW_TEXT}, {"role": "assistant", "content": ROW_TEXT}]
    write_jsonl(tmp_path / "train.jsonl", [{"messages": turns}] * 16)
    assert run("data", "show", recipe_file) == 0, told(capsys)
    assert_shown(told(capsys), ROW_SHOWN)


def test_data_show_shows_it_of_prompts(capsys: Capture, online_file: Path, tmp_path: Path) -> None:
    asked = {"prompt": [{"role": "user", "content": ROW_TEXT}], "data_source": ROW_TEXT}
    write_jsonl(tmp_path / "prompts.jsonl", [{**asked, "reward_model": {"ground_truth": ROW_TEXT}}] * 8)
    assert run("data", "show", online_file) == 0, told(capsys)
    output = told(capsys)
    assert output.count("\\u202eevil") >= 3
    assert_shown(output, ROW_SHOWN)


def test_a_problem_that_quotes_a_row_shows_it(capsys: Capture, tiny_folder: Path, tmp_path: Path) -> None:
    row = {
        "data_source": ROW_TEXT,
        "prompt": [{"role": "user", "content": "1?"}],
        "reward_model": {"ground_truth": "1"},
    }
    data = write_jsonl(tmp_path / "questions.jsonl", [row])
    assert run("eval", tiny_folder, data, "--max-new-tokens", 2, "--device", "cpu") == 2
    assert_shown(told(capsys), ROW_SHOWN)


def test_a_validation_shows_it_of_a_data_source(capsys: Capture, online_file: Path, tmp_path: Path) -> None:
    """The names of a validation's metrics hold the rows' data sources."""
    asked = {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}
    rows: list[dict[str, object]] = [{**asked, "data_source": name} for name in ("arithmetic", ROW_TEXT)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    questions = f"val.questions={tmp_path / 'prompts.jsonl'}"
    assert run("train", online_file, "run.steps=1", "batch.prompts=2", "run.export=false", questions) == 0
    assert_shown(told(capsys), ROW_SHOWN)


@pytest.mark.daily("words0", "words1")
@pytest.mark.parametrize("words", [["hello"], ["hello", "--raw"], ["--chat", "hello"]])
def test_generate_shows_it_of_answers(
    capsys: Capture, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """A random model of bytes says every control character by itself."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    sampling = ["--temperature", 2, "--max-new-tokens", 300, "--device", "cpu"]
    assert run("generate", tiny_folder, *words, *sampling) == 0
    output = told(capsys)
    assert_shown(output, ("\\x",))


def test_a_stream_of_another_encoding_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert run("recipes", "sft") == 0
    write("漢")
    assert stream.buffer.getvalue().endswith(b"\\u6f22\n")  # type: ignore[attr-defined]


# Nothing else prints -----------------------------------------------------------------------------------------------

# The door itself; doctor/ stands below it and speaks of the machine; parallel/ too, and names ranks, stages and rows by
# their numbers, or passes on what ranks printed through their own doors; a function's time limit names the function.
MAY_PRINT = (
    *("run/output.py", "run/screen.py", "doctor/", "functions.py"),
    *(f"parallel/{name}.py" for name in ("watchdog", "stall", "rendezvous")),
    *(f"launch/{name}.py" for name in ("launcher", "restarts", "ray_launcher")),
)


def printing(tree: ast.Module) -> list[str]:
    """Calls that write to a terminal by another way."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            if name in ("print", "rich.print", "typer.echo", "typer.secho", "click.echo", "click.secho"):
                found.append(name)
            if re.fullmatch(r"sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?", name):
                found.append(name)
            if name in ("RichConsole", "rich.console.Console"):
                found.append(name)
        if isinstance(node, ast.ImportFrom) and node.module in ("rich", "rich.console"):
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in ("print", "get_console")]
    return found


@pytest.mark.xdist_group("source trees")
def test_nothing_prints_but_through_the_door() -> None:
    hits = {
        str(path.relative_to(HOUSE)): found
        for path in sorted(HOUSE.rglob("*.py"))
        if not path.relative_to(HOUSE).as_posix().startswith(MAY_PRINT)
        if (found := printing(parsed(path)))
    }
    assert hits == {}


@pytest.mark.parametrize(
    "code",
    ["print(1)", "typer.echo(x)", "sys.stdout.write(x)", "sys.stderr.buffer.write(x)", "from rich import print"],
)
def test_the_printing_rule_can_fail(code: str) -> None:
    assert printing(ast.parse(code))


class _InterruptedPipe(io.RawIOBase):
    """A stream during whose first write the user presses Ctrl-C."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        first = not self.written
        self.written += bytes(data)
        if first:
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_ctrl_c_during_a_write_does_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = _InterruptedPipe()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(pipe)))
    console = PlainConsole(OFFLINE_COLUMNS)
    with training._graceful_interrupt(console) as received:
        console.say("step 1")
        console.say("step 2")
        give_up = time.monotonic() + 60
        while pipe.written.count(b"\n") < 3 and time.monotonic() < give_up:
            time.sleep(0.01)
    assert received == [signal.SIGINT]
    steps, warning = pipe.written.split(b"\n"), b"warning: stopping after this step"
    assert {b"step 1", b"step 2"} < set(steps)
    assert any(line.startswith(warning) for line in steps)
