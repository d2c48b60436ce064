"""Decide what goes in which request, and give answers back in order. Pure: no clock, no threads.

    generator -> add -> waiting pieces -> take -> request -> answered -> ready items -> pop

A request may be with two teachers (hedged); its first answer counts. What is held between `add`
and the consumer's next `pop` is bounded in bytes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from distill_reader.errors import DistillError
from distill_reader.student.client import Array
from distill_reader.student.items import Item, Piece, Signature

_FIRST_PART = 8  # of the bound on memory, what may be held before the first answer
# Of what is joined otherwise, what is joined of a lost teacher's pieces: the consumer waits for
# the first of them, and the others' answers behind it do not help.
_OVERDUE_PART = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one request."""

    join_bytes: int  # pieces are joined up to here
    most_bytes: int  # a larger piece is split
    samples: int | None = None  # most there may be; None: any number
    join_samples: int | None = None  # pieces are joined up to here; None: any number


class Request:
    """Pieces that agree in shape, to be answered together."""

    __slots__ = ("holders", "is_answered", "is_hedged", "pieces", "samples", "signature")

    def __init__(self, pieces: list[Piece], signature: Signature, samples: int) -> None:
        self.pieces = pieces
        self.signature = signature
        self.samples = samples
        self.holders: list[str] = []  # endpoints of the teachers that have it
        self.is_hedged = False  # was offered to a second teacher
        self.is_answered = False  # or refused: what others say does not count

    def feeds(self, place: int) -> list[Array]:
        """Return the arrays of the sent field at `place` (among the sent ones)."""
        if len(self.pieces) == 1:
            return list(self.pieces[0].rows[place])
        return [array for piece in self.pieces for array in piece.rows[place]]


