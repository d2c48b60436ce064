"""Check whether this machine is fit for training, and print what to do if not.

    edl doctor [--json] [--log_dir DIR] [--port_range LOW-HIGH]

Exit code 1 when something fails; warnings alone are 0.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from job_client import ports
from job_client.devices.gpus import GpuSlots, open_nvml
from job_client.errors import SetupError
from job_server.api.command_line import OptionParser
from pod_runtime.cgroups import memory_limit, usable_cores

GIB = 1 << 30
FRAMEWORK_TIMEOUT_S = 120  # a GPU build on a cold disk takes its time
INSTALL_PAGE = "https://www.paddlepaddle.org.cn/en/install/quick"
TORCH_INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
NEWEST_ON_PYPI = "2.6.2"  # of paddlepaddle-gpu
# Compute capabilities from which on that build has no kernels of its own.
_TOO_NEW_FOR_PYPI = (9, 0)

# Run in a process of its own: importing a framework may crash, hang, or take GPU memory.
_ASK = """
import json
out = {{}}
try:
    {code}
except ImportError as error:
    out["missing"] = str(error)
except Exception as error:
    out["error"] = str(error)[-2000:]
print("\\n" + json.dumps(out))
"""
_ASK_PADDLE = """
    import paddle
    out["version"] = paddle.__version__
    out["cuda"] = bool(paddle.is_compiled_with_cuda())
    if out["cuda"]:
        out["cuda_version"] = str(paddle.version.cuda())
        out["gpus"] = paddle.device.cuda.device_count()
    if not out["cuda"] or out["gpus"]:
        paddle.device.set_device("gpu:0" if out["cuda"] else "cpu")
        x = paddle.ones([64, 64])
        out["product"] = float(paddle.matmul(x, x).sum())
"""
_ASK_TORCH = """
    import torch
    out["version"] = str(torch.__version__)
    out["cuda"] = torch.version.cuda is not None
    if out["cuda"]:
        out["cuda_version"] = torch.version.cuda
        out["gpus"] = torch.cuda.device_count()
    if not out["cuda"] or out["gpus"]:
        x = torch.ones(64, 64, device="cuda:0" if out["cuda"] else "cpu")
        out["product"] = float((x @ x).sum())
