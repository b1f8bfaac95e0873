"""Writes the results of `bench/evidence.py`: the table of docs/support.md, and a folder for each row with a page, the
curves of its pairs and their JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence_results import COLUMNS, PASSED, Checked, EvidenceError, Result, store, stored_results
from evidence_rows import ROWS
from figure import Line, Panel, document

BEGIN, END = "<!-- evidence: written by bench/evidence.py table -->", "<!-- end of evidence -->"
NOT_MEASURED = "not measured"
PAGE, CURVES = "README.md", "curves.svg"
Results = Mapping[tuple[str, str], Checked]


def write_table(files: Sequence[Path], results: Path, page: Path | None) -> int:
    """Adds the given result files to the folder of results, and writes the folders of the rows and the page's table
    from all results of that folder. Prints the table if there is no page. Returns the number of results."""
    store(files, results)
    found = stored_results(results)
    for file, text in files_of(found, results, page).items():
        file.write_text(text, encoding="utf-8")
    if page is None:
        print(table_text(found, {}))
    return len(found)


def files_of(found: Results, results: Path, page: Path | None) -> dict[Path, str]:
    """Every file that the results determine, with its text."""
    written = {}
    for name in dict.fromkeys(row for row, _ in found):
        of_row = {column: found[name, column] for column in COLUMNS if (name, column) in found}
        written[results / name / PAGE] = row_page(name, of_row, page and Path(os.path.relpath(page, results / name)))
        written[results / name / CURVES] = curves_svg(
            name, {COLUMNS[column].title: each.result for column, each in of_row.items()}
        )
    if page is not None:
        links = {row: os.path.relpath(results / row / PAGE, page.parent) for row, _ in found}
        written[page] = with_table(page, table_text(found, links))
    return written


def with_table(page: Path, table: str) -> str:
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise EvidenceError(f"{page} needs the lines `{BEGIN}` and `{END}` once, in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# The table -----------------------------------------------------------------------------------------------------------


def table_text(found: Results, links: Mapping[str, str]) -> str:
    """The table, a line for each row of the document, and the notes on the pairs that have not passed. `links` leads
    from a row to its folder."""
    titles = [_title(column, found) for column in COLUMNS]
    lines = [f"| algorithm | {' | '.join(titles)} | OpenRLHF: GPU, NPU |", f"|{'---|' * (len(titles) + 2)}"]
    notes: dict[tuple[object, ...], list[tuple[str, Checked]]] = {}
    for name, row in ROWS.items():
        cells = []
        for column in COLUMNS:
            checked = found.get((name, column))
            number = None
            if checked is not None and checked.result.verdict not in PASSED:
                key = _note_key(name, column, checked)
                notes.setdefault(key, []).append((column, checked))
                number = list(notes).index(key) + 1
            cells.append(cell(checked, number))
        title = f"[{row.title}]({links[name]})" if name in links else row.title
        lines.append(f"| {title} | {' | '.join(cells)} | {row.published:.2f} % |")
    numbered = [f"{at}. {_note(noted)}" for at, noted in enumerate(notes.values(), start=1)]
    return "\n".join([*lines, *([""] if notes else []), *numbered])


def _title(column: str, found: Results) -> str:
    own = COLUMNS[column]
    steps = {checked.result.steps for (_, at), checked in found.items() if at == column}
    length = f", {' to '.join(map(str, sorted({min(steps), max(steps)})))} steps" if steps else ""
    return f"{own.sides} ({own.size}{length})"


def cell(checked: Checked | None, note: int | None = None) -> str:
    """Verdict and mean error. What has not passed is bold and has a note."""
    if checked is None:
        return NOT_MEASURED
    verdict = checked.result.verdict
    error = checked.again.mean_error_percent
    return f"{_bold(verdict)}, {_short(error)}{f' [{note}]' if note else ''}"


def _bold(verdict: str) -> str:
    return verdict if verdict in PASSED else f"**{verdict}**"


def _short(percent: float) -> str:
    return "< 0.001 %" if 0 < percent < 0.001 else f"{percent:.2g} %"


def _note_key(row: str, column: str, checked: Checked) -> tuple[object, ...]:
    """Rows with equal keys share a note."""
    again, replay = checked.again, replay_text(checked.result)
    if again.unsettled is None or checked.result.verdict != again.verdict:
        return row, column
    return column, again.unsettled, again.remedy, again.bar_percent, again.scaled, replay


def _note(noted: Sequence[tuple[str, Checked]]) -> str:
    (column, checked), *_ = noted
    rows = "; ".join(ROWS[each.result.row].title for _, each in noted)
    why = _why([each for _, each in noted])
    where = f"{COLUMNS[column].sides}, {COLUMNS[column].size}"
    return f"{rows} ({where}): {checked.result.verdict}. {why} {replay_text(checked.result)}"


def _why(noted: Sequence[Checked]) -> str:
    """Why the pairs have no pass, in the same words for all of them."""
    again = noted[0].again
    if again.unsettled is None or noted[0].result.verdict != again.verdict:
        return f"{noted[0].reason}."
    errors = _range([each.error_percent for each in noted if each.error_percent is not None], "3g")
    against = f"{errors} %, bar {again.bar_percent:g} %."
    if again.scaled:
        size = _range([each.again.size for each in noted], "2f")
        missed = f"The curve is near 0 (mean {size}), so the scaled error decides: {against}"
    else:
        missed = f"The mean error is {against}"
    return f"{missed} {_OPEN[again.unsettled].format(remedy=again.remedy)}"


_OPEN = {
    "noise": "A and B differ like repeats, but the noise may hide a drift of the size of the bar: {remedy}.",
    "no repeats": "The noise is unknown, because the pair has no repeats.",
    "copies": (
        "The noise is unknown, because all repeats are copies: they equal another run of their side at every step. A "
        "deterministic side computes the same sums again while its batch fits in one micro-batch, whatever the size of "
        "the micro-batch. Repeats whose `batch.tokens` splits the batch would show the noise of rounding."
    ),
}


def _range(values: Sequence[float], digits: str) -> str:
    return " to ".join(dict.fromkeys(f"{value:.{digits}}" for value in (min(values), max(values))))


def replay_text(result: Result) -> str:
    """What `lockstep replay` found for a pair that has not passed: the first stage, module and operator."""
    replay = result.replay
    if replay is None:
        return "Not replayed."
    steps = f"Replay of {len(replay['steps'])} steps from A's weights"
    if replay["in_step"]:
        return f"{steps}: no stage exceeds its tolerance."
    found = f"{steps}: the first difference is in stage {replay['stage']} at step {replay['step']}"
    if module := replay["module"]:
        how = f": {module['systematic']}" if module.get("systematic") else ""
        found += f", {module['phase']} of module `{module['module']}` ({module['kind']}{how})"
    return f"{found}. {_operator_text(replay['operator'])}".rstrip()


def _operator_text(operator: Mapping[str, Any] | None) -> str:
    if not operator:
        return ""
    judge = f" ({operator['judge']})" if operator.get("judge") else ""
    if operator["operator"]:
        return f"Wrong operator: `{operator['operator']}` of the {operator['side']}: {operator['why']}{judge}."
    # The rest of the sentence tells the user of `lockstep replay` what to do next.
    return f"No operator is named: {operator['why'].partition(';')[0]}{judge}."


# The folder of a row -------------------------------------------------------------------------------------------------


def row_page(name: str, of_row: Mapping[str, Checked], page: Path | None) -> str:
    """The page of a row: curves, figures, reasons, and what replay found. `page` leads to the page with the table."""
    lines = [f"# Evidence: {ROWS[name].title}", ""]
    about = f" [Support]({page}) has all rows, and says what the columns mean." if page else ""
    lines += [f"`python bench/evidence.py table` writes this page from the JSON files of the curves.{about}", ""]
    lines += [f"![Curves of A and B, with repeats]({CURVES})", ""]
    lines += ["| pair | verdict | mean error | scaled error | bar | power | steps | runs of A, B |", f"|{'---|' * 8}"]
    for column, checked in of_row.items():
        result, again = checked.result, checked.again
        runs = ", ".join(_runs_text(result.curves[letter]) for letter in "ab")
        figures = [_percent(again.mean_error_percent), _percent(again.scaled_error_percent)]
        bar = f"{again.bar_percent:g} %, {'scaled' if again.scaled else 'mean'} error"
        cells = [f"[{COLUMNS[column].title}]({column}.json)", _bold(result.verdict), *figures, bar]
        lines.append(f"| {' | '.join([*cells, _percent(again.power_percent), str(result.steps), runs])} |")
    lines.append("")
    for column, checked in of_row.items():
        result = checked.result
        sides = ", ".join(
            f"{letter} is `{side}` ({dtype}, {hardware})"
            for letter, side, dtype, hardware in zip("AB", result.sides, result.dtypes, result.hardware, strict=True)
        )
        lines.append(f"- **{COLUMNS[column].title}.** {sides}. {_sentence(checked)}")
    for column, checked in of_row.items():
        if checked.result.replay:
            lines += ["", f"## Replay: {COLUMNS[column].sides}", "", *_replay_lines(checked.result)]
    return "\n".join([*lines, ""])


def _sentence(checked: Checked) -> str:
    return f"{checked.result.verdict.capitalize()}: {checked.reason}."


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} %"


def _runs_text(runs: Sequence[Sequence[float]]) -> str:
    different = len({tuple(run) for run in runs})
    return f"{len(runs)}" if different == len(runs) else f"{len(runs)} ({different} different)"


def _replay_lines(result: Result) -> list[str]:
    lines = [replay_text(result), "", "| stage | step | what | error | allowed | |", f"|{'---|' * 6}"]
    for stage in (result.replay or {})["stages"].values():
        what = f"{stage['what']}: {stage['where']}" if stage["where"] else stage["what"]
        cells = [stage["stage"], stage["step"], what, f"{stage['error']:.3g}", f"{stage['allowed']:.3g}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {'passed' if stage['passed'] else '**exceeded**'} |")
    return lines


# The curves ----------------------------------------------------------------------------------------------------------

COLORS = {"a": "#3355bb", "b": "#dd6611"}
WIDTHS = {"a": 2.8, "b": 1.4}  # B is drawn over A
REPEAT = 0.6


def curves_svg(row: str, of_row: Mapping[str, Result]) -> str:
    """The judged metric of all runs, a panel for each pair of the row: A blue, B orange, repeats thin."""
    return document([_panel(ROWS[row].judged, title, result) for title, result in of_row.items()], (480, 290), 2)


def _panel(judged: str, title: str, result: Result) -> Panel:
    steps = result.curves["steps"]
    lines = []
    for letter, side, dtype in zip("ab", result.sides, result.dtypes, strict=True):
        run = list(zip(steps, result.curves[letter][0], strict=True))
        lines.append(Line(run, COLORS[letter], WIDTHS[letter], f"{letter.upper()}: {side} {dtype}"))
    for letter in "ab":
        for number, values in enumerate(result.curves[letter][1:]):
            name = "" if number else f"repeats of {letter.upper()}"
            lines.append(Line(list(zip(steps, values, strict=True)), COLORS[letter], REPEAT, name))
    heading = f"{title}: {result.verdict}, mean error {_short(result.mean_error_percent)}"
    return Panel(heading, "training step", judged, lines)
