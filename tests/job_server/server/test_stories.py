"""Several trainings, real service and database: whatever happens, no work is lost unasked.

`python -m benchmarks.chaos --histories 10000` goes through many more of the rough ones.
"""

import logging

import pytest

from tests.job_server.rough_stories import RoughStory
from tests.job_server.sick_stories import SickStory
from tests.job_server.stories import Story


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)  # the errors of a full disk are part of the stories


# Seeds of histories that had found something.
@pytest.mark.parametrize(
    ("seed", "length", "shared"),
    [
        (191, 40, False), (350, 40, False), (1444, 70, False), (3461, 70, False),
        (41, 40, True), (1009, 40, True), (1052, 40, True), (2167, 40, True),
    ],
)  # fmt: skip
def test_every_job_comes_to_its_end_and_none_loses_its_newest_state(seed, length, shared, tmp_path):
    tell(Story(seed, tmp_path, late=shared and seed % 2 == 1, shared=shared), length)


@pytest.mark.parametrize(
    ("seed", "length"),
    [
        *((seed, 40) for seed in range(20)),
        *(
            (seed, 50)
            for seed in (20003686, 20007106, 30000257, 30007830, 30008259, 40001282, 40001820)
        ),
    ],
)
def test_the_same_holds_with_clocks_that_are_set_full_nodes_and_strangers(seed, length, tmp_path):
    tell(RoughStory(seed, tmp_path, late=seed % 3 == 1, shared=seed % 2 == 1), length)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_holds_with_gpus_that_fail_nodes_that_are_drained_and_slow_trainers(
    seed, tmp_path
):
    tell(SickStory(seed, tmp_path, late=seed % 3 == 1, shared=seed % 2 == 1), 40)


def tell(story: Story, length: int) -> None:
    for job_id in story.names[:3]:
        story.submit(job_id)
    try:
        for _ in range(length):
            story.happen()
        story.finish()
    except BaseException:
        print("\n".join(story.told))
        raise
    finally:
        story.end_server(kill=True)
