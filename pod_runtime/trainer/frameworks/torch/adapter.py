"""The loop's `Adapter` for PyTorch. Only this folder imports it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.frameworks.adapter import GroupSpec, Subgroup
from pod_runtime.trainer.frameworks.torch import group as torch_group
from pod_runtime.trainer.frameworks.torch.checks import (
    SchedulerCheck,
    TorchGradientMarks,
    check_arguments,
    trained_parameters,
)
from pod_runtime.trainer.frameworks.torch.gradients import TorchGradientExchange, TorchShardBuffers
from pod_runtime.trainer.frameworks.torch.state import TorchState, terms_of
from pod_runtime.trainer.frameworks.torch.unowned import TorchUnownedParameters
from pod_runtime.trainer.layout import StateLayout


class TorchAdapter:
    """One model and its optimizer on this process's device."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        header_size: int,
        schedulers: Sequence[Any] = (),
        scaler: Any | None = None,
        extra: Mapping[str, Any] | None = None,
        all_reduce: str = "flat",
        join_on_gpu: bool = False,
    ) -> None:
        """Look at the model; nothing is changed yet.

        Args:
            all_reduce: "flat"; "overlapped" is not there for PyTorch.
            join_on_gpu: without effect: no second group is formed.

        Raises:
            UsageError: the model cannot be trained elastically; the text says what to change.
        """
        model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        check_arguments(model, optimizer, schedulers, extra or {}, all_reduce)
        parameters = trained_parameters(model, optimizer)
        self._model, self._optimizer = model, optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = parameters[0].device
        self._state = TorchState(model, optimizer, schedulers, self._scaler, extra or {})
        self._buffers = TorchShardBuffers(model)
        self._header_size = header_size
        self._parameters = list(model.parameters())  # frozen ones, too
        self._frozen = self._what_is_frozen()
        self._exchange = TorchGradientExchange(parameters, self._buffers, header_size)
        self._unowned = TorchUnownedParameters(model, optimizer)
        self._marks = TorchGradientMarks(model, optimizer)
        self._scheduler_check = SchedulerCheck(optimizer, schedulers)
        self._rank, self._world_size = 0, 1
        self._group: Any | None = None  # None: the default one
        self._subgroups: list[Any | None] = []  # None: one that this rank is not in

    def terms(self) -> dict[str, Any]:
        return terms_of(self._model, self._optimizer, self._device)

    # --- group

    def form_group(self, spec: GroupSpec) -> None:
        self._rank, self._world_size = spec.rank, spec.world_size
        torch_group.form(spec, self._device)

    def form_subgroups(self, parts: Sequence[Subgroup]) -> None:
        try:
            for part in parts:
                self._subgroups.append(dist.new_group(list(part.ranks)))
        except RuntimeError as error:
            raise PeerLost(f"a group for a loss was not formed: {error}") from error

    def use_subgroup(self, index: int, spec: GroupSpec) -> None:
        self._group = self._subgroups[index]
        self._rank, self._world_size = spec.rank, spec.world_size

    def why_no_second_group(self) -> str:
        return "with PyTorch a trainer cannot form a second group yet"

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> NoReturn:
        raise PeerLost(self.why_no_second_group())

    def adopt(self, group: Any) -> NoReturn:
        raise PeerLost(self.why_no_second_group())

    def all_reduce(self, values: npt.NDArray[np.float64]) -> None:
        if self._world_size > 1:
            tensor = torch.from_numpy(values).to(self._device)
            self._reduce(tensor)
            values[:] = tensor.cpu().numpy()

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        if self._world_size > 1 and data.size:
            tensor = torch.from_numpy(data).to(self._device)
            try:
                dist.broadcast(tensor, group=self._group, group_src=source)
            except RuntimeError as error:
                raise PeerLost(f"broadcast from rank {source}: {error}") from error
            data[:] = tensor.cpu().numpy()

    def _reduce(self, tensor: Any) -> None:
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:  # a peer closed its end
            raise PeerLost(f"all-reduce: {error}") from error

    # --- state

    def layout(self) -> StateLayout:
        self._buffers.own.take_back()
        return self._state.layout()

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        self._state.copy_out(target, start, stop)

    def scalars(self) -> dict[str, Any]:
        return self._state.scalars()

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        self._buffers.own.take_back()
        self._state.load(layout, data, scalars)
        self._unowned.forget()

    def load_again(self) -> None:
        self._state.load_again()

    def watch(self) -> None:
        self._state.watch()

    def watched(self) -> tuple[dict[str, bool], bool]:
        return self._state.watched()

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        self._state.traits.set_modes(modes)

    def uncarried_changes(self) -> list[str]:
        return self._state.traits.uncarried_changes()

    def unowned(self) -> list[str]:
        return self._unowned.names

    def check_unowned(self) -> None:
        self._unowned.check()

    # --- a step

    def begin_step(self) -> None:
        self._unowned.note()
        self._buffers.begin_step()

    def end_shard(self) -> None:
        self._buffers.end_shard()

    def backward(self, loss: Any, weight: float, is_last: bool = False) -> None:
        self._marks.check()
        self._buffers.loss.add(loss, weight)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward(torch.full_like(loss, weight))
        self._marks.note()

    def exchange(self, header: Sequence[float], contribute: bool) -> list[float]:
        if contribute:
            self._marks.check()
        if self._world_size == 1:
            return [float(value) for value in header]
        frozen = self._what_is_frozen()
        if frozen != self._frozen:  # a script may unfreeze layers as the training goes on
            self._frozen = frozen
            self._exchange = TorchGradientExchange(
                trained_parameters(self._model, self._optimizer), self._buffers, self._header_size
            )
        return self._exchange.run(header, contribute, self._reduce)

    def step_loss(self) -> Any:
        return self._buffers.loss.value

    def _what_is_frozen(self) -> list[bool | int]:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return [*(each.requires_grad for each in self._parameters), count]

    def apply(self, *, filled_shards: int, lr_factor: float, max_norm: float | None = None) -> None:
        self._scheduler_check.check()
        if self._world_size > 1:
            self._exchange.put_back(filled_shards)
        else:
            self._buffers.apply(self._buffers.changes(), filled_shards)
        if max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            groups = self._optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([p for each in groups for p in each["params"]], max_norm)
        with self._learning_rate(lr_factor):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
        self.drop_step()

    def drop_step(self) -> None:
        self._marks.forget()
        # Not zeroed but gone: a parameter that no shard of the next step uses must look the same
        # to a trainer that has just been restored and to one that has run for hours.
        self._optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _learning_rate(self, factor: float) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        if factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    # --- data and numbers

    def seed(self, key: int) -> None:
        key &= 0x7FFFFFFFFFFFFFFF
        if self._device.type != "cpu":
            torch.manual_seed(key)
            return
        # `torch.manual_seed` takes a millisecond: for each kind of device that may be used later
        # it formats the stack. A model on the CPU draws from this generator alone.
        torch.default_generator.manual_seed(key)

    def draw(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_())

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def to_batch(self, fields: Any) -> Any:
        if isinstance(fields, np.ndarray):
            fields = torch.from_numpy(fields if fields.flags.writeable else fields.copy())
        if isinstance(fields, torch.Tensor):
            return fields.to(self._device, non_blocking=True)
        if isinstance(fields, tuple) and hasattr(fields, "_fields"):
            return type(fields)(*(self.to_batch(each) for each in fields))
        if isinstance(fields, list | tuple):
            return type(fields)(self.to_batch(each) for each in fields)
        if isinstance(fields, dict):
            return {name: self.to_batch(each) for name, each in fields.items()}
        return fields

    def loader(
        self,
        dataset: Any,
        index_batches: Iterator[list[Any]],
        *,
        collate: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
        on_host: bool = False,
    ) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_IndexBatches(index_batches),
            collate_fn=collate,
            # Its own: the seed of its workers must not be drawn from the training's numbers.
            generator=torch.Generator(),
            **options,
        )
        return iter(loader)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        with self._state.traits.evaluating(), torch.no_grad():
            yield

    def to_float(self, value: Any) -> float:
        return float(value.item()) if hasattr(value, "item") else float(value)


class _IndexBatches:
    """Hands lists of indices to the loader, which iterates over it once."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches
