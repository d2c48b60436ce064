"""When a trainer counts as hung: by what it does, how long steps take, and how busy all is."""

from dataclasses import replace

import pytest

from job_server.api.wire import HangLimits
from pod_runtime.activity import Doing, Seen
from pod_runtime.launcher.hangs import LOOK_S, Alarm, Look, Silence, given_up, heed, limit_s

LIMITS = HangLimits()
SEEN = Seen(doing=Doing.STEPPING, since=0.0, steps=100, samples=800, seconds=(0.0,) * len(Doing))


def look_for(
    seconds: float,
    *,
    doing: Doing = Doing.STEPPING,
    steps: int = 100,
    step_s: float = 0.1,
    cpu_share: float = 0.0,
    delayed_share: float = 0.0,
    every_s: float = LOOK_S,
) -> list[tuple[float, Alarm]]:
    """Look at a trainer that gives no sign of life for so long; return the alarms, by time."""
    silence: Silence | None = None
    alarms, at = [], 0.0
    while at <= seconds:
        seen = replace(SEEN, doing=doing, steps=steps)
        look = Look(seen=seen, cpu_s=cpu_share * at, delayed_s=delayed_share * at)
        silence, alarm = heed(silence, look, at, LIMITS, step_s)
        if alarm is not None:
            alarms.append((at, alarm))
        at += every_s
    return alarms


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ({}, 60),
        ({"step_s": 5.0}, 100),  # twenty times
        ({"steps": 2}, 600),  # it may compile
        ({"doing": Doing.STARTING}, 600),
        ({"doing": Doing.READING}, 600),
        ({"doing": Doing.BETWEEN}, 1800),
        ({"doing": Doing.EVALUATING}, 1800),
        ({"doing": Doing.SAVING}, 1800),
        ({"doing": Doing.EXCHANGING}, 1800),  # whoever lets it wait is said before
        ({"cpu_share": 0.5}, 600),  # an evaluation of the script's own, perhaps
    ],
)
def test_each_kind_of_wait_has_its_limit_and_is_acted_on_after_ten(what, limit):
    alarms = look_for(10 * limit + 2, **what)
    assert [(at, alarm.act) for at, alarm in alarms] == [(limit, False), (10 * limit, True)]


@pytest.mark.parametrize("field", ["step_s", "first_s", "data_s", "evaluation_s", "saving_s"])
def test_who_waits_for_the_others_may_do_so_for_as_long_as_any_of_them_may_be_silent(field: str):
    limits = HangLimits(**{field: 9000.0})
    waits = limit_s(replace(SEEN, doing=Doing.EXCHANGING), limits, 0.1, busy=False)
    assert waits == 9000


def test_who_is_parked_may_be_silent_for_ever():
    seen = replace(SEEN, doing=Doing.PARKED)
    assert limit_s(seen, LIMITS, 0.1, busy=False) is None
    assert look_for(20_000, doing=Doing.PARKED, every_s=100) == []


def test_a_script_that_does_nothing_once_its_training_is_complete_is_said_and_never_killed():
    """It may hang at its exit; or it serves its model, and waits for requests."""
    ((at, alarm),) = look_for(20_000, doing=Doing.DONE)
    assert (at, alarm.act) == (1800, False)
    assert "after its training was complete" in alarm.text
    assert look_for(20_000, doing=Doing.DONE, cpu_share=0.5) == []


def test_a_busy_machine_is_no_alarm_as_waiting_for_a_processor_does_not_count():
    assert look_for(600, delayed_share=0.95) == []


def test_a_launcher_that_was_stopped_itself_has_not_seen_the_trainer_hang():
    assert look_for(1000, every_s=50) == []  # it can answer for two seconds of each fifty


def test_a_sign_of_life_after_an_alarm_is_told_and_another_hang_is_said_again():
    silence, _ = heed(None, Look(seen=SEEN), 0.0, LIMITS, 0.1)
    silence = replace(silence, silent_s=59.5)
    silence, alarm = heed(silence, Look(seen=SEEN), 1.0, LIMITS, 0.1)
    assert alarm is not None
    assert alarm.silent_s == pytest.approx(60.5)
    alive = replace(SEEN, steps=101)
    silence, alarm = heed(silence, Look(seen=alive), 2.0, LIMITS, 0.1)
    assert alarm == Alarm(text="it has given a sign of life after 60 s", silent_s=0.0)
    silence, alarm = heed(silence, Look(seen=alive), 3.0, LIMITS, 0.1)
    assert alarm is None
    assert not silence.said


def test_a_trainer_that_is_ended_was_given_up_unless_it_waits_for_others():
    assert given_up(SEEN, 5.0) == ""
    assert given_up(SEEN, 31.0).startswith("no sign of life for 31 s in a step")
    for doing in (Doing.EXCHANGING, Doing.PARKED, Doing.DONE):
        assert given_up(replace(SEEN, doing=doing), 31.0) == ""
