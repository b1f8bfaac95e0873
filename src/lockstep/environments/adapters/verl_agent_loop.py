"""Agent loops of verl: `rollout.environment: verl:agent_loops.yaml` (or a Python file with `@register`).

The coroutine `run` of a loop calls `server_manager.generate` for each turn of the model. Here it runs in a task next to
the engine: the ids of a call that follow the known tokens are the observation of a token-level environment, and the
sampled ids are the answer to the call. So sampled tokens are never tokenized again, and the mask is lockstep's own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from lockstep.environments.adapters.verl_loop_stand_in import LOOPS, SingleTurn, TokenOutput, ToolListWrap
from lockstep.environments.adapters.verl_stand_in import install_verl
from lockstep.environments.adapters.verl_tools import SINGLE, find_in_working_folder, verl_tools
from lockstep.environments.environment import TokenTurn
from lockstep.environments.return_values import json_or_empty
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, describe_error, run_file
from lockstep.types import ENVIRONMENT

_EXAMPLE = "write a list: [{name: my_agent, _target_: package.module.Class}]"
# Sampling parameters that a loop may pass unchanged or not at all. The run decides them.
_FIXED = ("temperature", "top_p", "top_k", "repetition_penalty", "logprobs")
_loading = Lock()


class LoopConfig:
    """Nested settings with the access of OmegaConf: `config.a.b`, `config["a"]` and `config.get("a")`."""

    def __init__(self, values: Mapping[str, Any], name: str = "config"):
        self._values, self._name = values, name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        if key not in self._values:
            raise AttributeError(f"{self._name}.{key} is not known; set it in rollout.environment_args.config")
        value = self._values[key]
        return LoopConfig(value, f"{self._name}.{key}") if isinstance(value, Mapping) else value

    __getitem__ = __getattr__

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self._values else default

    @property
    def config(self) -> LoopConfig:
        """The settings themselves: verl wraps them in an object with this attribute."""
        return self


class TurnServer:
    """What a loop gets as `server_manager`. Each call of `generate` waits for a turn of the model."""

    def __init__(self, sampling: Mapping[str, Any]):
        self._sampling = dict(sampling)
        self.asked: asyncio.Queue[tuple[list[int], list[int] | None]] = asyncio.Queue()
        self._answer: asyncio.Future[list[int]] | None = None

    async def generate(
        self, request_id: Any = None, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        if self._answer is not None:
            raise RuntimeError("the agent loop calls generate twice at once, and a trajectory is one row of tokens")
        media = [name for name, value in more.items() if name.endswith("_data") and value]
        if media:
            raise ValueError(f"the agent loop passes {media[0]} to generate, and lockstep trains on text only")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self.asked.put_nowait(([int(token) for token in prompt_ids], self._stop_ids(sampling_params)))
            return TokenOutput(token_ids=await self._answer)
        finally:
            self._answer = None

    def answer(self, ids: Sequence[int]) -> None:
        assert self._answer is not None
        self._answer.set_result(list(ids))

    def _stop_ids(self, given: Mapping[str, Any]) -> list[int] | None:
        for name, value in given.items():
            same = name in _FIXED and value == self._sampling.get(name)
            if value is not None and not same and name != "stop_token_ids":
                key = {"max_tokens": "turn_tokens", "max_new_tokens": "turn_tokens"}.get(name, name)
                raise ValueError(f"the agent loop changes sampling_params[{name!r}]; set rollout.{key}")
        stop = given.get("stop_token_ids")
        return None if stop is None else [int(token) for token in stop]


class VerlAgentLoop:
    """One trajectory of an agent loop. The row selects the loop with `agent_name`, else `default` does."""

    def __init__(
        self,
        environment: str,
        run: Mapping[str, Any],
        default: str = "",
        tools: Sequence[str] = (),
        config: Mapping[str, Any] = {},
    ):
        with _loading:
            self._loops = loops_of(environment)
            self._default = default or next(iter(self._loops))
            self._loops = {SINGLE: (SingleTurn, {}), **self._loops}
            self._tokenizer = _tokenizer(run["tokenizer"], run["chat_template"])
            self._tools = [tool for path in tools for tool in _tools(path).values()]
        self._config = LoopConfig(_merged(run["config"], config))
        self._sampling = dict(run["sampling"])
        self._server = TurnServer(self._sampling)
        self._held: list[int] = []
        self._mask: list[int] = []
        self._prompt = 0
        self._task: asyncio.Task[Any] | None = None
        self.info: dict[str, Any] = {}

    async def reset_tokens(self, row: Mapping[str, Any], seed: int) -> TokenTurn:
        name = row.get("agent_name") or self._default
        if name not in self._loops:
            why, known = f"the row has the agent_name {name!r}", ", ".join(self._loops)
            raise Refusal.at(ENVIRONMENT, why, f"use one of {known}, or add it to the file", code="unknown-name")
        created, arguments = self._loops[name]
        loop = created(
            trainer_config=self._config,
            server_manager=self._server,
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=self._config.data,
            dataset_config=self._config.data,
            hf_model_type=None,
            tools=ToolListWrap(self._tools),
            **arguments,
        )
        fields = {key: value for key, value in row.items() if key not in ("prompt", "tools", "agent_name")}
        extra = row.get("extra_info") or {}
        given = {"raw_prompt": row["prompt"], "tools_kwargs": extra.get("tools_kwargs") or {}, **fields}
        self._task = asyncio.get_running_loop().create_task(loop.run(dict(self._sampling), **given))
        return await self._next()

    async def step_tokens(self, ids: Sequence[int]) -> TokenTurn:
        self._held += ids
        self._mask += [1] * len(ids)
        self._server.answer(ids)
        return await self._next()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> TokenTurn:
        """Waits for the next call of `generate`, or for the end of the loop."""
        assert self._task is not None
        asked = asyncio.ensure_future(self._server.asked.get())
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return self._end(self._task.result())
        finally:
            asked.cancel()
        ids, stop_ids = asked.result()
        known = len(self._held)
        if ids[:known] != self._held:
            place = next((n for n, (one, two) in enumerate(zip(ids, self._held, strict=False)) if one != two), len(ids))
            raise ValueError(f"the agent loop changed token {place} of {known}, which the model has already seen")
        new = ids[known:]
        self._prompt = self._prompt or len(new)
        self._held, self._mask = ids, [*self._mask, *[0] * len(new)]
        return TokenTurn(new, stop_ids=stop_ids)

    def _end(self, output: Any) -> TokenTurn:
        """Compares the tokens that a loop returns with those of the trajectory, and returns its reward."""
        if not self._prompt:
            raise ValueError("the agent loop ended without a call of generate, so there is nothing to train")
        ids, mask = list(output.response_ids), list(output.response_mask)
        held, trained = self._held[self._prompt :], self._mask[self._prompt :]
        shared = min(len(ids), len(held))
        if list(output.prompt_ids) != self._held[: self._prompt] or ids[:shared] != held[:shared]:
            raise ValueError("the agent loop returned other tokens than those that the model has seen and sampled")
        if mask[:shared] != trained[:shared] or any(mask[shared:]) or any(trained[shared:]):
            raise ValueError("the response_mask of the agent loop is not 1 exactly at the sampled tokens")
        fields = getattr(output, "extra_fields", None) or {}
        self.info = {**json_or_empty(fields), "num_turns": int(output.num_turns or 0)}
        return TokenTurn(reward=float(output.reward_score or 0.0), done=True)


# Files of agent loops -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def loops_of(source: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Loads the agent loops of a file: for each name, the class and its further arguments. Raises `Refusal`."""
    path = Path(source).expanduser().absolute()
    if not path.is_file():
        raise Refusal.at(ENVIRONMENT, f"file {source} does not exist", "give the path of the file", code="no-such-file")
    find_in_working_folder()
    install_verl()
    if path.suffix == ".py":
        return _registered(path)
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = f"{path.name} is not YAML: {' '.join(str(error).split())}"
        raise Refusal.at(ENVIRONMENT, why, "fix the file", code="invalid-yaml") from None
    if not isinstance(entries, list) or not entries:
        raise Refusal.at(path.name, "is not a list of agent loops", _EXAMPLE, code="wrong-type")
    return dict(_entry(entry, f"{path.name}: [{number}]") for number, entry in enumerate(entries))


