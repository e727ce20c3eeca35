"""A headless Chromium, driven through its debugging pipe with nothing but the standard library.

    python -m tests.serving.browser http://127.0.0.1:8000 docs/images/page.png

has the page of a running server write what it proposes, and takes a picture of it.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT = 20.0
"""Seconds for whatever a page is waited for."""
FLAGS = [
    "--headless",
    "--no-sandbox",  # root, in a container, has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
]
KEYS = {  # key -> code, virtual key code, text
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    " ": ("Space", 32, " "),
}
CONTROL, SHIFT = 2, 8
"""Modifiers of a key."""


class Browser:
    """Messages to a browser process and from it, each a JSON text that ends in a NUL."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._num_sent = 0
        self._pending = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._receive(method)).get("id") != self._num_sent:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for_event(self) -> None:
        self.events.append(self._receive("an event"))

    def _receive(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._reader], [], [], TIMEOUT)
            assert ready, f"{method}: no message from the browser for {TIMEOUT:.0f} s"
            read = os.read(self._reader, 1 << 16)
            assert read, f"{method}: the browser has ended"
            self._pending += read
        message, _, self._pending = self._pending.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def page(self) -> "Page":
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        return Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str, *, width: int = 1100, height: int = 900, **media: str) -> None:
        """Load a page afresh. width, height: in CSS pixels. media: features such as `prefers_color_scheme="dark"`."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._browser.events.clear()
        self.call("Page.navigate", url=url)
        while not self.events("Page.loadEventFired"):
            self._browser.wait_for_event()

    def evaluate(self, script: str) -> Any:
        """What an expression gives, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, condition: str, timeout: float = TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, (
                f"never true: {condition}; the page: {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.01)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, number, text = KEYS[key]
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The browser's events of this tab since it was opened."""
        self.call("Page.enable")  # earlier events come before the answer
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in methods]

    def picture(self, file: Path) -> None:
        """All of the page as wide as the tab, not only what fits into it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the context."""
    assert CHROMIUM is not None, "chromium is not installed"
    # The browser reads at 3 and writes at 4, so no end of ours may be one of those.
    ends = [
        fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (os.pipe(), os.pipe()) for end in (*pipe,)
    ]
    its_reader, writer, reader, its_writer = ends
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        actions = [
            (os.POSIX_SPAWN_DUP2, its_reader, 3),
            (os.POSIX_SPAWN_DUP2, its_writer, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        process = os.posix_spawn(CHROMIUM, command, dict(os.environ), file_actions=actions, setpgroup=0)
        os.close(its_reader)
        os.close(its_writer)
        try:
            yield Browser(reader, writer)
        finally:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(reader)
            os.close(writer)


def main(url: str, file: Path) -> None:
    from PIL import Image  # matplotlib brings it

    with chromium() as browser:
        page = browser.page()
        page.open(url, width=1040)
        page.wait_for("document.getElementById('model').textContent !== ''")
        page.evaluate("document.getElementById('write').click()")
        page.wait_for("/Seed/.test(document.getElementById('status').textContent)", timeout=300)
        file.parent.mkdir(parents=True, exist_ok=True)
        page.picture(file)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(128).save(file, optimize=True)  # a third of the size


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
