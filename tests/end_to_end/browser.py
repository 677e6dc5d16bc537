"""A headless Chromium, driven over its debugging pipe, so that only the browser itself must be installed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
"""Return the path of this machine's browser; None without one."""

START_SECONDS = 60.0
CALL_SECONDS = 30.0
_POLL_SECONDS = 0.05

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and the sandbox does not
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--window-size=1280,1000",
    "--remote-debugging-pipe",
)

# Chromium reads its commands from file descriptor 3 and answers on 4.
_ON_ITS_PIPES = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page of the browser, by the Chrome DevTools protocol."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._calls = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Errors that the page logged or threw."""

    def attach(self) -> None:
        target = self._call("Target.createTarget", {"url": "about:blank"}, START_SECONDS)["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaiting promises."""
        answer = self._call(
            "Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True}
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = CALL_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {expression}\n{self.text()}"
            time.sleep(_POLL_SECONDS)

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.write(text)

    def click(self, selector: str) -> None:
        """Press the left button of the mouse in the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", {"type": kind, "button": "left", "clickCount": 1, **place})

    def press(self, key: Literal["Enter", "Escape", "Tab", "ArrowRight"], *, shift: bool = False) -> None:
        """Press a key of the keyboard, where the focus is."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **text})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def write(self, text: str) -> None:
        """Write a text where the focus is."""
        self._call("Input.insertText", {"text": text})

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", {"features": features})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def screenshot(self, path: Path) -> None:
        answer = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(
        self, method: str, parameters: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._from_browser, 1 << 16)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: Mapping[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


@contextmanager
def chromium() -> Iterator[Page]:
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    with TemporaryDirectory(prefix="tandem-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _ON_ITS_PIPES, str(command_read), str(answer_write)),
                *(CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"),
            ],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(command_read)
        os.close(answer_write)
        try:
            page = Page(command_write, answer_read)
            page.attach()
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(command_write)
            os.close(answer_read)
