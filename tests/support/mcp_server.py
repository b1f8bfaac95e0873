"""An MCP server in plain Python, for tests that have no MCP package: its tools fail, hang, crash and write much."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTHING = {"type": "object", "properties": {}}
PAGES = {
    None: (["echo", "count", "fail"], "second"),
    "second": (["hang", "crash", "picture", "long", "cancelled", "refuse"], None),
}
count = 0
cancelled: list[int] = []
writing = threading.Lock()


def send(**message: object) -> None:
    with writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def called(name: str, arguments: dict[str, str]) -> dict[str, object]:
    global count
    if name == "echo":
        return {"content": [{"type": "text", "text": arguments["text"]}, {"type": "text", "text": "end"}]}
    if name == "count":
        count += 1
        return {"content": [], "structuredContent": {"count": count, "process": os.getpid()}}
    if name == "fail":
        return {"content": [{"type": "text", "text": "no such file"}], "isError": True}
    if name == "hang":
        time.sleep(10_000)
    if name == "crash":
        os._exit(3)
    if name == "cancelled":
        return {"content": [{"type": "text", "text": str(len(cancelled))}]}
    if name == "picture":
        return {"content": [{"type": "image", "data": "", "mimeType": "image/png"}]}
    return {"content": [{"type": "text", "text": "x" * 1_000_000}]}


def answer_to(message: dict[str, object]) -> dict[str, object]:
    number, parameters = message["id"], message.get("params") or {}
    assert isinstance(parameters, dict)
    if message["method"] == "initialize":
        result: dict[str, object] = {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    elif message["method"] == "tools/list":
        names, following = PAGES[parameters.get("cursor")]
        tools = [{"name": name, "inputSchema": TEXT if name == "echo" else NOTHING} for name in names]
        result = {"tools": tools, **({"nextCursor": following} if following else {})}
    elif parameters["name"] == "refuse":
        return {"id": number, "error": {"code": -32602, "message": "refused"}}
    else:
        result = called(parameters["name"], parameters["arguments"])
    return {"id": number, "result": result}


def answer(message: dict[str, object]) -> None:
    if message["method"] == "initialize":
        send(id="ask", method="roots/list")
    send(**answer_to(message))


if __name__ == "__main__":
    print("this line is not a message", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "notifications/cancelled":
            cancelled.append(message["params"]["requestId"])
        elif "id" in message and "method" in message:
            threading.Thread(target=answer, args=(message,), daemon=True).start()
