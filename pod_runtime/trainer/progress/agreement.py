"""Encode what ranks tell each other in every exchange, so that all act alike after it. Pure.

The numbers travel in the flat tensor of the gradients. `cut`: a rank was asked to drain, so all
park after this step. `void`: a rank had no data for the step, so no rank commits it. With a cut all
park at the step before; without one all exchange again: a rank that waits long for data shows
itself from time to time, so that those who wait for it in the all-reduce do not time out.
`snapshot`: after this step all ranks put its state into memory, each its part; of one that a
checkpoint may be made of (MUST), they first see that they all have the same state; `renew`: into
segments that they make together before. `stops`: the script has ended the training after this epoch
on some rank, which belongs to the state. With a `patient` cut nobody parks at a void step: the
script of a trainer that stays has begun the step, and cannot be taken back. The sum of the hashes
of the samples that were drawn travels byte by byte: so whole numbers are added, which is exact in
whatever type the tensor has (float32 at least, nothing scales it).

At that point ranks know only that *some* rank was asked. Before they park they agree on which cut
it is, because the launchers' messages may have overtaken each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pod_runtime.trainer.progress.drawn import PIECES, from_pieces, to_pieces

_NUMBERS = 8
HEADER_SIZE = _NUMBERS + PIECES
HALTS = ("", "pause", "stop")  # what follows a cut; "": a change
MUST = 2.0  # of a request for a snapshot: more than those of all nodes that would not mind one
_BALLOT = 3  # numbers of a rank
_WHOLE = 0.999  # thirds and the like do not add up to 1, least of all in float32
_ROUNDING = 1e-6  # relative: ranks whose processors round otherwise are this close


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """What one rank asks for after a step; of all ranks together: what they do."""

    snapshot: float = 0.0  # MUST, or 1: make one; less: this share of the nodes would not mind
    renew: bool = False  # make new segments for it: one is missing or too small


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeResult:
    """The same on every rank."""

    cut: bool
    void: bool
    samples: int  # of the global batch that all ranks together computed
    request: SnapshotRequest = SnapshotRequest()  # what any rank asked for
    stops: bool = False  # the script of any rank has ended the training after this epoch
    drawn: int | None = None  # sum of their hashes; None: some were not hashed


def make_header(
    *,
    cut: bool,
    void: bool,
    samples: int,
    request: SnapshotRequest,
    patient: bool = False,
    drawn: int | None = None,
    stops: bool = False,
) -> list[float]:
    """Return what one rank contributes.

    Args:
        samples: that it computed in this step.
        patient: the cut that it knows of waits until a step is made.
        drawn: sum of the hashes of its samples; None: they have none.
    """
    cuts = (cut and not patient, cut and patient)
    hashed = 0 if drawn is None else samples
    numbers = (cuts[0], void, samples, request.snapshot, request.renew, cuts[1], hashed, stops)
    return [*map(float, numbers), *to_pieces(drawn or 0)]


def read_header(sums: Sequence[float]) -> ExchangeResult:
    """Return what follows from the sums over all ranks."""
    cut, void, samples, snapshot, renew, patient, hashed, stops = sums[:_NUMBERS]
    agreed = MUST if snapshot >= MUST else float(snapshot > _WHOLE)
    request = SnapshotRequest(snapshot=agreed, renew=renew > 0)
    parks = cut > 0 or (patient > 0 and not void > 0)
    drawn = from_pieces(sums[_NUMBERS:]) if round(hashed) == round(samples) > 0 else None
    return ExchangeResult(
        cut=parks,
        void=void > 0,
        samples=round(samples),
        request=request,
        stops=stops > 0,
        drawn=drawn,
    )


def alone(
    *,
    cut: bool,
    void: bool,
    samples: int,
    request: SnapshotRequest,
    patient: bool = False,
    drawn: int | None = None,
    stops: bool = False,
) -> ExchangeResult:
    """Return what follows where there is no other rank; the arguments as of `make_header`."""
    return ExchangeResult(
        cut=cut and not (patient and void),
        void=void,
        samples=samples,
        request=request,
        stops=stops,
        drawn=drawn if samples else None,
    )


def make_comparison(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return one rank's part of a comparison of numbers, to be summed over all ranks."""
    finite = np.nan_to_num(np.array(values, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.concatenate([finite, finite * finite])


def read_comparison(sums: npt.NDArray[np.float64], world_size: int) -> int | None:
    """Return the index of the first number that ranks differ in; None: there is none."""
    mean, squares = np.split(sums / world_size, 2)
    apart = np.flatnonzero(squares - mean * mean > (_ROUNDING * mean) ** 2)
    return int(apart[0]) if len(apart) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedCut:
    """The same on every rank."""

    id: int
    durable: bool
    halt: str = ""  # what follows it: one of HALTS


def make_ballot(
    rank: int, world_size: int, cut_id: int | None, durable: bool, halt: str = ""
) -> list[float]:
    """Return one rank's part of the agreement on a cut; `cut_id` None: it knows of none."""
    ballot = [0.0] * (_BALLOT * world_size)
    if cut_id is not None:
        mine = float(cut_id + 1), float(durable), float(HALTS.index(halt))
        ballot[_BALLOT * rank : _BALLOT * (rank + 1)] = mine
    return ballot


def read_ballots(sums: Sequence[float]) -> AgreedCut | None:
    """Return the newest cut that any rank knows; None: all are off."""
    newest = max(sums[0::_BALLOT])
    if newest < 1:
        return None
    halts = (int(halt) for id, halt in zip(sums[0::_BALLOT], sums[2::_BALLOT], strict=True)
             if id == newest)  # fmt: skip
    return AgreedCut(id=int(newest) - 1, durable=any(sums[1::_BALLOT]), halt=HALTS[max(halts)])
