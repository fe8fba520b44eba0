"""The Batch API: a Deployment of one pod, which stores files on a volume or in S3 and sends their lines to the routers.

One pod at a time: the Deployment recreates it, and the process takes a lock on the volume, or makes every write to the bucket conditional.
"""

from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.batch import Batch
from fairlead_operator.children import pods, router_tls, secrets
from fairlead_operator.children.pods import Mounted
from fairlead_operator.kube.kinds import KUBE_SERVICES, make_child
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
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False}
_CREDENTIALS |= {"AWS_SESSION_TOKEN": True, "AWS_ENDPOINT_URL": True, "AWS_REGION": True}
"""Keys of `spec.batch.secretName`, and whether each is optional."""


def objects(service: InferenceService, settings: Settings, observed: Observed) -> list[Object]:
    """Return the objects of the batch server; none without `spec.batch`."""
    batch = service.spec.batch
    if batch is None:
        return []
    pinned = pin(service, names.BATCH, batch_revision(service), _template(service, batch, settings), observed.revisions)
    paused = is_pausing(service, observed.deployments.get(names.BATCH))
    deployment = pods.deployment(service, names.BATCH, replicas=1, template=pinned.template, rolling=None, paused=paused)
    secret = secrets.build_random(service, names.random_secret(service, "batch"), names.BATCH, SECRET_KEY)
    return [secret, _service(service), *pinned.revisions, deployment]


def router_flags(service: InferenceService, settings: Settings) -> dict[str, object]:
    """Return the router's flags; none without `spec.batch`: routers of older images do not have them."""
    if service.spec.batch is None:
        return {}
    host = f"{names.deployment(service, names.BATCH)}.{service.namespace}.svc.{settings.cluster_domain}"
    return {"batch-url": f"http://{host}:{names.BATCH_PORT}", "batch-secret-file": SECRET_FILE}


def mounted_secret(service: InferenceService) -> list[Mounted]:
    """Return the volume of the shared secret; none without `spec.batch`."""
    if service.spec.batch is None:
        return []
    return [Mounted("batch-secret", SECRET_FILE.parent, pods.secret_source(names.random_secret(service, "batch")))]


def _service(service: InferenceService) -> Object:
    spec = {
        "type": "ClusterIP",
        "selector": names.selector(service, names.BATCH),
        "ports": [{"name": "http", "port": names.BATCH_PORT, "targetPort": names.BATCH_PORT, "protocol": "TCP", "appProtocol": "http"}],
    }
    return make_child(service, KUBE_SERVICES, names.deployment(service, names.BATCH), names.BATCH, spec=spec)


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
    mounted = [pods.TMP, *mounted_secret(service), *router_tls.mounted_certificate(service)]
    if batch.claim:
        mounted.append(Mounted("storage", STORAGE_MOUNT, {"persistentVolumeClaim": {"claimName": batch.claim}}, read_only=False))
    container = pods.make_container(
        settings,
        names.BATCH,
        router_image(service, settings),
        ["fairlead-batch"],
        pods.command_line(flags),
        mounted,
        env=[{"name": "HOME", "value": "/tmp"}, *_credentials(batch)],
        ports=[{"name": "admin", "containerPort": names.BATCH_PORT, "protocol": "TCP"}],  # the PodMonitor's and the probes' name
        resources=pods.CONTROL_RESOURCES,
        **pods.probes(startup_period=2, liveness_failures=6),
    )
    spec = pods.pod_spec(service, settings, names.BATCH, container, mounted)
    return pods.finish(service, names.BATCH, batch_revision(service), {"spec": spec}, batch.pod_template)


def _credentials(batch: Batch) -> list[Object]:
    if batch.secret_name is None:
        return []
    return [pods.secret_variable(key, batch.secret_name, key, optional=optional) for key, optional in _CREDENTIALS.items()]
