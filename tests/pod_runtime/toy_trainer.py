"""A trainer that speaks the channel's protocol and trains nothing. Standard library only.

python toy_trainer.py [--steps N] [--plain SECONDS] [--fail STEP] [--say_too_low] [--exit CODE]
                      [--helper] [--snapshot] [--ignore_sigterm] [--print TEXT] [--hold FILE]
                      [--doing DOING] [--adapter MODULE] [--eat FILE] [--script FILE]
                      [--start_when FILE] [--slow SLOT] [--durable] [--linger FILE]
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from pod_runtime.activity import Doing, TrainerActivity
from pod_runtime.segment_header import SlotHeader, Stamp, make_geometry, pack_part, read_newest
from pod_runtime.shim_wire import LineSocket

STEP_PERIOD_S = 0.2  # as that of trainers (`membership.link`), whose imports are dear

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--plain", type=float)
parser.add_argument("--fail", type=int)
parser.add_argument("--say_too_low", action="store_true")
parser.add_argument("--exit", type=int)
parser.add_argument("--helper", action="store_true")
parser.add_argument("--snapshot", action="store_true")
parser.add_argument("--ignore_sigterm", action="store_true")
parser.add_argument("--print", dest="text")
parser.add_argument("--hold", help="no step follows the fifth while this file exists")
parser.add_argument("--doing", default="STEPPING", help="what it says that it does meanwhile")
parser.add_argument("--adapter", default="")
parser.add_argument("--eat", help="once this file exists memory is taken without end")
parser.add_argument("--script", help="its first line is taken out and executed after 50 steps")
parser.add_argument("--start_when", help="it comes no further than its imports without this file")
parser.add_argument("--slow", help="on that slot a step takes 40 ms, and the others wait for it")
parser.add_argument("--linger", help="once done it stays while this file exists")
parser.add_argument("--durable", action="store_true", help="it says that what it parks is on disk")
args = parser.parse_args()

while args.start_when and not os.path.exists(args.start_when):
    time.sleep(0.05)
rank = int(os.environ["PADDLE_TRAINER_ID"])
stage = int(os.environ["EDL_STAGE"])
if args.ignore_sigterm:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.text:
    print(args.text)
if args.helper:  # such as a data loading worker: it inherits the environment, and outlives us
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("helper", helper.pid, flush=True)
if args.exit is not None:
    sys.exit(args.exit)
if args.plain is not None:
    print("plain", flush=True)
    time.sleep(args.plain)
    sys.exit(0)

connection = socket.socket(socket.AF_UNIX)
connection.connect("\0" + os.environ["EDL_CHANNEL"])
lines = LineSocket(connection)


def say(word: str, fds: tuple[int, ...] = (), **fields: object) -> None:
    lines.send({"say": word, "fds": len(fds), **fields}, fds)


def hear() -> tuple[dict[str, Any], tuple[int, ...]]:
    connection.settimeout(None)
    received = lines.receive()
    assert received is not None
    return received


def hear_at_once() -> dict[str, Any]:
    """What the launcher has said already; {} if nothing."""
    connection.settimeout(0.0)
    try:
        received = lines.receive()
    except BlockingIOError:
        return {}
    assert received is not None
    return received[0]


activity = TrainerActivity()
say("hello", (activity.fd,), rank=rank, stage=stage, pid=os.getpid(), adapter=args.adapter)
welcome, segment_fds = hear()
held = [header.stamp.stage for fd in segment_fds if (header := read_newest(fd)) is not None]
print("welcome", json.dumps({"stages": held}))
if args.say_too_low:
    say("stage_too_low", highest_stage=7)
    sys.exit(1)
step = 0
restore = welcome["plan"]["restore_from"]
if restore is not None:
    step = restore["step"]
say("loaded", step=step, epoch=0)
activity.begin(Doing.PARKED)
while hear()[0]["do"] != "go":
    pass

made = 0
said_at = 0.0
eaten: list[bytes] = []
segment = -1
if args.snapshot and rank == 0:
    geometry = make_geometry(1, 0, 0)
    segment = os.memfd_create("toy")
    os.ftruncate(segment, geometry.total_bytes)
    os.pwrite(segment, geometry.pack(), 0)
    say("segment", (segment,), stage=stage, size_bytes=geometry.total_bytes, digest="d")

while step < args.steps:
    activity.begin(Doing.STEPPING)
    is_slow = args.slow is not None and os.environ["EDL_SLOTS"] == args.slow
    time.sleep(0.04 if is_slow else 0.01)
    if args.slow is not None and not is_slow:
        activity.begin(Doing.EXCHANGING)
        time.sleep(0.03)
    if step == 5 and args.hold:
        activity.begin(Doing[args.doing])
        while os.path.exists(args.hold):
            time.sleep(0.01)
    while args.eat and os.path.exists(args.eat):
        eaten.append(os.urandom(1 << 20))
    step += 1
    activity.count_step(samples=1)
    made += 1
    if args.script and made == 50:
        with open(args.script, "r+") as script:
            line, *rest = script.read().splitlines(keepends=True) or ["args.steps = step"]
            script.seek(0)
            script.writelines(rest)
            script.truncate()
        exec(line)
    if args.fail == step:
        raise ValueError(f"the loss is sad at step {step}")
    if (now := time.monotonic()) >= said_at + STEP_PERIOD_S:
        said_at = now
        how = {"total_steps": args.steps, "step_s": 0.01, "metrics": {"train_loss": 0.5}}
        say("step", step=step, epoch=0, **how)
    if segment >= 0:
        stamp = Stamp(stage=stage, step=step)
        header = SlotHeader(stamp=stamp, meta_bytes=0, data_bytes=0, digest="d")
        os.pwrite(segment, pack_part(header), geometry.header_offset(step % 2, 0))
        say("snapshot", stage=stage, step=step, digest="d")
    heard = hear_at_once()
    if heard.get("do") == "cut":
        step = 1000 + heard["id"]  # ranks of a toy cannot agree: the same for all
        say("drained", step=step, id=heard["id"], durable="/toy" if args.durable else "")
        print("parked", heard, flush=True)
        activity.begin(Doing.PARKED)
        while hear()[0]["do"] != "resume":
            pass
        print("resumed", flush=True)
if rank == 0:
    say("done", step=step)
activity.begin(Doing.DONE)
while args.linger and os.path.exists(args.linger):
    time.sleep(0.05)
