"""The server of the run viewer: access, requests, and a fast start."""

from __future__ import annotations

import fnmatch
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import lockstep
from hang import HANG
from lockstep.commands.view import view_runs
from lockstep.errors import Refusal
from lockstep.parity.compare.logs.run_logs import read_evidence
from lockstep.parity.compare.run_setup import setup_differences
from lockstep.serve.viewer import RunData, RunViewer
from view_runs import sample, write_run

HOUSE = Path(lockstep.__file__).parent
IMAGE = f"{'0' * 32}.png"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunViewer]:
    folder = tmp_path_factory.mktemp("view")
    root = folder / "runs"
    run = write_run(
        root / "one", 20, {"critic/score/mean": lambda step: step / 20}, [sample(step) for step in range(20)]
    )
    (run / "report.html").write_text("<h1>report</h1>")
    (run / "images").mkdir()
    (run / "images" / IMAGE).write_bytes(b"png")
    write_run(folder / "outside", 3, {"secret": float}, [sample(1, response="secret")])
    (root / "link").symlink_to(folder / "outside")
    other = write_run(root / "two", 2, {"a": float})
    (other / "samples.jsonl").unlink()
    (other / "samples.jsonl").symlink_to(folder / "outside" / "samples.jsonl")
    (other / "report.html").symlink_to("/etc/passwd")
    server = RunViewer(root)
    with server.in_thread():
        yield server


def fetch(
    server: RunViewer, path: str, method: str = "GET", token: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
    try:
        connection.request(method, f"/{server.token if token is None else token}/{path}", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def fetch_json(server: RunViewer, path: str) -> dict[str, Any]:
    status, _, content = fetch(server, path)
    assert status == 200, content
    return dict(json.loads(content))


def test_images_of_samples(server: RunViewer) -> None:
    status, headers, content = fetch(server, f"api/image?run=one&file={IMAGE}")
    assert (status, content) == (200, b"png")
    assert headers["Content-Type"].startswith("image/png")
    for name in ("../metrics.jsonl", f"{'1' * 32}.png", ""):
        assert fetch(server, f"api/image?run=one&file={quote(name)}")[0] == 404


def test_only_this_machine_can_ask(server: RunViewer) -> None:
    assert [one.getsockname()[0] for one in server._sockets] == ["127.0.0.1"]
    assert server.link.startswith("http://127.0.0.1:")


def test_without_the_token_there_is_nothing(server: RunViewer) -> None:
    for token in (
        "",
        "x",
        server.token[:-1],
        server.token + "x",
        server.token.swapcase(),
        quote("é"),
        server.report_token,
    ):
        for path in ("", "app.js", "api/runs", "api/curves?run=one"):
            status, _, content = fetch(server, path, token=token)
            assert status == 403, (token, path)
            assert b"one" not in content.replace(b"the one that", b"")
    assert fetch(server, "", token=server.token)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "[::2]:80", "10.0.0.1"]
)
def test_a_name_that_points_here_from_elsewhere_gets_nothing(server: RunViewer, host: str) -> None:
    status, _, content = fetch(server, "api/runs", headers={"Host": host})
    assert status == 403
    assert b"critic" not in content


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:8080"])
def test_the_names_of_this_machine_are_answered(server: RunViewer, host: str) -> None:
    """Whatever the port: a tunnel has another one on the reader's side."""
    assert fetch(server, "api/runs", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "NONSENSE"])
def test_nothing_but_get(server: RunViewer, method: str) -> None:
    assert fetch(server, "api/runs", method=method)[0] == 405


