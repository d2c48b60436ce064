"""What commands take they say of themselves, and documents name no flag that is not there."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest

from edl.__main__ import VERBS, main
from job_client import __main__ as clients
from job_server.api.wire import JobSpec
from job_server.server import config as servers
from k8s_controller.__main__ import build_parser as controllers
from pod_runtime import run as runs
from tests.support import ROOT

# Programs of a verb that have a parser of their own.
MORE = (("top", "--kubernetes"), ("simulate", "--nodes", "4x8"))

TRAIN_SH = "examples/digits/train.sh"  # for a client in ROOT

# Fields of a job that a training on one machine, by one command, has no use for.
NOT_OF_ONE_MACHINE = {
    "kind", "service", "demand_timeout_s", "demand_interval_s",  # teachers
    "folder",  # its script stands on the command line
    "start_timeout_s", "expected_nodes",  # its only node is there
    "priority", "user", "after",  # of a queue with other jobs
    "max_preemptions", "max_resizes",  # nothing preempts, and only its user resizes
}  # fmt: skip


@contextmanager
def _help_is_caught(found: list[argparse.ArgumentParser]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self)
        )
        yield


@pytest.fixture(scope="module")
def parsers() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command, by what a user types."""
    found = {"python -m k8s_controller": controllers()}
    for command in (*((verb,) for verb in VERBS), *MORE):
        caught: list[argparse.ArgumentParser] = []
        with _help_is_caught(caught), suppress(SystemExit):  # one returns its code
            main([*command, "--help"])
        (found[" ".join(("edl", *command))],) = caught
    return found


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_every_flag_says_what_it_is_for(parsers):
    silent = [
        f"{command} {action.option_strings[0]}"
        for command, parser in parsers.items()
        for action in parser._actions
        if action.option_strings and (not action.help or action.help == argparse.SUPPRESS)
    ]
    assert silent == []


def test_a_run_on_one_machine_takes_what_a_submitted_training_takes(parsers):
    submitted = {action.dest for action in parsers["edl submit"]._actions}
    fields = set(JobSpec.__struct_fields__) - {"keeps_least"}  # the controller's: of TrainingJobs
    named = {"min_pods": "min", "max_pods": "max", "script": "change_script"}
    short = {"cpu_milli": "cpu", "memory_mb": "memory", "max_run_time_s": "max_run_time"}
    assert fields - {"script"} <= submitted
    here = {action.dest for action in parsers["edl run"]._actions}
    lacks = {field for field in fields if {**named, **short}.get(field, field) not in here}
    assert lacks == NOT_OF_ONE_MACHINE


def test_a_command_in_a_document_takes_the_flags_that_are_shown_with_it(parsers):
    wrong = []
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in documents:
        for verb, rest in re.findall(r"\bedl ([a-z]+)((?: [^\n`|#]*)?)", path.read_text()):
            words = re.split(r"\S+\.(?:py|sh)\b", rest)[0]  # what follows are the script's own
            taken = [
                flags(each)
                for name, each in parsers.items()
                if f"{name} ".startswith(f"edl {verb} ")
            ]
            if taken:
                shown = set(re.findall(r"(?<=\s)--[a-z]\w*", words))
                wrong += [f"{path.name}: edl {verb} {flag}" for flag in shown - set().union(*taken)]
    assert wrong == []


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("--log_dir", lambda path: runs.read_config([f"--log_dir={path}", __file__], {})),
        ("--db", lambda path: servers.read_config([f"--db={path}"], {})),
        ("--log_dir", lambda path: clients.parse_args([f"--log_dir={path}", TRAIN_SH], {}, ROOT)),
        ("--pod_path", lambda path: clients.parse_args([f"--pod_path={path}", TRAIN_SH], {}, ROOT)),
    ],
)
def test_a_folder_that_no_program_could_tell_another_of_is_refused(
    flag: str, read: Callable[[str], object]
):
    with pytest.raises(Exception, match=rf"^{flag}: '/x/caf\\udce9' is not UTF-8; name a path"):
        read("/x/caf\udce9")
