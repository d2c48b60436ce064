"""The student's reader: yields the user's batches with the teachers' predictions."""

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from distill_reader.balance.addresses import registry_addresses
from distill_reader.errors import TeacherGone, UsageError
from distill_reader.protocols.prototxt import read_config
from distill_reader.student import options
from distill_reader.student.batches.items import ITEM_FORMATS, ItemFormat
from distill_reader.student.clients.access import access_of
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.clients.connect import connect
from distill_reader.student.clients.endpoints import endpoints_of, servers_of
from distill_reader.student.labels.frameworks import Framework, check_framework, tensor_maker
from distill_reader.student.labels.labels import Labels
from distill_reader.student.services import Services, combination_of
from distill_reader.student.session import ReaderSession, SessionLock
from distill_reader.student.settings import (
    Policy,
    ReaderSettings,
    with_environment,
)
from distill_reader.student.source import TeacherSource
from distill_reader.tokens import read_student_token


class DistillReader:
    """Yields the items of the user's generator, each followed by the teachers' predictions.

    Items come in the generator's order and each sample once, whatever happens to teachers. Call the
    reader for each epoch:

        reader = DistillReader(ins=["image", "label"], predicts=["score"])
        reader.set_fixed_teacher("10.0.0.1:9292,10.0.0.2:9292")
        reader.set_batch_generator(train_batches)
        for epoch in range(10):
            for image, label, score in reader():
                ...

    The teachers tell which of `ins` they take; the other fields are not sent. The generator runs
    ahead, in a thread of the process that iterates. Its arrays are not copied, so it must not write
    to an array that it has yielded. Setters return the reader.
    """

    def __init__(self, ins: Sequence[str | None], predicts: Sequence[str]) -> None:
        """
        Args:
            ins: a name for each field of the generator's tuples; None: never sent. All fields are
                yielded.
            predicts: names of the outputs wanted, which follow the fields in this order.

        Raises:
            UsageError: a name is wrong.
        """
        for name, value in (("ins", ins), ("predicts", predicts)):
            if isinstance(value, str):
                raise UsageError(f"{name}: expected a list of names, got the text {value!r}")
        _enable_log()
        self._settings = ReaderSettings(ins=tuple(ins), predicts=tuple(predicts))
        self._generator: Any = None  # None: not set yet
        self._kind = ""  # "": not set yet
        self._is_spent = False  # it is an iterator, and was iterated over
        self._services = Services()

    # --- teachers

    def set_fixed_teacher(self, teachers: Sequence[str] | str) -> Self:
        """Use these teachers: a list of endpoints, or a text with commas.

        An endpoint is `host:port` (the reader finds out the protocol), or begins with `fast://`,
        `grpc://`, `http://` (Open Inference Protocol), `grpcs://`, `https://` (the same by TLS),
        `serving://`, `serving+grpc://` (Paddle Serving). `/MODEL` at its end names the model of a
        teacher that serves several, `/PATH/MODEL` one behind an ingress that wants a path (HTTP).
        """
        return self._set(
            teachers=endpoints_of(teachers),
            discovery_servers=(),
            service_name=None,
            combined_services=(),
        )

    def set_dynamic_teacher(
        self,
        discovery_servers: Sequence[str] | str,
        teacher_service_name: str,
        require_max_teacher: int = 1,
    ) -> Self:
        """Use the teachers that a discovery service assigns to this student.

        They change as teachers and students come and go. While no discovery server answers, the
        reader keeps its teachers; no error is raised.

        Args:
            discovery_servers: `host:port` of one or several servers, or `redis://host:port` to use
                their Redis directly: a list, or a text with commas. All share one registry.
            teacher_service_name: the service whose teachers are wanted, as they have registered.
            require_max_teacher: the most teachers to use at once, 1 or more.
        """
        return self._set(
            discovery_servers=servers_of(discovery_servers),
            service_name=teacher_service_name,
            require_max_teacher=require_max_teacher,
            teachers=(),
            combined_services=(),
        )

    def set_require_max_teacher(self, require_max_teacher: int) -> Self:
        """Set how many teachers to ask a discovery service for; a fixed list is used whole."""
        return self._set(require_max_teacher=require_max_teacher)

    def set_teacher_batch_size(self, teacher_batch_size: int = 1) -> Self:
        """Limit the samples of one request; by default its bytes are, to 4 to 12 MiB.

        Teachers join requests of all students by themselves, so this is rarely needed.
        """
        if teacher_batch_size is None:
            raise UsageError("teacher_batch_size: expected an integer of 1 or more, got None")
        return self._set(teacher_batch_size=teacher_batch_size)

    def set_serving_conf_file(self, conf_file: str | os.PathLike[str]) -> Self:
        """Read names, types and shapes from a client prototxt of Paddle Serving.

        For teachers that cannot tell them: Paddle Serving's own.
        """
        if not Path(conf_file).is_file():
            raise UsageError(f"conf_file: {os.fspath(conf_file)} is not a file")
        return self._set(conf_file=os.fspath(conf_file))

    def set_no_teacher_timeout(
        self, no_teacher_timeout_s: float | None, policy: Policy = "raise"
    ) -> Self:
        """Set how long to wait if no teacher answers, and what to do then.

        Args:
            no_teacher_timeout_s: None, the default: wait without limit, and log it every 10 s.
            policy: "raise": raise NoTeacher at the first missing predictions. "skip": yield the
                fields with None for each prediction until a teacher answers again.
        """
        return self._set(no_teacher_timeout_s=no_teacher_timeout_s, no_teacher_policy=policy)

    def set_timeout(self, timeout_s: float | None) -> Self:
        """Set how long an answer may take; after that the request goes to another teacher.

        Args:
            timeout_s: for one request, after the requests before it are answered. None, the
                default: 10 minutes for the first answers of a teacher, then 50 times its usual
                time, and at least 10 s.
        """
        return self._set(answer_timeout_s=timeout_s)

    def set_hedging(self, hedging: bool) -> Self:
        """Set whether a late request is sent to a second teacher as well.

        By default it is, if that teacher is known to be faster and no other work waits for it.
        """
        return self._set(hedging=hedging)

    def set_mixed_versions(self, mixed_versions: bool) -> Self:
        """Set whether teachers with different models or versions may answer in one iteration.

        By default, teachers that differ from the first one are left out.
        """
        return self._set(mixed_versions=mixed_versions)

    def set_max_memory(self, mebibytes: int) -> Self:
        """Bound the memory between generator and consumer, 256 MiB by default."""
        return self._set(max_memory_bytes=options.to_bytes("max_memory: mebibytes", mebibytes))

    def set_teachers_combined(
        self,
        teachers: Mapping[str, Sequence[str] | str | options.Discovered],
        *,
        weights: Mapping[str, float] | None = None,
        of: options.OutputKind = "probabilities",
    ) -> Self:
        """Ask several services, and yield the weighted mean of their predictions.

        Args:
            teachers: by a name of your choice, the endpoints of a service as for
                `set_fixed_teacher`, or `Discovered(...)`. Each service has the same names of inputs
                and outputs.
            weights: by the same names; the default is 1.
            of: what the outputs are, and so what is averaged: "probabilities" or "logits".
        """
        return self._set(
            combined_services=options.combined_services(teachers, weights or {}),
            combined_kind=of,
            teachers=(),
            discovery_servers=(),
            service_name=None,
        )

    def set_teacher_access(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Show headers to all teachers, and say whose certificates are trusted.

        For teachers behind an ingress, fixed or discovered. Headers need a protocol that has them:
        HTTP or gRPC, not the fast path.

        Args:
            headers: as {"Authorization": "Bearer ..."}, which then replaces the token. `Host` is
                the name by which an ingress finds the teacher, and whose certificate is expected.
            ca_file: certificates in PEM that those of `https://` and `grpcs://` teachers are
                checked against; None: the system's.
        """
        return self._set(access=access_of(headers, None if ca_file is None else os.fspath(ca_file)))

    # --- what you get

    def set_tensors(self, framework: Framework | None) -> Self:
        """Yield tensors of the student's framework instead of numpy arrays.

        All arrays and numpy numbers become tensors, the fields' as the predictions', except texts
        and types that the frameworks do not have. In an elastic loop it is not needed: the loop
        makes tensors of what `reader=` yields, and moves them to the model's device.

        Args:
            framework: "torch": tensors in host memory, which they share with the arrays. "paddle":
                tensors on Paddle's current device. None, the default: arrays, as they are.

        Raises:
            UsageError: there is no such framework, or it is not installed.
        """
        if framework is not None:
            check_framework(framework)
        return self._set(tensors=framework)

    # --- what travels

    def set_wire_dtype(
        self, *, ins: str | Mapping[str, str] | None = None, predicts: str | None = None
    ) -> Self:
        """Send fewer bytes per value. The model computes in its own types.

        Args:
            ins: "uint8": the fields are raw pixels, which the teacher normalizes
                (`edl serve --normalize`). Or {field: "uint8"} for some of them. None: fields are
                sent as the teachers take them.
            predicts: "float16": teachers send predictions in half precision; you get the type that
                they serve. None: as they are.
        """
        names = [name for _, name in self._settings.sent]
        return self._set(
            wire_ins=options.check_wire_ins(ins, names),
            wire_predicts=options.check_wire_predicts(predicts),
        )

    def set_padding(
        self,
        fields: str | Mapping[str, float] | None,
        value: float = 0,
        *,
        multiple_of: int = 64,
        outputs: Sequence[str] | None = None,
    ) -> Self:
        """Pad samples of different lengths to the next multiple, so that they share requests.

        Only samples of one shape are computed together. You get the fields as they were. The model
        must give the same result for a padded sample; most need the mask as a field of its own. One
        sample is asked for as it is, too, and another result is an error.

        Args:
            fields: the field to pad on its first axis (in batches, the first after the samples);
                or several of equal length, each with its padding value. None, the default: no
                padding.
            value: the padding value, if `fields` is one name.
            multiple_of: lengths become the next multiple of it.
            outputs: outputs with a value per position, which are cut to the sample's length. The
                others stay as they are. None: there are none; an error if a teacher reports an
                output that may have one.
        """
        if fields is None:
            return self._set(padding=None)
        values = {fields: value} if isinstance(fields, str) else fields
        if not isinstance(values, Mapping):
            raise UsageError(
                f"padding: fields: expected a name, or padding values by name, got {fields!r}"
            )
        if isinstance(outputs, str):
            raise UsageError(f"padding: outputs: expected a list of names, got {outputs!r}")
        padding = options.Padding(
            values=tuple(values.items()),
            multiple_of=multiple_of,
            outputs=None if outputs is None else tuple(outputs),
        )
        return self._set(padding=padding)

    def set_top_k(
        self,
        k: int | None,
        *,
        of: options.OutputKind = "probabilities",
        rest: options.Rest = "uniform",
        dense: bool = True,
        predicts: Sequence[str] | None = None,
        classes: int | None = None,
    ) -> Self:
        """Let teachers send only the `k` largest values of the last axis, with their indices.

        Args:
            k: how many; None, the default: all values.
            of: what the outputs are: "probabilities" or "logits".
            rest: "uniform": the rest of the mass is spread evenly over the other classes;
                "renormalize": they get nothing, and the k values sum to 1.
            dense: yield (B, C) rows; if False, two arrays per output, values and indices (int64).
            predicts: the outputs that this applies to; None: all.
            classes: C, for teachers that do not tell it; None: they do.
        """
        if k is None:
            return self._set(top_k=None)
        names = None if predicts is None else tuple(predicts)
        top_k = options.TopK(k=k, of=of, rest=rest, dense=dense, predicts=names, classes=classes)
        return self._set(top_k=top_k)

    # --- what is not asked again

    def set_cache(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        id: str = "id",
        variant: str | None = None,
        max_mebibytes: int = 10 << 10,
        teacher_version: str | None = None,
        data: str | None = None,
    ) -> Self:
        """Cache predictions on disk, and ask teachers only for samples that are not cached.

        A sample must be the same whenever it comes. With random augmentation, use no cache, or name
        what determines the augmentation as `variant`.

        Args:
            folder: on a local disk; readers and trainers of one machine may share it. None, the
                default: no cache.
            id: the name in `ins` of the field with the samples' ids, integers or texts. An id must
                always mean the same sample. It is not sent.
            variant: the name in `ins` of the field with the seed (or epoch) of the augmentation,
                one per sample or one per batch. It is not sent. None: nothing is random.
            max_mebibytes: bound of the folder. If it is full, versions that no process uses are
                removed; then nothing more is added.
            teacher_version: a text that names model and version, for teachers that do not tell
                theirs, or to read the cache without any teacher. None: teachers tell.
            data: a text that names the data set and its preparation, such as
                `imagenet-train@224`: labels are only found under the same name. None: not set.
                Changed inputs are then detected by their types and by a checksum of one sample in
                64, and raise an error.
        """
        if folder is None:
            return self._set(cache=None)
        return self._set(
            cache=options.CacheOptions(
                folder=options.cache_folder(folder),
                id=id,
                variant=variant,
                max_bytes=options.to_bytes("cache: max_mebibytes", max_mebibytes),
                teacher_version=teacher_version,
                data=data,
            )
        )

    # --- data

    def set_sample_generator(self, reader: Any) -> Self:
        """Read from `reader`, which yields a tuple of fields per sample.

        `reader` is a function that returns an iterator, called for every epoch, or an iterable; an
        iterator itself is for one epoch.
        """
        return self._set_generator(reader, "sample")

    def set_sample_list_generator(self, reader: Any) -> Self:
        """Read from `reader`, which yields a list of such tuples per batch."""
        return self._set_generator(reader, "sample list")

    def set_batch_generator(self, reader: Any) -> Self:
        """Read from `reader`, which yields a tuple of arrays per batch, samples on axis 0.

        A `DataLoader` of PyTorch or Paddle will do, also with worker processes: give it itself, or
        a function that returns it.
        """
        return self._set_generator(reader, "batch")

    def __call__(self) -> Generator[Any, None, None]:
        """Return one pass over the generator.

        Threads and connections start with the first item, and end with the last one, an error,
        a `break` out of the `for`, or `close` of what is returned.

        Raises:
            UsageError: something is not set, or a variable PADDLE_DISTILL_* or EDL_TEACHER_TOKEN*
                is wrong.
        """
        if self._generator is None:
            raise UsageError(
                "reader: nothing to read; call set_sample_generator, set_sample_list_generator or "
                "set_batch_generator first"
            )
        if self._is_spent:
            raise UsageError(
                "reader: it was given an iterator, which can be read once, and this is a further "
                "epoch: give a function that returns one, or a list"
            )
        settings = with_environment(self._settings, os.environ)
        read_student_token(os.environ)  # later, what cannot be read is waited for
        sources = self._services.sources(settings)
        self._is_spent = hasattr(self._generator, "__next__")
        return self._iterate(self._generator, self._kind, settings, sources)

    def print_config(self) -> None:
        """Print the settings, with environment variables applied."""
        settings = with_environment(self._settings, os.environ)
        print("------ DistillReader ------")  # noqa: T201  the method's purpose
        for field in fields(settings):
            value = getattr(settings, field.name)
            if field.name == "discovery_servers":  # without the password of a Redis
                value = tuple(map(str, registry_addresses(value, field.name))) if value else value
            print(f"{field.name}: {value}")  # noqa: T201
        print(f"generator: {self._kind or 'not set'}")  # noqa: T201
        print("---------------------------")  # noqa: T201

    # --- helpers

    def _set(self, **changes: Any) -> Self:
        self._settings = replace(self._settings, **changes)
        return self

    def _set_generator(self, reader: Any, kind: str) -> Self:
        if not callable(reader) and not hasattr(reader, "__iter__"):
            raise UsageError(
                f"reader: expected a function that returns an iterator, got {reader!r}"
            )
        self._generator, self._kind, self._is_spent = reader, kind, False
        return self

    def _connector(self, settings: ReaderSettings) -> Callable[[str], TeacherClient]:
        config = None if settings.conf_file is None else read_config(settings.conf_file).spec("")
        return partial(
            _connect,
            config=config,
            access=settings.access,
            mixes_versions=settings.mixed_versions and settings.cache is None,
        )

    def _iterate(
        self,
        generator: Any,
        kind: str,
        settings: ReaderSettings,
        sources: Mapping[str, TeacherSource],
    ) -> Generator[Any, None, None]:
        labels = Labels(settings.predicts, settings.wire_predicts, settings.top_k)
        item_format: ItemFormat = ITEM_FORMATS[kind](
            settings.sent, len(settings.ins), len(labels.arrays), settings.padding, labels.arrays
        )
        lock = SessionLock()
        session = ReaderSession(
            generator,
            item_format,
            self._services.streams(settings, labels, sources, lock, self._connector(settings)),
            lock,
            combine=combination_of(settings),
            key_positions=settings.key_positions,
        )
        try:
            if settings.tensors is None:
                yield from session.results()
            else:
                yield from map(tensor_maker(settings.tensors), session.results())
        finally:
            session.close()


def _enable_log() -> None:
    """Say what a student waits for, also where the script sets up logging (`dictConfig`).

    That has disabled the loggers of what was imported before, unless it said otherwise.
    """
    for name, each in [*logging.root.manager.loggerDict.items()]:
        if name.startswith("distill_reader.") and isinstance(each, logging.Logger):
            each.disabled = False


def _connect(endpoint: str, **options: Any) -> TeacherClient:
    """Connect to a teacher as this process is told by now.

    Raises:
        TeacherGone: also where the token, which could be read as the pass began, cannot now: its
            file is about to be written, or there are no descriptors left.
        DistillError: as `connect`.
    """
    try:
        token = read_student_token(os.environ)
    except UsageError as error:
        raise TeacherGone(f"{endpoint}: {error}") from error
    return connect(endpoint, token=token, **options)
