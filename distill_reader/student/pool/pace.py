"""What a teacher has shown of its speed, and what follows for the requests it gets. Pure."""

import math

# A request is joined until it takes so long: enough to hide what a request costs, too little for
# a slow teacher to hold things up. What a lost teacher had comes behind what the others have, so
# that some of these times are how long nothing comes when one dies. Between the two it stays: a
# teacher's batch has a fixed cost, and many small requests are not answered faster.
_GROWS_BELOW_S = 0.05
_SHRINKS_ABOVE_S = 1.0
_FIRST_SAMPLES = 32  # of a teacher that has not answered yet
_LEAST_SAMPLES = 16
_MOST_SAMPLES = 1 << 16

_SMOOTHING = 0.2
_HEDGE_FACTOR = 4.0  # times what was learned: late, not merely slow
_HEDGE_FLOOR_S = 0.25  # below it, a busy host makes anybody late
_HEDGE_UNKNOWN_S = 5.0  # a first answer may include loading and tuning kernels, and take far longer
_DROP_FACTOR = 3.0  # times the hedge's delay, when another has answered instead
_TIMEOUT_UNKNOWN_S = 600.0  # engines are built and models compiled with a first answer
_TIMEOUT_FACTOR = 50.0
_TIMEOUT_FLOOR_S = 10.0

LEAST_DEPTH = 2  # one is computed while the next one is on its way
MOST_DEPTH = 6
_WINDOW_S = 0.5  # for which a depth is tried
_WINDOW_REQUESTS = 8
_GAIN = 1.1  # what one more in flight must bring
_MOST_PATIENCE = 64  # windows between two trials


class Pace:
    """One teacher's. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.answers = 0
        self.depth = LEAST_DEPTH  # requests that may be in flight
        self._mean_s = 0.0  # of an answer
        self._deviation_s = 0.0
        self._mean_samples = 1.0
        self._join_samples = _FIRST_SAMPLES
        self._trial = _Trial()

    @property
    def is_known(self) -> bool:
        """Whether it has answered often enough for what is learned to mean something."""
        return self.answers >= 3

    @property
    def sample_s(self) -> float:
        """Seconds per sample, waiting included; 0: not known."""
        return self._mean_s / self._mean_samples

    @property
    def join_samples(self) -> int:
        """Up to how many samples a request is joined."""
        return self._join_samples

    def answered(self, samples: int, took_s: float, now: float) -> None:
        """Learn from an answer that came at `now`."""
        self.answers += 1
        if self.answers == 1:
            self._mean_s, self._deviation_s = took_s, took_s / 2
            self._mean_samples = samples
        else:
            error_s = took_s - self._mean_s
            self._mean_s += _SMOOTHING * error_s
            self._deviation_s += _SMOOTHING * (abs(error_s) - self._deviation_s)
            self._mean_samples += _SMOOTHING * (samples - self._mean_samples)
        # The first answers waited for no others, and say less than they will take.
        if (
            self.is_known
            and took_s < _GROWS_BELOW_S
            and 2 * samples > self._join_samples < _MOST_SAMPLES
        ):
            self._join_samples *= 2
        elif took_s > _SHRINKS_ABOVE_S and samples > _LEAST_SAMPLES:
            self._join_samples = max(_LEAST_SAMPLES, self._join_samples // 2)
        self.depth = self._trial.next_depth(self.depth, samples, now)

    def overdue(self, samples: int, took_s: float) -> None:
        """Note that it was given up after this time: it is not as fast as was thought."""
        if self.is_known:
            scale = max(1.0, samples / self._mean_samples)
            self._mean_s = max(self._mean_s, took_s / scale)

    def starved(self) -> None:
        """Note that it waited for work: what it does now is not all it could."""
        self._trial.spoil()

    def expected_s(self, samples: int) -> float | None:
        """Return within what time an answer is usual; None: not known yet."""
        if not self.is_known:
            return None
        scale = max(1.0, samples / self._mean_samples)
        return (self._mean_s + 2 * self._deviation_s) * scale

    def hedge_after_s(self, samples: int) -> float:
        """Return after what time a request is late."""
        expected_s = self.expected_s(samples)
        if expected_s is None:
            return _HEDGE_UNKNOWN_S
        return max(_HEDGE_FLOOR_S, _HEDGE_FACTOR * expected_s)

    def drop_after_s(self, samples: int) -> float:
        """Return after what time it is given up, when another has answered in its place.

        For ever, while its pace is not known: then there is `timeout_s`.
        """
        if not self.is_known:
            return math.inf
        return _DROP_FACTOR * self.hedge_after_s(samples)

    def timeout_s(self, samples: int) -> float:
        """Return after what time it is given up, alone as it may be."""
        expected_s = self.expected_s(samples)
        if expected_s is None:
            return _TIMEOUT_UNKNOWN_S
        return max(_TIMEOUT_FLOOR_S, _TIMEOUT_FACTOR * expected_s)


def is_worth_hedging(own: Pace, other: Pace, samples: int, took_s: float) -> bool:
    """Return whether a request that one teacher has had for `took_s` is given to another as well.

    It must be late, and the other one known to be sooner: how long the first will need is not
    known any more, or not yet.
    """
    other_s = other.expected_s(samples)
    if other_s is None or took_s <= own.hedge_after_s(samples):
        return False
    return took_s > (other_s if own.is_known else _HEDGE_FACTOR * other_s)


class _Trial:
    """Finds the depth behind which more requests in flight bring no more samples per second."""

    def __init__(self) -> None:
        self._began_s: float | None = None  # None: no window is open
        self._samples = 0
        self._requests = 0
        self._rate_before = 0.0  # samples per second at the depth below, while one is tried
        self._is_on_trial = False
        self._patience = 1
        self._windows_left = 1

    def spoil(self) -> None:
        self._began_s = None

    def next_depth(self, depth: int, samples: int, now: float) -> int:
        """Count an answer; return the depth from here on."""
        if self._began_s is None:
            self._began_s, self._samples, self._requests = now, 0, 0
            return depth
        self._samples += samples
        self._requests += 1
        elapsed_s = now - self._began_s
        if elapsed_s < _WINDOW_S or self._requests < _WINDOW_REQUESTS:
            return depth
        rate = self._samples / elapsed_s
        self._began_s = None
        if self._is_on_trial:
            self._is_on_trial = False
            if rate > _GAIN * self._rate_before:
                self._patience = self._windows_left = 1
            else:
                depth -= 1
                self._patience = self._windows_left = min(2 * self._patience, _MOST_PATIENCE)
            return depth
        self._windows_left -= 1
        if self._windows_left <= 0 and depth < MOST_DEPTH:
            self._rate_before = rate
            self._is_on_trial = True
            depth += 1
        return depth
