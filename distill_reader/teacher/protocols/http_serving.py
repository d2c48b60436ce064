"""Paddle Serving's GeneralModelService over HTTP, with protobuf or JSON bodies."""

from dataclasses import replace

from aiohttp import web

from distill_reader.errors import DistillError
from distill_reader.protocols import serving_json, serving_messages
from distill_reader.protocols.serving_messages import SERVICE, ServingRequest, ServingResponse
from distill_reader.teacher.protocols import serving
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.http_body import Body, read_body
from distill_reader.teacher.protocols.http_oip import check_method, too_much_json
from distill_reader.teacher.protocols.http_responses import HttpError, HttpResponse, as_http
from distill_reader.teacher.protocols.limits import FrontLimits

_SERVICES = ("GeneralModelService", SERVICE)  # brpc's short name and the full one
_PROTO = "application/proto"  # clients compare the text exactly


class ServingHttp:
    """The paths /GeneralModelService/... and /MODEL/GeneralModelService/..."""

    def __init__(self, calls: Calls, limits: FrontLimits) -> None:
        self._calls = calls
        self._limits = limits

    @staticmethod
    def find_call(path: list[str]) -> tuple[str, str] | None:
        """Return the model ("" if the path names none) and the method; None: not such a path."""
        match path:
            case [service, method] if service in _SERVICES:
                return "", method
            case [model, service, method] if service in _SERVICES:
                return model, method
        return None

    async def answer(self, request: web.BaseRequest, model: str, method: str) -> HttpResponse:
        """Return the answer. Errors are answers too."""
        began_us = serving.now_us()
        is_proto = _is_proto(request)
        is_readable = False  # whether the message could be decoded
        body: Body | None = None
        try:
            if method not in serving.METHODS:
                raise HttpError(404, f"GeneralModelService has no method {method!r}")
            check_method(request, "POST")
            spec = serving.find_model(self._calls.service, model)
            body = await read_body(request, self._calls, self._limits)
            asked = await self._decode(body.view, is_proto=is_proto)
            is_readable = True
            answer = await self._calls.infer(
                replace(serving.infer_request(asked, spec, "serving-http"), message=body.buffer),
                len(body.view),
                submitted=body.release,
            )
        except DistillError as error:
            return _error_answer(error, is_proto=is_proto, is_readable=is_readable)
        finally:
            if body is not None:
                body.release()
        try:
            message = await self._calls.run(
                sum(array.nbytes for array in answer.outputs.values()),
                serving_messages.encode_response if is_proto else serving_json.encode_response,
                serving.response(asked, spec, answer, began_us),
            )
        except DistillError as error:
            answer.release()
            return _error_answer(error, is_proto=is_proto, is_readable=True)
        except BaseException:
            answer.release()
            raise
        return HttpResponse(
            headers={"Content-Type": _content_type(is_proto=is_proto)},
            parts=[message],
            release=answer.release,
            may_compress=True,
        )

    async def _decode(self, message: memoryview, *, is_proto: bool) -> ServingRequest:
        size = len(message)
        if is_proto:  # its arrays are views of the message
            limit = self._limits.max_request_bytes
            return await self._calls.run(
                size, serving_messages.decode_request, message, max_bytes=limit
            )
        if size > self._limits.max_json_bytes:
            raise HttpError(413, too_much_json(self._limits))
        return await self._calls.run_alone(size, serving_json.decode_request, message)


def _error_answer(error: DistillError, *, is_proto: bool, is_readable: bool) -> HttpResponse:
    """Return an error as brpc sends it. The fields of the message are set too."""
    http = as_http(error)
    code = serving.error_code(error, is_readable=is_readable)
    response = ServingResponse(err_no=code, err_msg=str(error))
    encode = serving_messages.encode_response if is_proto else serving_json.encode_response
    return HttpResponse(
        status=http.status,
        headers={
            "Content-Type": _content_type(is_proto=is_proto),
            "x-bd-error-code": str(code),
            **http.headers,
        },
        close=http.close,
        parts=[encode(response)],
    )


def _is_proto(request: web.BaseRequest) -> bool:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _PROTO


def _content_type(*, is_proto: bool) -> str:
    return _PROTO if is_proto else "application/json"
