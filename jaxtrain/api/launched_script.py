"""A user's script that `jaxtrain launch ... -- COMMAND` runs as its workers.

The launcher runs the command once with JAXTRAIN_DESCRIBE: the trainer writes its config to that file and ends the
process before a step. Each worker runs it with JAXTRAIN_RUN, the folder of the run, whose config.yaml has the mesh of
the present processes.
"""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType

from jaxtrain.config import Config
from jaxtrain.config.run_dir import absolute, saved_config
from jaxtrain.config.show import dump_yaml
from jaxtrain.core.resolve import load_config
from jaxtrain.errors import TrainingError, UserError
from jaxtrain.exit_codes import ERROR, OK, SAVED, USAGE
from jaxtrain.io.atomic import write_atomic

DESCRIBE, RUN = "JAXTRAIN_DESCRIBE", "JAXTRAIN_RUN"


def is_launched() -> bool:
    """Returns whether this process is a worker that runs a script."""
    return RUN in os.environ


def launched_run(config: Config, directory: Path | None) -> tuple[Config, Path] | None:
    """Returns the config and the folder of a worker's run; None in a process that no launcher has started.

    In the process that describes the run it writes the config, and does not return.

    Args:
        config: the script's config.
        directory: folder of the run, if the script names one.

    Raises:
        UserError: the script trains a second run.
    """
    if directory is not None:
        config = config.model_copy(update={"dir": str(directory.absolute().parent), "name": directory.name})
    config = absolute(config.model_copy(update={"dir": os.path.abspath(os.path.expanduser(config.dir))}))
    if (file := os.environ.get(DESCRIBE)) is not None:
        write_atomic(Path(file), dump_yaml(config))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OK)
    if not is_launched():
        return None
    run = Path(os.environ[RUN])
    saved = load_config(saved_config(run))
    if (saved.name, saved.dir) != (config.name, config.dir):
        message = f"the launched script trains {saved.name}, and a second run {config.name}"
        raise UserError(f"Trainer: {message}; expected one run in a launched script")
    _end_at_once_after_errors()
    return saved, run


def launched_devices(simulate: int | None) -> int | None:
    """Returns the number of simulated devices: in a worker that of its run, else the given one."""
    if not is_launched():
        return simulate
    _end_at_once_after_errors()
    return load_config(saved_config(Path(os.environ[RUN])), paths=False, checks=()).simulate


def end_if_stopped(stopped_by: str | None) -> None:
    """Ends a worker whose run a signal has stopped and saved, so that the script goes on after the last step only."""
    if is_launched() and stopped_by in signal.Signals.__members__:
        sys.exit(SAVED)


def _end_at_once_after_errors() -> None:
    """Ends the process at once after an error: a normal end would wait in JAX for the other workers."""
    sys.excepthook = _report_and_end


def _report_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (UserError, TrainingError)):
        print(f"jaxtrain: {error}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(USAGE if isinstance(error, UserError) else ERROR)
