"""Commands of users: `edl submit`, `status`, `resize` and the like, over the server's API."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from job_server.api import wire
from job_server.api.api_client import ApiClient
from job_server.api.command_line import OptionParser
from job_server.api.errors import ConfigError, JobServerError, NotFound, Rejected, ServerAway
from job_server.api.local_servers import LocalServer, connect, find_servers
from job_server.api.text import (
    account_parts,
    duration,
    error_lines,
    load_text,
    pause,
    printable,
    saving_text,
    slot_lines,
    steps_of_stage,
    steps_of_total,
    table,
    teacher_facts,
    wanted_pods,
)
from job_server.cli import queue, simulate_cluster, task_queues
from job_server.cli.cluster_load import cluster_load, load_json, load_line, load_screen
from job_server.cli.drill import (
    drill_job,
    drill_node,
    ended_as_by_ctrl_c,
    limit_unless_drained,
    wait_until_left,
)
from job_server.cli.job_flags import add_job_flags, read_job
from job_server.cli.logs import log_lines
from job_server.cluster.change_script import timeline
from job_server.sharing.explain import explain
from job_server.sharing.what_if import hindsight, what_if

POLL_S = 30.0
PATIENCE_S = 60.0  # who follows something follows it on once the server has been started again
_LINES_S, _LIVE_S = 10.0, 2.0  # how often `edl top` looks, unless told otherwise
_LOOK_S = 3.0  # at each of several servers
_SHOWN_JOBS = 5  # of each of them
_WAIT_LOOK_S = 0.2  # `edl capacity --wait`
_ONLY = "may be left out if there is only one"

Handler = Callable[[ApiClient, argparse.Namespace], None]


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code: 1 the server refused or is away, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["simulate"] and any(arg.partition("=")[0] == "--nodes" for arg in argv):
            return simulate_cluster.main(argv[1:])
        args = build_parser().parse_args(argv)
    except ConfigError as error:
        return _fail(str(error), 2)
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 1
    try:
        if args.verb == "simulate":
            _simulate(args)
            return 0
        servers = find_servers(args.server, os.environ)
        if len(servers) > 1:
            return _show_servers(servers, args)
        with connect(servers[0], args.token_file, os.environ) as api:
            handler: Handler = args.handler
            handler(api, args)
    except (ConfigError, wire.WireError) as error:
        return _fail(str(error), 2)
    except ServerAway as error:
        remedy = "" if error.answers else "; is it the right --server? `edl server` starts one"
        return _fail(f"{error}{remedy}", 1)
    except JobServerError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `edl events | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open: exit flushes it
        return 0
    return 0


def _fail(text: str, code: int) -> int:
    print(f"edl: {printable(text, lines=True)}", file=sys.stderr)
    return code


# --- which server -------------------------------------------------------------------------------


def _show_servers(servers: Sequence[LocalServer], args: argparse.Namespace) -> int:
    """Show all servers, which answers `edl status`; any other command has to name one."""
    rows = [(server.url, _jobs_text(server), server.folder) for server in servers]
    shown = table(("SERVER", "JOBS", "FOLDER"), rows)
    name_one = "--server URL, or PADDLE_JOBSERVER=URL for all commands of this shell"
    if args.verb == "status" and args.job is None and not args.follow and not args.json:
        print(f"{shown}\n\none of them: edl status {name_one}")
        return 0
    return _fail(f"{len(servers)} job servers of yours run here; name one: {name_one}\n{shown}", 2)


def _jobs_text(server: LocalServer) -> str:
    try:
        with ApiClient(server.url, server.token(), _LOOK_S) as api:
            found = api.jobs()
    except (ConfigError, JobServerError) as error:
        return str(error)
    # A search leaves very many that have ended, of which the newest count.
    jobs = [job for job in found if not job.state.ended]
    jobs += [job for job in reversed(found) if job.state.ended]
    texts = [f"{job.job_id} {job.state.value}" for job in jobs[:_SHOWN_JOBS]]
    more = [f"{len(jobs) - _SHOWN_JOBS} more"] if len(jobs) > _SHOWN_JOBS else []
    return ", ".join(texts + more) or "-"


# --- the command line ---------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="edl", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, handler: Handler, summary: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(handler=handler)
        sub.add_argument(
            "--server",
            "--job_server",
            metavar="URL",
            help="else PADDLE_JOBSERVER, else your only one on this machine",
        )
        sub.add_argument(
            "--token_file",
            metavar="FILE",
            help="the server's token; else, of a server of yours on this machine, its own, "
            "else EDL_TOKEN_FILE, EDL_TOKEN",
        )
        sub.add_argument("--json", action="store_true", help="print what the server answers")
        return sub

    submit = verb("submit", _submit, "Add a job, from a file, from flags, or from both.")
    submit.add_argument("job_file", nargs="?", metavar="JOB.yaml", help="as --file")
    add_job_flags(submit)
    status = verb("status", _status, "Show all jobs, or one in full.")
    status.add_argument("job", nargs="?", metavar="JOB")
    status.add_argument("--follow", action="store_true", help="show changes until the job ends")
    pods = verb("pods", _pods, "Show where a job's pods are.")
    pods.add_argument("job", nargs="?", metavar="JOB", help=_ONLY)
    resize = verb("resize", _resize, "Change the number of a job's pods.")
    resize.add_argument("job", metavar="JOB")
    resize.add_argument(
        "--dry_run", action="store_true", help="only say what it should bring and cost"
    )
    resize.add_argument(
        "pods", type=_pods_or_auto, metavar="PODS|auto", help="auto: of teachers, by demand again"
    )
    resize.add_argument(
        "--assume_dead", action="store_true", help="treat pods that cannot be reached as stopped"
    )
    pause = verb("pause", _end, "Write the newest state, end the job's pods and free their slots.")
    pause.add_argument("job", metavar="JOB")
    verb("resume", _resume, "Go on after a pause.").add_argument("job", metavar="JOB")
    for name, summary in (
        ("stop", "Write the newest state and end the job."),
        ("delete", "Stop a job, and forget it when it has ended."),
    ):
        end = verb(name, _end, summary)
        end.add_argument("job", metavar="JOB")
        end.add_argument(
            "--discard", action="store_true", help="at once: what is only in memory is lost"
        )
    kill = verb("kill", _kill, "SIGKILL a pod or a trainer of a job, as a test.")
    kill.add_argument("job", metavar="JOB")
    kill.add_argument("target", metavar="POD|RANK", help="a pod's id, or the number of a rank")
    logs = verb("logs", _logs, "Print the logs of a job's pods that are on this machine.")
    logs.add_argument("job", nargs="?", metavar="JOB", help=_ONLY)
    logs.add_argument("pods", nargs="*", metavar="POD", help="only these")
    logs.add_argument("--follow", action="store_true", help="go on until the job ends")
    logs.add_argument("--lines", type=int, default=20, metavar="N", help="the last so many")
    verb("nodes", _nodes, "Show all nodes.")
    capacity = verb("capacity", _capacity, "Say which slots of a node are used, and by whom.")
    capacity.add_argument("node", metavar="NODE")
    capacity.add_argument(
        "--slots",
        type=_slots_or_all,
        metavar="N|all",
        help="that shared jobs have together at most",
    )
    capacity.add_argument(
        "--quarantine",
        type=int,
        metavar="SLOT",
        help="that no pod is to be on: those that are leave, until you take it back",
    )
    capacity.add_argument(
        "--take_back", type=int, metavar="SLOT", help="of those in quarantine, to be used again"
    )
    capacity.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="until they have no more, at most S seconds; then the exit code is 1",
    )
    drain = verb("drain", _drain, "Have all jobs leave a node by planned changes.")
    drain.add_argument("node", metavar="NODE")
    drain.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="until they have left, at most S seconds; then the exit code is 1",
    )
    drill = verb("drill", _drill, "Do on purpose what a preemption would do; say what it cost.")
    drill.add_argument(
        "target",
        metavar="NODE|JOB",
        help="a node: its jobs leave, as after a notice, and may come back; a job: its last pod "
        "is killed, as without one",
    )
    drill.add_argument(
        "--wait", type=float, default=300.0, metavar="S", help="at most S seconds (300)"
    )
    verb("queue", _queue, "Show the jobs that share the cluster, in the order of the queue.")
    why = verb("explain", _explain, "Say why a job waits or has so many pods, and what comes next.")
    why.add_argument("job", nargs="?", metavar="JOB", help=_ONLY)
    top = verb("top", _top, "Show what runs on the cluster, again and again.")
    top.add_argument("--lines", action="store_true", help="a line each time, in a terminal as well")
    top.add_argument(
        "--interval_s", type=float, metavar="S", help="between looks (2; of lines and JSON 10)"
    )
    top.add_argument("--count", type=int, metavar="N", help="end after so many looks")
    top.add_argument(
        "--kubernetes", action="store_true",
        help="TrainingJobs of a cluster instead: `edl top --kubernetes --help`",
    )  # fmt: skip
    task_queues.add_arguments(
        verb("tasks", task_queues.run, "Show how far the task queues of data are, or one in full.")
    )
    verb("page", _page, "Print a link that opens the status page in a browser, once.")
    events = verb("events", _events, "Show what happened to a job.")
    events.add_argument(
        "job", nargs="?", metavar="JOB", help="may be left out if there is only one"
    )
    events.add_argument("--follow", action="store_true", help="go on until the job ends")
    simulate = verbs.add_parser(
        "simulate",
        help="Print what a change script would do; asks no server.",
        description="Print what a change script would do; asks no server. With --nodes: run many "
        "jobs on one cluster under several policies (`edl simulate --nodes 4x8 --help`).",
        allow_abbrev=False,
    )
    add_job_flags(simulate)
    simulate.add_argument("--json", action="store_true", help="print a list of lines")
    simulate.add_argument("--until_s", type=float, metavar="S", help="of the script's clock")
    simulate.add_argument("--count", type=int, default=50, metavar="N", help="changes to show")
    return parser


def _pods_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {text!r}") from None


def _slots_or_all(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or all, got {text!r}") from None


# --- one function per verb ----------------------------------------------------------------------


def _simulate(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise ConfigError(f"--count: expected at least 1, got {args.count}")
    job = read_job(args, default_id="job")
    lines = timeline(job.script, job, until_s=args.until_s, count=args.count)
    print(json.dumps(lines, indent=2) if args.json else "\n".join(lines))


def _submit(api: ApiClient, args: argparse.Namespace) -> None:
    status = api.submit(read_job(args))
    if status.state.ended:  # the same job again is no error to the server
        raise JobServerError(
            f"{status.job_id} has ended ({status.state.value}) and stays so; `edl delete "
            f"{status.job_id}` first, or give another --name"
        )
    if status.state is wire.JobState.STOPPING:
        raise JobServerError(
            f"{status.job_id} is being stopped, and ends; `edl delete {status.job_id}`, and submit "
            "it again once it is gone, or give another --name"
        )
    _show(status, args)
    if status.spec.share and not args.json:
        print(f"`edl explain {status.job_id}` says when it starts, and why")


def _status(api: ApiClient, args: argparse.Namespace) -> None:
    if args.job is None and not args.follow:
        jobs = api.jobs()
        if args.json:
            print(json.dumps(wire.encode(jobs), indent=2))
        else:
            print(_jobs_table(jobs) if jobs else "there is no job; `edl submit` adds one")
            for text in api.health().warnings:
                print(f"warning: {printable(text)}")
        return
    status = api.status(_job_id(api, args))
    if not args.follow:
        print(
            json.dumps(wire.encode(status), indent=2)
            if args.json
            else _job_text(status, api.health().now)
        )
        return
    api.patience_s = PATIENCE_S
    (_paint_changes if _is_painted(args) else _show_changes)(api, status, args)


def _is_painted(args: argparse.Namespace) -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not args.json


def _show_changes(api: ApiClient, status: wire.JobStatus, args: argparse.Namespace) -> None:
    """Print a line for every change that it shows until the job ends."""
    _show(status, args)
    while not status.state.ended:
        before, status = status, api.watch(status.job_id, status.revision, POLL_S)
        if status.revision != before.revision and (args.json or _line(status) != _line(before)):
            _show(status, args)


def _paint_changes(api: ApiClient, status: wire.JobStatus, args: argparse.Namespace) -> None:
    """Paint one line over and over; what is another state, stage or reason begins a new one."""
    try:
        while True:
            # Without wrapping: a line longer than the terminal could not be painted over.
            sys.stdout.write(f"\r\x1b[K\x1b[?7l{_line(status)}\x1b[?7h")
            sys.stdout.flush()
            if status.state.ended:
                return
            before, status = status, api.watch(status.job_id, status.revision, POLL_S)
            if (before.state, before.stage, before.reason) != (
                status.state, status.stage, status.reason
            ):  # fmt: skip
                print()
    finally:
        print(flush=True)


def _pods(api: ApiClient, args: argparse.Namespace) -> None:
    status = api.status(_job_id(api, args))
    if args.json:
        print(json.dumps(wire.encode(status.pods), indent=2))
    else:
        print(_pods_table(status) if status.pods else f"no pods: {printable(status.reason)}")


def _resize(api: ApiClient, args: argparse.Namespace) -> None:
    if args.dry_run:
        _show_what_if(api, args)
        return
    _show(api.resize(args.job, args.pods, assume_dead=args.assume_dead), args)


def _show_what_if(api: ApiClient, args: argparse.Namespace) -> None:
    status = api.status(args.job)
    if args.pods is None or status.teachers is not None:
        raise ConfigError("--dry_run: only what a number of a training's pods brings is predicted")
    spec = status.spec
    wire.check_range("PODS", args.pods, spec.min_pods, spec.max_pods)
    text = what_if(status, args.pods, api.health().now)
    print(json.dumps({"job_id": args.job, "what_if": text}) if args.json else text)


def _resume(api: ApiClient, args: argparse.Namespace) -> None:
    _show(api.resume(args.job), args)


def _end(api: ApiClient, args: argparse.Namespace) -> None:
    """Pause, stop or delete a job; show the progress until it is done.

    Raises:
        Rejected: the pause was abandoned; the text says why.
    """
    seen = 0  # number of the newest event before
    if args.verb == "pause":
        seen = max((event.number for event in _events_after(api, args.job, 0)), default=0)
        status = api.pause(args.job)
    else:
        end = {"stop": api.stop, "delete": api.delete}[args.verb]
        status = end(args.job, discard=args.discard)
    api.patience_s = PATIENCE_S
    try:
        _follow_end(api, args, status, seen)
    except KeyboardInterrupt:
        more = f"; `edl stop {args.job} --discard` ends it at once" if args.verb != "pause" else ""
        _fail(f"{args.job} goes on {status.state.value.lower()}{more}", 130)
        raise


def _follow_end(
    api: ApiClient, args: argparse.Namespace, status: wire.JobStatus, seen: int
) -> None:
    halting = (wire.JobState.PAUSING, wire.JobState.STOPPING)
    shown = ""
    while status.state in halting:
        text = status.reason if status.saving is None else saving_text(status.saving)
        if text != shown and not args.json:
            print(f"{status.job_id}: {printable(text)}", flush=True)
        shown = text
        try:
            status = api.watch(status.job_id, status.revision, POLL_S)
        except NotFound:
            break  # it was deleted, and has ended
    if args.verb == "pause" and status.state is not wire.JobState.PAUSED:
        events = _events_after(api, status.job_id, seen)
        whys = [event.text for event in events if "not paused: " in event.text]
        raise Rejected(whys[-1] if whys else f"not paused: {status.state.value}: {status.reason}")
    if args.verb != "delete":
        _show(status, args)
    elif args.json:
        print(json.dumps({"deleted": status.job_id}))
    else:
        if status.state not in halting:
            _show(status, args)
        print(f"{status.job_id}: deleted")


def _kill(api: ApiClient, args: argparse.Namespace) -> None:
    if args.target.isdecimal():
        status = api.kill(args.job, rank=int(args.target))
    else:
        status = api.kill(args.job, pod_id=args.target)
    _show(status, args)


def _logs(api: ApiClient, args: argparse.Namespace) -> None:
    if args.json:
        raise ConfigError("--json: a log is text as the script wrote it; leave it out")
    if args.lines < 0:
        raise ConfigError(f"--lines: expected 0 or more, got {args.lines}")
    job_id = _job_id(api, args)
    if args.follow:
        api.status(job_id)  # a wrong --server is told at once
        api.patience_s = PATIENCE_S
    for line in log_lines(api, job_id, args.pods, follow=args.follow, lines=args.lines):
        print(line, flush=True)


def _nodes(api: ApiClient, args: argparse.Namespace) -> None:
    nodes = api.nodes()
    if args.json:
        print(json.dumps(wire.encode(nodes), indent=2))
        return
    if not nodes:
        print("no job client has registered")
        return
    now = api.health().now
    rows = [
        (
            known.node.node_id,
            known.node.addr,
            f"{sum(slot.usable for slot in known.node.slots)} of {len(known.node.slots)} "
            f"{known.node.slots[0].kind.value}"
            + ("" if known.limit is None else f", {known.limit} to share"),
            known.node.job_id or ", ".join(known.node.folders) or "-",
            load_text(known.report) or "-",
            f"{duration(now - known.last_seen_at)} ago" + ("" if known.alive else ", silent"),
        )
        for known in nodes
    ]
    print(table(("NODE", "ADDRESS", "USABLE SLOTS", "SERVES", "IN USE", "LAST SEEN"), rows))
    for known in nodes:
        for line in slot_lines(known, now):
            print(f"{known.node.node_id}: {printable(line)}")


def _capacity(api: ApiClient, args: argparse.Namespace) -> None:
    wire.check_range("--wait", args.wait, 0, 86400)
    asked = [args.slots, args.quarantine, args.take_back]
    if sum(value is not None for value in asked) != 1:
        raise ConfigError("give one of --slots N|all, --quarantine SLOT and --take_back SLOT")
    if args.slots is None:
        _order_slot(api, args)
        return
    limit = None if args.slots == "all" else args.slots
    if limit is not None:
        limit_unless_drained(api, args.node, "end that before you limit it")
    known = api.limit_node(args.node, limit)
    if args.wait and limit is not None:
        _wait_until_free(api, args.node, limit, args.wait)
    if args.json:
        print(json.dumps(wire.encode(known), indent=2))
    else:
        count = len(known.node.slots)
        part = f"all {count}" if known.limit is None else f"{min(known.limit, count)} of {count}"
        print(f"{known.node.node_id}: shared jobs may have {part} slots")


def _order_slot(api: ApiClient, args: argparse.Namespace) -> None:
    back = args.take_back is not None
    slot = args.take_back if back else args.quarantine
    known = api.order_slot(args.node, wire.SlotOrder(slot=slot, take_back=back))
    if args.json:
        print(json.dumps(wire.encode(known), indent=2))
        return
    what = "is used again" if back else "is in quarantine: its pods leave, and none comes"
    print(f"{known.node.node_id}: slot {slot} {what}")


def _drain(api: ApiClient, args: argparse.Namespace) -> None:
    wire.check_range("--wait", args.wait, 0, 86400)
    known = api.limit_node(args.node, 0, drain=True)
    api.patience_s = PATIENCE_S
    if args.wait:
        give_back = f"`edl capacity {args.node} --slots all` lets jobs use the node again"
        wait_until_left(api, args.node, args.wait, give_back)
    if args.json:
        print(json.dumps(wire.encode(known), indent=2))
        return
    what = "no job has a pod there any more" if args.wait else "its jobs leave, and none comes"
    print(f"{args.node}: {what}; `edl capacity {args.node} --slots all` ends that")


def _drill(api: ApiClient, args: argparse.Namespace) -> None:
    wire.check_range("--wait", args.wait, 1, 86400)
    is_node = any(known.node.node_id == args.target for known in api.nodes())
    api.patience_s = PATIENCE_S
    drill = drill_node if is_node else drill_job
    with ended_as_by_ctrl_c():
        lines = drill(api, args.target, args.wait)
    print(json.dumps(lines, indent=2) if args.json else "\n".join(lines))


def _wait_until_free(api: ApiClient, node_id: str, slots: int, wait_s: float) -> None:
    """Wait until shared jobs have no more than so many slots of a node.

    Raises:
        JobServerError: they still have more.
    """
    deadline = time.monotonic() + wait_s
    while True:
        nodes = (node for node in api.sharing().nodes if node.node_id == node_id)
        used = next((node.used_shared for node in nodes), 0)
        if used <= slots:
            return
        if time.monotonic() >= deadline:
            raise JobServerError(
                f"{node_id}: shared jobs still have {used} slots after {wait_s:g} s; those at "
                "their least move when there is room elsewhere"
            )
        time.sleep(_WAIT_LOOK_S)


def _queue(api: ApiClient, args: argparse.Namespace) -> None:
    sharing = api.sharing()
    if args.json:
        print(json.dumps(queue.queue_json(sharing), indent=2))
    else:
        print(queue.queue_text(sharing))


def _explain(api: ApiClient, args: argparse.Namespace) -> None:
    job_id, sharing = _job_id(api, args), api.sharing()
    if any(job.job_id == job_id for job in sharing.jobs):
        found = explain(sharing, job_id, {job.job_id: job.state for job in api.jobs()})
    else:
        found = queue.explain_other(api.status(job_id))
    if args.json:
        print(json.dumps(queue.explanation_json(job_id, found), indent=2))
    else:
        print(queue.explanation_text(found))


def _top(api: ApiClient, args: argparse.Namespace) -> None:
    """Show the cluster until Ctrl-C, or as often as is asked for."""
    if args.kubernetes:
        raise ConfigError("--kubernetes: asks no job server; call `edl top --kubernetes`")
    if args.interval_s is not None:
        wire.check_range("--interval_s", args.interval_s, 0.1, 86400)
    if args.count is not None:
        wire.check_range("--count", args.count, 1, 1_000_000)
    is_live = _is_painted(args) and not args.lines
    every_s = args.interval_s or (_LIVE_S if is_live else _LINES_S)
    if not is_live and not args.json:
        print(load_line(None))
    shown = 0
    while True:
        load = cluster_load(api.jobs(), api.nodes())
        if args.json:
            print(json.dumps(load_json(load, time.time())), flush=True)
        elif is_live:
            _paint(load_screen(load, api.sharing(), api.url, time.time()))
        else:
            print(load_line(load), flush=True)
        shown += 1
        if shown == args.count:
            return
        api.patience_s = PATIENCE_S
        time.sleep(every_s)


def _paint(lines: Sequence[str]) -> None:
    """Paint a whole screen, without wrapping and scrolling."""
    height = shutil.get_terminal_size().lines
    shown = [f"{line}\x1b[K" for line in lines[: height - 1]]
    sys.stdout.write("\x1b[H\x1b[?7l" + "\n".join(shown) + "\n\x1b[J\x1b[?7h")
    sys.stdout.flush()


def _page(api: ApiClient, args: argparse.Namespace) -> None:
    link = api.page_link()
    print(json.dumps({"url": link}) if args.json else link)


def _events(api: ApiClient, args: argparse.Namespace) -> None:
    job_id = _job_id(api, args)
    after = _print_events(api, job_id, 0, args)
    api.patience_s = PATIENCE_S
    while args.follow:
        # The order matters: a job that has not ended yet has at least one more event.
        ended = api.status(job_id).state.ended
        if not ended:
            api.events(job_id, after=after, limit=1, timeout_s=POLL_S)
        after = _print_events(api, job_id, after, args)
        if ended:
            return


def _print_events(api: ApiClient, job_id: str, after: int, args: argparse.Namespace) -> int:
    """Print all events above number `after`; return the number of the last."""
    for event in _events_after(api, job_id, after):
        after = event.number
        if args.json:
            print(json.dumps(wire.encode(event)), flush=True)
            continue
        at = datetime.fromtimestamp(event.at, UTC).astimezone()
        stage = f"stage {event.stage}" if event.stage else ""  # 0: before the first
        print(f"{at:%Y-%m-%d %H:%M:%S}  {stage:<10} {printable(event.text)}", flush=True)
    return after


def _events_after(api: ApiClient, job_id: str, after: int) -> Iterator[wire.JobEvent]:
    while events := api.events(job_id, after=after, limit=1000):
        after = events[-1].number
        yield from events


def _job_id(api: ApiClient, args: argparse.Namespace) -> str:
    """Return the job named, else the only one."""
    if args.job is not None:
        return str(args.job)
    ids = [status.job_id for status in api.jobs()]
    if len(ids) != 1:
        raise ConfigError(f"JOB: name one of: {', '.join(ids)}" if ids else "there is no job")
    return ids[0]


# --- what they print ----------------------------------------------------------------------------


def _show(status: wire.JobStatus, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(wire.encode(status)), flush=True)
        return
    print(_line(status), flush=True)


def _line(status: wire.JobStatus) -> str:
    training = f", stage {status.stage}, {len(status.pods)} pods, step {steps_of_total(status)}"
    progress = "" if status.teachers is not None else training
    return f"{status.job_id}: {status.state.value}{progress}: {printable(status.reason)}"


def _jobs_table(jobs: tuple[wire.JobStatus, ...]) -> str:
    rows = [
        (
            job.job_id,
            job.state.value,
            f"{len(job.pods)} of {wanted_pods(job)}",
            "-" if job.teachers is not None else job.stage,
            "-" if job.teachers is not None else steps_of_total(job),
            job.reason,
        )
        for job in jobs
    ]
    return table(("JOB", "STATE", "PODS", "STAGE", "STEP", "REASON"), rows)


def _pods_table(status: wire.JobStatus) -> str:
    if status.teachers is not None:
        return _teachers_table(status)
    rows = [
        (
            pod.pod_rank,
            pod.pod_id,
            pod.node_id,
            " ".join(map(str, pod.slots)),
            " ".join(map(str, pod.ranks)),
            pod.phase,
            " ".join(f"{percent:.0f}%" for percent in pod.cpu_percent) or "-",
            " ".join(f"{mb / 1000:.1f}" for mb in pod.memory_mb) or "-",
            pod.log_path or "-",
        )
        for pod in status.pods
    ]
    names = ("RANK", "POD", "NODE", "SLOTS", "TRAINERS", "PHASE", "CPU", "GB", "LOG")
    return table(names, rows)


def _teachers_table(status: wire.JobStatus) -> str:
    rows = [
        (
            pod.pod_id,
            pod.node_id,
            " ".join(map(str, pod.slots)),
            " ".join(f"{pod.addr}:{port}" for port in pod.ports),
            pod.phase,
            pod.log_path or "-",
        )
        for pod in status.pods
    ]
    return table(("POD", "NODE", "SLOTS", "LISTENS ON", "PHASE", "LOG"), rows)


def _job_text(status: wire.JobStatus, now: float) -> str:
    state = status.state.value
    facts = [
        ("job", status.job_id),
        ("state", f"{state}: {status.reason.removeprefix(f'{state}: ')}"),
        *(("warning", text) for text in status.warnings),
        *_error_facts(status),
        ("pods", f"{len(status.pods)} of {wanted_pods(status)} wanted "
                 f"({status.spec.min_pods} to {status.spec.max_pods})"),
        *(_training_facts(status) if status.teachers is None else teacher_facts(status.teachers)),
        ("time", ", ".join(f"{k} {duration(v)}" for k, v in account_parts(status).items()
                           if v >= 0.05) or "-"),
    ]  # fmt: skip
    if status.teachers is None:
        facts.append(("queued", ", ".join(status.queued_changes) or "-"))
        if outcome := hindsight(status, now):
            facts.append(("change", outcome))
    else:
        facts.append(("counted", f"{status.failures} failures, {status.preemptions} preemptions"))
    stages = [
        (
            record.stage,
            record.way.value,
            record.pods,
            steps_of_stage(record),
            pause(record.pause_s),
            record.redone_steps,
            record.outcome,
            record.reason,
        )
        for record in status.stages
    ]
    header = ("STAGE", "WAY", "PODS", "STEPS", "PAUSE", "REDONE", "OUTCOME", "WHY")
    blocks = ["\n".join(f"{name:<8} {printable(str(value))}" for name, value in facts)]
    if status.pods:
        blocks.append(_pods_table(status))
    if stages:
        blocks.append(table(header, stages))
    return "\n\n".join(blocks)


def _error_facts(status: wire.JobStatus) -> list[tuple[str, str]]:
    if status.error is None:
        return []
    what, where = error_lines(status.error)
    return [("error", what), ("", where)]


def _training_facts(status: wire.JobStatus) -> list[tuple[str, str]]:
    return [
        ("step", f"{steps_of_total(status)}, epoch {status.epoch}"),
        *([("promise", status.promise)] if status.promise else []),
        ("metrics", ", ".join(f"{k} {v:.4g}" for k, v in status.metrics.items()) or "-"),
        ("counted", f"{status.failures} failures, {status.preemptions} preemptions, "
                    f"{status.resizes} resizes, {status.redone_steps} steps redone"),
        *([] if status.saving is None else [("saving", saving_text(status.saving))]),
        *([] if status.saved is None else [("saved", _saved_text(status.saved))]),
    ]  # fmt: skip


def _saved_text(saved: wire.Saved) -> str:
    where = f", the run folder of node {saved.node_id}" if saved.spare else ""
    return f"step {saved.step} of stage {saved.stage}, in {saved.path}{where}"
