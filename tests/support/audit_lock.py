"""Compares the locked versions with known vulnerabilities, if a service that lists them is reachable.

`make audit` runs it in an environment with pip-audit. Exit code 1: a locked version has a known vulnerability.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"


def ask(service: str) -> tuple[list[dict[str, Any]], str]:
    """Returns the packages that a service of pip-audit knows, and the last line of its errors."""
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--format", "json",
               "--progress-spinner", "off", "--no-deps", "--disable-pip", "--requirement", str(LOCK)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 2:  # its command line has changed
        raise SystemExit(f"make audit: {done.stderr}")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        packages = []
    # An index that is a mirror knows no package's vulnerabilities, of which pip-audit says that there are none.
    known = [package for package in packages if "skip_reason" not in package]
    return known, "it knows none of these packages" if packages else (done.stderr.splitlines() or [""])[-1][:60]


def main() -> int:
    reasons = []
    for service in ("pypi", "osv"):
        known, reason = ask(service)
        if not known:
            reasons.append(f"{service}: {reason}")
            continue
        bad = [package for package in known if package["vulns"]]
        for package in bad:
            for found in package["vulns"]:
                fixed = ", ".join(found["fix_versions"]) or "no version"
                print(f"{package['name']} {package['version']}: {found['id']}, mended in {fixed}")
        print(f"{len(bad)} of {len(known)} locked packages have known vulnerabilities ({service})")
        return int(bool(bad))
    print(f"the locked versions are not audited ({'; '.join(reasons)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
