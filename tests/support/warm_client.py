"""Runs a Python command in a process forked by `warm_server.py`, and is to its caller what that process is.

    python -IS warm_client.py SOCKET PYTHON [-u] [-m MODULE | -c CODE | FILE] WORDS...

Nothing but the standard library is imported, and no site packages. Where the server will not have it, PYTHON is run
with these words instead of this process.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def end_by(number: int) -> None:
    """Of a signal, as the process did, and without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def line(told: io.BufferedReader) -> bytes:
    try:
        return told.readline()
    except ConnectionResetError:
        return b""


def server_is_gone(address: str) -> None:
    with open(os.path.join(os.path.dirname(address), "server.log")) as log:
        sys.exit(f"the server at {address} is gone: {log.read()}")


def main() -> None:
    address, python, *typed = sys.argv[1:]
    words = typed[1:] if typed[:1] == ["-u"] else typed
    module = code = None
    if words[:1] == ["-m"]:
        module, given = words[1], ["-m", *words[2:]]
    elif words[:1] == ["-c"]:
        code, given = words[1], ["-c", *words[2:]]
    elif words and not words[0].startswith("-") and os.path.isfile(words[0]):
        given = words
    else:
        os.execv(python, [python, *typed])
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    umask = os.umask(0)
    os.umask(umask)
    job = {
        "module": module,
        "code": code,
        "words": given,
        "unbuffered": len(typed) > len(words),
        "folder": os.getcwd(),
        "umask": umask,
        "ignored": ignored,
        "environment": dict(os.environ),
    }
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except ConnectionRefusedError:
        server_is_gone(address)
    data = json.dumps(job).encode()
    data = len(data).to_bytes(4, "big") + data
    sent = socket.send_fds(server, [data], [0, 1, 2])
    if sent < len(data):
        server.sendall(data[sent:])
    for number in set(PASSED_ON) - set(ignored):
        # Those that come before the process is there wait in the socket.
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    told = server.makefile("rb")
    answer = line(told)
    if answer == b"cold\n":
        os.execv(python, [python, *typed])
    status = line(told) if answer else b""
    if not status:
        server_is_gone(address)
    code = os.waitstatus_to_exitcode(int(status))
    if code < 0:
        end_by(-code)
    os._exit(code)


if __name__ == "__main__":
    main()
