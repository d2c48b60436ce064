"""What `edl tasks` prints."""

from job_server.api.task_wire import TaskCount, TaskQueueStatus, TaskView
from job_server.cli.task_queues import queue_text, queues_table

QUEUE = TaskQueueStatus(
    name="train",
    tasks=60,
    lease_s=60.0,
    max_tries=3,
    now=TaskCount(pass_number=1, waiting=12, leased=3, done=44, dropped=1, records_once=440),
    leased=(TaskView(number=7, content="part-7", worker="pod_0_0.12", reads=2, error="silent"),),
    dropped=(TaskView(number=3, content="part-3", reads=3, failures=3, error="no\x1b number"),),
    passes=(TaskCount(pass_number=0, done=59, dropped=1, records_once=580, records_again=10),),
)


def test_a_queue_in_full_names_what_nobody_could_read_and_who_reads():
    text = queue_text(QUEUE)
    assert "silent for 60 s loses its task" in text
    assert "0     0        0       59    1        580        10" in text
    assert "  part-3 (begun 3 times): no\\x1b number" in text
    assert "  part-7 (begun 2 times, by pod_0_0.12): silent" in text
    assert "read again:" not in text, "nothing was"


def test_the_list_has_a_line_a_queue():
    assert queues_table((QUEUE,)).splitlines()[1].split() == [
        "train", "60", "1", "12", "3", "44", "1", "440", "0",
    ]  # fmt: skip
