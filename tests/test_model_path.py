"""model.path: bundled names, folders, and what is neither."""

from pathlib import Path

import pytest

from specgen.errors import ModelError
from specgen.model_path import bundled_models, resolve_model


def test_the_bundled_model_is_there() -> None:
    assert bundled_models() == ["stories-7m"]
    folder = resolve_model("stories-7m")
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'stories-7m'"):
        resolve_model("stories7m")
    with pytest.raises(ModelError, match="no model folder"):
        resolve_model(str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "file"))


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match="no network at all") as caught:
        resolve_model("someone/some-model")
    assert "is the network there?" in str(caught.value)


def test_a_hub_id_is_fetched_without_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model") == tmp_path
    assert asked == [("someone/some-model", ["*.safetensors", "*.json", "tokenizer*"])]
