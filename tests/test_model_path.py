"""model.path: bundled names, folders, and what is neither."""

import hashlib
from pathlib import Path

import pytest

from specgen import packaged_models
from specgen.errors import ModelError
from specgen.model_path import bundled_heads, bundled_models, resolve_head, resolve_model
from specgen.packaged_models import PACKAGED, PackagedModel

SHA256 = hashlib.sha256(b"gguf").hexdigest()


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
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model") == tmp_path
    assert resolve_model("someone/some-model@v1.5") == tmp_path
    patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "tiktoken.model"]
    assert asked == [("someone/some-model", None, patterns), ("someone/some-model", "v1.5", patterns)]


def test_the_bundled_head_is_there() -> None:
    assert bundled_heads() == ["smollm2-135m-mtp"]
    assert {path.name for path in resolve_head("smollm2-135m-mtp").iterdir()} == {"config.json", "mtp.safetensors"}
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m-mtp'"):
        resolve_head("smollm2-135m")


class TestPackagedModel:
    """A model that another package carries."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setitem(
            PACKAGED, "tiny", PackagedModel("tiny_gguf_package", "tiny.gguf", SHA256, "tiny-gguf==1", "tiny")
        )
        return tmp_path / "cache" / "specgen"

    def install(self, tmp_path: Path, content: bytes | None) -> None:
        package = tmp_path / "site" / "tiny_gguf_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the package itself is never imported')")
        if content is not None:
            (package / "tiny.gguf").write_bytes(content)

    def test_without_its_package(self) -> None:
        with pytest.raises(ModelError, match=r"tiny-gguf==1, which is not installed") as caught:
            resolve_model("tiny")
        assert "pip install 'specgen[tiny]'" in str(caught.value)

    def test_another_version_of_the_file(self, tmp_path: Path) -> None:
        self.install(tmp_path, b"something else")
        with pytest.raises(ModelError, match="not the expected file"):
            resolve_model("tiny")

    def test_is_converted_once_and_left_whole_or_not_at_all(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.install(tmp_path, b"gguf")
        calls = []

        def convert(gguf: Path, folder: Path, model: PackagedModel) -> None:
            calls.append(gguf.name)
            if len(calls) == 1:
                raise ModelError("no")
            (folder / "config.json").write_text("{}")

        monkeypatch.setattr(packaged_models, "_convert", convert)
        with pytest.raises(ModelError):
            resolve_model("tiny")
        assert not list(cache.iterdir())
        assert resolve_model("tiny") == resolve_model("tiny") == cache / f"tiny-{SHA256[:12]}"
        assert calls == ["tiny.gguf"] * 2
        assert len(list(cache.iterdir())) == 1
