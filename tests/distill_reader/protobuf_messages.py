"""Protobuf's own classes for messages that the product reads by hand, or has for itself."""

from distill_reader.protocols import oip_messages, serving_messages
from distill_reader.protocols.protobuf_schema import message_classes

_TENSOR = (
    "string name = 1; string datatype = 2; repeated int64 shape = 3;"
    "map<string, InferParameter> parameters = 4; InferTensorContents contents = 5"
)
OIP_MESSAGES = oip_messages.MESSAGES | message_classes(
    "inference",
    {
        "InferParameter": (
            "bool bool_param = 1; int64 int64_param = 2;"
            "string string_param = 3; double double_param = 4;"
            "uint64 uint64_param = 5"
        ),
        "InferTensorContents": (
            "repeated bool bool_contents = 1; repeated int32 int_contents = 2;"
            "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4;"
            "repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6;"
            "repeated double fp64_contents = 7; repeated bytes bytes_contents = 8"
        ),
        "ModelInferRequest": (
            "string model_name = 1; string model_version = 2; string id = 3;"
            "map<string, InferParameter> parameters = 4;"
            "repeated ModelInferRequest.InferInputTensor inputs = 5;"
            "repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6;"
            "repeated bytes raw_input_contents = 7"
        ),
        "ModelInferRequest.InferInputTensor": _TENSOR,
        "ModelInferRequest.InferRequestedOutputTensor": (
            "string name = 1; map<string, InferParameter> parameters = 2"
        ),
        "ModelInferResponse": (
            "string model_name = 1; string model_version = 2; string id = 3;"
            "map<string, InferParameter> parameters = 4;"
            "repeated ModelInferResponse.InferOutputTensor outputs = 5;"
            "repeated bytes raw_output_contents = 6"
        ),
        "ModelInferResponse.InferOutputTensor": _TENSOR,
    },
)

HEALTH_MESSAGES = message_classes(
    "grpc.health.v1",
    {
        "HealthCheckRequest": "string service = 1",
        "HealthCheckResponse": "int32 status = 1",  # an enumeration
    },
)

SERVING_MESSAGES = message_classes(
    serving_messages.SERVICE.rpartition(".")[0],
    {
        "Tensor": (
            "repeated int64 int64_data = 1; repeated float float_data = 2;"
            "repeated int32 int_data = 3; repeated double float64_data = 4;"
            "repeated uint32 uint32_data = 5; repeated bool bool_data = 6;"
            "repeated float complex64_data = 7; repeated double complex128_data = 8;"
            "repeated string data = 9; int32 elem_type = 10; repeated int32 shape = 11;"
            "repeated int32 lod = 12; string name = 13; string alias_name = 14;"
            "bytes tensor_content = 15"
        ),
        "Request": (
            "repeated Tensor tensor = 1; repeated string fetch_var_names = 2;"
            "bool profile_server = 3; uint64 log_id = 4"
        ),
        "ModelOutput": "repeated Tensor tensor = 1; string engine_name = 2",
        "Response": (
            "repeated ModelOutput outputs = 1; repeated int64 profile_time = 2;"
            "bool profile_server = 3; uint64 log_id = 4; int32 err_no = 5; string err_msg = 6"
        ),
    },
)
