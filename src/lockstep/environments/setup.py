"""Opens the environments of a run from its recipe keys, and tries them on one row before weights load."""

from __future__ import annotations

import queue
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.environments.conversation import ChatConversation, ChatFormat, TokenConversation, probe_template
from lockstep.environments.host import EnvironmentHosts, HostAnswer, HostSetup
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.parsers import format_named
from lockstep.environments.running import TurnEngine, environment_seed, row_of
from lockstep.errors import Refusal, with_secrets
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.registry import ENVIRONMENTS, TOOLS
from lockstep.types import ENVIRONMENT, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_ENVIRONMENT = "lockstep.environments.tool_environment:ToolEnvironment"
# The environment of tools limits each tool itself, so its own calls get this many seconds more.
TOOL_SECONDS = 10.0
_REMEDY = "fix the environment, or use another one (rollout.environment)"


def host_setup(settings: EnvironmentSettings, output: Path | None = None) -> HostSetup:
    """Returns what the host processes run: the environment class of the recipe, or the environment for its tools."""
    threads = settings.max_concurrent
    if settings.environment is None:
        arguments: dict[str, Any] = {
            "tools": [_tool(tool, settings.step_timeout) for tool in settings.tools],
            "result_chars": settings.result_chars,
            "timeout": settings.step_timeout,
        }
        shown = ", ".join(settings.tools)
        workers = settings.environment_workers
        return HostSetup(TOOL_ENVIRONMENT, arguments, "rollout.tools", shown, workers, threads, output, TOOL_SECONDS)
    arguments = {
        name: with_secrets(value, f"rollout.environment_args.{name}") if isinstance(value, str) else value
        for name, value in settings.environment_args.items()
    }
    path = ENVIRONMENTS.get(settings.environment, settings.environment)
    workers = settings.environment_workers
    return HostSetup(path, arguments, ENVIRONMENT, settings.environment, workers, threads, output)


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
    return [tool, TOOLS[name], argument]


def open_environments(
    inner: TurnEngine,
    settings: EnvironmentSettings,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    vocabulary: int,
    prompt_limit: int | None = None,
    output: Path | None = None,
) -> EnvironmentEngine:
    """Starts the host processes and returns the engine. Raises `Refusal` if the environment cannot be loaded."""
    chat = ChatFormat(tokenizer, end_ids, settings.history)
    hosts = EnvironmentHosts(host_setup(settings, output))
    return EnvironmentEngine(inner, hosts, settings, chat, vocabulary, prompt_limit)


def try_environment(
    settings: EnvironmentSettings, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, prompt_limit: int, seed: int
) -> str:
    """Loads the environment and starts a trajectory for one row. Returns a summary line. Raises `Refusal` if the
    environment or its first prompt cannot be used."""
    setup, question = host_setup(settings), prompt.question
    if settings.parser != "auto":
        format_named(settings.parser, "rollout.parser")
    chat = ChatFormat(tokenizer, history=settings.history)
    hosts = EnvironmentHosts(setup)
    try:
        host = hosts.place_now(0)
        row, start = row_of(question), environment_seed(seed, 0, 0)
        answer = _answered(hosts, hosts.send(host, do="reset", trajectory=0, row=row, seed=start), settings)
        if answer.why:
            raise Refusal.at(setup.where, f"{answer.why}, for {question.origin}", _REMEDY, code=answer.code)
        fields = answer.fields
        conversation: ChatConversation | TokenConversation
        if fields["tokens"]:
            conversation = TokenConversation(fields["ids"], tokenizer.decode)
            template = "the environment writes token ids"
        else:
            _refuse_no_template(setup, tokenizer)
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
            raise Refusal.at(setup.where, f"{closed.why}, for {question.origin}", _REMEDY, code=closed.code)
        count = len(fields.get("tools") or ())
        tools = f", {count} tool{'' if count == 1 else 's'}" if count else ""
        return f"{setup.where}: a prompt of {length} tokens{tools} for {question.origin}; {template}"
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


def _refuse_no_template(setup: HostSetup, tokenizer: PreTrainedTokenizerBase) -> None:
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
