"""Import of a user's class: a missing one is one line, errors inside the user's module are unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config.user_class import load_class
from jaxtrain.errors import UserError

MODULES = {
    "good_x.py": "class Model: pass\nsize = 3\n",
    "package_x/__init__.py": "",
    "package_x/inner.py": "class Model: pass\n",
    "needs_x.py": "import no_such_dependency_x\nclass Model: pass\n",
    "needs_package_x.py": "import package_x.gone\nclass Model: pass\n",
    "from_x.py": "from good_x import gone\nclass Model: pass\n",
    "attribute_x.py": "import good_x\ngood_x.gone\nclass Model: pass\n",
    "syntax_x.py": "class Model pass\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        sys.modules.pop(name)


def test_a_class_loads() -> None:
    assert load_class("good_x:Model", "model.type").__name__ == "Model"
    assert load_class("package_x.inner:Model", "model.type").__module__ == "package_x.inner"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone_x:Model", "model.type: gone_x:Model: no module `gone_x`; put its folder on PYTHONPATH, or run from it"),
        ("gone_x.inner:Model", "no module `gone_x`; put its folder on PYTHONPATH"),
        ("package_x.gone:Model", "no module `package_x.gone`; put"),
        ("good_x.inner:Model", "no module `good_x.inner`; put"),
        ("good_x:Modle", "module `good_x` has no `Modle` (did you mean `Model`?)"),
        ("package_x:Model", "module `package_x` has no `Model`"),
        ("good_x:size", "`size` of module `good_x` is no class, but int"),
        ("good_x", "expected a class as `package.module:Class`; found"),
        ("good_x:", "expected a class as"),
        (":Model", "expected a class as"),
        (".good_x:Model", "expected a class as"),
        ("good_x..a:Model", "expected a class as"),
    ],
)
def test_a_missing_module_or_class_is_one_line(reference: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_class(reference, "model.type")
    assert message in str(caught.value)
    assert str(caught.value).startswith("model.type: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("needs_x", ModuleNotFoundError, "no_such_dependency_x"),
        ("needs_package_x", ModuleNotFoundError, "package_x.gone"),
        ("from_x", ImportError, "cannot import name 'gone'"),
        ("attribute_x", AttributeError, "gone"),
        ("syntax_x", SyntaxError, "invalid syntax"),
    ],
)
def test_errors_inside_the_module_keep_their_traceback(module: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_class(f"{module}:Model", "model.type")
    assert not isinstance(caught.value, UserError)
    if error is not SyntaxError:
        assert any(Path(str(entry.path)).name == f"{module}.py" for entry in caught.traceback)


def test_no_jax_is_imported() -> None:
    code = "import sys, jaxtrain.config.user_class; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
