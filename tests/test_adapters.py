"""Which directories pass as adapters, before any engine sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrt.engines.adapters import check_adapter_directory
from genrt.errors import InvalidAdapter


def directory(root: Path, **files: str) -> Path:
    """A directory with these files; ``__`` in a name stands for the dot."""
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


def test_configuration_and_safetensors_pass(tmp_path: Path) -> None:
    check_adapter_directory(
        directory(tmp_path, adapter_config__json="{}", adapter_model__safetensors="")
    )


def test_a_pickle_beside_the_safetensors_is_left_alone(tmp_path: Path) -> None:
    files = {"adapter_config__json": "{}", "adapter_model__safetensors": "", "optimizer__pt": ""}
    check_adapter_directory(directory(tmp_path, **files))


@pytest.mark.promise(number=25)
@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "pickle", "ckpt"])
def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path, suffix: str) -> None:
    files = {"adapter_config__json": "{}", f"adapter_model__{suffix}": ""}
    with pytest.raises(InvalidAdapter, match=rf"adapter_model\.{suffix}.*convert"):
        check_adapter_directory(directory(tmp_path, **files))


def test_a_missing_directory_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InvalidAdapter, match="is not a directory"):
            check_adapter_directory(path)


def test_missing_weights_and_configuration_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"no adapter_model\.safetensors"):
        check_adapter_directory(tmp_path)
    with pytest.raises(InvalidAdapter, match=r"no adapter_config\.json"):
        check_adapter_directory(directory(tmp_path, adapter_model__safetensors=""))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x80"])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        check_adapter_directory(directory(tmp_path, adapter_model__safetensors=""))
