"""Several trainings, real service and database: whatever happens, no work is lost unasked."""

import logging

import pytest

from tests.job_server.stories import Story


@pytest.mark.parametrize(
    ("seed", "length"),
    [*((seed, 40) for seed in range(10)), (191, 40), (350, 40), (1444, 70), (3461, 70)],
)
def test_every_job_comes_to_its_end_and_none_loses_its_newest_state(seed, length, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)  # the errors of a full disk are part of the stories
    story = Story(seed, tmp_path)
    story.submit("one")
    story.submit("two")
    try:
        for _ in range(length):
            story.happen()
        story.finish()
    except BaseException:
        print("\n".join(story.told))
        raise
    finally:
        story.end_server(kill=True)
