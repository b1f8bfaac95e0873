"""Readers of console output: verl, OpenRLHF, Megatron, MindSpeed(-RL), DeepSpeed. Steps count from 1."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.log_curves import LARGEST_STEP, Points

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray prefixes each line with the worker's name and process id, and marks lines that several workers printed.
_RAY = re.compile(r"^\((?:[\w.:<>-]+ )?pid=\d+(?:, ip=[^)]*)?\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_BAR_END = re.compile(r"\[[^\[\]]*(?:it/s|s/it)[^\[\]]*\]\s*$")
_BREAK = re.compile(r"\r\n|\n|\r")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf(?:inity)?|nan)"
_WRAPPED = re.compile(rf"(?:(?:np|numpy|torch)\.)?\w*\(?\s*({_NUMBER})\s*(?:,[^)]*)?\)?", re.IGNORECASE)


def decoded(content: bytes) -> str | None:
    """Decodes a log as UTF-8, or as UTF-16 if it begins with a byte order mark, as Windows shells write it. Returns
    None for binary content."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode("utf-16", errors="replace")
        return None if "\0" in text[:4096] else text
    if b"\0" in content[:4096]:
        return None
    return content.decode("utf-8", errors="replace").removeprefix("\ufeff")


def parse_number(text: str) -> float | None:
    """Parses texts such as `1e-05`, `nan`, `np.float64(0.25)` and `tensor(0.25)` as a number. Returns None for other
    texts."""
    try:
        return float(text)
    except ValueError:
        found = _WRAPPED.fullmatch(text.strip())
        return float(found.group(1)) if found else None


def damaged(file: str, line: int, text: str, expected: str) -> Refusal:
    return Refusal.at(
        f"{file} line {line}",
        f"not a {expected}: {text[:60]!r}",
        "restore the file, or remove the line",
        code="damaged-file",
    )


def _lines(text: str) -> Iterator[str]:
    """Yields the lines without colour codes and Ray's process names. A last line without a line break is skipped,
    because it is incomplete."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    *complete, rest = _BREAK.split(text)
    # A progress bar is complete once its bracket is closed, because no line break follows the newest bar.
    if _BAR_END.search(rest):
        complete.append(rest)
    for line in complete:
        if line.startswith("("):
            line = _RAY.sub("", line)
        yield _REPEATED.sub("", line) if "[repeated" in line else line


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields each line with its line number in an editor. An incomplete last line is skipped."""
    for row, raw in enumerate(text.split("\n")[:-1], start=1):
        for line in _lines(raw + "\n"):
            yield row, line


# verl and MindSpeed-RL: one line per step, name and value pairs -----------------------------------------------------


@dataclass(frozen=True)
class PairLine:
    """The format of a line that contains a step number and name-value pairs."""

    marker: str
    """A text that every line of this format contains. The reader searches this text first, because the regular
    expression is slower."""
    pattern: re.Pattern[str]
    """A regular expression with two groups: the step and the name-value pairs."""
    between: str
    colon: str
    strict: bool
    """If True, a line with a value that is not a number is refused as damaged. If False, a name-value pair whose value
    is not a number is skipped."""


# verl's console line is `step:7 - critic/rewards/mean:0.25 - ...`. A validation before the first update has step 0.
VERL_LINE = PairLine("step:", re.compile(r"(?<![\w/])step:(\d{1,18}) - (\S.*)$"), " - ", ":", strict=False)
# MindSpeed-RL's console line is `[2025-06-01 10:00:00] iteration: 3 / 200 | grpo/rewards/mean : 0.2500 | ...`.
MINDSPEED_RL_LINE = PairLine(
    "iteration: ", re.compile(r"(?:^|\] )iteration: (\d{1,18}) / \d{1,18} \| (\S.*)$"), " | ", " : ", strict=True
)


