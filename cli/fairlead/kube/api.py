"""A read-only Kubernetes API client with the credentials of a kubeconfig. Errors name the missing permission."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead.errors import UserError

Body = Mapping[str, Any]
CONNECT, READ = 5.0, 15.0  # seconds
SERVICES = "/apis/fairlead.dev/v1alpha1"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class NotFound(UserError):
    """Status 404: the object, or its kind, does not exist."""


class Forbidden(UserError):
    """Status 403. `right`: the verb and the resource that the user lacks, such as `list nodes`."""

    def __init__(self, right: str, message: str) -> None:
        super().__init__(f"you may not {right}: {message}")
        self.right = right


class UnexpectedStatus(UserError):
    """Any other status than 2xx. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Kube:
    """A client of one cluster. Thread-safe."""

    client: Any  # kubernetes.client.ApiClient
    server: str
    namespace: str  # of the context
    context: str

    @classmethod
    def connect(cls, kubeconfig: str = "", context: str = "") -> "Kube":
        """Connect with `kubeconfig`, else $KUBECONFIG, ~/.kube/config, or this pod's service account. Raises UserError."""
        import urllib3
        from kubernetes import client, config

        kubeconfig = kubeconfig or os.environ.get("KUBECONFIG", "")
        configuration = client.Configuration()
        try:
            try:
                config.load_kube_config(kubeconfig or None, context or None, configuration)
                _, current = config.list_kube_config_contexts(kubeconfig or None)
                chosen = context or (current or {}).get("name", "")
                namespace = _namespace_of(config, kubeconfig, chosen)
            except config.ConfigException:
                if kubeconfig or context:
                    raise
                config.load_incluster_config(configuration)
                chosen, namespace = "in-cluster", _own_namespace()
        except (config.ConfigException, OSError, TypeError) as error:
            # Without a kubeconfig the library's message is only that this is not a pod.
            why = str(error).rstrip(".") if kubeconfig or context else "there is no ~/.kube/config with a context, and this is not a pod"
            where = f" (of {kubeconfig})" if kubeconfig else ""
            raise UserError(
                f"no cluster: {why}{where}. Give --kubeconfig or --context, or set KUBECONFIG. `fairlead status` shows local runs."
            ) from None
        if not configuration.verify_ssl:
            urllib3.disable_warnings(
                urllib3.exceptions.InsecureRequestWarning
            )  # the kubeconfig asks for it, and kubectl does not warn either
        configuration.retries = False
        configuration.connection_pool_maxsize = 16
        return cls(client.ApiClient(configuration), configuration.host, namespace, chosen)

    def get(self, path: str, *, right: str = "", accept: str = "application/json", **query: str) -> Any:
        """Return the JSON of `path`. Forbidden names `right` (such as `get pods`).

        Raises NotFound, Forbidden, UnexpectedStatus, UserError.
        """
        text = self.text(path, right=right, accept=accept, **query)
        try:
            return json.loads(text)
        except ValueError:
            raise UserError(f"{path}: not JSON: {text[:100]!r}") from None

    def text(self, path: str, *, right: str = "", accept: str = "*/*", **query: str) -> str:
        from urllib3.exceptions import HTTPError

        request = self.client.param_serialize(
            "GET", path, query_params=list(query.items()), header_params={"Accept": accept}, auth_settings=["BearerToken"]
        )
        try:
            response = self.client.call_api(*request, _request_timeout=(CONNECT, READ))
            body: bytes = response.read()
        except HTTPError as error:
            why = getattr(error, "reason", None) or error
            raise UserError(f"the API server at {self.server} cannot be reached (context {self.context or 'none'}): {why}") from None
        if response.status == 401:
            raise UserError(f"the API server at {self.server} rejects the credentials of context {self.context}: log in again")
        if response.status == 403:
            raise Forbidden(right or f"get {path}", _message(body))
        if response.status == 404:
            raise NotFound(_message(body))
        if not 200 <= response.status <= 299:
            raise UnexpectedStatus(response.status, f"{path.split('?')[0]}: {response.status}: {_message(body)}")
        return body.decode(errors="replace")

    def items(self, path: str, *, right: str, selector: str = "", fields: str = "") -> list[Body]:
        """Return all items of a list, read in pages."""
        query = {"limit": "500"} | ({"labelSelector": selector} if selector else {}) | ({"fieldSelector": fields} if fields else {})
        found: list[Body] = []
        while True:
            page = self.get(path, right=right, **query)
            found += page["items"]
            more = page["metadata"].get("continue")
            if not more:
                return found
            query["continue"] = more

    def services(self, namespace: str) -> list[Body]:
        """Return the InferenceServices of a namespace (empty: of all). Raises UserError without the CRD, Forbidden."""
        path = f"{SERVICES}/namespaces/{namespace}/inferenceservices" if namespace else f"{SERVICES}/inferenceservices"
        try:
            return self.items(path, right=f"list inferenceservices.fairlead.dev{_where(namespace)}")
        except NotFound:
            raise UserError(_NO_CRD) from None

    def service(self, namespace: str, name: str) -> Body:
        path = f"{SERVICES}/namespaces/{namespace}/inferenceservices/{name}"
        try:
            found: Body = self.get(path, right=f"get inferenceservices.fairlead.dev{_where(namespace)}")
            return found
        except NotFound:
            names = [one["metadata"]["name"] for one in self.services(namespace)]
            there = f"there are: {', '.join(sorted(names)[:20])}" if names else f"there is none in namespace {namespace} (see -A)"
            raise NotFound(f"no InferenceService {name} in namespace {namespace}; {there}") from None


_NO_CRD = (
    "this cluster has no InferenceServices: the CRD inferenceservices.fairlead.dev is not installed. "
    "Install the chart (helm install fairlead …)"
)


def _where(namespace: str) -> str:
    return f" in namespace {namespace}" if namespace else " in all namespaces (or name one with -n)"


def _namespace_of(config: Any, kubeconfig: str, context: str) -> str:
    contexts, _ = config.list_kube_config_contexts(kubeconfig or None)
    return next(((one.get("context") or {}).get("namespace") for one in contexts if one["name"] == context), None) or "default"


def _own_namespace() -> str:
    from pathlib import Path

    path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return path.read_text().strip() if path.exists() else "default"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace").strip() or "no message"
