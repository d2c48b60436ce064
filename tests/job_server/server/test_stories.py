"""Several trainings, real service and database: whatever happens, no work is lost unasked."""

import logging

import pytest

from tests.job_server.stories import Story


@pytest.mark.parametrize(
    ("seed", "length", "late"),
    [
        *((seed, 40, False) for seed in range(10)),
        *((seed, 40, True) for seed in range(10, 16)),
        (191, 40, False), (350, 40, False), (1444, 70, False), (3461, 70, False),
    ],
)  # fmt: skip
def test_every_job_comes_to_its_end_and_none_loses_its_newest_state(
    seed, length, late, tmp_path, caplog
):
    caplog.set_level(logging.CRITICAL)  # the errors of a full disk are part of the stories
    tell(Story(seed, tmp_path, late=late), length)


@pytest.mark.parametrize("seed", [*range(8), 41, 1009, 1052, 2167])
def test_the_same_holds_where_most_jobs_share_the_nodes(seed, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    tell(Story(seed, tmp_path, late=seed % 2 == 1, shared=True), 40)


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
