"""Undo what benchmarks change in this process: they are programs."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Benchmarks silence what they provoke."""
    logger = logging.getLogger("distill_reader")
    disabled, level = logging.root.manager.disable, logger.level
    yield
    logging.disable(disabled)
    logger.setLevel(level)
