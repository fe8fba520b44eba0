"""Stored responses of the Responses API: conversations that continue one, and `/v1/responses/ID`."""

from typing import Any

import msgspec

from fairlead_common.protocols.paths import RESPONSES
from fairlead_common.protocols.responses import ResponsesBody
from fairlead_common.response_keys import HEADER, ID, ResponseKeys, derive_keys, new_id, parse
from fairlead_worker.api.answers.responses import DeletedResponse, InputItemList, Response
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.response_store import ResponseStore, StoredResponse
from fairlead_worker.api.worker import Worker

Json = dict[str, Any]


def response_keys(worker: Worker, context: RequestContext, body: ResponsesBody) -> ResponseKeys | None:
    """Return the keys of the response to store and of the one to continue; None if there is nothing to store or to continue.

    Raise ApiError 400 for a `previous_response_id` that is no string.
    """
    previous = body.previous_response_id
    if worker.response_store is None or not (body.store or previous is not None):
        return None
    if not isinstance(previous, str | None):
        raise invalid("previous_response_id: must be a string", param="previous_response_id")
    return _keys(worker.response_store, context, new_id(), *([previous] if previous and ID.fullmatch(previous) else []))


async def read_conversation(worker: Worker, context: RequestContext, keys: ResponseKeys | None, body: ResponsesBody) -> ResponsesBody:
    """Return the body with the whole conversation as its input. Instructions of earlier responses are not carried over, as in OpenAI's API.

    Raise ApiError 404 for an unknown `previous_response_id`. Without a store the body is unchanged, and the conversion refuses the field.
    """
    previous, store = body.previous_response_id, worker.response_store
    if previous is None or store is None or keys is None:
        return body
    stored = await store.load(previous, keys, context.cpu, param="previous_response_id")
    items = [*stored.input, *stored.response["output"], *_input_items(body)]
    return msgspec.structs.replace(body, input=items, previous_response_id=None)


async def save_response(worker: Worker, keys: ResponseKeys, conversation: ResponsesBody, response: Response) -> bool:
    """Store a response with the conversation before it. Return whether it is stored."""
    assert worker.response_store is not None, "there are keys only with a store"
    return await worker.response_store.save(keys, StoredResponse(msgspec.to_builtins(response), _input_items(conversation)))


async def get_response(worker: Worker, context: RequestContext) -> None:
    """`GET /v1/responses/ID`."""
    await context.respond_json((await _load(worker, context)).response)


async def delete_response(worker: Worker, context: RequestContext) -> None:
    """`DELETE /v1/responses/ID`."""
    store = _store(worker)
    await store.delete(_id(context), _keys(store, context, _id(context)), context.cpu)
    await context.respond_json(DeletedResponse(_id(context)))


async def list_input_items(worker: Worker, context: RequestContext) -> None:
    """`GET /v1/responses/ID/input_items`: the whole conversation before the response on one page, the newest item first."""
    stored = await _load(worker, context)
    data = [_described(item, f"msg_{number}") for number, item in enumerate(stored.input)][::-1]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    await context.respond_json(InputItemList(data=data, first_id=first, last_id=last))


async def cancel_response(worker: Worker, context: RequestContext) -> None:
    """`POST /v1/responses/ID/cancel`: refused as by OpenAI, because no response here is a background response."""
    await _load(worker, context)
    message = "only a background response can be cancelled, and there are none here; to end a running response, close its connection"
    raise invalid(message, code="cannot_cancel")


def _input_items(body: ResponsesBody) -> list[Any]:
    given = body.input
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given or ())


def _described(item: Any, id: str) -> Json:
    """Return an input item in the form in which OpenAI lists it: with an id, and text as parts."""
    shown: Json = {"id": id, "type": "message", "status": "completed"} | item
    if isinstance(shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        extra: Json = {"annotations": []} if kind == "output_text" else {}
        shown["content"] = [{"type": kind, "text": shown["content"]} | extra]
    return shown


def _store(worker: Worker) -> ResponseStore:
    if worker.response_store is None:
        raise ApiError(404, "responses are not stored here: that needs Redis and --limits stored_responses above 0", code="not_found")
    return worker.response_store


def _id(context: RequestContext) -> str:
    return context.path.removeprefix(f"{RESPONSES}/").partition("/")[0]


async def _load(worker: Worker, context: RequestContext) -> StoredResponse:
    store = _store(worker)
    return await store.load(_id(context), _keys(store, context, _id(context)), context.cpu)


def _keys(store: ResponseStore, context: RequestContext, *ids: str) -> ResponseKeys:
    """Return the keys of the responses `ids`, the first of them new or in the path.

    With `--api-key-file` they are derived from the client's key. Otherwise they are the router's, who chose the new id. A request without
    either gets keys of this process. Raise ApiError 400 for an invalid header. A client cannot set the header through a router.
    """
    if context.key_digest:
        return derive_keys(bytes.fromhex(context.key_digest), "", *ids)
    given = context.headers.get(HEADER)
    if given is None:
        return derive_keys(store.own_secret, context.tenant, *ids)
    try:
        return parse(given)
    except ValueError as error:
        raise invalid(f"X-Fairlead-Response-Keys: {error}") from None
