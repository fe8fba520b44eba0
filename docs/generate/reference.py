"""Write the reference pages of the documentation site from the code: CRD fields, flags, metrics and chart values.

mkdocs calls these hooks at each build, so that these pages cannot differ from the code.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from fairlead_agent.config import AgentConfig
from fairlead_agent.metrics import AgentMetrics
from fairlead_agent.state import Agent
from fairlead_common.canary_split import SplitReport
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.engine_runtime import Runtime
from fairlead_operator.api.fields import changes_of
from fairlead_operator.children import engine_flags, worker
from fairlead_operator.children.model_source import model_source
from fairlead_operator.config import OperatorConfig
from fairlead_operator.process.metrics import Metrics as OperatorMetrics
from fairlead_router.batch.config import BatchConfig
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.config import RouterConfig
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics as RouterMetrics
from fairlead_router.metrics import WorkerGauges
from fairlead_router.routing.canary_split import canary_metrics
from fairlead_router.serving.promise_ledger import PromiseLedger
from fairlead_router.serving.slo_gate import promise_metrics
from fairlead_worker.api.engine.start_up import StartUp
from fairlead_worker.api.metrics.worker_metrics import Metrics as WorkerMetrics
from fairlead_worker.config import Limits, SpeculativeConfig, WorkerConfig
from fairlead_worker.config.options import TOPICS, flag_name, topic_of, variable_name
from fairlead_worker.ipc.messages import Drafts, Load, Ready
from fairlead_worker.model.catalog import COMPARED, PATHS, list_families, list_refused

ROOT = Path(__file__).parents[2]
GENERATED = "<!-- Generated from the code by docs/generate/reference.py. -->\n\n"


def cell(text: object) -> str:
    """Return `text` as one cell of a Markdown table."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    lines += [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]
    return "\n".join(lines) + "\n\n"


# --- CRD


def type_of(schema: Mapping[str, Any]) -> str:
    """Return the type of an OpenAPI schema in words: `integer`, `list of object`, `map of string`, or its enum values."""
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {type_of(schema['items'])}" if "items" in schema else "list"
    if isinstance(more := schema.get("additionalProperties"), Mapping):
        return f"map of {type_of(more)}"
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def bounds_of(schema: Mapping[str, Any]) -> str:
    """Return default and bounds of a schema, in one line."""
    parts = []
    if "default" in schema and not schema.get("properties"):  # an object's own section has the defaults of its fields
        parts.append(f"default `{json.dumps(schema['default'])}`")
    for key, words in (
        ("minimum", "at least"),
        ("maximum", "at most"),
        ("minLength", "characters at least"),
        ("maxLength", "characters at most"),
        ("minItems", "items at least"),
        ("maxItems", "items at most"),
    ):
        if key in schema:
            parts.append(f"{words} {schema[key]}")
    return "; ".join(parts)


