"""Files that commands write on request (`--json`, `--html`, ...)."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxtrain.errors import UserError


def check_output_files(*files: str | None) -> None:
    """Raises UserError if a file cannot be written, before minutes of work. Skips None."""
    for file in filter(None, files):
        folder = Path(file).parent
        if not folder.is_dir() or Path(file).is_dir():
            raise UserError(f"{file}: {'is a folder' if folder.is_dir() else f'no folder {folder}'}; expected a file")


def write_file(file: str, text: str) -> None:
    """Writes a file and reports it on stderr."""
    Path(file).write_text(text + "\n", encoding="utf-8")
    print(f"written: {file}", file=sys.stderr)
