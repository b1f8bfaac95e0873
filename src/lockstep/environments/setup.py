"""Opens the environments of a run from its recipe keys, and tries them on one row before weights load."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.environments.conversation import (
    ChatConversation,
    ChatFormat,
    TokenConversation,
    probe_template,
    prompt_text,
    with_ids,
)
from lockstep.environments.host import EnvironmentHosts, HostAnswer, HostSetup
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.message_images import prompt_images
from lockstep.environments.parsers import format_named
from lockstep.environments.running import TurnEngine, environment_seed, row_of
from lockstep.errors import Refusal, missing_extra, with_secrets
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ADAPTERS, ENVIRONMENTS, TOOLS
from lockstep.types import ENVIRONMENT, Prompt, Request
from lockstep.vision.processors import ImageTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_ENVIRONMENT = "lockstep.environments.tool_environment:ToolEnvironment"
# The environment of tools limits each tool itself, so its own calls get this many seconds more.
TOOL_SECONDS = 10.0
_REMEDIES = {
    ENVIRONMENT: "fix the environment, or use another one (rollout.environment)",
    "rollout.tools": "fix the tool, remove it from rollout.tools, or raise rollout.step_timeout if it is slow",
}


@dataclass(frozen=True)
class TrajectoryEngineSetup:
    """What an engine of environments or agents needs: the engine `inner` for the turns, the recipe keys, the tokenizer
    and the limits. `output` is the path of the logs of the host processes without its ending."""

    inner: TurnEngine
    settings: EnvironmentSettings
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    vocabulary: int
    prompt_limit: int | None = None
    output: Path | None = None
    images: ImageTokens | None = None
    """Writes the images of messages, if the model reads images."""

    @property
    def chat(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, self.end_ids, self.settings.history, self.images)


@dataclass(frozen=True)
class EnvironmentTrial:
    """The result of a trial before training."""

    line: str
    """A summary for the user."""
    prompt_tokens: int = 0
    """The number of tokens of the tried prompt, with tools and the environment's messages. 0 if it is unknown."""


def named_arguments(settings: EnvironmentSettings) -> dict[str, Any]:
    """Returns `rollout.environment_args` with the values of the secrets that they name."""
    return {
        name: with_secrets(value, f"rollout.environment_args.{name}") if isinstance(value, str) else value
        for name, value in settings.environment_args.items()
    }


def host_setup(
    settings: EnvironmentSettings,
    output: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompt_limit: int | None = None,
) -> HostSetup:
    """Returns what the host processes run: the environment class of the recipe, or the environment for its tools."""
    threads = settings.max_concurrent
    limits = {
        "result_chars": settings.result_chars,
        "timeout": settings.step_timeout,
        "truncation": settings.result_truncation,
        "parallel": settings.max_parallel_calls,
    }
    if settings.environment is None:
        arguments: dict[str, Any] = {
            "tools": [_tool(tool, settings.step_timeout) for tool in settings.tools],
            **limits,
        }
        shown = ", ".join(settings.tools)
        workers = settings.environment_workers
        return HostSetup(TOOL_ENVIRONMENT, arguments, "rollout.tools", shown, workers, threads, output, TOOL_SECONDS)
    arguments = named_arguments(settings)
    path, more = ENVIRONMENTS.get(settings.environment, settings.environment), 0.0
    name, _, inside = settings.environment.partition(":")
    if name in ADAPTERS:
        row = ADAPTERS[name]
        if row.package and find_spec(row.package) is None:
            raise missing_extra(row.package, name.replace("_", "-"), f"{ENVIRONMENT} {settings.environment}")
        path, arguments, more = row.path, {"environment": inside, **arguments}, TOOL_SECONDS if row.tools else 0.0
        arguments |= limits if row.tools else {}
        arguments |= {"run": _run_settings(settings, tokenizer, prompt_limit)} if row.tokenizer else {}
    workers = settings.environment_workers
    return HostSetup(path, arguments, ENVIRONMENT, settings.environment, workers, threads, output, more)


def _run_settings(
    settings: EnvironmentSettings, tokenizer: PreTrainedTokenizerBase | None, prompt_limit: int | None
) -> dict[str, Any]:
    """Returns the tokenizer and the settings of the rollout, with verl's names, for agent loops."""
    assert tokenizer is not None
    assert isinstance(settings, RolloutSettings)
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1}
    turns = {
        "max_assistant_turns": settings.max_turns,
        "max_user_turns": None,
        "max_parallel_calls": settings.max_parallel_calls or 1,
        "max_tool_response_length": settings.result_chars,
        "tool_response_truncate_side": settings.result_truncation,
        "format": settings.parser,
    }
    lengths = {"prompt_length": prompt_limit or tokenizer.model_max_length, "response_length": settings.max_tokens}
    rollout = {**lengths, "n": settings.n, **sampling, "multi_turn": turns}
    return {
        "tokenizer": tokenizer.name_or_path,
        "chat_template": tokenizer.chat_template,
        "sampling": {**sampling, "repetition_penalty": 1.0, "logprobs": False},
        "config": {"actor_rollout_ref": {"rollout": rollout}, "data": {}},
    }


