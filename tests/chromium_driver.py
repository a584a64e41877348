"""Drive a headless Chromium through the DevTools protocol over a pipe: no extra package, no port, no network.

The protocol is the one of ``--remote-debugging-pipe``: JSON messages that end with a NUL byte, on file descriptors 3
(to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--no-first-run", "--no-default-browser-check", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip
# A cold start of the browser on a busy two-core machine was seen to take ten seconds.
_TIMEOUT = 90.0
# Runs in the child: give the two pipes the numbers 3 and 4, then become the browser.
_AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str:
    """Return the path of the browser; fail with a sentence that says what to install."""
    for name in _NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise AssertionError(f"no browser found: install one of {', '.join(_NAMES)} to check the HTML report")


class Page:
    """One page of a headless browser.

    ``requests`` and ``console`` hold what the page asked for and complained about since the last ``open``.
    """

    def __init__(self, profile: Path) -> None:
        self.requests: list[str] = []
        self.console: list[str] = []
        self._next_id = 0
        self._buffer = b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [find_chromium(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        try:
            self._attach()
        except AssertionError:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser that this page started."""
        os.close(self._write)  # the browser quits when its pipe closes
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are recorded."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._next_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, waiting_for: str) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {waiting_for} within {_TIMEOUT:g} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"the browser ended before it answered {waiting_for}"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._record(message.get("method", ""), message.get("params", {}))
        return message

    def _record(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(f"{params['type']}: {params['args']}"[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Open a local file at ``width`` pixels and wait until its scripts and charts are done."""
        self.requests.clear()
        self.console.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.set_dark(dark)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def set_dark(self, dark: bool) -> None:
        """Choose what ``prefers-color-scheme`` says."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _TIMEOUT
        while not self.run(condition):
            assert time.monotonic() < deadline, f"still not true in the page: {condition}"
            time.sleep(0.05)

    def screenshot(self, path: Path, *, full: bool = True) -> None:
        """Write a PNG of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))
