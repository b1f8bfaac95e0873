"""A process that has imported the heavy packages and forks a child for each command it is asked for.

The child is a process of its own: with the working folder, environment, arguments and streams of whoever asked, and
it ends as any interpreter does. Only the imports, 6 s of a processor, were done before. Nothing else was: no thread
is running and no model has run when the fork happens.

    python warm_server.py LISTENER_FD [MODULES...]        # and a pipe from its owner as standard input

A client (`warm_client.py`) sends one request, then bytes that are numbers of signals for its process; it is told
`started`, then how it ended. It is told `cold` where its environment differs from this process's in more than what
nobody reads while importing. When a client is gone its process is killed; when the owner is, all are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from typing import Any

MODULES = (
    *("lockstep.cli", "lockstep.train.offline", "lockstep.train.online", "lockstep.train.start"),
    *("lockstep.commands.eval", "lockstep.commands.generate", "lockstep.commands.sample", "lockstep.commands.export"),
    *("lockstep.commands.plan", "lockstep.commands.show", "lockstep.data.prepare.sampled", "lockstep.model.tiny"),
    *("lockstep.parity.compare.compare_runs", "lockstep.parity.replay.replay_command", "lockstep.api.front_door"),
    *("pyarrow.parquet", "peft", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto"),
    *("transformers.models.qwen2.tokenization_qwen2", "transformers.generation", "torch.distributed.fsdp"),
)
HARMLESS = {
    *("PATH", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"),
    *("LINES", "COLUMNS", "LOCKSTEP_CACHE", "LOCKSTEP_MISSED_AFTER", "LOCKSTEP_SOAK"),
    # What torchrun says to its processes, besides its own TORCHELASTIC_...
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "PYTHON_EXEC",  # what it starts them with
    "CUDA_VISIBLE_DEVICES",  # read when a process first uses the driver
}
"""Variables that are read by a command when it runs. Any other one may have had its effect while importing."""
ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"


class Child:
    def __init__(self, pid: int, client: socket.socket) -> None:
        self.pid, self.client = pid, client
        self.handle = os.pidfd_open(pid)

    def kill(self, number: int) -> None:
        """It is not reaped yet, so the number is its own."""
        os.kill(self.pid, number)


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request: four bytes of length, JSON, and the three standard streams beside its first bytes."""
    data, streams, _, _ = socket.recv_fds(client, 65536, 3)
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        more = client.recv(65536)
        if not more:
            raise ConnectionError("a client went away within its request")
        data += more
    return json.loads(data[4:]), list(streams)


def differs(environment: dict[str, str], own: dict[str, str]) -> bool:
    names = {name for name in environment.keys() | own.keys() if environment.get(name) != own.get(name)} - HARMLESS
    return any(not name.startswith("TORCHELASTIC_") for name in names)


def threads() -> list[str]:
    """The names of threads that importing has started, by which this process cannot be forked safely (OpenBLAS starts
    some with more than one in OMP_NUM_THREADS)."""
    own = "/proc/self/task"
    names = []
    for number in os.listdir(own):
        if int(number) != os.getpid():
            with open(f"{own}/{number}/comm") as file:
                names.append(file.read().strip())
    return names


def standard_stream(number: int, mode: str, like: Any, *, unbuffered: bool = False) -> Any:
    """A standard stream as the interpreter opens it."""
    if unbuffered:
        raw = io.FileIO(number, mode, closefd=False)
        return io.TextIOWrapper(raw, encoding=like.encoding, errors=like.errors, write_through=True)
    buffering = 1 if number == 2 or os.isatty(number) else -1
    return open(number, mode, buffering, encoding=like.encoding, errors=like.errors, closefd=False)


