"""The `fairlead` command. Each subcommand has its own folder and is imported only when it runs (see `fairlead.program`)."""

from collections.abc import Sequence

from fairlead.program import Command, make_program, run_program

SERVE, INSPECT, MEASURE, TOOLS = "Serve", "Inspect", "Measure", "Tools"

COMMANDS = (
    Command("serve", "fairlead.serve.command", SERVE, "Serve one model on this machine."),
    Command("chat", "fairlead.chat.command", SERVE, "Talk to a model of any OpenAI-compatible server."),
    Command("up", "fairlead.local.up", SERVE, "Run a manifest on this machine without a cluster: pods are processes."),
    Command("demo", "fairlead.demo.command", SERVE, "Compare prefix-aware with random routing on two workers; ends by itself."),
    Command("status", "fairlead.tools.status", INSPECT, "Services, pods and workers on this machine, behind a router, or in a cluster."),
    Command("top", "fairlead.tools.live", INSPECT, "Live load of services and pods, on this machine or in a cluster."),
    Command("explain", "fairlead.tools.why", INSPECT, "Why a service is not ready, and what to do next."),
    Command("console", "fairlead.tools.web_console", INSPECT, "Open a service's web console, on this machine or in a cluster."),
    Command("verify", "fairlead.tools.verify", INSPECT, "Test a service: send one completion twice; the second must hit the prefix cache."),
    Command("check", "fairlead.check.command", INSPECT, "Whether and how a model can be served, and what memory holds; reads no weights."),
    Command("models", "fairlead.models.command", INSPECT, "The families of models that are served, and those that are refused."),
    Command("doctor", "fairlead.tools.doctor", INSPECT, "Check this machine for local mode: what is missing, and what to do."),
    Command("bench", "fairlead.bench.command", MEASURE, "Measure a server's latency and throughput."),
    Command("simulate", "fairlead.simulate.command", MEASURE, "Compare routing policies on a workload with modelled pods."),
    Command("schedule", "fairlead.schedule.command", MEASURE, "Draw a worker's steps: which requests prefilled or decoded, and how long."),
    Command("make-model", "fairlead.random_model.command", TOOLS, "Create a random-weight model with tokenizer and chat template."),
    Command("migrate", "fairlead.migrate.command", TOOLS, "Turn manifests of KServe, llm-d, vLLM and others into InferenceServices."),
    Command("keys", "fairlead.keys.command", TOOLS, "API keys of tenants, for a service's Secret."),
)
"""One line for each subcommand: name, module of its Typer (`app`), heading in `--help`, and summary."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit status: 0 success, 1 the command failed, 2 wrong argument or manifest, 130 interrupted."""
    run_program(make_program("Kubernetes-native LLM inference: local mode, benchmarks and tools.", COMMANDS), "fairlead", argv)
