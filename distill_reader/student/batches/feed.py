"""Decide which samples go into which request, and return answers in order. Pure.

    generator -> add -> waiting pieces -> take -> request -> answered -> ready items -> pop

Waiting pieces of one shape are joined into a request; `pop` puts the items in order again. Two
teachers may have a request at once (hedged); the first answer counts. Pieces that teachers have
refused or failed to answer are in trouble: each is asked in a request of its own, until a teacher
answers or `judge` finds that none will. The bytes held until the consumer takes them are bounded.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from distill_reader.errors import BadRequest
from distill_reader.student.batches.items import ItemPiece, ReaderItem, Signature
from distill_reader.student.batches.tries import Blame, Tries
from distill_reader.student.clients.client import Array

_FIRST_PART = 8  # the part of the memory bound that may be held before the first answer
# Requests with pieces of a lost teacher are smaller by this factor: the consumer waits for the
# first of them, and cannot use the answers behind it.
_OVERDUE_PART = 4
# The consumer waits for one request of every shape that waits. So with N shapes a request has 1/N
# of the usual size, but at least this many samples: a batch of most teachers.
_LEAST_OF_A_SHAPE = 64

_order_of = attrgetter("order")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The bounds of one request."""

    join_bytes: int  # pieces are joined up to this size
    most_bytes: int  # a larger piece is split
    samples: int | None = None  # the most samples; None: no bound
    join_samples: int | None = None  # pieces are joined up to so many samples; None: no bound


class Request:
    """Pieces of one shape that are answered together."""

    __slots__ = (
        "hedged_to", "holders", "is_answered", "is_hedged", "owed_bytes", "pieces", "samples",
        "signature",
    )  # fmt: skip

    def __init__(self, pieces: list[ItemPiece], signature: Signature, samples: int) -> None:
        self.pieces = pieces
        self.signature = signature
        self.samples = samples
        self.holders: list[str] = []  # endpoints of the teachers that have it
        self.is_hedged = False  # it was offered to a second teacher
        self.hedged_to: Collection[str] | None = None  # teachers that may take it then; None: any
        self.is_answered = False  # or refused; further answers do not count
        self.owed_bytes = 0  # of predictions that are expected and not counted with their items

    @property
    def size_bytes(self) -> int:
        return sum([piece.size_bytes for piece in self.pieces])

    @property
    def is_unshared(self) -> bool:
        """Whether the consumer has none of its items yet; those that it has it may change."""
        return not self.is_answered and all(piece.item.missing for piece in self.pieces)

    def feeds(self, index: int) -> list[Array]:
        """Return the arrays of the sent field at `index` (among the sent ones)."""
        if len(self.pieces) == 1:
            return list(self.pieces[0].rows[index])
        return [array for piece in self.pieces for array in piece.rows[index]]


