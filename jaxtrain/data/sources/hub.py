"""Datasets of the Hugging Face hub: `hf://OWNER/NAME[/CONFIG][:SPLIT]`, the split being `train` unless it is named.

The library `datasets` downloads them, once, into its own cache as Arrow, which is then read in place.
"""

from __future__ import annotations

import os
import re

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import File, one_line
from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional

PREFIX = "hf://"
FORM = re.compile(r"hf://(?P<id>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")


def hub_files(source: SourceConfig) -> list[File]:
    """The Arrow files of a dataset of the hub, downloaded where they are not here yet; sorted by name.

    Raises:
      DataError: not of the form above, no library, no such dataset, or no network.
    """
    found = FORM.fullmatch(source.path)
    if found is None:
        raise DataError(f"{source.path}: a dataset of the hub is given as hf://OWNER/NAME[/CONFIG][:SPLIT]")
    if source.format not in ("auto", "arrow") or source.include:
        raise DataError(f"{source.path}: a dataset of the hub is read as Arrow; leave out format and include")
    datasets = import_optional("datasets", f"{source.path}: a dataset of the hub", "hf")
    try:
        made = datasets.load_dataset(found["id"], found["config"], split=found["split"] or "train")
    except Exception as error:  # the library, its downloads and its readers have many classes of them
        raise DataError(f"{source.path}: cannot be loaded ({type(error).__name__}: {one_line(error)})") from error
    paths = sorted(entry["filename"] for entry in made.cache_files)
    if not paths:
        raise DataError(f"{source.path}: holds no rows, or `datasets` keeps it in memory alone")
    return sorted(File(os.path.basename(p), os.path.abspath(p), "arrow", os.path.getsize(p)) for p in paths)
