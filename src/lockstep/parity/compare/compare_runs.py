"""The command `lockstep compare`: reads two logs, compares their metrics, and writes the requested output."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.errors import Refusal
from lockstep.parity.compare.align_curves import (
    Curve,
    Matched,
    align,
    better_shift,
    incomplete,
    match,
    select_steps,
    shift_steps,
    values_at,
)
from lockstep.parity.compare.compare_report import EXIT_CODES, as_strict_json, show, write_report
from lockstep.parity.compare.comparison import Comparison, Metric
from lockstep.parity.compare.curve_errors import MIN_NOISE_STEPS, figures, noise_floor
from lockstep.parity.compare.curve_tests import examine
from lockstep.parity.compare.known_differences import known_differences
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.logs.log_curves import Log, Series
from lockstep.parity.compare.logs.log_formats import RECORDING
from lockstep.parity.compare.logs.metric_names import read_names
from lockstep.parity.compare.logs.table_logs import VALUE
from lockstep.parity.compare.run_setup import differences, paired_samples, same_setting, seed_of, support_facts
from lockstep.parity.compare.support_record import record
from lockstep.parity.compare.throughput_ratio import throughput
from lockstep.parity.compare.verdict import LOSS, REWARDS, bar_of, judge, kind_of, overall
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.output import write


@dataclass(frozen=True)
class CompareOptions:
    """The options of `lockstep compare`. `report` is the path of the HTML report (None: in B's run folder). `support`
    is the support table to update (None: no table is updated). `value` is the metric name for a tensorboard csv export,
    which does not contain a metric name. `steps` is the first and the last compared step."""

    a: str
    b: str
    repeats: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    bars: Mapping[str, float] | None = None
    names: Path | None = None
    report: Path | None = None
    support: Path | None = None
    shift: int = 0
    value: str | None = None
    steps: tuple[int, int] | None = None


def compare_logs(options: CompareOptions, as_json: bool = False) -> int:
    """Returns the exit code of the verdict: 0 for in step or within noise, 1 for out of step, 2 for cannot tell or not
    comparable."""
    names = {
        **(read_names(options.names) if options.names else {}),
        **({VALUE: options.value} if options.value else {}),
    }
    a, b, *repeats = (read_log(source, names) for source in (options.a, options.b, *options.repeats))
    comparison = compare(a, b, repeats, options.metrics, options.bars, options.shift, options.steps)
    in_step = True
    if a.kind == b.kind == RECORDING:
        in_step = _recordings(a, b, comparison, as_json)
    elif as_json:
        write(as_strict_json(comparison))
    else:
        show(comparison, Console.open())
    page = options.report or _page_of(b)
    if page is not None:
        try:
            write_report(comparison, page)
        except OSError as error:
            raise Refusal.at(
                f"--report {page}", f"cannot be written: {error.strerror}", "give another path", code="unwritable"
            ) from error
        write(f"wrote {page}", error=as_json)
    if options.support is not None:
        write(record(comparison, options.support, options.support.with_suffix("")), error=as_json)
    return EXIT_CODES[comparison.verdict] if in_step else 1


def _recordings(a: Log, b: Log, comparison: Comparison, as_json: bool) -> bool:
    """Shows the comparison of the curves, then the comparison of the stages and modules of all recorded updates.
    Returns whether the recorded updates of A and B are in step (within the tolerances)."""
    # Imported on use, because only recordings need torch.
    from lockstep.parity.replay.foreign_recording import compare_recordings
    from lockstep.parity.replay.replay_result import as_json as replayed_json
    from lockstep.parity.replay.replay_result import show as show_stages

    judged = compare_recordings(Path(a.source), Path(b.source))
    if as_json:
        write(json.dumps({**json.loads(as_strict_json(comparison)), "recordings": replayed_json(judged)}, indent=2))
    else:
        console = Console.open()
        show(comparison, console)
        show_stages(judged, console, "recordings, update by update: A against B")
    return judged.in_step


def _page_of(b: Log) -> Path | None:
    """Returns the path of report.html in B's run folder, if B is a writable run folder."""
    folder = Path(b.source)
    return folder / "report.html" if b.evidence is not None and os.access(folder, os.W_OK) else None


# The comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A metric to compare: its name in log A and in log B. `bar` is a limit in percent that replaces the default limit
    for losses, rewards or other metrics."""

    a: str
    b: str
    judged: bool = False
    bar: float | None = None

    @property
    def name(self) -> str:
        return self.a if self.a == self.b else f"{self.a}={self.b}"


@dataclass(frozen=True)
class Sides:
    """The runs of the sides A and B. In each tuple the compared run is first, and its repeats follow."""

    a: tuple[Log, ...]
    b: tuple[Log, ...]

    def curves(self, choice: Choice) -> tuple[list[Curve], list[Curve]]:
        """Returns the curves of this metric in the runs of A and of B. Runs that did not log the metric are skipped."""
        return (
            [Curve(log.metrics[choice.a], log.is_mean(choice.a)) for log in self.a if choice.a in log.metrics],
            [Curve(log.metrics[choice.b], log.is_mean(choice.b)) for log in self.b if choice.b in log.metrics],
        )


def compare(
    a: Log,
    b: Log,
    repeats: Sequence[Log] = (),
    metrics: Sequence[str] = (),
    bars: Mapping[str, float] | None = None,
    shift: int = 0,
    steps: tuple[int, int] | None = None,
) -> Comparison:
    """Compares B with A. The verdict uses the metrics in `metrics` (`name` or `name in A=name in B`) instead of the
    default metrics. The verdict also uses the metrics in `bars` (metric name -> limit in percent). `shift` is added to
    the steps of B and its repeats. `steps` (first, last) limits the compared steps."""
    found, unknown = differences(a, b)
    sides, doubts = _sides(a, b, repeats)
    sides = Sides(sides.a, tuple(shift_steps(log, shift) for log in sides.b))
    remarks = [f"B's steps are shifted by {shift:+d} (--shift)"] if shift else []
    if steps is not None:
        sides = Sides(*(tuple(select_steps(log, *steps) for log in side) for side in (sides.a, sides.b)))
        remarks.append(f"only steps {steps[0]:,} to {steps[1]:,} are compared (--steps)")
    compared: list[Metric] = []
    missing: list[str] = []
    skipped: list[str] = []
    for choice in _choices(a, b, metrics, bars or {}):
        if ambiguous := _ambiguous(choice, sides):
            if choice.judged:
                raise ambiguous
            skipped.append(choice.name)
            continue
        matched = _matched(choice, sides)
        if isinstance(matched, Matched):
            compared.append(_measure(choice, matched, sides))
        elif choice.judged:
            missing.append(matched)
        remarks += _shift_remarks(choice, sides, shift) if choice.judged else []
    verdict, reason = overall(compared, missing, found)
    return Comparison(
        a=a.source,
        b=b.source,
        kinds=(a.kind, b.kind),
        verdict=verdict,
        reason=reason,
        metrics=compared,
        throughput=throughput(sides.a[0], sides.b[0]),
        differences=found,
        unknown=[*unknown, *doubts, *_skipped(skipped), *(_without_floor(compared) if repeats else [])],
        samples=paired_samples(a, b),
        facts=support_facts(a, b),
        setup_known=a.evidence is not None and b.evidence is not None,
        remarks=remarks,
        known=known_differences(a, b, [metric.name for metric in compared]),
    )


def _sides(a: Log, b: Log, repeats: Sequence[Log]) -> tuple[Sides, list[str]]:
    """Assigns each repeat run to the side (A or B) with the same set-up, or to A if neither side matches. Also returns
    remarks on runs that the user gave as repeats but that may not be repeats."""
    of_a, of_b, doubts = [a], [b], []
    for repeat in repeats:
        side = of_a if same_setting(repeat, a) or not same_setting(repeat, b) else of_b
        side.append(repeat)
        if repeat.evidence and side[0].evidence and not same_setting(repeat, side[0]):
            doubts.append(
                f"whether {repeat.source} is a repeat: its set-up matches neither A nor B; it is used as a repeat of A"
            )
        if repeat.evidence and a.evidence and seed_of(a) == seed_of(b) != seed_of(repeat):
            doubts.append(
                f"the noise between runs with the same seed is unknown: the repeat {repeat.source} has another seed, "
                "which adds noise"
            )
    return Sides(tuple(of_a), tuple(of_b)), doubts


def _ambiguous(choice: Choice, sides: Sides) -> Refusal | None:
    """Returns a refusal if the metric has several values for one step, so that it is unclear which value to compare."""
    for name, logs in ((choice.a, sides.a), (choice.b, sides.b)):
        for log in logs:
            if name in log.ambiguous:
                return Refusal.at(
                    log.source,
                    f"{log.written.get(name, name)}: {log.ambiguous[name]}, and a resumed run does not explain this",
                    "write a separate file for each rank or run, or keep only the rows of one rank or run",
                    code="ambiguous-steps",
                )
    return None


def _skipped(names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{', '.join(names[:3])}{more}: not compared, because a log has several values for one step"


def _without_floor(compared: Sequence[Metric]) -> Iterator[str]:
    """Yields a remark for each metric whose noise between repeats is unknown or for which some repeats are unusable."""
    for metric in (each for each in compared if each.verdict is not None):
        whose = f"the noise of {metric.name}"
        if metric.noise is None:
            yield f"{whose}: A, B and the repeats have fewer than {MIN_NOISE_STEPS} common steps with finite values"
            continue
        if metric.copies:
            verb = "equals" if metric.copies == 1 else "equal"
            yield (
                f"{whose}: {metric.copies} of its repeats {verb} another run of the same side at all steps and "
                "cannot show the noise of rounding; give repeats whose sums round differently (another batch.tokens)"
            )
        if metric.power is None:
            continue
        if lacking := len(metric.repeats) - metric.power.repeats - metric.copies:
            verb = "lacks" if lacking == 1 else "lack"
            yield f"{whose}: {lacking} of its repeats {verb} too many consecutive steps, so only the others are used"


def _choices(a: Log, b: Log, metrics: Sequence[str], bars: Mapping[str, float]) -> Iterator[Choice]:
    """Yields the metrics that get a verdict, then the other metrics that both logs have: losses, rewards, all
    others."""
    barred = {_named(name, "--bar", a, b): percent for name, percent in bars.items()}
    judged = [_named(text, "--metric", a, b) for text in metrics] or _by_default(a, b, needed=not barred)
    wanted: dict[tuple[str, str], float | None] = {**dict.fromkeys(judged), **barred}
    for (in_a, in_b), bar in wanted.items():
        yield Choice(in_a, in_b, judged=True, bar=bar)
    order = {"loss": 0, "reward": 1, "other": 2}
    for name in sorted(a.metrics.keys() & b.metrics.keys(), key=lambda name: (order[kind_of(name)], name)):
        if (name, name) not in wanted:
            yield Choice(name, name)


def _by_default(a: Log, b: Log, needed: bool) -> list[tuple[str, str]]:
    """Returns the metric that decides the verdict by default: the reward of online runs or the loss of other runs, as
    in the Ascend documents. If a log lacks this default metric, the result contains the metric only if `needed` is
    true."""
    methods = [log.evidence.recipe.get("method") for log in (a, b) if log.evidence is not None]
    rewards = [name for name in REWARDS if name in a.metrics and name in b.metrics]
    online = any(method in ONLINE for method in methods) if methods else bool(rewards)
    name = (rewards or REWARDS)[0] if online else LOSS
    return [(name, name)] if needed or (name in a.metrics and name in b.metrics) else []


def _named(text: str, option: str, a: Log, b: Log) -> tuple[str, str]:
    in_a, _, in_b = text.partition("=")
    return _metric_name(in_a, a, f"{option} {text}"), _metric_name(in_b or in_a, b, f"{option} {text}")


def _metric_name(name: str, log: Log, where: str) -> str:
    """Returns lockstep's metric name for a name given by the user, which may be lockstep's name or the name in the
    log."""
    if name in log.metrics:
        return name
    for metric, written in log.written.items():
        if written == name:
            return metric
    names = list(dict.fromkeys([*log.metrics, *log.written.values()]))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    raise Refusal.at(
        where,
        f"{log.source} has no metric {name}",
        f"similar: {', '.join(near)}" if near else f"it has {', '.join(list(log.metrics)[:8])}",
        code="unknown-metric",
    )


def _matched(choice: Choice, sides: Sides) -> Matched | str:
    """Returns the curves of a metric on the common steps of A and B, or the reason why the curves cannot be
    compared."""
    for log, name in ((sides.a[0], choice.a), (sides.b[0], choice.b)):
        if name not in log.metrics:
            return f"{log.source} has no {name}: choose another with --metric"
    series_a, series_b = sides.a[0].metrics[choice.a], sides.b[0].metrics[choice.b]
    matched = match(*sides.curves(choice))
    pair = align(matched.a[0], matched.b[0])
    if not len(pair.steps):
        return f"{choice.name} has no common step: A logs it at {_span(series_a)}, B at {_span(series_b)}"
    if not pair.finite.any() and not (choice.judged and pair.one_sided.any()):
        return f"at none of the {len(pair.steps):,} common steps, {choice.name} is finite in both A and B"
    return matched


def _shift_remarks(choice: Choice, sides: Sides, shift: int) -> Iterator[str]:
    """Yields a remark if the curves agree much better after B's steps are shifted. The shift is applied only if the
    user sets --shift."""
    a_runs, b_runs = sides.curves(choice)
    found = better_shift(a_runs[0], b_runs[0]) if a_runs and b_runs else None
    if found is not None:
        now = "no step in common" if found.unshifted_percent is None else f"{found.unshifted_percent:.3g} %"
        yield (
            f"{choice.name}: the curves agree much better with B's steps shifted by {found.by:+d} (mean error "
            f"{found.error_percent:.3g} % over {found.steps:,} steps; without the shift: {now}); if A and B count "
            f"steps differently, compare again with --shift {shift + found.by}"
        )


def _span(series: Series) -> str:
    return f"steps {series.steps[0]} to {series.steps[-1]}" if len(series.steps) else "no step"


def _measure(choice: Choice, matched: Matched, sides: Sides) -> Metric:
    pair = align(matched.a[0], matched.b[0])
    kind = kind_of(choice.a)
    bar = bar_of(kind, pair, choice.bar) if choice.judged or kind != "other" else None
    measured = figures(pair, bar.tolerance(pair.a) if bar else None)
    noise = noise_floor(matched.a, matched.b)
    examined = examine(pair, matched.a[1:], matched.b[1:]) if choice.judged else None
    planned = [log.planned for log in (sides.a[0], sides.b[0])]
    lacking = incomplete(sides.a[0].metrics[choice.a], sides.b[0].metrics[choice.b], planned) if choice.judged else ""
    judgement = judge(bar, pair, measured, examined, lacking) if bar and examined else None
    return Metric(
        name=choice.name,
        names=(sides.a[0].written.get(choice.a, choice.a), sides.b[0].written.get(choice.b, choice.b)),
        kind=kind,
        bar_percent=bar.percent if bar else None,
        figures=replace(measured, parted_at=judgement.parted_at if judgement else None),
        noise=noise,
        verdict=judgement.verdict if judgement else None,
        decided_by=judgement.explanation if judgement else "shown, not judged",
        steps=pair.steps.tolist(),
        a=_listed(pair.a),
        b=_listed(pair.b),
        repeats=[_listed(values_at(run, pair.steps)) for run in (*matched.a[1:], *matched.b[1:])],
        scaled=bool(bar and bar.scaled_because),
        only_a=matched.only_a,
        only_b=matched.only_b,
        matching=matched.explanation,
        findings=examined.findings if examined else [],
        power=examined.power if examined else None,
        copies=examined.copies if examined else 0,
        bar_result=judgement.bar if judgement else None,
        test_result=judgement.test if judgement else None,
        incomplete=lacking,
    )


def _listed(values: np.ndarray) -> list[float | None]:
    finite = np.isfinite(values)
    if finite.all():
        return values.tolist()
    listed = values.astype(object)
    listed[~finite] = None
    return listed.tolist()
