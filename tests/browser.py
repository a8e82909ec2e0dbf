"""A real browser for tests: Chromium, driven by Playwright.

Playwright's own download of a browser needs a host that tests must not depend on, so the system's
Chromium is used. `.ci/run` installs it; elsewhere the message below says how.
"""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable():
    found = os.environ.get("RANKONE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.fail(
            "These tests look at pages in a real browser, and there is none. Install Chromium (apt-get install "
            "chromium, or brew install --cask chromium), or name one in RANKONE_BROWSER."
        )
    return found


@contextmanager
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


class Looking:
    """A page that is open, and everything it complained about or asked the network for."""

    def __init__(self, chromium, path, *, width=1100, dark=False):
        context = chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        self.page = context.new_page()
        self.width = width
        self.complaints, self.requests = [], []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type != "log" else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("dialog", lambda d: (self.complaints.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.address = path.resolve().as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready]")

    def go(self, where):
        self.page.evaluate("where => { location.hash = where; }", where)
        self.page.wait_for_timeout(60)
        return self

    @property
    def heading(self):
        return self.page.inner_text("h1")

    def fits(self):
        return self.page.evaluate("document.documentElement.scrollWidth") <= self.width

    def fine(self):
        assert self.complaints == []
        assert [r for r in self.requests if r.partition("#")[0] != self.address] == []
