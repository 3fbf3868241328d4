"""Requests and answers of KServe v2 in tensors: text or token ids in, text out.

Tensor names follow the convention of public text-generation servers. Shapes are exact; nothing unknown is let pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from executors.frontend.errors import invalid
from executors.frontend.kserve.messages import message
from executors.frontend.requests.fields import Fields
from executors.frontend.requests.nvext import token_ids
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.sampling import read_sampling, read_stops
from executors.frontend.requests.wanted import Extensions, Prompt, TextPrompt, TokenPrompt, Wanted
from executors.frontend.run import Done, Run

INPUTS: Final = (("text_input", "BYTES", [1]), ("input_ids", "INT32", [-1]), ("streaming", "BOOL", [1]))
OUTPUTS: Final = (
    ("text_output", "BYTES", [1]),
    ("finish_reason", "BYTES", [1]),
    ("prompt_tokens", "INT32", [1]),
    ("completion_tokens", "INT32", [1]),
)
_PARAMETERS: Final = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "priority"}
)
_FINAL: Final = "triton_final_response"
_CONTENTS: Final = {"BYTES": "bytes_contents", "INT32": "int_contents", "BOOL": "bool_contents"}
_INT32: Final = 2**31


def read_infer(request: Any, rules: Rules) -> Wanted:
    """What a `ModelInferRequest` asks for. Raises ApiError for tensors and parameters that are not known or wrong."""
    tensors = _tensors(request)
    given = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
    for name in given:
        if name not in _PARAMETERS:
            raise invalid(name[:64], "unknown parameter", "unknown_parameter")
    given["stop"] = _stops(given.get("stop"))
    body = Fields(given)
    asked = Wanted(
        model=request.model_name,
        prompts=(_prompt(tensors),),
        max_tokens=body.integer("max_tokens", 1),
        stops=read_stops(body, "stop", rules.limits.stops),
        sampling=read_sampling(body, rules, logprobs=None, greedy=False),
        stream=bool(tensors.get("streaming", [False])[0]),
        extensions=Extensions(priority=body.integer("priority", -_INT32, _INT32 - 1) or 0),
    )
    for output in request.outputs:
        if output.name not in {name for name, _, _ in OUTPUTS}:
            raise invalid(output.name[:64], "there is no such output")
    return asked


def _prompt(tensors: Mapping[str, Sequence[Any]]) -> Prompt:
    if ("text_input" in tensors) == ("input_ids" in tensors):
        raise invalid("text_input", "send either text_input or input_ids")
    if "input_ids" in tensors:
        return TokenPrompt(token_ids=token_ids("input_ids", list(tensors["input_ids"])))
    try:
        return TextPrompt(text=tensors["text_input"][0].decode("utf-8"))
    except UnicodeDecodeError:
        raise invalid("text_input", "is not UTF-8") from None


def _tensors(request: Any) -> dict[str, Sequence[Any]]:
    """Values by name of tensor, from typed or raw contents."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"{len(raw)} given for {len(request.inputs)} inputs")
    known = {name: (kind, shape) for name, kind, shape in INPUTS}
    made: dict[str, Sequence[Any]] = {}
    for at, tensor in enumerate(request.inputs):
        if tensor.name not in known or tensor.name in made:
            raise invalid(tensor.name[:64], "is no input, or stands twice")
        kind, shape = known[tensor.name]
        if tensor.datatype != kind:
            raise invalid(tensor.name, f"must be {kind}, is {tensor.datatype[:16]!r}")
        values = _raw(tensor.name, kind, raw[at]) if raw else list(getattr(tensor.contents, _CONTENTS[kind]))
        if list(tensor.shape) != [len(values)] or not values or (shape == [1] and len(values) != 1):
            wanted = "[1]" if shape == [1] else "[n]"
            raise invalid(tensor.name, f"must have the shape {wanted} and as many values")
        made[tensor.name] = values
    return made


def _raw(name: str, kind: str, data: bytes) -> Sequence[Any]:
    """Values as Triton writes them: little-endian; bytes with their length in front."""
    if kind == "INT32" and len(data) % 4 == 0:
        return struct.unpack(f"<{len(data) // 4}i", data)
    if kind == "BOOL":
        return [bool(one) for one in data]
    if kind == "BYTES" and len(data) >= 4 and struct.unpack_from("<I", data)[0] == len(data) - 4:
        return [data[4:]]
    raise invalid(name, "its raw contents do not fit its type")


def _stops(text: object) -> object:
    """Stop strings come as a JSON list in a string."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise invalid("stop", "must be a JSON list of strings") from None


def response(request: Any, text: str, done: Done | None = None, run: Run | None = None) -> Any:
    """Text, and with the last how it ended."""
    values: dict[str, object] = {"text_output": text.encode()}
    if done is not None and run is not None:
        usage = run.usage()
        values["finish_reason"] = done.finish.encode()
        values["prompt_tokens"] = usage.prompt_tokens
        values["completion_tokens"] = usage.completion_tokens
    made = message("ModelInferResponse")(model_name=request.model_name, model_version="1", id=request.id)
    for name, kind, shape in OUTPUTS:
        if name in values:
            contents = message("InferTensorContents")(**{_CONTENTS[kind]: [values[name]]})
            made.outputs.append(message("Tensor")(name=name, datatype=kind, shape=shape, contents=contents))
    made.parameters[_FINAL].bool_param = done is not None
    return made
