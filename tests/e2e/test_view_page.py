"""The page of `lockstep view` in a real browser, in one session: growing curves, overlaid runs, responses
token by token, hostile text as text, the keyboard, narrow and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from browser import Browser, find_chromium
from hang import wait_until
from lockstep.parity.compare.compare_report import write_report
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import MetricsLog, append_text
from lockstep.run.sample_log import conversation
from lockstep.serve.viewer import RunViewer
from lockstep.trajectory import Trajectory, TurnRecord
from parity_example import HOSTILE, example
from view_runs import sample, write_run

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (on Debian: sudo apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]
STEPS, SPIKE = 5_000, 3_217
TWINS = ["twins/a/same\u202e", "twins/b/same\u202e"]
MEGABYTE = "A" * 1_000_000
ESCAPES = "\x1b[31mred\x1b[0m \u202eright to left\u202c"


def reward(step: int) -> float:
    return 7.5 if step == SPIKE else math.sin(step / 400) / 2


def played_game() -> dict[str, Any]:
    """A line of samples.jsonl of a conversation with an environment: two turns, as a run writes them."""
    texts = ["<tool_call>", "2+2", "</tool_call>", "tool: 4", "It is ", "4"]
    trajectory = Trajectory(
        [
            {"role": "user", "content": f"What is 2 + 2? {HOSTILE}"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator"}}]},
            {"role": "tool", "name": "calculator", "content": "the result is 4"},
            {"role": "assistant", "content": "It is 4"},
        ],
        [TurnRecord(0, 3, 0.25, parse_error="no such tool"), TurnRecord(4, 6, 1.0)],
        "completed",
    )
    details = {"texts": texts, "logprobs": [-0.01, -0.7, -0.01, None, -0.02, -6.0]}
    return {**conversation(trajectory), "response": "It is 4", "tokens": 6, "token_details": details}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "runs"
    samples: list[dict[str, Any]] = [sample(step, number) for step in (1, 2, 4) for number in (0, 1)]
    samples += [
        sample(5, 0, response=HOSTILE, prompt=[{"role": HOSTILE, "content": HOSTILE}], token_details=None),
        sample(5, 1, response=ESCAPES, token_details=None),
        sample(5, 2, stop="length", tokens=48),
        sample(5, 3, kind="failed", score=None, parts=None, failure=f"function: {HOSTILE}"),
        sample(6, 0, response=MEGABYTE, token_details=None),
    ]
    hostile = f"odd/{HOSTILE.replace('/', '')}"
    long = write_run(
        root / "long",
        STEPS,
        {"critic/score/mean": reward, "actor/entropy": lambda step: 2 / step, hostile: float},
        samples,
    )
    write_report(example(), long / "report.html")
    odd = {7: math.nan, 8: math.inf}
    write_run(
        root / "short",
        40,
        {"critic/score/mean": lambda step: step / 40, "actor/entropy": lambda step: odd.get(step, 1.0)},
        [sample(7, 0, **played_game())],
        lr=3e-4,
    )
    extremes = {"huge": lambda step: 1.7e308 * (-1) ** step, "tiny": lambda step: 5e-324, "zero": lambda step: 0.0}
    write_run(
        root / "extremes",
        12,
        {**extremes, "large": lambda step: 1e17 + 16 * step, "__proto__": float, "constructor": float},
    )
    (write_run(root / "damaged", 2, {"critic/score/mean": float}) / "recipe.yaml").write_text("run: {steps: [")
    for name in ("a", "b"):
        write_run(root / "twins" / name / "same\u202e", 300, {"critic/score/mean": float})
    write_run(root / HOSTILE.replace("/", "|"), 2, {"critic/score/mean": float}, method=HOSTILE.replace("/", "|")[:20])
    return root


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[RunViewer]:
    server = RunViewer(runs)
    with server.in_thread():
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, server: RunViewer) -> Iterator[Page]:
    chromium.show(1400)
    page = Page(chromium, server.link)
    page.open("#run=long")
    yield page
    assert chromium.console == []
    assert all(request.startswith(("data:", f"http://127.0.0.1:{server.port}/")) for request in chromium.requests)


class Page:
    """The page in the browser, with the actions of a reader."""

    def __init__(self, browser: Browser, link: str):
        self.browser, self.link = browser, link

    def open(self, address: str) -> None:
        self.browser.open("about:blank")  # another hash alone would not load it anew
        self.browser.open(self.link + address)
        self.until("document.querySelector('h1')")

    def evaluate(self, script: str) -> Any:
        return self.browser.evaluate(script)

    def until(self, script: str) -> None:
        wait_until(lambda: bool(self.evaluate(f"Boolean({script})")))

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def key(self, name: str) -> None:
        text = name if len(name) == 1 else {"Enter": "\r"}.get(name, "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}.get(name, 0)
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.browser.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **typed)
        self.browser.settle()

    def type(self, text: str) -> None:
        self.browser.call("Input.insertText", text=text)
        self.browser.settle()

    def place_of(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height, once they stay: charts that are drawn later move it, and a bar to scroll by."""
        script = f"""(({{left, top, width, height}}) => [left, top, width, height])(
          document.querySelector({json.dumps(selector)}).getBoundingClientRect())"""
        found = [self.evaluate(script)]

        def stays() -> bool:
            self.browser.settle()
            found.append(self.evaluate(script))
            return bool(found[-1] == found[-2])

        wait_until(stays)
        left, top, width, height = found[-1]
        return left, top, width, height

    def click(self, selector: str) -> None:
        left, top, width, height = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "center"}});
              const {{left, top, width, height}} = element.getBoundingClientRect();
              return [left, top, width, height];
            }})()"""
        )
        self.browser.click(left + width / 2, top + height / 2)

    def choose(self, selector: str, value: str) -> None:
        self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.value = {json.dumps(value)};
              element.dispatchEvent(new Event("input"));
              element.dispatchEvent(new Event("change"));
            }})()"""
        )

    def wait_for_chart(self, metric: str = "critic/score/mean", runs: int = 1) -> None:
        self.until(f"document.querySelectorAll('[data-metric=\"{metric}\"] path.curve').length >= {runs}")

    def at_step(self, metric: str, step: float) -> dict[str, float]:
        """The values of each run in the tooltip at a step; the chart must be in view."""
        # A chart that is drawn anew under the pointer has lost it: a slow page may do so after the first move.
        wait_until(lambda: self._point(metric, step))
        shown = self.evaluate(
            f"""[...document.querySelectorAll('[data-metric="{metric}"] [data-hover]')]
              .map((one) => [one.dataset.hover, one.dataset.value])"""
        )
        values = self.evaluate(f"document.querySelector('[data-metric=\"{metric}\"] .tooltip-step').dataset.value")
        return {"step": float(values), **{name: float(value) for name, value in shown}}

    def _point(self, metric: str, step: float) -> bool:
        """Whether there is a tooltip, with the pointer moved to a step."""
        left, top, width, height, first, last = self.evaluate(
            f"""(() => {{
              const card = document.querySelector('[data-metric="{metric}"]');
              card.scrollIntoView({{block: "center"}});
              const {{left, top, width, height}} = card.querySelector(".catcher").getBoundingClientRect();
              const {{first, last}} = card.querySelector(".chart").dataset;
              return [left, top, width, height, Number(first), Number(last)];
            }})()"""
        )
        self.browser.mouse("moved", left + width * (step - first) / (last - first), top + height / 2)
        self.browser.settle()
        return bool(self.evaluate(f"Boolean(document.querySelector('[data-metric=\"{metric}\"] .tooltip-step'))"))

    def widest(self) -> tuple[int, int]:
        scrolled, width = self.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        return scrolled, width


