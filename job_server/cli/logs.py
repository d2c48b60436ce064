"""Print the log files of a job's pods, as far as they are on this machine (`edl logs`)."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from job_server.api.api_client import ApiClient
from job_server.api.codec import decode
from job_server.api.errors import ConfigError
from job_server.api.wire import JobPod, JobStatus, NodePod, is_same_job

FOLLOW_S = 0.5
_BLOCK_BYTES = 64 * 1024


@dataclass(slots=True)
class _Tail:
    """One log file and how far it has been printed."""

    pod_id: str
    path: Path
    offset: int
    rest: bytes = b""  # of a line that is not complete yet

    def read_lines(self, *, last: bool) -> list[str]:
        """Return the lines that have become complete; with `last`, what is left over, too.

        A file that has shrunk was replaced, and is read from its beginning.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                data = file.read()
        except OSError:  # removed or replaced just now: the next look finds out
            return []
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            lines.append(self.rest)
        return [line.decode("utf-8", "replace") for line in lines]


def log_lines(
    api: ApiClient, job_id: str, pod_ids: Sequence[str], *, follow: bool, lines: int
) -> Iterator[str]:
    """Yield the last `lines` lines of each pod's log; with `follow`, go on until the job ends.

    A pod's lines begin with its id where there are several. `pod_ids`: only these; empty: all.

    Raises:
        ConfigError: the job has no pod of that name.
        JobServerError: as ApiClient.
    """
    status = api.status(job_id)
    unknown = set(pod_ids) - {pod.pod_id for pod in status.pods}
    if unknown:
        known = ", ".join(pod.pod_id for pod in status.pods) or "none"
        raise ConfigError(f"POD: {job_id} has no pod {', '.join(sorted(unknown))}; it has: {known}")
    tails: dict[str, _Tail] = {}
    missing: set[str] = set()  # ids of pods whose log is not here
    if not status.pods:
        place = "pods" if status.spec.folder is None else f"pods/{job_id}"
        yield (
            f"{job_id} is {status.state.value} and has no pods now; what earlier ones wrote is on "
            f"their nodes: {place}/*/log in the --log_dir of the job client"
        )
    while True:
        for pod in status.pods:
            if pod.pod_id in tails or (pod_ids and pod.pod_id not in pod_ids):
                continue
            try:
                tail, why = _open(status, pod, lines), _where(pod)
            except OSError as error:  # in a folder that this user may not enter, say
                tail, why = None, f"{pod.log_path} cannot be read: {error.strerror}"
            if tail is not None:
                tails[pod.pod_id] = tail
            elif pod.pod_id not in missing:
                missing.add(pod.pod_id)
                yield f"[{pod.pod_id}] {why}"
        last = not follow or status.state.ended
        for tail in tails.values():
            prefix = f"[{tail.pod_id}] " if len(tails) > 1 else ""
            yield from (prefix + line for line in tail.read_lines(last=last))
        if last:
            return
        time.sleep(FOLLOW_S)  # there is no notification when a file grows
        status = api.status(job_id)


def _open(job: JobStatus, pod: JobPod, lines: int) -> _Tail | None:
    """Return the log at its last `lines` lines; None: it is not on this machine.

    Raises:
        OSError: it may not be read.
    """
    path = Path(pod.log_path)
    if not pod.log_path or not path.is_file() or not _is_of(job, pod, path.parent):
        return None
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        begin, tail = end, list[bytes]()
        while begin > 0 and len(tail) <= lines:
            begin = max(2 * begin - end - _BLOCK_BYTES, 0)  # twice as much: lines may be long
            file.seek(begin)
            # What a progress bar has written is one line for each carriage return.
            tail = file.read(end - begin).splitlines(keepends=True)
    wanted = tail[-lines:] if lines else []
    return _Tail(pod_id=pod.pod_id, path=path, offset=end - sum(map(len, wanted)))


def _is_of(job: JobStatus, pod: JobPod, folder: Path) -> bool:
    """Return whether a folder here is that of the pod.

    Nodes have the same paths, and an earlier pod of that name may have left its log here.
    """
    try:
        known = decode(NodePod, json.loads((folder / "pod.json").read_text()))
    except (OSError, ValueError):  # removed just now, or of a version that wrote other fields
        return False
    same_ids = (known.job_id, known.pod_id) == (job.job_id, pod.pod_id)
    return same_ids and is_same_job(known.submitted_at, job.submitted_at)


def _where(pod: JobPod) -> str:
    if not pod.log_path:
        return f"no log yet; its node {pod.node_id} has reported none"
    return f"not on this machine: {pod.log_path} on node {pod.node_id} ({pod.addr})"
