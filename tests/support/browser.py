"""A headless Chromium, driven over its own DevTools protocol: no driver to install."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

CHROMIUM: Final = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)

_STARTS_S: Final = 60.0
_WAITS_S: Final = 30.0


class Page:
    """One tab."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """What the page's program failed at, and what the browser refused to load."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are looked at."""
        number = next(self._numbers)
        await self._ws.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._ws.receive_json(timeout=_WAITS_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(str(message["params"]["entry"]))

    async def open(self, url: str) -> None:
        """Go to an address, from an empty page so that a new fragment alone loads it too."""
        for name in ("Runtime", "Log", "Page"):
            await self.call(f"{name}.enable")
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str, within: float = _WAITS_S) -> Any:
        """Evaluate JavaScript again and again until it is true."""
        try:
            async with asyncio.timeout(within):
                # An expression that fails is not true yet: the document may just be coming.
                while not (value := await self.value(f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()")):  # noqa: ASYNC110  # The page can not set an event here.
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{expression} never came true; the page shows: {await self.text()}; {self.problems}") from None
        return value

    async def text(self) -> str:
        """What is to be read on the page."""
        return str(await self.value("document.body?.innerText ?? ''"))

    async def look(self, *, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Take on a window's size and the user's taste."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        data = (await self.call("Page.captureScreenshot", format="png"))["data"]
        await asyncio.to_thread(path.write_bytes, base64.b64decode(data))


@contextmanager
def _chromium(profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    assert CHROMIUM is not None
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
    )
    command = [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    # A home of its own: the user's profile and caches are none of ours. A session of its own: it has many processes.
    env = {**os.environ, "HOME": str(profile)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """A browser with one tab, whose profile lies in that folder."""
    with _chromium(profile) as process:
        told = profile / "DevToolsActivePort"
        async with asyncio.timeout(_STARTS_S):
            while not (told.exists() and "\n" in told.read_text()):
                assert process.poll() is None, f"chromium ended with {process.returncode}"
                await asyncio.sleep(0.1)
        port = int(told.read_text().split()[0])
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as response:
                tab = await response.json()
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 26) as ws:
                yield Page(ws)