def test_lists_the_runs_and_draws_the_chosen_one(page: Page) -> None:
    page.wait_for_chart()
    names = page.evaluate("[...document.querySelectorAll('button[data-run]')].map((one) => one.dataset.run)")
    assert names == [HOSTILE.replace("/", "|"), "damaged", "extremes", "long", "short", *TWINS]
    assert "step 5,000 of 5,000" in page.text("button[data-run=long]")
    assert page.text("h1") == "long"
    assert page.evaluate("window.hacked") is None
    # Two panes of what is looked at first, and a group for the metric with the odd name.
    assert page.evaluate("[...document.querySelectorAll('.group')].map((one) => one.dataset.group)") == ["first", "odd"]


def test_a_thinned_curve_keeps_its_extremes(page: Page) -> None:
    """One step of 5,000 lies far above all others, on a chart of some 300 pixels."""
    page.wait_for_chart()
    highest = page.evaluate(
        """Math.min(...document.querySelector('[data-metric="critic/score/mean"] path.curve').getAttribute("d")
          .match(/[\\d.]+ [\\d.]+/g).map((point) => Number(point.split(" ")[1])))"""
    )
    top = float(
        page.evaluate("document.querySelector('[data-metric=\"critic/score/mean\"] .catcher').getAttribute('y')")
    )
    assert highest < top + 20
    drawn = page.evaluate(
        "document.querySelector('[data-metric=\"critic/score/mean\"] path.curve').getAttribute('d').length"
    )
    assert drawn < 20_000, "not all of the points"
    page.click("[data-metric='critic/score/mean'] .larger")
    page.until("document.querySelector('.metric-card.large .chart')?.clientHeight > 350")
    assert page.at_step("critic/score/mean", SPIKE)["long"] == pytest.approx(reward(SPIKE))


