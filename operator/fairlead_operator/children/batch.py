"""The Batch API: a Deployment of one pod, which stores files on a volume or in S3 and sends their lines to the routers.

One pod at a time: the Deployment recreates it, and the process takes a lock on the volume, or makes every write to the bucket conditional.
"""

from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.batch import Batch
from fairlead_operator.children import pods, router_tls, secrets, security
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import batch_revision, pin
from fairlead_operator.rollout.images import router_image
from fairlead_operator.rollout.strategy import is_pausing
from fairlead_operator.settings import Settings

SECRET_KEY = "secret"
SECRET_FILE = PurePosixPath("/etc/fairlead/batch") / SECRET_KEY
"""Secret that routers and batch server share, mounted in both."""
STORAGE_MOUNT = "/var/lib/fairlead"


def objects(service: InferenceService, settings: Settings, observed: Observed) -> list[Object]:
    """Return the objects of the batch server; none without `spec.batch`."""
    batch = service.spec.batch
    if batch is None:
        return []
    pinned = pin(service, names.BATCH, batch_revision(service), _template(service, batch, settings), observed.revisions)
    paused = is_pausing(service, observed.deployments.get(names.BATCH))
    deployment = pods.deployment(service, names.BATCH, replicas=1, template=pinned.template, strategy={}, paused=paused)
    deployment["spec"]["strategy"] = {"type": "Recreate"}
    secret = secrets.build_random(service, names.batch_secret(service), names.BATCH, SECRET_KEY)
    return [secret, _service(service), *pinned.revisions, deployment]


def router_flags(service: InferenceService, settings: Settings) -> dict[str, object]:
    """Return the router's flags; none without `spec.batch`: routers of older images do not have them."""
    if service.spec.batch is None:
        return {}
    host = f"{names.deployment(service, names.BATCH)}.{service.namespace}.svc.{settings.cluster_domain}"
    return {"batch-url": f"http://{host}:{names.BATCH_PORT}", "batch-secret-file": SECRET_FILE}


def secret_volumes(service: InferenceService) -> list[Object]:
    """Return the volume of the shared secret; none without `spec.batch`."""
    if service.spec.batch is None:
        return []
    return [{"name": "batch-secret", "secret": {"secretName": names.batch_secret(service), "defaultMode": 0o440}}]


def secret_mounts(service: InferenceService) -> list[Object]:
    if service.spec.batch is None:
        return []
    return [{"name": "batch-secret", "mountPath": str(SECRET_FILE.parent), "readOnly": True}]


def _service(service: InferenceService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(service, names.deployment(service, names.BATCH), names.BATCH),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(service, names.BATCH),
            "ports": [{"name": "http", "port": names.BATCH_PORT, "targetPort": names.BATCH_PORT, "protocol": "TCP", "appProtocol": "http"}],
        },
    }


def _template(service: InferenceService, batch: Batch, settings: Settings) -> Object:
    flags = {
        "host": "0.0.0.0",
        "port": names.BATCH_PORT,
        "storage": f"file://{STORAGE_MOUNT}/{batch.claim_folder}".rstrip("/") if batch.claim else batch.storage_uri,
        "router-url": f"{names.scheme(service)}://{service.name}.{service.namespace}.svc.{settings.cluster_domain}:{router_tls.service_port(service)}",
        **router_tls.certificate_flags(service),
        "secret-file": SECRET_FILE,
        "max-concurrency": batch.max_concurrency,
    }
    volumes, mounts, variables = _storage(batch)
    container: Object = {
        "name": names.BATCH,
        "image": router_image(service, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["fairlead-batch"],
        "args": [f"--{flag}={value}" for flag, value in flags.items()],
        "env": [{"name": "HOME", "value": "/tmp"}, *variables],
        "ports": [{"name": "admin", "containerPort": names.BATCH_PORT, "protocol": "TCP"}],  # the PodMonitor's and the probes' name
        "resources": pods.CONTROL_RESOURCES,
        "securityContext": security.container_context(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *secret_mounts(service), *router_tls.mounts(service), *mounts],
        "startupProbe": pods.probe("/health", period=2, failures=60),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "livenessProbe": pods.liveness(failures=6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    volumes = [{"name": "tmp", "emptyDir": {}}, *secret_volumes(service), *router_tls.certificate_volumes(service), *volumes]
    spec = pods.pod_spec(service, settings, names.BATCH, container, volumes)
    return pods.finish(service, names.BATCH, batch_revision(service), {"spec": spec}, batch.pod_template)


def _storage(batch: Batch) -> tuple[list[Object], list[Object], list[Object]]:
    """Return the volumes, mounts and variables of the storage."""
    if batch.claim:
        volume = {"name": "storage", "persistentVolumeClaim": {"claimName": batch.claim}}
        return [volume], [{"name": "storage", "mountPath": STORAGE_MOUNT}], []
    variables: list[Object] = []
    if batch.secret_name is not None:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": batch.secret_name, "key": key}}})
        for key in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
            variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": batch.secret_name, "key": key, "optional": True}}})
    return [], [], variables
