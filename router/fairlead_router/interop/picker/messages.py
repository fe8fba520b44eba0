"""Conversion between Envoy's messages and plain values: headers, endpoints in metadata, and responses."""

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.struct_pb2 import Struct, Value

from fairlead_router.errors import ApiError, Headers
from fairlead_router.interop.picker.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    HttpStatus,
    ImmediateResponse,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)

# gateway-api-inference-extension, proposal 004: names shared by the gateway and the picker.
DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"

PIECE = 62 * 1024
"""Bytes of a body in one message. Envoy recommends at most 64 KiB."""

MOST_FIELDS = 16
"""Fields of a message among which its body is looked for."""
_BODIES = (ProcessingRequest.REQUEST_BODY_FIELD_NUMBER, ProcessingRequest.RESPONSE_BODY_FIELD_NUMBER)
_VARINT, _BYTES = 0, 2
"""Types of fields in protobuf's encoding."""

REPLACE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def parse(data: bytes, max_head_bytes: int) -> ProcessingRequest:
    """Return a message of Envoy. `max_head_bytes`: beside a body.

    Raises ApiError 431 for a longer one, before its headers are built: 0.1 µs each, with Python's lock. Raises DecodeError for other bytes.
    """
    if (head := len(data) - _body_bytes(data)) > max_head_bytes:
        message = f"The gateway's message has {head} bytes beside a body; {max_head_bytes} are allowed."
        raise ApiError(431, message, code="headers_too_large")
    return ProcessingRequest.FromString(data)


def _body_bytes(data: bytes) -> int:
    """Return the bytes of the first body in a message; 0 if there is none among its first fields."""
    at, end = 0, len(data)
    wanted: tuple[int, ...] = _BODIES
    for _ in range(MOST_FIELDS):
        if at >= end:
            break
        tag, at = _read_varint(data, at)
        size, after = _read_varint(data, at)
        if tag & 7 not in (_VARINT, _BYTES):
            break
        if tag >> 3 in wanted and tag & 7 == _BYTES:
            if wanted is not _BODIES:
                return max(0, min(size, end - after))
            at, end, wanted = after, min(end, after + size), (HttpBody.BODY_FIELD_NUMBER,)
        else:
            at = after + (size if tag & 7 == _BYTES else 0)
    return 0


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's encoding and where it ends. Of invalid bytes, it is any number."""
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value, at


def read_headers(headers: HeaderMap) -> Headers:
    """Return headers with lower-case names, as Envoy has them, and values as bytes."""
    return [(header.key.lower().encode("latin-1", "replace"), header.raw_value or header.value.encode()) for header in headers.headers]


def read_endpoints(metadata: Metadata, namespace: str, key: str) -> list[str] | None:
    """Return the endpoints of a metadata entry: a list, or one comma-separated string (both occur). None without such an entry."""
    namespace_fields = metadata.filter_metadata.get(namespace)
    entry = namespace_fields.fields.get(key) if namespace_fields is not None else None
    if entry is None:
        return None
    values = entry.list_value.values if entry.HasField("list_value") else [entry]
    return [part.strip() for value in values for part in value.string_value.split(",") if part.strip()]


def build_mutation(set_headers: Iterable[tuple[str, str]] = (), removed: Iterable[str] = ()) -> HeaderMutation:
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")), append_action=REPLACE)
        for name, value in set_headers
    ]
    return HeaderMutation(set_headers=options, remove_headers=list(removed))


def build_destination(endpoints: Sequence[str]) -> Struct:
    """Return the dynamic metadata with the endpoints, which must equal the header's."""
    entry = Struct(fields={DESTINATION: Value(string_value=",".join(endpoints))})
    return Struct(fields={NAMESPACE: Value(struct_value=entry)})


def split_body(body: bytes, end_of_stream: bool) -> Iterator[BodyMutation]:
    """Yield a body in the pieces of full duplex mode. An empty body still yields its end of stream."""
    for at in range(0, max(len(body), 1), PIECE):
        last = end_of_stream and at + PIECE >= len(body)
        yield BodyMutation(streamed_response=StreamedBodyResponse(body=body[at : at + PIECE], end_of_stream=last))


def build_request_headers(mutation: HeaderMutation, metadata: Struct | None = None) -> ProcessingResponse:
    common = CommonResponse(header_mutation=mutation, clear_route_cache=metadata is not None)
    return ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)


def build_request_body(
    mutation: BodyMutation | None = None, headers: HeaderMutation | None = None, metadata: Struct | None = None
) -> ProcessingResponse:
    common = CommonResponse(body_mutation=mutation, header_mutation=headers, clear_route_cache=metadata is not None)
    return ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)


def build_response_headers(mutation: HeaderMutation) -> ProcessingResponse:
    return ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse(header_mutation=mutation)))


def build_response_body(mutation: BodyMutation | None) -> ProcessingResponse:
    return ProcessingResponse(response_body=BodyResponse(response=CommonResponse(body_mutation=mutation)))


def build_refusal(error: ApiError, request_id: str, path: str = "") -> ProcessingResponse:
    """Return a complete error answer in the format of the path's API, which the gateway sends. `details` go to its access log."""
    headers = [("content-type", "application/json"), ("x-request-id", request_id)]
    headers += [(name.decode("latin-1"), value.decode("latin-1")) for name, value in error.headers if name != b"connection"]
    immediate = ImmediateResponse(
        status=HttpStatus(code=error.status),
        headers=build_mutation(headers),
        body=error.document(path),
        details=f"fairlead_{error.code or error.status}",
    )
    return ProcessingResponse(immediate_response=immediate)
