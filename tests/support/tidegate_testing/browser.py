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

_FAINT_TEXTS = """() => {
  const channels = (colour) => {
    const found = colour.match(/[\\d.]+/g).map(Number);
    return found.length < 4 ? [...found, 1] : found;
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const backdrop = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(channels(getComputedStyle(e).backgroundColor));
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map(
      (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const opacity = (element) => {
    let found = 1;
    for (let e = element; e; e = e.parentElement) found *= Number(getComputedStyle(e).opacity);
    return found;
  };
  const faint = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, text = node.textContent.trim();
    const seen = element.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true });
    const style = getComputedStyle(element);
    if (!text || !seen || style.clipPath !== 'none') continue;
    count += 1;
    const behind = backdrop(element);
    const ink = channels(element.closest('svg') ? style.fill : style.color);
    ink[3] *= opacity(element);
    const both = [luminance(over(ink, behind)), luminance(behind)].sort((a, b) => b - a);
    const ratio = (both[0] + 0.05) / (both[1] + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)} ${text}`);
  }
  return { count, faint };
}"""
"""Texts whose contrast is below what WCAG 2.2 asks for at level AA (1.4.3), and how many there are.

Relative luminance and ratio as in its glossary; colours are those that the browser computed.
"""


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

    @property
    def faint_texts(self) -> list[str]:
        """Return the texts that people with weak eyes can't read, with their contrast."""
        found = self.page.evaluate(_FAINT_TEXTS)
        assert found["count"] > 0
        faint: list[str] = found["faint"]
        return faint

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
