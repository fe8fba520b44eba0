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
    HttpStatus,
    ImmediateResponse,
    Metadata,
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

REPLACE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


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
