"""Exit codes of the commands, in one place."""

from __future__ import annotations

OK = 0
ERROR = 1
USAGE = 2  # bad input: another try would end the same
HUNG = 70  # EX_SOFTWARE of sysexits.h: the watchdog ended a process that made no progress
SAVED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": a signal came, the state is saved, the run can be resumed
INTERRUPTED = 130  # 128 + SIGINT
