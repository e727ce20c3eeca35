"""A checkpoint in a Hugging Face cache, laid out as `hf download` does."""

import shutil
from pathlib import Path


def snapshot_of(checkpoint: Path, cache: Path, name: str = "some/model", *, shared: bool = False) -> Path:
    """The snapshot that `main` names. shared: whether weights are in the store that repositories share."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copy(file, blob)
        if shared and file.suffix == ".safetensors":
            store = cache / "blobs" / blob.name[:2] / blob.name
            store.parent.mkdir(parents=True, exist_ok=True)
            blob.rename(store)
            blob.symlink_to(Path("../../blobs") / store.parent.name / store.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
