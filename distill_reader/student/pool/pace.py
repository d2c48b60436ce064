"""Learn a teacher's speed, and derive the size and the timing of its requests. Pure."""

import math

# Requests grow while answers take less than the first time, and shrink if they take more than the
# second; between the two their size stays. Large requests hide the fixed cost of each. The bound
# keeps a slow teacher from holding up the consumer, also after a teacher has died.
_GROWS_BELOW_S = 0.05
_SHRINKS_ABOVE_S = 1.0
_FIRST_SAMPLES = 32  # of a teacher that has not answered yet
_LEAST_SAMPLES = 16
_MOST_SAMPLES = 1 << 16

_SMOOTHING = 0.2
_HEDGE_FACTOR = 4.0  # times the expected time: late, not merely slow
_HEDGE_FLOOR_S = 0.25  # on a busy host any answer may be late by less
_HEDGE_UNKNOWN_S = 5.0  # a first answer may include loading and tuning kernels
_DROP_FACTOR = 3.0  # times the hedge's delay, if another teacher has answered instead
_TIMEOUT_UNKNOWN_S = 600.0  # a first answer may include building engines and compiling
_TIMEOUT_FACTOR = 50.0
_TIMEOUT_FLOOR_S = 10.0

LEAST_DEPTH = 2  # requests in flight: one is computed while the next one travels
MOST_DEPTH = 6
_WINDOW_S = 0.5  # for which a depth is tried
_WINDOW_REQUESTS = 8
_LEAST_GAIN = 1.1  # factor by which one more request in flight must raise the samples per second
_MOST_PATIENCE = 64  # windows between two trials


class Pace:
    """The pace of one teacher. Times are seconds of any one clock."""

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
        """Whether there were enough answers to rely on what was learned."""
        return self.answers >= 3

    @property
    def sample_s(self) -> float:
        """Seconds per sample, waiting included; 0: not known."""
        return self._mean_s / self._mean_samples

    @property
    def join_samples(self) -> int:
        """The number of samples up to which a request is joined."""
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
        # The first answers did not wait behind others, so later ones take longer.
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
        """Note that a request was given up after this time: the teacher is slower than expected."""
        if self.is_known:
            scale = max(1.0, samples / self._mean_samples)
            self._mean_s = max(self._mean_s, took_s / scale)

    def starved(self) -> None:
        """Note that the teacher waited for work, so its present rate is not its limit."""
        self._trial.spoil()

    def expected_s(self, samples: int) -> float | None:
        """Return the usual time for an answer; None: unknown yet."""
        if not self.is_known:
            return None
        scale = max(1.0, samples / self._mean_samples)
        return (self._mean_s + 2 * self._deviation_s) * scale

    def hedge_after_s(self, samples: int) -> float:
        """Return the time after which a request is late."""
        expected_s = self.expected_s(samples)
        if expected_s is None:
            return _HEDGE_UNKNOWN_S
        return max(_HEDGE_FLOOR_S, _HEDGE_FACTOR * expected_s)

    def drop_after_s(self, samples: int) -> float:
        """Return the time after which a request is given up that another teacher has answered.

        Infinite while the pace is unknown; then only `timeout_s` applies.
        """
        if not self.is_known:
            return math.inf
        return _DROP_FACTOR * self.hedge_after_s(samples)

    def timeout_s(self, samples: int) -> float:
        """Return the time after which a request is given up in any case."""
        expected_s = self.expected_s(samples)
        if expected_s is None:
            return _TIMEOUT_UNKNOWN_S
        return max(_TIMEOUT_FLOOR_S, _TIMEOUT_FACTOR * expected_s)


def is_worth_hedging(own: Pace, other: Pace, samples: int, took_s: float) -> bool:
    """Return whether to send a request, which one teacher has had for `took_s`, to another as well.

    It must be late, and the other teacher must be known to be faster.
    """
    other_s = other.expected_s(samples)
    if other_s is None or took_s <= own.hedge_after_s(samples):
        return False
    return took_s > (other_s if own.is_known else _HEDGE_FACTOR * other_s)


class _Trial:
    """Finds the depth beyond which more requests in flight bring no more samples per second."""

    def __init__(self) -> None:
        self._began_s: float | None = None  # None: no window is open
        self._samples = 0
        self._requests = 0
        self._rate_before = 0.0  # samples per second at the depth before, during a trial
        self._is_on_trial = False
        self._patience = 1
        self._windows_left = 1

    def spoil(self) -> None:
        self._began_s = None

    def next_depth(self, depth: int, samples: int, now: float) -> int:
        """Count an answer; return the depth from now on."""
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
            if rate > _LEAST_GAIN * self._rate_before:
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
