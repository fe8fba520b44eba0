"""`spec.batch`: the Batch API, and where it stores files."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import ObjectName, Part, refuse, rule, ruled
from fairlead_operator.api.model import is_in_bucket
from fairlead_operator.api.pod_template import PodTemplate

_BUCKET = "spec.batch.secretName needs an s3:// storageURI: remove it"


class Batch(Part):
    """The Batch API."""

    model_config = ruled(rule("!has(self.secretName) || self.storageURI.startsWith('s3://')", _BUCKET))

    storage_uri: Annotated[
        str, Field(max_length=512, pattern=r"^(pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?|s3://[a-z0-9][a-z0-9.-]+)(/[A-Za-z0-9._=+-]+)*$")
    ] = Field(description="Folder of this service alone: pvc://CLAIM[/FOLDER] or s3://BUCKET[/FOLDER].")
    secret_name: ObjectName | None = Field(None, description="Secret with the AWS_ variables. Absent: the pod's role.")
    max_concurrency: int = Field(64, ge=1, le=4096, description="Most requests in flight.")
    pod_template: PodTemplate | None = Field(None, description="Merged last into the pod template.")

    def check_rules(self) -> None:
        refuse(self.secret_name is not None and not is_in_bucket(self.storage_uri), _BUCKET)

    @property
    def claim(self) -> str:
        """Return the name of the PersistentVolumeClaim; empty for a bucket."""
        return "" if is_in_bucket(self.storage_uri) else self.storage_uri.removeprefix("pvc://").partition("/")[0]

    @property
    def claim_folder(self) -> str:
        """Return the folder within the claim."""
        return self.storage_uri.removeprefix("pvc://").partition("/")[2]
