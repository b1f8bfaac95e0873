"""Recipe keys of the group `rollout` for environments, tools and agents: conversations of several turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from lockstep.recipe.registry import ENVIRONMENTS, NO_ENVIRONMENT, TOOLS
from lockstep.recipe.section import Effect, Field, Named, Section

if TYPE_CHECKING:
    from typing_extensions import Self

_LIMIT = Effect("blocks", "trajectories end at different turns or tokens")
_TIME = Effect("harmless", "changes the metrics only if a trajectory exceeds the limit; see environment/stop/timeout")
_CODE = Effect("matters", "the code differs, or only its path; compare the samples")


class EnvironmentSettings(Section):
    environment: Annotated[str, Named(ENVIRONMENTS, allow_function=True)] | None = Field(
        None,
        description="Environment with which the model has a conversation (`lockstep help environments`): a class of "
        "your own (`path/to/file.py:Class` or `package.module:Class`), a built-in name, or an environment of another "
        "package, such as `gymnasium:FrozenLake-v1`.",
        effect=_CODE,
    )
    environment_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment class, or of the agent function.",
        effect=Effect("blocks", "the environment behaves differently"),
    )
    environment_workers: int = Field(
        2,
        ge=1,
        description="Number of processes per rank that run environments, tools and agents. Each process runs many "
        "trajectories at once.",
        effect=Effect("harmless", "changes only the number of processes that run environments"),
        resumable=True,
    )
    tools: list[Annotated[str, Named(TOOLS, allow_function=True)]] = Field(
        default_factory=list,
        description="Tools that the model may call, without an environment class: Python functions "
        "(`path/to/file.py:name`), built-in names, or `mcp:COMMAND` or `mcp:https://HOST/mcp` for the tools of an MCP "
        "server. The conversation ends with the first reply without a tool call.",
        effect=_CODE,
    )
    agent: Annotated[str, Named(allow_function=True)] | None = Field(
        None,
        description="Agent that talks to the model over OpenAI's API (`lockstep help environments`): a function "
        "`run(row, base_url)` that returns a reward (`path/to/file.py:run` or `package.module:run`), or a program "
        "(`command:PROGRAM ARGUMENTS`). It needs the extra `serve`.",
        effect=_CODE,
    )
    agent_host: str = Field(
        "127.0.0.1",
        description="Address on which a rank serves its agents, and which their base URLs contain. For agents in "
        "containers without the network of the machine, an address of the machine that the containers can reach.",
        effect=Effect("harmless", "changes only the address of the base URLs"),
        resumable=True,
    )
    agent_limit_reward: float | None = Field(
        None,
        description="Reward of a trajectory whose agent fails after a limit, such as `max_turns`, refused its last "
        "request. Default: such a trajectory is a failure (`reward.max_failures`).",
        effect=Effect("matters", "trajectories that reach a limit get another reward"),
    )
    parser: str = Field(
        "auto",
        description="Format of tool calls in the model's text. `auto` selects the format of the chat template.",
        effect=Effect("blocks", "the same text of the model is read as different tool calls"),
    )
    history: Literal["keep", "as_template"] = Field(
        "keep",
        description="What the model sees of its earlier turns, if the chat template changes them, for example removes "
        "reasoning. `keep`: the turns as sampled. `as_template`: the turns as the template renders them; a trajectory "
        "then has several rows.",
        effect=Effect("blocks", "the model sees other earlier turns"),
    )
    max_turns: int = Field(16, ge=1, description="Maximum number of turns of the model in a trajectory.", effect=_LIMIT)
    max_tool_calls: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tool calls in a trajectory. Default: no limit besides `max_turns`.",
        effect=_LIMIT,
    )
    max_parallel_calls: int | None = Field(
        None,
        ge=1,
        description="Maximum number of calls of one turn that run. Further calls of the turn get an error message "
        "instead of a result. Default: no limit.",
        effect=Effect("blocks", "the model sees other tool results"),
    )
    turn_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens in one turn of the model. Default: what `max_tokens` leaves.",
        effect=_LIMIT,
    )
    trajectory_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens that the model generates in a trajectory, over all turns. `max_tokens` "
        "limits the tokens of the model and of the environment together. Default: `max_tokens`.",
        effect=_LIMIT,
    )
    step_timeout: float = Field(
        60.0,
        gt=0,
        description="Timeout in seconds of one call of an environment or tool. If a call exceeds it, its trajectory "
        "fails, and a call that cannot be cancelled is killed.",
        effect=_TIME,
        resumable=True,
    )
    trajectory_timeout: float | None = Field(
        None,
        gt=0,
        description="Time limit in seconds of a trajectory. A trajectory that exceeds it ends after its current turn "
        "and counts as truncated. Default: no limit.",
        effect=_TIME,
        resumable=True,
    )
    max_concurrent: int = Field(
        256,
        ge=1,
        description="Maximum number of trajectories per rank that run at once.",
        effect=Effect("harmless", "changes only how many trajectories wait; the sampled tokens are the same"),
        resumable=True,
    )
    result_chars: int = Field(
        8192,
        ge=16,
        description="Maximum length in characters of the result of a tool call. A note replaces the rest of a longer "
        "result.",
        effect=Effect("blocks", "the model sees other tool results"),
    )
    result_truncation: Literal["middle", "left", "right"] = Field(
        "middle",
        description="Part of a result over `result_chars` that is left out: its middle, its start (`left`) or its end "
        "(`right`).",
        effect=Effect("blocks", "the model sees other tool results"),
    )

    @property
    def interactive(self) -> bool:
        """Whether responses are conversations with an environment or with tools."""
        return self.environment is not None or bool(self.tools) or self.agent is not None

    @property
    def gives_rewards(self) -> bool:
        """Whether an environment or an agent rewards the responses. Tools give no rewards."""
        return self.environment is not None or self.agent is not None

    def without_environment(self) -> Self:
        """Returns the settings of an engine that answers each prompt with one response."""
        return self.model_copy(update={"environment": None, "tools": [], "agent": None})

    def for_validation(self, environment: str | None, agent: str | None) -> Self | None:
        """Returns the settings for validation with `val.environment` and `val.agent`, or None if they are these
        settings."""
        if environment in (None, self.environment) and agent in (None, self.agent):
            return None
        named = None if environment in NO_ENVIRONMENT else environment
        return self.model_copy(update={"environment": named, "tools": [], "agent": agent})
