"""JSON schemas of a running API server's kinds, from the OpenAPI v3 documents that it serves: strict, for kubeconform.

kubeconform's own schemas are on GitHub, and its converter reads OpenAPI v2, which has no schemas of CRDs' nullable and one-of fields.
"""

import json
from pathlib import Path
from typing import Any

from tests.operator.support.apiserver import ApiServer
from tests.operator.support.cluster import eventually

from fairlead_operator.api import API_VERSION

LOCATION = "{{ .Group }}_{{ .ResourceAPIVersion }}_{{ .ResourceKind }}.json"
"""Names of the files for kubeconform's -schema-location. It takes the version of the core group for its name."""
_REFERENCE = "#/components/schemas/"
_DROPPED = ("default", "example", "format", "properties")  # OpenAPI has other formats than JSON Schema


def write_schemas(server: ApiServer, folder: Path) -> int:
    """Write the schema of each kind into the folder. Returns how many there are."""
    eventually(lambda: f"apis/{API_VERSION}" in server.get("/openapi/v3")["paths"])  # published some time after the CRD is established
    count = 0
    for path, entry in server.get("/openapi/v3")["paths"].items():
        if not path.startswith(("api/", "apis/")):
            continue
        schemas = server.get(entry["serverRelativeURL"]).get("components", {}).get("schemas", {})
        definitions = {name: _to_json_schema(schema) for name, schema in schemas.items()}
        for name, schema in schemas.items():
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                file = folder / f"{kind['group'] or kind['version']}_{kind['version']}_{kind['kind'].lower()}.json"
                file.write_text(json.dumps({"$ref": f"#/definitions/{name}", "definitions": definitions}))
                count += 1
    return count


def _to_json_schema(schema: Any) -> Any:
    """Return a schema that also refuses fields that it does not name."""
    if isinstance(schema, list):
        return [_to_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _to_json_schema(value) for key, value in schema.items() if key not in _DROPPED}
    if "$ref" in schema:
        made["$ref"] = f"#/definitions/{schema['$ref'].removeprefix(_REFERENCE)}"
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: _to_json_schema(each) for name, each in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if schema.get("nullable") and "type" in schema:
        made["type"] = [schema["type"], "null"]
    return made