class Server:
    def __init__(self, listener: socket.socket, own: dict[str, str]) -> None:
        """`own`: the environment before anything was imported."""
        self.listener, self.own = listener, own
        # What importing has set besides is set in the children too, as it is where they import themselves.
        self.set_by_imports = {name: value for name, value in os.environ.items() if name not in own}
        self.children: dict[int, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.end)

    def serve(self) -> dict[str, Any]:
        """Comes back in children alone, with what to run."""
        while True:
            for key, _ in self.selector.select():
                job = key.data(key.fileobj)
                if job is not None:
                    return job

    def accept(self, listener: socket.socket) -> dict[str, Any] | None:
        client, _ = listener.accept()
        try:
            job, streams = received(client)
        except ConnectionError:
            client.close()
            return None
        seen = {name: value for name, value in job["environment"].items() if self.set_by_imports.get(name) != value}
        if differs(seen, self.own) or threads():
            client.sendall(b"cold\n")
            client.close()
        elif (pid := os.fork()) == 0:
            self.become(job, streams)
            return job
        else:
            child = Child(pid, client)
            self.children[pid] = child
            self.selector.register(client, selectors.EVENT_READ, lambda _: self.pass_on(child))
            self.selector.register(child.handle, selectors.EVENT_READ, lambda _: self.reap(child))
            client.sendall(b"started\n")
        for stream in streams:
            os.close(stream)
        return None

    def become(self, job: dict[str, Any], streams: list[int]) -> None:
        """The forked child takes on all that it would have had from whoever started it."""
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 65536)
        os.umask(job["umask"])
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update({**self.set_by_imports, **job["environment"]})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in job["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        # The ones there are know of their files only what was true before. What holds them still writes to the streams.
        sys.stdin = sys.__stdin__ = standard_stream(0, "r", sys.stdin)
        unbuffered = job["unbuffered"]
        sys.stdout = sys.__stdout__ = standard_stream(1, "w", sys.stdout, unbuffered=unbuffered)
        sys.stderr = sys.__stderr__ = standard_stream(2, "w", sys.stderr, unbuffered=unbuffered)
        tempfile.tempdir = None  # another TMPDIR would be another folder
        # Python's own random numbers see to it themselves.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()

    def pass_on(self, child: Child) -> None:
        if child.pid not in self.children:
            return  # it ended in the same moment
        try:
            numbers = child.client.recv(64)
        except ConnectionError:
            numbers = b""
        if not numbers:
            self.selector.unregister(child.client)
            numbers = bytes([signal.SIGKILL])
        for number in numbers:
            child.kill(number)

    def reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self.selector.unregister(child.handle)
        os.close(child.handle)
        del self.children[child.pid]
        if child.client in [key.fileobj for key in self.selector.get_map().values()]:
            self.selector.unregister(child.client)
            with contextlib.suppress(ConnectionError):  # whoever asked has just gone: there is nobody to tell
                child.client.sendall(b"%d\n" % status)
        child.client.close()

    def end(self, _: object) -> None:
        """The owner writes nothing: its pipe can be read when it is gone."""
        for child in self.children.values():
            child.kill(signal.SIGKILL)
        for child in list(self.children.values()):
            os.waitpid(child.pid, 0)
        os._exit(0)


def import_without_threads(modules: Sequence[str]) -> None:
    """pyarrow's wheels for x86_64 hold a jemalloc that starts a thread when it is loaded, unless this variable forbids
    it. A process with a thread cannot be forked safely. The commands do not see the variable."""
    given = os.environ.get(ARROW_ALLOCATOR)
    os.environ[ARROW_ALLOCATOR] = "background_thread:false"
    for module in modules:
        importlib.import_module(module)
    del os.environ[ARROW_ALLOCATOR]
    if given is not None:
        os.environ[ARROW_ALLOCATOR] = given


def build_command_line() -> None:
    """typer builds all verbs when a command starts, which takes as long as a light import."""
    if "lockstep.cli" in sys.modules:
        typer = importlib.import_module("typer.main")
        typer.get_command = functools.cache(typer.get_command)
        typer.get_command(sys.modules["lockstep.cli"].app)


def main() -> None:
    own = dict(os.environ)
    listener = socket.socket(fileno=int(sys.argv[1]))
    import_without_threads(sys.argv[2:] or MODULES)
    build_command_line()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    if threads():
        print("commands start cold; imports have started threads:", ", ".join(threads()), flush=True)
    server = Server(listener, own)
    # In a child it is kept too: its descriptors are closed there, and what takes it apart would close others' of the
    # same numbers.
    run(server.serve())


def run(job: dict[str, Any]) -> None:
    """In the child. It ends as an interpreter does, but for taking all modules apart, where there was no error."""
    sys.argv = job["words"]
    code: object = 0
    try:
        if job["module"]:
            sys.path[0] = os.getcwd()
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        elif job["code"] is not None:
            sys.path[0] = ""
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(job["code"], "<string>", "exec"), vars(main))
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            raise
    except KeyboardInterrupt:
        # As an interpreter ends; a forked one of Python 3.12 would exit with 1.
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
