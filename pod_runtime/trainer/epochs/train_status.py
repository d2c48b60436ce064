"""Which epoch a checkpoint of the original's calls stands for."""

from dataclasses import dataclass

from pod_runtime.trainer.errors import UsageError


@dataclass(slots=True)
class TrainStatus:
    """The last epoch that is completed; -1: none is.

    After the class of this name of PaddlePaddle 1.8's collective fleet. A state of the elastic loop
    says more: `loop_status.LoopStatus`.
    """

    epoch_no: int = -1

    def __post_init__(self) -> None:
        if type(self.epoch_no) is not int or self.epoch_no < -1:
            raise UsageError(
                f"epoch_no: expected the number of the last completed epoch, from 0 on, or -1 for "
                f"none, got {self.epoch_no!r}"
            )

    def next(self) -> int:
        """Return the number of the first epoch that is left to train."""
        return self.epoch_no + 1
