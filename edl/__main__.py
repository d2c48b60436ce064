"""Run `edl VERB ...`: import the program of the verb, and pass it the other arguments."""

import difflib
import importlib
import importlib.util
import io
import os
import sys

_COMMANDS = "job_server.cli.commands"
_KUBERNETES = "k8s_controller.collector"  # of `edl top --kubernetes`

# verb: (module, what it does). The module of the commands gets the verb as well.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("pod_runtime.run", "train elastically on this machine: server, client and job in one"),
    "server": ("job_server.__main__", "run a job server"),
    "client": ("job_client.__main__", "run the job client of this node"),
    "launch": ("pod_runtime.launch", "run a pod's trainers (what a training script's pod calls)"),
    "submit": (_COMMANDS, "add a job"),
    "status": (_COMMANDS, "show all jobs, or one in full"),
    "pods": (_COMMANDS, "show where a job's pods are"),
    "resize": (_COMMANDS, "change the number of a job's pods"),
    "pause": (_COMMANDS, "write the newest state, end a job's pods and free their slots"),
    "resume": (_COMMANDS, "go on after a pause"),
    "stop": (_COMMANDS, "write the newest state and end a job"),
    "delete": (_COMMANDS, "stop a job and forget it"),
    "kill": (_COMMANDS, "SIGKILL a pod or a trainer, as a test"),
    "logs": (_COMMANDS, "print the logs of pods on this machine"),
    "nodes": (_COMMANDS, "show all nodes"),
    "capacity": (_COMMANDS, "say which slots of a node are used, and by whom"),
    "drain": (_COMMANDS, "have all jobs leave a node by planned changes"),
    "drill": (_COMMANDS, "do on purpose what a preemption would do, and say what it cost"),
    "queue": (_COMMANDS, "show the jobs that share the cluster"),
    "explain": (_COMMANDS, "say why a job waits or has so many pods"),
    "top": (_COMMANDS, "show what runs on the cluster, again and again"),
    "search": ("search.__main__", "search for the best parameters of a training"),
    "tasks": (_COMMANDS, "show how far the task queues of data are"),
    "page": (_COMMANDS, "print a link that opens the status page in a browser"),
    "events": (_COMMANDS, "show what happened to a job"),
    "simulate": (_COMMANDS, "print what a change script, or a policy for many jobs, would do"),
    "check": ("pod_runtime.local.check", "rehearse a training script alone, with its batches cut"),
    "verify": ("pod_runtime.verify", "prove from a run's ledger what was trained"),
    "serve": ("distill_reader.serve", "serve models to students, and to clients of Triton"),
    "discovery": ("distill_reader.discovery", "tell students which teachers to use"),
    "register": ("distill_reader.register", "keep a teacher registered with discovery"),
    "convert": ("distill_reader.convert", "make a servable folder from an inference model"),
    "doctor": ("job_client.doctor", "check whether this machine is fit for training"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `edl` with these arguments; return the exit code."""
    args = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    _show_what_the_locale_lacks()
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    verb, rest = args[0], args[1:]
    if verb == "--version":
        from job_server.api.command_line import version  # as any verb: imported when it is called

        print(f"edl {version()}")
        return 0
    if verb not in VERBS or not _is_there(verb):
        near = difflib.get_close_matches(verb, filter(_is_there, VERBS), n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        print(f"edl: there is no verb {verb!r}; {meant}`edl --help` lists them", file=sys.stderr)
        return 2
    module = VERBS[verb][0]
    if verb == "server" and argv is None:  # gevent has to come before what is imported by now
        os.execv(sys.executable, [sys.executable, "-m", "job_server", *rest])
    if verb == "top" and "--kubernetes" in rest:
        if importlib.util.find_spec("kubernetes") is None:
            print(
                "edl top --kubernetes: the client of Kubernetes is not here; "
                "pip install 'edl[kubernetes]'",
                file=sys.stderr,
            )
            return 2
        module, rest = _KUBERNETES, [each for each in rest if each != "--kubernetes"]
    try:
        program = importlib.import_module(module)
        if verb == "check":
            importlib.import_module("pod_runtime.trainer.loop.loop")  # else it does so later
    except ModuleNotFoundError as error:
        if not error.name or _package(error.name) in {_package(name) for name, _ in VERBS.values()}:
            raise
        distills = _package(module) == "distill_reader"
        extra = "'edl[distill]'" if distills else "'edl[torch]', or 'edl[paddle]'"
        print(f"edl {verb}: {error.name} is not here; pip install {extra}", file=sys.stderr)
        return 2
    code = program.main([verb, *rest] if module == _COMMANDS else rest)
    return int(code)


def _open_closed_streams() -> None:
    """Lead nowhere what the caller has closed (`>&-`): no database or socket may take its place."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            lowest = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest, True)
            setattr(sys, name, open(lowest, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


def _show_what_the_locale_lacks() -> None:
    """Show a sign that it has not, as in what a script says, as an escape: it ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in (
            "utf-8",
            "utf8",
        ):
            stream.reconfigure(errors="backslashreplace")


def _help() -> str:
    lines = ["usage: edl VERB ...    (edl VERB --help says more)", ""]
    lines += [f"  {verb:<9} {what}" for verb, (_, what) in VERBS.items() if _is_there(verb)]
    return "\n".join([*lines, "", "  --version"])


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_there(verb: str) -> bool:
    return importlib.util.find_spec(VERBS[verb][0]) is not None


if __name__ == "__main__":
    sys.exit(main())
