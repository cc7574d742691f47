"""Measures what the tests of each parser reach and find: lines, and bugs that are planted in it.

    python benchmarks/parser_coverage.py [--tries 2000] [--only NAME ...] [--out parser-coverage.json]

`lines`    share of the lines of a parser's functions that run under its fuzz tests with `--tries` mutations of each
           input, and under its unit tests; lines that do not run are listed
`planted`  bugs that are planted, one at a time, in a copy of the sources: a check removed, a bound off by one, an error
           not caught. Each is looked for by the fuzz tests as `make test` runs them, then by the unit tests

A planted bug whose text is not in the source exactly once is an error, as are tests that fail without one, or whose
process is killed: the parser has then an `error`, and the next one is measured. Exit code 1: an error, less than
`LEAST` of the lines of a parser run, or a planted bug is not found.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import common

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.9
LIMIT = 600.0  # seconds of one run of tests; under coverage four times as many
MEMORY = 6 << 30  # bytes of address space of a run: a planted bug may ask for all memory of the machine
FUZZ = "tests/test_parser_fuzz.py"


class Target(NamedTuple):
    """A parser: its module, functions, fuzz tests (`-k`), unit tests, and bugs to plant as (text, replacement)."""

    module: str
    functions: tuple[str, ...]
    fuzz: str
    units: tuple[str, ...]
    bugs: tuple[tuple[str, str], ...]


TARGETS = {
    "megatron": Target(
        "jaxtrain/data/megatron.py", ("read_index", "_join_sequences", "pair_files", "_load_counts", "_histogram"),
        "megatron or sequences_outside", ("tests/data/test_megatron.py",),
        (("len(data) < HEADER.size or not", "not"), ("pointers > size - sizes", "pointers > size + 2 - sizes"),
         ("(bounds[1:] < bounds[:-1]).any()", "(np.diff(bounds) < 0).any()")),
    ),
    "jsonl and text": Target(
        "jaxtrain/data/sources/text.py", ("_read_text", "_jsonl_spans", "_numbered_lines", "_read_jsonl"),
        "jsonl or text or unpacks", ("tests/data/test_sources.py", "tests/data/test_source_formats.py"),
        (("len(line) > base.MAX_DOCUMENT:", "len(line) > base.MAX_DOCUMENT + 1:"),
         ("except Exception as error:  # each", "except OSError as error:  # each"),
         ("except UnicodeDecodeError as error:", "except UnicodeEncodeError as error:")),
    ),
    "json documents": Target(
        "jaxtrain/data/sources/base.py", ("json_text", "first_line", "open_file", "group_spans"),
        "jsonl or tar or unpacks", ("tests/data/test_sources.py", "tests/data/test_source_formats.py"),
        (("except (ValueError, RecursionError) as error:", "except ValueError as error:"),
         ("if not isinstance(entry, dict):", "if entry is None:"), ("format_name(k) for", "k for")),
    ),
    "tar": Target(
        "jaxtrain/data/sources/webdataset.py", ("fromtarfile", "_read_tar", "_samples", "_members"),
        "tar or unpacks", ("tests/data/test_source_formats.py",),
        (("member.size > base.MAX_DOCUMENT", "member.size > base.MAX_DOCUMENT + 1"),
         ("except UnicodeDecodeError as error:", "except UnicodeEncodeError as error:"),
         ("(tarfile.TarError, OSError, EOFError, ValueError, zlib.error)", "(OSError, EOFError)")),
    ),
    "parquet and arrow": Target(
        "jaxtrain/data/sources/arrow.py",
        ("_check_column", "_open_parquet", "_parquet_spans", "_read_parquet", "_documents", "_open_arrow",
         "_record_batches", "_arrow_spans", "_read_arrow", "_text_columns"),
        "parquet or arrow", ("tests/data/test_source_formats.py",),
        (("        column.validate(full=True)", "        pass"), ("if field not in names:", "if not names:"),
         ("except (OSError, ValueError) as error:  # pyarrow's errors derive from these\n            raise DataError",
          "except OSError as error:\n            raise DataError")),
    ),
    "safetensors": Target(
        "jaxtrain/interop/safetensors_io.py", ("open_tensors", "open_file", "check_dtype"),
        "safetensors or weight", ("tests/interop/test_weight_index.py", "tests/interop/test_bad_input.py"),
        (("Path(file).name == file", "file"), ("except (OSError, SafetensorError)", "except OSError"),
         ("if name not in files[file]:", "if not files[file]:")),
    ),
    "config.json": Target(
        "jaxtrain/interop/config_json.py",
        ("read_json", "from_hf_config", "_find_family", "_unsupported_fields", "_whole_number", "_activation",
         "_rope_options", "_rope_of_layers", "_window_options", "_attention_scale", "_model_section"),
        "config.json", ("tests/interop/test_bad_input.py", "tests/interop/test_known_models.py"),
        (("least <= value <= MAX_SIZE", "least <= value"),
         ("(OSError, ValueError, RecursionError)", "(OSError, ValueError)"),
         ("not isinstance(name, str) or name not in", "name not in")),
    ),
    "tokenizer.json": Target(
        "jaxtrain/data/tokenizer.py",
        ("__init__", "_find_bos", "_library_errors", "_find_eos", "_model_stops", "read_object", "_token_text"),
        "tokenizer", ("tests/data/test_tokenizer.py",),
        (("text if isinstance(text, str) else None", "text"),
         ('and type(error).__name__ != "PanicException"', ""),
         ("if not isinstance(content, dict):", "if content is None:")),
    ),
    "records": Target(
        "jaxtrain/io/jsonl.py", ("read_records", "parse_record", "truncate_after"),
        "records", ("tests/trackers/test_trackers.py",),
        (("except (ValueError, RecursionError):", "except ValueError:"),
         ("record if isinstance(record, dict) else None", "record"),
         ('json.loads(line) if line.endswith(b"\\n") else None', "json.loads(line)"),
         ("isinstance(found, int | float) and", "found and")),
    ),
    "marker": Target(
        "jaxtrain/checkpoint/files.py", ("parse_marker", "_is_well_formed", "is_inside", "size_problem"),
        "marker or no_file_of", ("tests/checkpoint/test_checkpointer.py",),
        (('{"", ".", ".."}', '{"", "."}'), ("if not _is_well_formed(content):", "if not content:"),
         ("!= checksum:\n", "!= checksum and checksum:\n")),
    ),
    "launch message": Target(
        "jaxtrain/launch/protocol.py", ("encode", "decode", "_check", "_has_type"),
        "launch", ("tests/launch/test_protocol.py",),
        (("except (ValueError, RecursionError):", "except ValueError:"),
         ("if not isinstance(message, dict):", "if message is None:"),
         ("return type(value) is expected", "return isinstance(value, expected)")),
    ),
    "leader state": Target(
        "jaxtrain/launch/leadership/state.py", ("from_text", "as_text"),
        "leader", (),
        (("(TypeError, RecursionError)", "TypeError"), ("(TypeError, RecursionError)", "RecursionError"),
         ("**json.loads(text)", "*json.loads(text)")),
    ),
    "handshake": Target(
        "jaxtrain/io/authenticated.py", ("take", "_shake_hands", "outgoing"),
        "handshake or limit", ("tests/io/test_authenticated.py",),
        (("if length > self._limit:", "if length > self._limit + 1:"),
         ("not hmac.compare_digest(mac, expected)", "len(mac) != len(expected)"),
         ("if not data.startswith(MAGIC):", "if not data:")),
    ),
    "memory header": Target(
        "jaxtrain/checkpoint/memory/protocol.py", ("parse_header", "_parse_piece", "_ints"),
        "header or snapshot", ("tests/checkpoint/test_memory_server.py",),
        (("AttributeError, OverflowError)", "AttributeError)"), ("piece.name not in tensors or not", "not"),
         ("piece.offset + piece.size <= header.size", "piece.offset + piece.size <= header.size + 1")),
    ),
    "schedule": Target(
        "jaxtrain/pipeline/schedules/files.py",
        ("_read_file", "_parse_csv", "_load_yaml", "_parse_yaml", "_table", "_check_options", "_count", "_parse_cell"),
        "schedule", ("tests/pipeline/test_schedule_files.py",),
        (("(yaml.YAMLError, ValueError, RecursionError)", "yaml.YAMLError"),
         ("except UnicodeDecodeError:", "except UnicodeEncodeError:"), ("if missing is not None:", "if missing:")),
    ),
    "hlo": Target(
        "jaxtrain/hlo/parse.py",
        ("element_bits", "parse_shape", "_split_tuple", "_after_bracket", "parse", "_instruction", "_names",
         "_first_scope"),
        "hlo", ("tests/hlo",),
        (("if shape_start == len(line):", "if shape_start > len(line):"), ("if not width:", "if width is False:"),
         ("if depth == 0:\n            return index + 1", "if depth == 0:\n            return index")),
    ),
}  # fmt: skip


class MeasureError(Exception):
    """A parser cannot be measured. One line, and what the tests said."""


def run_tests(root: Path, tests: list[str], tries: int, coverage: Path | None = None) -> str:
    """Runs tests of the sources in `root`. Returns `passed`, `failed` or `never ended`."""
    measure = ["-m", "coverage", "run", f"--data-file={coverage}", "--include=jaxtrain/*", "-a"] if coverage else []
    command = [sys.executable, *measure, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    env = os.environ | {"PYTHONPATH": str(root), "JAXTRAIN_FUZZ": str(tries), "JAX_PLATFORMS": "cpu"}
    command += [] if coverage else ["-x"]
    try:
        limit = LIMIT * 4 if coverage else LIMIT
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=limit, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "never ended"
    if done.returncode not in (0, 1):  # negative: a signal
        said = (done.stdout + done.stderr)[-500:]
        raise MeasureError(f"{' '.join(tests)}: pytest ended with exit code {done.returncode}: {said}")
    return "failed" if done.returncode else "passed"


def function_lines(path: Path, names: tuple[str, ...]) -> set[int]:
    """Returns the lines of functions of a file. Raises MeasureError if one is missing."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    if missing := set(names) - {node.name for node in nodes}:
        raise MeasureError(f"{path}: no {', '.join(missing)}")
    return {n for node in nodes if node.name in names for n in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def covered(root: Path, target: Target, tries: int) -> dict[str, Any]:
    """Measures the lines of a parser."""
    data = root / ".coverage-of-parsers"
    data.unlink(missing_ok=True)
    for tests in ([FUZZ, "-k", target.fuzz], list(target.units)):
        if tests and (outcome := run_tests(root, tests, tries, data)) != "passed":
            raise MeasureError(f"{' '.join(tests)} {outcome} without a planted bug")
    report = root / "coverage.json"
    command = [sys.executable, "-m", "coverage", "json", f"--data-file={data}", "-q", "-o", str(report)]
    subprocess.run([*command, f"--include={target.module}"], cwd=root, check=True, timeout=120)
    found = json.loads(report.read_text())["files"][target.module]
    lines = function_lines(root / target.module, target.functions)
    missed = sorted(lines & set(found["missing_lines"]))
    total = len(lines & {*found["missing_lines"], *found["executed_lines"]})
    source = (root / target.module).read_text().splitlines()
    return {"lines": round(1 - len(missed) / total, 3), "missed": [f"{n}: {source[n - 1].strip()}" for n in missed]}


def planted(root: Path, target: Target, bug: tuple[str, str]) -> str:
    """Plants a bug and returns what finds it: `fuzz`, `unit` or `nothing`."""
    path = root / target.module
    source = path.read_text()
    if source.count(bug[0]) != 1:
        raise MeasureError(f"{target.module}: {bug[0]!r} is there {source.count(bug[0])} times instead of once")
    try:
        path.write_text(source.replace(*bug))
        if run_tests(root, [FUZZ, "-k", target.fuzz], 150) != "passed":
            return "fuzz"
        return "unit" if target.units and run_tests(root, list(target.units), 150) != "passed" else "nothing"
    finally:
        path.write_text(source)


def measured(root: Path, target: Target, tries: int, is_quick: bool) -> dict[str, Any]:
    """Measures a parser; `is_quick` plants one bug alone. Raises MeasureError."""
    row = covered(root, target, tries)
    bugs = target.bugs[:1] if is_quick else target.bugs
    return row | {"planted": {f"{old} -> {new}": planted(root, target, (old, new)) for old, new in bugs}}


def main() -> int:
    options = common.parser(__doc__)
    options.add_argument("--tries", type=int, default=2000, help="mutations of each input")
    options.add_argument("--only", nargs="*", choices=TARGETS, default=list(TARGETS), help="parsers to measure")
    args = options.parse_args()
    results, is_good = [], True
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("jaxtrain", "tests", "configs", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for name in args.only:
            begun = time.monotonic()
            row = {"parser": name}
            try:
                row |= measured(root, TARGETS[name], 20 if args.quick else args.tries, args.quick)
            except MeasureError as error:
                row["error"] = str(error)
            row["seconds"] = round(time.monotonic() - begun, 1)
            found = list(row.get("planted", {}).values())
            is_good &= row.get("lines", 0) >= LEAST and "nothing" not in found
            results.append(row)
            shown = {key: value for key, value in row.items() if key not in ("planted", "missed")}
            print(json.dumps(shown | {"found by": found}), *row.get("missed", []), sep="\n  ", flush=True)
    common.report("parser_coverage", args, results, common.machine("coverage", "pytest"))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
