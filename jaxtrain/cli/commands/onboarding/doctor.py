"""`jaxtrain doctor`: checks this machine, and prints what is there and what is likely to give trouble."""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable, Iterator

from jaxtrain.cli.commands.onboarding.machine_checks import Finding, machine_checks
from jaxtrain.errors import UserError, describe_error
from jaxtrain.exit_codes import ERROR, OK

Check = Callable[[], list[Finding]]


def run(args: argparse.Namespace) -> int:
    """Runs the command; exit code 1 if a check finds an error, 0 also with warnings."""
    if not 0 < args.timeout < 3600:
        raise UserError(f"doctor: --timeout {args.timeout:g}: expected seconds, more than 0 and less than 3600")
    found: list[Finding] = []
    for title, findings in results(machine_checks(args.dir, args.timeout), args.timeout):
        found += findings
        for index, finding in enumerate(findings):
            print(f"{finding.level:<6}{title if not index else '':<12}{finding.text}", flush=True)
    errors, warnings = (sum(finding.level == level for finding in found) for level in ("ERROR", "warn"))
    print(f"\n{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    return ERROR if errors else OK


def results(checks: dict[str, Check], timeout: float) -> Iterator[tuple[str, list[Finding]]]:
    """Yields (title, findings) in order. The checks run beside each other; one that hangs is given up.

    Args:
        checks: functions by title. A dead network disk or name server may keep one of them for ever.
        timeout: seconds for all together, with some more for the processes that a check starts to end by themselves.
    """
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {title: queue.SimpleQueue() for title in checks}
    for title, check in checks.items():
        threading.Thread(target=_run_check, args=(check, answers[title]), daemon=True).start()
    end = time.monotonic() + timeout + 5
    for title, answer in answers.items():
        try:
            yield title, answer.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            yield title, [Finding("ERROR", f"does not answer within {timeout:g} s; a disk or network that hangs?")]


def _run_check(check: Check, answer: queue.SimpleQueue[list[Finding]]) -> None:
    try:
        answer.put(check())
    except Exception as error:
        answer.put([Finding("ERROR", f"cannot be checked: {describe_error(error)}")])