def pair_line_points(file: str, text: str, form: PairLine) -> Points:
    """Reads every metric of the lines that match the format `form`. Other lines are skipped."""
    found = Points()
    for row, line in _numbered_lines(text):
        parts = form.pattern.search(line) if form.marker in line else None
        if parts is None or form.colon not in parts.group(2) or int(parts.group(1)) > LARGEST_STEP:
            continue
        values = {}
        for pair in parts.group(2).split(form.between):
            name, _, written = pair.strip().rpartition(form.colon)
            value = parse_number(written)
            if name and value is not None:
                values[name.strip()] = value
            elif form.strict:
                raise damaged(file, row, line.strip(), f"line whose values are all numbers ({pair.strip()!r} has none)")
        found.add(int(parts.group(1)), values)
    return found


# OpenRLHF ------------------------------------------------------------------------------------------------------------

_GLOBAL_STEP = re.compile(r"Global step (\d{1,18})\b[^:{]*:\s*(\{.*\})")
_STATUS = re.compile(r"^[^{]*(\{.*['\"]policy_loss['\"].*\})\s*$")
_ITEM = re.compile(rf"['\"]([^'\"]+)['\"]:\s*((?:[\w.]*\()?{_NUMBER})", re.IGNORECASE)
_BAR = re.compile(
    r"(Train step of epoch|Episode|Train epoch)\s*(?:\[(\d+)/\d+\]|(\d+))?:"
    r"\s*\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[([^\]]*)\]"
)
_FIGURE = re.compile(rf"([A-Za-z_][\w ./-]*)=({_NUMBER})\s*(?:,|$)", re.IGNORECASE)


def openrlhf_points(text: str) -> Points:
    """Reads the most exact values in an OpenRLHF log. The order of preference is: lines `Global step 3: {...}`, printed
    status dictionaries, progress bars of steps, progress bars of epochs.

    A progress bar is less exact: it shows three digits, and it counts micro-batches when gradients are accumulated.
    """
    with_step, statuses, bars = Points(), Points(), _Bars()
    count = 0
    for line in _lines(text):
        if "Global step" in line and (found := _GLOBAL_STEP.search(line)):
            if int(found.group(1)) <= LARGEST_STEP:
                with_step.add(int(found.group(1)), _items(found.group(2)))
        elif "policy_loss" in line and (found := _STATUS.match(line)):
            count += 1
            statuses.add(count, _items(found.group(1)))
        elif "%|" in line:
            for bar in _BAR.finditer(line):
                bars.read(bar)
    return with_step or statuses or bars.points()


def _items(text: str) -> dict[str, float]:
    found = {}
    for name, value in _ITEM.findall(text):
        parsed = parse_number(value.partition("(")[2] or value)
        if parsed is not None:
            found[name] = parsed
    return found


@dataclass
class _Shown:
    """New values that a progress bar shows, its position and length, and the number of earlier bars with the same
    title."""

    round: int
    at: int
    total: int
    figures: dict[str, float]


@dataclass
class _Title:
    shown: list[_Shown] = field(default_factory=list)
    round: int = 0
    last: tuple[str, int] = ("", 0)
    before: str = ""


class _Bars:
    """The progress bars of one log. A progress bar shows the values of a step before its counter reaches that step."""

    def __init__(self) -> None:
        self._titles: dict[str, _Title] = {}

    def read(self, bar: re.Match[str]) -> None:
        title, bracket, epoch, at, total, tail = bar.groups()
        state = self._titles.setdefault(title, _Title())
        name, position = bracket or epoch or "", int(at)
        # If the epoch in the title changes or the counter decreases, a new progress bar has begun.
        if state.last != ("", 0) and (name != state.last[0] or position < state.last[1]):
            if title != "Train epoch" or name in ("", "1"):
                state.round += 1
            state.before = ""
        state.last = (name, position)
        pairs = _FIGURE.findall(tail)
        figures = {key.strip(): value for key, text in pairs if (value := parse_number(text)) is not None}
        written = ", ".join(f"{key}={value}" for key, value in figures.items())
        if figures and written != state.before:
            state.shown.append(_Shown(state.round, position, int(total), figures))
            state.before = written

    def points(self) -> Points:
        found = Points()
        for title in ("Train step of epoch", "Episode"):
            if title in self._titles and (shown := self._titles[title].shown):
                early = 1 if any(one.at == 0 for one in shown) else 0
                for one in shown:
                    position = min(one.at + early, max(one.total, 1))
                    found.add(one.round * one.total + position, one.figures)
                return found
        rounds: dict[int, list[dict[str, float]]] = {}
        for one in self._titles.get("Train epoch", _Title()).shown:
            rounds.setdefault(one.round, []).append(one.figures)
        for step, parts in enumerate(rounds.values(), start=1):
            names = dict.fromkeys(name for part in parts for name in part)
            found.add(step, {name: _mean([part[name] for part in parts if name in part]) for name in names})
        return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Megatron, MindSpeed-LLM, MindSpeed-MM -------------------------------------------------------------------------------

