"""Tools that are Python functions: their schema, their arguments, their calls, and which functions are refused."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from hang import HANG
from lockstep.environments.json_schema import InvalidJson, Mismatch, fitted, fitted_arguments, read_json
from lockstep.environments.parsers import parse_reply
from lockstep.environments.tools import FunctionTool, InvalidArguments, load_tool, load_tools, result_text
from refusals import refuses


def weather(city: str, days: int = 1, units: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """
    The weather of a city.

    Args:
        city: The name of the city.
        days: How many days.
        units: The scale.
        tags: Words to add.
    """
    return {"city": city, "days": days, "units": units, "tags": tags}


async def later(text: str) -> str:
    """Returns the text, later.

    Args:
        text: The text.
    """
    await asyncio.sleep(0)
    return text.upper()


class Adder:
    """Its method is a tool."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: float) -> float:
        """Adds a number.

        Args:
            number: The number.
        """
        self.total += number
        return self.total


def called(tool: FunctionTool, **arguments: Any) -> str:
    return asyncio.run(tool.call(arguments))


# -- the schema and the call -------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_transformers() -> None:
    tool = FunctionTool.of(weather)
    assert tool.schema == get_json_schema(weather)
    assert tool.name == "weather"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["units"]["enum"] == ["C", "F"]


def test_functions_methods_and_coroutines_are_called() -> None:
    tool = FunctionTool.of(weather)
    assert json.loads(called(tool, city="Rome", days="3")) == {"city": "Rome", "days": 3, "units": "C", "tags": None}
    assert called(FunctionTool.of(later), text="é") == "É"
    adder = Adder()
    tool = FunctionTool.of(adder.add)
    assert (called(tool, number=2), called(tool, number="0.5")) == ("2", "2.5")


def test_a_synchronous_tool_does_not_stop_the_others() -> None:
    started, release = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        """Waits.

        Args:
            text: The text.
        """
        started.set()
        assert release.wait(HANG)
        return text

    async def both() -> list[str]:
        waiting = asyncio.create_task(FunctionTool.of(slow).call({"text": "slow"}))
        await asyncio.to_thread(started.wait, HANG)
        quick = await FunctionTool.of(later).call({"text": "quick"})
        release.set()
        return [quick, await waiting]

    assert asyncio.run(both()) == ["QUICK", "slow"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, 'the argument "city" is missing'),
        ({"city": "a", "units": "K"}, 'units must be "C" or "F", not "K"'),
        ({"city": "a", "tags": [1]}, "item 1 of the argument tags must be a string, not 1"),
        ({"city": 3}, "the argument city must be a string, not 3"),
        ({"city": "a", "days": 1.5}, "the argument days must be an integer, not 1.5"),
        ({"city": "a", "days": True}, "the argument days must be an integer, not true"),
        ({"city": "a", "day": 1}, 'there is no argument "day"'),
    ],
)
def test_arguments_that_do_not_match_are_not_passed_on(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArguments) as raised:
        FunctionTool.of(weather).arguments(arguments)
    assert why in str(raised.value)


def test_results_become_text() -> None:
    assert [result_text(one) for one in ("a\n", 3, None, True, ["é"], {"a": 1.5})] == [
        "a\n",
        "3",
        "null",
        "true",
        '["é"]',
        '{"a": 1.5}',
    ]
    assert result_text({1}) == "{1}"


def test_a_parsed_call_runs() -> None:
    tool = FunctionTool.of(weather)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": "2"}}\n</tool_call>'
    (call,) = parse_reply(text, None, "hermes", [tool]).valid_calls
    assert json.loads(called(tool, **call.arguments))["days"] == 2


# -- loading -----------------------------------------------------------------------------------------------------------

