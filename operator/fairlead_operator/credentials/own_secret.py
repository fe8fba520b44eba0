"""The operator's own Secret in its own namespace: created at the first start, changed by rotations and renewals."""

import logging
from base64 import b64decode
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.children.secrets import encoded
from fairlead_operator.credentials.contents import ROTATE, Contents, following
from fairlead_operator.kube.client import ApiRefused, Cluster
from fairlead_operator.kube.kinds import SECRETS, Kind

log = logging.getLogger(__name__)
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")
LABELS = {"app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "credentials"}


@dataclass(frozen=True)
class OwnSecret:
    """`owner`: the operator's own Deployment, so that `helm uninstall` removes the Secret too; empty: none."""

    cluster: Cluster
    namespace: str
    name: str
    owner: str = ""

    async def hold(self, *, settled: Set[str], host: str, now: datetime) -> Contents:
        """Read it, write what is due (see `following`), and return what it holds. Raises ApiRefused."""
        body = await self.cluster.get(SECRETS, self.namespace, self.name)
        metadata: Mapping[str, Any] = body["metadata"] if body is not None else {}
        annotations = dict(metadata.get("annotations") or {})
        held = Contents.read({key: b64decode(value).decode() for key, value in ((body or {}).get("data") or {}).items()})
        wanted = following(held, rotate=ROTATE in annotations, settled=settled, host=host, now=now)
        if wanted == held:
            return wanted
        data = {key: encoded(value) for key, value in wanted.written().items()}
        if body is None:
            await self._create(data)
        else:
            if held is None or (wanted.rotating and not held.rotating):
                annotations.pop(ROTATE, None)
            await self.cluster.replace(SECRETS, {**body, "metadata": {**metadata, "annotations": annotations}, "data": data})
        log.info("Secret %s/%s: %s", self.namespace, self.name, _change(held, wanted))
        return wanted

    async def _create(self, data: Mapping[str, str]) -> None:
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace, "labels": LABELS}
        if self.owner and (deployment := await self.cluster.get(DEPLOYMENTS, self.namespace, self.owner)) is not None:
            uid = deployment["metadata"]["uid"]
            metadata["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": "Deployment", "name": self.owner, "uid": uid}]
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": dict(data)}
        try:
            await self.cluster.create(SECRETS, body)
        except ApiRefused as refusal:
            if refusal.code == 409:
                raise ApiRefused(409, f"Secret {self.namespace}/{self.name} was created by another process: it is read next") from None
            raise


def _change(held: Contents | None, wanted: Contents) -> str:
    if held is None:
        return "created"
    if wanted.rotating and not held.rotating:
        return "rotation begun"
    if held.rotating and not wanted.rotating:
        return "rotation complete, the previous credentials are dropped"
    return "certificate renewed"
