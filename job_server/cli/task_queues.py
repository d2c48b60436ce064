"""`edl tasks`: how far the task queues are, and which records were lost or read again."""

import argparse
import json

from job_server.api import wire
from job_server.api.api_client import ApiClient
from job_server.api.errors import ConfigError
from job_server.api.task_wire import TaskCount, TaskQueueStatus, TaskView
from job_server.api.text import printable, table

_HEAD = ("PASS", "WAITING", "LEASED", "DONE", "DROPPED", "READ ONCE", "READ AGAIN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", nargs="?", metavar="QUEUE", help="this one in full")
    parser.add_argument("--delete", action="store_true", help="forget it; its readers then fail")


def run(api: ApiClient, args: argparse.Namespace) -> None:
    """Show all queues, or one; or delete one."""
    if args.delete and args.queue is None:
        raise ConfigError("--delete: name the queue")
    if args.queue is None:
        found = api.queues()
        text = queues_table(found) if found else "there is no task queue; `cloud_reader` makes one"
    else:
        queue = api.delete_queue(args.queue) if args.delete else api.queue(args.queue)
        found, text = (queue,), queue_text(queue)
    answer = found if args.queue is None else found[0]
    print(json.dumps(wire.encode(answer), indent=2) if args.json else text)


def queues_table(queues: tuple[TaskQueueStatus, ...]) -> str:
    """Return one line a queue, of its present pass."""
    rows = [(queue.name, str(queue.tasks), *_cells(queue.now)) for queue in queues]
    return table(("QUEUE", "TASKS", *_HEAD), rows)


def queue_text(queue: TaskQueueStatus) -> str:
    """Return all that is known of a queue."""
    parts = [
        f"{queue.name}: {queue.tasks} tasks; a reader that is silent for {queue.lease_s:g} s loses "
        f"its task, one that fails {queue.max_tries} times is dropped for the pass",
        table(_HEAD, [_cells(count) for count in (*queue.passes, queue.now)]),
    ]
    for title, tasks in (
        ("dropped in this pass: nobody can read them", queue.dropped),
        ("being read", queue.leased),
        (
            "begun more than once in this pass: some of their records were read again",
            queue.read_again,
        ),
    ):
        if tasks:
            parts.append("\n".join([f"{title}:", *map(_line, tasks)]))
    return "\n\n".join(parts)


def _cells(count: TaskCount) -> tuple[str, ...]:
    numbers = (
        count.pass_number, count.waiting, count.leased, count.done, count.dropped,
        count.records_once, count.records_again,
    )  # fmt: skip
    return tuple(map(str, numbers))


def _line(task: TaskView) -> str:
    reader = f", by {task.worker}" if task.worker else ""
    why = f": {task.error}" if task.error else ""
    return printable(f"  {task.content} (begun {task.reads} times{reader}){why}")
