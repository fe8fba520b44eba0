"""The operator's own Secret in its own namespace: created at the first start, updated by rotations and renewals."""

import logging
from base64 import b64decode
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.children.secrets import encode
from fairlead_operator.credentials.secret_data import ROTATE, SecretData, next_secret_data
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import DEPLOYMENTS, SECRETS

log = logging.getLogger(__name__)
LABELS = {"app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "credentials"}


@dataclass(frozen=True)
class OwnSecret:
    """`owner`: the operator's own Deployment, so that `helm uninstall` also removes the Secret; empty: none."""

    cluster: Cluster
    namespace: str
    name: str
    owner: str = ""

    async def ensure(self, *, settled: Set[str], host: str, now: datetime) -> SecretData:
        """Read the Secret, write what is due (see `next_secret_data`), and return its data. Raises ApiError."""
        body = await self.cluster.get(SECRETS, self.namespace, self.name)
        metadata: Mapping[str, Any] = body["metadata"] if body is not None else {}
        annotations = dict(metadata.get("annotations") or {})
        current = SecretData.parse({key: b64decode(value).decode() for key, value in ((body or {}).get("data") or {}).items()})
        updated = next_secret_data(current, rotate=ROTATE in annotations, settled=settled, host=host, now=now)
        if updated == current:
            return updated
        data = {key: encode(value) for key, value in updated.to_data().items()}
        if body is None:
            await self._create(data)
        else:
            if current is None or (updated.rotating and not current.rotating):
                annotations.pop(ROTATE, None)
            await self.cluster.replace(SECRETS, {**body, "metadata": {**metadata, "annotations": annotations}, "data": data})
        log.info("Secret %s/%s: %s", self.namespace, self.name, _change(current, updated))
        return updated

    async def _create(self, data: Mapping[str, str]) -> None:
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace, "labels": LABELS}
        if self.owner and (deployment := await self.cluster.get(DEPLOYMENTS, self.namespace, self.owner)) is not None:
            uid = deployment["metadata"]["uid"]
            metadata["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": "Deployment", "name": self.owner, "uid": uid}]
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": dict(data)}
        try:
            await self.cluster.create(SECRETS, body)
        except ApiError as refusal:
            if refusal.code == 409:
                raise ApiError(409, f"Secret {self.namespace}/{self.name} was created by another process: it is read next") from None
            raise


def _change(current: SecretData | None, updated: SecretData) -> str:
    if current is None:
        return "created"
    if updated.rotating and not current.rotating:
        return "rotation started"
    if current.rotating and not updated.rotating:
        return "rotation complete, the previous credentials are dropped"
    return "certificate renewed"
