"""What the page of runs costs on a large run: first paint, first curves, all curves, a step's responses, memory.

    python bench/view.py                               # 10,000 steps x 200 metrics, 100,000 responses
    python bench/view.py --steps 1000 --metrics 50 --samples 5000 --folder /tmp/view-bench

A real headless Chromium (`tools/install_chromium.sh`) opens the page of `lockstep view`, a process of its own. Times
are the browser's, from the beginning of the navigation: first paint (its own entry), the first curve in the document,
and the moment at which the whole log has been read. The run is written once, and kept where `--folder` is given.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from browser import Browser, find_chromium
from hang import wait_until
from view_runs import sample, write_run

# Noted by the page itself while it loads: whoever asks from outside comes late.
WATCH = """
  globalThis.noted = {};
  const note = (name, there) => { if (!(name in noted) && there) noted[name] = performance.now(); };
  new MutationObserver(() => {
    note("list", document.querySelector("button[data-run]"));
    note("curve", document.querySelector("path.curve"));
    note("sample", document.querySelector("article.sample"));
  }).observe(document, { childList: true, subtree: true });
"""
WHOLE = "document.querySelector('.chart') !== null && document.getElementById('progress').textContent === ''"
SEARCH = """(() => {
  const box = document.getElementById("sample-text");
  box.value = "right. NUMBER";
  box.dispatchEvent(new Event("input"));
  globalThis.began = performance.now();
})()"""


def large_run(folder: Path, steps: int, metrics: int, samples: int) -> Path:
    def curve(number: int) -> Any:
        return lambda step: math.sin(step / 300 + number) + ((step * 7919 * (number + 1)) % 1000) / 5000

    groups = ("actor", "critic", "response_length", "timing_s", "perf", "val")
    names = {f"{groups[i % len(groups)]}/part_{i}/mean": curve(i) for i in range(metrics - 1)}
    text = "It is the sum of the two numbers, which one finds digit by digit from the right. " * 6
    each = max(1, samples // steps)
    lines = (sample(1 + i // each, i % each, response=f"{text}{i}") for i in range(samples))
    return write_run(folder, steps, {"critic/score/mean": curve(0), **names}, lines)


def memory_of(process: int) -> float:
    """Peak MB of resident memory, where the system tells it."""
    status = Path(f"/proc/{process}/status")
    found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")] if status.exists() else []
    return int(found[0].split()[1]) / 1024 if found else math.nan


def measure(run: Path, samples: int) -> dict[str, float]:
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium found: sh tools/install_chromium.sh")
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "view", str(run.parent)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    link = next(line.strip() for line in server.stdout if line.startswith("http"))
    found = {"server ready, s": time.perf_counter() - start}
    try:
        with Browser(program) as browser:
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            browser.show(1400)
            browser.open(link)
            for name in ("cold", "warm"):
                if name == "warm":
                    browser.open("about:blank")
                    browser.open(link)
                wait_until(lambda: bool(browser.evaluate("noted.curve")))
                paint = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                found[f"first paint, {name}, ms"] = paint
                found[f"list of runs, {name}, ms"] = browser.evaluate("noted.list")
                found[f"first curve, {name}, ms"] = browser.evaluate("noted.curve")
                wait_until(lambda: bool(browser.evaluate(WHOLE)))
                found[f"whole log read and drawn, {name}, ms"] = browser.evaluate("performance.now()")
            browser.open("about:blank")
            browser.open(f"{link}#run={run.name}&tab=samples")
            wait_until(lambda: bool(browser.evaluate("noted.sample")))
            found["responses of the last step, ms"] = browser.evaluate("noted.sample")
            browser.evaluate("document.getElementById('all-steps').click()")
            browser.evaluate(SEARCH.replace("NUMBER", str(samples - 3)))
            done = "document.getElementById('sample-count').textContent === '1 response in all steps'"
            wait_until(lambda: bool(browser.evaluate(done)))
            found["search through all responses, ms"] = browser.evaluate("performance.now() - began")
            if browser.console:
                raise SystemExit(f"the page complained: {browser.console}")
        found["memory of the server at its peak, MB"] = memory_of(server.pid)
    finally:
        server.terminate()
        server.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="Where the run is written, and kept.")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = (words.folder or Path(temporary)) / "large"
        if not run.exists():
            large_run(run, words.steps, words.metrics, words.samples)
        sizes = {f"{name}, MB": (run / name).stat().st_size / 1e6 for name in ("metrics.jsonl", "samples.jsonl")}
        found = {**sizes, **measure(run, words.samples)}
    if words.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:42}{value:12,.2f}" if value < 10 else f"{name:42}{value:12,.0f}")


if __name__ == "__main__":
    main()
