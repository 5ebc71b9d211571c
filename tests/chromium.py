"""Debian's Chromium, headless, driven over a pipe: no package, no port, no download.

The DevTools protocol as JSON texts that end with a zero byte, on file descriptors 3 and 4
(``--remote-debugging-pipe``).
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-extensions --mute-audio "
    "--remote-debugging-pipe --disable-dev-shm-usage --force-color-profile=srgb"
)


class Chromium:
    """A browser with one page; what the page asked the network for and complained of is kept."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        assert PROGRAM
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
        command = f"exec {PROGRAM} {FLAGS} --user-data-dir={folder} about:blank"
        self._process = subprocess.Popen(
            # From numbers of two digits, so that 3 and 4 are free; dash knows no such numbers.
            ["bash", "-c", f"{command} 3<&{ends[0]} 4>&{ends[1]}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_read, to_write, *ends):
            os.close(end)
        self._ids, self._rest, self._session = itertools.count(1), b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self._targets() if t["type"] == "page")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def open(self, address: str | Path, wait_for: str = "main h1") -> None:
        if isinstance(address, Path):
            address = address.resolve().as_uri()
        self.call("Page.navigate", url=address)
        self.wait(f"document.querySelector({json.dumps(wait_for)})")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until a JavaScript expression holds."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never came true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A real click, at the middle of the element."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block:'center'}})"
        )
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int = 900, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def theme(self, name: str) -> None:
        """``light`` or ``dark``, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _targets(self) -> list[dict[str, Any]]:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            found: list[dict[str, Any]] = self.call("Target.getTargets")["targetInfos"]
            if any(target["type"] == "page" for target in found):
                return found
            time.sleep(0.05)
        raise AssertionError("Chromium opened no page")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.complaints.append(str(details.get("exception", details)))
            case "Runtime.consoleAPICalled" if event["params"]["type"] in ("error", "warning"):
                self.complaints.append(str(event["params"]["args"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"dialog: {event['params']['message']}")
                self.events.append(event)
