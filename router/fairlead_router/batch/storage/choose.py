"""The storage that `--storage` names."""

from pathlib import Path
from urllib.parse import unquote

from fairlead_router.batch.storage.base import Storage


def create_storage(uri: str) -> Storage:
    """Return the storage of `file:///FOLDER` or `s3://BUCKET[/FOLDER]`."""
    if uri.startswith("file://"):
        from fairlead_router.batch.storage.folder import Folder

        return Folder(Path(unquote(uri.removeprefix("file://"))))
    from fairlead_router.batch.storage.bucket import Bucket  # imported late: its library takes 20 MB

    bucket, _, folder = uri.removeprefix("s3://").partition("/")
    return Bucket(bucket, folder.strip("/"))
