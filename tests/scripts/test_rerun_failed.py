"""Failed tests run once more, alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import rerun_failed

PASSES_AT_THE_SECOND_TRY = """
from pathlib import Path
def test_now_and_then():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "the first try"
"""


def run_tests(folder: Path, text: str) -> Path:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    report = folder / "first.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}"], cwd=folder, check=False
    )
    return report


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        pytest.param(PASSES_AT_THE_SECOND_TRY, 0, ["FLAKY", "the first try"], id="a flake"),
        pytest.param("def test_never():\n    assert 0", 1, [], id="a failure"),
    ],
)
def test_only_what_passes_alone_is_flaky(tmp_path, monkeypatch, capfd, text, code, said):
    report = run_tests(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert rerun_failed.main(report) == code
    out = capfd.readouterr().out
    for part in said:
        assert part in out
    assert ("FLAKY" in out) == bool(said)


def test_tests_that_were_not_reached_are_no_success(tmp_path):
    assert rerun_failed.main(tmp_path / "first.xml") == 1


def test_a_broken_build_is_not_run_again(tmp_path, capsys):
    report = run_tests(
        tmp_path, f"import pytest\n@pytest.mark.parametrize('n', range({rerun_failed.MOST + 1}))\n"
        "def test_never(n):\n    assert 0"
    )  # fmt: skip
    assert rerun_failed.main(report) == 1
    assert "too many" in capsys.readouterr().out


def test_tests_that_could_not_be_collected_are_not_run_again(tmp_path, capsys):
    report = run_tests(tmp_path, "import there_is_no_such_module")
    assert rerun_failed.main(report) == 1
    assert "could not be collected" in capsys.readouterr().out
