"""Tar files of any members."""

import io
import tarfile


def write_tar(path, members, **options):
    """A tar file of (name, content) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
