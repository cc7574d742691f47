"""The page of errors has the texts that code raises, also those that stand in variables and functions."""

from __future__ import annotations

from pathlib import Path

from error_messages import messages

CODE = """
EXPECTED = "expected one of these words"

def literal(path):
    raise UserError(f"{path}: is not a {kind} of file")

def variable(step):
    problem = f"step {step} is wrong here" if step else "step is not given here"
    if step > 3:
        raise DataError(f"data: {problem}; {EXPECTED}")

def from_function():
    raise ConfigError([Problem("", "key", described(3))])

def described(count):
    if count:
        return f"found {count} of these things"
    return "nothing of it was found"

def helper(message):
    raise TrainingError(message)

def calls_helper(size):
    helper("the disk is full now; " + "delete some of it")
    helper(message=f"{size} bytes are too many here")

class Other:
    def other(self, text):
        text = text + " and more of the same"
        raise KeyError(text.replace("a", "b"))

def passes_on(error):
    raise UserError(str(error))
"""


def test_a_text_is_found_where_it_is_written(tmp_path: Path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "module.py").write_text(CODE)
    (tmp_path / "alone.py").write_text('raise ValueError("too few words")\nraise ValueError("no")\n')
    assert messages(tmp_path) == {
        "alone": {"too few words"},
        "part": {
            "...: is not a ... of file",
            "data: step ... is wrong here; expected one of these words",
            "data: step is not given here; expected one of these words",
            "found ... of these things",
            "nothing of it was found",
            "the disk is full now; delete some of it",
            "... bytes are too many here",
        },
    }
