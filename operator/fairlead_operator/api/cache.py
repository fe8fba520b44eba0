"""`spec.model.cache`: where downloads are kept, and what may be said of the bucket that they come from."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.fields import ObjectName, Part, Quantity, refuse, rule, rules

_ONE = "spec.model.cache needs exactly one of claim, hostPath and size"
_STEPS = "spec.model.cache.hostPath must not go up by '..': name the folder itself"
DOWNLOADED = ("hf://", "s3://")


class ModelCache(Part):
    """Where downloaded weights are kept. One worker downloads a model into it, the others wait."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("[has(self.claim), has(self.hostPath), has(self.size)].filter(given, given).size() == 1", _ONE))
    )

    claim: ObjectName | None = Field(None, description="A PersistentVolumeClaim of the namespace, mounted read-write.")
    host_path: (
        Annotated[
            str,
            Field(
                max_length=1024,
                pattern=r"^/[A-Za-z0-9._/-]+$",
                json_schema_extra=rules(rule("!self.split('/').exists(step, step == '..')", _STEPS)),
            ),
        ]
        | None
    ) = Field(None, description="A folder of each node, there and writable for group 65532.")
    size: Quantity | None = Field(None, description="Room in each pod, gone with it.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [each for each in (self.claim, self.host_path, self.size) if each is not None]
        refuse(len(given) != 1, f"{_ONE} (got {len(given)})")
        refuse(".." in (self.host_path or "").split("/"), f"{_STEPS} (got {self.host_path})")
        return self


Endpoint = Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s@]+$")]
Region = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9-]+$")]


def from_bucket(uri: str) -> bool:
    return uri.startswith("s3://")


def downloaded(uri: str) -> bool:
    return uri.startswith(DOWNLOADED)