def _tool(tool: str, limit: float) -> list[str]:
    """Returns the text of a tool, the path of the function that makes it, if it is built in, and its argument. Refuses
    a built-in tool that may take as long as `limit`: it would keep a thread of its host."""
    name, _, argument = tool.partition(":")
    if name not in TOOLS:
        return [tool, "", ""]
    where, module = f"rollout.tools {tool}", import_module(TOOLS[name].partition(":")[0])
    seconds = module.longest_call(argument, where) if hasattr(module, "longest_call") else 0.0
    if seconds >= limit:
        raise Refusal.at(
            where,
            f"a call may take {seconds:g} s, which is not less than rollout.step_timeout={limit:g}",
            f"set rollout.step_timeout above {seconds:g}, or write {name}:seconds=N with a smaller N",
            code="out-of-range",
        )
    return [tool, TOOLS[name], with_secrets(argument, where)]


def open_environments(setup: TrajectoryEngineSetup) -> EnvironmentEngine:
    """Starts the host processes and returns the engine. Raises `Refusal` if the environment cannot be loaded."""
    chat = setup.chat
    hosts = EnvironmentHosts(host_setup(setup.settings, setup.output, setup.tokenizer, setup.prompt_limit))
    return EnvironmentEngine(setup.inner, hosts, setup.settings, chat, setup.vocabulary, setup.prompt_limit)


def try_environment(
    settings: EnvironmentSettings,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    prompt_limit: int,
    seed: int,
    images: ImageTokens | None = None,
) -> EnvironmentTrial:
    """Loads the environment and starts a trajectory for one row. Raises `Refusal` if the environment or its first
    prompt cannot be used."""
    setup, question = host_setup(settings, None, tokenizer, prompt_limit), prompt.question
    if settings.parser != "auto":
        format_named(settings.parser, "rollout.parser")
    chat = ChatFormat(tokenizer, history=settings.history, images=images)
    hosts = EnvironmentHosts(setup)
    try:
        host = hosts.place_now(0)
        text = prompt_text(tokenizer, prompt.ids) if hosts.writes_text else None
        row, start = row_of(question, text, images), environment_seed(seed, 0, 0)
        answer = _answered(hosts, hosts.send(host, do="reset", trajectory=0, row=row, seed=start), settings)
        if answer.why:
            remedy = answer.remedy or _REMEDIES[setup.key]
            raise Refusal.at(setup.where, f"{answer.why}, for {question.origin}", remedy, code=answer.code)
        fields = with_ids(tokenizer, answer.fields, prompt.ids)
        conversation: ChatConversation | TokenConversation
        if fields["tokens"]:
            request = Request(prompt.ids, 0, images=prompt.images)
            conversation = TokenConversation(
                fields["ids"], tokenizer.decode, prompt_images(fields["ids"], request, images)
            )
            template = f"the environment writes {'raw text' if 'text' in fields else 'token ids'}"
        else:
            refuse_no_template(setup, tokenizer)
            conversation = ChatConversation(chat, question, fields["messages"], fields["tools"])
            report = probe_template(chat, question.template_arguments, bool(fields["tools"]))
            if report.refuses:
                _refuse_template(setup, report.refuses[0])
            template = report.sentence(settings.history)
        length = len(conversation.prompt)
        if length > prompt_limit:
            why = f"reset returned a prompt of {length} tokens, over the limit of {prompt_limit}, for {question.origin}"
            remedy = "raise data.max_prompt_tokens, or shorten the prompt"
            raise Refusal.at(setup.where, why, remedy, code="row-too-long")
        closed = _answered(hosts, hosts.send(host, do="finish", trajectory=0, finished=None), settings)
        if closed.why:
            raise Refusal.at(
                setup.where, f"{closed.why}, for {question.origin}", _REMEDIES[setup.key], code=closed.code
            )
        count = len(fields.get("tools") or ())
        tools = f", {count} tool{'' if count == 1 else 's'}" if count else ""
        line = f"{setup.where}: a prompt of {length} tokens{tools} for {question.origin}; {template}"
        return EnvironmentTrial(line, length)
    finally:
        hosts.close()


def _answered(hosts: EnvironmentHosts, call: int, settings: EnvironmentSettings) -> HostAnswer:
    try:
        while True:
            _, answer = hosts.inbox.get(timeout=settings.step_timeout)
            if answer.call == call or answer.why:
                return answer
    except queue.Empty:
        why = f"did not return within {settings.step_timeout:g} s (rollout.step_timeout)"
        return HostAnswer(call, why=why, code="function-too-slow")


def refuse_no_template(setup: HostSetup, tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise Refusal.at(
            setup.where,
            "returns messages, but the tokenizer has no chat template",
            "set data.template, or use a model whose tokenizer has one",
            code="no-chat-template",
        )


def _refuse_template(setup: HostSetup, why: str) -> None:
    remedy = "use another template (data.template)"
    raise Refusal.at(setup.where, f"the chat template refuses {why}", remedy, code="template-error")
