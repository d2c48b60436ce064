"""Teachers of other makers: small servers whose messages are built by protobuf and json alone.

They serve the model of local_teacher.SPEC. Nothing of ours is used but its function.
"""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from distill_reader.student.clients.client import Array
from tests.distill_reader.student.local_teacher import sums

_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4  # frames of HTTP/2
_LABELS = {"one": 1, "many": 3}
_TYPES = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9,
    "bytes": 12, "uint32": 13,
}  # fmt: skip


def _messages(package: str, fields: Mapping[str, list[tuple[str, int, str, str]]]) -> Any:
    """Build messages from (name, number, label, type) of their fields."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"foreign/{package}.proto", package=package, syntax="proto3"
    )
    for message, entries in fields.items():
        described = file.message_type.add(name=message)
        for name, number, label, kind in entries:
            field = described.field.add(name=name, number=number, label=_LABELS[label])
            if kind in _TYPES:
                field.type = _TYPES[kind]  # type: ignore[assignment]
            else:
                field.type, field.type_name = 11, f".{package}.{kind}"  # type: ignore[assignment]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [f"{package}.{message}" for message in fields]
    return {
        name.rpartition(".")[2]: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        for name in names
    }


_TENSOR = [
    ("name", 1, "one", "string"),
    ("datatype", 2, "one", "string"),
    ("shape", 3, "many", "int64"),
]
OIP = _messages(
    "inference",
    {
        "Contents": [("fp32_contents", 6, "many", "float"), ("int64_contents", 3, "many", "int64")],
        "Metadata": _TENSOR,
        "ModelMetadataRequest": [("name", 1, "one", "string")],
        "ModelMetadataResponse": [
            ("name", 1, "one", "string"),
            ("versions", 2, "many", "string"),
            ("platform", 3, "one", "string"),
            ("inputs", 4, "many", "Metadata"),
            ("outputs", 5, "many", "Metadata"),
        ],
        "Tensor": [*_TENSOR, ("contents", 5, "one", "Contents")],
        "Wanted": [("name", 1, "one", "string")],
        "ModelInferRequest": [
            ("model_name", 1, "one", "string"),
            ("inputs", 5, "many", "Tensor"),
            ("outputs", 6, "many", "Wanted"),
            ("raw_input_contents", 7, "many", "bytes"),
        ],
        "ModelInferResponse": [
            ("model_name", 1, "one", "string"),
            ("model_version", 2, "one", "string"),
            ("outputs", 5, "many", "Tensor"),
            ("raw_output_contents", 6, "many", "bytes"),
        ],
        "ModelIndex": [("name", 1, "one", "string"), ("state", 3, "one", "string")],
        "RepositoryIndexResponse": [("models", 1, "many", "ModelIndex")],
        "ModelConfig": [("name", 1, "one", "string"), ("max_batch_size", 4, "one", "int32")],
        "ModelConfigResponse": [("config", 1, "one", "ModelConfig")],
        "ServerLiveResponse": [("live", 1, "one", "bool")],
    },
)
SERVING = _messages(
    "foreign.serving",
    {
        "Tensor": [
            ("int64_data", 1, "many", "int64"),
            ("float_data", 2, "many", "float"),
            ("elem_type", 10, "one", "int32"),
            ("shape", 11, "many", "int32"),
            ("name", 13, "one", "string"),
            ("alias_name", 14, "one", "string"),
            ("tensor_content", 15, "one", "bytes"),
        ],
        "Request": [("tensor", 1, "many", "Tensor"), ("fetch_var_names", 2, "many", "string")],
        "ModelOutput": [("tensor", 1, "many", "Tensor"), ("engine_name", 2, "one", "string")],
        "Response": [
            ("outputs", 1, "many", "ModelOutput"),
            ("err_no", 5, "one", "int32"),
            ("err_msg", 6, "one", "string"),
        ],
    },
)
_NUMPY = {"FP32": "<f4", "INT64": "<i8"}
_METADATA: dict[str, Any] = {
    "name": "sums",
    "versions": ["1", "2"],
    "platform": "foreign",
    "inputs": [
        {"name": "image", "datatype": "FP32", "shape": [-1, 2, 3]},
        {"name": "words", "datatype": "INT64", "shape": [-1, -1]},
    ],
    "outputs": [
        {"name": "total", "datatype": "FP32", "shape": [-1, 1]},
        {"name": "longest", "datatype": "INT64", "shape": [-1, 1]},
    ],
}


class OipGrpcTeacher:
    """Open Inference Protocol over gRPC."""

    def __init__(
        self,
        *,
        models: tuple[str, ...] | None = ("sums",),  # what it lists; None: it cannot
        typed: bool = False,  # answers with typed contents
        before: Callable[[Any], object] = lambda _context: None,  # of an inference
        max_batch_size: int | None = None,  # of the model; None: it does not say
        credentials: grpc.ServerCredentials | None = None,  # None: no TLS
    ) -> None:
        self._models, self._typed, self._before = models, typed, before
        self.max_batch_size = max_batch_size
        self.version = ""  # by which it says that it answers
        self.versions = ["1", "2"]  # that it lists
        self.metadata: list[dict[str, str]] = []  # of the calls
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=[("grpc.max_receive_message_length", -1)])
        methods = {
            "ServerLive": lambda _request, _context: OIP["ServerLiveResponse"](live=True),
            "ModelMetadata": self._describe,
            "ModelInfer": self._infer,
        }
        if max_batch_size is not None:
            methods["ModelConfig"] = self._configure
        if models is not None:
            methods["RepositoryIndex"] = self._list
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                function, response_serializer=lambda message: message.SerializeToString()
            )
            for name, function in methods.items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
        )
        self.port = (
            self._server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else self._server.add_secure_port("127.0.0.1:0", credentials)
        )
        self.endpoint = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()

    def _list(self, _request: bytes, _context: Any) -> Any:
        index = OIP["ModelIndex"]
        models = [index(name=name, state="READY") for name in self._models or ()]
        return OIP["RepositoryIndexResponse"](
            models=[*models, index(name="x", state="UNAVAILABLE")]
        )

    def _describe(self, request: bytes, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        name = OIP["ModelMetadataRequest"].FromString(request).name
        if name != "sums":
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {name}")
        return OIP["ModelMetadataResponse"](**{**_METADATA, "versions": self.versions})

    def _configure(self, _request: bytes, _context: Any) -> Any:
        config = OIP["ModelConfig"](name="sums", max_batch_size=self.max_batch_size)
        return OIP["ModelConfigResponse"](config=config)

    def _infer(self, message: bytes, context: Any) -> Any:
        self._before(context)
        request = OIP["ModelInferRequest"].FromString(message)
        inputs = {
            tensor.name: np.frombuffer(raw, _NUMPY[tensor.datatype]).reshape(tensor.shape)
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        if self.max_batch_size and len(inputs["image"]) > self.max_batch_size:
            text = f"inference request batch-size must be <= {self.max_batch_size} for 'sums'"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        response = OIP["ModelInferResponse"](
            model_name=request.model_name, model_version=self.version
        )
        outputs = sums(inputs)
        for name in [wanted.name for wanted in request.outputs] or list(outputs):
            array: Any = outputs[name]
            kind = "FP32" if array.dtype == np.float32 else "INT64"
            tensor = response.outputs.add(name=name, datatype=kind, shape=array.shape)
            if not self._typed:
                response.raw_output_contents.append(array.tobytes())
            elif kind == "FP32":
                tensor.contents.fp32_contents.extend(array.ravel().tolist())
            else:
                tensor.contents.int64_contents.extend(array.ravel().tolist())
        return response


class HttpTeacher:
    """An HTTP/1.1 server of one function: (method, path, headers, body) -> answer."""

    def __init__(self, answer: "Answer", context: ssl.SSLContext | None = None) -> None:
        """`context`: for TLS; None: it speaks none."""
        teacher = self
        self.connections = 0
        self.most_bytes = 1 << 30  # of a body; a larger one is refused, and not read
        self.paths: list[str] = []
        self.said_twice = threading.Event()  # an answer with X-Twice

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                teacher.connections += 1
                super().setup()

            def do_GET(self) -> None:
                teacher.paths.append(self.path)
                size = int(self.headers.get("Content-Length", 0))
                if size > teacher.most_bytes:
                    self.send_response(413)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    self.close_connection = True
                    return
                body = self.rfile.read(size)
                status, headers, content = answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if "X-Drip" in headers:  # seconds between two bytes, while somebody reads
                    for byte in content:
                        try:
                            self.wfile.write(bytes((byte,)))
                        except OSError:
                            break
                        time.sleep(float(headers["X-Drip"]))
                else:
                    self.wfile.write(content)
                if headers.get("X-Twice"):
                    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
                    head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(content)}\r\n"
                    self.wfile.write("".join([head, *lines, "\r\n"]).encode() + content)
                    teacher.said_twice.set()
                if headers.get("X-Hang-Up"):
                    self.close_connection = True

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client has left
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Http2Gateway:
    """An ingress of gRPC that reaches nobody: each call has this HTTP status, or is torn."""

    def __init__(self, said: int | str) -> None:
        self._said = said
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(
                    target=self._serve, args=(self._listener.accept()[0],), daemon=True
                ).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file, contextlib.suppress(OSError):
            file.read(24)  # the preface
            sock.sendall(self._frame(_SETTINGS, 0, 0))
            while head := file.read(9):
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
                file.read(int.from_bytes(head[:3]))
                if kind == _SETTINGS and not flags:
                    sock.sendall(self._frame(_SETTINGS, 1, 0))  # acknowledged
                elif kind == _HEADERS:
                    sock.sendall(self._answer(stream))

    def _answer(self, stream: int) -> bytes:
        if self._said == "torn":
            return self._frame(_RST_STREAM, 0, stream, (2).to_bytes(4))  # INTERNAL_ERROR
        status = str(self._said).encode()  # behind the index of `:status`, as a text of 3 bytes
        return self._frame(_HEADERS, 5, stream, b"\x08\x03" + status)

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


Reply = tuple[int, dict[str, str], bytes]
Answer = Callable[[str, str, Mapping[str, str], bytes], Reply]


def answer_oip(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """Open Inference Protocol over HTTP; outputs are binary where they are asked for so."""
    if path == "/v2/health/live":
        return 200, {}, b""
    if path == "/v2/repository/index":
        return 200, {}, json.dumps([{"name": "sums", "state": "READY"}]).encode()
    if path == "/v2/models/sums":
        return 200, {"Content-Type": "application/json"}, json.dumps(_METADATA).encode()
    if path != "/v2/models/sums/infer":
        return 404, {}, json.dumps({"error": f"unknown path {path}"}).encode()
    length = int(headers["Inference-Header-Content-Length"])
    request, rest = json.loads(body[:length]), body[length:]
    inputs: dict[str, Array] = {}
    for tensor in request["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        array = np.frombuffer(rest[:size], _NUMPY[tensor["datatype"]])
        inputs[tensor["name"]] = array.reshape(tensor["shape"])
        rest = rest[size:]
    assert not rest
    head: dict[str, Any] = {"model_name": "sums", "outputs": []}
    raw = b""
    outputs = sums(inputs)
    for wanted in request.get("outputs") or [{"name": name} for name in outputs]:
        array = outputs[wanted["name"]]
        kind = "FP32" if array.dtype == np.float32 else "INT64"
        described: dict[str, Any] = {"name": wanted["name"], "datatype": kind}
        described["shape"] = list(array.shape)
        if wanted.get("parameters", {}).get("binary_data"):
            described["parameters"] = {"binary_data_size": array.nbytes}
            raw += array.tobytes()
        else:
            described["data"] = array.ravel().tolist()
        head["outputs"].append(described)
    text = json.dumps(head).encode()
    return 200, {"Inference-Header-Content-Length": str(len(text))}, text + raw


def answer_serving(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """Paddle Serving over HTTP, as its server (brpc) answers."""
    if path != "/GeneralModelService/inference":
        return 404, {}, b"no such method"
    assert headers["Content-Type"] == "application/proto"
    response = compute_serving(body)
    if response is None:
        return 500, {"x-bd-error-code": "-5100"}, b"InferService inference failed!"
    return 200, {"Content-Type": "application/proto"}, response


def compute_serving(body: bytes) -> bytes | None:
    """Return the Response to a Request of Paddle Serving; None: it fails."""
    request = SERVING["Request"].FromString(body)
    inputs: dict[str, Array] = {}
    for tensor in request.tensor:
        data = tensor.float_data if tensor.elem_type == 1 else tensor.int64_data
        dtype = np.float32 if tensor.elem_type == 1 else np.int64
        inputs[tensor.alias_name] = np.array(data, dtype).reshape(tensor.shape)
    if set(inputs) != {"image", "words"}:
        return None
    outputs = sums(inputs)
    response = SERVING["Response"]()
    model = response.outputs.add(engine_name="general_infer_0")
    for alias in request.fetch_var_names or list(outputs):
        array = outputs[alias]
        is_float = array.dtype == np.float32
        tensor = model.tensor.add(alias_name=alias, name=f"var_{alias}", shape=array.shape)
        tensor.elem_type = 1 if is_float else 0
        (tensor.float_data if is_float else tensor.int64_data).extend(array.ravel().tolist())
    return bytes(response.SerializeToString())


class ServingGrpcTeacher:
    """Paddle Serving over gRPC."""

    def __init__(self, *, before: Callable[[], object] = lambda: None) -> None:
        def infer(request: bytes, context: Any) -> bytes:
            if request:  # an empty one is how a client asks whether Paddle Serving is there
                before()
            response = compute_serving(request)
            if response is None:
                context.abort(grpc.StatusCode.INTERNAL, "InferService inference failed!")
            assert response is not None
            return response

        service = "baidu.paddle_serving.predictor.general_model.GeneralModelService"
        handlers = {"inference": grpc.unary_unary_rpc_method_handler(infer)}
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()


def slowly(answer: Answer, wait: Callable[[], object]) -> Answer:
    """Call `wait` before each inference is answered."""

    def answer_later(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        if "infer" in path:
            wait()
        return answer(method, path, headers, body)

    return answer_later