def test_the_page_may_run_only_its_script(server: RunViewer) -> None:
    for path in ("", "app.js", "style.css", "api/runs", "nothing"):
        _, headers, _ = fetch(server, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert not any(name.lower().startswith("access-control") for name in headers)
    page = fetch(server, "")[2].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=|https?://", page)


def test_a_report_has_another_origin_than_the_page(server: RunViewer) -> None:
    status, headers, content = fetch(server, "report?run=one", token=server.report_token)
    assert (status, content) == (200, b"<h1>report</h1>")
    assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in headers["Content-Security-Policy"]
    assert fetch(server, "report?run=one")[0] == 404, "the page's token is not for reports"


def test_no_way_leads_out_of_the_folder(server: RunViewer) -> None:
    names = ["../outside", "link", "one/../../outside", "/etc", "..", ".", "", "one\0", "%2e%2e", "two/../one"]
    for name in names:
        for question in ("run", "curves", "samples", "sample", "recipe"):
            status, _, content = fetch(server, f"api/{question}?run={quote(name)}")
            assert status == 404, (question, name)
            assert b"secret" not in content
        assert fetch(server, f"report?run={quote(name)}", token=server.report_token)[0] == 404
    for path in ("../../etc/passwd", "api/../../x", "page.css", "server.py", "api/", "api", "api/runs/", "%2e%2e/x"):
        assert fetch(server, path)[0] == 404, path
    # Links inside a run.
    assert fetch(server, "api/samples?run=two")[0] == 404
    assert fetch(server, "report?run=two", token=server.report_token)[0] == 404
    assert "link" not in [run["run"] for run in fetch_json(server, "api/runs")["runs"]]


@pytest.mark.parametrize(
    "question",
    [
        "curves?run=one&metric=critic/score/mean&buckets=x",
        "curves?run=one&first=9&last=3",
        "curves?run=one&first=1e3",
        f"curves?run=one&first={'9' * 5000}",
        "curves?run=one&half=٣x",
        "samples?run=one&step=later",
        "samples?run=one&least=many",
        "samples?run=one&least=nan",
        "sample?run=one&offset=3",
        "samples",
        "curves?" + "&".join(["run=one"] * 300),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(server: RunViewer, question: str) -> None:
    fetch_json(server, "api/run?run=one")
    status, _, content = fetch(server, f"api/{quote(question, safe='?=&/')}")
    assert status == 404
    assert json.loads(content)["error"]


def test_what_is_no_request_ends_the_connection(server: RunViewer) -> None:
    for words in (b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00" * 40 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as client:
            client.sendall(words)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while block := client.recv(4096):
                answer += block
        assert b"critic" not in answer
    assert fetch(server, "api/runs")[0] == 200


def test_curves_of_a_run(server: RunViewer) -> None:
    facts = fetch_json(server, "api/run?run=one")
    assert (facts["metrics"], facts["read"], facts["range"]) == (["critic/score/mean"], 1.0, [1, 20])
    answer = fetch_json(server, "api/curves?run=one&run=two&metric=critic/score/mean&metric=nothing")
    assert answer["domain"] == [1, 20]
    assert answer["curves"]["critic/score/mean"]["one"]["values"] == [step / 20 for step in range(1, 21)]
    assert answer["curves"]["nothing"] == {}
    answer = fetch_json(server, "api/curves?run=one&metric=critic/score/mean&first=5&last=8")
    assert answer["curves"]["critic/score/mean"]["one"]["steps"] == [4, 5, 6, 7, 8, 9]


def test_responses_of_a_run(server: RunViewer) -> None:
    answer = fetch_json(server, "api/samples?run=one&step=last")
    assert [one["step"] for one in answer["samples"]] == [19]
    assert (answer["before"], answer["after"]) == (18, None)
    assert [one["step"] for one in fetch_json(server, "api/samples?run=one&text=what+is+7+")["samples"]] == [7]


@pytest.mark.slow
def test_files_that_no_run_wrote_spoil_no_other_run(tmp_path: Path) -> None:
    """A folder may come from anywhere. Each of these once broke the list of runs or a connection, or never ended."""
    root = tmp_path / "runs"
    write_run(root / "good", 3, {"critic/score/mean": float})
    anchors = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefghi", "bcdefghij", strict=True)
    )
    recipes = {
        "endless": f"{anchors}method: *j\nmodel: {{path: *j}}\n",
        "wide": f"a: &a [{'1, ' * 9_000}1]\nb: [{'*a, ' * 900}*a]\n",
        "nan": "run: {steps: .nan}\n",
        "date": "run: {steps: 2026-01-01}\n",
        "hex": f"run: {{steps: 0x{'f' * 9000}}}\n",
        "list": "- 1\n",
    }
    for name, text in recipes.items():
        (write_run(root / name, 1, {"critic/score/mean": float}) / "recipe.yaml").write_text(text)
    (root / "good" / "metrics.jsonl").open("a").write('{"step": 4, "data": {"critic/score/mean": 1e999, "x": [1]}}\n')
    odd = [{"prompt": 5}, {"prompt": None, "score": "x"}, {"response": 7, "prompt": [3]}, {"token_details": [1]}]
    lines = [json.dumps({"step": 1, **one}) for one in odd] + ['{"step": 1, "prompt": "find", "score": 1e999}']
    (root / "good" / "samples.jsonl").write_text("\n".join(lines) + "\n")
    os.mkdir(os.fsencode(root) + b"/\xff")
    (root / os.fsdecode(b"\xff") / "recipe.yaml").write_text("method: sft\n")
    server = RunViewer(root)
    with server.in_thread():

        def fetch_json(path: str) -> Any:
            status, _, body = fetch(server, path)
            assert status == 200, (path, body)
            return json.loads(body)

        listed = fetch_json("api/runs")
        assert {one["run"]: one.get("steps") for one in listed["runs"]} == {"good": 3} | dict.fromkeys(recipes)
        assert any("rename it" in one for one in listed["left_out"])
        assert [one["value"] for one in listed["runs"] if one["run"] == "good"] == ["inf"]
        assert [one["score"] for one in fetch_json("api/samples?run=good&text=find")["samples"]] == ["inf"]
        for name in recipes:
            fetch_json(f"api/run?run={name}")
            assert fetch_json(f"api/recipe?run={name}")["problems"] or name in ("nan", "date", "list")
            found = fetch_json(f"api/difference?run=good&against={name}")
            assert "problem" in found or found["differences"]


def test_differences_are_weighed_as_a_comparison_weighs_them(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-4), ("b", 3e-4)):
        write_run(tmp_path / name, 2, {"x": float}, lr=lr)
    answers = RunData(tmp_path)
    found = answers.difference({"run": ["a"], "against": ["b"]})
    by_compare, unknown = setup_differences(*(read_evidence(tmp_path / name) for name in "ab"))
    assert [(one["key"], one["weight"], one["effect"]) for one in found["differences"]] == [
        (one.key, one.weight, one.effect) for one in by_compare
    ]
    assert [(one["key"], one["a"], one["b"]) for one in found["differences"]] == [
        ("optim.lr", "0.0001", "0.0003"),
        ("run.name", '"a"', '"b"'),
    ]
    assert found["unknown"] == unknown
    (tmp_path / "b" / "recipe.yaml").unlink()
    assert answers.difference({"run": ["a"], "against": ["b"]}) == {"problem": "b has no recipe.yaml"}


def test_the_command_starts_without_what_is_heavy() -> None:
    code = "import sys, lockstep.commands.view; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "pydantic", "numpy", "asyncio"}
    assert not heavy & {name.split(".")[0] for name in done.stdout.split()}


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 2, {"train/loss": float})
    command = [sys.executable, "-m", "lockstep", "view", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"1 run in {tmp_path}\n"
        parts = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=HANG)
        connection.request("GET", f"{parts.path}api/runs")
        assert [run["run"] for run in json.loads(connection.getresponse().read())["runs"]] == ["one"]
        connection.close()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=HANG)
    assert (process.returncode, error) == (0, "")


def test_the_folder_and_the_port_are_checked_first(tmp_path: Path, server: RunViewer) -> None:
    with pytest.raises(Refusal, match="does not exist"):
        view_runs(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="is a file"):
        view_runs(tmp_path / "file")
    with pytest.raises(Refusal, match="cannot listen"):
        view_runs(tmp_path, server.port)


def test_a_wheel_has_the_files_of_the_pages() -> None:
    """Only pyproject.toml lists what setuptools packs."""
    project = (HOUSE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"([^"]+)"', re.findall(r"package-data\]\nlockstep = \[([^\]]+)\]", project)[0])
    files = [path.relative_to(HOUSE) for path in HOUSE.rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert {str(path.parent) for path in files} == {"page"}
    for path in files:
        assert any(fnmatch.fnmatch(str(path), pattern) for pattern in patterns), path
