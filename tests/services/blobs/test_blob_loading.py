"""Which store a deployment uses: the blob service, or one that its settings name."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.errors import SettingsError
from tokenbus_services.blobs.client import HttpBlobs, loader_of
from tokenbus_services.settings import BlobSettings

HERE = __name__


class Own:
    """All that a loader must have."""

    async def store(self, content: object, media_type: str) -> None: ...

    async def load(self, blob_id: str) -> None: ...

    async def aclose(self) -> None: ...


def broken() -> Own:
    raise LookupError("no bucket")


def half() -> object:
    return object()


number = 3


async def test_it_is_the_blob_service_unless_the_settings_name_another() -> None:
    loader = loader_of(BlobSettings(), {})
    assert isinstance(loader, HttpBlobs)
    await loader.aclose()
    assert isinstance(loader_of(BlobSettings(loader=f"{HERE}:Own"), {}), Own)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no.such.module:create", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:nothing", "cannot be imported: AttributeError"),
        (f"{HERE}:number", "is not callable"),
        (f"{HERE}:broken", "LookupError: no bucket"),
        (f"{HERE}:half", "without store, load, aclose"),
    ],
)
def test_a_path_that_leads_to_no_loader_is_an_error_of_the_settings(path: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as e:
        loader_of(BlobSettings(loader=path), {})
    assert e.value.where == "blobs.loader"


@pytest.mark.parametrize("path", ["module", "module:", ":create", "a b:c", "a:b\n"])
def test_what_is_no_path_is_refused_by_the_settings(path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="loader"):
        msgspec.convert({"loader": path}, BlobSettings)