"""


class Severity(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Severity
    found: str
    remedy: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding(what=what, verdict=Severity.OK, found=found)


def warn(what: str, found: str, remedy: str) -> Finding:
    return Finding(what=what, verdict=Severity.WARN, found=found, remedy=remedy)


def fail(what: str, found: str, remedy: str) -> Finding:
    return Finding(what=what, verdict=Severity.FAIL, found=found, remedy=remedy)


# --- judgements: pure -------------------------------------------------------------------------


def judge_python(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11, 0):
        return fail("Python", text, "install Python 3.11 or newer")
    return ok("Python", text)


def judge_frameworks(
    answers: Mapping[str, Mapping[str, Any]], capabilities: Sequence[tuple[int, int]]
) -> list[Finding]:
    """Judge the frameworks' own checks: one of the two is enough.

    Args:
        answers: by "Paddle" and "PyTorch", what `ask_framework` returned.
        capabilities: compute capabilities of this machine's GPUs; (): it has none.
    """
    there = {name: answer for name, answer in answers.items() if "missing" not in answer}
    if there:
        return [_judge_framework(name, there[name], capabilities) for name in there]
    remedy = "pip install 'edl[paddle]' or 'edl[torch]'"
    if capabilities:
        remedy = f"install the build for your CUDA: {INSTALL_PAGE} or {TORCH_INSTALL_PAGE}"
    found = "neither Paddle nor PyTorch is installed"
    return [fail("framework", found, f"{remedy}; other frameworks do without the elastic loop")]


def _judge_framework(
    name: str, answer: Mapping[str, Any], capabilities: Sequence[tuple[int, int]]
) -> Finding:
    page = INSTALL_PAGE if name == "Paddle" else TORCH_INSTALL_PAGE
    install = f"install the build for your CUDA from {page}"
    too_new = [capability for capability in capabilities if capability >= _TOO_NEW_FOR_PYPI]
    if name == "Paddle" and too_new:
        shown = ".".join(map(str, max(too_new)))
        install += (
            f" (paddlepaddle-gpu {NEWEST_ON_PYPI}, the newest on PyPI, may not run on this "
            f"card's compute capability {shown})"
        )
    version = str(answer.get("version", "?"))
    if "error" in answer:
        last = (str(answer["error"]).strip().splitlines() or ["?"])[-1]
        return fail(name, f"{version} does not compute: {last[:200]}", install)
    if answer.get("product") != 64.0**3 and not (answer.get("cuda") and not answer.get("gpus")):
        return fail(name, f"{version} computes a wrong product", install)
    if not capabilities:
        return ok(name, f"{version}, on the CPU")
    if not answer.get("cuda"):
        return warn(name, f"{version} for CPU only, though there are GPUs", install)
    if not answer.get("gpus"):
        remedy = f"the driver may be too old for CUDA {answer.get('cuda_version', '?')}; {install}"
        return fail(name, f"{version} for CUDA sees no GPU", remedy)
    return ok(
        name,
        f"{version}, CUDA {answer.get('cuda_version', '?')}, computes on {answer['gpus']} GPUs",
    )


def judge_shared_memory(total: int | None, free: int) -> Finding:
    """`total` and `free` of /dev/shm in bytes; None: there is no such thing."""
    what, remedy = "/dev/shm", "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8g"
    if total is None:
        return fail(what, "missing", "mount a tmpfs at /dev/shm: DataLoader workers need it")
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"
    if free < GIB:
        return warn(what, found, f"DataLoader workers need 1 GiB or more; {remedy}")
    return ok(what, found)


def judge_disk(folder: Path, free: int, total: int) -> Finding:
    what, found = f"disk of {folder}", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB // 2:
        return fail(what, found, "make room: checkpoints will not fit")
    if free < 10 * GIB:
        return warn(what, found, "checkpoints of large models may not fit")
    return ok(what, found)


def judge_ports(
    wanted: tuple[int, int], ephemeral: tuple[int, int], taken: Sequence[int]
) -> Finding:
    low, high = wanted
    what = "trainers' ports"
    found = f"{low}-{high}"
    if low <= ephemeral[1] and ephemeral[0] <= high:
        return warn(
            what,
            f"{found} meets the kernel's own {ephemeral[0]}-{ephemeral[1]}",
            "an outgoing connection may sit on one: give --port_range outside of those",
        )
    if taken:
        shown = ", ".join(map(str, taken[:5])) + (" ..." if len(taken) > 5 else "")
        if len(taken) > (high - low + 1) // 2:
            return fail(what, f"{found}: {len(taken)} taken ({shown})", "give another --port_range")
        return warn(
            what,
            f"{found}: {len(taken)} taken ({shown})",
            "others are used, or give another range",
        )
    return ok(what, f"{found} free, outside of the kernel's {ephemeral[0]}-{ephemeral[1]}")


def judge_file_limit(soft: int, hard: int) -> Finding:
    what, found = "open files", f"{soft} (hard limit {hard})"
    if soft < 1024:
        return fail(what, found, "ulimit -n 65536 before starting")
    if soft < 4096:
        return warn(what, found, "ulimit -n 65536: DataLoader workers and many nodes need more")
    return ok(what, found)


def judge_memory(total: int, available: int, cores: int) -> Finding:
    what = "memory"
    found = f"{total / GIB:.1f} GiB, {available / GIB:.1f} available, {cores} cores"
    if available < GIB:
        return fail(what, found, "a trainer with a framework takes 0.5 GiB and more: free some")
    if available < cores * GIB // 2:
        return warn(what, found, "less than 0.5 GiB per CPU slot: give fewer by --cpu_slots")
    return ok(what, found)


# --- looks at the machine ---------------------------------------------------------------------


def look_at_gpus(gpus: GpuSlots | None) -> list[Finding]:
    if gpus is None:
        return [ok("GPUs", "none that NVML shows: CPU slots")]
    findings = [ok("driver", gpus.driver_version() or "unknown version")]
    if not gpus.indices:
        findings.append(warn("GPUs", "CUDA_VISIBLE_DEVICES leaves none", "unset it"))
    for slot in gpus.slots(ours=()):
        found = f"{slot.name}, {slot.memory_bytes / GIB:.0f} GiB"
        if slot.usable:
            findings.append(ok(f"GPU {slot.index}", found))
        else:
            remedy = "the job client leaves it out until that has changed"
            findings.append(warn(f"GPU {slot.index}", f"{found}: {slot.reason}", remedy))
    return findings


def ask_frameworks() -> dict[str, dict[str, Any]]:
    """Have each framework compute something, by name."""
    return {"Paddle": _ask(_ASK_PADDLE), "PyTorch": _ask(_ASK_TORCH)}


def _ask(code: str) -> dict[str, Any]:
    """Run this in a separate process, and return what it says."""
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK.format(code=code.strip())],
            capture_output=True,
            text=True,
            timeout=FRAMEWORK_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {FRAMEWORK_TIMEOUT_S} s"}
    try:
        answer = json.loads(process.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        tail = process.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"error": f"it ended with code {process.returncode}: {tail[0]}"}
    return answer if isinstance(answer, dict) else {"error": f"it printed {answer!r}"}


def look_at_frameworks(gpus: GpuSlots | None) -> list[Finding]:
    looks = [] if gpus is None else [gpus.look(index) for index in gpus.indices]
    capabilities = [look.capability or (0, 0) for look in looks]
    return judge_frameworks(ask_frameworks(), capabilities)


def look_at_shared_memory() -> list[Finding]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return [judge_shared_memory(None, 0)]
    return [judge_shared_memory(usage.total, usage.free)]


def look_at_disk(folder: Path) -> list[Finding]:
    folder = folder.absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        usage = shutil.disk_usage(folder)
    except OSError as error:  # in a folder that this user may not enter, say
        return [fail(f"disk of {folder}", str(error.strerror), "give another --log_dir")]
    if not os.access(folder, os.W_OK):
        return [fail(f"disk of {folder}", "may not be written", "give another --log_dir")]
    return [judge_disk(folder, usage.free, usage.total)]


def look_at_ports(wanted: tuple[int, int]) -> list[Finding]:
    taken = [port for port in range(wanted[0], wanted[1] + 1) if not _is_free(port)]
    return [judge_ports(wanted, ports.ephemeral_range(), taken)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connection is in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def look_at_memory(proc: Path = Path("/proc")) -> list[Finding]:
    """Look at what a container of this size has, where it has less than the machine."""
    values = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    total, available = (
        values.get("MemTotal", 0),
        values.get("MemAvailable", values.get("MemFree", 0)),
    )
    limit = memory_limit(proc / "self")
    if limit is not None:
        total, available = min(total, limit.total), min(available, limit.available)
    return [judge_memory(total, available, usable_cores(proc / "self"))]


def examine(log_dir: Path, wanted: tuple[int, int], visible: str | None) -> list[Finding]:
    """Return everything found. Raises SetupError: CUDA_VISIBLE_DEVICES names no GPU."""
    gpus = open_nvml(visible, is_ours=lambda _pid: False)
    version = sys.version_info
    looks: Iterable[Callable[[], list[Finding]]] = (
        lambda: [judge_python((version.major, version.minor, version.micro))],
        lambda: look_at_gpus(gpus),
        lambda: look_at_frameworks(gpus),
        look_at_memory,
        look_at_shared_memory,
        lambda: look_at_disk(log_dir),
        lambda: look_at_ports(wanted),
        lambda: [judge_file_limit(*resource.getrlimit(resource.RLIMIT_NOFILE))],
    )
    return [finding for look in looks for finding in look()]


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as text, each remedy on a line of its own."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.verdict.value:<5} {each.what:<{width}}  {each.found}")
        if each.remedy:
            lines.append(f"{'':<5} {'':<{width}}  -> {each.remedy}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 1 when something fails, 2 for a wrong command line."""
    parser = OptionParser(prog="edl doctor", description=__doc__.splitlines()[0])
    low, high = ports.blocks(ports.ephemeral_range())[0]
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--log_dir", type=Path, default=Path("pod_log"), help="the client's")
    parser.add_argument("--port_range", default=f"{low}-{high}", help="the client's")
    args = parser.parse_args(argv)
    try:
        wanted = ports.parse_range(args.port_range)
        findings = examine(args.log_dir, wanted, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except SetupError as error:
        print(f"edl doctor: {error}", file=sys.stderr)
        return 2
    if args.json:
        rows = [asdict(each) | {"verdict": each.verdict.value} for each in findings]
        print(json.dumps({"findings": rows}, indent=2))
    else:
        print(table(findings))
    return 1 if any(each.verdict is Severity.FAIL for each in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
