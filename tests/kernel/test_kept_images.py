"""Images that mounts keep: by what they are known."""

from __future__ import annotations

import pytest

from wdsfs.kernel import kept_images
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.owner import Owner


def test_an_image_by_another_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may show other names for the same shards."""

    def key() -> str:
        options = ImageOptions(Owner(), b"/", (6, 15), False, "")
        return kept_images.key_of_plain([], "samples", "ext", False, False, options)

    before = key()
    assert key() == before
    monkeypatch.setattr(kept_images, "__version__", "another")
    assert key() != before
