"""Headless Chromium: screenshots of pages, what they print on the console, and whether they overflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ERROR = re.compile(r"CONSOLE.*(error|Uncaught|Refused|Failed)", re.IGNORECASE)
# A page in a frame of exactly this width, since a window has a smallest one. What is measured comes back in the title.
FRAME = """<!doctype html><title>waiting</title><body style="margin: 0"><iframe id="page" src="{page}"
style="border: 0; width: {width}px; height: {height}px"></iframe><script>
const page = document.getElementById("page");
const measure = () => {{
  const root = page.contentDocument.documentElement;
  document.title = `width ${{root.clientWidth}} content ${{root.scrollWidth}}`;
}};
page.onload = () => setTimeout(measure, 1000);
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on a port of this machine that the kernel chooses, and gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def look(folder: Path, page: str, width: int, height: int, picture: Path) -> tuple[int, list[str]]:
    """Takes a screenshot of a page in a folder.

    Returns:
        pixels by which the content is wider than the page, and the lines of errors on its console.
    """
    frame = f"frame-{width}.html"
    (folder / frame).write_text(FRAME.format(page=page, width=width, height=height))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=8000", f"--user-data-dir={picture.parent / 'profile'}"]
    common = [str(CHROMIUM), *options, f"--window-size={max(width, 600)},{height}"]
    with served(folder) as address:
        shown = [*common, f"--screenshot={picture}", f"{address}/{frame}"]
        done = subprocess.run(shown, capture_output=True, text=True, timeout=180, env=os.environ | {"LANG": "C"})
        dumped = [*common, "--dump-dom", f"{address}/{frame}"]
        dom = subprocess.run(dumped, capture_output=True, text=True, timeout=180).stdout
    found = re.search(r"width (\d+) content (\d+)", dom)
    assert found, (dom[:500], done.stderr[-2000:])
    assert int(found[1]) == width
    errors = [line for line in done.stderr.splitlines() if ERROR.search(line)]
    return int(found[2]) - int(found[1]), errors
