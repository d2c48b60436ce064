"""Messages that several threads decode."""

import threading
import time

from job_server.api.codec import Message, decode, from_json

_is_built = threading.Event()


def slowly() -> type[int]:
    """Give another thread the time to decode what is being built."""
    _is_built.set()
    time.sleep(0.2)
    return int


class Part(Message, frozen=True, kw_only=True):
    number: "slowly()"  # type: ignore[valid-type]


class Whole(Message, frozen=True, kw_only=True):
    name: str
    part: Part


def test_a_class_that_one_thread_begins_to_decode_is_decoded_by_another_one():
    # msgspec would show the second one a class half built, and the process would get SIGSEGV.
    whole = Whole(name="a", part=Part(number=1))
    text = b'{"name": "a", "part": {"number": 1}}'
    first = threading.Thread(target=from_json, args=(Whole, text))
    first.start()
    assert _is_built.wait(60)
    assert decode(Whole, {"name": "a", "part": {"number": 1}}) == whole
    assert from_json(Whole, text) == whole
    first.join()
