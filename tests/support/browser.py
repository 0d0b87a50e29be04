"""A headless Chromium for tests, over the pipe of its DevTools protocol: it needs the browser, and no driver.

The protocol is https://chromedevtools.github.io/devtools-protocol: JSON messages, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
MISSING = "" if CHROMIUM else "needs a browser: apt-get install chromium"
"""Why there is no browser; empty if there is one."""


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, width: int = 1500, height: int = 1000, seconds: float = 60) -> None:
        self.seconds = seconds
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._count, self._rest, self._events = 0, b"", []
        self._session: dict[str, str] = {}
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--no-first-run", "--disable-gpu", "--disable-component-update", "--disable-background-networking",
                     "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        redirected = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *arguments]
        try:
            # Without the sanitizers' libraries, which a browser does not start with.
            self._process = subprocess.Popen(redirected, pass_fds=(theirs_in, theirs_out), start_new_session=True,
                                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                             env=os.environ | {"LD_PRELOAD": ""})
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            found = self.command("Target.attachToTarget", targetId=target, flatten=True)
            self._session = {"sessionId": found["sessionId"]}
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.command(f"{domain}.enable")
            self.size(width, height)
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> int:
        """The number of the group of the browser's processes."""
        return self._process.pid

    def close(self) -> None:
        """End the browser and its processes, and remove its folder."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            os.close(self._in)
            os.close(self._out)
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the protocol -------------------------------------------------------------------------

    def command(self, method: str, **parameters: object) -> Any:
        """The result of one command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.seconds
        while True:
            found = self._message(deadline)
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self._events.append(found)

    def _message(self, deadline: float) -> Any:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered for {self.seconds} s")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    # -- pages --------------------------------------------------------------------------------

    def size(self, width: int, height: int) -> None:
        """Make the page so many pixels large."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=False)

    def dark(self, on: bool) -> None:
        """Let pages see a reader who prefers dark colours."""
        self.command("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def open(self, path: Path) -> float:
        """Open a page of a file and wait until it has drawn itself; the seconds that this took."""
        start = time.perf_counter()
        url = path.resolve().as_uri()
        self.command("Page.navigate", url=url)
        ready = "return location.href === arguments[0] && document.documentElement?.dataset.ready"
        while self.run(ready, url) != "yes":
            if time.perf_counter() - start > self.seconds:
                raise TimeoutError(f"{path} is not drawn after {self.seconds} s: {self.faults()}")
            time.sleep(0.01)
        return time.perf_counter() - start

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns; it may return a promise."""
        found = self.command("Runtime.evaluate", expression=f"(function() {{{script}}})(...{json.dumps(arguments)})",
                             returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what a script or an event changed is drawn."""
        self.run("return new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)),"
                 " 150))")

    def faults(self) -> list[str]:
        """Errors and warnings of the console since the last call, exceptions among them."""
        return [text for event in self._taken("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
                for text in _fault(event)]

    def fetched(self) -> list[str]:
        """Addresses that pages have asked for since the last call, but for what they hold themselves."""
        urls = [event["params"]["request"]["url"] for event in self._taken("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def _taken(self, *methods: str) -> list[Any]:
        found = [event for event in self._events if event["method"] in methods]
        self._events = [event for event in self._events if event["method"] not in methods]
        return found

    # -- what a reader does -------------------------------------------------------------------

    def texts(self, selector: str) -> list[str]:
        """The visible text of each element."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)

    def is_visible(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0]).getClientRects().length > 0", selector)

    def click(self, selector: str, number: int = 0) -> None:
        """Click the middle of an element, the one of this number among those of a selector."""
        self.click_at(*self.run("""const e = document.querySelectorAll(arguments[0])[arguments[1]];
            e.scrollIntoView({ block: "center" });
            const box = e.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]""",
                                selector, number))

    def click_at(self, x: float, y: float) -> None:
        """Press and release the pointer's button at a pixel of the window."""
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a pixel of the window, by way of a neighbour, so that it moves in any case."""
        for dx in (3, 0):
            self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)

    def scroll(self, x: float, y: float, by: float) -> None:
        self.command("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def write(self, selector: str, text: str, enter: bool = False) -> None:
        """Write a text into an input, in place of what it holds."""
        self.run("const e = document.querySelector(arguments[0]); e.focus(); e.select()", selector)
        self.command("Input.insertText", text=text)
        if enter:
            self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self) -> bytes:
        """The window as a PNG file."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])


def _fault(event: Any) -> list[str]:
    """What an event of the console says, if it is an error or a warning."""
    said = event["params"]
    if event["method"] == "Runtime.exceptionThrown":
        return [str(said["exceptionDetails"])]
    if event["method"] == "Log.entryAdded":
        return [f"{said['entry']['level']} {said['entry']['text']}"] if said["entry"]["level"] != "info" else []
    words = " ".join(str(value.get("value", value.get("description"))) for value in said["args"])
    return [f"{said['type']} {words}"] if said["type"] in ("error", "warning", "assert") else []
