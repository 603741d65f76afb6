"""python tools/ci/report_screens.py PAGE.html FOLDER [--hover X,Y] [--width 1280]

Has a browser open a report, light and dark, and writes pictures of it to a folder; says how long it took to load, and
fails where the page has an error or asks for anything over a network. It needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from itertools import count
from pathlib import Path
from typing import Any


class Browser:
    """Chromium without a window, which is told what to do by DevTools' protocol, over a pair of pipes."""

    def __init__(self, folder: str) -> None:
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        program = shutil.which("chromium") or "chromium"
        shell = f'exec {program} "$@" 3<&{read} 4>&{write}'
        options = [f"--user-data-dir={folder}", "--headless", "--no-sandbox", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *options, "--hide-scrollbars"], pass_fds=(read, write), stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._numbers, self._left = count(1), b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    _session = ""

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Has the browser do something, and returns what it says."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                result: dict[str, Any] = said["result"]
                return result
            self.events.append(said)

    def wait(self, method: str) -> None:
        """Waits for an event."""
        while all(event.get("method") != method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def end(self) -> None:
        """Ends it."""
        self._session = ""
        self.call("Browser.close")
        self._process.wait()


def picture(browser: Browser, url: str, colors: str, width: int, hover: str) -> tuple[bytes, float, list[str]]:
    """A picture of the whole page, the seconds until its load event, and what was wrong."""
    browser.events.clear()
    for domain in ("Page", "Runtime", "Log", "Network"):
        browser.call(f"{domain}.enable")
    media = [{"name": "prefers-color-scheme", "value": colors}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=url)
    browser.wait("Page.loadEventFired")
    script = "performance.timing.loadEventEnd - performance.timing.navigationStart"
    took = browser.call("Runtime.evaluate", expression=script)["result"]["value"] / 1000
    if hover:
        x, y = map(int, hover.split(","))
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    size = browser.call("Page.getLayoutMetrics")["cssContentSize"]
    whole = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    data = browser.call("Page.captureScreenshot", clip=whole, captureBeyondViewport=True)["data"]
    wrong = []
    for event in browser.events:
        if event.get("method") == "Runtime.exceptionThrown":
            wrong.append(event["params"]["exceptionDetails"].get("exception", {}).get("description", "an error"))
        elif event.get("method") == "Log.entryAdded":
            wrong.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            asked = event["params"]["request"]["url"]
            if asked != url:
                wrong.append(f"it asks for {asked}")
    if size["width"] > width:
        wrong.append(f"it is {size['width']} wide")
    return b64decode(data), took, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--hover", default="", metavar="X,Y", help="where the pointer is")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            for colors in ("light", "dark"):
                url = options.page.resolve().as_uri()
                data, took, wrong = picture(browser, url, colors, options.width, options.hover)
                path = options.folder / f"{options.page.stem}-{colors}.png"
                path.write_bytes(data)
                print(f"{path}: loaded in {took:.2f} s")
                for text in wrong:
                    print(f"  {text}")
                failed = failed or bool(wrong)
        finally:
            browser.end()
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
