"""`helm test` in a real cluster: the chart creates a tiny model, and streams a completion twice. The second uses the cache."""

from e2e.system import System


def test_helm_test_tests_a_service_and_removes_it(installed: System) -> None:
    assert_helm_test_passes(installed)


def assert_helm_test_passes(system: System) -> None:
    """Run `helm test` of the release, and look for what it leaves."""
    done = system.cluster.helm("test", "fairlead", "-n", system.namespace, "--logs", "--timeout", "400s", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the second hit the cache of the first" in done.stdout + done.stderr
    selector = "app.kubernetes.io/component=test"
    left = system.get("inferenceservices.fairlead.dev,pods", "-l", selector, namespace=system.namespace)["items"]
    assert [entry["metadata"]["name"] for entry in left if "deletionTimestamp" not in entry["metadata"]] == []
