"""Headless Chromium, and a page that notes what it should not have done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

from tidegate_devcluster.assets import Assets

TOOL = "chromium-headless-shell"

NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
"""Chromium drops what it loads, from loopback too, when this machine gets or loses an interface:
pods of other tests come with theirs."""

ATTEMPTS = 5


@contextmanager
def running_browser(assets: Assets) -> Iterator[Browser]:
    """Run Debian's Chromium for the length of the block."""
    tool = assets.tool(TOOL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(tool.path), env=dict(tool.environment)
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class WatchedPage:
    """A page of one host.

    Attributes:
        complaints: Errors and warnings of its console, requests to other hosts, failed requests.
    """

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    _is_disturbed: bool = False

    def open(self, path: str = "/") -> None:
        """Load a page, and wait until it is live."""
        for _ in range(ATTEMPTS):
            self._is_disturbed = False
            self.page.goto(self.url.rstrip("/") + path)
            if not self._is_disturbed:
                break
        self.page.wait_for_function("window.socket && window.socket.connected")

    def tile(self, name: str) -> str:
        """Return the selector of the figure with this name."""
        return f'.tile:has(.name:text-is("{name}")) .value'

    @property
    def focused(self) -> str:
        """What has the keyboard's focus: its text, else its label."""
        found: str = self.page.evaluate(
            "(document.activeElement.innerText || document.activeElement.ariaLabel || '').trim()"
        )
        return found

    @property
    def overhang(self) -> int:
        """By how many pixels the page is wider than its window."""
        found: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return found

    def watch(self) -> None:
        """Begin to note."""
        page = self.page
        page.on(
            "console",
            lambda m: self._complain(m.text) if m.type in {"error", "warning"} else None,
        )
        page.on("pageerror", lambda error: self._complain(str(error)))
        page.on(
            "request",
            lambda r: (
                None
                if r.url.startswith((self.url, "data:", self.url.replace("http", "ws", 1)))
                else self._complain(f"asks {r.url}")
            ),
        )
        page.on(
            "response", lambda r: self._complain(f"{r.status} {r.url}") if r.status >= 400 else None
        )

    def _complain(self, text: str) -> None:
        if NETWORK_CHANGED in text:
            self._is_disturbed = True
        else:
            self.complaints.append(text)


@contextmanager
def a_page(
    browser: Browser,
    url: str,
    *,
    width: int = 1280,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[WatchedPage]:
    """Open an empty page with cookies of its own.

    Args:
        browser: Running.
        url: Of the host, with a slash at its end.
        width: Of the window, in pixels.
        height: Likewise.
        scheme: What the visitor prefers.
    """
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        watched = WatchedPage(context.new_page(), url)
        watched.watch()
        yield watched
    finally:
        context.close()
