"""Paddle Serving's GeneralModelService over gRPC."""

from distill_reader.protocols import serving_messages
from distill_reader.teacher.protocols import serving
from distill_reader.teacher.protocols.grpc_server import Call, Method
from distill_reader.teacher.service.requests import InferenceService

MODEL_KEY = "edl-model"  # metadata: which model, where several are served


class ServingGrpc:
    """The service `baidu.paddle_serving.predictor.general_model.GeneralModelService`."""

    def __init__(self, service: InferenceService, max_request_bytes: int) -> None:
        self._service = service
        self._max_bytes = max_request_bytes

    def methods(self) -> dict[str, Method]:
        return dict.fromkeys(serving.METHODS, self._inference)

    def _inference(self, message: bytes, call: Call) -> bytes:
        began_us = serving.now_us()
        request = serving_messages.decode_request(message, max_bytes=self._max_bytes)
        spec = serving.find_model(self._service, str(call.metadata.get(MODEL_KEY, "")))
        answer = call.infer(self._service, serving.infer_request(request, spec, "serving-grpc"))
        try:
            return serving_messages.encode_response(
                serving.response(request, spec, answer, began_us)
            )
        finally:
            answer.release()
