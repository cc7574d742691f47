"""Pages that are drawn from the code are as the code is."""

from __future__ import annotations

import re

import pytest
from draw_docs import DOCS, ROOT, imports, packages
from pages import PAGES


@pytest.mark.parametrize("file", DOCS)
def test_drawn_pages_are_not_stale(file: str):
    assert (ROOT / "docs" / file).read_text() == DOCS[file](), "run `make docs`"


def test_every_package_is_in_the_import_contract():
    present = {path.name.removesuffix(".py") for path in (ROOT / "jaxtrain").iterdir() if path.name[0] not in "_."}
    assert present - {"types", "py.typed"} == {name for name in packages() if "." not in name}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "docs/glossary.md", "docs/packages.md", *PAGES])
def test_paths_and_names_in_pages_exist(page: str):
    """`folder/file.py:Name`, from the repository or from jaxtrain/."""
    for path, name in re.findall(r"`([a-z_]+/[\w/.]+\.(?:py|yaml|sh|md))(?::(\w+))?`", (ROOT / page).read_text()):
        file = next((file for file in (ROOT / path, ROOT / "jaxtrain" / path) if file.exists()), None)
        assert file is not None, f"{page}: {path}"
        assert not name or re.search(rf"^ *(class|def) {name}\b|^{name} =", file.read_text(), re.MULTILINE), (
            path,
            name,
        )


def test_no_public_function_has_the_name_of_a_package():
    import jaxtrain

    assert not set(jaxtrain.__all__) & set(packages())


def test_packages_import_only_what_is_listed_below_them():
    order = packages()
    for name, found in imports().items():
        for other in found:
            assert order.index(other) > order.index(name), (name, other)