def test_zoom_shows_steps_that_were_thinned_out(page: Page) -> None:
    page.wait_for_chart()
    left, top, width, height = page.place_of(".catcher")
    y = top + height / 2
    page.browser.mouse("moved", left + width * 0.5, y)
    page.browser.mouse("pressed", left + width * 0.5, y, pressed=True, clicks=1)
    page.browser.mouse("moved", left + width * 0.56, y, pressed=True)
    page.browser.mouse("released", left + width * 0.56, y, clicks=1)
    page.until("document.querySelector('.chart').dataset.last < 3000")
    first, last = page.evaluate(
        "(({first, last}) => [Number(first), Number(last)])(document.querySelector('.chart').dataset)"
    )
    assert first == pytest.approx(2500, abs=40)
    assert last == pytest.approx(2800, abs=40)
    values = page.at_step("critic/score/mean", 2555)
    assert values["long"] == pytest.approx(reward(int(values["step"])))
    assert values["step"] == pytest.approx(2555, abs=2)
    page.click("#reset")
    page.until("document.querySelector('.chart').dataset.last == 5000")


@pytest.mark.slow
def test_runs_are_overlaid(page: Page) -> None:
    page.click("input[data-over=short]")
    page.wait_for_chart(runs=2)
    assert "with=short" in page.evaluate("location.hash")
    legend = "[...document.querySelectorAll('#panel-curves .legend-entry')].map((one) => one.innerText)"
    assert page.evaluate(legend) == ["long", "short"]
    curves = "[...document.querySelectorAll('[data-metric=\"critic/score/mean\"] path.curve')]"
    assert len(set(page.evaluate(f"{curves}.map((one) => getComputedStyle(one).stroke)"))) == 2
    values = page.at_step("critic/score/mean", 1)
    assert values["long"] == pytest.approx(reward(int(values["step"])))
    assert values["short"] == pytest.approx(min(values["step"], 40) / 40)
    # A note names values that a log scale cannot show.
    page.click("#log")
    page.until(
        "document.querySelector('[data-metric=\"critic/score/mean\"] .odd-note').innerText.includes('0 or less')"
    )
    # NaN and infinite values have a note and a mark in the chart.
    page.open("#run=short")
    page.wait_for_chart("actor/entropy")
    note = page.text("[data-metric='actor/entropy'] .odd-note")
    assert note.startswith("2 steps ")
    assert note.endswith("first nan at step 7")
    assert page.evaluate("document.querySelectorAll('[data-metric=\"actor/entropy\"] path.odd').length") == 2
    path = "document.querySelector('[data-metric=\"actor/entropy\"] path.curve').getAttribute('d')"
    assert page.evaluate(f"{path}.split('M').length - 1") == 2, "no line over the gap"


