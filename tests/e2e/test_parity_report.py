"""report.html in a real browser: what is drawn, what the pointer shows, and that every number is that of the json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_chromium
from lockstep.page import resource
from lockstep.parity.compare.compare_report import write_report
from lockstep.parity.compare.comparison import Comparison
from parity_example import HOSTILE, STEPS, example, loss, loss_of_b, reward, reward_of_b

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (on Debian: sudo apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

COLOURS = {
    "light": {"a": (0x25, 0x63, 0xEB), "b": (0xE8, 0x59, 0x0C), "paper": (0xF5, 0xF6, 0xF8)},
    "dark": {"a": (0x6E, 0xA8, 0xFF), "b": (0xFF, 0xA0, 0x4D), "paper": (0x0F, 0x12, 0x18)},
}
REWARD, LOSS, LENGTH = 2, 1, 0
"""The places of the metrics in the example; the page shows them in this order."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, tmp_path: Path) -> Browser:
    return opened(chromium, example(), tmp_path)


def opened(browser: Browser, comparison: Comparison, folder: Path) -> Browser:
    write_report(comparison, folder / "report.html")
    browser.show(1400)
    browser.open((folder / "report.html").as_uri())
    return browser


def comparison_json(comparison: Comparison) -> Any:
    """The comparison as a reader of its json sees it, written without the code of the page."""
    text = json.dumps(comparison.as_json())
    return json.loads(re.sub(r"\bNaN\b|-?\bInfinity\b", "null", text))


