"""See whether a script changes what is committed while its next step is open.

After a crash the ranks that are left put away what they have committed. What the script has
changed since then, above `for batch in step:` or before `step.update()`, it changes again where the
training goes on from there: a moving average would move twice.
"""

import time
from collections.abc import Callable
from typing import Any

from pod_runtime.trainer.frameworks.plain_values import differ

_ALWAYS = 4  # looks of a process that may take as long as they do
_SHARE = 500  # of the time that passes, later looks take one part


class OpenStep:
    """Compares the state with what the last commit has left.

    It looks in a process's first steps, in the first step of each epoch, and in as many others as
    cost nothing. What a script has changed once in one of these others counts as changed from then
    on.
    """

    def __init__(self, marks: Callable[[], dict[str, Any]]) -> None:
        """`marks` returns plain values that tell what is there, by what to call it."""
        self._marks = marks
        self._committed: dict[str, Any] | None = None  # None: this commit was not looked at
        self._looks = 0
        self._due_at = 0.0  # by time.monotonic()
        self._always = self._now = ""  # what the script changes; "": nothing

    @property
    def changed(self) -> str:
        """What the script has changed since the last commit; "": nothing that was seen."""
        return self._now or self._always

    def begin(self, *, of_epoch: bool) -> None:
        """A step is committed, or an epoch."""
        self._committed, self._now = None, ""
        began_at = time.monotonic()
        if self._always:
            return
        if of_epoch or self._looks < _ALWAYS or began_at >= self._due_at:
            self._committed = self._marks()
            self._looks += 1
            ended_at = time.monotonic()
            self._due_at = ended_at + 3 * _SHARE * (ended_at - began_at)  # two more follow

    def look(self, *, amid_epoch: bool = False) -> None:
        """See what the script has changed since; no shard is being computed."""
        if self._committed is None:
            return
        for name, each in self._marks().items():
            if name not in self._committed or differ(self._committed[name], each):
                self._committed, self._now = None, name
                if amid_epoch:
                    self._always = name
                return