# The rank prefixes of torchrun --tee, torch, srun --label and mpirun --tag-output.
_LABEL = r"(?:\[(?:default|rank) ?(\d{1,6})\]:?|\[\d+,(\d{1,6})\]<std\w+>:?|(?<!\S)(\d{1,6}):(?= ))"
_RANK = re.compile(_LABEL, re.I)
# Matches the start of one process's output, which may follow another process's output on the same line.
_BEGINS = re.compile(
    rf"(?:{_LABEL}\s*)?\b(?:iteration +\d{{1,18}}/ *\d{{1,18}} *\||validation loss at iteration \d)", re.I
)
# The field that Megatron prints last. Any text after this field on the line was printed by another process.
_LAST_FIELD = "number of nan iterations"
_TRAINED = re.compile(r"(?:^|[\s|\]])iteration +(\d{1,18})/ *(\d{1,18}) *\|(.*)$")
_VALIDATED = re.compile(r"(?:^|\s)validation loss at iteration (\d{1,18})( on (validation|test) set)? *\|(.*)$")
# Every iteration line has fields whose names end with these words. If such a field has no number, the line is damaged.
_REQUIRED = ("loss", "norm", "learning rate")


def megatron_points(file: str, text: str) -> Points:
    """Reads every field with a number from Megatron's lines ` iteration 10/ 100 | lm loss: 1.234000E+00 | ... |`. Other
    lines are skipped.

    Losses are means over the iterations since the previous printed line. Several ranks may print on one line of text.
    If all ranks print the same values, the values are read as one log. If ranks print different values, the log is
    refused.
    """
    found, ranks = Points(), _Ranks(file)
    for row, line in _one_process_lines(text):
        if "iteration" not in line:
            continue
        rank = _RANK.search(line.partition("iteration")[0])
        if trained := _TRAINED.search(line):
            step, fields = int(trained.group(1)), _megatron_fields(file, row, line, trained.group(3))
            found.planned = int(trained.group(2))
        elif validated := _VALIDATED.search(line):
            group = "test" if validated.group(3) == "test" else "eval"
            step, values = int(validated.group(1)), _megatron_fields(file, row, line, validated.group(4))
            fields = {f"{group}/{name.removesuffix(' value')}": value for name, value in values.items()}
        else:
            continue
        if step <= LARGEST_STEP and ranks.is_new(row, step, fields, rank):
            found.add(step, fields)
    return found


class _Ranks:
    """The values that each rank printed per iteration. If ranks print equal values, the values are kept once. If ranks
    print different values, the log is refused."""

    def __init__(self, file: str):
        self.file = file
        self.by_step: dict[tuple[int, frozenset[str]], tuple[str, dict[str, float]]] = {}

    def is_new(self, row: int, step: int, fields: dict[str, float], label: re.Match[str] | None) -> bool:
        if label is None:
            return True
        rank = next(number for number in label.groups() if number is not None)
        # Times differ between ranks.
        values = {name: value for name, value in fields.items() if "time" not in name and "throughput" not in name}
        first, before = self.by_step.setdefault((step, frozenset(fields)), (rank, values))
        if rank == first:
            self.by_step[step, frozenset(fields)] = rank, values  # a resumed run logs some steps again
            return True
        for name, value in values.items():
            if before[name] != value and not (before[name] != before[name] and value != value):
                raise Refusal.at(
                    f"{self.file} line {row}",
                    f"ranks {first} and {rank} differ at iteration {step}: {name} {before[name]:g} and {value:g}",
                    f"give the lines of one rank: grep '{label.group().strip()}' {self.file}",
                    code="ambiguous-steps",
                )
        return False


