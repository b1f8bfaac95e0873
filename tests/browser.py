"""A real headless Chromium, driven over its DevTools pipe: file descriptors 3 and 4, messages that end with NUL."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from hang import HANG

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. `console` has its errors and warnings, `requests` the addresses that it requested."""

    def __init__(self, program: str, timeout: float = HANG):
        self.timeout = timeout
        self.console: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._loaded = False
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Away from 3 and 4, which they are copied to in the child.
        copies = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]

        def as_three_and_four() -> None:
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self._process = subprocess.Popen(
            [program, *QUIET, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=as_three_and_four,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *copies):
            os.close(end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The browser ends its child processes itself; a broken one is killed.
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(HANG)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != self._calls:
                self._note(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return dict(answer["result"])

    def open(self, url: str) -> None:
        self.console.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._receive())
        self.settle()

    def settle(self) -> None:
        """Wait until everything is drawn, including observers and events."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def evaluate_in_frame(self, script: str) -> Any:
        """In a frame of another origin, which has a separate process; None while there is none."""
        targets = self.call("Target.getTargets")["targetInfos"]
        frame = next((target["targetId"] for target in targets if target["type"] == "iframe"), None)
        if frame is None:
            return None
        page = self._session
        session = self.call("Target.attachToTarget", targetId=frame, flatten=True)["sessionId"]
        self._session = session
        try:
            return self.evaluate(script)
        finally:
            self._session = page
            self.call("Target.detachFromTarget", sessionId=session)

    def show(self, width: int, height: int = 900, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False, clicks: int = 0) -> None:
        """`kind` is moved, pressed or released; `pressed` says whether the left button is down meanwhile."""
        button = "left" if kind != "moved" else "none"
        self.call(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind.capitalize()}",
            x=x,
            y=y,
            button=button,
            buttons=int(pressed),
            clickCount=clicks,
        )

    def click(self, x: float, y: float, times: int = 1) -> None:
        self.mouse("moved", x, y)
        for count in range(1, times + 1):
            self.mouse("pressed", x, y, pressed=True, clicks=count)
            self.mouse("released", x, y, clicks=count)
        self.settle()

    def screenshot(self, path: Path, full_page: bool = False) -> Path:
        """The visible part, or the full page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer in {self.timeout:.0f} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError(f"Chromium ended with {self._process.poll()}")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        name, params = message.get("method"), message.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded = True
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif name == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(str(params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(str(params["entry"]))
        elif name == "Page.javascriptDialogOpening":
            self.console.append(f"dialog: {params['message']}")
            self._calls += 1
            answer = {"id": self._calls, "sessionId": self._session, "method": "Page.handleJavaScriptDialog"}
            os.write(self._out, json.dumps({**answer, "params": {"accept": True}}).encode() + b"\0")