def _registered(path: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    try:
        run_file(path)
    except Unloadable as error:
        raise Refusal.at(path.name, error.why, error.remedy, code=error.code) from None
    if not LOOPS:
        why, remedy = (
            "has no agent loop",
            "decorate a class with @register(NAME), or write a YAML file with name and _target_",
        )
        raise Refusal.at(path.name, why, remedy, code="invalid-function")
    return {name: (created, {}) for name, created in LOOPS.items()}


def _entry(entry: Any, place: str) -> tuple[str, tuple[Any, dict[str, Any]]]:
    given = dict(entry) if isinstance(entry, Mapping) else {}
    name, target = given.pop("name", None), given.pop("_target_", None)
    module, _, last = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    if not isinstance(name, str) or not module:
        raise Refusal.at(place, "has no name and _target_", _EXAMPLE, code="not-set")
    try:
        found = getattr(import_module(module), last)
    except Exception as error:  # noqa: BLE001 - a module may raise anything when it is imported
        remedy = "put the file into the working directory, or install the package"
        if module.startswith("verl."):
            remedy = "install verl (pip install verl), or write a loop that needs only AgentLoopBase"
        why = f"{target}: {describe_error(error, module)}"
        raise Refusal.at(f"{place}._target_", why, remedy, code="import-failed") from None
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "run", None)):
        why, remedy = f"{target} has no coroutine run", "write: async def run(self, sampling_params, **kwargs)"
        raise Refusal.at(f"{place}._target_", why, remedy, code="invalid-function")
    return name, (found, given)


@lru_cache(maxsize=8)
def _tools(path: str) -> dict[str, Any]:
    return dict(verl_tools(path, ENVIRONMENT).tools)


@lru_cache(maxsize=2)
def _tokenizer(path: str, chat_template: str | None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def _merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings, with those of `more` on top."""
    merged = dict(values)
    for key, value in more.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged
