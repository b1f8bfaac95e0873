"""Makes the screenshots of docs/ from real runs, with a headless Chromium (tools/install_chromium.sh).

python tools/screenshots.py               docs/compare.png and docs/view.png, from the runs in docs/support-appendix
python tools/screenshots.py --runs runs   docs/samples.png too, from the run with samples that is newest in runs/
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
from browser import Browser, find_chromium  # noqa: E402

PAIR = ROOT / "docs" / "support-appendix" / "grpo-gsm8k-kernels"
"""GRPO on GSM8K on one H200: plain torch and fused kernels, two runs of each."""
LOCKSTEP = [sys.executable, "-m", "lockstep"]


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """Serves a folder of runs, and yields the address of the page."""
    server = subprocess.Popen([*LOCKSTEP, "view", "."], stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert server.stdout is not None
        found = next(found for line in server.stdout if (found := re.search(r"http://\S+", line)))
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def wait_for(browser: Browser, script: str) -> None:
    """Waits until the page has what `script` looks for."""
    deadline = time.monotonic() + browser.timeout
    while not browser.evaluate(script):
        if time.monotonic() > deadline:
            raise SystemExit(f"the page never had: {script}")
        time.sleep(0.2)
    browser.settle()


def hide_folder(browser: Browser) -> None:
    """Replaces the path on this machine."""
    browser.evaluate("document.getElementById('folder').textContent = 'runs'")
    browser.settle()


def compare_picture(browser: Browser, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        words = ["plain-1", "fused-1", "--repeat", "plain-2", "--repeat", "fused-2", "--steps", "1:17"]
        subprocess.run([*LOCKSTEP, "compare", *words, "--report", str(report)], check=False, cwd=PAIR)
        browser.open(report.as_uri())
        wait_for(browser, "document.querySelector('svg path') !== null")
        browser.screenshot(out)


def view_picture(browser: Browser, out: Path) -> None:
    with viewer(PAIR) as address:
        browser.open(address)
        wait_for(browser, "document.querySelectorAll('svg path').length > 3")
        box = "document.querySelector('input[type=checkbox]:not(#log):not(:disabled):not(:checked)')"
        while browser.evaluate(f"{box} !== null"):  # shows the curves of all runs
            browser.evaluate(f"{box}.click()")
            browser.settle()
        time.sleep(1)
        hide_folder(browser)
        browser.screenshot(out)


def sample_picture(browser: Browser, runs: Path, out: Path) -> None:
    newest = max(runs.glob("*/samples.jsonl"), key=lambda path: path.stat().st_mtime).parent
    with viewer(newest) as address:
        browser.open(address)
        wait_for(browser, "document.querySelectorAll('svg path').length > 3")
        browser.evaluate(
            "[...document.querySelectorAll('a, button')].find((e) => /samples/i.test(e.textContent)).click()"
        )
        wait_for(browser, "/advantage/i.test(document.body.textContent)")
        time.sleep(1)
        hide_folder(browser)
        browser.screenshot(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder with a run that has samples")
    parser.add_argument("--only", choices=("compare", "view", "samples"), help="make only this picture")
    words = parser.parse_args()
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium found: sh tools/install_chromium.sh")
    docs = ROOT / "docs"
    with Browser(program) as browser:
        browser.show(1200, 900)
        if words.only in (None, "compare"):
            compare_picture(browser, docs / "compare.png")
        if words.only in (None, "view"):
            view_picture(browser, docs / "view.png")
        if words.runs is not None and words.only in (None, "samples"):
            sample_picture(browser, words.runs, docs / "samples.png")


if __name__ == "__main__":
    main()
