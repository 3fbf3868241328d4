"""A client of KServe v2 over gRPC: requests in tensors, calls, answers as plain values."""

from __future__ import annotations

from typing import Any

from executors.frontend.kserve.messages import message

TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
_SERVICE = "/inference.GRPCInferenceService"


def infer_request(
    model: str, *, streaming: bool = False, request_id: str = "r1", text: str = "one", **parameters: object
) -> Any:
    """A `ModelInferRequest` for a text."""
    made = message("ModelInferRequest")(model_name=model, id=request_id)
    made.inputs.append(message("Tensor")(**TEXT, contents={"bytes_contents": [text.encode()]}))
    flag = {"name": "streaming", "datatype": "BOOL", "shape": [1]}
    made.inputs.append(message("Tensor")(**flag, contents={"bool_contents": [streaming]}))
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def unary(channel: Any, name: str) -> Any:
    """The call of that name; takes a request."""
    return channel.unary_unary(
        f"{_SERVICE}/{name}", lambda one: one.SerializeToString(), message(f"{name}Response").FromString
    )


def stream(channel: Any) -> Any:
    """An open stream: write requests, read answers."""
    return channel.stream_stream(
        f"{_SERVICE}/ModelStreamInfer",
        lambda one: one.SerializeToString(),
        message("ModelStreamInferResponse").FromString,
    )()


def outputs(answer: Any) -> dict[str, Any]:
    """Values of an answer by name."""
    kinds = {"BYTES": "bytes_contents", "INT32": "int_contents"}
    return {one.name: getattr(one.contents, kinds[one.datatype])[0] for one in answer.outputs}
