"""The metrics of a run by HTTP: the page byte for byte, a real run that is scraped, and the dashboard for it."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from conftest import run as run_command
from conftest import write_online_recipe, write_sft_recipe
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.trackers.prometheus import PrometheusSink, metric_name, split_address
from lockstep.train.callbacks import Callback, Callbacks, StartOptions, TrainControl, TrainState
from lockstep.train.start import run_recipe, train

DASHBOARD = Path(__file__).parents[2] / "examples" / "cluster" / "grafana.json"
RECIPE: dict[str, Any] = {"method": "sft", "model": {"path": 'a "model"\\of\nmine'}}


def started(monkeypatch: pytest.MonkeyPatch) -> PrometheusSink:
    monkeypatch.setattr("lockstep.version.package_version", lambda: "1.2")
    monkeypatch.setattr("lockstep.run.trackers.prometheus.time.time", lambda: 1700000000.25)
    sink = PrometheusSink(0, Console.silent())
    sink.start("my run", RECIPE, 0)
    return sink


def address(sink: PrometheusSink) -> str:
    assert sink._server is not None
    return f"http://127.0.0.1:{sink._server.server_address[1]}"


def test_the_page_is_prometheus_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the format's description has it: escapes in labels, NaN and infinities in words, one type a name."""
    sink = started(monkeypatch)
    try:
        sink.log(3, {"train/loss": 2.5, "val/acc@2": 0.125})
        sink.log(4, {"train/loss": math.nan, "a-b": math.inf, "a/b": -math.inf, "train/tokens": 1e6})
        wanted = r"""# HELP lockstep_info Method, model and version of the run; the value is always 1
# TYPE lockstep_info gauge
lockstep_info{run="my run",method="sft",model="a \"model\"\\of\nmine",version="1.2"} 1.0
# HELP lockstep_step Newest logged step
# TYPE lockstep_step gauge
lockstep_step{run="my run"} 4.0
# HELP lockstep_last_step_timestamp_seconds Unix time at which the newest step was logged
# TYPE lockstep_last_step_timestamp_seconds gauge
lockstep_last_step_timestamp_seconds{run="my run"} 1700000000.25
# TYPE lockstep_train_loss gauge
lockstep_train_loss{run="my run",metric="train/loss"} NaN
# TYPE lockstep_val_acc_at_2 gauge
lockstep_val_acc_at_2{run="my run",metric="val/acc@2"} 0.125
# TYPE lockstep_a_b gauge
lockstep_a_b{run="my run",metric="a-b"} +Inf
lockstep_a_b{run="my run",metric="a/b"} -Inf
# TYPE lockstep_train_tokens gauge
lockstep_train_tokens{run="my run",metric="train/tokens"} 1000000.0
"""
        with urllib.request.urlopen(f"{address(sink)}/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.read().decode() == wanted
        with pytest.raises(HTTPError, match="404"):
            urllib.request.urlopen(address(sink))
    finally:
        sink.close(ok=True)
    with pytest.raises(URLError):
        urllib.request.urlopen(f"{address(sink)}/metrics")


def test_prometheus_own_client_reads_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    sink = started(monkeypatch)
    try:
        sink.log(3, {"train/loss": 2.5, "a-b": math.inf, "a/b": -math.inf})
        families = {family.name: family for family in parser.text_string_to_metric_families(sink.page())}
    finally:
        sink.close(ok=True)
    [loss] = families["lockstep_train_loss"].samples
    assert (loss.labels, loss.value) == ({"run": "my run", "metric": "train/loss"}, 2.5)
    assert families["lockstep_info"].samples[0].labels["model"] == RECIPE["model"]["path"]
    assert [sample.value for sample in families["lockstep_a_b"].samples] == [math.inf, -math.inf]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_promtool_accepts_a_run_s_page(pages: dict[str, Scraper]) -> None:
    for scraper in pages.values():
        done = subprocess.run(["promtool", "check", "metrics"], input=scraper.page, capture_output=True, text=True)
        # 1 would be a page that cannot be read; 3 is about style (help texts, `timing_s` for seconds).
        assert done.returncode in (0, 3), done.stderr


def test_a_port_that_is_taken_is_refused_before_training_and_not_by_a_plan(
    recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        word = f"log.prometheus={taken.getsockname()[1]}"
        with pytest.raises(Refusal, match=r"log\.prometheus.*cannot listen on 127\.0\.0\.1.*in use"):
            train(load_recipe(str(recipe_file), [word]))
        assert not (recipe_file.parent / "runs").exists()
        assert run_command("plan", recipe_file, word) == 0
    capsys.readouterr()


def test_what_is_no_address_is_refused(recipe_file: Path) -> None:
    for wrong in ("host", "70000", "localhost:x", "-1"):
        with pytest.raises(Refusal, match=r"log\.prometheus.*must be a port, or HOST:PORT"):
            load_recipe(str(recipe_file), [f"log.prometheus={wrong}"])
    assert split_address(load_recipe(str(recipe_file), ["log.prometheus=9400"]).log.prometheus or 0) == (
        "127.0.0.1",
        9400,
    )
    assert split_address("[::1]:9400") == ("::1", 9400)
    assert split_address("0.0.0.0:9400") == ("0.0.0.0", 9400)


class Scraper(Callback):
    """Reads the page after the last step has been logged, as Prometheus does."""

    def __init__(self, port: int):
        self.port, self.page = port, ""

    def on_log(self, state: TrainState, control: TrainControl) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            self.page = answer.read().decode()
        self.metrics = dict(state.metrics)


def scraped(recipe: Path, *words: str) -> Scraper:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scraper = Scraper(port)
    settings = [*words, f"log.prometheus={port}", "run.steps=2", "run.export=false"]
    run_recipe(load_recipe(str(recipe), settings), StartOptions(callbacks=Callbacks([scraper])))
    return scraper


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Scraper]:
    """Of an SFT and of a GRPO run."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "sft").mkdir()
    sft = scraped(write_sft_recipe(folder / "sft", tiny_folder), "val.every=1", "optim.warmup=1")
    grpo = scraped(write_online_recipe(folder, tiny_folder), "algorithm.rollout_correction.weight=token")
    return {"sft": sft, "grpo": grpo}


def series(page: str) -> dict[str, float]:
    found = re.findall(r'^\w+\{.*metric="([^"]*)"\} (\S+)$', page, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_serves_what_it_logs(pages: dict[str, Scraper], kind: str) -> None:
    scraper = pages[kind]
    assert "lockstep_step{" in scraper.page
    assert re.search(r'^lockstep_step\{run="run"\} 2\.0$', scraper.page, re.MULTILINE)
    told = series(scraper.page)
    assert len(scraper.metrics) > 5
    assert {name: told[name] for name in scraper.metrics} == scraper.metrics


def expressions(panel: Any) -> list[str]:
    """All queries of the dashboard."""
    if isinstance(panel, dict):
        own = [panel["expr"]] if "expr" in panel else []
        return own + [found for value in panel.values() for found in expressions(value)]
    return [found for value in panel for found in expressions(value)] if isinstance(panel, list) else []


def test_every_query_of_the_dashboard_names_an_exported_metric(pages: dict[str, Scraper]) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    exported = {
        name for scraper in pages.values() for name in re.findall(r"^# TYPE (\w+) ", scraper.page, re.MULTILINE)
    }
    queries = expressions(board["panels"])
    assert len(queries) >= len(board["panels"]) >= 8
    for query in queries:
        named = set(re.findall(r"\blockstep_\w+", query))
        assert named, query
        assert named <= exported, f"{query}: no run exports {named - exported}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert metric_name("train/loss") in exported
