"""Long polls: who waits is told at once, and many cost no more than one."""

import functools
import json
import threading

import pytest

from job_server.api.errors import NotFound
from job_server.server import polls
from job_server.server.polls import Topic, Watchers
from tests.job_server.serving import InThread
from tests.support import wait_until


class Counted:
    """A topic's renderer that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: str, revision: int) -> bytes:
        self.calls += 1
        return json.dumps({"value": value, "revision": revision}).encode()


def topic(limit: int = 100) -> tuple[Topic[str], Watchers, Counted]:
    watchers, render = Watchers(limit), Counted()
    return Topic("first", render, watchers, 7), watchers, render


def test_an_unknown_revision_is_answered_at_once():
    news, _, _ = topic()
    for revision in (-1, 6, 8):
        answer = news.poll(revision, 60)
        assert json.loads(answer.body) == {"value": "first", "revision": 7}
        assert not answer.busy


def test_a_poll_without_news_answers_the_same_revision_when_its_time_is_over():
    news, watchers, _ = topic()
    assert json.loads(news.poll(7, 0.02).body)["revision"] == 7
    assert watchers.count == 0


def test_all_who_wait_are_told_of_one_change_by_one_serialisation(monkeypatch):
    monkeypatch.setattr(polls, "FRESH_S", 600.0)  # the last of them may come late to its body
    news, watchers, render = topic(300)
    waits = [InThread(lambda: news.poll(7, 60)) for _ in range(300)]
    wait_until(lambda: watchers.count == 300)
    news.publish("second")
    bodies = {wait.result().body for wait in waits}
    assert bodies == {b'{"value": "second", "revision": 8}'}
    assert render.calls == 1
    assert watchers.count == 0


def test_all_are_told_while_others_come_and_time_out():
    news, watchers, _ = topic(300)
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            news.poll(news.revision, 0.001)

    comers = [InThread(come_and_go) for _ in range(5)]
    for _ in range(20):
        revision = news.revision
        waits = [InThread(functools.partial(news.poll, revision, 60)) for _ in range(20)]
        wait_until(lambda: watchers.count >= 20)
        news.publish("next")
        for wait in waits:
            assert json.loads(wait.result().body)["revision"] == revision + 1
    stop.set()
    for comer in comers:
        comer.result()


def test_one_poll_too_many_is_answered_at_once_and_says_so():
    news, watchers, _ = topic(1)
    first = InThread(lambda: news.poll(7, 60))
    wait_until(lambda: watchers.count == 1)
    assert news.poll(7, 60).busy
    assert not news.poll(-1, 60).busy  # has news: needed no place
    news.publish("second")
    assert not first.result().busy


def test_a_refreshed_value_wakes_nobody_but_is_shown():
    news, watchers, _ = topic()
    poll = InThread(lambda: news.poll(7, 60))
    wait_until(lambda: watchers.count == 1)
    news.refresh("in between")
    assert json.loads(news.poll(-1, 0).body) == {"value": "in between", "revision": 7}
    assert watchers.count == 1
    news.publish("second")
    poll.result()


def test_what_has_ended_is_told_to_all_and_from_then_on():
    news, watchers, _ = topic()
    waits = [InThread(lambda: news.poll(7, 60)) for _ in range(20)]
    wait_until(lambda: watchers.count == 20)
    news.end(NotFound("deleted"))
    for wait in waits:
        with pytest.raises(NotFound, match="deleted"):
            wait.result()
    with pytest.raises(NotFound, match="deleted"):
        news.poll(-1, 0)


def test_a_closing_server_lets_nobody_wait():
    news, watchers, _ = topic()
    poll = InThread(lambda: news.poll(7, 60))
    wait_until(lambda: watchers.count == 1)
    watchers.closing = True
    news.wake()
    assert json.loads(poll.result().body)["revision"] == 7
