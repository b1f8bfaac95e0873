"""A server of OpenEnv with two environments: a guessing game with typed actions, and a counter with tools. Prints its
address. Runs with OpenEnv's own interpreter."""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Words(Action):
    message: str


class Hint(Observation):
    text: str = ""
    low: int = 1


class Game(Environment):  # type: ignore[type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 20, **more: Any) -> Hint:
        self.number, self.steps = random.Random(seed).randint(1, high), 0
        return Hint(text=f"Guess a number from 1 to {high}.")

    def step(self, action: Any, **more: Any) -> Hint:
        self.steps += 1
        number = int(action.message) if isinstance(action, Words) else action.number
        if number == self.number:
            return Hint(text="right", reward=1.0, done=True, metadata={"steps": self.steps})
        return Hint(text="higher" if number < self.number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=self.steps)


class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.count = 0

        @server.tool
        def add(amount: int) -> str:
            """Adds to the counter."""
            self.count += amount
            return f"the counter is {self.count}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        self.count = 0
        return Observation(metadata={"target": 3})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return Observation(metadata={"error": "no such action"})

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return self._rewarded(super().step(action, timeout_s, **more))

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s, **more))

    def _rewarded(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation):
            observation.reward, observation.done = float(self.count == 3), self.count >= 3
        return observation

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=self.count)


app = FastAPI()
app.mount("/words", create_fastapi_app(Game, Words, Hint, max_concurrent_envs=64))
app.mount("/tools", create_fastapi_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=64))
app.mount("/", create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
print(f"http://127.0.0.1:{port}", flush=True)
uvicorn.run(app, port=port, log_level="warning")
