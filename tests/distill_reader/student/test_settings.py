from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import UsageError
from distill_reader.student.clients.endpoints import endpoints_of
from distill_reader.student.options import to_bytes
from distill_reader.student.settings import ReaderSettings, with_environment

SETTINGS = ReaderSettings(ins=("image", None), predicts=("score",))
BALANCE = {"PADDLE_DISTILL_BALANCE_SERVER": "10.0.0.1:7001, 10.0.0.2:7001"}


def test_sent_fields_are_those_with_a_name():
    settings = ReaderSettings(ins=(None, "a", None, "b"), predicts=("score",))
    assert settings.sent == ((1, "a"), (3, "b"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ins": ()}, r"ins: names at least one tensor, got \[\]"),
        ({"ins": (None,)}, r"ins: names at least one tensor, got \[None\]"),
        ({"ins": ("a", "a")}, "ins: each name may be there once"),
        ({"ins": ("a", 3)}, "ins: expected names of tensors, got 3"),
        ({"predicts": ()}, "predicts: names at least one"),
        ({"predicts": ("a", None)}, "predicts: None is for fields"),
        ({"teacher_batch_size": 0}, "teacher_batch_size: expected an integer of 1 or more, got 0"),
        ({"teacher_batch_size": True}, "teacher_batch_size: .*got True"),
        ({"require_max_teacher": -1}, "require_max_teacher: .*got -1"),
        ({"no_teacher_timeout_s": 0}, "no_teacher_timeout_s: expected seconds > 0"),
        ({"no_teacher_timeout_s": float("nan")}, "no_teacher_timeout_s: .*got nan"),
        ({"no_teacher_policy": "ignore"}, "policy: expected 'raise' or 'skip', got 'ignore'"),
        ({"no_teacher_timeout_s": "60"}, "no_teacher_timeout_s: .*got '60'"),
        ({"hedging": "no"}, "hedging: expected True or False, got 'no'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, Any], words: str):
    values = {"ins": ("image",), "predicts": ("score",), **changes}
    with pytest.raises(UsageError, match=words):
        ReaderSettings(**values)


@pytest.mark.parametrize("given", ["a:1,b:2", " a:1 , b:2", ["a:1", "b:2"], ("a:1", "b:2")])
def test_endpoints_come_as_a_list_or_a_text_with_commas(given: Any):
    assert endpoints_of(given) == ("a:1", "b:2")
    assert endpoints_of(iter(endpoints_of(given))) == ("a:1", "b:2")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "a:1,,b:2", [], ["a:1", ""], ["a:1", 2], "a:1,a:1", 7])
def test_endpoints_that_cannot_be_meant_are_refused(given: Any):
    with pytest.raises(UsageError, match="teachers: "):
        endpoints_of(given)


def test_numbers_of_numpy_are_numbers():
    assert to_bytes("max_memory", np.int64(3)) == 3 << 20
    for value in (0, 1, np.bool_(True)):
        ReaderSettings(ins=("image",), predicts=("score",), hedging=value)  # type: ignore[arg-type]


def test_an_empty_environment_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert with_environment(SETTINGS, {}) == SETTINGS
    assert with_environment(SETTINGS, {"PADDLE_DISTILL_BALANCE_SERVER": ""}) == SETTINGS


def test_the_environment_has_the_last_word_about_the_client_prototxt(tmp_path: Path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.touch()
    set_by_code = ReaderSettings(ins=("a",), predicts=("b",), conf_file=str(mine))
    assert with_environment(set_by_code, {}).conf_file == str(mine)
    found = with_environment(set_by_code, {"PADDLE_DISTILL_CONF_FILE": str(theirs)})
    assert found.conf_file == str(theirs)


def test_a_prototxt_where_the_original_looks_for_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serving_conf").mkdir()
    (tmp_path / "serving_conf" / "serving_client_conf.prototxt").touch()
    assert with_environment(SETTINGS, {}).conf_file == "serving_conf/serving_client_conf.prototxt"


def test_a_balance_server_in_the_environment_brings_service_and_number_of_teachers():
    environ = {
        **BALANCE,
        "PADDLE_DISTILL_SERVICE_NAME": "mnist",
        "PADDLE_DISTILL_MAX_TEACHER": "3",
    }
    found = with_environment(SETTINGS, environ)
    assert found.discovery_servers == ("10.0.0.1:7001", "10.0.0.2:7001")
    assert (found.service_name, found.require_max_teacher) == ("mnist", 3)


def test_without_a_balance_server_the_number_of_teachers_in_the_environment_does_not_count():
    assert with_environment(SETTINGS, {"PADDLE_DISTILL_MAX_TEACHER": "3"}) == SETTINGS


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (BALANCE, "PADDLE_DISTILL_SERVICE_NAME is missing"),
        (
            {**BALANCE, "PADDLE_DISTILL_BALANCE_TYPE": "etcd"},
            "PADDLE_DISTILL_BALANCE_TYPE: 'etcd' is not supported: .* start `edl discovery`",
        ),
        (
            {
                **BALANCE,
                "PADDLE_DISTILL_SERVICE_NAME": "mnist",
                "PADDLE_DISTILL_MAX_TEACHER": "many",
            },
            "PADDLE_DISTILL_MAX_TEACHER: .*'many'",
        ),
        ({"PADDLE_DISTILL_CONF_FILE": "nowhere"}, "PADDLE_DISTILL_CONF_FILE: nowhere is not"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: dict[str, str], words: str):
    with pytest.raises(UsageError, match=words):
        with_environment(SETTINGS, environ)