class Feed:
    """Everything between the generator and the consumer. The caller has the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._order: deque[Item] = deque()  # not popped yet, as the generator yielded them
        self._waiting: deque[Piece] = deque()
        self._hedges: deque[Request] = deque()
        self._added = 0  # items, ever
        self._held_bytes = 0
        self._popped_bytes = 0  # of the items that the consumer works on
        self._output_bytes: int | None = None  # of one sample's predictions; None: not known yet
        self._skips = False
        self.may_be_alone = False  # items may need no teacher: their absence is no matter itself
        self.waiting_bytes = 0
        self.waiting_samples = 0
        self.is_blocked = False  # the generator waits for room
        self.is_ended = False  # the generator is at its end
        self._end_error: Exception | None = None  # what ended it; None: it was done
        self._error: Exception | None = None  # raised where there is no answer
        self._absence: Exception | None = None  # likewise, until `resume`

    # --- the generator

    def has_room(self, item: Item) -> bool:
        """Return whether `item` may be added; always, if nothing else is held."""
        if not self._held_bytes:
            return True
        if self._output_bytes is None:  # nobody knows yet how large predictions are
            return self._held_bytes + item.charge_bytes <= self._max_bytes // _FIRST_PART
        charge = item.charge_bytes + item.samples * self._output_bytes
        return self._held_bytes + charge <= self._max_bytes

    def add(self, item: Item) -> None:
        """Append an item; its pieces wait for a teacher."""
        item.number = self._added
        self._added += 1
        item.output_bytes = self._output_bytes or 0
        item.charge_bytes += item.samples * item.output_bytes
        self._held_bytes += item.charge_bytes
        self._order.append(item)
        for piece in item.pieces:
            self._waiting.append(piece)
            self.waiting_bytes += piece.size_bytes
            self.waiting_samples += piece.samples
        item.pieces = []
        if self._skips:
            self._let_go(item)

    def expect(self, output_bytes: int) -> None:
        """Note how large one sample's predictions are, where no teacher has told yet."""
        if self._output_bytes is None:
            self._output_bytes = output_bytes

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes. `error` is raised behind the last item."""
        self.is_ended = True
        self._end_error = error

    # --- teachers

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def gives_up(self) -> bool:
        """Whether what has no answer is let go, or raised."""
        return self._skips or self._trouble() is not None

    @property
    def is_incomplete(self) -> bool:
        """Whether an item lacks answers."""
        return any(item.missing and item.error is None for item in self._order)

    def take(self, limits: Limits, teacher: str) -> Request | None:
        """Return the next request, from now on with `teacher`; None: nothing waits."""
        waiting = self._waiting
        pieces: list[Piece] = []
        samples = size_bytes = 0
        while waiting:
            piece = waiting[0]
            part = _OVERDUE_PART if pieces and pieces[0].is_overdue else 1
            if pieces and not (
                piece.signature == pieces[0].signature
                and _fits(
                    limits, part * (samples + piece.samples), part * (size_bytes + piece.size_bytes)
                )
            ):
                break
            waiting.popleft()
            self.waiting_bytes -= piece.size_bytes
            self.waiting_samples -= piece.samples
            most = _most_samples(limits, piece)
            if piece.samples > most:  # only ever the first one
                piece, rest = piece.cut(most)
                self._put_back(rest)
                pieces.append(piece)
                samples = piece.samples
                break
            pieces.append(piece)
            samples += piece.samples
            size_bytes += piece.size_bytes
        if not pieces:
            return None
        request = Request(pieces, pieces[0].signature, samples)
        request.holders.append(teacher)
        return request

    def hedge(self, request: Request) -> None:
        """Offer a request that is late to the other teachers as well."""
        request.is_hedged = True
        self._hedges.append(request)

    def has_hedge(self, teacher: str) -> bool:
        """Return whether `take_hedge` would find one."""
        return any(teacher not in request.holders for request in self._hedges)

    def take_hedge(self, teacher: str) -> Request | None:
        """Return a late request that is with others, from now on with `teacher` too."""
        for request in self._hedges:
            if teacher not in request.holders:
                self._hedges.remove(request)
                request.holders.append(teacher)
                return request
        return None

    def answered(self, request: Request, outputs: Sequence[Array], teacher: str) -> bool:
        """Keep the predictions; return whether they are the first ones."""
        request.holders.remove(teacher)
        if request.is_answered:
            return False
        self._settle(request)
        columns = tuple(outputs)
        per_sample = sum([output.nbytes for output in columns]) // request.samples
        self._output_bytes = per_sample
        begin = 0
        for piece in request.pieces:
            item = piece.item
            if item.missing:  # else: skipped meanwhile
                if item.output_bytes != per_sample:
                    more = (per_sample - item.output_bytes) * piece.samples
                    item.charge_bytes += more
                    self._held_bytes += more
                item.answers.append((piece.first, piece.samples, columns, begin))
                item.missing -= piece.samples
            begin += piece.samples
        return True

    def give_back(self, request: Request, teacher: str) -> None:
        """Let others answer it; its samples go in front of all that are behind them."""
        request.holders.remove(teacher)
        if request.is_answered:
            return
        if request.holders:
            request.is_hedged = request in self._hedges  # may be offered again
            return
        self._settle(request)
        for piece in reversed(request.pieces):
            piece.is_overdue = True
            self._put_back(piece)

    def refused(self, request: Request, error: DistillError, teacher: str) -> list[Request]:
        """Note that no teacher will answer it.

        Returns:
            Requests to ask one by one, now with `teacher`: of several items only one may be at
            fault. Empty: the item is found, and its consumer will see `error`.
        """
        request.holders.remove(teacher)
        if request.is_answered:
            return []
        self._settle(request)
        if len(request.pieces) == 1:
            request.pieces[0].item.error = error
            return []
        singles = [Request([piece], request.signature, piece.samples) for piece in request.pieces]
        for single in singles:
            single.holders.append(teacher)
        return singles

    def fail(self, error: Exception) -> None:
        """Raise `error` where there is no answer, behind the items that have one."""
        self._error = error

    def suspend(self, error: Exception) -> None:
        """Do so until `resume`."""
        self._absence = error

    def skip(self) -> None:
        """Let everything that has no answer go without, and what comes until `resume`."""
        self._skips = True
        for item in self._order:
            self._let_go(item)

    def resume(self) -> None:
        """Ask teachers again, for what comes from now on."""
        self._skips = False
        self._absence = None

    # --- the consumer

    @property
    def is_ready(self) -> bool:
        """Whether `pop` has something to return or raise, or all is done."""
        if not self._order:
            return self.is_ended or self._trouble_alone() is not None
        item = self._order[0]
        return not item.missing or item.error is not None or self._trouble() is not None

    @property
    def is_done(self) -> bool:
        """Whether the generator is at its end, and every item was popped."""
        return self.is_ended and not self._order

    def pop(self, max_bytes: int) -> list[Item]:
        """Return items in order, all answered; at least one, up to `max_bytes`.

        What the call before returned counts as consumed. Empty: nothing is ready, or all is done.

        Raises:
            Exception: what went wrong, at its place in the order.
        """
        self._held_bytes -= self._popped_bytes
        self._popped_bytes = 0
        order = self._order
        ready = []
        while order and not order[0].missing and self._popped_bytes < max_bytes:
            item = order.popleft()
            self._popped_bytes += item.charge_bytes
            ready.append(item)
        if ready:
            return ready
        if self.is_done:
            error = self._end_error
        elif order:
            error = order[0].error or self._trouble()
        else:
            error = self._trouble_alone()
        if error is not None:
            raise error
        return ready

    def clear(self) -> None:
        """Let go of all items, for nobody wants them any more."""
        self._order.clear()
        self._waiting.clear()
        self._hedges.clear()
        self.waiting_bytes = self.waiting_samples = 0

    # --- helpers

    def _trouble(self) -> Exception | None:
        return self._error or self._absence

    def _trouble_alone(self) -> Exception | None:
        """Return what is to be raised though no item lacks an answer."""
        return self._error if self.may_be_alone else self._trouble()

    def _let_go(self, item: Item) -> None:
        """Have an item without answer go without; all pieces that wait are of such items."""
        if item.missing and item.error is None:
            item.missing = 0
            item.answers = []
        self._waiting.clear()
        self.waiting_bytes = self.waiting_samples = 0

    def _settle(self, request: Request) -> None:
        request.is_answered = True
        if request.is_hedged and request in self._hedges:
            self._hedges.remove(request)

    def _put_back(self, piece: Piece) -> None:
        """Have a piece wait again, in the order of the items: the consumer waits for the first.

        What waits is in that order, so only pieces that came back as well are looked at.
        """
        if not piece.item.missing:
            return
        place, waiting = 0, self._waiting
        own = (piece.item.number, piece.first)
        while place < len(waiting) and (waiting[place].item.number, waiting[place].first) < own:
            place += 1
        waiting.insert(place, piece)
        self.waiting_bytes += piece.size_bytes
        self.waiting_samples += piece.samples


def _fits(limits: Limits, samples: int, size_bytes: int) -> bool:
    return (
        size_bytes <= limits.join_bytes
        and (limits.samples is None or samples <= limits.samples)
        and (limits.join_samples is None or samples <= limits.join_samples)
    )


def _most_samples(limits: Limits, piece: Piece) -> int:
    """Return how many samples of a piece one request may have, so that the parts are even."""
    parts = -(-piece.size_bytes // limits.most_bytes)
    if limits.samples is not None:
        parts = max(parts, -(-piece.samples // limits.samples))
    return -(-piece.samples // max(1, min(parts, piece.samples)))