@pytest.mark.slow
def test_two_runs_of_one_name_are_distinguished(page: Page) -> None:
    """Also where the name would turn the line around; and an axis has more than one mark."""
    page.open("#" + urlencode({"run": TWINS[0], "with": TWINS[1]}))
    page.wait_for_chart(runs=2)
    page.at_step("critic/score/mean", 100)
    named = page.evaluate("[...document.querySelectorAll('.tooltip-grid .key')].map((one) => one.innerText.trim())")
    assert named == ["twins/a/same\\u202e", "twins/b/same\\u202e"]
    assert page.text("h1") == named[0]
    assert page.text("[aria-current] .run-title") == named[0]
    assert page.evaluate("document.querySelectorAll('svg.chart .upright').length") >= 2
    # However long the list is, the chosen run is in sight.
    page.browser.show(1400, 260)
    page.open("#" + urlencode({"run": TWINS[1]}))
    page.wait_for_chart()
    top, bottom, scrolled = page.evaluate(
        "(({top, bottom}) => [top, bottom, scrollY])(document.querySelector('.chosen').getBoundingClientRect())"
    )
    assert 0 <= top < bottom <= 260
    assert scrolled == 0


def test_the_largest_and_smallest_numbers_are_drawn(page: Page) -> None:
    page.open("#run=extremes")
    page.until("document.querySelectorAll('path.curve').length === 6")
    assert page.at_step("huge", 4)["extremes"] == 1.7e308
    page.evaluate("document.getElementById('log').click()")
    page.browser.settle()
    assert "NaN" not in page.evaluate("[...document.querySelectorAll('svg.chart')].map((one) => one.outerHTML).join()")
    assert "0 or less" in page.text("[data-metric=zero] .odd-note")


@pytest.mark.slow
def test_curves_grow_while_a_run_is_going(page: Page, runs: Path) -> None:
    folder = RunFolder(write_run(runs / "live", 0, {}, planned=30))
    log = MetricsLog(folder.metrics)
    with folder.lock():
        log.append(1, {"critic/score/mean": 0.1})
        page.open("#run=live")
        page.wait_for_chart()
        page.until("document.querySelector('.run-head').innerText.includes('running')")
        for step in range(2, 13):
            log.append(step, {"critic/score/mean": step / 10})
        page.until("document.querySelector('.chart').dataset.last == 12")
        assert page.evaluate("document.querySelector('.latest .figure').dataset.value") == "1.2"
        # A new metric and samples appear without a reload.
        log.append(13, {"critic/score/mean": 1.3, "val/accuracy": 0.5})
        page.wait_for_chart("val/accuracy")
        page.key("2")
        page.until("document.querySelector('#sample-count').innerText.startsWith('0 responses')")
        append_text(folder.samples, json.dumps(sample(13)) + "\n")
        page.until("document.querySelector('#sample-count').innerText === '1 response in step 13'")
    page.key("1")
    page.until("!document.querySelector('.run-head').innerText.includes('running')")


