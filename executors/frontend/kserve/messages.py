"""The messages of `inference.GRPCInferenceService` (Open Inference Protocol v2), described here and made at run time.

Field numbers are those of the public protocol; nothing is generated and no compiler is needed.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE: Final = "inference"
_SCALARS: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
}
# By message: name, number, type. "*" is repeated, "map" a map from strings to parameters, "|" one of several.
_MESSAGES: Final[dict[str, tuple[tuple[str, int, str], ...]]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": (("live", 1, "bool"),),
    "ServerReadyRequest": (),
    "ServerReadyResponse": (("ready", 1, "bool"),),
    "ModelReadyRequest": (("name", 1, "string"), ("version", 2, "string")),
    "ModelReadyResponse": (("ready", 1, "bool"),),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": (("name", 1, "string"), ("version", 2, "string"), ("extensions", 3, "*string")),
    "ModelMetadataRequest": (("name", 1, "string"), ("version", 2, "string")),
    "TensorMetadata": (("name", 1, "string"), ("datatype", 2, "string"), ("shape", 3, "*int64")),
    "ModelMetadataResponse": (
        ("name", 1, "string"),
        ("versions", 2, "*string"),
        ("platform", 3, "string"),
        ("inputs", 4, "*TensorMetadata"),
        ("outputs", 5, "*TensorMetadata"),
    ),
    "InferParameter": (
        ("bool_param", 1, "|bool"),
        ("int64_param", 2, "|int64"),
        ("string_param", 3, "|string"),
        ("double_param", 4, "|double"),
        ("uint64_param", 5, "|uint64"),
    ),
    "InferTensorContents": (
        ("bool_contents", 1, "*bool"),
        ("int_contents", 2, "*int32"),
        ("int64_contents", 3, "*int64"),
        ("uint_contents", 4, "*uint32"),
        ("uint64_contents", 5, "*uint64"),
        ("fp32_contents", 6, "*float"),
        ("fp64_contents", 7, "*double"),
        ("bytes_contents", 8, "*bytes"),
    ),
    "Tensor": (
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
        ("parameters", 4, "map"),
        ("contents", 5, "InferTensorContents"),
    ),
    "RequestedOutput": (("name", 1, "string"), ("parameters", 2, "map")),
    "ModelInferRequest": (
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "map"),
        ("inputs", 5, "*Tensor"),
        ("outputs", 6, "*RequestedOutput"),
        ("raw_input_contents", 7, "*bytes"),
    ),
    "ModelInferResponse": (
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("parameters", 4, "map"),
        ("outputs", 5, "*Tensor"),
        ("raw_output_contents", 6, "*bytes"),
    ),
    "ModelStreamInferResponse": (("error_message", 1, "string"), ("infer_response", 2, "ModelInferResponse")),
}


def _file() -> FileDescriptorProto:
    described = FileDescriptorProto(name="grpc_service.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = described.message_type.add(name=name)
        for field in fields:
            _add(message, *field)
    return described


def _add(message: DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind == "map":
        kind = f"*{message.name}.{_entry(message, name)}"
    if kind.startswith("*"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    kind = kind.lstrip("*|")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _entry(message: DescriptorProto, name: str) -> str:
    """The hidden message of a map from strings to parameters."""
    entry = message.nested_type.add(name=f"{name.title()}Entry")
    entry.options.map_entry = True
    _add(entry, "key", 1, "string")
    _add(entry, "value", 2, "InferParameter")
    return str(entry.name)


_POOL: Final = DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
