"""What a trainer does about invitations to a next stage: its group is the test's, its link too."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from job_server.api.wire import Order, PlanPod, StagePlan, Way
from pod_runtime.channel_wire import Invitation, TrainerMessage, to_json
from pod_runtime.trainer.errors import LinkError, PeerLost
from pod_runtime.trainer.frameworks.framework import GroupSpec
from pod_runtime.trainer.frameworks.meeting import CalledOffError
from pod_runtime.trainer.membership.next_group import MOST_GROUPS, NextGroupFormer
from tests.support import wait_until

POD = PlanPod(
    pod_id="a", pod_rank=0, node_id="n", addr="127.0.0.1", slots=(0, 1), ranks=(0, 1),
    ports=(20000, 20001),
)  # fmt: skip
PLAN = StagePlan(
    job_id="job", stage=5, flag=0, way=Way.JOIN, order=Order.PREPARE, pods=(POD,),
    master="127.0.0.1:20000", max_trainers=2,
)  # fmt: skip


class Groups:
    """Groups that are formed, or not, when the test says so."""

    def __init__(self) -> None:
        self.why_not = ""
        self.error: Exception | None = None
        self.goes = threading.Event()
        self.specs: list[GroupSpec] = []

    def why_no_second_group(self) -> str:
        return self.why_not

    def layout(self) -> Any:
        return SimpleNamespace(total_bytes=4096, text="[]")

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> Any:
        self.specs.append(spec)
        while not self.goes.wait(0.01):
            if is_off():
                raise CalledOffError("off")
        if self.error is not None:
            raise self.error
        return f"group of {spec.generation}"


class Channel:
    def __init__(self) -> None:
        self.invitation: Invitation | None = None
        self.said: list[dict[str, Any]] = []

    def send(self, message: TrainerMessage) -> None:
        self.said.append(to_json(message))


class Trainer:
    def __init__(self) -> None:
        self.groups, self.link = Groups(), Channel()
        self.heard = 0
        self.next_group = NextGroupFormer(self.groups, self.groups, self.link)  # type: ignore[arg-type]

    def invite(self, plan: StagePlan = PLAN, *, rank: int = 1) -> None:
        self.link.invitation = Invitation(plan=plan, rank=rank)
        self.next_group.poll()

    def hear(self) -> dict[str, Any]:
        """Return what it says next, as it trains on."""

        def said() -> bool:
            self.next_group.poll()
            return len(self.link.said) > self.heard

        wait_until(said)
        self.heard += 1
        return self.link.said[self.heard - 1]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "join"]


@pytest.fixture
def trainer():
    made = Trainer()
    yield made
    made.next_group.close()
    assert threads() == []


def test_a_group_is_formed_beside_the_training_and_taken_with_the_commit(trainer):
    trainer.invite(rank=0)
    assert trainer.link.said == []
    trainer.groups.goes.set()
    assert trainer.hear() == {"say": "formed", "stage": 5, "attempt": 0}
    trainer.next_group.poll()
    assert len(trainer.link.said) == 1
    rank, group, segment = trainer.next_group.take(PLAN)
    assert (rank, group) == (0, "group of 80")
    assert segment.handle.size_bytes > 2 * 4096
    segment.close()
    trainer.next_group.poll()
    assert trainer.groups.specs == [
        GroupSpec(rank=0, world_size=2, master="127.0.0.1:20000", generation=80)
    ]


def test_a_group_that_is_off_is_dropped_and_another_attempt_has_another_number(trainer):
    trainer.invite(rank=0)
    trainer.link.invitation = None
    trainer.next_group.poll()
    wait_until(lambda: threads() == [])
    trainer.groups.goes.set()
    trainer.invite(replace(PLAN, attempt=1))
    assert trainer.hear() == {"say": "formed", "stage": 5, "attempt": 1}
    assert [spec.generation for spec in trainer.groups.specs] == [80, 81]
    with pytest.raises(LinkError, match="go: stage 6, of which"):
        trainer.next_group.take(replace(PLAN, stage=6))


@pytest.mark.parametrize(
    "error", [PeerLost("rank 0 is gone"), ValueError("rank 0 is gone")], ids=["peer", "any"]
)
def test_a_group_that_cannot_be_formed_is_told_of_and_the_training_goes_on(trainer, error):
    trainer.groups.error = error
    trainer.groups.goes.set()
    trainer.invite()
    said = trainer.hear()
    assert (said["say"], said["stage"], said["attempt"]) == ("cannot_join", 5, 0)
    assert "rank 0 is gone" in said["reason"]
    trainer.next_group.poll()
    assert len(trainer.groups.specs) == 1


def test_a_framework_that_cannot_is_not_asked_to(trainer):
    trainer.groups.why_not = "PaddlePaddle 9.9 has no such name"
    trainer.invite()
    assert trainer.link.said == [
        {"say": "cannot_join", "stage": 5, "attempt": 0, "reason": trainer.groups.why_not}
    ]
    trainer.next_group.poll()
    assert (len(trainer.link.said), trainer.groups.specs) == (1, [])


def test_after_so_many_groups_it_offers_no_more_and_refuses(trainer):
    trainer.groups.goes.set()
    for number in range(MOST_GROUPS):
        plan = replace(PLAN, stage=5 + number)
        trainer.invite(plan)
        assert trainer.hear()["say"] == "formed"
        trainer.next_group.take(plan)
    assert trainer.hear()["say"] == "cannot_join"
    trainer.invite(replace(PLAN, stage=99))
    said = trainer.hear()
    assert (said["say"], said["stage"]) == ("cannot_join", 99)
    assert "has formed 20 groups" in said["reason"]
