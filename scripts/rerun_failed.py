"""Run failed tests once more, alone, and report those that pass now as FLAKY.

Continuous integration calls this after `scripts/test.sh`: a test that fails only beside others, or
only now and then, is reported with its first failure, and does not fail the run.
"""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

MOST = 20  # more failures than these are no flakes
SHOWN_LINES = 60  # of a first failure


def failures(report: Path) -> dict[str, str]:
    """Return the failed tests of a JUnit report and what each said."""
    failed = {}
    for case in ET.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                failed[name] = found.text or found.get("message") or ""
    return failed


def was_collected(report: Path) -> bool:
    """Return whether all tests were found, and by all workers alike."""
    errors = ET.parse(report).iter("error")
    return all(error.get("message") != "collection failure" for error in errors)


def flaky_lines(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Return what to print of tests that failed at first and not again."""
    lines = []
    for name in sorted(first.keys() - second.keys()):
        lines.append(f"FLAKY {name}: failed once, passed alone. Its first failure:")
        lines += [f"    {line}" for line in first[name].splitlines()[-SHOWN_LINES:]]
    return lines


def main(first: Path) -> int:
    """Return 0 if everything that failed passes now; `first` is the JUnit report of the tests."""
    failed = failures(first) if first.exists() else {}
    if not failed:
        return 1  # the tests were not reached, or their end was not
    if not was_collected(first):
        print("tests could not be collected")  # so none of them is what failed
        return 1
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed, too many to run again")
        return 1
    print(f"\n{len(failed)} tests failed; they run once more, alone", flush=True)
    second = first.with_name("second.xml")
    again = subprocess.run(
        [
            sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none",
            f"--junit-xml={second}",
        ],
        check=False,
    )  # fmt: skip
    if again.returncode not in (0, 1):
        return again.returncode
    print("\n".join(flaky_lines(failed, failures(second))))
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
