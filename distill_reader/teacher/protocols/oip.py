"""What the two forms of the Open Inference Protocol have in common."""

import importlib.metadata
from collections.abc import Mapping

from distill_reader.errors import BadRequest, ModelNotFound
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.oip_messages import OipRequest
from distill_reader.teacher.service.requests import InferenceService, InferRequest

SERVER_NAME = "edl-teacher"
EXTENSIONS = ("binary_tensor_data", "model_repository")
PLATFORM = "paddlepaddle"  # "" would be taken for unknown by some clients


def server_version() -> str:
    """Return the version of this program."""
    try:
        return importlib.metadata.version("edl")
    except importlib.metadata.PackageNotFoundError:
        return "0"  # run from a checkout that is not installed


def find_model(service: InferenceService, name: str, version: str) -> ModelSpec:
    """Return the model that a request names.

    Raises:
        ModelNotFound: there is none of this name or version; lists those there are.
    """
    models = service.models()
    spec = models.get(name)
    if spec is None:
        raise ModelNotFound(f"no model {name!r} is served here; there is {', '.join(models)}")
    if version not in ("", spec.version):
        raise ModelNotFound(f"model {name} has version {spec.version}, not {version!r}")
    return spec


def has_model(service: InferenceService, name: str, version: str) -> bool:
    """Return whether the model is loaded and requests are taken."""
    try:
        find_model(service, name, version)
    except ModelNotFound:
        return False
    return service.is_ready


def infer_request(request: OipRequest, spec: ModelSpec, protocol: str) -> InferRequest:
    """Return the request for the service. Raises: BadRequest: an output is wanted twice."""
    if len(set(request.outputs)) != len(request.outputs):
        raise BadRequest(f"outputs {', '.join(request.outputs)}: one is wanted twice")
    return InferRequest(
        model=spec.name, inputs=request.inputs, fetch=request.outputs, protocol=protocol
    )


def repository_index(service: InferenceService) -> list[dict[str, str]]:
    """Return the models that are served, as Triton's model repository extension lists them."""
    state = "READY" if service.is_ready else "UNAVAILABLE"
    return [
        {"name": spec.name, "version": spec.version, "state": state}
        for spec in service.models().values()
    ]


def metadata_answer() -> Mapping[str, object]:
    """Return what a server says of itself."""
    return {"name": SERVER_NAME, "version": server_version(), "extensions": list(EXTENSIONS)}
