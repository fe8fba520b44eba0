"""Settings from the environment variables that LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) sets in the pods of a group."""

import os
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

VARIABLES = {"nnodes": "LWS_GROUP_SIZE", "node_rank": "LWS_WORKER_INDEX", "master_addr": "LWS_LEADER_ADDRESS"}


class GroupEnvironment(PydanticBaseSettingsSource):
    """A settings source for groups of more than one pod. A single pod is an ordinary worker and gets no settings."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(VARIABLES.get(field_name, "")), field_name, False

    def __call__(self) -> dict[str, Any]:
        if os.environ.get("LWS_GROUP_SIZE", "1") == "1":
            return {}
        return {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
