"""The site builds without a warning and without a network, and its pages take nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text()
        assert re.findall(r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//[^\"]*", text) == [], page
        assert re.findall(r"<link[^>]+href=\"(?:https?:)?//[^\"]*", text) == [], page


def test_links_of_the_repository_that_are_not_there_fail(monkeypatch):
    from types import SimpleNamespace

    from site_links import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri="start.md"))
    assert on_page_markdown("[rules](../CONTRIBUTING.md)", page=page) == "rules (`CONTRIBUTING.md`)"
    assert on_page_markdown("[other](concepts.md)", page=page) == "[other](concepts.md)"
    with pytest.raises(ValueError, match=r"start\.md: no \.\./NONE\.md"):
        on_page_markdown("[none](../NONE.md)", page=page)


def test_links_of_readme_are_there():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (ROOT / target.partition("#")[0]).exists(), target
    assert len(text.splitlines()) < 70  # a screen
