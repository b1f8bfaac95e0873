"""The host process of agents: runs many agents at once, each a call of the user's function or a program. Imports no
large packages."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.environments.host_worker import LOADING, HostProcess, as_line, load_object
from lockstep.environments.return_values import checked_result, shown
from lockstep.functions import Unloadable, check_signature
from lockstep.launch.containers import forget_container, note_container, remove_container
from lockstep.launch.supervisor import worker_socket

# `rollout.agent: command:PROGRAM ARGUMENTS` runs a program.
COMMAND = "command:"
# The last bytes of a program's output that are kept.
OUTPUT_BYTES = 2**16
# Seconds that a program gets after SIGTERM. The host waits 0.5 s for a cancelled agent.
TERMINATE_SECONDS = 0.3


def serve(descriptor: int, agent: str, arguments: Mapping[str, Any], threads: int) -> None:
    """Loads the agent, then answers calls until the connection is closed. `arguments` has the keyword arguments of the
    function (`named`) and the address of the run (`host`)."""
    connection = worker_socket(descriptor)
    _connect_directly(arguments["host"])
    try:
        run, file = load_agent(agent, arguments["named"])
    except Unloadable as error:
        connection.sendall(as_line(LOADING, {"unusable": [error.why, error.remedy, error.code]}))
        return
    connection.sendall(as_line(LOADING, {"group": False}))
    asyncio.run(_AgentHost(connection, run, {}, file, threads).run())


def _connect_directly(host: str) -> None:
    """Lets HTTP clients reach the run: without a proxy, and with a key, which OpenAI's client requires."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), host]))
    os.environ.setdefault("OPENAI_API_KEY", "lockstep")


def load_agent(agent: str, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], str]:
    """Returns the function that runs the agent with the arguments `row`, `base_url` and `seed`, and its file."""
    if agent.startswith(COMMAND):
        words = command_words(agent)
        return partial(_run_program, words), words[0]
    function, file = load_object(agent, "function")
    name = agent.rpartition(":")[2]
    if inspect.isclass(function):
        raise Unloadable(f"{name} is a class", f"write: def {name}(row, base_url)", code="invalid-function")
    # A function gets the seed only if it has a parameter of this name.
    seeded = "seed" not in arguments and "seed" in _parameters(function)[2:]
    given = partial(function, **arguments, **({"seed": 0} if seeded else {}))
    check_signature(given, name, ("row", "base_url"), by_name=False)

    def run(row: Mapping[str, Any], base_url: str, seed: int) -> Any:
        return function(row, base_url, **arguments, **({"seed": seed} if seeded else {}))

    async def run_async(row: Mapping[str, Any], base_url: str, seed: int) -> Any:
        return await run(row, base_url, seed)

    return run_async if inspect.iscoroutinefunction(function) else run, file


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # `check_signature` reports it
        return []


def command_words(agent: str) -> list[str]:
    """Returns the words of a command. Raises `Unloadable` if the program does not exist."""
    try:
        words = shlex.split(agent[len(COMMAND) :])
    except ValueError as error:
        raise Unloadable(f"is not a command line: {error}", "fix the quotes", code="invalid-function") from None
    if not words:
        raise Unloadable("has no program", "write: command:PROGRAM ARGUMENTS", code="invalid-function")
    if shutil.which(words[0]) is None:
        remedy = "install it, or give its path"
        raise Unloadable(f"there is no program {words[0]}", remedy, code="no-such-file")
    return words


class _AgentHost(HostProcess):
    async def _call(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields["do"] != "run":
            return {}
        value = await self._run("run", self._created, {}, fields["row"], fields["base_url"], fields["seed"])
        return await self.valid(lambda: {"result": checked_result(value)})


async def _run_program(words: list[str], row: Mapping[str, Any], base_url: str, seed: int) -> Any:
    """Runs a program. It gets the row as JSON on its standard input, and the base URL in OPENAI_BASE_URL and in place
    of `{base_url}` among its arguments. Returns the reward on the last line of its output, if there is one."""
    environment = {**os.environ, "OPENAI_BASE_URL": base_url, "LOCKSTEP_SEED": str(seed)}
    words, container = labelled_container(words)
    if container:
        note_container(container, words[0])
    process = await asyncio.create_subprocess_exec(
        *(word.replace("{base_url}", base_url) for word in words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    status = None
    try:
        given = json.dumps(dict(row), default=str, ensure_ascii=False).encode(errors="replace") + b"\n"
        output, _ = await asyncio.gather(_last_output(process), _write(process, given))
        status = await process.wait()
    finally:
        if container:
            _end_container(container, words[0], removed=status is not None and status >= 0)
        await _end(process)
    if status:
        raise RuntimeError(f"the program ended with exit status {status}")
    return _printed(output)


def labelled_container(words: list[str]) -> tuple[list[str], str]:
    """Returns the command with a label for its container, and the label. It is empty if the command is not
    `docker run` or `podman run`."""
    run = 1 + (words[1:2] == ["container"])
    if Path(words[0]).name not in ("docker", "podman") or words[run : run + 1] != ["run"]:
        return words, ""
    label = f"agent-{secrets.token_hex(8)}"
    return [*words[: run + 1], "--label", f"lockstep={label}", *words[run + 1 :]], label


def _end_container(label: str, program: str, *, removed: bool) -> None:
    """Removes the container of a program that was stopped: a container may ignore SIGTERM, and SIGKILL ends only its
    client. The removal takes place in a thread, because the host waits only `CANCEL_SECONDS` for a cancelled agent. If
    the host ends first, its supervisor removes the container."""

    def end() -> None:
        time.sleep(TERMINATE_SECONDS)
        remove_container(label, program)
        forget_container(label)

    if removed:
        forget_container(label)
    else:
        threading.Thread(target=end, daemon=True).start()


async def _write(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its input
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def _last_output(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    kept = b""
    while piece := await process.stdout.read(2**16):
        kept = (kept + piece)[-OUTPUT_BYTES:]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the program and the processes of its group. A client of a container passes SIGTERM on to the container."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), TERMINATE_SECONDS)
    _signal(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _printed(output: bytes) -> Any:
    """Returns the JSON value on the last line of the output. None if the last line is not JSON."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if value is not None and not isinstance(value, int | float | dict):
        raise ValueError(f"the last line of the output is {shown(value)}, expected a reward")
    return value
