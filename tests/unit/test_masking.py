"""Secrets: refused in recipes, referred to by name, and in nothing that a run writes, prints or shows."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from conftest import question_rows, write_jsonl
from hang import HANG
from lockstep import masking
from lockstep.errors import Problem, Refusal
from lockstep.launch.process_pool import SupervisedProcess
from lockstep.masking import (
    Unresolved,
    comparable,
    expanded,
    masked,
    masked_tree,
    masked_words,
    secrets_in,
    sources,
    variables,
)
from lockstep.parity.compare.run_setup import _unlike
from lockstep.recipe import load_recipe
from lockstep.reward.remote import RemotePart
from lockstep.rollout.servers.server_client import is_address
from lockstep.rollout.servers.server_process import ServerProcess
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder, describe_environment
from lockstep.run.output import ONLINE_COLUMNS, write
from lockstep.serve.viewer_runs import recipe_of
from lockstep.train.online import train_online
from lockstep.train.resume import refuse_changed_recipe
from reward_servers import asked, by_length, opened, serving

SECRET = "hunter2-and-more"


@pytest.fixture(autouse=True)
def nothing_concealed() -> Any:
    yield
    masking._concealed.clear()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://user:{SECRET}@host:8000/score", "http://user:***@host:8000/score"),
        (f"http://:{SECRET}@host", "http://:***@host"),
        ("http://user:p@ss/word@host/x", "http://user:***@host/x"),
        (f"http://{SECRET}@host", "http://***@host"),
        (f"https://host/s?n=1&api_key={SECRET}&m=2", "https://host/s?n=1&api_key=***&m=2"),
        (f"https://host/s?X-Amz-Signature={SECRET}", "https://host/s?X-Amz-Signature=***"),
        (f"https://host/s?accessToken={SECRET}#end", "https://host/s?accessToken=***#end"),
        (f"two http://a:{SECRET}@b and http://c:{SECRET}@d", "two http://a:***@b and http://c:***@d"),
        ("key hf_" + "a" * 34, "key ***"),
        # Nothing to mask.
        ("http://user@host/x", "http://user@host/x"),
        ("http://host:8000/@name?max_tokens=5&monkey=1", "http://host:8000/@name?max_tokens=5&monkey=1"),
        ("http://host:8000", "http://host:8000"),
        ("mail me@host.org: a key=value", "mail me@host.org: a key=value"),
        ("http://user:${env:PW}@host?token=${file:/run/key}", "http://user:${env:PW}@host?token=${file:/run/key}"),
        ("http://user:${file:/run/key}@host", "http://user:${file:/run/key}@host"),
        ("http://${file:/run/key}@host/x", "http://${file:/run/key}@host/x"),
        (f"http://${{env:A}}:{SECRET}@host/x", "http://${env:A}:***@host/x"),
        ("http://u:x${env:A}@h?key=${env:B}", "http://u:***@h?key=${env:B}"),
    ],
)
def test_addresses_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


def test_command_lines_are_masked() -> None:
    words = ["train", f"reward.remote=http://u:{SECRET}@h", "--api-key", SECRET, f"--hf-token={SECRET}", "--keys", "a"]
    words += [f"reward.arguments.api_key={SECRET}", "rollout.n=2", "--use_wandb", SECRET]
    assert masked_words(words) == [
        "train", "reward.remote=http://u:***@h", "--api-key", "***", "--hf-token=***", "--keys", "a",
        "reward.arguments.api_key=***", "rollout.n=2", "--use_wandb", "***",
    ]  # fmt: skip


def test_trees_are_masked() -> None:
    tree = {
        "env": {"HF_TOKEN": SECRET, "LEVEL": "1"},
        "args": ["--api-key", SECRET],
        "url": [f"http://u:{SECRET}@h"],
        "n": 1,
    }
    assert masked_tree(tree) == {
        "env": {"HF_TOKEN": "***", "LEVEL": "1"}, "args": ["--api-key", "***"], "url": ["http://u:***@h"], "n": 1
    }  # fmt: skip


def test_what_is_compared_has_no_secret() -> None:
    forms = [
        f"http://user:{SECRET}@host/score?n=1&api_key={SECRET}",
        "http://user:***@host/score?n=1&api_key=***",
        "http://user:${env:PW}@host/score?n=1&api_key=${file:/run/key}",
        "http://user:${file:/run/key}@host/score?n=1",
        "http://${file:/run/key}@host/score?n=1",
        "http://host/score?n=1",
    ]
    assert {comparable(form) for form in forms} == {"http://host/score?n=1"}
    assert comparable("http://host:8000/@name") == "http://host:8000/@name"
    assert comparable("http://other/score?n=1") != comparable(forms[0])


RECIPE = """method: grpo
model: {path: model}
data: {train: rows.jsonl}
run: {name: r, steps: 1}
"""


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("reward.remote", f"http://user:{SECRET}@host", "reward.remote"),
        ("reward.remote", f"[http://a, 'http://host/?api_key={SECRET}']", "reward.remote"),
        ("rollout.url", f"http://user:{SECRET}@host", "rollout.url"),
        ("rollout.server.env", f"{{HF_TOKEN: {SECRET}}}", "rollout.server.env.HF_TOKEN"),
        ("rollout.server.args", f"[--api-key, {SECRET}]", "rollout.server.args"),
        ("rollout.server.args", f"[--api-key={SECRET}]", "rollout.server.args"),
        ("reward.arguments", f"{{api_key: {SECRET}}}", "reward.arguments.api_key"),
        ("run.name", "sk-" + "a" * 30, "run.name"),
        ("log.project", "'${env:PROJECT}'", "log.project"),
    ],
)
def test_a_secret_in_a_recipe_is_refused(key: str, value: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    with pytest.raises(Refusal) as refused:
        load_recipe(str(file), [f"{key}={value}"])
    remedies = [problem.remedy for problem in refused.value.problems if problem.where == where]
    ways = ("${env:", "references work in", "LOCKSTEP_SERVER_KEY")
    assert any(way in remedy for way in ways for remedy in remedies)
    assert SECRET not in str(refused.value)


def test_references_are_no_secrets(tmp_path: Path) -> None:
    assert list(secrets_in({"rollout": {"server": {"args": []}}})) == []
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    recipe = load_recipe(str(file), ["reward.remote=http://u:${env:PW}@host/?key=${file:/run/key}", "reward.workers=1"])
    assert recipe.reward.remote == "http://u:${env:PW}@host/?key=${file:/run/key}"
    assert variables(recipe.model_dump(mode="json")) == {"PW"}
    assert sources({"reward": {"remote": recipe.reward.remote}}) == {
        "reward.remote": "*** from the environment variable PW and the file /run/key"
    }
    assert list(secrets_in({"reward": {"arguments": {"answer_key": "a", "end_token": "</s>", "n": 1}}})) == []


def test_references_are_read_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\n")
    monkeypatch.setenv("REWARD_PASSWORD", "open-sesame")
    address = f"http://user:${{env:REWARD_PASSWORD}}@host/?key=${{file:{tmp_path}/key}}"
    assert is_address(address.partition("?")[0])
    assert expanded(address) == f"http://user:open-sesame@host/?key={SECRET}"
    # From now on nothing prints them, in whatever form.
    assert str(Problem("x", f"the server says: bad key {SECRET}", code="server-failed")).endswith("bad key ***")
    for wrong, why in (("${env:NOT_THERE}", "NOT_THERE is not set"), ("${file:/not/there}", "cannot be read")):
        with pytest.raises(Unresolved, match=why):
            expanded(wrong)
    with pytest.raises(Unresolved, match="was masked"):
        expanded("http://user:***@host")


def test_the_console_prints_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", SECRET)
    expanded("${env:OWN_KEY}")
    write(f"what a server sent: {SECRET}")
    assert capsys.readouterr().out == "what a server sent: ***\n"


def test_endpoints_get_their_secrets_and_failures_do_not_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_PASSWORD", SECRET)

    def broken(number: int, items: list[dict]) -> tuple[int, bytes]:
        return (500, f"wrong password {SECRET}".encode()) if number > 1 else by_length(number, items)

    with serving(broken) as server:
        host = server.address.removeprefix("http://")
        with opened(f"http://user:${{env:REWARD_PASSWORD}}@{host}?api_key=${{env:REWARD_PASSWORD}}") as part:
            assert asked(part, ["ab"]) == [{"remote": 2.0}]
            why = asked(part, ["ab"])[0].why
        path, authorization = server.heard[0]
    assert path == f"/score?api_key={SECRET}"
    assert base64.b64decode(authorization.removeprefix("Basic ")).decode() == f"user:{SECRET}"
    assert SECRET not in why
    assert "user:${env:REWARD_PASSWORD}@" in why
    with pytest.raises(Refusal, match=r"reward\.remote.*NOT_THERE is not set"):
        RemotePart("http://${env:NOT_THERE}@host", part._settings)


def test_started_processes_show_no_arguments(tmp_path: Path) -> None:
    """Everybody on the machine can read the command line of a process."""
    process = SupervisedProcess("lockstep.launch.supervisor:run_command", (["sleep", "60"], {"VLLM_API_KEY": SECRET}))
    try:
        line = b""
        while not line and process.alive:  # empty for a moment while the program is being loaded
            line = Path(f"/proc/{process._process.pid}/cmdline").read_bytes()
        assert b"lockstep.launch.supervisor" in line
        assert SECRET.encode() not in line
    finally:
        process.kill()
    server = ServerProcess(
        ["sh", "-c", 'echo "got $OWN_NAME"'], {"OWN_NAME": "it", "PATH": os.environ["PATH"]}, tmp_path / "log" / "s"
    )
    server._process._process.wait(HANG)
    assert "got it" in server.last_lines()
    assert stat.S_IMODE((tmp_path / "log" / "s").stat().st_mode) == 0o600
    server.close()


def test_a_changed_secret_is_no_changed_recipe() -> None:
    def recipe(remote: Any, **arguments: Any) -> dict[str, Any]:
        return {"method": "grpo", "reward": {"remote": remote, "arguments": arguments}}

    stored = recipe(f"http://user:{SECRET}@host/s?api_key=old", api_key=SECRET)
    state: Any = SimpleNamespace(recipe=stored, models={})
    for now in ("http://user:${env:PW}@host/s?api_key=${env:KEY}", "http://user:***@host/s", "http://host/s"):
        assert refuse_changed_recipe(state, recipe(now, api_key="${env:KEY}"), ()) == []
        assert list(_unlike(stored, recipe(now, api_key="${env:KEY}"))) == []
    with pytest.raises(Refusal, match=r"reward\.remote") as refused:
        refuse_changed_recipe(state, recipe("http://other/s", api_key="${env:KEY}"), ())
    assert SECRET not in str(refused.value)


def test_folders_of_earlier_versions_lose_their_secrets(tmp_path: Path) -> None:
    """What a resumed run keeps of its earlier parts, and what pages and exports show of it."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    old = {"method": "grpo", "reward": {"remote": f"http://user:{SECRET}@host", "arguments": {"api_key": SECRET}}}
    folder.recipe.write_text(yaml.safe_dump(old))
    folder.env.write_text(json.dumps({"command": ["train", f"reward.remote=http://user:{SECRET}@host"]}))
    shown = json.dumps(recipe_of(tmp_path, folder.path), default=str)
    assert "user:***@host" in shown
    assert SECRET not in shown.replace(f"api_key: {SECRET}", "")
    folder.write_recipe("method: grpo\n", step=3)
    folder.write_env({})
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    assert {file.name for file in files} == {"recipe.yaml", "recipe.to_step_3.yaml", "env.json"}
    for file in files:
        assert SECRET not in file.read_text(), file
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_the_command_in_the_environment_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "serve", "--api-key", SECRET, f"http://u:{SECRET}@h"])
    assert describe_environment()["command"] == ["lockstep", "serve", "--api-key", "***", "http://u:***@h"]


