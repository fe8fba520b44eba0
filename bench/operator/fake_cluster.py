"""A fake Deployment controller and kubelets: every Deployment of ours gets pods with bodies and statuses like real ones.

Pods are made from the Deployment's template, so that they are as large as real ones (kwok does the same); they are ready at once.
"""

import asyncio
import uuid
from collections import defaultdict
from typing import Any

from bench.operator.api import DEPLOYMENTS, PODS, Api

NODES = 100
THEN = "2026-01-01T00:00:00Z"
REVISION = "fairlead.dev/revision"
LANES = 16  # Deployments that are worked on at the same time


class Player:
    """The fake cluster. `pods`: number of pods. There is one task for each Deployment with an unprocessed event."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._pods: dict[str, dict[str, str]] = defaultdict(dict)  # Deployment → pod → revision
        self._latest: dict[str, Any] = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._lanes = asyncio.Semaphore(LANES)
        self._numbers = iter(range(10**9))

    @property
    def pods(self) -> int:
        return sum(map(len, self._pods.values()))

    async def run(self) -> None:
        listed = await self._api.list(DEPLOYMENTS)
        async for kind, body in self._api.watch(DEPLOYMENTS, listed["metadata"]["resourceVersion"]):
            name = body["metadata"]["name"]
            self._latest[name] = body
            if kind != "DELETED" and name not in self._working:
                self._working[name] = asyncio.create_task(self._work(name))

    async def _work(self, name: str) -> None:
        try:
            while self._behind(body := self._latest[name]):
                async with self._lanes:
                    await self._settle(name, body)
        finally:
            del self._working[name]

    def _behind(self, body: Any) -> bool:
        return bool((body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"])

    async def _settle(self, name: str, body: Any) -> None:
        wanted, template = body["spec"]["replicas"], body["spec"]["template"]
        revision = template["metadata"]["labels"][REVISION]
        pods = self._pods[name]
        for pod in [pod for pod, of in pods.items() if of != revision] + list(pods)[wanted:]:
            if pods.pop(pod, None) is not None:
                await self._api.request("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")
        for _ in range(wanted - len(pods)):
            await self._start(name, body, revision)
        condition = {"status": "True", "lastUpdateTime": THEN, "lastTransitionTime": THEN}
        status = {
            "observedGeneration": body["metadata"]["generation"],
            **dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), wanted),
            "conditions": [
                {**condition, "type": "Available", "reason": "MinimumReplicasAvailable", "message": "Deployment has minimum availability."},
                {**condition, "type": "Progressing", "reason": "NewReplicaSetAvailable", "message": f"ReplicaSet {name} has progressed."},
            ],
        }
        answer = await self._api.patch(f"{DEPLOYMENTS}/{name}/status", {"status": status})
        if answer is not None and self._latest[name]["metadata"]["generation"] == answer["metadata"]["generation"]:
            self._latest[name] = answer

    async def _start(self, name: str, body: Any, revision: str) -> None:
        number = next(self._numbers)
        template = body["spec"]["template"]
        pod = f"{name}-{revision[:10]}-{uuid.uuid4().hex[:5]}"
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": f"{name}-{revision}",
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata = {"name": pod, "labels": template["metadata"]["labels"], "ownerReferences": [{**owner, "uid": str(uuid.uuid4())}]}
        spec = {**template["spec"], "nodeName": f"node-{number % NODES}"}
        await self._api.request("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self._pods[name][pod] = revision
        await self._api.patch(f"{PODS}/{pod}/status", {"status": running(spec, number)})


def running(spec: Any, number: int) -> dict[str, Any]:
    """Return the status that a kubelet writes for a pod whose containers are all ready."""
    ready = {"status": "True", "lastProbeTime": None, "lastTransitionTime": THEN}
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    containers = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": f"registry.example/{container['name']}@sha256:{uuid.uuid4().hex * 2}",
            "containerID": f"containerd://{uuid.uuid4().hex * 2}",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": THEN}},
        }
        for container in spec["containers"]
    ]
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "qosClass": "Burstable",
        "hostIP": f"192.168.1.{number % NODES}",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": THEN,
        "conditions": [{**ready, "type": type_} for type_ in conditions],
        "containerStatuses": containers,
    }
