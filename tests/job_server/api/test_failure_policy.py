"""The table of what is done about failures: what is read, and what is refused."""

import time

import pytest

from job_server.api.codec import WireError, decode, encode
from job_server.api.failure_policy import (
    FailedProcess,
    FailureRule,
    Then,
    default_policy,
    found_in,
    matches_name,
    read_policy,
)
from job_server.api.wire import JobKind, JobSpec
from tests.support import ROOT, code_blocks


def test_the_rules_of_edl_are_a_table_of_the_same_form_and_meet_everything():
    rules = default_policy()
    assert rules[-1] == FailureRule(then=Then.RESTART)
    assert {rule.then for rule in rules} == set(Then) - {Then.IGNORE}
    spec = JobSpec(job_id="a", failure_policy=rules)
    assert decode(JobSpec, encode(spec)) == spec


def test_a_single_value_stands_for_a_list():
    (rule,) = read_policy(
        "- {of: pod, exit_code: 3, log: 'disk .* gone', then: restart_elsewhere, name: disk}"
    )
    assert rule == FailureRule(
        of=FailedProcess.POD, exit_code=(3,), log=("disk .* gone",), name="disk",
        then=Then.RESTART_ELSEWHERE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit_code: 3", "expected a list of rules, such as '- {exit_code: 3, then: fail}'"),
        ("- [", "line 1: not YAML"),
        ("- {signal: [SIGBUS], then: fail, signal: SIGKILL}", "the key 'signal' comes twice"),
        ("- 3", "rule 1: expected keys, such as 'exit_code: 3', got 3"),
        ("- {then: fail}\n- {exitcode: 3, then: fail}", "rule 2: unknown key 'exitcode'; known: "),
        ("- {exit_code: 3}", "rule 1: then: missing"),
        (
            "- {then: reboot}",
            "rule 1: then: expected one of restart, restart_elsewhere, quarantine, fail, "
            "fail_if_repeated, preempted, ignore, got 'reboot'",
        ),
        ("- {of: client, then: fail}", "rule 1: of: expected one of trainer, pod, got 'client'"),
        ("- {exit_code: three, then: fail}", "rule 1: exit_code[0]: expected an integer|int"),
        ("- {exit_code: [3, 256], then: fail}", "rule 1: exit_code: expected 1 to 255, got 256"),
        ("- {exit_code: [], then: fail}", "rule 1: exit_code: an empty list meets nothing"),
        ("- {signal: KILL, then: fail}", "rule 1: signal: 'KILL' is none; give a name such as SIG"),
        ("- {signal: 9, then: fail}", "rule 1: signal[0]: expected"),
        ("- {errno: NOSPACE, then: fail}", "rule 1: errno: 'NOSPACE' is none; give a name such as"),
        ("- {text: '(', then: fail}", "rule 1: text: '(' is no regular expression: missing )"),
        (
            "- {text: '(?<=lr .*)nan', then: fail}",
            "rule 1: text: '(?<=lr .*)nan' is no regular expression: look-behind requires fixed",
        ),
        ("- {log: '(a+)+b', then: fail}", "rule 1: log: '(a+)+b' matches in too many ways; use"),
        ("- {log: '', then: fail}", "rule 1: log: '' matches in too many ways"),
        (
            "- {exit_code: 3, signal: SIGKILL, then: fail}",
            "rule 1: signal: a process that a signal has ended has no exit_code; make two rules",
        ),
        ("- {of: pod, at: 'a.py:*', then: fail}", "rule 1: at: only a trainer raises exceptions"),
        ("- {signal: SIGABRT, exception: ValueError, then: fail}", "a signal raises no exception"),
        ("- {then: fail}\n" * 201, "at most 200 rules, got 201"),
    ],
)
def test_what_is_wrong_is_refused_by_rule_key_value_and_remedy(text, says):
    with pytest.raises(WireError) as refused:
        read_policy(text)
    assert any(each in str(refused.value) for each in says.split("|")), refused.value


def test_a_job_of_teachers_has_none():
    with pytest.raises(WireError, match="failure_policy: means nothing for a job of kind teacher"):
        JobSpec(job_id="a", kind=JobKind.TEACHER, service="s", failure_policy=default_policy())


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "a*a*b", "(a?){40}b", "a?" * 40 + "b", "(.*x){10}", "(a*)*"]
)
def test_a_pattern_that_could_keep_the_server_busy_for_minutes_is_refused(pattern):
    with pytest.raises(WireError, match="matches in too many ways"):
        FailureRule(then=Then.FAIL, log=(pattern,))


@pytest.mark.parametrize(
    "pattern",
    [
        "a.*b(c|d)?",
        r"(\d{1,3}\.){3}\d",
        "^Bus error$",
        "(?i)no(t| such) (file|folder)",
        "a?b+",
        "(a)?b(?(1)|c)",
        "(a)?b(?(1))",
    ],
)
def test_an_ordinary_pattern_is_taken(pattern):
    FailureRule(then=Then.FAIL, log=(pattern,))


def test_the_slowest_pattern_that_is_taken_is_looked_for_in_seconds_at_most():
    FailureRule(then=Then.FAIL, log=("a.*(x|y|z)",))
    began = time.process_time()
    assert not found_in(("a.*(x|y|z)",), ("a" * 500,) * 20)
    assert time.process_time() - began < 5


def test_a_pattern_is_found_in_any_part_of_a_long_line_and_in_any_case():
    assert found_in(("nccl.*timeout",), ("x" * 700 + " NCCL watchdog TIMEOUT",))
    assert not found_in(("nccl.*timeout",), ("NCCL", "timeout"))


@pytest.mark.parametrize(
    ("pattern", "types", "is_met"),
    [
        ("OutOfMemoryError", ("torch.OutOfMemoryError", "RuntimeError"), True),
        ("*Memory*", ("torch.OutOfMemoryError", "RuntimeError"), True),
        ("RuntimeError", ("torch.OutOfMemoryError", "RuntimeError"), True),
        ("torch.*", ("torch.OutOfMemoryError", "RuntimeError"), True),
        ("builtins.RuntimeError", ("torch.OutOfMemoryError", "RuntimeError"), True),
        ("builtins.OutOfMemoryError", ("torch.OutOfMemoryError", "RuntimeError"), False),
        ("Memory", ("torch.OutOfMemoryError", "RuntimeError"), False),
    ],
)
def test_a_class_is_named_in_full_or_by_its_last_part_with_its_base_classes(pattern, types, is_met):
    assert matches_name((pattern,), types) is is_met


def test_the_page_shows_the_table_as_it_is_and_its_examples_are_right():
    example, shown = code_blocks("docs/failures.md", "yaml")
    assert shown == (ROOT / "job_server/api/failure_policy.yaml").read_text()
    assert len(read_policy("\n".join(example.splitlines()[3:]))) == 3