def box(page: Browser, selector: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of an element, brought into view."""
    found = page.evaluate(
        f"""(() => {{
          const element = document.querySelector({json.dumps(selector)});
          element.scrollIntoView({{block: "center"}});
          const {{left, top, width, height}} = element.getBoundingClientRect();
          return [left, top, width, height];
        }})()"""
    )
    left, top, width, height = found
    return left, top, width, height


def click(page: Browser, selector: str, times: int = 1) -> None:
    left, top, width, height = box(page, selector)
    page.click(left + width / 2, top + height / 2, times)


def x_of(page: Browser, step: float, first: float = 1, last: float = 200) -> float:
    left, _, width, _ = box(page, ".catcher")
    return left + width * (step - first) / (last - first)


def hovered(page: Browser, step: float, first: float = 1, last: float = 200) -> dict[str, float]:
    """What the tooltip says with the pointer at a step."""
    x = x_of(page, step, first, last)
    _, top, _, height = box(page, ".catcher")
    page.mouse("moved", x, top + height / 3)
    page.settle()
    shown = page.evaluate("""document.querySelector(".tooltip").hidden ? [] :
      [...document.querySelectorAll("[data-hover]")].map((one) => [one.dataset.hover, one.dataset.value])""")
    return {name: float(value) for name, value in shown}


def drawn(page: Browser, curve: str) -> str:
    return str(page.evaluate(f"document.querySelector('path[data-curve={curve}]').getAttribute('d')"))


def domain(page: Browser) -> tuple[float, float]:
    first, last = page.evaluate(
        "(() => { const {first, last} = document.querySelector('.chart').dataset; return [first, last]; })()"
    )
    return float(first), float(last)


def pixels(picture: Path, colour: tuple[int, int, int]) -> int:
    """How many pixels of a screenshot have this very colour."""
    from PIL import Image

    with Image.open(picture) as image:
        return sum(count for count, found in image.convert("RGB").getcolors(1 << 24) if found == colour)


def test_opens_offline_without_a_complaint(page: Browser, tmp_path: Path) -> None:
    assert page.console == []
    assert page.requests == [(tmp_path / "report.html").as_uri()]
    assert page.evaluate("document.querySelector('h1').innerText").split() == ["✕", "out", "of", "step"]
    assert example().reason in page.evaluate("document.getElementById('headline').innerText")
    assert "out of step" in page.evaluate("document.title")


def test_every_number_is_that_of_the_json(page: Browser) -> None:
    data = comparison_json(example())
    seen: set[str] = set()
    for row in page.evaluate("[...document.querySelectorAll('tr[data-metric]')].map((one) => one.dataset.metric)"):
        click(page, f"tr[data-metric='{row}']")
        for path, value, text in page.evaluate(
            """[...document.querySelectorAll("[data-path]")]
              .map((one) => [one.dataset.path, one.dataset.value, one.innerText])"""
        ):
            wanted = data
            for key in path.split("."):
                wanted = wanted[int(key)] if isinstance(wanted, list) else wanted[key]
            assert value == "null" if wanted is None else float(value) == wanted, path
            assert (text == "–") == (wanted is None), path
            if wanted is not None:
                number = float(re.sub(r"[ ,%×+]", "", text).replace("−", "-"))
                assert number == pytest.approx(wanted, rel=6e-3, abs=1e-12), (path, text)
            seen.add(path)
    figures = [f"metrics.{i}.figures.{name}" for i in range(3) for name in data["metrics"][0]["figures"]]
    noises = [f"metrics.{i}.noise.{name}" for i in (LOSS, REWARD) for name in data["metrics"][LOSS]["noise"]]
    phases = [f"throughput.phases.{i}.{name}" for i in range(3) for name in ("a", "b", "ratio")]
    rest = ["throughput.ratio", "throughput.matched_ratio", "throughput.matched_steps", "differences.1.b"]
    powers = [f"metrics.{REWARD}.power.{name}" for name in data["metrics"][REWARD]["power"] if name != "repeats"]
    found = [
        f"metrics.{REWARD}.findings.{i}.{name}" for i in (0, 1) for name in ("first", "last", "difference", "noise")
    ]
    wanted = {*figures, *noises, *phases, *rest, *powers, *found, "samples.0.1.score", "metrics.2.bar_percent"}
    assert wanted <= seen


def test_judged_metrics_come_first_and_rows_switch_the_chart(page: Browser) -> None:
    rows = page.evaluate("[...document.querySelectorAll('tr[data-metric]')].map((one) => Number(one.dataset.metric))")
    assert rows == [REWARD, LOSS, LENGTH]
    title = "document.querySelector('#explorer h3').innerText"
    assert page.evaluate(title) == "critic/rewards/mean"
    of_reward = drawn(page, "a")
    click(page, f"tr[data-metric='{LOSS}']")
    assert page.evaluate(title) == "train/loss"
    assert drawn(page, "a") != of_reward
    assert page.evaluate("document.querySelector('tr[aria-selected=true]').dataset.metric") == str(LOSS)
    assert page.console == []


def test_the_headline_has_the_absolute_error_and_the_power(page: Browser) -> None:
    """Beside the absolute error stands the scaled one, which is what tells of small and of large curves."""
    text = " ".join(page.evaluate("document.getElementById('headline').innerText").split())
    assert "critic/rewards/mean mean error, absolute 4.83 % bar 4 %, scaled error 8.91 %" in text
    assert (
        "critic/rewards/mean: found with 95 %: a drift of 0.02490, a collapse of 0.08210 in the last 10 steps; "
        "one of ten noise sd as late as step 198" in text
    )


@pytest.mark.parametrize(("verdict", "sign"), [("cannot tell", "?"), ("within noise", "≈"), ("in step", "✓")])
def test_every_verdict_has_its_headline(chromium: Browser, tmp_path: Path, verdict: str, sign: str) -> None:
    page = opened(chromium, example(verdict), tmp_path)
    assert page.evaluate("document.querySelector('h1').innerText").split() == [sign, *verdict.split()]
    assert page.console == []


def test_constant_metrics_are_folded_away(chromium: Browser, tmp_path: Path) -> None:
    """What is one number at every step of both sides; not what differs between them, nor what is judged."""
    length, loss, reward = example().metrics
    flat = [0.5] * len(STEPS)
    still = [replace(length, name=f"still/{i}", a=flat, b=flat) for i in range(3)]
    other = replace(length, name="other/level", a=flat, b=[0.6] * len(STEPS))
    judged = replace(loss, name="judged/flat", a=flat, b=flat)
    page = opened(chromium, replace(example(), metrics=[*still, other, judged, reward]), tmp_path)
    rows = "[...document.querySelectorAll('tr[data-metric]')].filter((one) => one.offsetParent !== null).length"
    assert page.evaluate(rows) == 3
    assert (
        page.evaluate("document.querySelector('button.fold').innerText") == "3 constant metrics, the same on both sides"
    )
    click(page, "button.fold")
    assert page.evaluate(rows) == 6
    click(page, "tr[data-metric='1']")
    assert page.evaluate("document.querySelector('#explorer h3').innerText") == "still/1"
    click(page, "button.fold")
    assert page.evaluate(rows) == 3
    assert page.console == []


def test_curve_a_is_dashed_and_lies_under_b(page: Browser) -> None:
    """And is the wider one, so that two curves that are the same are both seen."""
    style = "(letter) => getComputedStyle(document.querySelector(`path[data-curve=${letter}]`))"
    dashes = page.evaluate(f"['a', 'b'].map({style}).map((one) => one.strokeDasharray)")
    widths = page.evaluate(f"['a', 'b'].map({style}).map((one) => parseFloat(one.strokeWidth))")
    assert (dashes[0] != "none", dashes[1]) == (True, "none")
    assert widths[0] > widths[1]
    order = "[...document.querySelectorAll('path[data-curve=a], path[data-curve=b]')].map((one) => one.dataset.curve)"
    assert page.evaluate(order) == ["a", "b"]  # what comes later is painted over it


def test_without_judged_metrics_the_longest_curve_is_shown_first(chromium: Browser, tmp_path: Path) -> None:
    short, *others = (replace(metric, verdict=None) for metric in example().metrics)
    short = replace(short, figures=replace(short.figures, steps=3))
    page = opened(chromium, replace(example("not comparable"), metrics=[short, *others]), tmp_path)
    assert page.evaluate("document.querySelector('#explorer h3').innerText") == "train/loss"
    assert "0.31 %" not in page.evaluate("document.getElementById('metrics').innerText")


@pytest.mark.daily("900-light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [900, 1400])
def test_curves_are_drawn(page: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    page.show(width, scheme=scheme)
    for curve in ("a", "b", "difference"):
        path = drawn(page, curve)
        assert (path.count("M"), path.count("L")) == (1, len(STEPS) - 1), curve
    box(page, ".catcher")
    picture = page.screenshot(tmp_path / "page.png")
    colours = COLOURS[scheme]
    # Without the curves there remain the legend and badges of their colours.
    page.evaluate("document.querySelectorAll('path[data-curve]').forEach((one) => one.remove())")
    bare = page.screenshot(tmp_path / "bare.png")
    for side in ("a", "b"):
        assert pixels(picture, colours[side]) - pixels(bare, colours[side]) > width / 3, side
    assert pixels(picture, colours["paper"]) > 10_000
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.console == []


def test_the_curve_lies_where_its_values_are(page: Browser) -> None:
    """The ends of the vertical range are 6 % beyond the extremes of both curves; y falls as the value rises."""
    values = [*map(reward, STEPS), *map(reward_of_b, STEPS)]
    low, high = min(values), max(values)
    room = 0.06 * (high - low)
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", drawn(page, "b"))[1:]]
    top, height = 12, 300
    for step in (1, 57, 130, 200):
        part = (reward_of_b(step) - low + room) / (high - low + 2 * room)
        assert points[step - 1][1] == pytest.approx(top + height * (1 - part), abs=0.06)


def test_the_pointer_shows_step_values_and_difference(page: Browser) -> None:
    shown = hovered(page, 130.3)
    a, b = reward(130), reward_of_b(130)
    assert (shown["step"], shown["a"], shown["b"]) == (130, a, b)
    assert shown["difference"] == pytest.approx(b - a, rel=1e-12)
    assert shown["relative"] == pytest.approx(100 * (b - a) / abs(a), rel=1e-12)
    assert shown["repeat0"] == reward(130) + 0.02 * math.sin(130 * 0.7)
    assert page.evaluate("document.querySelectorAll('.crosshair circle').length") == 2


def test_a_missing_value_breaks_the_line(page: Browser) -> None:
    click(page, f"tr[data-metric='{LENGTH}']")
    assert (drawn(page, "b").count("M"), drawn(page, "b").count("L")) == (2, 197)
    assert (drawn(page, "a").count("M"), drawn(page, "a").count("L")) == (1, 199)
    shown = hovered(page, 50)
    assert shown["a"] == 184.0
    assert math.isnan(shown["b"])


def test_dragging_zooms_and_a_double_click_shows_all(page: Browser) -> None:
    start, end = x_of(page, 40), x_of(page, 90)
    _, top, _, height = box(page, ".catcher")
    y = top + height / 2
    page.mouse("moved", start, y)
    page.mouse("pressed", start, y, pressed=True, clicks=1)
    page.mouse("moved", (start + end) / 2, y, pressed=True)
    page.mouse("moved", end, y, pressed=True)
    page.mouse("released", end, y, clicks=1)
    page.settle()
    assert domain(page) == (40, 90)
    assert hovered(page, 65, 40, 90)["step"] == 65
    # The 51 steps between, and one beyond either edge.
    assert drawn(page, "a").count("L") == 52
    click(page, ".catcher", times=2)
    assert domain(page) == (1, 200)
    assert page.console == []


def test_log_scale_smoothing_and_legend(page: Browser) -> None:
    click(page, f"tr[data-metric='{LOSS}']")
    plain = drawn(page, "a")
    click(page, "#log")
    logarithmic = drawn(page, "a")
    points = [float(point.split()[1]) for point in re.split("[ML]", logarithmic)[1:]]
    # Equal ratios are equal distances.
    distance = (points[9] - points[99]) / (math.log(loss(100)) - math.log(loss(10)))
    assert points[49] == pytest.approx(points[99] + distance * (math.log(loss(100)) - math.log(loss(50))), abs=0.2)
    click(page, "#log")
    assert drawn(page, "a") == plain

    page.evaluate("(() => { smooth.value = 100; smooth.dispatchEvent(new Event('input')); })()")
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn(page, "b"))[1:]]
    # A slider at its end takes 25 of 200 steps to either side.
    means = {step: sum(loss_of_b(near) for near in range(step - 25, step + 26)) / 51 for step in (60, 100, 140)}
    assert (heights[99] - heights[59]) / (heights[139] - heights[99]) == pytest.approx(
        (means[60] - means[100]) / (means[100] - means[140]), rel=5e-3
    )
    assert hovered(page, 100)["b"] == loss_of_b(100)

    click(page, "[data-toggle=b]")
    assert page.evaluate("document.querySelectorAll('path[data-curve=b]').length") == 0
    assert page.evaluate("document.querySelectorAll('path[data-curve=a]').length") == 1
    assert page.console == []


def test_bar_and_noise_are_drawn(page: Browser) -> None:
    assert page.evaluate("document.querySelectorAll('path[data-curve=bar]').length") == 2
    assert page.evaluate("document.querySelectorAll('path.noise-band').length") == 2
    assert page.evaluate("document.querySelectorAll('path.curve.repeat').length") == 1
    assert page.evaluate("document.querySelector('.mark.diverged').textContent") == "diverged at 171"
    click(page, f"tr[data-metric='{LENGTH}']")
    assert page.evaluate("document.querySelectorAll('path[data-curve=bar], path.noise-band').length") == 0


def test_text_of_samples_is_text(page: Browser) -> None:
    assert page.evaluate("window.hacked === undefined")
    texts = page.evaluate("[...document.querySelectorAll('#samples pre')].map((one) => one.textContent)")
    assert texts.count(HOSTILE) == 2
    assert "12 - 5 = 8, so there are 8.\n#### 8" in texts
    assert page.evaluate("document.querySelectorAll('#samples b, #samples script').length") == 0
    assert "emulated <chip>" in page.evaluate("document.getElementById('environment').innerText")
    assert page.console == []


def test_differences_and_unknown_parts(page: Browser) -> None:
    rows = page.evaluate(
        "[...document.querySelectorAll('.differences tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert [row[0].strip() for row in rows] == ["blocks", "matters", "matters", "harmless"]
    assert [cell.strip() for cell in rows[0][1:]] == [
        "recipe",
        "optim.lr",
        "1e−6",
        "2e−6",
        "the curves belong to different step sizes",
    ]
    text = page.evaluate("document.body.innerText")
    assert example().unknown[0] in text
    assert example().throughput.warnings[0] in text


def test_foreign_logs_have_an_unknown_set_up_and_remarks(chromium: Browser, tmp_path: Path) -> None:
    """Nothing was found to differ where nobody could look: that is not a count of 0."""
    matched = replace(example().metrics[LOSS], matching="A's values are means: B is averaged", only_a=2, only_b=18)
    foreign = replace(example(), differences=[], setup_known=False, remarks=["try --shift 1"], metrics=[matched])
    page = opened(chromium, foreign, tmp_path)
    tiles = page.evaluate("[...document.querySelectorAll('.tile')].map((one) => one.innerText)")
    (tile,) = [text for text in tiles if "set-up" in text.lower()]
    assert "unknown" in tile
    assert not re.search(r"\d", tile)
    text = page.evaluate("document.getElementById('environment').innerText")
    assert "Unknown" in text
    assert "set-up" in text
    assert "try --shift 1" in text
    assert page.evaluate("document.body.innerText").count("A's values are means: B is averaged") == 2
    assert page.console == []
    setup = opened(chromium, replace(example(), differences=[]), tmp_path)
    tiles = setup.evaluate("[...document.querySelectorAll('.tile')].map((one) => one.innerText)")
    assert any("set-up" in text.lower() and "0" in text for text in tiles)


def test_little_to_show(chromium: Browser, tmp_path: Path) -> None:
    """Nothing in common, and one common step: a page all the same."""
    nothing = replace(
        example("not comparable"),
        metrics=[],
        differences=[],
        unknown=[],
        samples=[],
        facts={},
        throughput=replace(
            example().throughput, ratio=None, a=None, b=None, matched_ratio=None, phases=[], warnings=[]
        ),
    )
    page = opened(chromium, nothing, tmp_path)
    assert page.console == []
    assert "no metric with common steps" in page.evaluate("document.body.innerText")
    single = replace(example().metrics[REWARD], steps=[3], a=[0.5], b=[0.25], repeats=[[0.4]])
    page = opened(chromium, replace(example(), metrics=[single]), tmp_path)
    assert re.fullmatch(r"M[\d.]+ [\d.]+h0", drawn(page, "a"))
    assert page.console == []


def waves(count: int, spikes: range) -> Comparison:
    """One metric over so many steps."""
    steps = list(range(1, count + 1))
    a = [math.sin(step / 700) + 0.1 * math.sin(step * 1.3) for step in steps]
    b = [5.0 if step in spikes else value + 0.01 for step, value in zip(steps, a, strict=True)]
    return replace(example(), metrics=[replace(example().metrics[LOSS], steps=steps, a=a, b=b, repeats=[a])])


def test_ten_thousand_steps_are_drawn_with_every_spike(chromium: Browser, tmp_path: Path) -> None:
    spikes = range(1_000, 9_000, 397)
    long = waves(10_000, spikes)
    page = opened(chromium, long, tmp_path)
    path = drawn(page, "b")
    assert path.count("L") < 4 * 1400
    # A spike is one of ten thousand points, seven to a pixel, and each is drawn where it belongs.
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]
    left, _, width, _ = box(page, ".catcher")
    left -= box(page, ".plot")[0]
    peaks = [x for x, y in points if y < 12 + 300 * 0.06]
    assert peaks == [pytest.approx(left + width * (step - 1) / 9_999, abs=0.1) for step in spikes]
    assert hovered(page, 5_000, 1, 10_000)["a"] in long.metrics[0].a
    # What is drawn is bounded by the pixels, not by the steps, also while the reader smooths.
    page.evaluate("(() => { smooth.value = 40; smooth.dispatchEvent(new Event('input')); })()")
    points = page.evaluate(
        "[...document.querySelectorAll('.plot path')].map((path) => path.getAttribute('d').split('L').length)"
    )
    assert max(points) < 2 * 4 * 1400
    assert page.console == []


@pytest.mark.parametrize("half", [1, 10, 400])
def test_smoothing_reads_each_step_twice_however_wide_the_window(chromium: Browser, half: int) -> None:
    """A mean that is summed anew at each step would be as much work as the window is wide."""
    code = resource("chart.js")
    reads = chromium.evaluate(
        f"""(() => {{
          {code}
          let reads = 0;
          const counted = {{
            get(values, name) {{
              if (Number.isInteger(Number(String(name)))) reads += 1;
              return values[name];
            }},
          }};
          smoothed(new Proxy(Array.from({{ length: 1000 }}, (_, i) => i), counted), {half});
          return reads;
        }})()"""
    )
    assert reads == 2 * 1000