class Feed:
    """Holds everything between the generator and the consumer. The caller has the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._order: deque[ReaderItem] = deque()  # not popped yet, as the generator yielded them
        self._waiting: dict[Signature, deque[ItemPiece]] = {}  # in order; none is empty
        self._troubled: list[ItemPiece] = []  # in order
        self._able: Collection[str] = ()  # teachers that can be asked, now or soon
        self._hedges: deque[Request] = deque()
        self._added = 0  # items, ever
        self._answers = 0  # requests, ever
        self._held_bytes = 0
        self._reserved_bytes = 0  # of these: for predictions of samples that no teacher has yet
        self._owed_bytes = 0  # of all requests under way
        self._popped_bytes = 0  # of the items that the consumer works on now
        self._output_bytes: int | None = None  # of one sample's predictions; None: unknown yet
        self._skips = False
        self.works_without_teachers = False  # the cache may answer all: to lack one is no error
        self.waiting_bytes = 0
        self.waiting_samples = 0
        self.is_blocked = False  # the generator waits for room
        self.is_ended = False  # the generator has ended
        self._end_error: Exception | None = None  # why it ended; None: it was exhausted
        self._error: Exception | None = None  # raised instead of a missing answer
        self._absence: Exception | None = None  # likewise, until `resume`

    # --- the generator

    def has_room(self, item: ReaderItem) -> bool:
        """Return whether `item` may be added. If nothing else is held, it always may."""
        if not self._held_bytes:
            return True
        if self._output_bytes is None:  # the size of predictions is unknown yet
            return self._held_bytes + item.charge_bytes <= self._max_bytes // _FIRST_PART
        charge = item.charge_bytes + item.samples * self._output_bytes
        return self._held_bytes + charge <= self._max_bytes

    def add(self, item: ReaderItem) -> None:
        """Append an item; its pieces wait for a teacher."""
        item.number = self._added
        self._added += 1
        item.output_bytes = self._output_bytes or 0
        item.charge_bytes += item.samples * item.output_bytes
        self._held_bytes += item.charge_bytes
        self._order.append(item)
        waiting = self._waiting
        for piece in item.pieces:
            queue = waiting.get(piece.signature)
            if queue is None:
                waiting[piece.signature] = deque((piece,))
            else:
                queue.append(piece)
            self._count_in(piece)
        item.pieces = []

    def expect(self, output_bytes: int | None) -> None:
        """Note the size of one sample's predictions, if known, and no answer has shown it yet."""
        if self._output_bytes is None:
            self._output_bytes = output_bytes

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing more comes. `error` is raised after the last item."""
        self.is_ended = True
        self._end_error = error

    # --- teachers

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._troubled)

    def has_waiting_for(self, teacher: str) -> bool:
        """Return whether `take` would return a request for this teacher."""
        return self._troubled_for(teacher) is not None or (
            bool(self._waiting) and self._has_room_for_predictions(self._first_queue()[0])
        )

    @property
    def has_answers(self) -> bool:
        """Whether any teacher has answered a request."""
        return self._answers > 0

    @property
    def has_troubled(self) -> bool:
        """Whether pieces are in trouble, so that `judge` must be called now and then."""
        return bool(self._troubled)

    @property
    def shapes(self) -> int:
        """The number of different shapes of samples that wait."""
        return len(self._waiting)

    def is_first(self, request: Request) -> bool:
        """Return whether the consumer needs this request next."""
        first = next((item for item in self._order if item.missing), None)
        return any(piece.item is first for piece in request.pieces)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def gives_up(self) -> bool:
        """Whether a missing answer is skipped, or raises an error."""
        return self._skips or self._trouble() is not None

    @property
    def is_incomplete(self) -> bool:
        """Whether an item lacks answers."""
        return any(item.missing and item.error is None for item in self._order)

    def take(self, limits: RequestLimits, teacher: str) -> Request | None:
        """Return the next request and hand it to `teacher`; None: none may be sent."""
        troubled = self._troubled_for(teacher) if self._troubled else None
        if troubled is not None and not self._others_go_first(troubled):
            self._troubled.remove(troubled)
            piece = self._cut_off(troubled, limits)
            return self._request([piece], piece.samples, teacher)
        if not self._waiting:
            return None
        queue = self._first_queue()
        if not self._has_room_for_predictions(queue[0]):
            return None
        room_bytes = self._max_bytes - self._used_bytes
        piece = queue.popleft()
        first = self._cut_off(piece, limits)
        pieces = [first]
        samples, size_bytes = first.samples, first.size_bytes
        if first is piece:
            part = _OVERDUE_PART if first.is_overdue else 1
            if limits.join_samples is not None and len(self._waiting) > 1:
                of_each = max(_LEAST_OF_A_SHAPE, limits.join_samples // len(self._waiting))
                limits = replace(limits, join_samples=min(limits.join_samples, of_each))
            output_bytes = self._output_bytes or 0
            while (
                queue
                and _fits(
                    limits,
                    part * (samples + queue[0].samples),
                    part * (size_bytes + queue[0].size_bytes),
                )
                and (samples + queue[0].samples) * output_bytes <= room_bytes
            ):
                piece = queue.popleft()
                pieces.append(piece)
                samples += piece.samples
                size_bytes += piece.size_bytes
        if not queue:
            del self._waiting[first.signature]
        return self._request(pieces, samples, teacher)

    def hedge(self, request: Request, to: Collection[str] | None = None) -> None:
        """Offer a late request to other teachers as well. A second call replaces these teachers."""
        request.hedged_to = to
        if not request.is_hedged:
            request.is_hedged = True
            self._hedges.append(request)

    def is_offered(self, request: Request) -> bool:
        """Return whether it was hedged, and no teacher has taken it yet."""
        return request in self._hedges

    def has_hedge(self, teacher: str) -> bool:
        """Return whether `take_hedge` would return a request."""
        return any(_may_hedge(request, teacher) for request in self._hedges)

    def take_hedge(self, teacher: str) -> Request | None:
        """Return a late request of another teacher, and hand it to `teacher` too."""
        for request in self._hedges:
            if _may_hedge(request, teacher):
                self._hedges.remove(request)
                request.holders.append(teacher)
                return request
        return None

    def answered(self, request: Request, outputs: Sequence[Array], teacher: str) -> bool:
        """Store the predictions; return whether they are the first answer."""
        request.holders.remove(teacher)
        if request.is_answered:
            return False
        self._finish(request)
        self._answers += 1
        columns = tuple(outputs)
        per_sample = sum([output.nbytes for output in columns]) // request.samples
        self._output_bytes = per_sample
        begin = 0
        for piece in request.pieces:
            item = piece.item
            if item.missing:  # else it was skipped meanwhile
                if item.output_bytes != per_sample:
                    more = (per_sample - item.output_bytes) * piece.samples
                    item.charge_bytes += more
                    self._held_bytes += more
                item.answers.append((piece.first, piece.samples, columns, begin))
                item.missing -= piece.samples
            begin += piece.samples
        return True

    def give_back(
        self, request: Request, teacher: str, blame: Blame | None = None, now: float = 0.0
    ) -> None:
        """Let its samples wait again, in their order, for another teacher.

        Args:
            blame: how the try ended at `now`; None: the request is not at fault.
        """
        request.holders.remove(teacher)
        if request.is_answered:
            return
        if blame is not None:
            for piece in request.pieces:
                self._tries(piece, now).blame(teacher, blame, self._answers)
        if request.holders:
            request.is_hedged = request in self._hedges  # may be offered again
            return
        self._finish(request)
        for piece in reversed(request.pieces):
            piece.is_overdue = True
            self._put_back(piece)

    def refused(
        self, request: Request, error: BadRequest, teacher: str, now: float = 0.0
    ) -> list[Request]:
        """Note that this teacher refuses a request.

        Returns:
            Requests to ask `teacher` one by one: of several items only one may be at fault. Empty:
            other teachers are asked if `judge` finds some; otherwise the consumer gets `error`.
        """
        request.holders.remove(teacher)
        if request.is_answered:
            return []
        if len(request.pieces) == 1:
            self._tries(request.pieces[0], now).refused(teacher, error)
            if not request.holders:
                self._finish(request)
                self._put_back(request.pieces[0])
            return []
        self._finish(request)
        return [self._ask_for([piece], piece.samples, teacher) for piece in request.pieces]

    def too_large(self, request: Request, teacher: str) -> bool:
        """Let its samples wait again for smaller requests; False: there is only one sample."""
        if request.samples == 1:
            return False
        request.holders.remove(teacher)
        if not request.is_answered and not request.holders:
            self._finish(request)
            pieces = request.pieces
            if len(pieces) == 1:
                pieces = list(pieces[0].cut(request.samples // 2))
            for piece in reversed(pieces):
                self._put_back(piece)
        return True

    def judge(self, able: Collection[str], hoped_for: Collection[str], now: float) -> None:
        """Give each piece in trouble an error if no teacher will answer it.

        Args:
            able: teachers that can be asked, now or soon.
            hoped_for: those, and teachers that are worth waiting for.
        """
        self._able = able
        if self._skips:
            return  # until a teacher is back, the samples are not known to be at fault
        for piece in list(self._troubled):
            assert piece.tries is not None
            error = piece.tries.verdict(str(piece), hoped_for, self._answers, now)
            if error is not None:
                piece.item.error = error
                self._troubled.remove(piece)
                self._leave_out(piece)

    def fail(self, error: Exception) -> None:
        """Raise `error` instead of a missing answer, after the items that have one."""
        self._error = error

    def suspend(self, error: Exception) -> None:
        """Like `fail`, until `resume`."""
        self._absence = error

    def skip(self) -> None:
        """Let each item that the consumer needs next go without predictions, until `resume`.

        Those behind it still wait for a teacher: the consumer may need minutes to get to them.
        """
        self._skips = True

    def resume(self) -> None:
        """Let the consumer wait for answers again."""
        if self._skips:
            self._skips = False
            forgiven, self._troubled = self._troubled, []
            for piece in forgiven:  # the teachers were at fault, and one is back
                piece.tries = None
                self._leave_out(piece)
                self._put_back(piece)
        self._absence = None

    # --- the consumer

    @property
    def is_ready(self) -> bool:
        """Whether `pop` would return or raise something, or everything is done."""
        if not self._order:
            return self.is_ended or self._trouble_alone() is not None
        item = self._order[0]
        return not item.missing or item.error is not None or self.gives_up

    @property
    def is_done(self) -> bool:
        """Whether the generator has ended, and every item was popped."""
        return self.is_ended and not self._order

    def pop(self, max_bytes: int) -> list[ReaderItem]:
        """Return answered items in order, up to `max_bytes`, and at least one if one is ready.

        The items of the call before count as consumed. Empty: nothing is ready, or all is done.

        Raises:
            Exception: the error of the next item in order.
        """
        self._held_bytes -= self._popped_bytes
        self._popped_bytes = 0
        order = self._order
        if self._skips and order and order[0].missing and order[0].error is None:
            self._let_go(order[0])
            max_bytes = 1  # the next one may be answered until the consumer comes again
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
        """Drop all items."""
        self._order.clear()
        self._waiting.clear()
        self._troubled.clear()
        self._hedges.clear()
        self.waiting_bytes = self.waiting_samples = self._reserved_bytes = 0

    # --- helpers

    def _trouble(self) -> Exception | None:
        return self._error or self._absence

    def _trouble_alone(self) -> Exception | None:
        """Return the error to raise although no item lacks an answer."""
        return self._error if self.works_without_teachers else self._trouble()

    def _let_go(self, item: ReaderItem) -> None:
        """Let the first item go without predictions."""
        item.missing = 0
        item.answers = []
        for signature, queue in list(self._waiting.items()):
            while queue and queue[0].item is item:  # queues are in order
                self._leave_out(queue.popleft())
            if not queue:
                del self._waiting[signature]
        for piece in [piece for piece in self._troubled if piece.item is item]:
            self._troubled.remove(piece)
            self._leave_out(piece)

    @property
    def _used_bytes(self) -> int:
        """What is in memory, and the predictions that are expected of requests under way."""
        return self._held_bytes - self._reserved_bytes + self._owed_bytes

    def _has_room_for_predictions(self, piece: ItemPiece) -> bool:
        """Return whether there is room for predictions; what the consumer needs next always has."""
        return self._used_bytes <= self._max_bytes or piece.item is self._order[0]

    def _count_in(self, piece: ItemPiece) -> None:
        """Count a piece as waiting."""
        self.waiting_bytes += piece.size_bytes
        self.waiting_samples += piece.samples
        self._reserved_bytes += piece.samples * piece.item.output_bytes

    def _leave_out(self, piece: ItemPiece) -> None:
        """Count a piece as waiting no more."""
        self.waiting_bytes -= piece.size_bytes
        self.waiting_samples -= piece.samples
        self._reserved_bytes -= piece.samples * piece.item.output_bytes

    def _finish(self, request: Request) -> None:
        request.is_answered = True
        self._owed_bytes -= request.owed_bytes
        request.owed_bytes = 0
        if request.is_hedged and request in self._hedges:
            self._hedges.remove(request)

    def _tries(self, piece: ItemPiece, now: float) -> Tries:
        if piece.tries is None:
            piece.tries = Tries(self._answers, now)
        return piece.tries

    def _troubled_for(self, teacher: str) -> ItemPiece | None:
        for piece in self._troubled:
            if (
                piece.tries is not None
                and piece.tries.may_ask(teacher, self._able)
                and self._has_room_for_predictions(piece)
            ):
                return piece
        return None

    def _others_go_first(self, troubled: ItemPiece) -> bool:
        assert troubled.tries is not None
        return (
            bool(self._waiting)
            and troubled.tries.lets_others_go_first(self._answers)
            and self._has_room_for_predictions(self._first_queue()[0])
        )

    def _first_queue(self) -> deque[ItemPiece]:
        """Return the queue with the first piece in order."""
        queues = self._waiting.values()
        if len(queues) == 1:
            return next(iter(queues))
        return min(queues, key=lambda queue: queue[0].order)

    def _request(self, pieces: list[ItemPiece], samples: int, teacher: str) -> Request:
        for piece in pieces:
            self._leave_out(piece)
        return self._ask_for(pieces, samples, teacher)

    def _ask_for(self, pieces: list[ItemPiece], samples: int, teacher: str) -> Request:
        request = Request(pieces, pieces[0].signature, samples)
        request.holders.append(teacher)
        size = self._output_bytes or 0
        request.owed_bytes = sum(
            [piece.samples * max(0, size - piece.item.output_bytes) for piece in pieces]
        )
        self._owed_bytes += request.owed_bytes
        return request

    def _cut_off(self, piece: ItemPiece, limits: RequestLimits) -> ItemPiece:
        """Return the part of a taken piece that fits into a request; the rest waits again."""
        most = _most_samples(limits, piece)
        if piece.samples <= most:
            return piece
        head, rest = piece.cut(most)
        self._leave_out(rest)
        self._put_back(rest)
        return head

    def _put_back(self, piece: ItemPiece) -> None:
        """Let a piece wait again, in the order of the items.

        The queue is in that order, so the search only passes other pieces that came back.
        """
        if not piece.item.missing or piece.item.error is not None:
            return
        self._count_in(piece)
        if piece.tries is not None and piece.tries.is_alone:
            insort(self._troubled, piece, key=_order_of)
            return
        queue = self._waiting.setdefault(piece.signature, deque())
        own, at = piece.order, 0
        while at < len(queue) and queue[at].order < own:
            at += 1
        queue.insert(at, piece)


def _may_hedge(request: Request, teacher: str) -> bool:
    return teacher not in request.holders and (
        request.hedged_to is None or teacher in request.hedged_to
    )


def _fits(limits: RequestLimits, samples: int, size_bytes: int) -> bool:
    return (
        size_bytes <= limits.join_bytes
        and (limits.samples is None or samples <= limits.samples)
        and (limits.join_samples is None or samples <= limits.join_samples)
    )


def _most_samples(limits: RequestLimits, piece: ItemPiece) -> int:
    """Return how many samples of a piece go into one request, so that its parts are even."""
    parts = -(-piece.size_bytes // limits.most_bytes)
    if limits.samples is not None:
        parts = max(parts, -(-piece.samples // limits.samples))
    return -(-piece.samples // max(1, min(parts, piece.samples)))
