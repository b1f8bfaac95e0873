"""Stand-ins for the classes of verl that tools and agent loops import, for machines without verl.

The names, fields and signatures are those of verl 0.9. Chat templates render the fields of the schemas, so a field that
verl drops, such as `items`, is dropped here, too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field, field_validator

from lockstep.environments.adapters.stand_in import install_stand_ins
from lockstep.environments.adapters.verl_loop_stand_in import loop_modules


class OpenAIFunctionPropertySchema(BaseModel):
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    name: str
    arguments: dict[str, Any]


class OpenAIFunctionToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """The result of a tool call. Images and videos are lists."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("give a list, also for a single image")
        return value

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """The base class of tools with state."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError("the tool has no schema: set tool_schema, or override get_openai_tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


@dataclass
class RegisteredFunction:
    """A function that `@function_tool` registered."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        if self.is_async:
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, RegisteredFunction] = {}


def function_tool(
    name: str | Callable[..., Any] | None = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None
) -> Any:
    """Registers a function as a tool: `@function_tool`, `@function_tool("name")` or `@function_tool(schema=...)`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name if isinstance(name, str) else function.__name__
        made = _schema_of(function, called) if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        known = FUNCTION_TOOL_REGISTRY.get(called)
        if known is not None and known.fn is not function:
            raise ValueError(f"two functions are registered as the tool {called!r}")
        FUNCTION_TOOL_REGISTRY[called] = RegisteredFunction(
            called, function, made, inspect.iscoroutinefunction(function)
        )
        return function

    return register(name) if callable(name) else register


def _schema_of(function: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    from transformers.utils import get_json_schema

    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(one.kind in kinds for one in inspect.signature(function).parameters.values()):
        raise ValueError(f"the tool {name!r} has *args or **kwargs, which no schema can describe")
    raw = get_json_schema(function)
    raw["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(raw)


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself: lockstep has no tracing of single calls."""
    return function


@contextmanager
def simple_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Stands for verl's timer. lockstep measures the time in environments itself."""
    yield


def install_verl() -> None:
    """Makes verl's modules importable, if verl is not installed."""
    schemas = [one for one in globals().values() if inspect.isclass(one) and issubclass(one, BaseModel)]
    install_stand_ins(
        "verl",
        {
            "verl.tools.schemas": {one.__name__: one for one in schemas if one is not BaseModel},
            "verl.tools.base_tool": {
                "BaseTool": BaseTool,
                "ToolResponse": ToolResponse,
                "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
            },
            "verl.tools.function_tool": {
                "function_tool": function_tool,
                "FunctionTool": RegisteredFunction,
                "FUNCTION_TOOL_REGISTRY": FUNCTION_TOOL_REGISTRY,
            },
            "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
            "verl.utils.profiler": {"simple_timer": simple_timer},
            **loop_modules(),
        },
    )