FILE = '''
def good(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


def undocumented(x: int) -> int:
    return x


def half(x: int, y: int) -> int:
    """Adds.

    Args:
        x: A number.
    """
    return x + y


def untyped(x):
    """Doubles.

    Args:
        x: A number.
    """


def many(*x: int):
    """Adds.

    Args:
        x: Numbers.
    """


def named(**x: int):
    """Adds.

    Args:
        x: Numbers.
    """


def only(x: int, /):
    """Doubles.

    Args:
        x: A number.
    """


def unknown(x: "Missing"):
    """Doubles.

    Args:
        x: A number.
    """


class Class:
    """Doubles.

    Args:
        x: A number.
    """

    def __init__(self, x: int):
        pass


number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_tools.py").write_text(FILE)
    return tmp_path / "my_tools.py"


def test_a_tool_is_loaded_from_a_file_a_package_or_a_function(file: Path) -> None:
    assert called(load_tool(f"{file}:good"), x="4") == "8"
    assert load_tool(weather).name == "weather"
    assert load_tool("transformers.utils:get_json_schema").name == "get_json_schema"
    assert [tool.name for tool in load_tools([f"{file}:good", later])] == ["good", "later"]
    with refuses("rollout.tools", "duplicate-name", "good"):
        load_tools([f"{file}:good", f"{file}:good"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("undocumented", "no docstring"),
        ("half", "no description for the argument 'y'"),
        ("untyped", "missing a type hint"),
        ("many", "*arguments (x)"),
        ("named", "**arguments (x)"),
        ("only", "positional-only arguments (x)"),
        ("unknown", "Missing"),
        ("number", "not a function"),
        ("absent", "has no function absent"),
        ("Class", "Class is a class, not a function"),
    ],
)
def test_functions_without_a_schema_are_refused(file: Path, name: str, why: str) -> None:
    with refuses(f"rollout.tools {file}:{name}", "invalid-function", why):
        load_tool(f"{file}:{name}")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("missing.py:f", "no-such-file"),
        ("f", "invalid-function"),
        ("no_such_package:f", "import-failed"),
        ("json:no_such_name", "import-failed"),
        ("json:__name__", "invalid-function"),
    ],
)
def test_paths_without_a_function_are_refused(path: str, code: str) -> None:
    with refuses(code=code):
        load_tool(path)


# -- JSON and its schemas ----------------------------------------------------------------------------------------------

POINT = {
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/Point"}},
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        (3.0, {"type": "integer"}, 3),
        ("+3", {"type": "number"}, 3),
        ("1e3", {"type": "number"}, 1000.0),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, "null"),
        (None, {"type": "string", "nullable": True}, None),
        ("7", {"type": ["string", "integer"]}, "7"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7"),
        ("[1, 2]", {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        (["1", "a"], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"]),
        ({"x": "1"}, {"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 1}),
        (3, {"type": "image"}, 3),
        ("a", {}, "a"),
        ("a", {"$ref": "https://else.where"}, "a"),
        (5, {"allOf": [{"minimum": 3}, {"maximum": 5}]}, 5),
    ],
)
def test_values_get_the_type_of_the_schema(value: Any, schema: dict[str, Any], expected: Any) -> None:
    made = fitted(value, schema, schema, "x")
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(
    ("value", "schema", "why"),
    [
        ("a", {"type": "integer"}, 'x must be an integer, not "a"'),
        ("NaN", {"type": "number"}, "x must be a number"),
        ("1e999", {"type": "number"}, "x must be a number"),
        (float("inf"), {"type": "number"}, "finite"),
        (1, {"enum": [True, "1"]}, 'x must be true or "1", not 1'),
        (2, {"const": 3}, "x must be 3"),
        (2, {"minimum": 3}, "x must be at least 3"),
        (3, {"exclusiveMinimum": 3}, "x must be above 3"),
        ("abc", {"maxLength": 2}, "x must have at most 2 characters, not 3"),
        ([], {"minItems": 1}, "x must have at least 1 items, not 0"),
        ("b", {"pattern": "^a"}, 'x must match the pattern "^a"'),
        ([1, "b"], {"items": {"type": "integer"}}, "item 2 of x must be an integer"),
        ({}, {"required": ["a"]}, 'x lacks "a"'),
        (1, False, "x is not allowed"),
        ("a", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 'x must be an integer, not "a"; or x must be a null'),
    ],
)
def test_values_outside_the_schema_are_named(value: Any, schema: Any, why: str) -> None:
    with pytest.raises(Mismatch) as raised:
        fitted(value, schema, {}, "x")
    assert why in str(raised.value)


def test_references_are_followed_and_may_repeat() -> None:
    given = {"p": {"x": "1", "next": {"x": 2, "next": None}}}
    assert fitted_arguments(given, POINT) == ({"p": {"x": 1, "next": {"x": 2, "next": None}}}, [])
    _, (error,) = fitted_arguments({"p": {"x": 1, "next": {"y": 2}}}, POINT)
    assert "lacks" in error or "unknown key" in error
    deep: dict[str, Any] = {"x": 1}
    for _ in range(200):
        deep = {"x": 1, "next": deep}
    assert "nested too deeply" in fitted_arguments({"p": deep}, POINT)[1][0]
    loop = {"properties": {"p": {"$ref": "#/properties/p"}}}
    assert fitted_arguments({"p": 1}, loop) == ({"p": 1}, [])


def test_a_schema_without_properties_takes_any_argument() -> None:
    assert fitted_arguments({"a": 1}, {}) == ({"a": 1}, [])
    assert fitted_arguments({"a": 1}, {"properties": {}})[1] == ['there is no argument "a"; the arguments are: none']
    assert fitted_arguments({"a": "1"}, {"properties": {}, "additionalProperties": {"type": "integer"}}) == (
        {"a": 1},
        [],
    )
    assert fitted_arguments([1], {})[1] == ["the arguments must be a JSON object, not [1]"]


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[Infinity]", '{"a": 1, "a": 2}', "[" * 100000, "9" * 9999, "{'a': 1}"]
)
def test_what_is_not_json_is_named(text: str) -> None:
    with pytest.raises(InvalidJson):
        read_json(text)


def test_half_a_character_is_replaced() -> None:
    value = read_json('{"a": "\\ud800", "b": "\\ud83d\\ude00"}')
    assert value == {"a": "?", "b": "😀"}
