"""Turns of the model that its chat template refuses to render: they become parse errors, and never fail a
trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import environment_classes
from conversations import TOOLS
from family_tokenizers import FAMILIES, WITHOUT_TOOLS, chat_of, tokenizer_of
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.conversation import probe_template
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Question, Request, Sampling
from original_templates import ORIGINALS
from scripted_engine import Scripted

WEATHER = '''
def weather(place: str) -> str:
    """Returns the weather of a place.

    Args:
        place: Any.
    """
    return f"warm in {place}"
'''


def llama(*places: str) -> str:
    return "; ".join(f'{{"name": "weather", "parameters": {{"place": "{place}"}}}}' for place in places)


def harmony(*places: str, before: str = "") -> str:
    head = "<|channel|>commentary to=functions.weather <|message|>"
    return before + "<|end|><|start|>assistant".join(f'{head}{{"place": "{place}"}}' for place in places)


def mistral(*ids: str) -> str:
    calls = (f'{{"name": "weather", "arguments": {{"place": "P{i}"}}, "id": "{id}"}}' for i, id in enumerate(ids))
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


def glm(*places: str) -> str:
    value = "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    return "\n".join(value.format(place) for place in places)


def hermes(*places: str) -> str:
    value = '<tool_call>\n{{"name": "weather", "arguments": {{"place": "{}"}}}}\n</tool_call>'
    return "\n".join(value.format(place) for place in places)


THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>look<|end|>"
# Calls of `weather` in the format of each family.
WRITES = {"llama3.1": llama, "gpt-oss": harmony, "glm4.5": glm}


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(WEATHER, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hosts(tools_file: Path) -> Iterator[dict[str, EnvironmentHosts]]:
    """Hosts of the tool `weather`, of a game without tools, and of an environment that answers calls with user
    messages."""
    echo = f"{environment_classes.__file__}:Echo"
    settings = {
        "tool": RolloutSettings(tools=[f"{tools_file}:weather"], environment_workers=1),
        "game": RolloutSettings(environment=echo, environment_workers=1),
        "talk": RolloutSettings(environment=echo, environment_args={"tools": TOOLS}, environment_workers=1),
    }
    opened = {name: EnvironmentHosts(host_setup(one)) for name, one in settings.items()}
    yield opened
    for one in opened.values():
        one.close()


def played(hosts: EnvironmentHosts, folder: Path, family: str, history: str, text: str, template: str) -> Completion:
    """A trajectory whose first turn is `text`, and whose second turn ends the conversation."""
    tokenizer = tokenizer_of(folder, family, template)
    chat = chat_of(tokenizer, family, history)
    settings = RolloutSettings(environment="used: by the hosts", history=history)
    engine = EnvironmentEngine(
        Scripted(tokenizer, lambda request, turn: text if turn == 0 else "done"),
        hosts,
        settings,
        chat,
        len(tokenizer),
    )
    question = Question("", [{"role": "user", "content": "?"}], "0", Origin("rows.jsonl", 1))
    request = Request([1], 0, question=question)
    (made,) = engine.generate([request], Sampling(3000, stop_ids=tuple(chat.end_ids)))
    assert made.trajectory is not None
    assert (made.failure, made.trajectory.stop, len(made.trajectory.turns)) == ("", "completed", 2)
    first = made.trajectory.turns[0]
    assert tokenizer.decode(made.ids[first.start : first.stop]).startswith(text)
    return made


HISTORIES = ("keep", "as_template")


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", ["llama3.1", "gpt-oss"])
def test_a_second_call_is_a_parse_error_if_the_template_has_one_call(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], family: str, history: str
) -> None:
    """The first call runs. The model reads its result, and that the second call did not run."""
    text = WRITES[family]("Rome", "Oslo", "Bonn")
    made = played(hosts["tool"], tiny_folder, family, history, text, builtin_text(family)).trajectory
    assert made is not None
    (result,) = (message["content"] for message in made.messages if message["role"] == "tool")
    assert result.startswith("warm in Rome\nTool call 2 (weather)")
    assert "Tool call 3 (weather)" in result
    assert [len(turn.calls) for turn in made.turns] == [1, 0]
    assert made.turns[0].parse_error.count("\n") == 1
    assert made.metrics["parse_errors"] == made.metrics["tool_calls"] == made.info["calls"] == 1


@pytest.mark.parametrize("history", HISTORIES)
def test_an_id_that_the_template_refuses_is_a_parse_error(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], history: str
) -> None:
    text = mistral("call00007", "seven", "[/INST]12")
    made = played(hosts["tool"], tiny_folder, "mistral", history, text, builtin_text("mistral")).trajectory
    assert made is not None
    results = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert results[0] == "warm in P0"
    assert "Tool call 2 (weather)" in results[1]
    assert "seven" in results[1]
    assert "Tool call 3 (weather)" in results[2]
    ids = [call.id for call in made.turns[0].calls]
    assert ids[0] == "call00007"
    assert {len(name) for name in ids} == {9}
    assert len(set(ids)) == 3
    assert all("[" not in name for name in ids)
    assert [bool(call.error) for call in made.turns[0].calls] == [False, True, True]
    assert made.metrics["parse_errors"] == 1


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", ["glm4.5", "mistral"])
def test_a_call_in_a_game_without_tools_is_a_parse_error(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], family: str, history: str
) -> None:
    text = glm("Rome") if family == "glm4.5" else mistral("x")
    made = played(hosts["game"], tiny_folder, family, history, text, builtin_text(family)).trajectory
    assert made is not None
    assert "there are no tools" in made.turns[0].parse_error
    assert made.metrics["parse_errors"] == 1


@pytest.mark.parametrize("history", HISTORIES)
def test_an_environment_may_answer_calls_with_user_messages(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], history: str
) -> None:
    """GLM's template wants the result of a tool after a call."""
    made = played(hosts["talk"], tiny_folder, "glm4.5", history, glm("Rome"), builtin_text("glm4.5")).trajectory
    assert made is not None
    assert made.messages[2]["role"] == "user"
    assert made.metrics["parse_errors"] == 0


