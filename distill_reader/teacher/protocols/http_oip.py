"""The Open Inference Protocol (KServe v2) over HTTP, with tensors as bytes or as JSON."""

from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from distill_reader.errors import BadRequest, ModelNotFound
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols import oip_json
from distill_reader.protocols.oip_json import HEAD_LENGTH, OipHttpRequest
from distill_reader.protocols.oip_messages import OipRequest
from distill_reader.teacher.protocols import oip
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.http_body import Body, read_body
from distill_reader.teacher.protocols.http_responses import HttpError, HttpResponse, json_response
from distill_reader.teacher.protocols.limits import FrontLimits
from distill_reader.teacher.service.requests import InferAnswer, SharedTensor


class OipHttp:
    """The paths below /v2."""

    def __init__(self, calls: Calls, limits: FrontLimits) -> None:
        self._calls = calls
        self._service = calls.service
        self._limits = limits

    async def answer(self, request: web.BaseRequest, path: list[str]) -> HttpResponse:
        """Return the answer. `path`: the parts of the path after /v2.

        Raises:
            DistillError: the caller answers with `error_answer`.
        """
        match path:
            case []:
                return self._get(request, lambda: json_response(dict(oip.metadata_answer())))
            case ["health", "live"]:
                return self._get(request, lambda: json_response({"live": True}))
            case ["health", "ready"]:
                return self._get(request, lambda: _ready(self._service.is_ready))
            case ["repository", "index"]:
                check_method(request, "POST")
                return json_response(oip.repository_index(self._service))
            case ["models", "stats"] if "stats" not in self._service.models():
                every = oip.statistics(self._service, "", "")
                return self._get(request, lambda: json_response(every))
            case ["models", name, *rest]:
                version = ""
                if len(rest) >= 2 and rest[0] == "versions":
                    version, rest = rest[1], rest[2:]
                return await self._model(request, name, version, rest)
        raise HttpError(404, f"there is no {request.path} here")

    @staticmethod
    def is_health(path: list[str]) -> bool:
        """Return whether probes may ask this without a token. `path`: as for `answer`."""
        match path:
            case ["health", "live" | "ready"] | ["models", _, "ready"]:
                return True
            case ["models", _, "versions", _, "ready"]:
                return True
        return False

    def error_answer(self, error: HttpError) -> HttpResponse:
        """Return the protocol's answer for an error."""
        return json_response(
            {"error": str(error)}, status=error.status, headers=error.headers, close=error.close
        )

    async def _model(
        self, request: web.BaseRequest, name: str, version: str, rest: list[str]
    ) -> HttpResponse:
        match rest:
            case []:
                spec = oip.find_model(self._service, name, version)
                return self._get(
                    request, lambda: json_response(oip_json.encode_metadata(spec, oip.PLATFORM))
                )
            case ["ready"]:
                return self._get(request, lambda: self._model_ready(name, version))
            case ["config"]:
                spec = oip.find_model(self._service, name, version)
                return self._get(
                    request, lambda: json_response(oip.model_config(self._service, spec))
                )
            case ["stats"]:
                document = oip.statistics(self._service, name, version)
                return self._get(request, lambda: json_response(document))
            case ["infer"]:
                check_method(request, "POST")
                return await self._infer(request, oip.find_model(self._service, name, version))
        raise HttpError(404, f"there is no {request.path} here")

    async def _infer(self, request: web.BaseRequest, spec: ModelSpec) -> HttpResponse:
        head_length = _head_length(request)
        if (head_length or 0) > self._limits.max_json_bytes:
            raise HttpError(413, too_much_json(self._limits))
        body = await read_body(request, self._calls, self._limits, aligned_at=head_length or 0)
        try:
            asked, answer = await self._compute(body, head_length, spec)
        finally:
            body.release()
        try:
            length, parts = await self._calls.run(
                sum(array.nbytes for array in answer.outputs.values()),
                oip_json.encode_response,
                spec.name,
                answer.outputs,
                asked=asked,
                version=spec.version,
                digest=spec.digest,
            )
        except BaseException:
            answer.release()
            raise
        headers = {"Content-Type": "application/json"}
        if length is not None:
            headers = {"Content-Type": "application/octet-stream", HEAD_LENGTH: str(length)}
        return HttpResponse(
            headers=headers, parts=parts, release=answer.release, may_compress=length is None
        )

    async def _compute(
        self, body: Body, head_length: int | None, spec: ModelSpec
    ) -> tuple[OipHttpRequest, InferAnswer]:
        size = len(body.view)
        json_bytes = size if head_length is None else head_length
        if json_bytes > self._limits.max_json_bytes:
            raise HttpError(413, too_much_json(self._limits))
        asked = await self._calls.run_alone(
            json_bytes, oip_json.decode_request, body.view, head_length
        )
        request = oip.infer_request(asked.request, spec, "oip-http")
        shared = _shared_inputs(asked.request, body, head_length)
        if shared is None:
            answer = await self._calls.infer(
                replace(request, message=body.buffer), size, submitted=body.release
            )
        else:
            body.hand_over()
            answer = await self._calls.infer(replace(request, inputs=shared), 0)
        return asked, answer

    def _model_ready(self, name: str, version: str) -> HttpResponse:
        try:
            oip.find_model(self._service, name, version)
        except ModelNotFound as error:  # names all models, and may be read without a token
            raise HttpError(404, "no such model or version is served here") from error
        return _ready(self._service.is_ready)

    def _get(self, request: web.BaseRequest, answer: Callable[[], HttpResponse]) -> HttpResponse:
        check_method(request, "GET")
        return answer()


def check_method(request: web.BaseRequest, method: str) -> None:
    """Refuse any other method. Raises: HttpError."""
    if request.method != method and (method, request.method) != ("GET", "HEAD"):
        text = f"{request.path}: use {method}, not {request.method}"
        raise HttpError(405, text, headers={"Allow": method})


def too_much_json(limits: FrontLimits) -> str:
    """Return the text for a request with too much JSON."""
    return (
        f"more than {limits.max_json_bytes} bytes of JSON; send the tensors as binary data, or "
        "fewer samples at a time"
    )


def _shared_inputs(
    request: OipRequest, body: Body, head_length: int | None
) -> dict[str, SharedTensor] | None:
    """Return the tensors in place, as parts of the body; None: some must be copied."""
    if head_length is None or not request.inputs:
        return None
    if sum(array.nbytes for array in request.inputs.values()) != len(body.view) - head_length:
        return None  # some came as JSON
    inputs: dict[str, SharedTensor] = {}
    offset = body.offset + head_length
    for name, array in request.inputs.items():
        if offset % array.itemsize:
            return None  # predictors need aligned numbers
        inputs[name] = SharedTensor(
            buffer=body.buffer, offset=offset, dtype=array.dtype.name, shape=array.shape
        )
        offset += array.nbytes
    return inputs


def _head_length(request: web.BaseRequest) -> int | None:
    text = request.headers.get(HEAD_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRequest(f"{HEAD_LENGTH}: must be a number, got {text[:80]!r}")
    length = int(text)
    known = request.content_length
    is_plain = request.headers.get("Content-Encoding", "identity") == "identity"
    if known is not None and is_plain and length > known:
        raise BadRequest(f"{HEAD_LENGTH}: is {length}, the body has {known} bytes")
    return length


def _ready(is_ready: bool) -> HttpResponse:
    return json_response({"ready": is_ready}, status=200 if is_ready else 503)
