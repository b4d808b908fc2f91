"""Drive the built site in headless Chromium: navigation, search, contrast, headings, widths of columns, file://.

usage: python tools/docsite/browser.py SITE [--shots FOLDER]

Needs the programs chromium and chromedriver (Debian: `apt-get install chromium chromium-driver`). Where they are missing this says so and
ends with 0: nothing was checked. The site is served below a subpath, so that links to the root of a host are found.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
from docsite import vendor

__all__ = ["PAGES", "SEARCHES", "main"]

SUBPATH = "/below/a/path/"
WIDTHS = (1440, 1024, 390)  # a desktop, a tablet, a phone
PAGES = (  # looked at in two colours and at each width
    "index.html",
    "install.html",
    "getting-started.html",
    "how-to/out-of-memory.html",
    "tutorials/index.html",
    "tutorials/first-training.html",
    "tutorials/generate-and-serve.html",
    "concepts/architecture.html",
    "concepts/schedules.html",
    "benchmarks/zero.html",
    "reference/configuration.html",
    "reference/api/ds-zero.html",
    "reference/errors.html",
)
SEARCHES = {  # term -> a page that must be among the results
    "stage3_prefetch_bucket_size": "reference/configuration",
    "comm-hang": "reference/errors",
    "offload": "offload",
    "ShardedOptimizer": "api/ds-zero",
    "hostfile": "several-nodes",
    "safetensors": "checkpoint",
    "1f1b": "stages",
    "Trainer": "hugging-face",
    "quantize": "compress",
    "glossary": "glossary",
}
_RULES = ["color-contrast", "heading-order", "image-alt", "link-name", "document-title", "html-has-lang", "button-name"]


# [tag and text, pixels] of elements of the article that reach beyond it; their children are not told again.
_TOO_WIDE = """
const article = document.querySelector('.md-content__inner'), edge = article.getBoundingClientRect().right;
const found = [], scrolls = 'pre, .highlight, .mermaid, .tabbed-labels, .tabbed-control, .md-clipboard, .headerlink';
for (const element of article.querySelectorAll('*')) {
  const box = element.getBoundingClientRect();
  if (element.closest(scrolls) || box.width === 0 || found.some(([other]) => other.contains(element))) continue;
  const over = Math.max(box.right - edge, element.tagName === 'TABLE' ? element.scrollWidth - element.clientWidth : 0);
  // The padding of code that is wrapped at its end hangs over the edge by a few pixels; nothing is cut off.
  if (over > (element.tagName === 'CODE' ? 6 : 1.5)) found.push([element, over]);
}
const page = document.documentElement.scrollWidth - window.innerWidth;
if (page > 0) found.push([document.documentElement, page]);
return found.slice(0, 3).map(([e, over]) => [e.tagName.toLowerCase() + ' ' + e.textContent.trim().slice(0, 40), over]);
"""
_ROW_IS_WHOLE = """
const row = document.getElementById(arguments[0]).closest('tr'), edge = document.querySelector('.md-content__inner').getBoundingClientRect().right;
const cells = [...row.cells].map(cell => cell.getBoundingClientRect());
return cells.every(box => box.right <= edge + 1.5 && box.width > 0 && box.height > 0) && cells[0].top >= 0 && cells[0].top < window.innerHeight;
"""
# What moves to its new place (the search box does) would be measured on its way.
_AT_ONCE = """
const style = document.createElement('style');
style.textContent = '* { transition: none !important; animation: none !important; }';
document.head.append(style);
"""
_ROWS = ("zero_optimization.stage", "train_batch_size", "optimizer.params.lr", "checkpoint.saving.asynchronous")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def _served(site: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / SUBPATH.strip("/")).parent.mkdir(parents=True, exist_ok=True)
        (Path(root) / SUBPATH.strip("/")).symlink_to(site.resolve())
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=root))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{SUBPATH}"
        finally:
            server.shutdown()


@contextmanager
def _driver(chromium: str, chromedriver: str) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1366,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_page_load_timeout(180)
    driver.set_script_timeout(300)  # axe reads thousands of cells on the largest pages
    try:
        yield driver
    finally:
        driver.quit()


def _until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except Exception:  # the element is being replaced
            pass
        time.sleep(0.1)
    raise AssertionError(f"not seen within {seconds:.0f} s: {what}")


class Check:
    """One browser on one site; every method adds what is wrong to `wrong`."""

    def __init__(self, driver: Any, base: str, shots: Path | None) -> None:
        self.driver, self.base, self.shots = driver, base, shots
        self.wrong: list[str] = []
        self.hosts = {urlsplit(base).netloc}

    def logs(self, page: str) -> None:
        """No message of the console, no request to another host."""
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING") and "favicon" not in entry["message"]:
                self.wrong.append(f"{page}: console: {entry['message']}")
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                if url.scheme in ("http", "https", "ws", "wss") and url.netloc not in self.hosts:
                    self.wrong.append(f"{page}: asks {url.netloc} for {url.path}")

    def visit(self, page: str) -> None:
        self.driver.get(self.base + page)
        _until(lambda: self.driver.execute_script("return document.readyState") == "complete", page)
        if self.driver.execute_script("return document.querySelector('.mermaid') !== null"):
            time.sleep(2.0)  # drawings are made after the page is there
            left = self.driver.execute_script("return document.querySelectorAll('pre.mermaid').length")
            if left:
                self.wrong.append(f"{page}: {left} drawings were not made")

    def accessible(self, page: str, scheme: str) -> None:
        """axe-core's rules for contrast, order of headings, names."""
        self.driver.execute_script(vendor.script(vendor.AXE).read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[1]; axe.run({exclude: [['.md-top']]}, {runOnly: arguments[0], resultTypes: ['violations']})"
            ".then(r => done(r.violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)), v.nodes.length])))",
            _RULES,
        )
        for rule, examples, count in found:
            self.wrong.append(f"{page} ({scheme}): {rule}, {count} times: {examples}")

    def scheme(self, name: str) -> None:
        """Switch to the light (`default`) or the dark (`slate`) colours."""
        self.driver.execute_script(
            "for (const input of document.querySelectorAll('input[name=__palette]'))"
            " if (input.dataset.mdColorScheme === arguments[0]) input.click()",
            name,
        )
        _until(lambda: self.driver.execute_script("return document.body.dataset.mdColorScheme") == name, name)
        time.sleep(0.4)  # colours fade

    def width(self, pixels: int) -> None:
        """Make the page so many pixels wide, whatever the frame of the window takes."""
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_script(_AT_ONCE)

    def shot(self, name: str) -> None:
        if self.shots:
            self.driver.save_screenshot(str(self.shots / f"{name}.png"))

    def columns(self, page: str, width: int) -> None:
        """No element is wider than the column; blocks of code and drawings scroll by themselves, what is in them may be."""
        for name, over in self.driver.execute_script(_TOO_WIDE):
            self.wrong.append(f"{page} at {width} pixels: {name} is {over:.0f} pixels wider than its column")

    def whole_rows(self, page: str, anchors: tuple[str, ...]) -> None:
        """A row that messages link to is in view, with every cell."""
        for anchor in anchors:
            self.driver.get(f"{self.base}{page}#{anchor}")
            _until(lambda: self.driver.execute_script("return document.readyState") == "complete", page)
            try:
                _until(functools.partial(self.driver.execute_script, _ROW_IS_WHOLE, anchor), anchor, 5.0)
            except AssertionError:
                self.wrong.append(f"{page}#{anchor}: the row is not whole")

    def search(self, term: str, expected: str) -> None:
        """The search finds a page."""
        box = self.driver.find_element("css selector", ".md-search__input")
        # A click, as people do: without a server the index is read only then.
        self.driver.execute_script("const box = document.querySelector('#__search'); if (!box.checked) box.click()")
        links = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        # What is typed while the index is still being read is lost.
        meta = "return document.querySelector('.md-search-result__meta').textContent"
        _until(lambda: "Initializing" not in self.driver.execute_script(meta), "the index of the search", 90.0)
        for seconds in (4.0, 20.0):  # typed again, as people do
            box.clear()
            box.send_keys(term)
            try:
                _until(lambda: any(expected in href for href in self.driver.execute_script(links)), expected, seconds)
                break
            except AssertionError:
                continue
        else:
            self.wrong.append(f"search {term!r} does not find {expected}: {self.driver.execute_script(links)[:5]}")
        box.clear()


