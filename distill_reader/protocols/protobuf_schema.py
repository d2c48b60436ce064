"""Make protobuf message classes at run time. Generated code would demand one protobuf version.

Other packages in an environment pin protobuf, each to a version of its own. Classes made at run
time work with every version from 3.20 on.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in (
        "double", "float", "int64", "uint64", "int32", "bool", "string", "bytes", "uint32"
    )
}  # fmt: skip


def message_classes(
    package: str, schema: Mapping[str, str], *, syntax: str = "proto3"
) -> dict[str, Any]:
    """Return the message classes of a package by name ("Outer.Inner" for nested ones).

    Args:
        schema: message name -> its fields, separated by ";" as .proto files write them:
            "TYPE NAME = NUMBER", "repeated TYPE NAME = NUMBER" or
            "map<string, TYPE> NAME = NUMBER". TYPE: a scalar, or a message of the schema.
        syntax: "proto2" writes fields that are set to their default, "proto3" leaves them out.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"edl/{package}.proto", package=package, syntax=syntax
    )
    found: dict[str, Any] = {}
    for name, text in schema.items():
        outer, _, inner = name.rpartition(".")
        found[name] = message = (found[outer].nested_type if outer else file.message_type).add(
            name=inner
        )
        for line in filter(None, map(str.strip, text.split(";"))):
            _add_field(message, f".{package}.", name, line)
    pool = descriptor_pool.DescriptorPool()  # a private one: others may describe the same
    pool.AddSerializedFile(file.SerializeToString())
    return {name: _message_class(pool, f"{package}.{name}") for name in schema}


def _add_field(message: Any, prefix: str, name: str, line: str) -> None:
    head, _, number = line.rpartition("=")
    kind, field_name = head.rsplit(maxsplit=1)
    field = message.field.add(name=field_name, number=int(number))
    field.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    if kind.startswith("map<"):
        entry_name = "".join(part.capitalize() for part in field_name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, prefix, f"{name}.{entry_name}", "string key = 1")
        value = kind.removeprefix("map<string,").removesuffix(">").strip()
        _add_field(entry, prefix, f"{name}.{entry_name}", f"{value} value = 2")
        kind = f"repeated {name}.{entry_name}"
    if kind.startswith("repeated "):
        kind = kind.removeprefix("repeated ").strip()
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = prefix + kind


def _message_class(pool: Any, full_name: str) -> Any:
    descriptor = pool.FindMessageTypeByName(full_name)
    if hasattr(message_factory, "GetMessageClass"):  # from 4.22 on
        return message_factory.GetMessageClass(descriptor)
    factory: Any = message_factory.MessageFactory(pool)
    return factory.GetPrototype(descriptor)
