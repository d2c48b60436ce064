"""`edl search STUDY.yaml`: search for the best parameters of an elastic training.

A second start goes on where the first one was, whatever has ended it. Ctrl-C leaves the trials that
run to the job server.
"""

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from job_server.api.command_line import OptionParser
from job_server.api.errors import ConfigError, JobServerError
from job_server.api.local_servers import connect, find_servers, token_for
from job_server.api.text import printable
from search.decide import HOPELESS, is_hopeless
from search.study_file import read_study
from search.text import best_text, best_trial, summary, trials_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study to its end; return the exit code: 1 it failed, 2 wrong usage, 130 Ctrl-C."""
    parser = OptionParser(prog="edl search", description=__doc__, allow_abbrev=False)
    parser.add_argument("study", type=Path, metavar="STUDY.yaml")
    parser.add_argument(
        "--dir",
        type=Path,
        help="folder of the study's trials; default: NAME.study beside the file",
    )
    parser.add_argument("--server", metavar="URL", help="else PADDLE_JOBSERVER, else your only one")
    parser.add_argument("--token_file", metavar="FILE", help="the server's token")
    parser.add_argument("--lines", action="store_true", help="lines, in a terminal as well")
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 1
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return _run(args.study, args.dir, args.server, args.token_file, lines=args.lines)
    except ConfigError as error:
        return _fail(str(error), 2)
    except JobServerError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:  # as by `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open: exit flushes it
        return _fail("nobody reads its output; start it again to go on with the study", 1)
    except KeyboardInterrupt:
        return _fail("the trials that run go on; start it again to go on with the study", 130)


def _run(
    path: Path, folder: Path | None, named: str | None, token_file: str | None, *, lines: bool
) -> int:
    spec = read_study(path)
    if find_spec("optuna") is None:
        raise ConfigError("a search needs Optuna, which is not installed: pip install 'optuna>=4'")
    from search.run import Progress, Search  # what they import is the extra
    from search.store import StudyStore

    servers = find_servers(named, os.environ)
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        raise ConfigError(
            f"{len(servers)} job servers of yours run here; name one by --server: {urls}"
        )
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not lines

    shown: list[str] = []  # on the terminal, without the line that was said last

    def show(progress: Progress) -> None:
        if live:
            rows = trials_table(spec, progress.trials, progress.jobs).splitlines()
            shown[:] = [summary(spec, progress.trials), "", *rows]
            _paint(shown)

    def say(line: str) -> None:
        if live:
            _paint([*shown, "", printable(line)])
        else:
            print(printable(line), flush=True)

    home = folder or path.absolute().with_name(f"{spec.name}.study")
    with StudyStore(home, spec) as store, connect(servers[0], token_file, os.environ) as api:

        def read_token() -> None:
            with contextlib.suppress(ConfigError):  # it is about to be written
                api.use_token(token_for(servers[0], token_file, os.environ))

        Search(spec, store, api, read_token=read_token).run(show, say)
        trials = store.trials()
        best = best_trial(spec, trials)
        job_id = store.job_id(0 if best is None else best.number)
    print(trials_table(spec, trials, {}), summary(spec, trials), sep="\n\n")
    print(best_text(spec, trials, job_id))
    if is_hopeless(trials):
        return _fail(
            f"the first {HOPELESS} trials failed, so no more were made: {trials[0].why}; mend the "
            f"script, then delete {home} or give the study another name",
            1,
        )
    return 0 if best is not None else 1


def _paint(lines: Sequence[str]) -> None:
    """Paint a whole screen, without wrapping and scrolling: the newest rows where not all fit."""
    height = shutil.get_terminal_size().lines
    head, rows = lines[:3], lines[3:]
    rows = rows[-max(1, height - 1 - len(head)) :]
    painted = "\n".join(f"{line}\x1b[K" for line in [*head, *rows])
    sys.stdout.write(f"\x1b[H\x1b[?7l{painted}\n\x1b[J\x1b[?7h")
    sys.stdout.flush()


def _fail(text: str, code: int) -> int:
    print(f"edl search: {printable(text, lines=True)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
