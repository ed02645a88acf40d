"""A real browser for tests: Debian's chromium, headless, driven through its debugging pipe. Nothing else is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Page:
    """One tab: sends commands, keeps events."""

    def __init__(self, to_browser: int, from_browser: int):
        self.writer, self.reader = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self.number, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = self.reader.read(1 << 16)
            assert part, "the browser has gone"
            self.rest += part
        blob, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(blob)
        if "id" not in message:
            self.events.append(message)
        return message

    def open(self, file: Path, width: int = 1280, *, dark: bool = False) -> None:
        """Show a file at this width, with a phone's pixels below 600."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def evaluate(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path, top: int = 0, height: int | None = None) -> None:
        """The whole page, or a part of it."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"] - top, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def problems(self) -> list[str]:
        """Whatever the console, the page's script or the browser complained of, and every address but the file's."""
        found = []
        for event in self.events:
            about = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown" | "Log.entryAdded":
                    found.append(json.dumps(about))
                case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(about))
                case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("file:", "data:")):
                    found.append(about["request"]["url"])
        return found


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one tab; gone afterwards."""
    assert CHROMIUM is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]  # it asks nobody
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            a, b = os.dup(their_in), os.dup(their_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        process = subprocess.Popen(
            command, close_fds=False, preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(their_in)
        os.close(their_out)
        page = None
        try:
            page = Page(our_out, our_in)
            yield page
        finally:
            process.terminate()
            process.wait(20)
            if page is not None:
                page.writer.close()
                page.reader.close()