def test_a_run_writes_no_secret_and_resumes_with_another(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run with an endpoint that asks for a password and a key: recipe, environment, checkpoints, tape, samples,
    export and log. Its second part has another password and takes the key from a file."""
    monkeypatch.setenv("REWARD_PASSWORD", SECRET)
    monkeypatch.setenv("REWARD_KEY", "second-secret")
    (tmp_path / "key").write_text("third-secret\n")
    rows = write_jsonl(tmp_path / "rows.jsonl", question_rows(8))
    with serving(by_length) as server:
        host = server.address.removeprefix("http://")
        file = tmp_path / "recipe.yaml"
        file.write_text(
            f"""method: grpo
device: cpu
run: {{name: run, folder: {tmp_path / "runs"}, steps: 2}}
model: {{path: {tiny_folder}}}
data: {{train: {rows}}}
batch: {{prompts: 2, tokens: 256}}
rollout: {{n: 2, max_tokens: 8}}
checkpoint: {{every: 1, keep_last: 2}}
tape: {{record: true}}
reward: {{remote: "http://user:${{env:REWARD_PASSWORD}}@{host}?api_key=${{env:REWARD_KEY}}"}}
"""
        )
        train_online(load_recipe(str(file), ["run.steps=1"]), Console.open(ONLINE_COLUMNS, plain=True))
        monkeypatch.setenv("REWARD_PASSWORD", "changed-secret")
        now = f"reward.remote=http://user:${{env:REWARD_PASSWORD}}@{host}?api_key=${{file:{tmp_path}/key}}"
        train_online(load_recipe(str(file), [now]), Console.open(ONLINE_COLUMNS, plain=True))
        passwords = {base64.b64decode(told.removeprefix("Basic ")).decode() for _, told in server.heard}
    assert passwords == {f"user:{SECRET}", "user:changed-secret"}
    run = tmp_path / "runs" / "run"
    files = [path for path in run.rglob("*") if path.is_file()]
    for path in files:
        content = path.read_bytes()
        for secret in (SECRET, "second-secret", "third-secret", "changed-secret"):
            assert secret.encode() not in content, path
    names = ["recipe.yaml", "recipe.to_step_1.yaml", "env.json", "tape/tape.json"]
    names += [f"checkpoints/step_{step}/state.json" for step in (1, 2)]
    for name in names:
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600, name
        assert "REWARD_PASSWORD" in (run / name).read_text(), name
    told = json.loads((run / "env.json").read_text())["secrets"]
    assert told == {"reward.remote": f"*** from the environment variable REWARD_PASSWORD and the file {tmp_path}/key"}
    printed = capsys.readouterr()
    assert "secret" not in (printed.out + printed.err).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"path": "/data/sk-2024-experiments-long-folder/model"}},
        {"data": {"train": "hub:org/sk-very-long-name-of-a-dataset"}},
        {"reward": {"arguments": {"api_key": "EMPTY"}}},
    ],
)
def test_ordinary_values_are_no_secrets(values: dict[str, Any]) -> None:
    assert list(secrets_in(values)) == []


def test_a_key_of_that_form_is_a_secret() -> None:
    for key in (f"sk-{'a1B2' * 8}", f"sk-proj-{'a1_B-' * 6}"):
        assert list(secrets_in({"reward": {"arguments": {"judge": key}}}))


def test_a_group_on_a_command_line_is_masked() -> None:
    words = [
        "train",
        "r.yaml",
        f"rollout.server.env={{HF_TOKEN: {SECRET}, OTHER: shown}}",
        "data.train=[a.jsonl, b.jsonl]",
    ]
    told = " ".join(masked_words(words))
    assert SECRET not in told
    assert "OTHER: shown" in told
    assert "data.train=[a.jsonl, b.jsonl]" in told