def _widths(check: Check, site: Path) -> None:
    """Every page at every width: one visit each, then the window changes."""
    # 404.html is served for any address, so it asks for its files at the root, or below DOCS_SITE_URL.
    for page in sorted({file.relative_to(site).as_posix() for file in site.rglob("*.html")} - {"404.html"}):
        check.visit(page)
        for width in WIDTHS:
            check.width(width)
            check.columns(page, width)
            if page in PAGES:
                check.shot(f"{page.removesuffix('.html').replace('/', '-')}-{width}")
    for width in WIDTHS:
        check.width(width)
        check.whole_rows("reference/configuration.html", _ROWS)
    check.width(1366)


def _all(check: Check, site: Path) -> None:
    for page in PAGES:
        name = page.removesuffix(".html").replace("/", "-")
        check.visit(page)
        check.scheme("default")
        check.accessible(page, "light")
        check.shot(name)
        check.scheme("slate")
        check.accessible(page, "dark")
        check.shot(f"{name}-dark")
        check.scheme("default")
        check.logs(page)
    _widths(check, site)
    check.visit("index.html")
    for term, expected in SEARCHES.items():
        check.search(term, expected)
    check.logs("search")
    check.visit("index.html")
    check.driver.find_element("css selector", ".md-tabs__item a[href*=tutorials]").click()
    _until(lambda: "tutorials" in check.driver.current_url, "the page behind a tab")
    check.driver.find_element("css selector", ".md-content a[href*=first-training]").click()
    _until(lambda: "first-training" in check.driver.current_url, "the first tutorial")
    check.driver.find_element("css selector", ".md-footer__link--next").click()
    _until(lambda: "first-training" not in check.driver.current_url, "the next page")
    check.logs("navigation")


def _from_files(check: Check) -> None:
    """The same site without a server."""
    check.visit("tutorials/index.html")
    check.search("safetensors", "checkpoint")
    check.logs("file://")


def main(argv: list[str] | None = None) -> int:
    """Check everything; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Drive the built site in headless Chromium.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="folder for pictures of the pages")
    args = parser.parse_args(argv)
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        print(
            "browser: SKIPPED, chromium or chromedriver is missing (Debian: apt-get install chromium chromium-driver)"
        )
        return 0
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    with _driver(chromium, chromedriver) as driver:
        with _served(args.site) as base:
            check = Check(driver, base, args.shots)
            _all(check, args.site)
        local = Check(driver, f"{args.site.resolve().as_uri()}/", None)
        _from_files(local)
    wrong = [*check.wrong, *local.wrong]
    print("\n".join(wrong))
    print(
        f"browser: {len(wrong)} wrong; all pages at {', '.join(map(str, WIDTHS))} pixels, {len(PAGES)} in two colours, "
        f"{len(SEARCHES)} searches, file://"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
