"""A headless Chromium, spoken to over its debugging pipe: no package and no port needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 40.0


class Browser:
    """One page at a time: `open` it, `evaluate` in it, take a `screenshot`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def place_pipes() -> None:
            saved_in, saved_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(saved_in, 3)
            os.dup2(saved_out, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "about:blank"]
        self._process = subprocess.Popen(
            [PROGRAM, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._reading, self._writing = ours_in, ours_out
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.requests: list[str] = []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        os.close(self._reading)
        os.close(self._writing)

    def open(self, url: str, width: int, height: int) -> None:
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._session, self.requests = session, []
        self._call("Network.enable", {})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)
        self._call("Page.navigate", {"url": url})
        until = time.monotonic() + TIMEOUT_S
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        answer = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(until)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._reading, 1 << 20)
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