@pytest.mark.parametrize("template", ["original", "built-in"])
def test_a_call_with_reasoning_and_content_goes_on(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], template: str
) -> None:
    """gpt-oss's template refuses reasoning and content in a turn with a call, so the turn stays as sampled."""
    text = harmony("Rome", before=THOUGHT + "<|start|>assistant")
    given = ORIGINALS["gpt-oss"] if template == "original" else builtin_text("gpt-oss")
    made = played(hosts["tool"], tiny_folder, "gpt-oss", "as_template", text, given)
    assert made.trajectory is not None
    assert made.trajectory.metrics["parse_errors"] == 0
    assert made.trajectory.messages[2]["content"] == "warm in Rome"


def written(family: str, places: tuple[str, ...]) -> str:
    if family == "mistral":
        return mistral(*(f"{place}-id" for place in places))
    if family == "deepseek-r1":
        call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{"place": "{}"}}\n```<｜tool▁call▁end｜>'
        return "<｜tool▁calls▁begin｜>" + "\n".join(call.format(p) for p in places) + "<｜tool▁calls▁end｜>"
    if family == "qwen3.5":
        call = "<tool_call>\n<function=weather>\n<parameter=place>\n{}\n</parameter>\n</function>\n</tool_call>"
        return "</think>" + "\n".join(call.format(place) for place in places)
    return WRITES.get(family, hermes)(*places)


@pytest.mark.slow
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_call_fails_a_trajectory(
    tiny_folder: Path, hosts: dict[str, EnvironmentHosts], family: str, history: str
) -> None:
    for template in (ORIGINALS[family], builtin_text(family)):
        for kind in ("game", *(() if family in WITHOUT_TOOLS else ("tool", "talk"))):
            for places in (("Rome",), ("Rome", "Oslo"), ('a"', "b")):
                for more in ("", "look "):
                    played(hosts[kind], tiny_folder, family, history, more + written(family, places), template)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_reports_a_template_with_one_call(tiny_folder: Path, family: str) -> None:
    if family in WITHOUT_TOOLS:
        return
    chat = chat_of(tokenizer_of(tiny_folder, family, builtin_text(family)), family, "keep")
    report = probe_template(chat, {}, tools=True)
    assert report.one_call == (family in ("llama3.1", "gpt-oss"))
    assert ("one tool call" in report.sentence("keep")) == report.one_call
