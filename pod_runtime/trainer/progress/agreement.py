"""What ranks tell each other with every exchange, so that all do the same after it. Pure.

The numbers ride in the flat tensor of the gradients. `cut`: a rank was told to drain, so after
this step all park. `void`: a rank had no data for the step, so nobody commits it; with a cut, all
park at the step before; without, all exchange again (a rank that waits long for data says so from
time to time, so that those who wait for it in the all-reduce do not run into its time-out).
`snapshot`: after this step all ranks put its state into memory, each its part; `renew`: into
segments that they make together before. A cut that is `patient` parks nobody at a void step:
trainers that stay cannot take a step back which their script has begun. The sum of the hashes of
the samples that were drawn travels byte by byte: so whole numbers are added, which is exact in
whatever type the tensor has (float32 at least, nothing scales it).

Only that *some* rank was told is known then; before they park, ranks agree on which cut it is: the
launchers' messages may have overtaken each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pod_runtime.trainer.progress.drawn import PIECES, from_pieces, to_pieces

_NUMBERS = 7
HEADER_SIZE = _NUMBERS + PIECES
HALTS = ("", "pause", "stop")  # what a cut may be for, besides a change
_BALLOT = 3  # numbers of a rank
_WHOLE = 0.999  # thirds and the like do not add up to 1, least of all in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """What a rank would have all of them do after a step; of all together: what they do."""

    snapshot: float = 0.0  # from 1 on they do; less says that so many of the nodes would not mind
    renew: bool = False  # with it: its segment is missing or too small


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeResult:
    """The same on every rank."""

    cut: bool
    void: bool
    samples: int  # of the global batch that all ranks together computed
    request: SnapshotRequest = SnapshotRequest()  # what any rank asked for
    drawn: int | None = None  # sum of their hashes; None: not all of them had one


def make_header(
    *,
    cut: bool,
    void: bool,
    samples: int,
    request: SnapshotRequest,
    patient: bool = False,
    drawn: int | None = None,
) -> list[float]:
    """Return what one rank contributes.

    Args:
        samples: that it computed in this step.
        patient: its cut, where it knows of one, waits until a step is made.
        drawn: sum of the hashes of its samples; None: they have none.
    """
    cuts = (cut and not patient, cut and patient)
    hashed = 0 if drawn is None else samples
    numbers = (cuts[0], void, samples, request.snapshot, request.renew, cuts[1], hashed)
    return [*map(float, numbers), *to_pieces(drawn or 0)]


def read_header(sums: Sequence[float]) -> ExchangeResult:
    """Return what follows from the sums over all ranks."""
    cut, void, samples, snapshot, renew, patient, hashed = sums[:_NUMBERS]
    request = SnapshotRequest(snapshot=float(snapshot > _WHOLE), renew=renew > 0)
    parks = cut > 0 or (patient > 0 and not void > 0)
    drawn = from_pieces(sums[_NUMBERS:]) if round(hashed) == round(samples) > 0 else None
    return ExchangeResult(
        cut=parks, void=void > 0, samples=round(samples), request=request, drawn=drawn
    )


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
