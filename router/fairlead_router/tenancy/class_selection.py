"""Selection of a request's service class: the one that it names, else that of its API key, else the default."""

from typing import Final

from fairlead_common.truncate import quote
from fairlead_router.errors import ApiError
from fairlead_router.service_classes import ServiceClass, ServiceClasses
from fairlead_router.tenancy.tenants import Caller

HEADER: Final = b"x-slo-class"


def select_class(classes: ServiceClasses, requested: str, caller: Caller) -> ServiceClass | None:
    """Return the class; None if the request, its key and the service name none. `requested`: the client's X-SLO-Class.

    A request can name a class that is at most as urgent as its key allows: as the key's class, else as the key's priority.
    Raises ApiError: 400 for an unknown class, 403 for one that is too urgent.
    """
    own = classes.by_name.get(caller.slo_class)
    if not requested:
        return own or classes.default
    chosen = classes.by_name.get(requested)
    if chosen is None:
        message = f"X-SLO-Class: there is no class {quote(requested)}; use one of {classes.names}."
        raise ApiError(400, message, param="X-SLO-Class", code="unknown_slo_class")
    limit = own.urgency if own is not None else (False, caller.priority)
    if chosen.urgency < limit:
        allowed = ", ".join(name for name, each in classes.by_name.items() if each.urgency >= limit)
        message = f"X-SLO-Class: this API key may not use the class {chosen.name}, which is too urgent for it; use one of {allowed}."
        raise ApiError(403, message, param="X-SLO-Class", code="slo_class_not_allowed")
    return chosen


def priority_of(service_class: ServiceClass | None, caller: Caller, requested: int | None) -> int:
    """Return the priority of a request: its class's, but without a class of its key at most as urgent as the key's priority.

    Without a class it is `requested`, within the same limit.
    """
    if service_class is None:
        return caller.effective_priority(requested)
    return service_class.priority if caller.slo_class else max(caller.priority, service_class.priority)
