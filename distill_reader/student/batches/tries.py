"""Count the failed tries of samples, and decide when to give up. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from distill_reader.errors import BadRequest

# A request is given up after so many failed tries. A teacher of ours that reports that predictors
# died of it counts once for each of them.
_MOST_FAILED = 4
_MOST_REFUSED = 3  # teachers that refuse it
_MOST_LOST = 8  # connections lost while it was computed; a timeout counts as several
# What fails for less, while nobody is answered, may be due to the network, to a restart, or to a
# device that another program has filled.
_OUTAGE_S = 120.0
_ALONE_LOST = 2  # from then on it is asked in a request of its own: it may be the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """How one try ended without an answer."""

    text: str  # names the teacher
    failed: int = 0  # tries that the teacher reports as failed
    lost: int = 0  # connections lost, weighted


class Tries:
    """The tries of one piece."""

    __slots__ = (
        "_answers", "_answers_at_trouble", "_count", "_failed", "_last_texts", "_lost", "_refusals",
        "_since_s",
    )  # fmt: skip

    def __init__(self, answers: int, now: float) -> None:
        """
        Args:
            answers: of all teachers so far, to any request.
        """
        self._answers = answers
        self._answers_at_trouble = -1  # as its last try ended; -1: none has
        self._since_s = now
        self._refusals: dict[str, BadRequest] = {}  # by teacher that refuses it
        self._last_texts: dict[str, str] = {}  # by teacher: how its last try ended
        self._failed = self._lost = self._count = 0

    @property
    def is_alone(self) -> bool:
        """Whether it needs a request of its own, so that no other samples share its fate."""
        return bool(self._refusals) or self._failed > 0 or self._lost >= _ALONE_LOST

    def refused(self, teacher: str, error: BadRequest) -> None:
        self._refusals[teacher] = error

    def blame(self, teacher: str, blame: Blame, answers: int) -> None:
        """Note a try; `answers` as of `__init__`, by now."""
        self._answers_at_trouble = answers
        self._last_texts[teacher] = blame.text
        self._count += 1
        self._failed += blame.failed
        self._lost += blame.lost

    def may_ask(self, teacher: str, able: Collection[str]) -> bool:
        """Return whether to ask this teacher now.

        A teacher that has failed is asked again only if every other one of `able` has, too.
        """
        if teacher in self._refusals:
            return False
        return teacher not in self._last_texts or all(
            other in self._refusals or other in self._last_texts for other in able
        )

    def lets_others_go_first(self, answers: int) -> bool:
        """Whether other samples, if there are any, are to be asked before this.

        Else it may be the first thing of every connection, and break it, for ever: others wait
        behind it, and nothing shows that it is at fault. `answers` as of `__init__`, by now.
        """
        return answers == self._answers_at_trouble

    def verdict(
        self, what: str, able: Collection[str], answers: int, now: float
    ) -> BadRequest | None:
        """Return why to give up; None: a teacher may still answer.

        Args:
            what: names the samples.
            able: teachers that can be asked, now or soon.
            answers: of all teachers so far, to any request. If others are answered meanwhile,
                this request is at fault.
        """
        refusals = list(self._refusals.values())
        if refusals and (
            len(refusals) >= _MOST_REFUSED or all(each in self._refusals for each in able)
        ):
            if len(refusals) == 1 and not self._last_texts:
                return refusals[0]
            return BadRequest(
                f"{what}: no teacher takes it: {'; '.join([*map(str, refusals), *self._texts])}"
            )
        is_late = now - self._since_s >= _OUTAGE_S
        # Others were answered, and it failed after that again.
        fails_apart = self._answers_at_trouble > self._answers or is_late
        is_lost_apart = answers > self._answers or is_late
        if not (self._failed >= _MOST_FAILED and fails_apart) and not (
            self._lost >= _MOST_LOST and is_lost_apart
        ):
            return None
        return BadRequest(
            f"{what}: no teacher can compute it: {'; '.join([*self._texts, *map(str, refusals)])} "
            f"(tried {self._count} times). If teachers run out of memory: smaller "
            "batches, or set_teacher_batch_size; if they need longer: set_timeout, and the time "
            "that gateways before them allow for an answer"
        )

    @property
    def _texts(self) -> list[str]:
        return [text for teacher, text in self._last_texts.items() if teacher not in self._refusals]
