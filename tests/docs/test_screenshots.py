"""Pages as a browser shows them: no error on the console, and nothing wider than the page, also on a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, look
from pages import ROOT

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.xdist_group("screenshots"),
]
# Makes the pages in a process of its own, whose devices the test does not have.
MAKE = """
import sys
from jaxtrain.cli.main import main
small = ["steps=6", "schedule.warmup_steps=2", "eval.every=3", "checkpoint.every=6", "model.embed=32", "model.layers=2",
         "model.mlp=64", "data.sequence=32", "data.sources=[{path: texts}]", "data.cache_dir=cache"]
assert main(["train", "quickstart", *small]) == 0
assert main(["report", "runs/quickstart", "--html", "pages/report.html"]) == 0
assert main(["plan", "quickstart", *small, "--target", "simulate:8", "--html", "pages/plan.html"]) == 0
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("shots")
    (folder / "texts").mkdir()
    for index in range(40):
        (folder / "texts" / f"{index}.txt").write_text(f"def number_{index}():\n    return {index}\n" * 40)
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env |= {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    (folder / "pages").mkdir()
    site = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder / "pages" / "site")]
    subprocess.run(site, cwd=ROOT, env=env, check=True, timeout=300, capture_output=True)
    command = [sys.executable, "-c", MAKE]
    done = subprocess.run(command, cwd=folder, env=env, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "pages"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["site/index.html", "site/gallery.html", "report.html", "plan.html"])
def test_a_page_fits_and_has_no_error(page: str, width: int, pages: Path, tmp_path: Path):
    picture = tmp_path / "page.png"
    overflow, errors = look(pages, page, width, 900, picture)
    assert errors == []
    assert overflow <= 0, f"{page} is {overflow} px wider than a screen of {width} px"
    assert picture.stat().st_size > 5000


def test_what_overflows_and_fails_is_found(tmp_path: Path):
    (tmp_path / "bad.html").write_text("<div style='width: 700px'>wide</div><script>nothing()</script>")
    overflow, errors = look(tmp_path, "bad.html", 390, 300, tmp_path / "page.png")
    assert overflow > 300
    assert any("nothing is not defined" in line for line in errors)