def objects(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each object of a schema with its path, parents first."""
    if schema.get("properties"):
        yield path, schema
        for name, each in schema["properties"].items():
            yield from objects(f"{path}.{name}", each)
    elif schema.get("type") == "array":
        yield from objects(f"{path}[]", schema["items"])
    elif isinstance(more := schema.get("additionalProperties"), Mapping):
        yield from objects(f"{path}.*", more)


def section(path: str) -> str:
    """Return the anchor of an object's section: `spec.model.adapters[]` → `spec-model-adapters`."""
    return re.sub(r"[^\w]+", "-", path).strip("-").lower()


def linked_type_of(path: str, schema: Mapping[str, Any]) -> str:
    """Return the type of the field at `path`, with a link to the section that lists its own fields."""
    sections = [each for each, _ in objects(path, schema)]
    return f"[{type_of(schema)}](#{section(sections[0])})" if sections else type_of(schema)


def skeleton(name: str, schema: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a field and all fields below it as YAML: a default as its value, a field without one as a comment with its type."""
    if schema.get("properties"):
        yield f"{indent}{name}:"
        for each, field in schema["properties"].items():
            yield from skeleton(each, field, f"{indent}  ")
    elif "default" in schema:
        yield f"{indent}{name}: {json.dumps(schema['default']).strip(chr(34))}"
    else:
        yield f"{indent}# {name}: {type_of(schema).replace('`', '')}"


def crd_page() -> str:
    """Return the page of all fields of the InferenceService resource."""
    crd = yaml.safe_load((ROOT / "crds" / "fairlead.dev_inferenceservices.yaml").read_text())
    page = GENERATED + "# InferenceService\n\n"
    for version in crd["spec"]["versions"]:
        page += f"Group `{crd['spec']['group']}`, version `{version['name']}`. "
        page += f"`kubectl explain {crd['spec']['names']['plural']}` shows the same.\n\n"
        schema = version["schema"]["openAPIV3Schema"]
        page += "All fields, with their defaults or types. This is an overview and no manifest: `scaling`, `access`, `canary` and other "
        page += "sections without a default are absent unless you write them.\n\n```yaml\n"
        page += "\n".join(skeleton("spec", schema["properties"]["spec"])) + "\n```\n\n"
        for part in ("spec", "status"):
            for path, each in objects(part, schema["properties"][part]):
                required = set(each.get("required", ()))
                page += f"## {path} {{#{section(path)}}}\n\n{each.get('description', '')}\n\n"
                page += table(
                    ("Field", "Type", "Default and bounds", "Description"),
                    (
                        (
                            f"`{name}`" + (" (required)" if name in required else ""),
                            linked_type_of(f"{path}.{name}", field),
                            bounds_of(field),
                            field.get("description", ""),
                        )
                        for name, field in each["properties"].items()
                    ),
                )
    return page


# --- Engines


def engines_page() -> str:
    """Return the page that says which fields of `spec.engine` each runtime has, from what the operator does with them."""
    page = (
        GENERATED
        + "# Engines\n\nWhat `spec.engine.runtime` does with the other fields of `spec.engine`, each with another value than its\n"
    )
    page += "default: the flags of the engine, or why the field is refused. "
    page += "[Bring your own engine](../guides/engines.md) explains the rest.\n\n"
    rows = []
    for field, (value, *_) in changes_of(Engine):
        if field in ("runtime", "image", "env"):  # the columns, and fields of the container
            continue
        parent, _, name = field.rpartition(".")
        change = {parent: {name: value}} if parent else {name: value}
        if field == "nodes":
            change["tensorParallel"] = value
        rows.append((f"`{field}: {json.dumps(value)}`", *(use_of(change, runtime) for runtime in get_args(Runtime))))
    return page + table(("Field", *(f"`{runtime}`" for runtime in get_args(Runtime))), rows)


def use_of(change: Mapping[str, Any], runtime: str) -> str:
    """Return the flags that a change of `spec.engine` adds to the engine's command line, or the refusal."""

    def flags(engine: Mapping[str, Any]) -> list[str]:
        spec = {"model": {"uri": "hf://ORG/NAME"}, "engine": {"runtime": runtime, **engine}}
        service = InferenceService.parse({"metadata": {"name": "name"}, "spec": spec})
        build = worker.arguments if runtime == "Fairlead" else engine_flags.arguments
        return build(service, model_source(service.spec))

    try:
        added = [flag for flag in flags(change) if flag not in flags({})]
    except InvalidManifest as error:
        return f"refused: {str(error).partition(': ')[2].rpartition(' (got')[0]}"
    return ", ".join(f"`{flag}`" for flag in added) or ("an environment variable" if runtime == "Fairlead" else "the engine's own way")


# --- Flags

JSON_FLAGS: Mapping[str, type[BaseModel]] = {"--limits": Limits, "--speculative-config": SpeculativeConfig}
JSON_FLAGS_TEXT = {
    "--limits": "A JSON object or a list: `--limits max_connections=100,body_timeout=5`. The flag replaces the whole variable.\n\n",
    "--speculative-config": 'A JSON object with the keys of vLLM: `--speculative-config \'{"method": "ngram"}\'`.\n\n',
}


def annotation(kind: Any) -> str:
    """Return the type of a flag in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is not None and str(origin).endswith("Literal"):
        return ", ".join(f"`{each}`" for each in args)
    if hasattr(kind, "__metadata__"):
        return annotation(args[0])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "object"
    if origin is list:
        return f"list of {annotation(args[0])}"
    if args:
        return " or ".join(annotation(each) for each in args if each is not type(None))
    return {"bool": "boolean", "str": "string", "int": "integer", "float": "number"}.get(getattr(kind, "__name__", ""), str(kind))


def rows(fields: Mapping[str, FieldInfo], name_of: Callable[[str], str]) -> Iterator[tuple[object, ...]]:
    """Yield a row of a table for each field: name, value, default, description."""
    for name, field in fields.items():
        yield f"`{name_of(name)}`", annotation(field.annotation), default_of(field), field.description or ""


def default_of(field: FieldInfo) -> str:
    """Return the default of a field; empty for an object of several keys, which have their own."""
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default is None or isinstance(field.default, BaseModel) else f"`{json.dumps(field.default, default=str)}`"


def flags_page(command: str, config: type[BaseSettings]) -> str:
    """Return the page of a command's flags."""
    prefix = config.model_config.get("env_prefix", "")
    page = GENERATED + f"# {command}\n\n"
    page += f"Each flag is also an environment variable: `--log-level` is `{prefix}LOG_LEVEL`. Flags win over the environment.\n\n"
    return page + table(("Flag", "Value", "Default", "Description"), rows(config.model_fields, flag_name))


def worker_flags_page() -> str:
    """Return the page of the worker's flags by topic, the keys of its JSON flags, and the settings without a flag."""
    fields = WorkerConfig.model_fields
    page = GENERATED + "# fairlead-worker\n\n"
    page += "Each flag is also an environment variable: `--max-num-seqs` is `FAIRLEAD_MAX_NUM_SEQS`. Flags win over the environment.\n\n"
    for topic in TOPICS:
        chosen = {name: field for name, field in fields.items() if topic_of(field) == topic}
        page += f"## {topic}\n\n" + table(("Flag", "Value", "Default", "Description"), rows(chosen, flag_name))
    for name, model in JSON_FLAGS.items():
        page += f"## {name} {{#{name[2:]}}}\n\n" + JSON_FLAGS_TEXT[name]
        page += table(("Key", "Value", "Default", "Description"), rows(model.model_fields, str))
    page += "## Variables without a flag\n\n"
    page += "The operator and [local mode](../guides/local-mode.md) set most of them. In a manifest set the others in\n"
    page += "[`spec.podTemplate`](../guides/pod-settings.md).\n\n"
    chosen = {name: field for name, field in fields.items() if not topic_of(field)}
    return page + table(("Variable", "Value", "Default", "Description"), rows(chosen, variable_name))


# --- Metrics


def registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """Yield the registries of each process, as it makes them."""
    ready = Ready(max_model_len=64, page_size=16, pages=8, model_digest="d", vocabulary_size=10)
    engine: Any = SimpleNamespace(state=SimpleNamespace(load=Load(drafts=Drafts()), start_up=StartUp(0.0), ready=ready), serving=True)
    router = RouterMetrics(WorkerTable())
    router.watch_tenants(lambda: [("a", 1, 2)])
    router.watch_token_cache(TokenCache(1 << 20))
    router.watch(lambda: promise_metrics(PromiseLedger()))
    router.watch(lambda: canary_metrics(SplitReport()))
    router.registry.register(WorkerGauges(WorkerTable()))
    operator = OperatorMetrics()
    operator.register_sources(lambda: True, lambda: 0.0, lambda: 0, list)
    yield "Router", router.registry
    yield "Worker", WorkerMetrics(engine, "m").registry
    agent = Agent(AgentConfig(model="m"), "127.0.0.1:8000")
    yield "Agent", AgentMetrics(agent).registry
    yield "Batch server", BatchMetrics().registry
    yield "Operator", operator.registry


def metrics_page() -> str:
    """Return the page of all metrics."""
    page = GENERATED + "# Metrics\n\nEach process serves these at `GET /metrics`. "
    page += "A histogram has the series `_bucket` (label `le`), `_sum` and `_count`. "
    page += "The chart's PodMonitors add the labels `namespace`, `pod`, `service` and `component` "
    page += "([Monitor](../operate/monitor.md)).\n\n"
    for process, registry in registries():
        page += f"## {process}\n\n" + table(("Metric", "Type", "Labels", "Description"), metric_rows(registry))
    return page


def metric_rows(registry: CollectorRegistry) -> Iterator[tuple[object, ...]]:
    """Yield the metrics of a process by the names that Prometheus stores."""
    for collector in registry._collector_to_names:
        for metric in collector.collect():
            named = getattr(collector, "_labelnames", ()) or getattr(metric, "_labelnames", ())
            labels = named or dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            yield f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation


# --- Families of models


def models_page() -> str:
    """Return the page of the families that are served and refused, from the list that the exactness tests run."""
    page = GENERATED + "# Families of models\n\n`fairlead models` prints the same, and [Models](../guides/models.md) explains it.\n\n"
    for title, rows in (("Served", list_families()), ("Refused", list_refused())):
        page += f"## {title}\n\n" + table((name.replace("_", " ") for name in rows[0]), (row.values() for row in rows))
    return page + "## Paths and comparisons\n\n" + table(("Name", "Meaning"), (*PATHS.items(), *COMPARED.items()))


# --- Chart values


CHART_README = ROOT / "charts" / "fairlead" / "README.md"
CHART_INTRODUCTION = """# fairlead

The Helm chart of [Fairlead](https://github.com/fairlead/fairlead): CRD, operator, and a Valkey for the prefix index.

```
helm install fairlead oci://REGISTRY/charts/fairlead --version VERSION -n fairlead-system --create-namespace -f values.yaml
helm test fairlead -n fairlead-system --logs --timeout 960s
```

[Install with Helm](../../docs/operate/install.md) describes requirements, several releases, mirrors of registries and removal.
[Upgrade](../../docs/operate/upgrade.md) describes upgrades.

## Values

The chart refuses a value that is not in this table. `make chart-readme` generates this page from `values.yaml` and `values.schema.json`.

"""


def chart_readme() -> str:
    """Return the README of the Helm chart."""
    return CHART_INTRODUCTION + chart_table()


def chart_page() -> str:
    """Return the page of the Helm chart's values."""
    return GENERATED + "# Chart values\n\nThe chart refuses a value that is not in this table.\n\n" + chart_table()


def chart_table() -> str:
    schema = json.loads((ROOT / "charts" / "fairlead" / "values.schema.json").read_text())
    values = yaml.safe_load((ROOT / "charts" / "fairlead" / "values.yaml").read_text())

    def rows(path: str, schema: Mapping[str, Any], value: Any) -> Iterator[tuple[object, ...]]:
        if "$ref" in schema:
            schema = resolve(schema["$ref"]) | {key: each for key, each in schema.items() if key != "$ref"}
        if schema.get("properties"):
            for name, each in schema["properties"].items():
                yield from rows(f"{path}.{name}" if path else name, each, value.get(name) if isinstance(value, Mapping) else None)
        else:
            yield f"`{path}`", type_of(schema), f"`{json.dumps(value)}`", schema.get("description", "")

    def resolve(reference: str) -> dict[str, Any]:
        found: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        return dict(found)

    return table(("Value", "Type", "Default", "Description"), rows("", schema, values))


# --- Hooks

REPOSITORY = "https://github.com/fairlead/fairlead/blob/main/"
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:examples|charts|bench|release|tests|e2e)/[^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the placeholders in the repository by the generated pages."""
    for path, text in (
        ("reference/inferenceservice.md", crd_page()),
        ("reference/engines.md", engines_page()),
        ("reference/worker-flags.md", worker_flags_page()),
        ("reference/agent-flags.md", flags_page("fairlead-agent", AgentConfig)),
        ("reference/router-flags.md", flags_page("fairlead-router", RouterConfig)),
        ("reference/batch-flags.md", flags_page("fairlead-batch", BatchConfig)),
        ("reference/operator-flags.md", flags_page("fairlead-operator", OperatorConfig)),
        ("reference/metrics.md", metrics_page()),
        ("reference/models.md", models_page()),
        ("reference/chart-values.md", chart_page()),
    ):
        if placeholder := files.get_file_from_path(path):  # for readers of the repository
            files.remove(placeholder)
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links to files outside `docs/` lead to the repository."""
    return OUTSIDE.sub(rf"]({REPOSITORY}\1)", markdown)


if __name__ == "__main__":
    CHART_README.write_text(chart_readme())
