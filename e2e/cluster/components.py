"""Configuration files and command lines of the cluster's components, with the reason for each unusual setting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

NODE = "node1"
NODE_ADDRESS = "10.244.0.1"
POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVER = f"https://{NODE_ADDRESS}:6443"
SERVER_NAMES = [
    *(f"DNS:{name}" for name in ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")),
    *(f"IP:{address}" for address in ("127.0.0.1", "10.96.0.1", NODE_ADDRESS)),
]


@dataclass(frozen=True)
class Layout:
    """The paths of one cluster. `store` is containerd's root, which outlives the cluster."""

    run: Path
    store: Path
    binaries: dict[str, Path]
    cni: Path
    cgroup: str
    pause_image: str
    node: str = NODE
    address: str = NODE_ADDRESS
    pods: str = POD_RANGE

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def certificates(self) -> Path:
        return self.run / "certificates"

    def kubeconfig(self, name: str) -> str:
        return str(self.certificates / f"{name}.kubeconfig")


def write_configuration(layout: Layout) -> None:
    """Write the files that the command lines below name."""
    run = layout.run
    (run / "containerd.toml").write_text(_containerd(layout))
    (run / "cni").mkdir()
    (run / "cni" / "10-fairlead.conflist").write_text(json.dumps(_network(layout)))
    (run / "kubelet.json").write_text(json.dumps(_kubelet(layout)))
    (run / "kube-proxy.json").write_text(json.dumps(_kube_proxy(layout)))
    (run / "resolv.conf").write_text("")
    (run / "Corefile").write_text(_corefile(layout))
    (run / "bootstrap.yaml").write_text(json.dumps(_bootstrap()))


def commands(layout: Layout) -> dict[str, list[str]]:
    """Return the command line of each process, in starting order."""
    run, certificates = layout.run, layout.certificates
    program = {name: str(path) for name, path in layout.binaries.items()}

    def file(name: str) -> str:
        return str(certificates / name)

    def credentials(name: str) -> list[str]:
        return [f"--{kind}kubeconfig={layout.kubeconfig(name)}" for kind in ("", "authentication-", "authorization-")]

    return {
        "containerd": ["containerd", "--config", str(run / "containerd.toml")],
        "etcd": [
            *("etcd", f"--data-dir={run / 'etcd'}", "--unsafe-no-fsync", "--logger=zap", "--name=etcd"),
            *("--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379"),
            *("--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380"),
            "--initial-cluster=etcd=http://127.0.0.1:2380",
        ],
        "kube-apiserver": [
            program["kube-apiserver"],
            "--etcd-servers=http://127.0.0.1:2379",
            *(f"--advertise-address={NODE_ADDRESS}", "--bind-address=0.0.0.0", "--secure-port=6443"),
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true"),
            *(
                f"--client-ca-file={file('ca.crt')}",
                f"--tls-cert-file={file('apiserver.crt')}",
                f"--tls-private-key-file={file('apiserver.key')}",
            ),
            *(f"--kubelet-client-certificate={file('admin.crt')}", f"--kubelet-client-key={file('admin.key')}"),
            "--kubelet-preferred-address-types=InternalIP",  # otherwise `kubectl logs` would resolve the node's name
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={file('service-accounts.pub')}",
            f"--service-account-signing-key-file={file('service-accounts.key')}",
        ],
        "kube-controller-manager": [
            program["kube-controller-manager"],
            *credentials("controller-manager"),
            *("--leader-elect=false", "--use-service-account-credentials=true", "--bind-address=127.0.0.1"),
            "--horizontal-pod-autoscaler-sync-period=5s",  # 15 s by default, which tests would wait for
            *(f"--root-ca-file={file('ca.crt')}", f"--service-account-private-key-file={file('service-accounts.key')}"),
        ],
        "kube-scheduler": [program["kube-scheduler"], *credentials("scheduler"), "--leader-elect=false", "--bind-address=127.0.0.1"],
        "kubelet": [
            program["kubelet"],
            *(f"--config={run / 'kubelet.json'}", f"--kubeconfig={layout.kubeconfig('kubelet')}"),
            *(f"--root-dir={run / 'kubelet'}", f"--cert-dir={run / 'kubelet-certificates'}"),
            *(f"--node-ip={layout.address}", f"--hostname-override={layout.node}"),
        ],
        "kube-proxy": [program["kube-proxy"], f"--config={run / 'kube-proxy.json'}"],
        "coredns": [program["coredns"], "-conf", str(run / "Corefile")],
    }


def _containerd(layout: Layout) -> str:
    """Return containerd's configuration. Without restrict_oom_score_adj and without CAP_SYS_RESOURCE no sandbox would start."""
    return f"""version = 2
root = "{layout.store}"
state = "{layout.run}/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
                    "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "{layout.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{layout.run}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{layout.pause_image}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{layout.cni}"
    conf_dir = "{layout.run}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def _network(layout: Layout) -> dict[str, object]:
    """Return the CNI configuration. With point-to-point links all traffic between pods is routed, so Services need no br_netfilter."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": layout.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(layout.run / "addresses"),
    }
    plugins = [{"type": "ptp", "ipMasq": False, "ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return {"cniVersion": "0.4.0", "name": "fairlead", "plugins": plugins}


def _kubelet(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": str(layout.certificates / "ca.crt")},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{layout.socket}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [NODE_ADDRESS],
        "resolvConf": str(layout.run / "resolv.conf"),
        "podLogsDir": str(layout.run / "pod-logs"),
        "volumePluginDir": str(layout.run / "volume-plugins"),
        "maxPods": 200,
        # A developer's disk may be nearly full. Imported images must stay: they cannot be pulled again.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "10s",
    }


def _kube_proxy(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": layout.kubeconfig("kube-proxy")},
        "mode": "nftables",
        "nftables": {"minSyncPeriod": "100ms"},  # by default a Service lags behind its endpoints by up to a second
        "hostnameOverride": layout.node,
        "clusterCIDR": POD_RANGE,
        "conntrack": {"maxPerCore": 0},  # the limit belongs to the whole machine
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _corefile(layout: Layout) -> str:
    """Return CoreDNS' configuration. It answers NXDOMAIN for names outside the cluster immediately: there is no other network."""
    return f"""cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {{
    bind {NODE_ADDRESS}
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {layout.kubeconfig("coredns")}
        ttl 1
    }}
}}
.:53 {{
    bind {NODE_ADDRESS}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def _bootstrap() -> dict[str, object]:
    """Return CoreDNS' role and binding. Kubernetes itself creates the roles of the other components."""
    read = ["list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": read},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read},
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "system:coredns"}, "rules": rules}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}],
    }
    return {"apiVersion": "v1", "kind": "List", "items": [role, binding]}
