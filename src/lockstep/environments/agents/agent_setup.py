"""Opens the agents of a run from its recipe keys, and tries them before weights load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.environments.agents.agent_host import COMMAND
from lockstep.environments.agents.agent_loop import AgentEngine
from lockstep.environments.agents.agent_server import AgentServer
from lockstep.environments.conversation import ChatFormat, probe_template
from lockstep.environments.host import EnvironmentHosts, HostSetup
from lockstep.environments.parsers import format_named
from lockstep.environments.setup import (
    EnvironmentTrial,
    TrajectoryEngineSetup,
    named_arguments,
    refuse_no_template,
)
from lockstep.errors import with_secrets
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.types import AGENT, Prompt
from lockstep.vision.processors import ImageTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SERVE = "lockstep.environments.agents.agent_host:serve"


def agent_setup(settings: EnvironmentSettings, output: Path | None = None) -> HostSetup:
    """Returns what the host processes run: the agent of the recipe."""
    agent = settings.agent or ""
    if agent.startswith(COMMAND):
        agent = with_secrets(agent, AGENT)
    arguments = {"named": named_arguments(settings), "host": settings.agent_host}
    workers, threads = settings.environment_workers, settings.max_concurrent
    return HostSetup(agent, arguments, AGENT, settings.agent or "", workers, threads, output, serve=_SERVE)


def open_agents(setup: TrajectoryEngineSetup) -> AgentEngine:
    """Starts the server and the host processes, and returns the engine. Raises `Refusal` if that is not possible."""
    settings, chat = setup.settings, setup.chat
    server = AgentServer(settings.agent_host, "rollout.agent_host")
    try:
        hosts = EnvironmentHosts(agent_setup(settings, setup.output))
    except BaseException:
        server.close()
        raise
    engine = AgentEngine(setup.inner, hosts, settings, chat, setup.vocabulary, setup.prompt_limit)
    engine.server = server
    return engine


def try_agent(
    settings: EnvironmentSettings,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageTokens | None = None,
) -> EnvironmentTrial:
    """Loads the agent and starts its server. Raises `Refusal` if the agent cannot be used."""
    setup = agent_setup(settings)
    if settings.parser != "auto":
        format_named(settings.parser, "rollout.parser")
    refuse_no_template(setup, tokenizer)
    AgentServer(settings.agent_host, "rollout.agent_host").close()
    EnvironmentHosts(setup).close()
    chat = ChatFormat(tokenizer, history=settings.history, images=images)
    report = probe_template(chat, prompt.question.template_arguments, tools=False)
    tools = probe_template(chat, prompt.question.template_arguments, tools=True)
    without = "; the chat template has no tools" if tools.refuses else ""
    return EnvironmentTrial(f"{setup.where}: loaded; {report.sentence(settings.history)}{without}")