def test_responses_token_by_token(page: Page) -> None:
    page.open("#run=long&tab=samples&step=2")
    page.until("document.querySelectorAll('.sample').length === 2")
    assert page.text("#sample-count") == "2 responses in step 2"
    head = page.text(".sample-head")
    for words in ("step 2", "score 1.000", "rule 1.000", "format 0.5000", "advantage +0.750", "ended by token"):
        assert words in head
    classes = "[...document.querySelector('.sample').querySelectorAll('.token')].map((one) => one.className.trim())"
    assert page.evaluate(classes) == ["token p0", "token p3", "token p6"], "99 %, 49.7 % and 0.25 %"
    page.choose("#colour", "advantage")
    assert page.evaluate(classes) == ["token down2", "token", "token up4"]
    page.evaluate("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.key("ArrowRight")
    readout = " ".join(page.text(".readout").split())
    assert readout == 'token 3 of 3 " 2" log-prob −6.000 (0.248 %) advantage +1.00'
    # The step before and after that has responses.
    page.click("#step-after")
    page.until("document.querySelector('#sample-count').innerText === '2 responses in step 4'")
    page.click("#step-before")
    page.until("document.querySelector('#sample-count').innerText === '2 responses in step 2'")


def test_a_conversation_by_speaker(page: Page, tmp_path: Path) -> None:
    """The speakers apart, the tokens of the model's turns as tokens, and the reward of each turn."""
    page.open("#run=short&tab=samples&step=7")
    page.until("document.querySelectorAll('.speaker').length === 4")
    speakers = page.evaluate("[...document.querySelectorAll('.speaker h4')].map((one) => one.innerText)")
    assert [" ".join(one.split()).upper() for one in speakers] == [
        "USER",
        "MODEL, TURN 1, 3 TRAINED TOKENS REWARD +0.250",
        "CALCULATOR",
        "MODEL, TURN 2, 2 TRAINED TOKENS REWARD +1.00",
    ]
    tokens = "[...document.querySelectorAll('.speaker')].map((one) => one.querySelectorAll('.token').length)"
    assert page.evaluate(tokens) == [0, 3, 0, 2], "what the environment wrote is text, not trained tokens"
    assert "the result is 4" in page.text(".speaker:nth-child(3)")
    assert "no such tool" in page.text(".speaker:nth-child(2)")
    assert HOSTILE in page.text(".speaker:nth-child(1)")
    assert "ended by completed" in page.text(".sample-head")
    hints = "[...document.querySelectorAll('.readout')].map((one) => one.innerText !== '')"
    assert page.evaluate(hints) == [True, False], "the hint stands once"
    page.choose("#colour", "")
    assert "It is 4" in page.text(".speaker:nth-child(4)")
    page.choose("#colour", "logprob")
    page.browser.screenshot(tmp_path / "conversation.png")


@pytest.mark.slow
def test_filters_and_search(page: Page) -> None:
    page.open("#run=long&tab=samples")
    page.until("document.querySelector('#sample-count').innerText === '1 response in step 6'")
    page.click("#all-steps")
    page.until("document.querySelector('#sample-count').innerText === '11 responses in all steps'")
    page.choose("#ended", "length")
    page.until("document.querySelectorAll('.sample').length === 1")
    assert page.text(".end") == "cut at the limit of 48 tokens"
    page.choose("#ended", "failed")
    page.until("document.querySelector('.end')?.innerText.startsWith('no score')")
    assert page.text(".end") == f"no score: function: {HOSTILE}"
    page.choose("#ended", "")
    page.choose("#sample-text", "What is 4 + 1")
    page.until("document.querySelector('.sample .turns pre')?.innerText === 'What is 4 + 1?'")
    assert page.text("#sample-count") == "1 response in all steps"
    page.choose("#sample-text", "nowhere in it")
    page.until("document.querySelector('#sample-count').innerText === '0 responses in all steps'")


def test_text_from_a_run_is_text(page: Page) -> None:
    page.open("#run=long&tab=samples&step=5")
    page.until("document.querySelectorAll('.sample').length === 4")
    page.choose("#colour", "")
    assert page.text(".sample .response-text") == HOSTILE
    assert page.text(".sample .turns h4") == HOSTILE
    second = page.evaluate("document.querySelectorAll('.response-text')[1].textContent")
    assert second == "\\x1b[31mred\\x1b[0m \\u202eright to left\\u202c", "shown, not obeyed"
    page.open("#run=long&tab=samples&step=6")
    page.until("document.querySelector('button.show-all')")
    assert page.evaluate("document.querySelector('.response-text').textContent.length") == 6_000
    page.click("button.show-all")
    page.until(f"document.querySelector('.response-text').textContent.length === {len(MEGABYTE)}")
    scrolled, width = page.widest()
    assert scrolled <= width
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('main script, main b + b script').length") == 0


def test_the_recipe_and_its_difference(page: Page) -> None:
    """Weighed as a comparison weighs it: what must not change a curve is folded away."""
    page.open("#run=long&tab=recipe&against=short")
    page.until("document.querySelectorAll('#difference tr[data-key]').length > 0")
    rows = "[...document.querySelectorAll('#difference > .card tr[data-key]')]"
    values = page.evaluate(f"{rows}.map((row) => [...row.cells].map((cell) => cell.innerText.split('\\n')[0]))")
    assert values == [
        ["blocks", "optim.lr", "0.0001", "0.0003"],
        ["blocks", "run.steps", "5000", "40"],
    ]
    assert "learning rate depends on the length" in page.text("#difference tr[data-key='run.steps']")
    folded = "[...document.querySelectorAll('#difference details tr[data-key]')].map((row) => row.dataset.key)"
    assert page.evaluate(folded) == ["run.name"]
    page.click("#difference details > summary")
    assert "harmless" in page.text("#difference details")
    assert "path: models/tiny" in page.text("#recipe pre")
    # What is damaged cannot be weighed, and is shown all the same.
    page.open("#run=damaged&tab=recipe&against=short")
    page.until("document.querySelector('#difference')?.innerText.includes('recipe.yaml is damaged')")
    assert "optim.lr" in page.text("#difference")


@pytest.mark.slow
def test_the_report_of_a_comparison_is_sandboxed(page: Page, server: RunViewer) -> None:
    page.open("#run=long&tab=report")
    page.until("document.querySelector('iframe')")
    assert server.token not in page.evaluate("document.querySelector('iframe').src")
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None, "of another origin"

    def title() -> str:
        return str(page.browser.evaluate_in_frame("document.querySelector('h1')?.innerText ?? ''") or "")

    wait_until(lambda: title().split() == ["✕", "out", "of", "step"])
    script = "fetch('/').then(() => 'answered', () => 'refused')"
    assert page.browser.evaluate_in_frame(script) == "refused", "its script can ask for nothing"
    page.browser.console.clear()  # of the refusal
    page.open("#run=short&tab=report")
    page.until("document.querySelector('#panel-report').innerText.includes('lockstep compare')")


@pytest.mark.slow
def test_everything_by_keyboard(page: Page) -> None:
    page.wait_for_chart()
    page.key("j")
    page.until("['short', 'live'].includes(document.querySelector('h1').innerText)")
    page.key("k")
    page.until("document.querySelector('h1').innerText === 'long'")
    page.key("f")
    page.type("shor")
    assert page.evaluate("document.querySelectorAll('button[data-run]').length") == 1
    page.key("Tab")
    page.key("x")
    page.wait_for_chart(runs=2)
    assert page.evaluate("document.activeElement.dataset.over") == "short"
    page.key("/")
    page.type("entropy")
    assert page.evaluate("[...document.querySelectorAll('.metric-card')].map((one) => one.dataset.metric)") == [
        "actor/entropy"
    ]
    page.key("Escape")
    page.wait_for_chart("actor/entropy")
    page.evaluate("document.querySelector('.metric-card').focus()")
    page.key("ArrowLeft")
    page.key("ArrowRight")
    assert page.evaluate("document.querySelector('.tooltip-step').dataset.value") == "5000"
    page.key("Enter")
    page.until("document.querySelector('.metric-card.large')")
    for number, tab in (("2", "samples"), ("3", "recipe"), ("4", "report"), ("1", "curves")):
        page.key(number)
        assert page.evaluate(f"!document.querySelector('#panel-{tab}').hidden")
        assert page.evaluate("document.querySelectorAll('[role=tabpanel]:not([hidden])').length") == 1
    page.key("?")
    assert page.evaluate("document.querySelector('#help').open")
    page.key("Escape")
    assert not page.evaluate("document.querySelector('#help').open")
    # Back to where the reader was.
    page.evaluate("history.back()")
    page.until("!document.querySelector('#panel-report').hidden")


@pytest.mark.parametrize("tab", ["curves", "samples&step=5", "recipe&against=short", "report"])
def test_narrow_and_dark(page: Page, tab: str) -> None:
    page.browser.show(480, scheme="dark")
    page.open(f"#run=long&with=short&tab={tab}")
    page.until("document.querySelector('.metric-card .chart, .sample, #recipe pre, iframe')")
    page.browser.settle()
    scrolled, width = page.widest()
    assert scrolled <= width <= 480
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 24)"
    if tab == "curves":
        page.browser.show(480, scheme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