def _one_process_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines with their line numbers. A line on which several processes printed is split."""
    for row, line in _numbered_lines(text):
        starts = [match.start() for match in _BEGINS.finditer(line)] if line.count("iteration") > 1 else []
        if len(starts) < 2:
            yield row, line
            continue
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            yield row, line[start:end]


def _megatron_fields(file: str, row: int, line: str, text: str) -> dict[str, float]:
    *fields, rest = text.split("|")
    if fields and fields[-1].strip().startswith(_LAST_FIELD):
        rest = ""
    if rest.strip() or not fields:
        raise damaged(file, row, line.strip(), "line whose last field ends with |")
    found = {}
    for each in fields:
        name, colon, written = (part.strip() for part in each.rpartition(":"))
        # MindSpeed prints the mean of the last iterations after the value: 7137.9/7200.1.
        value = parse_number(written.partition("/")[0]) if colon else None
        if value is not None:
            found[name] = value
        elif not colon or name.endswith(_REQUIRED):
            raise damaged(file, row, line.strip(), f"line whose values are all numbers ({each.strip()!r} has none)")
    return found


# DeepSpeed -----------------------------------------------------------------------------------------------------------

_PROGRESS = re.compile(rf"\bstep=(\d{{1,18}}), skipped=(\d{{1,9}}), lr=\[?({_NUMBER})[\],]", re.IGNORECASE)
_SPEED = re.compile(r"global_step=(\d{1,18}), RunningAvgSamplesPerSec=(.*)$")
_TIMES = re.compile(r"(?:^|\s)time \(ms\) \| (.+)$")
_OPTIMIZER = "time_ms/optimizer_"
_TIME = re.compile(rf"(\w+): ({_NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"(\w+)=({_NUMBER})(?:GB)?", re.IGNORECASE)


def deepspeed_points(text: str) -> Points:
    """Reads DeepSpeed's progress report, throughput timer and wall clock breakdown.

    DeepSpeed prints times without a step number. The optimizer times of a step precede its progress report, and its
    other times follow the report.
    """
    found, step = Points(), 0
    timed: set[str] = set()
    early: dict[str, float] = {}
    for line in _lines(text):
        if "skipped=" in line and (report := _PROGRESS.search(line)) and int(report.group(1)) <= LARGEST_STEP:
            step, timed = int(report.group(1)), set()
            found.add(step, {"skipped": float(report.group(2)), "lr": float(report.group(3)), **early})
            early = {}
        elif "RunningAvgSamplesPerSec=" in line and (speed := _SPEED.search(line)):
            if int(speed.group(1)) <= LARGEST_STEP:
                found.add(int(speed.group(1)), _pairs(_RATE, "RunningAvgSamplesPerSec=" + speed.group(2)))
        elif "time (ms)" in line and (times := _TIMES.search(line)):
            values = {f"time_ms/{name}": value for name, value in _pairs(_TIME, times.group(1)).items()}
            early |= {name: value for name, value in values.items() if name.startswith(_OPTIMIZER)}
            if step:
                # Only the first times after a progress report belong to its step. Times that follow later belong to
                # steps without a progress report.
                new = {name for name in values if not name.startswith(_OPTIMIZER)} - timed
                found.add(step, {name: values[name] for name in values if name in new})
                timed |= new
    return found


def _pairs(pattern: re.Pattern[str], text: str) -> dict[str, float]:
    return {name: value for name, written in pattern.findall(text) if (value := parse_number(written)) is not None}
